"""A session's warm runs are identical; any thread may submit, one run at a time, and everything is
freed at the end."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import graphrun
from graphrun.errors import InputError
from graphrun.solve.infeasible import Infeasible
from graphrun.verify.simulate import simulate

SMALL = {"height": 32, "width": 32, "steps": 2, "max_sequence_length": 16}
BUDGET = {"vram": "6M", "ram": "8G", "hardware": "sim"}


def test_further_runs_are_the_same_to_the_action_and_as_planned(
    flux: Any, cached_dry_runs: Path
) -> None:
    with graphrun.Session(
        flux, inputs=SMALL, cache=cached_dry_runs, reuse="none", **BUDGET
    ) as session:
        simulation = simulate(session.solution.problem, session.solution.plan)
        traces = session.map([{"prompt": f"prompt {number}"} for number in range(4)])
        assert (
            session.device.allocated_bytes > 0
            or simulation.further_moved_bytes == simulation.moved_bytes
        )
        tiers = session.close()
    events = [
        [(e.kind, e.component, e.slot, e.detail, e.nbytes) for e in trace.events]
        for trace in traces
    ]
    assert events[1] == events[2] == events[3]
    assert [trace.seconds for trace in traces[2:]] == pytest.approx(
        [traces[1].seconds] * 2, rel=1e-9
    )
    assert traces[1].seconds == pytest.approx(simulation.further_seconds, rel=0.02)
    assert traces[1].moved_bytes < traces[0].moved_bytes
    assert [tier.left_bytes for tier in tiers] == [0, 0, 0]
    cold = graphrun.plan(graphrun.estimate(flux, inputs=SMALL, cache=cached_dry_runs, **BUDGET))
    single_run = graphrun.run(cold, flux, {"prompt": "prompt 3"})
    assert traces[3].outputs["image"].tobytes() == single_run.outputs["image"].tobytes()


def test_threads_take_turns_and_each_gets_its_own_picture(flux: Any, cached_dry_runs: Path) -> None:
    active, max_active, pictures = 0, 0, dict[int, bytes]()

    def progress(slot: int, call: int, calls: int) -> None:
        nonlocal active, max_active
        active += 1
        max_active = max(max_active, active)
        active -= 1

    with graphrun.Session(
        flux, inputs=SMALL, cache=cached_dry_runs, reuse="none", **BUDGET
    ) as session:

        def ask(number: int) -> None:
            pictures[number] = (
                session.run({"prompt": f"prompt {number % 2}"}, progress=progress)
                .outputs["image"]
                .tobytes()
            )

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert max_active == 1
    assert pictures[0] == pictures[2] != pictures[1] == pictures[3]


@pytest.mark.sweep("more")
def test_after_a_failed_run_the_next_one_begins_anew(flux: Any, cached_dry_runs: Path) -> None:
    with graphrun.Session(
        flux, inputs=SMALL, cache=cached_dry_runs, reuse="none", **BUDGET
    ) as session:
        first = session.run({"prompt": "a"})

        def stop(slot: int, call: int, calls: int) -> None:
            if call:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            session.run({"prompt": "a"}, progress=stop)
        assert session.device.allocated_bytes == 0
        repeat = session.run({"prompt": "a"})
    assert repeat.moved_bytes == first.moved_bytes
    assert repeat.outputs["image"].tobytes() == first.outputs["image"].tobytes()


def encoders(trace: Any) -> int:
    """Bytes of text encoders that were copied to the device."""
    return sum(
        e.nbytes
        for e in trace.events
        if e.kind in ("load", "stream") and "text_encoder" in e.component
    )


@pytest.mark.sweep("more")
def test_other_sizes_are_planned_when_they_come_and_begin_with_an_empty_device(
    flux: Any, cached_dry_runs: Path
) -> None:
    with graphrun.Session(
        flux, inputs=SMALL, cache=cached_dry_runs, reuse="none", **BUDGET
    ) as session:
        small = [session.run({"prompt": "a"}) for _ in range(2)]
        large = [session.run({"prompt": "a", "height": 64}) for _ in range(2)]
        repeats = [session.run({"prompt": "a"}) for _ in range(2)]
        assert [tier.left_bytes for tier in session.close()] == [0, 0, 0]
    assert [trace.outputs["image"].size for trace in large] == [(32, 64), (32, 64)]
    for old_run, new_run in zip(small, repeats, strict=True):
        assert new_run.moved_bytes == old_run.moved_bytes, (
            "a first run, and one that finds what it left"
        )
        assert new_run.outputs["image"].tobytes() == old_run.outputs["image"].tobytes()
    problem = graphrun.estimate(
        flux, inputs={**SMALL, "height": 64}, runs=100, cache=cached_dry_runs, **BUDGET
    )
    solution = graphrun.plan(problem, cache=cached_dry_runs)
    planned_run = simulate(solution.problem, solution.plan)
    # split into layers: each as large as its group's largest
    run_counts = [
        planned_run.moved_bytes,
        planned_run.further_moved_bytes,
    ]
    assert all(
        0.99 * nbytes <= trace.moved_bytes <= nbytes
        for trace, nbytes in zip(large, run_counts, strict=True)
    )


@pytest.mark.sweep("more")
def test_s3_5_prompts_that_come_again_are_not_encoded_again(
    flux: Any, planned_before: Path
) -> None:
    prompts = [{"prompt": f"prompt {number % 3}", "seed": number} for number in range(12)]
    with graphrun.Session(flux, inputs=SMALL, cache=planned_before, **BUDGET) as session:
        traces = session.map(prompts)
    with graphrun.Session(
        flux, inputs=SMALL, cache=planned_before, reuse="none", **BUDGET
    ) as session:
        plain = session.map(prompts)
    encoder_moves = [encoders(trace) for trace in traces]
    assert all(encoder_moves[:3]), "each of the three is encoded"
    assert encoder_moves[3:] == [0] * 9, "and then never again"
    assert [t.outputs["image"].tobytes() for t in traces] == [
        t.outputs["image"].tobytes() for t in plain
    ]
    assert sum(t.seconds for t in traces) < sum(t.seconds for t in plain)


@pytest.mark.sweep("more")
def test_one_prompt_that_comes_again_is_not_worth_another_plan_until_it_has_cost_as_much(
    flux: Any, planned_before: Path
) -> None:
    with graphrun.Session(flux, inputs=SMALL, cache=planned_before, **BUDGET) as session:
        traces = [session.run({"prompt": "a", "seed": 0})]
        while encoders(traces[-1]) and len(traces) < 50:  # no run waits, so only past runs count
            traces.append(session.run({"prompt": "a", "seed": len(traces)}))
        whole, short = (session._plans[key] for key in session._plans)
        last_trace = traces[-1]
        assert not encoders(session.run({"prompt": "a", "seed": 99}))
        assert encoders(session.run({"prompt": "b"})), "what is not cached is encoded"
    gain_seconds = whole.further_seconds - short.further_seconds
    begin = short.solution.simulation.seconds - short.further_seconds
    assert 3 <= len(traces) < 50
    assert (len(traces) - 3) * gain_seconds < begin <= (len(traces) - 1) * gain_seconds + 1e-9
    assert (
        last_trace.moved_bytes
        <= short.solution.simulation.moved_bytes
        < whole.solution.simulation.moved_bytes
    )


@pytest.mark.sweep("more")
def test_what_is_no_input_is_refused_at_once_and_what_cannot_be_planned_with_its_run(
    flux: Any, cached_dry_runs: Path
) -> None:
    session = graphrun.Session(flux, inputs=SMALL, cache=cached_dry_runs, reuse="none", **BUDGET)
    with pytest.raises(InputError, match="unknown input 'hight'; did you mean 'height'"):
        session.submit({"hight": 64})
    future = session.submit({"height": 2048, "width": 2048})
    with pytest.raises(Infeasible):
        future.result()
    assert session.run({"prompt": "a"}).outputs
    session.close()
    with pytest.raises(InputError, match="closed"):
        session.run()
    with pytest.raises(InputError, match="hardware='cpu'"):
        graphrun.Session(flux, memory="2G", device="cpu")
    with pytest.raises(InputError, match="at least two runs"):
        graphrun.Session(flux, runs=1, **BUDGET)


@pytest.mark.sweep("more")
def test_a_run_that_runs_out_of_memory_is_planned_again_and_the_next_one_is_as_before(
    flux: Any, cached_dry_runs: Path
) -> None:
    with graphrun.Session(
        flux, inputs=SMALL, cache=cached_dry_runs, reuse="none", **BUDGET
    ) as session:
        first = session.run({"prompt": "a"})
        repeat = session.run({"prompt": "a"})
        session.device.machine.fail_allocation = 10
        short = session.run({"prompt": "a"})
        assert short.notes
        assert session.current is None, "the next run is a first one"
        repeats = [session.run({"prompt": "a"}) for _ in range(2)]
    assert [trace.moved_bytes for trace in repeats] == [first.moved_bytes, repeat.moved_bytes]
    assert {trace.outputs["image"].tobytes() for trace in (first, repeat, short, *repeats)} == {
        first.outputs["image"].tobytes()
    }


class Kept:
    """A journal in memory, of the state after ``done`` steps."""

    def __init__(self, done_steps: int) -> None:
        self.done_steps, self.states = done_steps, dict[str, Any]()

    def state(self, stage: str) -> Any:
        return self.states.get(stage)

    def wants(self, stage: str, step: int, steps: int) -> bool:
        return step == self.done_steps

    def save(self, stage: str, state: Any) -> None:
        self.states[stage] = state


@pytest.mark.sweep("more")
def test_a_run_resumes_the_loop_of_a_journal(flux: Any, cached_dry_runs: Path) -> None:
    inputs = {**SMALL, "steps": 5, "prompt": "a"}
    with graphrun.Session(
        flux, inputs=inputs, cache=cached_dry_runs, reuse="none", **BUDGET
    ) as session:
        whole = session.run(inputs, journal=(journal := Kept(3)))
        for _ in range(2):  # by the plan of a first run, and by that of further ones
            assert journal.states["denoise"].finished_steps == 3
            resumed = session.run(inputs, journal=journal)
            assert resumed.outputs["image"].tobytes() == whole.outputs["image"].tobytes()
            assert sum(slot.calls for slot in resumed.slots) < sum(
                slot.calls for slot in whole.slots
            )
            session.release()
            assert session.device.allocated_bytes == 0


@pytest.mark.sweep("more")
def test_plans_used_longest_ago_are_dropped(
    flux: Any, cached_dry_runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphrun.session.KEPT_PLANS", 1)
    with graphrun.Session(
        flux, inputs=SMALL, cache=cached_dry_runs, reuse="none", **BUDGET
    ) as session:
        first = session.run({"prompt": "a"})
        session.run({"prompt": "a", "height": 64})
        repeat = session.run({"prompt": "a"})
        assert len(session._plans) == 1
    assert repeat.outputs["image"].tobytes() == first.outputs["image"].tobytes()
