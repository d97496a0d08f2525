"""Screens and JSON about other plans.

infeasible    the phases that do not fit, the minimum VRAM, and suggestions
alternatives  ``graphrun explain PLAN COMPONENT``: the cost of every other placement and
              variant of a component
frontier      predicted time against budget (text, JSON, SVG), and the largest value of an
              input that fits
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from itertools import zip_longest
from typing import Any

from graphrun.model.hardware import Hardware
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.report.command_lines import folded_options
from graphrun.report.precisions import precision_lines
from graphrun.report.screen import (
    Look,
    gap_text,
    listed,
    phase_streams,
    proof,
    ram_text,
    subject,
)
from graphrun.report.summary import directives, figures
from graphrun.report.svg import element, picture, round_ticks, tick_seconds
from graphrun.report.table import Units, table
from graphrun.solve.alternatives import Alternative
from graphrun.solve.frontier import FrontierPoint
from graphrun.solve.infeasible import Infeasible
from graphrun.solve.suggestions import Suggestion, exceeds_device, is_thorough, typed_value
from graphrun.units import roughly, show_seconds, show_size

# the title of each placement in `graphrun.solve.alternatives`; "": the plan itself
TITLES = {
    "": "as planned",
    "whole": "whole in all of its phases",
    "exclude": "all blocks streamed",
    "drop": "loaded again in each phase",
    "keep": "kept from first use to end",
}
MARK_COLUMNS = 15  # of the remark on an alternative


def infeasible_screen(error: Infeasible, look: Look | None = None) -> str:
    """Return the screen that ``graphrun plan`` and ``run`` show with exit code 3. No plan was found
    for budgets one byte below the minimum budgets on the screen."""
    look = look or Look()
    budgets = _budgets_text(error.problem)
    verdict = (
        f"fits: no. No plan runs {error.graph} on {error.hardware} within {budgets}; "
        f"{error.binding} is the limit"
    )
    lines = [look.first(verdict), *map(look.folded, _directives(error.problem)), ""]
    if error.needs:
        units = Units(max(need.total_bytes for need in error.needs))
        rows = [["slot", "weights", "ring buffer", "activation", "values", "needed", "available"]]
        rows += [
            units.row(
                f"{need.phase} {need.part}",
                *figures(need, *TERMS, "total_bytes", "available_bytes").values(),
            )
            for need in error.needs
        ]
        note = (
            f"sizes in {units.size}; weights: what cannot be streamed; values: outputs passed "
            f"between stages; available: the budget less {_overhead(error.problem)}"
        )
        lines += [table(rows, left_columns=(0,), width=look.width), f" {look.folded(note)}", ""]
    if error.smallest_ram_bytes > error.ram_bytes:
        units = Units(error.smallest_ram_bytes)
        rows = [
            units.row(*row)
            for row in (*error.host_bytes, ("at one time", error.smallest_ram_bytes))
        ]
        lines += [table([["minimum in RAM", units.size], *rows], left_columns=(0,)), ""]
    lines += [
        look.folded(f"{_smallest_title(error)}: {_smallest(error)}"),
        "what helps, and the run's time (last: what changes the output):",
    ]
    return "\n".join([*lines, *_helping(error.suggestions, error.capacity_bytes, look)])


def _overhead(problem: Problem) -> str:
    """Return the part of the budget that is not for tensors."""
    owner = "the process" if problem.hardware.unified else "context and workspace"
    reserve = " and the reserve" if problem.reserve_bytes else ""
    return f"{show_size(problem.budget_bytes - problem.effective_bytes)} for {owner}{reserve}"


def suggestion_sentence(suggestion: Suggestion, product: str, *, fits: bool = True) -> str:
    """Return the sentence that names the best ``suggestion``, before its command. ``product``: what
    a run makes, such as ``a picture``. ``fits``: there is a plan without it."""
    output = ", and the output changes" if suggestion.changes_output else ""
    time = f"{roughly(suggestion.seconds)} {product}{output}"
    return f"{'better' if fits else 'to run it'}: {suggestion.text} ({time}):"


def suggestions_screen(solution: Solution, suggestions: Sequence[Suggestion], look: Look) -> str:
    """Return the suggestions that would make a slow plan faster."""
    title = look.folded(
        "mostly waiting; what helps, and the run's time (last: what changes the output):"
    )
    capacity_bytes = solution.problem.hardware.capacity_bytes
    rest = [] if is_thorough() else [" --explain more searches for further suggestions"]
    return "\n".join([title, *_helping(suggestions, capacity_bytes, look, texts=True), *rest])


def _helping(
    suggestions: Sequence[Suggestion], capacity_bytes: int, look: Look, texts: bool = False
) -> Iterator[str]:
    """Yield a table of suggestions that can be typed as options, then the other suggestions.
    ``texts``: add each suggestion in words."""

    def words(suggestion: Suggestion) -> str:
        return "changes the output" if suggestion.changes_output else suggestion.text * texts

    options = {suggestion: options_text(suggestion, capacity_bytes) for suggestion in suggestions}
    if rows := [
        (option_text, show_seconds(suggestion.seconds), words(suggestion))
        for suggestion, option_text in options.items()
        if option_text
    ]:
        yield table(list(_folded_rows(rows, look.width)), left_columns=(0, 2))
    for suggestion, option_text in options.items():
        if suggestion.change and not option_text:
            yield look.folded(f" {suggestion.text}: {show_seconds(suggestion.seconds)}")
    permissions = [
        value
        for suggestion in suggestions
        for option, value in suggestion.change
        if option == "--allow"
    ]
    yield from map(look.folded, precision_lines(permissions))


def _folded_rows(
    rows: Sequence[tuple[str, str, str]], width: int
) -> Iterator[tuple[str, str, str]]:
    """Yield ``rows`` of options, seconds and words, folded to ``width``."""
    seconds_columns = max(len(seconds) for _, seconds, _ in rows)
    options = [
        folded_options(typed_options, width - seconds_columns - WORDS_COLUMNS - 5)
        for typed_options, _, _ in rows
    ]
    # 5: the spaces before and between columns
    words_columns = (
        width - seconds_columns - max(len(line) for lines in options for line in lines) - 5
    )
    for lines, (_, seconds, words) in zip(options, rows, strict=True):
        yield from zip_longest(lines, [seconds], textwrap.wrap(words, words_columns), fillvalue="")


def options_text(suggestion: Suggestion, capacity_bytes: int) -> str:
    """Return the options to type for ``suggestion``, with rounded sizes.

    "" if options are not enough: the suggestion is to drop a directive, to run a second command, or
    to use a larger device.
    """
    if not suggestion.typed or any(
        exceeds_device(option, value, capacity_bytes) for option, value in suggestion.change
    ):
        return ""
    return " ".join(f"{option} {typed_value(option, value)}" for option, value in suggestion.change)


WORDS_COLUMNS = 25  # minimum width of the words next to the options
# the bytes of a slot, as in `graphrun.model.least_memory.PhaseMinimum`
TERMS = ("weights_bytes", "ring_buffer_bytes", "activation_bytes", "values_bytes")


def _directives(problem: Problem) -> list[str]:
    """Return a line with the problem's directives and reserve; no line without any."""
    reserve = [f"reserve {show_size(problem.reserve_bytes)}"] if problem.reserve_bytes else []
    return listed("directives", [*directives(problem), *reserve])


def _smallest_title(error: Infeasible) -> str:
    """Return the title of the minimum budgets: the kinds of memory that are too small.

    Without allocator pages, the minimum is proven: no plan exists for less. With pages, no plan was
    found for less.
    """
    names = [tier.name for tier in error.tiers if tier.short]
    return f"minimum {' and '.join(names) or error.problem.hardware.budget_name}"


def _smallest(error: Infeasible) -> str:
    """Return the minimum budgets as command-line options, for each budget that is too small."""
    names, device = {"RAM": "--ram", "pinned RAM": "--pinned", "disk": "--disk"}, error.tiers[0]
    kind = "machine" if error.problem.hardware.unified else "device"
    options = [
        f"a {kind} with {show_size(tier.least_bytes)}, and this one has "
        f"{show_size(tier.have_bytes)}"
        if tier is device and tier.least_bytes > error.capacity_bytes
        else _device_option(error.problem, tier.least_bytes)
        if tier is device
        else _option(names[tier.name], str(tier.least_bytes), tier.least_bytes)
        for tier in error.tiers
        if tier.short
    ]
    return " and ".join(options) or "none, with what is allowed"


def _budgets_text(problem: Problem) -> str:
    """Return the budgets of the device and of the host, which on a CPU are one."""
    budgets = [f"{show_size(problem.budget_bytes)} of {problem.hardware.budget_name}"]
    if not problem.hardware.unified:
        budgets.append(f"{show_size(problem.ram_bytes)} of RAM")
    return " and ".join(budgets)


def _device_option(problem: Problem, nbytes: int) -> str:
    return _option(*problem.budget_change(nbytes), nbytes)


def _option(name: str, value: str, nbytes: int) -> str:
    return f"{name} {typed_value(name, value)} ({nbytes} bytes)"


def infeasible_json(error: Infeasible) -> dict[str, Any]:
    """Return the content of `infeasible_screen` as data; ``feasible`` is false."""
    return {
        "feasible": False,
        **figures(error, "graph", "hardware", "binding", "budget_bytes", "ram_bytes"),
        "reserve_bytes": error.problem.reserve_bytes,
        "directives": directives(error.problem),
        **figures(error, "smallest_budget_bytes", "smallest_ram_bytes"),
        "needs": [
            {
                **figures(need, "stage", "phase"),
                "slot": need.part,
                **figures(need, *TERMS, "available_bytes", "short_bytes"),
            }
            for need in error.needs
        ],
        "smallest": {tier.name: tier.least_bytes for tier in error.tiers},
        "suggestions": suggestions_json(error.suggestions),
    }


def suggestions_json(suggestions: Sequence[Suggestion]) -> list[dict[str, Any]]:
    """Return ``suggestions`` as data."""
    return [
        {
            "text": suggestion.text,
            "change": [" ".join(pair).strip() for pair in suggestion.change],
            "predicted_seconds": suggestion.seconds,
            "changes_output": suggestion.changes_output,
        }
        for suggestion in suggestions
    ]


def alternatives_screen(
    solution: Solution, component: str, alternatives: Sequence[Alternative]
) -> str:
    """Return a row per placement, each planned for, and why other placements are impossible."""
    problem, baseline = solution.problem, alternatives[0]
    demanded = problem.demanded(component)

    def against(option: Alternative) -> str:
        """Return the directives that the alternative ignores."""
        dropped_directives = sorted(demanded - {option.placement}) if option.placement else []
        return f"without {', '.join(dropped_directives)}" if dropped_directives else ""

    weights = solution.chosen.component(component).weight_bytes()
    units = Units(max(baseline.peak_bytes, weights))
    rows, notes = [[component, "predicted", "vs plan", "moved", "peak", ""]], []
    largest_gap = 0.0
    for option in alternatives:
        title, cells = TITLES[option.placement], list[str | float]([""] * 4)
        if option.variant:
            precision, backing_store, device = option.variant.split()
            place = {"device": "", "cpu": " on the CPU"}.get(device, f" on {device}")
            title = f"as {precision}{place} from {backing_store}"
        remarks = [f"--allow {option.permission}"] if option.permission else []
        if option.fits:
            extra = option.seconds - baseline.seconds
            difference = f"{'-' if extra < 0 else '+'}{show_seconds(abs(extra))}"
            # that of the plan itself is on the screen of the plan
            is_rough = option is not baseline and not option.is_same_plan and option.is_rough
            largest_gap = max(largest_gap, is_rough * (1 - option.bound_seconds / option.seconds))
            cells = [
                f"{'<' * is_rough}{show_seconds(option.seconds)}",
                "" if option is baseline else difference,
                option.moved_bytes,
                option.peak_bytes,
            ]
            if option.is_same_plan and option is not baseline:
                remarks = ["the same plan"]
            remarks = remarks or [against(option)]
        else:
            remarks.insert(0, "impossible" if option.refusal else "does not fit")
            notes.append(f" {title}: {_why(option, problem)}")
        first, *rest = textwrap.wrap(", ".join(remarks), MARK_COLUMNS) or [""]
        rows += [units.row(title, *cells, first), *([*[""] * 5, line] for line in rest)]
    (streamed,) = listed("streamed in", list(phase_streams(solution.plan.slots, component))) or [
        "not streamed"
    ]
    look = Look()
    head = look.folded(
        f"{component} in {problem.graph}: {show_size(weights)} of weights, {streamed}; "
        f"{show_size(problem.effective_bytes)} for tensors"
    )
    notes = [
        f" sizes in {units.size}; every row is a plan of its own: other components may be placed "
        "differently",
        *[f" <: a longer search may find at most {largest_gap:.1%} less"] * bool(largest_gap),
        *notes,
        *precision_lines(option.permission for option in alternatives),
    ]
    grid = table(rows, left_columns=(0, 5), width=look.width)
    return "\n".join((head, "", grid, *map(look.folded, notes)))


def faster_than(solution: Solution, is_cached: bool) -> str:
    """Return a line for a plan that replaces ``solution``, and the cached plan if ``is_cached``."""
    seconds = show_seconds(solution.seconds)
    return (
        f" as planned: one of these rows, since it is faster than the {seconds} "
        f"before{'; graphrun plan shows it from now on' * is_cached}"
    )


def _why(alternative: Alternative, problem: Problem) -> str:
    if alternative.refusal:
        return alternative.refusal
    needs = [
        f"{need.phase} {need.part} needs {show_size(need.total_bytes)}, more than "
        f"{show_size(need.available_bytes)}"
        for need in alternative.needs
    ]
    return (
        f"{'; '.join(needs)}; enough: {_device_option(problem, alternative.sufficient_bytes)}"
        if needs
        else f"{alternative.binding} is the limit"
    )


def alternatives_json(
    solution: Solution, component: str, alternatives: Sequence[Alternative]
) -> dict[str, Any]:
    """Return the content of `alternatives_screen` as data. ``extra_seconds`` and
    ``extra_moved_bytes`` are differences to the plan."""
    rows = []
    for option in alternatives:
        row: dict[str, Any] = {
            "placement": option.placement or ("variant" if option.variant else "planned"),
            "feasible": option.fits,
        }
        row |= {"variant": option.variant} if option.variant else {}
        row |= {"needs_permission": option.permission} if option.permission else {}
        if option.fits:
            row |= {
                "predicted_seconds": option.seconds,
                "bound_seconds": option.bound_seconds,
                "extra_seconds": option.seconds - alternatives[0].seconds,
            }
            row |= {
                "moved_bytes": option.moved_bytes,
                "extra_moved_bytes": option.moved_bytes - alternatives[0].moved_bytes,
            }
            row |= {"peak_bytes": option.peak_bytes, "same_plan": option.is_same_plan}
        elif option.refusal:
            row["refusal"] = option.refusal
        else:
            row |= figures(option, "binding", "sufficient_bytes") | {
                "needs": [asdict(need) for need in option.needs]
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


# (value of the swept input, its points); ("", points) without a sweep
Swept = Sequence[tuple[str, Sequence[FrontierPoint]]]


def frontier_screen(
    problem: Problem, series: Swept, name: str = "", look: Look | None = None
) -> str:
    """Return the screen of ``graphrun frontier``: conclusions, then a row per budget, and per value
    of the input ``name``."""
    look = look or Look()
    units = Units(max(point.budget_bytes for _, points in series for point in points))
    rows = [
        [name, f"budget {units.size}", "predicted", "waits", "moved", "peak", "headroom", "proof"]
    ]
    rows += [
        units.row(value, point.budget_bytes, *_cells(point))
        for value, points in series
        for point in points
    ]
    return "\n".join(
        (
            *(_largest(series, name) if name else _notes(problem, series[0][1])),
            *look.next_lines,
            "",
            look.folded(f"frontier {subject(problem, name)}"),
            f"hardware {problem.hardware.name} ({problem.hardware.basis})"
            f"{ram_text(problem)}  cold run",
            *_other_budgets(problem, series[0][1][0].device),
            *_directives(problem),
            "",
            table(rows if name else [row[1:] for row in rows], left_columns=()),
            f" sizes in {units.size}; waits: nothing computes",
        )
    )


def _other_budgets(problem: Problem, varied: int) -> list[str]:
    """With several devices, return which budget is varied, and the budgets of the others."""
    if not problem.secondaries:
        return []
    budgets = enumerate(
        [
            (problem.hardware, problem.budget_bytes),
            *((secondary.hardware, secondary.budget_bytes) for secondary in problem.secondaries),
        ]
    )
    texts = [
        f"device{n} {hardware.name} {'is varied' if n == varied else show_size(nbytes)}"
        for n, (hardware, nbytes) in budgets
    ]
    return [f"budgets: {', '.join(texts)}"]


def _cells(point: FrontierPoint) -> list[str | float]:
    if (solution := point.solution) is None:
        minimum_text = show_size(point.smallest_ram_bytes) + " of RAM"  # if VRAM is not short
        if point.smallest_budget_bytes > point.budget_bytes or point.device:
            minimum_text = (
                show_size(point.smallest_budget_bytes) if point.smallest_budget_bytes else "more"
            )
        return ["does not fit", "", "", "", "", f"needs {minimum_text}"]
    waiting_text = show_seconds(max(0.0, point.seconds - point.compute_seconds))
    problem = solution.problem
    spare_bytes = (
        problem.secondaries[point.device - 1] if point.device else problem
    ).effective_bytes - point.peak_bytes
    return [
        show_seconds(point.seconds),
        waiting_text,
        point.moved_bytes,
        point.peak_bytes,
        spare_bytes,
        _short_proof(solution),
    ]


def _short_proof(solution: Solution) -> str:
    """Return `proof` for a narrow column."""
    is_bounded = not solution.proven_optimal and solution.bound_seconds
    return f"within {gap_text(solution)}" if is_bounded else proof(solution)


def fastest(points: Sequence[FrontierPoint]) -> FrontierPoint | None:
    """Return the point with the smallest budget of those within 1 % of the fastest; None if nothing
    fits."""
    feasible_points = [point for point in points if point.fits]
    limit = 1.01 * min((point.seconds for point in feasible_points), default=0.0)
    return min(
        (point for point in feasible_points if point.seconds <= limit),
        key=lambda point: point.budget_bytes,
        default=None,
    )


def _notes(problem: Problem, points: Sequence[FrontierPoint]) -> list[str]:
    minimum_bytes = points[0].smallest_budget_bytes
    notes = (
        [f"minimum {problem.hardware.budget_name}: {_device_option(problem, minimum_bytes)}"]
        if minimum_bytes
        else []
    )
    if (best := fastest(points)) is not None:
        notes.insert(
            0, f"fastest: {show_seconds(best.seconds)}, from {show_size(best.budget_bytes)} on"
        )
    return notes


def _hardware(problem: Problem, device: int) -> Hardware:
    return problem.secondaries[device - 1].hardware if device else problem.hardware


def _largest_of(series: Swept) -> list[tuple[int, str | None, float]]:
    """Return, for each budget, its bytes, the largest value that fits, and the seconds with it.
    Every value was planned for: a smaller value is not assumed to fit."""
    largest_values = []
    for number, first in enumerate(series[0][1]):
        feasible_values = [
            (value, points[number].seconds) for value, points in series if points[number].fits
        ]
        largest_values.append(
            (first.budget_bytes, *(feasible_values[-1] if feasible_values else (None, 0.0)))
        )
    return largest_values


def _largest(series: Swept, name: str) -> list[str]:
    return [
        f"within {show_size(nbytes)}: "
        + (
            f"{name} up to {value}, predicted {show_seconds(seconds)}"
            if value
            else f"none of these values of {name} fits"
        )
        for nbytes, value, seconds in _largest_of(series)
    ]


def frontier_json(problem: Problem, series: Swept, name: str = "") -> dict[str, Any]:
    """Return the content of `frontier_screen` as data: ``points`` has an object per row; with a
    sweep, ``largest`` has the largest value that fits each budget."""
    points = []
    for value, value_points in series:
        for point in value_points:
            entry = {
                **({name: value} if name else {}),
                "budget_bytes": point.budget_bytes,
                "feasible": point.fits,
            }
            entry |= figures(point, "smallest_budget_bytes", "smallest_ram_bytes")
            if point.solution is not None:
                entry |= {
                    "predicted_seconds": point.seconds,
                    "compute_seconds": point.compute_seconds,
                }
                entry |= figures(point.solution, "bound_seconds", "proven_optimal") | figures(
                    point, "peak_bytes", "moved_bytes"
                )
            points.append(entry)
    data = {
        "graph": problem.graph,
        "hardware": problem.hardware.name,
        **figures(problem, "ram_bytes", "until", "reserve_bytes"),
        "directives": directives(problem),
        "settings": {key: value for key, value in problem.settings if key != name},
        "points": points,
    }
    if problem.secondaries:
        data["device"] = series[0][1][0].device
    if name:
        largest = [
            {"budget_bytes": nbytes, name: value} for nbytes, value, _ in _largest_of(series)
        ]
        data |= {"sweep": name, "largest": largest}
    return data


WIDTH, HEIGHT, MARGIN = 720, 420, 60


def frontier_svg(
    problem: Problem, series: Swept, name: str = "", *, marked_bytes: int | None = None
) -> str:
    """Return predicted seconds (y) against budget (x) as SVG text, one line per value of ``name``.
    Both axes start at 0. ``marked_bytes``: a budget to mark, such as the plan's on the page."""
    bottom = HEIGHT - MARGIN
    most_bytes = max((point.budget_bytes for _, points in series for point in points), default=1)
    most_seconds = 1.05 * max(
        (point.seconds for _, points in series for point in points if point.fits), default=1.0
    )

    def x(nbytes: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * nbytes / most_bytes

    def y(seconds: float) -> float:
        return bottom - (bottom - MARGIN) * seconds / most_seconds

    def text(x: float, y: float, content: str, anchor: str = "start", color: str = "black") -> str:
        return element(
            "text", escape(content), x=float(x), y=float(y), text_anchor=anchor, fill=color
        )

    def elements() -> Iterator[str]:
        units = Units(most_bytes)
        yield element("rect", width=WIDTH, height=HEIGHT, fill="white")
        hardware = _hardware(problem, series[0][1][0].device if series[0][1] else 0)
        yield text(
            MARGIN,
            30,
            f"{problem.graph} on {hardware.name}: predicted time against "
            f"{hardware.budget_name} budget",
        )
        yield element(
            "path", d=f"M{MARGIN} {MARGIN}V{bottom}H{WIDTH - MARGIN}", fill="none", stroke="black"
        )
        if marked_bytes is not None:
            path = f"M{x(marked_bytes):.1f} {MARGIN}V{bottom}"
            yield element("path", class_="budget", d=path, stroke="#c0392b", stroke_dasharray="6 4")
            yield text(x(marked_bytes) + 6, bottom - 8, "this budget", color="#c0392b")
        for tick in round_ticks(most_bytes / units.size_bytes):
            yield text(x(tick * units.size_bytes), bottom + 18, f"{tick:g} {units.size}", "middle")
        for seconds in round_ticks(most_seconds):
            yield element("path", d=f"M{MARGIN} {y(seconds):.1f}H{WIDTH - MARGIN}", stroke="#ddd")
            yield text(MARGIN - 6, y(seconds) + 4, tick_seconds(seconds), "end")
        for number, (value, points) in enumerate(series):
            color = f"hsl({210 + 360 * number // len(series)},70%,40%)"
            if spots := [
                (x(point.budget_bytes), y(point.seconds)) for point in points if point.fits
            ]:
                line = " ".join(f"{spot_x:.1f},{spot_y:.1f}" for spot_x, spot_y in spots)
                yield element("polyline", points=line, fill="none", stroke=color, stroke_width=2)
                for spot_x, spot_y in spots:
                    yield element("circle", cx=spot_x, cy=spot_y, r=3, fill=color)
                if name:
                    yield text(spots[-1][0] + 6, spots[-1][1] - 6, f"{name}={value}", color=color)

    return picture([*elements()], f"0 0 {WIDTH} {HEIGHT}", font_family="sans-serif", font_size=12)
