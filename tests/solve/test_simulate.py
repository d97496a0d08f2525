"""`simulate`: time and bytes of plans small enough to calculate by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_problems import GIB, component, flux, problem
from test_plan_texts import PLANS, problem_of

from graphrun.errors import PlanError
from graphrun.model.choices import with_each_variant
from graphrun.model.plan import Plan, parse
from graphrun.model.problem import PhaseNumbers, Problem, Use
from graphrun.model.simulation import RepeatedSpans, Simulation
from graphrun.solve.solve import solve
from graphrun.verify.simulate import simulate
from graphrun.verify.timeline import Timeline

K = 1024


def example_problem(calls: int, copy_seconds: float, compute_seconds: float) -> Problem:
    dit = component("dit", ("big", 4, K), seconds_per_byte=copy_seconds / K)
    vae = component("vae", ("mid", 2, K), seconds_per_byte=copy_seconds / K)
    phases = (
        PhaseNumbers("denoise", 0, (Use("dit", calls, (calls,), (compute_seconds,)),), 10, 20, 30),
    )
    return problem(2**20, (dit, vae), phases)


def run(problem: Problem, text: str) -> Simulation:
    return simulate(problem, parse(f"plan x\n{text}"))


STREAMED = """slot denoise/0:dit load
slot denoise/0:dit first
  stream dit keep none ring buffer 2 KiB
  run
slot denoise/0:dit steady x2
  stream dit keep none ring buffer 2 KiB
  run
slot end"""


def test_streaming_bound_by_copies() -> None:
    # copy     0..3|3..6|6..9|9..12           then 8 copies of 3 s
    # compute      3..4 |6..7|9..10|12..13
    slots = run(example_problem(3, 3.0, 1.0), STREAMED).slots
    assert [slot.seconds for slot in slots] == [0, 13, 25, 0]
    assert [slot.stall_seconds for slot in slots] == [0, 9, 17, 0]


@pytest.mark.parametrize(
    ("copy_seconds", "compute_seconds", "seconds"),
    [
        (1.0, 3.0, [1 + 4 * 3.5, 1 + 8 * 3.5]),  # bound by compute: each block takes longer
        (3.0, 1.0, [4 * 3 + 1.5, 8 * 3 + 1.5]),  # by copies: only the last does
    ],
)
def test_reads_for_streamed_blocks_take_compute_from_the_same_cores(
    copy_seconds: float, compute_seconds: float, seconds: list[float]
) -> None:
    free = example_problem(3, copy_seconds, compute_seconds)
    instance = with_each_variant(free, lambda variant: replace(variant, lost_seconds=(0.5,)))
    slots = run(instance, STREAMED).slots[1:3]
    assert [slot.seconds for slot in slots] == seconds
    assert [slot.compute_seconds for slot in slots] == [
        4 * (compute_seconds + 0.5) * n for n in (1, 2)
    ]
    load_text = STREAMED.replace(
        "  stream dit keep none ring buffer 2 KiB\n  run\nslot denoise/0:dit steady",
        "  load dit all from pinned\n  run\nslot denoise/0:dit steady",
    ).replace("  stream dit keep none ring buffer 2 KiB\n", "")
    assert run(instance, load_text) == replace(run(free, load_text), problem=instance)


def test_streaming_bound_by_compute_runs_ahead_across_calls() -> None:
    # copy     0..1|1..2|    4..5|   7..8 ...  ring buffer space is free once compute with its block
    # is done compute      1..4 |4..7   |7..10 ...
    slots = run(example_problem(3, 1.0, 3.0), STREAMED).slots
    assert [slot.seconds for slot in slots] == [0, 13, 25, 0]


def test_compute_with_a_loaded_block_waits_only_for_that_copy() -> None:
    text = """slot denoise/0:dit load
      load dit big[0] from pinned
    slot denoise/0:dit first
      load dit big[1-3] from pinned
      load vae all from pinned
      run
    slot end
      evict dit all
      evict vae all"""
    simulation = run(example_problem(1, 2.0, 3.0), text)
    # copy     |d1 2|d2 4|d3 6|f 8|f 10
    # compute  |d0  3|d1 6|d2  9|d3 12
    assert [slot.seconds for slot in simulation.slots] == [2, 12, 0]
    assert [
        (e.component, e.detail, e.end_seconds)
        for e in simulation.events
        if e.kind == "load" and e.slot == 1
    ] == [
        ("dit", "big.1", 4),
        ("dit", "big.2", 6),
        ("dit", "big.3", 8),
        ("vae", "mid.0", 10),
        ("vae", "mid.1", 12),
    ]
    assert [(e.start_seconds, e.end_seconds) for e in simulation.events if e.kind == "run"] == [
        (2, 14)
    ], "a call begins with its first block"


def test_prefetch_is_interleaved_with_streamed_blocks_in_proportion() -> None:
    text = STREAMED.replace(
        "2 KiB\n  run\nslot end", "2 KiB\n  load vae all from pinned\n  run\nslot end"
    )
    simulation = run(example_problem(3, 1.0, 3.0), text)
    kinds = "".join(e.component[0] for e in simulation.events if e.slot == 2 and e.kind != "run")
    assert kinds == "ddvddvdddd", (
        "the first when the ring buffer is full, the second after half of the streamed bytes"
    )
    assert simulation.slots[2].seconds == 25, "overlapped: compute takes 24 s after the first copy"
    start_seconds = sum(slot.seconds for slot in simulation.slots[:2])
    assert [e.start_seconds - start_seconds for e in simulation.events if e.kind == "load"] == [
        2,
        8,
    ], "as soon as the copies before it end"


def test_a_prefetch_keeps_step_with_the_streamed_bytes_not_with_resident_blocks() -> None:
    text = """slot denoise/0:dit load
  load dit big[0-1] from pinned
slot denoise/0:dit first
  stream dit keep big[0-1] ring buffer 2 KiB
  run
slot denoise/0:dit steady x2
  stream dit keep big[0-1] ring buffer 2 KiB
  load vae all from pinned
  run
slot end"""
    simulation = run(example_problem(3, 1.0, 3.0), text)
    kinds = "".join(e.component[0] for e in simulation.events if e.slot == 2 and e.kind != "run")
    assert kinds == "ddvvdd", "both after half of the streamed bytes"


def test_the_slot_waits_for_its_prefetch() -> None:
    text = """slot denoise/0:dit load
      load dit all from pinned
    slot denoise/0:dit first
      load vae all from pinned
      run
    slot end
      evict dit all
      evict vae all"""
    assert [slot.seconds for slot in run(example_problem(1, 10.0, 1.0), text).slots] == [40, 20, 0]


def test_peak_bytes_of_a_slot_are_the_sum_of_its_terms() -> None:
    text = STREAMED.replace(
        "2 KiB\n  run\nslot end",
        "2 KiB\n  load vae all from pinned\n  run\nslot end\n  evict vae all",
    )
    simulation = run(example_problem(3, 1.0, 3.0), text)
    assert [slot.peak_bytes for slot in simulation.slots] == [10, 2 * K + 30, 2 * K + 2 * K + 40, 0]
    assert (
        simulation.slots[2].streamed_bytes,
        simulation.slots[2].loaded_bytes,
        simulation.moved_bytes,
    ) == (
        8 * K,
        2 * K,
        14 * K,
    )


def test_a_group_with_fewer_calls_runs_in_the_first_ones() -> None:
    problem = example_problem(3, 1.0, 3.0)
    fewer_calls = replace(
        problem, phases=(replace(problem.phases[0], uses=(Use("dit", 3, (2,), (3.0,)),)),)
    )
    assert run(fewer_calls, STREAMED).slots[2].compute_seconds == 12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "slot denoise/0:dit first\n  run\nslot end",
            "big.0 of dit is needed, but neither resident, loaded nor streamed",
        ),
        (
            "slot denoise/0:dit first\n  stream dit keep none ring buffer 1 KiB\n  run\n"
            "slot other/0:dit load",
            "no phase 'other/0:dit'",
        ),
        (
            "slot denoise/0:dit first\n  stream dit keep none ring buffer 1023 B\n  run",
            "does not fit a ring buffer of 1023 bytes",
        ),
        ("slot denoise/0:dit load\n  load dot all from pinned", "no component 'dot'"),
    ],
)
def test_a_plan_that_cannot_be_executed_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        run(example_problem(3, 1.0, 1.0), text)


@pytest.mark.parametrize("budget", [24, 12, 8, 5, 3])
def test_a_run_takes_at_least_its_copies_and_its_compute(budget: int) -> None:
    problem = flux(budget * GIB)
    solution = solve(problem)
    simulation = simulate(problem, solution.plan)
    for index, slot in enumerate(simulation.slots):
        copies = [e for e in simulation.events if e.slot == index and e.kind in ("load", "stream")]
        assert slot.seconds >= sum(e.end_seconds - e.start_seconds for e in copies) * (1 - 1e-9)
        assert slot.seconds >= slot.compute_seconds * (1 - 1e-9)
        assert sum(e.nbytes for e in copies) == slot.streamed_bytes + slot.loaded_bytes
        assert (
            slot.peak_bytes
            == slot.resident_bytes
            + slot.ring_buffer_bytes
            + slot.activation_bytes
            + slot.values_bytes
        )
    copying = sorted(
        (e.start_seconds, e.end_seconds) for e in simulation.events if e.kind in ("load", "stream")
    )
    assert all(
        end <= start + 1e-9 for (_, end), (start, _) in zip(copying, copying[1:], strict=False)
    ), "one copy at a time"
    stages = simulation.stages()
    assert [stage.stage for stage in stages] == ["encode", "denoise", "decode"]
    assert sum(stage.load_seconds + stage.run_seconds for stage in stages) == pytest.approx(
        simulation.seconds
    )
    assert max(stage.peak_bytes for stage in stages) == simulation.peak_bytes
    assert simulation.seconds <= 1.03 * solution.objective_seconds


def unskipped(problem: Problem, plan: Plan) -> Simulation:
    """Simulate every round of calls one by one, and every call block by block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Timeline, "_skip_repetitions", lambda *_: 0)
        patch.setattr(Timeline, "_simple_steps", lambda *_: None)
        return simulate(problem, plan)


def assert_same(first: Simulation, second: Simulation) -> None:
    assert first.seconds == pytest.approx(second.seconds, rel=1e-9)
    events = [
        sorted((e.slot, e.kind, e.component, e.detail, e.start_seconds) for e in simulation.events)
        for simulation in (first, second)
    ]
    assert [e[:4] for e in events[0]] == [e[:4] for e in events[1]]
    starts = [[e[4] for e in simulation_events] for simulation_events in events]
    assert starts[0] == pytest.approx(starts[1], rel=1e-9, abs=1e-12)


@given(
    st.integers(2, 40),
    st.floats(0.01, 4.0),
    st.floats(0.01, 4.0),
    st.integers(2, 6),
    st.integers(0, 3),
)
def test_rounds_that_repeat_earlier_ones_take_the_seconds_of_running_each(
    calls: int, copy_seconds: float, compute_seconds: float, depth: int, resident_count: int
) -> None:
    text = STREAMED.replace("2 KiB", f"{depth} KiB").replace("x2", f"x{calls - 1}")
    if resident_count:
        blocks = f"big[0-{resident_count - 1}]" if resident_count > 1 else "big[0]"
        text = text.replace(" load\n", f" load\n  load dit {blocks} from pinned\n", 1)
        text = text.replace("keep none", f"keep {blocks}")
    instance = example_problem(calls, copy_seconds, compute_seconds)
    plan = parse(f"plan x\n{text}")
    assert_same(simulate(instance, plan), unskipped(instance, plan))


@pytest.mark.long
@pytest.mark.parametrize(("name", "gib", "ram_gib"), PLANS)
def test_plans_of_models_take_the_seconds_of_running_every_round(
    name: str, gib: int, ram_gib: int
) -> None:
    instance = problem_of(name, gib, ram_gib)
    plan = solve(instance).plan
    simulation = simulate(instance, plan)
    streams = any(slot.part == "steady" and slot.streamed_bytes for slot in simulation.slots)
    repeats = any(isinstance(span, RepeatedSpans) for spans in simulation.spans for span in spans)
    assert repeats == streams
    assert_same(simulation, unskipped(instance, plan))
