"""A run or a plan as a self-contained HTML page that needs no network, for small and large screens, dark and light.

Numbers come from `simulate`, from the trace file, and from plans solved for other budgets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from graphrun.model.plan import Slot
from graphrun.model.problem import Problem
from graphrun.model.simulation import Simulation
from graphrun.model.solution import Solution
from graphrun.report.chart import Level, timeline_svg
from graphrun.report.screen import plan_screen, proof
from graphrun.report.table import scale_of, seconds_of, size
from graphrun.report.whatif_screens import frontier_svg
from graphrun.solve.frontier import Point
from graphrun.trace import Event
from graphrun.units import show_seconds, show_size

Row = Sequence[str]


@dataclass(frozen=True, slots=True)
class Measured:
    """What the page shows of a trace file: slots, events, and bytes left on the device."""

    device: str
    levels: tuple[Level, ...]
    events: tuple[Event, ...]
    moved_bytes: tuple[int, ...]
    left_bytes: int

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Measured:
        """From what `Trace.to_json` wrote. Raises KeyError or TypeError for anything else."""
        slots = data["slots"]
        levels = tuple(
            Level(f"{s['phase']} {s['part']}".strip(), s["start_seconds"], s["end_seconds"], s["peak_bytes"]) for s in slots
        )
        events = tuple(Event(**event) for event in data["events"])
        return cls(data["device"], levels, events, tuple(s["moved_bytes"] for s in slots), data["left_bytes"])

    @property
    def seconds(self) -> float:
        """From the first slot's start to the last slot's end."""
        return self.levels[-1].end_seconds - self.levels[0].start_seconds if self.levels else 0.0


def report_page(solution: Solution, measured: Measured | None, points: Sequence[Point]) -> str:
    """The HTML page: figures, planned and measured timelines, phases, planned against measured, the frontier, the plan's text."""
    problem, simulation, applied = solution.problem, solution.simulation, solution.chosen
    colours = {component.name: number % 8 for number, component in enumerate(applied.components)}
    levels = planned_levels(solution.plan.slots, simulation)
    sections = [_figures(solution, simulation, measured), _legend(colours)]
    drawings = [("Planned", simulation.events, levels)]
    drawings += [("Measured", measured.events, measured.levels)] if measured else []
    for name, events, own in drawings:
        first = [event for event in events if event.slot < len(solution.plan.slots)]
        drawn = timeline_svg(first, own, problem.effective_bytes, colours, f"{name}: disk reads, copies, compute and memory")
        sections.append(f'<h2>{name}</h2><div class="wide">{drawn}</div>')
    sections.append(_phases(applied, simulation))
    if measured:
        sections.append(_against(solution, simulation, measured))
    if points:
        drawn = frontier_svg(problem, [("", points)], marked_bytes=problem.budget_bytes)
        sections.append(f'<h2>Time against budget</h2><div class="wide frontier">{drawn}</div>')
    sections += [_folded("The plan as text", str(solution.plan)), _folded("The plan's screen", plan_screen(solution))]
    style = files("graphrun.report").joinpath("page.css").read_text()
    title = f"{problem.graph} on {problem.hardware.name} within {show_size(problem.budget_bytes)}"
    return _PAGE.format(title=escape(title), style=style, body="\n".join(sections))


def planned_levels(slots: Sequence[Slot], simulation: Simulation) -> tuple[Level, ...]:
    """The peaks of the first run's slots over time."""
    found, now = [], 0.0
    for slot, report in zip(slots, simulation.slots, strict=True):
        found.append(Level(f"{slot.phase} {slot.part}".strip(), now, now + report.seconds, report.peak_bytes))
        now += report.seconds
    return tuple(found)


def _figures(solution: Solution, simulation: Simulation, measured: Measured | None) -> str:
    problem = solution.problem
    peak = max((level.nbytes for level in measured.levels), default=0) if measured else 0
    cards = [
        ("predicted", show_seconds(simulation.seconds), proof(solution, simulation.total_seconds)),
        ("peak", show_size(simulation.peak_bytes), f"of {show_size(problem.effective_bytes)} for tensors"),
        ("moved in", show_size(simulation.moved_bytes), f"{show_seconds(simulation.compute_seconds)} of compute"),
        ("host peak", show_size(simulation.host_peak_bytes), f"of {show_size(problem.ram_bytes)}"),
    ]
    if problem.runs > 1:
        cards.append(("every further run", show_seconds(simulation.again_seconds), f"session of {problem.runs} runs"))
    if measured:
        clock = "virtual clock" if measured.device == "sim" else "on the card"
        cards += [
            ("measured", show_seconds(measured.seconds), clock),
            ("measured peak", show_size(peak), f"left on the device: {show_size(measured.left_bytes)}"),
        ]
    rows = "".join(
        f"<div><b>{escape(big)}</b><span>{escape(name)}</span><small>{escape(note)}</small></div>" for name, big, note in cards
    )
    return f'<div class="cards">{rows}</div>'


def _legend(colours: Mapping[str, int]) -> str:
    items = "".join(
        f'<span><svg viewBox="0 0 10 10"><rect class="c{n}" width="10" height="10"/></svg>{escape(c)}</span>'
        for c, n in colours.items()
    )
    return f'<div class="legend">{items}</div>'


def _phases(applied: Problem, simulation: Simulation) -> str:
    unit, scale = scale_of(simulation.peak_bytes)
    clock, second = seconds_of(simulation.seconds)
    rows: list[Row] = [
        ["phase", "calls", "resident", "ring", "activation", "values", f"peak {unit}", "headroom", "streamed", clock]
    ]
    for phase in applied.phases:
        slots = [slot for slot in simulation.slots if slot.phase == phase.name]
        top = max(slots, key=lambda slot: slot.peak_bytes)
        terms = (top.resident_bytes, top.ring_bytes, top.activation_bytes, top.values_bytes, top.peak_bytes)
        rows.append(
            [
                phase.name,
                str(max((use.calls for use in phase.uses), default=0)),
                *(size(nbytes, scale) for nbytes in (*terms, applied.effective_bytes - top.peak_bytes)),
                size(sum(slot.streamed_bytes for slot in slots), scale),
                f"{sum(slot.seconds for slot in slots) / second:.3f}",
            ]
        )
    return f"<h2>Phases</h2>{_table(rows)}"


def _against(solution: Solution, simulation: Simulation, measured: Measured) -> str:
    unit, scale = scale_of(simulation.peak_bytes)
    clock, second = seconds_of(simulation.seconds)
    rows: list[Row] = [
        ["slot", f"peak {unit} planned", "measured", f"moved {unit} planned", "measured", f"{clock} planned", "measured"]
    ]
    for planned, level, moved in zip(simulation.slots, measured.levels, measured.moved_bytes, strict=False):
        rows.append(
            [
                level.name,
                size(planned.peak_bytes, scale),
                size(level.nbytes, scale),
                size(planned.streamed_bytes + planned.loaded_bytes, scale),
                size(moved, scale),
                f"{planned.seconds / second:.3f}",
                f"{(level.end_seconds - level.start_seconds) / second:.3f}",
            ]
        )
    return f"<h2>Planned against measured</h2>{_table(rows)}"


def _table(rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows[1:])
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""
