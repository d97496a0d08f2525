"""The screen of a call of an attached pipeline: planned and measured numbers, a row for each phase."""

from __future__ import annotations

from graphrun.model.plan import Slot, Stream
from graphrun.model.problem import PhaseNumbers, Problem
from graphrun.model.simulation import SlotReport
from graphrun.model.solution import Solution
from graphrun.report.screen import regime
from graphrun.report.summary import broken_caps
from graphrun.report.table import scale_of, seconds_of, size, table
from graphrun.trace import SlotTrace, Trace
from graphrun.units import show_seconds, show_size

HEAD = ["phase", "calls", "weights", "peak planned", "measured", "moved planned", "measured"]
Pair = tuple[SlotReport, SlotTrace]


def call_screen(solution: Solution, trace: Trace) -> str:
    """Planned and measured numbers of the last call: a row per phase, the whole call, and whether it stayed within the plan."""
    problem, simulation = solution.chosen, solution.simulation
    unit, scale = scale_of(simulation.peak_bytes)
    clock, second = seconds_of(simulation.seconds)
    pairs = trace.beside(simulation.slots)
    rows = [[*HEAD, f"{clock} planned", "measured"]]
    for phase in problem.phases:
        own = [pair for pair in pairs if pair[0].phase == phase.name]
        slots = [slot for slot in solution.plan.slots if slot.phase == phase.name]
        calls = str(max((use.calls for use in phase.uses), default=0))
        rows.append([phase.name, calls, _weights(problem, phase, slots), *_figures(own, scale, second)])
    rows.append(["whole call", "", "", *_figures(pairs, scale, second)])
    broken = broken_caps(solution, trace)
    verdict = "the plan was kept" if not broken else "the plan was BROKEN: " + "; ".join(broken)
    spare_bytes = problem.effective_bytes - trace.peak_bytes
    where = "the virtual clock" if trace.device == "sim" else "the card"
    return "\n".join(
        (
            f"{problem.graph}  hardware {problem.hardware.name} ({problem.hardware.basis})  {regime(problem)}",
            f"budget {show_size(problem.budget_bytes)}, {show_size(problem.effective_bytes)} of it for the call; peak"
            f" {show_size(trace.peak_bytes)}, headroom {show_size(spare_bytes)}",
            f"predicted {show_seconds(simulation.seconds)}, {show_seconds(simulation.compute_seconds)} of it compute;"
            f" took {show_seconds(trace.seconds)} on {where}",
            "",
            table(rows, left=(0, 2)),
            f" sizes in {unit}; weights: whole, or how many blocks stay on the device while the others are streamed",
            f"{verdict}; left on the device: {show_size(trace.left_bytes)}",
        )
    )


def _figures(pairs: list[Pair], scale: int, second: float) -> list[str]:
    """Cells for these slots: peak, moved bytes and time, each planned and measured."""
    planned, measured = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return [
        size(max((slot.peak_bytes for slot in planned), default=0), scale),
        size(max((slot.peak_bytes for slot in measured), default=0), scale),
        size(sum(slot.streamed_bytes + slot.loaded_bytes for slot in planned), scale),
        size(sum(slot.moved_bytes for slot in measured), scale),
        f"{sum(slot.seconds for slot in planned) / second:.3f}",
        f"{sum(slot.end_seconds - slot.start_seconds for slot in measured) / second:.3f}",
    ]


def _weights(problem: Problem, phase: PhaseNumbers, slots: list[Slot]) -> str:
    found = []
    for use in phase.uses:
        component = problem.component(use.component)
        streams = [a for slot in slots for a in slot.actions if isinstance(a, Stream) and a.component == component.name]
        if component.variants[0].device == "cpu":
            found.append("on the CPU")
        elif streams:
            kept, total = sum(len(blocks) for _, blocks in streams[-1].keep or ()), sum(len(k.blocks) for k in component.groups)
            found.append(f"{kept} of {total}")
        else:
            found.append("whole")
    return ", ".join(found)
