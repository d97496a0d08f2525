"""The frontier as text, JSON and SVG: predicted time against budget, and the largest value of an input that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphrun.model.problem import Problem
from graphrun.report.infeasible import directives_of
from graphrun.report.screen import proof
from graphrun.report.table import scale_of, size, table
from graphrun.solve.frontier import Point
from graphrun.units import show_seconds, show_size

Swept = Sequence[tuple[str, Sequence[Point]]]  # (value of the swept input, its points); ("", points) without one


def frontier_screen(problem: Problem, swept: Swept, name: str = "") -> str:
    """What ``graphrun frontier`` shows: a row per budget (and per value of the input ``name``), then conclusions."""
    settings = " ".join(f"{key}={value}" for key, value in problem.settings if key != name)
    points = [point for _, of in swept for point in of]
    unit, scale = scale_of(max(point.budget_bytes for point in points))
    rows = [[*([name] if name else []), f"budget {unit}", "predicted", "exposed", "moved", "peak", "headroom", "proof"]]
    for value, of in swept:
        for point in of:
            rows.append([*([value] if name else []), size(point.budget_bytes, scale), *_figures(point, scale)])
    return "\n".join(
        (
            f"frontier {problem.graph}{f' until {problem.until}' if problem.until else ''}  {settings}",
            f"hardware {problem.hardware.name} ({problem.hardware.basis})  RAM {show_size(problem.ram_bytes)}  cold run",
            *directives_of(problem),
            "",
            table(rows, left=()),
            f" sizes in {unit}; exposed: predicted time in which the device waits for copies",
            "",
            *_notes(problem, swept, name),
        )
    )


def _figures(point: Point, scale: int) -> list[str]:
    solution = point.solution
    if solution is None:
        if point.smallest_budget_bytes > point.budget_bytes:
            return ["does not fit", "", "", "", "", f"needs {show_size(point.smallest_budget_bytes)}"]
        return ["does not fit", "", "", "", "", f"needs {show_size(point.smallest_ram_bytes)} of RAM"]
    return [
        show_seconds(point.seconds),
        show_seconds(max(0.0, point.seconds - point.compute_seconds)),
        size(point.moved_bytes, scale),
        size(point.peak_bytes, scale),
        size(solution.problem.effective_bytes - point.peak_bytes, scale),
        proof(solution, point.seconds),
    ]


def _notes(problem: Problem, swept: Swept, name: str) -> list[str]:
    if name:
        return [_largest(swept, name, number) for number in range(len(swept[0][1]))]
    points = swept[0][1]
    notes = [f"smallest budget that works: --vram {points[0].smallest_budget_bytes} ({show_size(points[0].smallest_budget_bytes)})"]
    if fitting := [point for point in points if point.fits]:
        best = min(fitting, key=lambda point: (round(point.seconds, 3), point.budget_bytes))
        notes.append(f"fastest: {show_seconds(best.seconds)}, from {show_size(best.budget_bytes)} on")
    if any(point.budget_bytes > problem.hardware.capacity_bytes for point in points):
        notes.append(f"a budget above {problem.hardware.name}'s {show_size(problem.hardware.capacity_bytes)} counts as that much")
    return notes


def _largest(swept: Swept, name: str, number: int) -> str:
    """The largest value that fits budget ``number``. Every value was solved for: smaller values are not assumed to fit."""
    budget = show_size(swept[0][1][number].budget_bytes)
    fitting = [(value, of[number]) for value, of in swept if of[number].fits]
    if not fitting:
        return f"within {budget}: none of these values of {name} fits"
    value, point = fitting[-1]
    return f"within {budget}: {name} up to {value}, predicted {show_seconds(point.seconds)}"


def frontier_json(problem: Problem, swept: Swept, name: str = "") -> dict[str, Any]:
    """The same as data: ``points`` has an entry per row; ``largest`` (with a sweep) the largest value that fits each budget."""
    data: dict[str, Any] = {
        "graph": problem.graph,
        "hardware": problem.hardware.name,
        "ram_bytes": problem.ram_bytes,
        "until": problem.until,
        "reserve_bytes": problem.reserve_bytes,
        "directives": [f"{of.placement} {of.component}" for of in problem.directives],
        "settings": {key: value for key, value in problem.settings if key != name},
        "points": [_entry(point, {name: value} if name else {}) for value, of in swept for point in of],
    }
    if name:
        data["sweep"] = name
        data["largest"] = [
            {"budget_bytes": point.budget_bytes, name: next((value for value, of in reversed(swept) if of[number].fits), None)}
            for number, point in enumerate(swept[0][1])
        ]
    return data


def _entry(point: Point, more: Mapping[str, Any]) -> dict[str, Any]:
    entry = {**more, "budget_bytes": point.budget_bytes, "feasible": point.fits}
    entry |= {"smallest_budget_bytes": point.smallest_budget_bytes, "smallest_ram_bytes": point.smallest_ram_bytes}
    if (solution := point.solution) is not None:
        entry |= {
            "predicted_seconds": point.seconds,
            "compute_seconds": point.compute_seconds,
            "bound_seconds": solution.bound_seconds,
            "proven_optimal": solution.proven_optimal,
            "peak_bytes": point.peak_bytes,
            "moved_bytes": point.moved_bytes,
        }
    return entry


WIDTH, HEIGHT, MARGIN = 720, 420, 60


def frontier_svg(problem: Problem, swept: Swept, name: str = "", *, marked_bytes: int | None = None) -> str:
    """Predicted seconds (y, from 0) against budget (x, from 0) as SVG text, one line per value of ``name``.

    ``marked_bytes``: a budget to mark, such as that of the plan on the same page.
    """
    points = [point for _, of in swept for point in of if point.fits]
    most_bytes = max((point.budget_bytes for _, of in swept for point in of), default=1)
    most_seconds = 1.05 * max((point.seconds for point in points), default=1.0)

    def position(point: Point) -> tuple[float, float]:
        x = MARGIN + (WIDTH - 2 * MARGIN) * point.budget_bytes / most_bytes
        return x, HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * point.seconds / most_seconds

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(MARGIN, 30, f"{problem.graph} on {problem.hardware.name}: predicted time against VRAM budget", "start"),
        f'<path d="M{MARGIN} {MARGIN}V{HEIGHT - MARGIN}H{WIDTH - MARGIN}" fill="none" stroke="black"/>',
    ]
    unit, scale = scale_of(most_bytes)
    if marked_bytes is not None:
        x = MARGIN + (WIDTH - 2 * MARGIN) * marked_bytes / most_bytes
        lines.append(f'<path class="budget" d="M{x:.1f} {MARGIN}V{HEIGHT - MARGIN}" stroke="#c0392b" stroke-dasharray="6 4"/>')
        lines.append(_text(x + 6, HEIGHT - MARGIN - 8, "this budget", "start", "#c0392b"))
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = MARGIN + (WIDTH - 2 * MARGIN) * share, HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * share
        lines += [
            f'<path d="M{MARGIN} {y:.1f}H{WIDTH - MARGIN}" stroke="#ddd"/>',
            _text(x, HEIGHT - MARGIN + 18, f"{share * most_bytes / scale:.3g} {unit}", "middle"),
            _text(MARGIN - 6, y + 4, show_seconds(share * most_seconds), "end"),
        ]
    for number, (value, of) in enumerate(swept):
        color = f"hsl({210 + 360 * number // len(swept)},70%,40%)"
        positions = [position(point) for point in of if point.fits]
        if positions:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
            lines.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
            lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in positions]
            if name:
                lines.append(_text(positions[-1][0] + 6, positions[-1][1] - 6, f"{name}={value}", "start", color))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str, color: str = "black") -> str:
    safe = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{safe}</text>'
