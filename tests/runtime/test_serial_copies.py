"""A device whose copies do not overlap compute: plans charge one after the other, and the solver
chooses for it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from small_component import WIDE, Small, device_of, plan_of, run, small_hardware, small_problem, use

import graphrun
from graphrun.api import without_overlap
from graphrun.model.problem import Problem
from graphrun.profile.hardware import simulated
from graphrun.runtime.host import Host
from graphrun.solve.solve import solve
from graphrun.verify.simulate import simulate

PLAN = """
    slot s0/0:a load
      load a unblocked[0] from pinned
    slot s0/0:a first
      stream a keep unblocked[0] ring buffer {ring_buffer} B
      run
    slot s0/0:a steady x5
      stream a keep unblocked[0] ring buffer {ring_buffer} B
      run
    slot end
      evict a unblocked[0]
"""


@pytest.mark.parametrize("rate", [2e8, 1e9, 1e10])
def test_a_run_takes_copies_and_compute_one_after_the_other(rate: float) -> None:
    hardware = replace(small_hardware(h2d=rate, flops=1e10), serial_copies=True)
    modules = {"a": Small()}
    problem = small_problem(modules, [[use("a", 6, hardware)]], hardware)
    plan, device = plan_of(problem, PLAN.format(ring_buffer=2 * WIDE)), device_of(problem)
    trace = run(problem, plan, Host(modules, problem, device), device, ["a"] * 6)
    report = simulate(problem, plan).slots[2]
    copy_seconds = trace.slots[2].moved_bytes / rate
    assert report.seconds == pytest.approx(report.compute_seconds + copy_seconds, rel=1e-6)
    slot = trace.slots[2]
    assert slot.end_seconds - slot.start_seconds == pytest.approx(report.seconds, rel=0.03)


def flux_problem(*, serial_copies: bool) -> Problem:
    hardware = replace(simulated(), serial_copies=serial_copies)
    return graphrun.estimate(graphrun.load("flux-tiny"), vram="3M", ram="8G", hardware=hardware)


@pytest.mark.sweep("more")
@pytest.mark.long
def test_a_plan_has_the_seconds_of_its_run_and_a_bound_below_them() -> None:
    solution = solve(flux_problem(serial_copies=True))
    overlapped = solve(flux_problem(serial_copies=False))
    assert solution.gap < 0.05
    assert solution.bound_seconds <= solution.simulation.seconds * (1 + 1e-9)
    assert solution.simulation.seconds > overlapped.simulation.seconds
    trace = graphrun.run(
        solution, graphrun.load("flux-tiny"), {"prompt": "a lighthouse"}, random_weights=True
    )
    assert trace.seconds == pytest.approx(solution.simulation.seconds, rel=0.05)


def test_problems_of_other_devices_have_no_such_field() -> None:
    plain, serial = flux_problem(serial_copies=False), flux_problem(serial_copies=True)
    assert "serial_copies" not in plain.to_json()["hardware"]
    assert plain.digest != serial.digest


def test_a_plan_made_again_without_overlap_keeps_the_precisions() -> None:
    """Outputs depend on them."""
    graph = graphrun.load("flux-dev")
    budgets: Any = {"vram": "8G", "ram": "64G", "hardware": "rtx4090"}
    permitted_problem = graphrun.estimate(graph, allow=["nf4"], **budgets)
    solution = replace(
        graphrun.plan(graphrun.estimate(graph, **budgets)), problem=permitted_problem
    )
    lines: list[str] = []
    device: Any = SimpleNamespace(serial_copies=True)
    result = without_overlap(solution, device, tell=lines.append)
    assert result.problem.hardware.serial_copies
    assert len(lines) == 1
    precisions = {c.name: c.variants[0].precision for c in solution.chosen.components}
    assert {c.name: c.variants[0].precision for c in result.chosen.components} == precisions
    assert (
        graphrun.plan(replace(permitted_problem, hardware=result.problem.hardware))
        .chosen.component("transformer")
        .variants[0]
        .precision
        != precisions["transformer"]
    )
