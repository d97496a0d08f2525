"""Streaming keeps the result bitwise equal, stays within its planned bytes and time, and leaves
nothing behind."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from small_component import (
    ON,
    PREFETCH,
    THIN,
    WIDE,
    Small,
    device_of,
    plain,
    plan_of,
    run,
    small_hardware,
    small_problem,
    untouched,
    use,
)

from graphrun.errors import BrokenPlan
from graphrun.model.blocks import keep_order
from graphrun.model.hardware import Hardware
from graphrun.model.plan import Plan
from graphrun.model.problem import Problem
from graphrun.runtime.host import Host
from graphrun.trace import Event, Trace
from graphrun.verify.simulate import simulate


def kept(count: int, group: str, total: int) -> str:
    return f"{group}[{','.join(map(str, sorted(keep_order(total)[:count])))}]" if count else ""


def streamed(problem: Problem, wide: int, thin: int, ring_buffer_bytes: int, steady: int) -> Plan:
    """Loads ``wide`` and ``thin`` blocks of the two groups beforehand and streams the others
    through ``ring_buffer_bytes``."""
    keep = " ".join(filter(None, ("unblocked[0]", kept(wide, "wide", 4), kept(thin, "thin", 6))))
    stream = f"stream a keep {keep} ring buffer {ring_buffer_bytes} B" if wide + thin < 10 else ""
    return plan_of(
        problem,
        f"""
        slot s0/0:a load
          load a {keep} from pinned
        slot s0/0:a first
          {stream}
          run
        slot s0/0:a steady x{steady}
          {stream}
          run
        slot end
          evict a {keep}
        """,
    )


def follow_streamed(
    wide: int, thin: int, ring_buffer_bytes: int, hardware: Hardware = ON, calls: int = 3
) -> tuple[Problem, Plan, Trace]:
    module = Small()
    problem = small_problem({"a": module}, [[use("a", calls, hardware)]], hardware)
    plan, device = streamed(problem, wide, thin, ring_buffer_bytes, calls - 1), device_of(problem)
    trace = run(problem, plan, Host({"a": module}, problem, device), device, ["a"] * calls)
    assert torch.equal(trace.outputs["x"], plain({"a": Small()}, ["a"] * calls))
    assert untouched(module)
    assert device.allocated_bytes == trace.left_bytes == 0
    assert not any(event.nbytes for event in trace.events if event.kind == "block"), "no copies"
    return problem, plan, trace


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize("wide", range(5))
@pytest.mark.parametrize("thin", [0, 1, 3, 5, 6])
@pytest.mark.parametrize("depth", [1, 2])
def test_every_number_of_kept_blocks_gives_the_same_bits_in_the_planned_bytes(
    wide: int, thin: int, depth: int
) -> None:
    ring_buffer_bytes = depth * (WIDE if wide < 4 else THIN)
    problem, plan, trace = follow_streamed(wide, thin, ring_buffer_bytes)
    simulation = simulate(problem, plan)
    for expected, actual in zip(simulation.slots, trace.slots, strict=True):
        assert actual.peak_bytes <= expected.peak_bytes
        assert actual.calls == (
            0 if actual.part in ("load", "end") else 1 if actual.part == "first" else 2
        )
    assert trace.moved_bytes <= simulation.moved_bytes
    assert [e.detail for e in trace.events if e.kind == "stream"] == [
        e.detail for e in simulation.events if e.kind == "stream"
    ]


RINGS = [
    WIDE,
    WIDE + THIN,
    2 * WIDE,
    2 * WIDE + 256,
    3 * WIDE - 256,
    2 * WIDE + THIN,
    5 * WIDE + 3 * THIN,
    40 * WIDE,
]


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize("ring_buffer_bytes", RINGS)
@pytest.mark.parametrize("flops", [1e9, 2e10, 1e13], ids=["compute-bound", "even", "copy-bound"])
@pytest.mark.parametrize("start_seconds", [0.0, 50e-6])
def test_the_clock_shows_the_simulated_seconds_for_any_ring_buffer(
    ring_buffer_bytes: int, flops: float, start_seconds: float
) -> None:
    """``start_seconds`` of a copy: half of what the bytes of a wide block take."""
    hardware = replace(
        small_hardware(flops=flops), copy_start_seconds=start_seconds, launch_seconds=1e-7
    )
    problem, plan, trace = follow_streamed(1, 2, ring_buffer_bytes, hardware, calls=4)
    simulation = simulate(problem, plan)
    for expected, actual in zip(simulation.slots, trace.slots, strict=True):
        assert actual.end_seconds - actual.start_seconds == pytest.approx(
            expected.seconds, rel=0.03, abs=20e-6
        )


def test_a_copy_into_the_ring_buffer_waits_for_the_block_that_lay_there() -> None:
    """Ring buffer of two wide blocks, compute slow: the copy of block n + 2 cannot start before
    block n was computed."""
    hardware = small_hardware(flops=1e8)
    _, _, trace = follow_streamed(0, 6, 2 * WIDE, hardware, calls=2)
    seconds = use("a", 1, hardware).seconds[1]
    copies = [e for e in trace.events if e.kind == "stream" and e.slot == 2]
    assert [e.detail for e in copies] == [f"wide.{i}" for i in range(4)]
    for copy, next_copy in pairwise(copies[2:]):
        assert next_copy.start_seconds - copy.start_seconds >= seconds * 0.99


def test_with_room_for_one_block_copies_and_compute_take_turns() -> None:
    hardware = small_hardware(flops=1e9)
    _, _, trace = follow_streamed(0, 6, WIDE, hardware, calls=2)
    copies = [e for e in trace.events if e.kind == "stream" and e.slot == 2]
    seconds = use("a", 1, hardware).seconds[1] + (copies[0].end_seconds - copies[0].start_seconds)
    for copy, next_copy in pairwise(copies):
        assert next_copy.start_seconds - copy.start_seconds >= seconds * 0.99


def test_blocks_that_first_loads_and_keeps_come_in_call_order_with_the_streamed_ones() -> None:
    module = Small()
    problem = small_problem({"a": module}, [[use("a", 3, ON)]])
    plan = plan_of(
        problem,
        f"""
        slot s0/0:a load
          load a unblocked[0] wide[0] from pinned
        slot s0/0:a first
          stream a keep unblocked[0] wide[0,2] thin[3,5] ring buffer {2 * WIDE} B
          load a wide[2] thin[3,5] from pinned
          run
        slot s0/0:a steady x2
          stream a keep unblocked[0] wide[0,2] thin[3,5] ring buffer {2 * WIDE} B
          run
        slot end
          evict a unblocked[0] wide[0,2] thin[3,5]
        """,
    )
    device = device_of(problem)
    trace = run(problem, plan, Host({"a": module}, problem, device), device, ["a"] * 3)
    assert torch.equal(trace.outputs["x"], plain({"a": Small()}, ["a"] * 3))
    first = [e.detail for e in trace.events if e.slot == 1 and e.kind in ("load", "stream")]
    assert first == ["wide.1", "wide.2", "wide.3", *(f"thin.{i}" for i in range(6))]
    assert {e.detail for e in trace.events if e.slot == 1 and e.kind == "load"} == {
        "wide.2",
        "thin.3",
        "thin.5",
    }
    assert trace.slots[1].peak_bytes <= simulate(problem, plan).slots[1].peak_bytes


def prefetched(flops: float) -> tuple[Problem, Plan, Trace]:
    modules = {"a": Small(), "b": Small(1)}
    hardware = small_hardware(flops=flops)
    problem = small_problem(modules, [[use("a", 4, hardware)], [use("b", 1, hardware)]], hardware)
    plan, device = plan_of(problem, PREFETCH.format(ring_buffer=2 * WIDE)), device_of(problem)
    trace = run(problem, plan, Host(modules, problem, device), device, ["a"] * 4 + ["b"])
    assert torch.equal(trace.outputs["x"], plain({"a": Small(), "b": Small(1)}, ["a"] * 4 + ["b"]))
    return problem, plan, trace


def test_prefetch_is_spread_between_the_streamed_blocks() -> None:
    _, _, trace = prefetched(2e10)
    order = [
        "p" if e.kind == "load" else "s"
        for e in trace.events
        if e.slot == 2 and e.kind in ("load", "stream")
    ]
    assert order.count("p") == 11
    assert order.count("s") == 30
    assert order[0] == "s", "streamed blocks come first"
    for part in (order[:14], order[14:28], order[28:]):
        assert 2 <= part.count("p") <= 6
    assert "p p p" not in " ".join(order)


@pytest.mark.parametrize("flops", [2e9, 2e10, 1e13], ids=["compute-bound", "even", "copy-bound"])
def test_prefetch_beside_streaming_takes_the_simulated_time(flops: float) -> None:
    problem, plan, trace = prefetched(flops)
    for expected, actual in zip(simulate(problem, plan).slots, trace.slots, strict=True):
        assert actual.end_seconds - actual.start_seconds == pytest.approx(
            expected.seconds, rel=0.05, abs=30e-6
        )
        assert actual.peak_bytes <= expected.peak_bytes


def test_prefetch_without_streaming_is_issued_at_once_and_hides_behind_compute() -> None:
    modules = {"a": Small(), "b": Small(1)}
    hardware = small_hardware(flops=1e9)
    problem = small_problem(modules, [[use("a", 3, hardware)], [use("b", 1, hardware)]], hardware)
    plan = plan_of(
        problem,
        """
        slot s0/0:a load
          load a all from pinned
        slot s0/0:a first
          run
        slot s0/0:a steady x2
          load b all from pinned
          run
        slot s1/0:b load
          evict a all
        slot s1/0:b first
          run
        slot end
          evict b all
        """,
    )
    device = device_of(problem)
    trace = run(problem, plan, Host(modules, problem, device), device, ["a", "a", "a", "b"])
    copies = [e for e in trace.events if e.slot == 2 and e.kind == "load"]
    computed = [e for e in trace.events if e.slot == 2 and e.kind == "run"]
    assert len(copies) == 11
    assert copies[0].start_seconds == pytest.approx(computed[0].start_seconds)
    assert trace.slots[2].end_seconds == pytest.approx(computed[-1].end_seconds), (
        "the copies are hidden"
    )
    assert trace.slots[3].moved_bytes == 0


@pytest.mark.parametrize("flops", [2e9, 2e10, 1e13], ids=["compute-bound", "even", "copy-bound"])
def test_blocks_that_the_first_call_loads_wait_each_for_its_own_copy(flops: float) -> None:
    module, hardware = Small(), small_hardware(flops=flops)
    problem = small_problem({"a": module}, [[use("a", 1, hardware)]], hardware)
    plan = plan_of(
        problem,
        """
        slot s0/0:a load
          load a unblocked[0] from pinned
        slot s0/0:a first
          load a wide[0,1,2,3] thin[0,1,2,3,4,5] from pinned
          run
        slot end
          evict a all
        """,
    )
    device = device_of(problem)
    trace = run(problem, plan, Host({"a": module}, problem, device), device, ["a"])
    first = trace.slots[1].end_seconds - trace.slots[1].start_seconds
    unblocked, _, thin = use("a", 1, hardware).seconds
    assert first == pytest.approx(simulate(problem, plan).slots[1].seconds, abs=unblocked + 5e-6), (
        "the head computes last here"
    )
    copies = {e.detail: e for e in trace.events if e.kind == "load"}
    call = next(e for e in trace.events if e.kind == "run")
    assert list(copies) == [path for k in problem.components[0].groups for path in k.blocks]
    assert call.start_seconds == pytest.approx(copies[""].end_seconds), (
        "the call does not wait for its blocks, only they do"
    )
    assert call.end_seconds >= copies["thin.5"].end_seconds + thin


def test_two_components_that_alternate_stream_through_a_ring_buffer_each() -> None:
    modules = {"a": Small(), "b": Small(1)}
    problem = small_problem(modules, [[use("a", 3, ON), use("b", 3, ON)]])
    stream = "\n".join(
        f"stream {c} keep unblocked[0] wide[{i}] ring buffer {2 * WIDE} B"
        for c, i in (("a", 0), ("b", 2))
    )
    plan = plan_of(
        problem,
        f"""
        slot s0/0:a+b load
          load a unblocked[0] wide[0] from pinned
          load b unblocked[0] wide[2] from pinned
        slot s0/0:a+b first
          {stream}
          run
        slot s0/0:a+b steady x2
          {stream}
          run
        slot end
          evict a unblocked[0] wide[0]
          evict b unblocked[0] wide[2]
        """,
    )
    device = device_of(problem)
    trace = run(problem, plan, Host(modules, problem, device), device, ["a", "b"] * 3)
    assert torch.equal(trace.outputs["x"], plain({"a": Small(), "b": Small(1)}, ["a", "b"] * 3))
    assert [slot.calls for slot in trace.slots] == [0, 1, 2, 0]
    for expected, actual in zip(simulate(problem, plan).slots, trace.slots, strict=True):
        assert actual.peak_bytes <= expected.peak_bytes


@pytest.mark.parametrize(
    "skip",
    [
        "wide.1",
        "thin.5",
        "wide.0 wide.1 wide.2 wide.3",
        "thin.0 thin.2 thin.4 wide.3",
        "wide.0 wide.1 wide.2 wide.3 thin.0 thin.1 thin.2 thin.3 thin.4",
    ],
)
def test_a_call_that_leaves_blocks_out_is_served(skip: str) -> None:
    module, expected = Small(), Small()
    module.skip = expected.skip = frozenset(skip.split())
    problem = small_problem({"a": module}, [[use("a", 3, ON)]])
    device = device_of(problem)
    for ring_buffer_bytes in (WIDE, 2 * WIDE, 3 * WIDE + 256, 9 * WIDE):
        trace = run(
            problem,
            streamed(problem, 0, 0, ring_buffer_bytes, 2),
            Host({"a": module}, problem, device),
            device,
            ["a"] * 3,
        )
        assert torch.equal(trace.outputs["x"], plain({"a": expected}, ["a"] * 3))


def test_entry_points_that_use_a_part_each_share_one_ring_buffer() -> None:
    module = Small()
    problem = small_problem({"a": module}, [[use("a", 4, ON, (0, 2, 2))]])
    plan = plan_of(
        problem,
        f"""
        slot s0/0:a load
        slot s0/0:a first
          stream a keep none ring buffer {2 * WIDE} B
          run
        slot s0/0:a steady x3
          stream a keep none ring buffer {2 * WIDE} B
          run
        slot end
        """,
    )
    device = device_of(problem)
    calls = ["a.encode", "a.decode", "a.encode", "a.decode"]
    trace = run(problem, plan, Host({"a": module}, problem, device), device, calls)
    assert torch.equal(trace.outputs["x"], plain({"a": Small()}, calls))
    assert device.allocated_bytes == 0


@pytest.mark.parametrize("count", [0, 1])
def test_a_call_may_run_its_blocks_again_from_the_first(count: int) -> None:
    """`generate` runs them for each token; how many is known only at the end."""
    module = Small()
    problem = small_problem({"a": module}, [[use("a", 2, ON)]])
    device = device_of(problem)
    calls = ["a.generate", "a.generate"]
    trace = run(
        problem,
        streamed(problem, count, 0, 2 * WIDE, 1),
        Host({"a": module}, problem, device),
        device,
        calls,
    )
    assert torch.equal(trace.outputs["x"], plain({"a": Small()}, calls))
    assert device.allocated_bytes == 0


@pytest.mark.parametrize(
    ("thin", "message"), [(0, "thin.4 ran after thin.5"), (6, "wide.2 ran after wide.3")]
)
def test_blocks_out_of_the_plans_order_break_the_plan(thin: int, message: str) -> None:
    """``thin``: number of resident thin blocks."""
    module = Small()
    module.reverse = True
    problem = small_problem({"a": module}, [[use("a", 3, ON)]])
    device = device_of(problem)
    with pytest.raises(BrokenPlan, match=f"a: block {message}"):
        run(
            problem,
            streamed(problem, 0, thin, 2 * WIDE, 2),
            Host({"a": module}, problem, device),
            device,
            ["a"] * 3,
        )
    assert device.allocated_bytes == 0
    assert untouched(module)


def test_a_block_that_runs_inside_another_breaks_the_plan() -> None:
    module = Small()

    def run_next(_: torch.nn.Module, arguments: tuple[torch.Tensor]) -> None:
        module.wide[1](*arguments)

    handle = module.wide[0].expand.register_forward_pre_hook(run_next)
    problem = small_problem({"a": module}, [[use("a", 3, ON)]])
    device = device_of(problem)
    host = Host({"a": module}, problem, device)
    with pytest.raises(BrokenPlan, match="a: block wide.1 ran after wide.0"):
        run(problem, streamed(problem, 0, 0, 2 * WIDE, 2), host, device, ["a"] * 3)
    handle.remove()
    assert device.allocated_bytes == 0
    assert untouched(module)


def test_more_calls_than_planned_are_streamed_too() -> None:
    module = Small()
    problem = small_problem({"a": module}, [[use("a", 3, ON)]])
    device = device_of(problem)
    trace = run(
        problem,
        streamed(problem, 1, 1, 2 * WIDE, 2),
        Host({"a": module}, problem, device),
        device,
        ["a"] * 6,
    )
    assert torch.equal(trace.outputs["x"], plain({"a": Small()}, ["a"] * 6))
    assert trace.slots[2].calls == 5


def test_a_call_beyond_the_plan_copies_ahead_of_compute_too() -> None:
    """Launches take most of the time, so the host is never far ahead of compute."""
    module, hardware = Small(), replace(small_hardware(), launch_seconds=1e-4)
    problem = small_problem({"a": module}, [[use("a", 3, hardware)]], hardware)
    device = device_of(problem)
    trace = run(
        problem,
        streamed(problem, 0, 0, 2 * WIDE, 2),
        Host({"a": module}, problem, device),
        device,
        ["a"] * 4,
    )
    copies = [e for e in trace.events if e.kind == "stream"][-10:]
    blocks = [e for e in trace.events if e.kind == "block"][-10:]
    call = [e for e in trace.events if e.kind == "run"][-1]
    assert copies[0].start_seconds - call.start_seconds < 2 * hardware.launch_seconds, (
        "before compute with the unblocked weights"
    )
    for next_copy, block in zip(copies[1:4], blocks[:3], strict=True):
        assert next_copy.start_seconds < block.end_seconds


def test_nothing_is_prefetched_that_no_planned_call_needs() -> None:
    problem, plan, trace = follow_streamed(0, 0, 20 * WIDE, calls=2)
    passes: list[Event] = [e for e in trace.events if e.kind == "stream"]
    assert len(passes) == 20
    assert [e.slot for e in passes] == [1] * 10 + [2] * 10
