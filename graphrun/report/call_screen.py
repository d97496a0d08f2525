"""The screen of a call of an attached pipeline."""

from __future__ import annotations

from graphrun.model.problem import PhaseNumbers, Problem
from graphrun.model.solution import Solution
from graphrun.report.screen import (
    call_count,
    comparison_cells,
    phase_streams,
    residency_lines,
    verdict_line,
)
from graphrun.report.table import Units, table
from graphrun.report.verdicts import budget_text, clock_text, location
from graphrun.trace import Trace
from graphrun.units import show_seconds, show_size


def call_screen(solution: Solution, trace: Trace) -> str:
    """Return planned and measured numbers of the last call: a row for each phase, one for the whole
    call, then the verdict."""
    problem, simulation = solution.chosen, solution.simulation
    units, pairs = (
        Units(simulation.peak_bytes, simulation.seconds),
        trace.pairs_with(simulation.slots),
    )
    is_unified = problem.hardware.unified
    movement = "read" if is_unified else "moved"
    head = [
        "phase",
        "calls",
        "weights",
        "peak planned",
        "measured",
        f"{movement} planned",
        "measured",
    ]
    rows = [[*head, f"{units.time} planned", "measured"]]
    for phase in problem.phases:
        phase_pairs = [pair for pair in pairs if pair[0].phase == phase.name]
        rows.append(
            units.row(
                phase.name,
                call_count(phase),
                _weights(problem, phase, solution),
                *comparison_cells(phase_pairs),
            )
        )
    rows.append(units.row("whole call", "", "", *comparison_cells(pairs)))
    spare_bytes = problem.effective_bytes - trace.peak_bytes
    calls = "planned for one call" if problem.runs == 1 else f"planned for {problem.runs} calls"
    return "\n".join(
        (
            f"{problem.graph}  hardware {problem.hardware.name} ({problem.hardware.basis}) "
            f" {calls}",
            f"{budget_text(problem)}, "
            f"{show_size(problem.effective_bytes)} of it for the call; peak"
            f" {show_size(trace.peak_bytes)}, headroom {show_size(spare_bytes)}",
            *residency_lines(solution),
            f"predicted {show_seconds(simulation.seconds)}, "
            f"{show_seconds(simulation.compute_seconds)} of it compute;"
            f" took {show_seconds(trace.seconds)} {clock_text(trace.device)}",
            "",
            table(rows, left_columns=(0, 2)),
            f" sizes in {units.size}; weights: whole, or how many blocks stay "
            f"{location(unified=trace.unified)} while the others are streamed",
            verdict_line(trace),
        )
    )


def _weights(problem: Problem, phase: PhaseNumbers, solution: Solution) -> str:
    descriptions = []
    for use in phase.uses:
        component = problem.component(use.component)
        stream = phase_streams(solution.plan.slots, component.name).get(phase.name)
        if component.variants[0].device == "cpu":
            descriptions.append("on the CPU")
        elif stream is not None:
            resident_count, total = (
                sum(len(blocks) for _, blocks in stream.keep or ()),
                sum(len(k.blocks) for k in component.groups),
            )
            descriptions.append(f"{resident_count} of {total}")
        else:
            descriptions.append("whole")
    return ", ".join(descriptions)
