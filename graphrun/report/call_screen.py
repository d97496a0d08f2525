"""The screen of a call of an attached pipeline."""

from __future__ import annotations

from graphrun.model.problem import PhaseNumbers, Problem
from graphrun.model.solution import Solution
from graphrun.report.screen import (
    Look,
    comparison_cells,
    comparison_head,
    listed,
    phase_streams,
    residency_lines,
    verdict_line,
)
from graphrun.report.table import Units, table
from graphrun.report.verdicts import budget_text, clock_text
from graphrun.trace import Trace
from graphrun.units import show_seconds, show_size


def call_screen(solution: Solution, trace: Trace) -> str:
    """Return planned and measured numbers of the last call: a row for each phase, one for the whole
    call, then the verdict."""
    problem, simulation, look = solution.chosen, solution.simulation, Look()
    units = Units(simulation.peak_bytes, simulation.seconds)
    pairs = trace.pairs_with(simulation.slots)
    movement = "read" if problem.hardware.unified else "moved"
    rows = [comparison_head("phase", units, movement=movement)]
    for phase in problem.phases:
        phase_pairs = [pair for pair in pairs if pair[0].phase == phase.name]
        rows.append(units.row(phase.name, *comparison_cells(phase_pairs)))
    rows.append(units.row("whole call", *comparison_cells(pairs)))
    spare_bytes = problem.effective_bytes - trace.peak_bytes
    calls = "planned for one call" if problem.runs == 1 else f"planned for {problem.runs} calls"
    streamed = listed(
        " not all weights are resident:",
        [
            f"{phase.name} ({text})"
            for phase in problem.phases
            if (text := _weights(problem, phase, solution))
        ],
    )
    return "\n".join(
        (
            look.folded(
                f"{problem.graph}  hardware {problem.hardware.name} ({problem.hardware.basis})  "
                f"{calls}",
                f"{budget_text(problem)}, {show_size(problem.effective_bytes)} of it for the call; "
                f"peak {show_size(trace.peak_bytes)}, headroom {show_size(spare_bytes)}",
                *residency_lines(solution),
                f"predicted {show_seconds(simulation.seconds)}, "
                f"{show_seconds(simulation.compute_seconds)} of it compute; took "
                f"{show_seconds(trace.seconds)} {clock_text(trace.device)}",
            ),
            "",
            table(rows, left_columns=(0,), width=look.width),
            f" sizes in {units.size}",
            look.folded(*streamed, verdict_line(trace)),
        )
    )


def _weights(problem: Problem, phase: PhaseNumbers, solution: Solution) -> str:
    """Return how many blocks are resident while others are streamed, and which components compute
    on the CPU; "" if all weights are resident."""
    descriptions = []
    for use in phase.uses:
        component = problem.component(use.component)
        stream = phase_streams(solution.plan.slots, component.name).get(phase.name)
        if component.variants[0].device == "cpu":
            descriptions.append("on the CPU")
        elif stream is not None:
            resident_count = sum(len(blocks) for _, blocks in stream.keep or ())
            total = sum(len(group.blocks) for group in component.groups)
            descriptions.append(f"{resident_count} of {total} {component.granularity}")
    return ", ".join(descriptions)
