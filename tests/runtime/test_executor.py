"""Runs follow their plan and are repeatable; plans that do not fit the problem are refused before
anything is loaded."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_component import (
    ON,
    PREFETCH,
    WIDE,
    Small,
    calls_to,
    device_of,
    plain,
    plan_of,
    run,
    small_hardware,
    small_problem,
    use,
)

from graphrun.errors import BrokenPlan, InputError, PlanError
from graphrun.model.plan import Plan
from graphrun.model.problem import Problem, StageOption
from graphrun.runtime.devices.open import open_device
from graphrun.runtime.executor import follow, refuse_unfit
from graphrun.runtime.host import Host
from graphrun.runtime.run import _cast
from graphrun.trace import Trace
from graphrun.verify.solution import solution_of

CALLS = ["a"] * 4 + ["b"]


@pytest.fixture
def problem() -> Problem:
    return small_problem({"a": Small(), "b": Small(1)}, [[use("a", 4, ON)], [use("b", 1, ON)]])


@pytest.fixture
def plan(problem: Problem) -> Plan:
    return plan_of(problem, PREFETCH.format(ring_buffer=2 * WIDE))


def done(trace: Trace) -> list[tuple[Any, ...]]:
    return [(e.kind, e.component, e.slot, e.detail, e.nbytes) for e in trace.events]


def test_a_second_run_does_the_same_in_the_same_bytes(problem: Problem, plan: Plan) -> None:
    modules, device = {"a": Small(), "b": Small(1)}, device_of(problem)
    host = Host(modules, problem, device)
    first, second = (run(problem, plan, host, device, CALLS) for _ in range(2))
    assert done(first) == done(second)
    assert [s.peak_bytes for s in first.slots] == [s.peak_bytes for s in second.slots]
    assert torch.equal(first.outputs["x"], second.outputs["x"])


def test_modules_that_were_run_can_be_run_again_without_their_host(
    problem: Problem, plan: Plan
) -> None:
    modules, device = {"a": Small(), "b": Small(1)}, device_of(problem)
    expected = plain(modules, CALLS)
    for _ in range(2):
        assert torch.equal(
            run(problem, plan, Host(modules, problem, device), device, CALLS).outputs["x"], expected
        )
    assert torch.equal(plain(modules, CALLS), expected)


def test_a_trace_has_every_slot_and_every_event_in_seconds_from_its_start(
    problem: Problem, plan: Plan
) -> None:
    device = device_of(problem)
    host = Host({"a": Small(), "b": Small(1)}, problem, device)
    run(problem, plan, host, device, CALLS)
    trace = run(problem, plan, host, device, CALLS)
    assert [(s.phase, s.part) for s in trace.slots] == [(s.phase, s.part) for s in plan.slots]
    assert trace.slots[0].start_seconds == pytest.approx(0, abs=1e-4)
    assert all(0 <= e.start_seconds <= e.end_seconds <= trace.seconds + 1e-4 for e in trace.events)
    calls = [(e.detail, e.nbytes) for e in trace.events if e.kind == "run"]
    assert calls == [("forward", 0)] * 5
    assert [e.component for e in trace.events if e.kind == "evict"] == ["a"] + ["b"] * 11
    assert trace.moved_bytes == sum(e.nbytes for e in trace.events) - sum(
        e.nbytes for e in trace.events if e.kind == "evict"
    )
    assert trace.plan_digest == plan.digest


def test_progress_is_told_of_slots_and_calls(problem: Problem, plan: Plan) -> None:
    progress: list[tuple[int, int, int]] = []
    device = device_of(problem)
    run(
        problem,
        plan,
        Host({"a": Small(), "b": Small(1)}, problem, device),
        device,
        CALLS,
        progress=lambda *call: progress.append(call),
    )
    first, steady = [(0, 0, 0), (1, 0, 1), (1, 1, 1)], [(2, 0, 3), (2, 1, 3), (2, 2, 3), (2, 3, 3)]
    assert progress == [*first, *steady, (3, 0, 0), (4, 0, 1), (4, 1, 1), (5, 0, 0)]


def test_a_plan_of_another_problem_or_graph_is_refused(problem: Problem, plan: Plan) -> None:
    device = device_of(problem)
    host = Host({"a": Small(), "b": Small(1)}, problem, device)
    other = replace(problem, ram_bytes=1 << 39)
    with pytest.raises(
        PlanError, match=f"digest {plan.problem}, this one has {other.digest}: plan again"
    ):
        run(other, plan, host, device, CALLS)

    with pytest.raises(PlanError, match="graph 'small' with digest 0, this one has feed"):
        refuse_unfit(solution_of(problem, plan), graph_that_lists("feed"))


def graph_that_lists(digest: str, **permissions: str) -> Any:
    """A graph whose components and stages need ``permissions`` for every choice."""
    choices = {
        name: SimpleNamespace(name=name, sources=(), permission=lambda *_, needs=needs: needs)
        for name, needs in permissions.items()
    }
    return SimpleNamespace(digest=digest, components=choices, stages=[*choices.values()])


@pytest.mark.parametrize(
    ("permissions", "message"),
    [
        ({"a": "", "s0": "tiling"}, "b float32 .* needs nothing; the graph does not list it"),
        ({"a": "", "b": "cpu", "s0": "tiling"}, "b float32 .* nothing; by the graph, it needs cpu"),
        ({"a": "", "b": "", "s0": ""}, "s0 with tiles needs tiling; by the graph, it needs noth"),
        ({"a": "", "b": ""}, "s0 with tiles needs tiling; the graph does not list it"),
    ],
)
def test_a_choice_whose_permission_differs_from_the_graph_is_refused(
    problem: Problem, plan: Plan, permissions: dict[str, str], message: str
) -> None:
    solution = solution_of(problem, plan)
    refuse_unfit(solution, graph_that_lists("0", a="", b=""))
    option = StageOption("s0", "tiles", problem.phases[:1], "tiling")
    forged = replace(solution, problem=replace(problem, options=(option,)))
    with pytest.raises(PlanError, match=f"^by the plan, {message}.*: plan again$"):
        refuse_unfit(forged, graph_that_lists("0", **permissions))


def test_a_plan_that_breaks_a_rule_is_refused_with_the_rule_and_the_place(
    problem: Problem, plan: Plan
) -> None:
    device = device_of(problem)
    broken_plan = replace(plan, slots=(replace(plan.slots[0], actions=()), *plan.slots[1:]))
    reason = (
        r"stream a keep .*\n  \^ stream: keep and the blocks on the device differ in a unblocked"
    )
    with pytest.raises(PlanError, match=rf"may not be run:\nslot s0/0:a first\n(.*\n)*  {reason}"):
        run(
            problem,
            broken_plan,
            Host({"a": Small(), "b": Small(1)}, problem, device),
            device,
            CALLS,
        )
    assert device.machine.allocations == 0


def test_host_memory_of_another_problem_is_refused(problem: Problem, plan: Plan) -> None:
    device = device_of(problem)
    only = small_problem({"a": Small()}, [[use("a", 1, ON)]])
    with pytest.raises(InputError, match="built for another graph or other blocks"):
        run(problem, plan, Host({"a": Small()}, only, device), device, CALLS)


def test_the_machine_has_no_more_than_the_budget_and_its_own_capacity_afterwards(
    problem: Problem, plan: Plan
) -> None:
    device = device_of(problem)
    capacity_bytes = device.machine.capacity_bytes
    capacities = []
    host = Host({"a": Small(), "b": Small(1)}, problem, device)
    host.modules["a"].callback = lambda _: capacities.append(device.machine.capacity_bytes)
    run(problem, plan, host, device, CALLS)
    assert set(capacities) == {problem.effective_bytes}
    assert device.machine.capacity_bytes == capacity_bytes != problem.effective_bytes


@pytest.mark.parametrize("tensor_bytes", [1024, 8192])
def test_the_cap_leaves_room_for_tensors_of_others_which_are_outside_the_budget(
    problem: Problem, tensor_bytes: int
) -> None:
    """For the caller's up to the reserve, and for all of other code that shares the device."""
    hardware = replace(problem.hardware, context_bytes=256)
    problem = replace(problem, reserve_bytes=4096, hardware=hardware)
    device = device_of(problem)
    device.foreign_bytes = 512
    with device.capped(1 << 30):
        caller_tensor = device.allocate(tensor_bytes)
    capacities = []
    host = Host({"a": Small(), "b": Small(1)}, problem, device)
    host.modules["a"].callback = lambda _: capacities.append(device.machine.capacity_bytes)
    plan = plan_of(problem, PREFETCH.format(ring_buffer=2 * WIDE))
    trace = run(problem, plan, host, device, CALLS)
    assert trace.process_bytes == 0, "the process has other memory"
    assert set(capacities) == {problem.effective_bytes + min(tensor_bytes, 4096) + 512}
    del caller_tensor


def test_the_device_of_a_problem_is_opened_with_its_rates() -> None:
    device = open_device(small_problem({"a": Small()}, [], small_hardware(h2d=2e9, flops=3e9)))
    assert device.name == "sim"
    assert device.machine.h2d_bytes_per_second == 2e9  # type: ignore[attr-defined]
    assert device.machine.flops_per_second == 3e9  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="has no device 'tpu': install and import the package"):
        open_device(small_problem({"a": Small()}, [], replace(small_hardware(), device="tpu")))


def test_host_memory_that_a_run_leaves_behind_breaks_the_plan_and_goes_when_its_storage_does() -> (
    None
):
    modules = {"a": Small()}
    problem = small_problem(modules, [[use("a", 1, small_hardware())]])
    device = device_of(problem)
    host = Host(modules, problem, device)
    arena_bytes = device.arenas.nbytes("arenas")
    plan = plan_of(
        problem,
        "slot s0/0:a load\n  load a all from pinned\nslot s0/0:a first\n  run\nslot end\n  evict a "
        "all",
    )
    tensors: list[torch.Tensor] = []

    def work() -> dict[str, torch.Tensor]:
        tensors.append(device.arena(1024))
        return calls_to(host.modules, ["a"], device.torch_device)

    with pytest.raises(BrokenPlan, match="1.00 KiB stayed in arenas on the host"):
        follow(solution_of(problem, plan), host, device, work)
    tensors.clear()
    assert device.arenas.nbytes("arenas") == arena_bytes > 0
    modules.clear()
    host.modules.clear()
    host.residencies.clear()
    gc.collect()
    assert device.arenas.nbytes("arenas") == device.arenas.nbytes("pinned") == 0


def test_a_component_in_another_dtype_gets_and_returns_tensors_of_the_graphs() -> None:
    inputs = dict[str, Any]()

    def proceed(*args: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        inputs.update(args=[tensor.dtype for tensor in args], mask=mask.dtype)
        return [args[0] + 1, mask]

    call = _cast(proceed, torch.bfloat16, torch.float32)
    results = call(torch.ones(2, dtype=torch.bfloat16), mask=torch.ones(2, dtype=torch.bool))
    assert inputs == {"args": [torch.float32], "mask": torch.bool}
    assert [tensor.dtype for tensor in results] == [torch.bfloat16, torch.bool]
    assert results[0].tolist() == [2.0, 2.0]
