"""The screen of a call of an attached pipeline: planned and measured numbers, a row for each
phase."""

from __future__ import annotations

from graphrun.model.problem import PhaseNumbers, Problem
from graphrun.model.solution import Solution
from graphrun.report.screen import (
    beside_cells,
    calls_of,
    found_and_left,
    regime,
    streams_of,
    verdict_line,
)
from graphrun.report.table import Units, table
from graphrun.trace import Trace
from graphrun.units import show_seconds, show_size


def call_screen(solution: Solution, trace: Trace) -> str:
    """Planned and measured numbers of the last call: a row per phase, the whole call, and whether
    it stayed within the plan."""
    problem, simulation = solution.chosen, solution.simulation
    units, pairs = Units(simulation.peak_bytes, simulation.seconds), trace.beside(simulation.slots)
    head = ["phase", "calls", "weights", "peak planned", "measured", "moved planned", "measured"]
    rows = [[*head, f"{units.time} planned", "measured"]]
    for phase in problem.phases:
        own = [pair for pair in pairs if pair[0].phase == phase.name]
        rows.append(
            units.row(
                phase.name, calls_of(phase), _weights(problem, phase, solution), *beside_cells(own)
            )
        )
    rows.append(units.row("whole call", "", "", *beside_cells(pairs)))
    spare_bytes = problem.effective_bytes - trace.peak_bytes
    where = "the virtual clock" if trace.device == "sim" else "the card"
    return "\n".join(
        (
            f"{problem.graph}  hardware {problem.hardware.name} ({problem.hardware.basis})  {regime(problem)}",
            f"budget {show_size(problem.budget_bytes)}, {show_size(problem.effective_bytes)} of it for the call; peak"
            f" {show_size(trace.peak_bytes)}, headroom {show_size(spare_bytes)}",
            *found_and_left(solution),
            f"predicted {show_seconds(simulation.seconds)}, {show_seconds(simulation.compute_seconds)} of it compute;"
            f" took {show_seconds(trace.seconds)} on {where}",
            "",
            table(rows, left=(0, 2)),
            f" sizes in {units.size}; weights: whole, or how many blocks stay on the device while the others are streamed",
            verdict_line(trace),
        )
    )


def _weights(problem: Problem, phase: PhaseNumbers, solution: Solution) -> str:
    found = []
    for use in phase.uses:
        component = problem.component(use.component)
        stream = streams_of(solution.plan.slots, component.name).get(phase.name)
        if component.variants[0].device == "cpu":
            found.append("on the CPU")
        elif stream is not None:
            kept, total = (
                sum(len(blocks) for _, blocks in stream.keep or ()),
                sum(len(k.blocks) for k in component.groups),
            )
            found.append(f"{kept} of {total}")
        else:
            found.append("whole")
    return ", ".join(found)
