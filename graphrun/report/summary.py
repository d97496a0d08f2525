"""The JSON form of a plan, and of a run of it. All figures are in bytes or seconds; names match the plan screen."""

from __future__ import annotations

from typing import Any

from graphrun.model.simulation import Simulation, SlotReport
from graphrun.model.solution import Solution
from graphrun.trace import SlotTrace, Trace


def summarize(solution: Solution, solve_seconds: float | None, trace: Trace | None = None) -> dict[str, Any]:
    """What ``--json`` prints. With a ``trace`` it has measured figures too (``measured``): in all, per stage and per slot."""
    problem, simulation = solution.problem, solution.simulation
    summary: dict[str, Any] = {
        "feasible": True,
        "proven_optimal": solution.proven_optimal,
        "regime": "cold" if problem.runs == 1 else f"session of {problem.runs}",
        "predicted_seconds": simulation.seconds,
        "again_seconds": simulation.again_seconds if problem.runs > 1 else None,
        "total_seconds": simulation.total_seconds,
        "compute_seconds": simulation.compute_seconds,
        "bound_seconds": solution.bound_seconds,
        "objective_seconds": solution.objective_seconds,
        "solve_seconds": solve_seconds,
        "budget_bytes": problem.budget_bytes,
        "overhead_bytes": problem.budget_bytes - problem.effective_bytes,
        "reserve_bytes": problem.reserve_bytes,
        "directives": [f"{of.placement} {of.component}" for of in problem.directives],
        "allow": list(problem.allow),
        "variants": dict(solution.plan.variants),
        "options": dict(solution.plan.options),
        "order": list(solution.plan.order),
        "ram_bytes": problem.ram_bytes,
        "pinned_bytes": problem.pinned_bytes,
        "host_peak_bytes": simulation.host_peak_bytes,
        "pinned_peak_bytes": simulation.pinned_peak_bytes,
        "disk_bytes_read": sum(slot.disk_bytes_read for slot in simulation.slots),
        "peak_bytes": simulation.peak_bytes,
        "moved_bytes": simulation.moved_bytes,
        "digest": problem.digest,
        "graph": problem.graph,
        "hardware": problem.hardware.name,
        "until": problem.until,
        "precomputed": list(problem.precomputed),
        "settings": dict(problem.settings),
        "stages": stages(simulation, trace),
        "actions": str(solution.plan).splitlines(),
    }
    if trace is not None:
        summary["measured"] = {
            "peak_bytes": trace.peak_bytes,
            "host_peak_bytes": trace.host_bytes,
            "moved_bytes": trace.moved_bytes,
            "disk_bytes_read": trace.disk_bytes_read,
            "seconds": trace.seconds,
            "left_bytes": trace.left_bytes,
            "kept_plan": not broken_caps(solution, trace),
            "slots": [_beside(p, m) for p, m in trace.beside(simulation.slots)],
        }
    return summary


def _beside(planned: SlotReport, measured: SlotTrace) -> dict[str, Any]:
    return {
        "phase": measured.phase,
        "part": measured.part,
        "planned_peak_bytes": planned.peak_bytes,
        "peak_bytes": measured.peak_bytes,
        "moved_bytes": measured.moved_bytes,
        "planned_host_bytes": planned.host_bytes,
        "host_bytes": measured.host_bytes,
    }


def stages(simulation: Simulation, trace: Trace | None = None) -> list[dict[str, Any]]:
    """One row per stage; ``measured`` in it where there is a trace."""
    stage_of = {phase.name: phase.stage for phase in simulation.problem.phases}
    rows = []
    for report in simulation.stages():
        row: dict[str, Any] = {
            "name": report.stage,
            "peak_bytes": report.peak_bytes,
            "resident_bytes": report.resident_bytes,
            "streamed_bytes": report.streamed_bytes,
            "loaded_bytes": report.loaded_bytes,
            "activation_bytes": report.activation_bytes,
            "host_bytes": report.host_bytes,
            "seconds": report.load_seconds + report.run_seconds,
        }
        if trace is not None:
            slots = [slot for slot in trace.slots if stage_of.get(slot.phase) == report.stage]
            row["measured"] = {
                "peak_bytes": max(slot.peak_bytes for slot in slots),
                "moved_bytes": sum(slot.moved_bytes for slot in slots),
                "seconds": sum(slot.end_seconds - slot.start_seconds for slot in slots),
            }
        rows.append(row)
    return rows


def broken_caps(solution: Solution, trace: Trace) -> list[str]:
    """Slots whose measured peak exceeds the planned one, as ``phase part: measured > planned``; empty: the plan was kept.

    Where the remainder was planned again, peaks are compared with the budget.
    """
    if trace.notes:
        limit = solution.problem.effective_bytes
        return [f"{slot.phase} {slot.part}: {slot.peak_bytes} > {limit}" for slot in trace.slots if slot.peak_bytes > limit]
    return [
        f"{measured.phase} {measured.part}: {measured.peak_bytes} > {planned.peak_bytes}"
        for planned, measured in trace.beside(solution.simulation.slots)
        if measured.peak_bytes > planned.peak_bytes
    ]
