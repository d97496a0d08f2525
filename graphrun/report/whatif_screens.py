"""Screens and JSON of what else could be: what helps an infeasible budget, other placements of a component, the frontier.

infeasible    the phases that do not fit, the smallest budget that works, and repairs
alternatives  ``graphrun explain PLAN COMPONENT``: the cost of every other placement and variant of a component
frontier      predicted time against budget (text, JSON, SVG), and the largest value of an input that fits
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from graphrun.model.least_memory import PhaseMinimum
from graphrun.model.plan import Stream
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.report.screen import proof
from graphrun.report.table import scale_of, size, table
from graphrun.solve.alternatives import Alternative
from graphrun.solve.frontier import Point
from graphrun.solve.infeasible import Infeasible
from graphrun.solve.repairs import Repair
from graphrun.units import show_seconds, show_size


def infeasible_screen(error: Infeasible) -> str:
    """What ``graphrun plan`` and ``run`` show with exit code 3. The smallest budgets are exact: a byte less does not fit."""
    budgets = f"{show_size(error.budget_bytes)} of VRAM and {show_size(error.ram_bytes)} of RAM"
    lines = [
        f"infeasible: no plan runs {error.graph} on {error.hardware} within {budgets}; {error.binding} binds",
        *directives_of(error.problem),
        "",
    ]
    if error.needs:
        unit, scale = scale_of(max(need.total_bytes for need in error.needs))
        rows = [["phase", "slot", "weights", "ring", "activation", "values", "least", "available", "short"]]
        for need in error.needs:
            terms = (need.weights_bytes, need.ring_bytes, need.activation_bytes, need.values_bytes, need.total_bytes)
            shown = (*terms, need.available_bytes, need.short_bytes)
            rows.append([need.phase, need.part, *(size(nbytes, scale) for nbytes in shown)])
        lines += [
            table(rows, left=(0, 1)),
            f" sizes in {unit}; weights: what cannot be streamed; values: outputs passed between stages, and live-in bytes",
            "",
        ]
    if error.smallest_ram_bytes > error.ram_bytes:
        unit, scale = scale_of(error.smallest_ram_bytes)
        rows = [["minimum in RAM", unit], *([name, size(nbytes, scale)] for name, nbytes in error.host_bytes)]
        rows.append(["at one time", size(error.smallest_ram_bytes, scale)])
        lines += [table(rows, left=(0,)), ""]
    lines.append(f"smallest budget that works: {smallest(error)}")
    lines += ["what helps, by predicted time, changes of the output last:", *map(_repair_line, error.repairs)]
    return "\n".join(lines)


def _repair_line(repair: Repair) -> str:
    changes = ", changes the output" if repair.changes_output else ""
    return f"  - {repair.text}: {show_seconds(repair.seconds)}{changes}"


def directives_of(problem: Problem) -> list[str]:
    """A line with the problem's directives and reserve; nothing where there are none."""
    found = [f"{of.placement} {of.component}" for of in problem.directives]
    found += [f"reserve {show_size(problem.reserve_bytes)}"] if problem.reserve_bytes else []
    return [f"directives {', '.join(found)}"] if found else []


def smallest(error: Infeasible) -> str:
    """The smallest budgets as command line options, for those budgets that are too small."""
    names = {"VRAM": "--vram", "RAM": "--ram", "pinned RAM": "--pinned", "disk": "--disk"}
    found = [f"{names[tier.name]} {tier.least_bytes} ({show_size(tier.least_bytes)})" for tier in error.tiers if tier.short]
    return " and ".join(found) or "none, with what is allowed"


def infeasible_json(error: Infeasible) -> dict[str, Any]:
    """The same as data: ``feasible`` is false."""
    return {
        "feasible": False,
        "graph": error.graph,
        "hardware": error.hardware,
        "binding": error.binding,
        "budget_bytes": error.budget_bytes,
        "ram_bytes": error.ram_bytes,
        "reserve_bytes": error.problem.reserve_bytes,
        "directives": [f"{of.placement} {of.component}" for of in error.problem.directives],
        "smallest_budget_bytes": error.smallest_budget_bytes,
        "smallest_ram_bytes": error.smallest_ram_bytes,
        "needs": [
            {
                "stage": need.stage,
                "phase": need.phase,
                "slot": need.part,
                "weights_bytes": need.weights_bytes,
                "ring_bytes": need.ring_bytes,
                "activation_bytes": need.activation_bytes,
                "values_bytes": need.values_bytes,
                "available_bytes": need.available_bytes,
                "short_bytes": need.short_bytes,
            }
            for need in error.needs
        ],
        "smallest": {tier.name: tier.least_bytes for tier in error.tiers},
        "repairs": [
            {
                "text": repair.text,
                "change": [" ".join(pair).strip() for pair in repair.change],
                "predicted_seconds": repair.seconds,
                "changes_output": repair.changes_output,
            }
            for repair in error.repairs
        ],
    }


TITLES: Mapping[str, str] = MappingProxyType(
    {
        "": "as planned",
        "whole": "whole in all of its phases",
        "exclude": "all blocks streamed, none kept",
        "drop": "loaded again for each of its phases",
        "keep": "kept from its first use to the end",
    }
)


def alternatives_screen(solution: Solution, component: str, found: Sequence[Alternative]) -> str:
    """The screen: a row per placement, each solved for, and the reasons why others are impossible."""
    problem, planned = solution.problem, found[0]
    weights = solution.chosen.component(component).weight_bytes()
    unit, scale = scale_of(max(planned.peak_bytes, weights))
    rows = [[f"{component}", "predicted", "vs plan", f"moved {unit}", "peak", ""]]
    notes = []
    for option in found:
        title = _title(option)
        permission = f"needs --allow {option.permission}" if option.permission else ""
        if not option.fits:
            rows.append([title, "impossible" if option.refusal else "does not fit", "", "", "", permission])
            notes.append(f" {title}: {_why(option)}")
            continue
        difference = "" if option is planned else f"{option.seconds - planned.seconds:+.3f} s"
        mark = "the same plan" if option.same and option is not planned else permission
        sizes = [size(option.moved_bytes, scale), size(option.peak_bytes, scale)]
        rows.append([title, show_seconds(option.seconds), difference, *sizes, mark])
    head = (
        f"{component} in {problem.graph}: {show_size(weights)} of weights,"
        f" {_streamed_in(solution, component)}; {show_size(problem.effective_bytes)} for tensors"
    )
    foot = " every row is a separate plan, solved and simulated; the placement of the other components may differ in it"
    return "\n".join((head, "", table(rows, left=(0, 5)), foot, *notes))


def _title(of: Alternative) -> str:
    if not of.variant:
        return TITLES[of.placement]
    precision, backing_store, device = of.variant.split()
    return f"as {precision} from {backing_store}{', on the CPU' if device == 'cpu' else ''}"


def _streamed_in(solution: Solution, component: str) -> str:
    streamed = [
        slot.phase
        for slot in solution.plan.slots
        for action in slot.actions
        if isinstance(action, Stream) and action.component == component
    ]
    return f"streamed in {', '.join(dict.fromkeys(streamed))}" if streamed else "not streamed"


def _why(of: Alternative) -> str:
    if of.refusal:
        return of.refusal
    terms = [
        f"{need.phase} {need.part} takes {show_size(need.total_bytes)} = {_terms(need)} > {show_size(need.available_bytes)}"
        for need in of.needs
    ]
    if not terms:
        return f"{of.binding} binds"
    return f"{'; '.join(terms)}; it takes --vram {of.smallest_budget_bytes} ({show_size(of.smallest_budget_bytes)})"


def _terms(need: PhaseMinimum) -> str:
    named = (
        (need.weights_bytes, "weights"),
        (need.ring_bytes, "ring"),
        (need.activation_bytes, "activation"),
        (need.values_bytes, "values and live-in"),
    )
    return " + ".join(f"{show_size(nbytes)} {name}" for nbytes, name in named if nbytes)


def alternatives_json(solution: Solution, component: str, found: Sequence[Alternative]) -> dict[str, Any]:
    """The same as data; ``extra_seconds`` and ``extra_moved_bytes`` are the differences to the plan."""
    rows = []
    for option in found:
        row: dict[str, Any] = {
            "placement": option.placement or ("variant" if option.variant else "planned"),
            "feasible": option.fits,
        }
        row |= {"variant": option.variant} if option.variant else {}
        row |= {"needs_permission": option.permission} if option.permission else {}
        if option.fits:
            row |= {"predicted_seconds": option.seconds, "extra_seconds": option.seconds - found[0].seconds}
            row |= {"moved_bytes": option.moved_bytes, "extra_moved_bytes": option.moved_bytes - found[0].moved_bytes}
            row |= {"peak_bytes": option.peak_bytes, "same_plan": option.same}
        elif option.refusal:
            row["refusal"] = option.refusal
        else:
            row |= {
                "binding": option.binding,
                "smallest_budget_bytes": option.smallest_budget_bytes,
                "needs": [asdict(need) for need in option.needs],
            }
        rows.append(row)
    problem = solution.problem
    return {
        "graph": problem.graph,
        "component": component,
        "weight_bytes": solution.chosen.component(component).weight_bytes(),
        "effective_bytes": problem.effective_bytes,
        "alternatives": rows,
    }


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
