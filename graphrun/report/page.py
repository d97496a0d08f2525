"""A run or a plan as a self-contained HTML page that needs no network, for small and large screens,
dark and light.

Numbers come from `simulate`, from the trace file, and from plans solved for other budgets.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from graphrun.model.problem import Problem
from graphrun.model.simulation import Simulation, SlotReport
from graphrun.model.solution import Solution
from graphrun.report.chart import timeline_svg
from graphrun.report.memory import parts_of
from graphrun.report.outputs import PICTURES
from graphrun.report.screen import PHASE_HEAD, beside_cells, phase_cells, plan_screen, proof
from graphrun.report.svg import element
from graphrun.report.table import Units
from graphrun.report.whatif_screens import frontier_svg
from graphrun.solve.frontier import Point
from graphrun.trace import Event, SlotTrace, Trace
from graphrun.units import show_seconds, show_size


def measured_in(data: Mapping[str, Any]) -> Trace:
    """What the page shows of the trace that `Trace.to_json` wrote. Raises KeyError or TypeError for
    anything else."""
    names = ("phase", "part", "calls", "peak_bytes", "moved_bytes", "start_seconds", "end_seconds")
    slots = tuple(SlotTrace(*(slot[name] for name in names)) for slot in data["slots"])
    events = tuple(Event(**event) for event in data["events"])
    return Trace(
        data["plan_digest"],
        data["device"],
        slots,
        events,
        data["baseline_bytes"],
        data["left_bytes"],
    )


def report_page(
    solution: Solution, measured: Trace | None, points: Sequence[Point], made: Made | None = None
) -> str:
    """The HTML page: what was made, figures, timelines, phases, planned against measured, the
    frontier, the plan's text."""
    problem, simulation, applied = solution.problem, solution.simulation, solution.chosen
    colours = {component.name: number % 8 for number, component in enumerate(applied.components)}
    units = Units(simulation.peak_bytes, simulation.seconds)
    made = made or Made(dict(problem.settings), dict(problem.versions), problem.digest)
    sections = [_made(made), _cards(solution, simulation, measured), _legend(colours)]
    parts = {
        f"{report.phase} {report.part}".strip(): (report.compute_seconds, of)
        for report, of in zip(simulation.slots, parts_of(solution), strict=True)
    }
    drawings = [("Planned", simulation.events, planned_slots(simulation.slots))]
    drawings += [("Measured", measured.events, measured.slots)] if measured else []
    for name, events, slots in drawings:
        first = [event for event in events if event.slot < len(solution.plan.slots)]
        title = f"{name}: disk reads, copies, compute and memory"
        drawn = timeline_svg(first, slots, parts, problem.effective_bytes, colours, title)
        sections.append(
            f'<h2>{name}</h2><p class="swipe">scroll sideways →</p><div class="wide">{drawn}</div>'
        )
    sections.append(_phases(applied, simulation.slots, units))
    if measured:
        titles = (
            f"peak {units.size} planned",
            "measured",
            f"moved {units.size} planned",
            "measured",
            f"{units.time} planned",
        )
        rows = [
            units.row(pair[1].name, *beside_cells([pair]))
            for pair in measured.beside(simulation.slots)
        ]
        sections.append(_table("Planned against measured", ("slot", *titles, "measured"), rows))
    if points:
        drawn = frontier_svg(
            problem,
            [("", points)],
            marked_bytes=min(problem.budget_bytes, problem.hardware.capacity_bytes),
        )
        sections.append(f'<h2>Time against budget</h2><div class="wide frontier">{drawn}</div>')
    for title, text in (
        ("The plan as text", str(solution.plan)),
        ("The plan's screen", plan_screen(solution)),
    ):
        sections.append(
            f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"
        )
    style = files("graphrun.report").joinpath("page.css").read_text(encoding="utf-8")
    title = f"{problem.graph} on {problem.hardware.name} within {show_size(problem.budget_bytes)}"
    return PAGE.format(title=escape(title), style=style, body="\n".join(sections))


def planned_slots(reports: Sequence[SlotReport]) -> tuple[SlotTrace, ...]:
    """``reports`` as if they had been measured: one after another, from 0."""
    ends = list(accumulate((report.seconds for report in reports), initial=0.0))
    return tuple(
        SlotTrace(report.phase, report.part, 0, report.peak_bytes, 0, start, end)
        for report, (start, end) in zip(reports, pairwise(ends), strict=True)
    )


class Made(NamedTuple):
    """What a run made, of what: inputs, versions, digest of the plan; when, and the pictures as
    data URIs.

    ``outside``: names of files that are not shown, since they lie outside the trace's folder."""

    inputs: Mapping[str, Any]
    versions: Mapping[str, Any]
    plan: str
    date: str = ""
    pictures: Sequence[str] = ()
    outside: Sequence[str] = ()


def made_in(data: Mapping[str, Any], folder: Path) -> Made | None:
    """Return what the trace file ``data`` in ``folder`` says about its outputs; None if it says
    nothing.

    Pictures that no longer exist are left out. Those outside ``folder``, also through a link, are
    named and not read: a trace from elsewhere must not put files of this machine into a page."""
    record = data.get("made")
    if not isinstance(record, dict):
        return None
    names = [str(name) for name in record["files"][:4]]
    inside = [name for name in names if (folder / name).resolve().is_relative_to(folder.resolve())]
    pictures = [picture for name in inside if (picture := _thumbnail(folder / name))]
    outside = tuple(name for name in names if name not in inside)
    return Made(
        dict(record["inputs"]),
        dict(record["versions"]),
        str(record["plan"]),
        str(record["date"]),
        pictures,
        outside,
    )


def _thumbnail(path: Path) -> str:
    """The picture at ``path`` as a data URI of at most 512 pixels a side; empty where it is
    none."""
    from PIL import Image

    if path.suffix.lower() not in PICTURES or not path.is_file():
        return ""
    to = io.BytesIO()
    try:
        with Image.open(path) as image:
            image.thumbnail((512, 512))
            image.convert("RGB").save(to, "JPEG", quality=85)
    except Exception:  # noqa: BLE001  (whatever PIL raises for a file that is no picture)
        return ""
    return "data:image/jpeg;base64," + base64.b64encode(to.getvalue()).decode()


def _made(made: Made) -> str:
    """The pictures, the prompt, and a line each for the other inputs, the versions, the plan."""
    inputs = {name: value for name, value in made.inputs.items() if name != "prompt"}
    rows = [
        ("prompt", str(made.inputs.get("prompt", ""))),
        ("made", made.date),
        ("inputs", _pairs(inputs)),
    ]
    rows += [("versions", _pairs(made.versions)), ("plan", made.plan)]
    rows += [("not shown, outside the trace's folder", ", ".join(made.outside))]
    shown = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in rows if text)
    pictures = "".join(f'<img alt="output" src="{picture}">' for picture in made.pictures)
    return f'<div class="made">{pictures}<dl>{shown}</dl></div>'


def _pairs(of: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in of.items())


def _cards(solution: Solution, simulation: Simulation, measured: Trace | None) -> str:
    problem = solution.problem
    cards = [
        ("predicted", show_seconds(simulation.seconds), proof(solution)),
        (
            "peak",
            show_size(simulation.peak_bytes),
            f"of {show_size(problem.effective_bytes)} for tensors",
        ),
        (
            "moved in",
            show_size(simulation.moved_bytes),
            f"{show_seconds(simulation.compute_seconds)} of compute",
        ),
        ("host peak", show_size(simulation.host_peak_bytes), f"of {show_size(problem.ram_bytes)}"),
    ]
    if problem.runs > 1:
        cards.append(
            (
                "every further run",
                show_seconds(simulation.again_seconds),
                f"session of {problem.runs} runs",
            )
        )
    if measured:
        clock = "virtual clock" if measured.device == "sim" else "on the card"
        cards += [
            ("measured", show_seconds(measured.seconds), clock),
            (
                "measured peak",
                show_size(measured.peak_bytes),
                f"left on the device: {show_size(measured.left_bytes)}",
            ),
        ]
    rows = "".join(
        f"<div><b>{escape(big)}</b><span>{escape(name)}</span><small>{escape(note)}</small></div>"
        for name, big, note in cards
    )
    return f'<div class="cards">{rows}</div>'


def _legend(colours: Mapping[str, int]) -> str:
    patches = {
        c: element("rect", class_=f"c{number}", width=10, height=10)
        for c, number in colours.items()
    }
    items = "".join(
        f"<span>{element('svg', patch, viewBox='0 0 10 10')}{escape(c)}</span>"
        for c, patch in patches.items()
    )
    shades = {
        "copied or computed": "c0",
        "streamed, or read from disk": "c0 stream",
        "ring_buffer": "c0 ring buffer",
        "activation": "activation",
        "values, rest of pages": "values",
        "nothing computes": "lane waits",
    }
    patches = {
        title: element("rect", class_=kind, width=10, height=10) for title, kind in shades.items()
    }
    patches["budget for tensors"] = element("path", class_="budget", d="M0 5H10")
    shown = "".join(
        f"<span>{element('svg', of, viewBox='0 0 10 10')}{escape(title)}</span>"
        for title, of in patches.items()
    )
    return f'<div class="legend">{items}</div><div class="legend">{shown}</div>'


def _phases(applied: Problem, reports: Sequence[SlotReport], units: Units) -> str:
    head = (f"peak {units.size}" if title == "peak" else title for title in PHASE_HEAD)
    rows = []
    for phase in applied.phases:
        slots, cells = phase_cells(applied, phase, reports)
        rows.append(units.row(*cells, sum((slot.seconds for slot in slots), 0.0)))
    return _table("Phases", (*head, units.time), rows)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    titles = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    whole = f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"
    return f'<h2>{title}</h2><div class="wide">{whole}</div>'


PAGE = """<!doctype html>
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
