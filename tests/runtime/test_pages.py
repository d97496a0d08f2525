"""The simulated accelerator counts in pages, as a card does: what the executor reserves is what the
plan says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from campaign import sampled
from whole_pipelines import AMPLE, TinyPipeline, pixels

from graphrun.model.allocator import LARGE_PAGE_BYTES, ROUND_BYTES, Caching
from graphrun.profile.hardware import simulated
from graphrun.profile.problems import ProblemLimits, problem_of
from graphrun.runtime.devices.open import open_device
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.runtime.executor import PlanSession
from graphrun.runtime.host import Host
from graphrun.sim import Machine
from graphrun.solve.pages import smallest_budget
from graphrun.solve.solve import solve
from graphrun.units import MIB, round_up
from graphrun.verify.pages import limit_bytes

# Weights of the graph tiny over those of the model it stands for.
CASES = (
    ("flux-tiny", 4 * MIB, 0.0005),
    ("wan-tiny", 6 * MIB, 0.0005),
    ("sdxl-tiny", 8 * MIB, 0.001),
)


def page_bytes(scale: float) -> int:
    return round_up(int(LARGE_PAGE_BYTES * scale), ROUND_BYTES)


@pytest.mark.parametrize("case", sampled(CASES, CASES[:1], "pages"), ids=str)
def test_a_run_reserves_what_was_planned(
    case: tuple[str, int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each device gets the limit with which PyTorch's allocator refuses nothing of the plan."""
    name, budget, scale = case
    whole = TinyPipeline(name, {"steps": 2})
    problem = problem_of(
        whole.graph, whole._dry_run, simulated(scale), ProblemLimits(budget, AMPLE), whole.inputs
    )
    solution = solve(problem)
    unlimited = replace(solution.problem, budget_bytes=AMPLE)
    whole.device = open_device(unlimited)
    whole.host = Host.of_graph(whole.graph, solution.problem, whole.device, whole.modules)
    capped, limits = SimulatedDevice.capped, list[int]()
    monkeypatch.setattr(
        SimulatedDevice,
        "capped",
        lambda self, cap, limit: limits.append(limit) or capped(self, cap, limit),
    )
    for _ in range(2):  # the second run finds no page that the first one left
        trace = whole.run(unlimited, replace(solution.plan, problem=unlimited.digest))
        assert np.array_equal(pixels(trace.outputs["image"]), whole.image)
        planned_peaks = [slot.peak_bytes for slot in solution.simulation.slots]
        assert max(planned_peaks) <= budget
        for slot, peak in zip(trace.slots, planned_peaks, strict=True):
            assert slot.peak_bytes == peak, slot.name
        assert set(limits) == {limit_bytes(solution.chosen, solution.plan)}


@pytest.mark.sweep("pages")
@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("flux-tiny", 3.27e-4),
        ("sdxl-tiny", 3.53e-3),
        ("cogview4-tiny", 3.64e-4),
        ("wan-tiny", 2.78e-4),
    ],
)
def test_no_slot_reserves_more_than_was_planned_whatever_the_budget(
    name: str, scale: float
) -> None:
    """Where a tensor of a few KiB lies elsewhere than in the replay, the next large one may need
    pages that no budget has."""
    whole = TinyPipeline(name, {"steps": 2})
    ample = problem_of(
        whole.graph, whole._dry_run, simulated(scale), ProblemLimits(AMPLE, AMPLE), whole.inputs
    )
    minimum_bytes, weights = (
        smallest_budget(ample),
        sum(component.weight_bytes() for component in ample.components),
    )
    for share in (0.02, 0.2):
        problem = replace(ample, budget_bytes=minimum_bytes + int(share * weights))
        solution = solve(problem)
        whole.device = open_device(problem)
        whole.host = Host.of_graph(whole.graph, solution.problem, whole.device, whole.modules)
        trace = whole.run(solution.problem, solution.plan)
        for slot, report in zip(trace.slots, solution.simulation.slots, strict=True):
            assert slot.peak_bytes <= report.peak_bytes <= problem.budget_bytes, (share, slot.name)


@pytest.mark.sweep("pages")
def test_a_session_reserves_what_was_planned() -> None:
    whole = TinyPipeline("flux-tiny", {"steps": 2})
    limits = ProblemLimits(4 * MIB, AMPLE, runs=3)
    problem = problem_of(whole.graph, whole._dry_run, simulated(0.0005), limits, whole.inputs)
    solution = solve(problem)
    device: Any = open_device(replace(problem, budget_bytes=AMPLE))
    host = Host.of_graph(whole.graph, solution.problem, device, whole.modules)
    from graphrun.runtime.executor import stages_for

    with PlanSession(solution, host, device) as session:
        for run in range(3):
            trace = session.run(stages_for(solution.plan, whole.graph, whole.inputs, device, host))
            reports = solution.simulation.further_slots if run else solution.simulation.slots
            for slot, plan in zip(trace.slots, reports, strict=True):
                assert slot.peak_bytes == plan.peak_bytes, slot.name


def test_pages_without_tensors_are_returned_before_an_allocation_is_refused() -> None:
    """As PyTorch's allocator does. Pages of 20 KiB, room for three."""
    import torch

    machine = Machine(capacity_bytes=60 * 1024, pages=Caching(2**-10))
    with machine:
        tensors = [torch.empty(20 * 1024, dtype=torch.uint8, device="sim") for _ in range(2)]
        assert machine.peak_bytes == machine.used_bytes == 40 * 1024
        tensors.clear()
        assert machine.allocated_bytes == 0
        assert machine.used_bytes == 40 * 1024  # cached
        whole = torch.empty(60 * 1024, dtype=torch.uint8, device="sim")
        assert machine.used_bytes == 60 * 1024
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(20 * 1024, dtype=torch.uint8, device="sim")
        del whole
        machine.trim()
        assert machine.used_bytes == 0


def test_in_pages_a_plan_that_counts_tensors_may_be_refused() -> None:
    """The plan by bytes of tensors reserves more than its budget where pages count: the reason for
    counting them."""
    whole = TinyPipeline("flux-tiny", {"steps": 2})
    problem = problem_of(
        whole.graph, whole._dry_run, simulated(0.0005), ProblemLimits(4 * MIB, AMPLE), whole.inputs
    )
    blind = replace(problem, hardware=replace(problem.hardware, caching_allocator=False))
    from graphrun.verify.pages import reserved_bytes

    plan = solve(blind).plan
    applied = solve(blind).chosen
    assert (
        max(reserved_bytes(replace(applied, hardware=problem.hardware), plan))
        > problem.effective_bytes
    )
