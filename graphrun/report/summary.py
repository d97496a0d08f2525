"""The JSON form of a plan and of a run, in bytes and seconds, with names as on the plan screen."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from graphrun.model.problem import Problem
from graphrun.model.simulation import Simulation
from graphrun.model.solution import Solution
from graphrun.model.splits import computing_on
from graphrun.trace import Trace


def summarize(
    solution: Solution, solve_seconds: float | None, trace: Trace | None = None
) -> dict[str, Any]:
    """Return the data that ``--json`` prints. With a ``trace``, ``measured`` has measured figures:
    in total, per stage and per slot."""
    problem, plan, simulation = solution.problem, solution.plan, solution.simulation
    unified = problem.hardware.unified
    summary: dict[str, Any] = {
        "feasible": True,
        "proven_optimal": solution.proven_optimal,
        "regime": "cold" if problem.runs == 1 else f"session of {problem.runs}",
        "predicted_seconds": simulation.seconds,
        "again_seconds": simulation.further_seconds if problem.runs > 1 else None,
        **figures(simulation, "total_seconds", "compute_seconds"),
        **figures(solution, "bound_seconds", "objective_seconds"),
        "solve_seconds": solve_seconds,
        "budget_bytes": problem.budget_bytes,
        "overhead_bytes": problem.budget_bytes - problem.effective_bytes,
        "reserve_bytes": problem.reserve_bytes,
        "directives": directives(problem),
        "allow": list(problem.allow),
        "variants": dict(plan.variants),
        "options": dict(plan.options),
        "order": list(plan.order),
        **_host(solution),
        "disk_bytes_read": sum(slot.disk_bytes_read for slot in simulation.slots),
        **figures(simulation, "peak_bytes", "moved_bytes"),
        **figures(problem, "digest", "graph"),
        "hardware": problem.hardware.name,
        **({"secondaries": _secondaries(solution)} if problem.secondaries else {}),
        "until": problem.until,
        "precomputed": list(problem.precomputed),
        "settings": dict(problem.settings),
        "stages": stages(simulation, trace),
        "actions": str(plan).splitlines(),
    }
    if trace is not None:
        summary["measured"] = {
            "peak_bytes": trace.peak_bytes,
            **({} if unified else {"host_peak_bytes": trace.host_bytes}),
            **figures(trace, "moved_bytes", "disk_bytes_read", "seconds", "left_bytes"),
            "kept_plan": not trace.overruns,
            "verdict": trace.verdict,
            "overruns": [asdict(overrun) for overrun in trace.overruns],
            "slots": [
                {
                    **figures(slot, "phase", "part"),
                    "planned_peak_bytes": report.peak_bytes,
                    **figures(slot, "peak_bytes", "moved_bytes"),
                    **(
                        {}
                        if unified
                        else {
                            "planned_host_bytes": report.host_bytes,
                            "host_bytes": slot.host_bytes,
                        }
                    ),
                }
                for report, slot in trace.pairs_with(simulation.slots)
            ],
        }
    return summary


def _host(solution: Solution) -> dict[str, Any]:
    """Return the budgets and peaks of host RAM; on a CPU, the process's own part of the budget."""
    problem, hardware = solution.problem, solution.problem.hardware
    if hardware.unified:
        process = figures(hardware, "context_bytes", "workspace_bytes")
        return {"process": {**process, "kernel_bytes": problem.kernel_bytes}}
    return {
        **figures(problem, "ram_bytes", "pinned_bytes"),
        **figures(solution.simulation, "host_peak_bytes", "pinned_peak_bytes"),
    }


def _secondaries(solution: Solution) -> list[dict[str, Any]]:
    """Return each secondary device with its budget, its peak and its components."""
    simulation = solution.simulation
    return [
        {
            "hardware": secondary.hardware.name,
            **figures(secondary, "budget_bytes", "effective_bytes"),
            "peak_bytes": max(slot.secondary_peaks[number - 1] for slot in simulation.all_slots),
            "components": computing_on(solution.chosen, number),
        }
        for number, secondary in enumerate(solution.problem.secondaries, 1)
    ]


def figures(source: object, *names: str) -> dict[str, Any]:
    """Return the attributes ``names`` of ``source``; they have the same names in JSON."""
    return {name: getattr(source, name) for name in names}


def directives(problem: Problem) -> list[str]:
    """Return the directives of ``problem`` as text, such as ``keep vae``."""
    return [f"{directive.placement} {directive.component}" for directive in problem.directives]


def stages(simulation: Simulation, trace: Trace | None = None) -> list[dict[str, Any]]:
    """Return one row per stage, with ``measured`` if there is a trace."""
    stage_of = {phase.name: phase.stage for phase in simulation.problem.phases}
    sizes = (
        "peak_bytes",
        "resident_bytes",
        "streamed_bytes",
        "loaded_bytes",
        "activation_bytes",
        *(() if simulation.problem.hardware.unified else ("host_bytes",)),
    )
    rows = []
    for report in simulation.stages():
        row = {
            "name": report.stage,
            **figures(report, *sizes),
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
