"""A run or a plan as a self-contained HTML page, for small and large screens, dark and light.

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
from graphrun.report.screen import PHASE_HEAD, comparison_cells, phase_cells, plan_screen, proof
from graphrun.report.svg import element
from graphrun.report.table import Units
from graphrun.report.verdicts import clock_text, location
from graphrun.report.whatif_screens import frontier_svg
from graphrun.solve.frontier import FrontierPoint
from graphrun.trace import Event, SlotTrace, Trace
from graphrun.units import show_seconds, show_size


def trace_from_json(data: Mapping[str, Any]) -> Trace:
    """Return the parts of a trace, from `Trace.to_json`, that the page shows. Raises KeyError or
    TypeError if ``data`` has another form."""
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
        process_bytes=data.get("process_bytes", 0),
    )


def report_page(
    solution: Solution,
    trace: Trace | None,
    points: Sequence[FrontierPoint],
    product: Made | None = None,
) -> str:
    """Return the HTML page of a run, or of a plan if there is no ``trace``. It shows the outputs,
    figures, timelines, phases, planned and measured numbers, the frontier, and the plan as text."""
    problem, simulation, applied = solution.problem, solution.simulation, solution.chosen
    colours = {component.name: number % 8 for number, component in enumerate(applied.components)}
    units = Units(simulation.peak_bytes, simulation.seconds)
    product = product or Made(dict(problem.settings), dict(problem.versions), problem.digest)
    sections = [_product_html(product), _cards(solution, simulation, trace), _legend(colours)]
    parts = {
        f"{report.phase} {report.part}".strip(): (report.compute_seconds, slot_parts)
        for report, slot_parts in zip(simulation.slots, parts_of(solution), strict=True)
    }
    drawings = [("Planned", simulation.events, planned_slots(simulation.slots))]
    drawings += [("Measured", trace.events, trace.slots)] if trace else []
    for name, events, slots in drawings:
        first = [event for event in events if event.slot < len(solution.plan.slots)]
        title = f"{name}: disk reads, copies, compute and memory"
        drawing = timeline_svg(first, slots, parts, problem.effective_bytes, colours, title)
        sections.append(_wide(name, drawing))
    sections.append(_phases(applied, simulation.slots, units))
    if trace:
        titles = (
            f"peak {units.size} planned",
            "measured",
            f"moved {units.size} planned",
            "measured",
            f"{units.time} planned",
        )
        rows = [
            units.row(pair[1].name, *comparison_cells([pair]))
            for pair in trace.pairs_with(simulation.slots)
        ]
        sections.append(_table("Planned against measured", ("slot", *titles, "measured"), rows))
    if points:
        drawing = frontier_svg(
            problem,
            [("", points)],
            marked_bytes=min(problem.budget_bytes, problem.hardware.capacity_bytes),
        )
        sections.append(_wide("Time against budget", drawing, "wide frontier"))
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
    """Return ``reports`` as if they had been measured: one after another, from 0."""
    times = list(accumulate((report.seconds for report in reports), initial=0.0))
    return tuple(
        SlotTrace(
            report.phase,
            report.part,
            0,
            report.peak_bytes,
            report.streamed_bytes + report.loaded_bytes,
            start,
            end,
        )
        for report, (start, end) in zip(reports, pairwise(times), strict=True)
    )


class Made(NamedTuple):
    """The outputs of a run and their origin. ``plan``: digest of the plan. ``pictures``: data URIs.
    ``outside_names``: files that are not shown, because they are outside the trace's folder."""

    inputs: Mapping[str, Any]
    versions: Mapping[str, Any]
    plan: str
    date: str = ""
    pictures: Sequence[str] = ()
    outside_names: Sequence[str] = ()


def product_from_trace(data: Mapping[str, Any], folder: Path) -> Made | None:
    """Return the record of outputs in the trace file ``data`` in ``folder``; None if it has none.

    Pictures that no longer exist are omitted. Pictures outside ``folder``, also through a link, are
    named and not read: a trace from elsewhere must not put files of this machine into a page.
    """
    record = data.get("made")
    if not isinstance(record, dict):
        return None
    names = [str(name) for name in record["files"][:4]]
    inside_names = [
        name for name in names if (folder / name).resolve().is_relative_to(folder.resolve())
    ]
    pictures = [picture for name in inside_names if (picture := _thumbnail(folder / name))]
    outside_names = tuple(name for name in names if name not in inside_names)
    return Made(
        dict(record["inputs"]),
        dict(record["versions"]),
        str(record["plan"]),
        str(record["date"]),
        pictures,
        outside_names,
    )


def _thumbnail(path: Path) -> str:
    """Return the picture at ``path`` as a data URI of at most 512 pixels a side; "" if it is no
    picture."""
    from PIL import Image

    if path.suffix.lower() not in PICTURES or not path.is_file():
        return ""
    buffer = io.BytesIO()
    try:
        with Image.open(path) as image:
            image.thumbnail((512, 512))
            image.convert("RGB").save(buffer, "JPEG", quality=85)
    except Exception:  # noqa: BLE001  (whatever PIL raises for a file that is no picture)
        return ""
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def _product_html(product: Made) -> str:
    """Return the pictures, the prompt, and lines for other inputs, versions and the plan."""
    inputs = {name: value for name, value in product.inputs.items() if name != "prompt"}
    rows = [
        ("prompt", str(product.inputs.get("prompt", ""))),
        ("made", product.date),
        ("inputs", _pairs(inputs)),
    ]
    rows += [("versions", _pairs(product.versions)), ("plan", product.plan)]
    rows += [("not shown, outside the trace's folder", ", ".join(product.outside_names))]
    items = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in rows if text)
    pictures = "".join(f'<img alt="output" src="{picture}">' for picture in product.pictures)
    return f'<div class="made">{pictures}<dl>{items}</dl></div>'


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _cards(solution: Solution, simulation: Simulation, trace: Trace | None) -> str:
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
    ]
    if not problem.hardware.unified:
        host_peak = show_size(simulation.host_peak_bytes)
        cards.append(("host peak", host_peak, f"of {show_size(problem.ram_bytes)}"))
    if problem.runs > 1:
        cards.append(
            (
                "every further run",
                show_seconds(simulation.further_seconds),
                f"session of {problem.runs} runs",
            )
        )
    if trace:
        cards += [
            ("measured", show_seconds(trace.seconds), clock_text(trace.device)),
            (
                "measured peak",
                show_size(trace.peak_bytes),
                f"left {location(unified=trace.unified)}: {show_size(trace.left_bytes)}",
            ),
        ]
    rows = "".join(
        f"<div><b>{escape(big)}</b><span>{escape(name)}</span><small>{escape(note)}</small></div>"
        for name, big, note in cards
    )
    return f'<div class="cards">{rows}</div>'


def _legend(colours: Mapping[str, int]) -> str:
    shades = {
        "copied or computed": "c0",
        "streamed, or read from disk": "c0 stream",
        "ring buffer": "c0 ring_buffer",
        "activation": "activation",
        "values, rest of pages": "values",
        "nothing computes": "lane waits",
    }
    budget = element("path", class_="budget", d="M0 5H10")
    components = _patches({name: f"c{number}" for name, number in colours.items()})
    return (
        f'<div class="legend">{components}</div><div class="legend">{_patches(shades)}'
        f"{_patch('budget for tensors', budget)}</div>"
    )


def _patches(kinds: Mapping[str, str]) -> str:
    """Return a patch for each title, coloured by its CSS classes."""
    return "".join(
        _patch(title, element("rect", class_=kind, width=10, height=10))
        for title, kind in kinds.items()
    )


def _patch(title: str, shape: str) -> str:
    return f"<span>{element('svg', shape, viewBox='0 0 10 10')}{escape(title)}</span>"


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
    ).replace(":", ":<wbr>")  # names of phases break there on a phone
    whole = f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"
    return _wide(title, whole)


def _wide(title: str, content: str, classes: str = "wide") -> str:
    """Return a section whose content scrolls sideways where the screen is narrower."""
    hint = '<p class="swipe">scroll sideways →</p>'
    return f'<h2>{title}</h2>{hint}<div class="{classes}">{content}</div>'


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
