"""Screens and JSON of what else could be: what helps an infeasible budget, other placements of a
component, the frontier.

infeasible    the phases that do not fit, the smallest budget that works, and repairs alternatives
``graphrun explain PLAN COMPONENT``: the cost of every other placement and variant of a component
frontier      predicted time against budget (text, JSON, SVG), and the largest value of an input
that fits
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from itertools import zip_longest
from typing import Any

from graphrun.model.problem import Hardware, Problem
from graphrun.model.solution import Solution
from graphrun.report.command_lines import folded_options
from graphrun.report.precisions import measured
from graphrun.report.screen import Look, listed, proof, streams_of, subject, terms
from graphrun.report.summary import directives, figures
from graphrun.report.svg import element, picture, round_ticks, tick_seconds
from graphrun.report.table import Units, table
from graphrun.solve.alternatives import Alternative
from graphrun.solve.frontier import Point
from graphrun.solve.infeasible import Infeasible
from graphrun.solve.repairs import Repair, sizes_in, typed_value
from graphrun.units import show_seconds, show_size

# What each directive of `graphrun.solve.alternatives` means for a component; "": the plan itself.
TITLES = {
    "": "as planned",
    "whole": "whole in all of its phases",
    "exclude": "all blocks streamed, none kept",
    "drop": "loaded again for each of its phases",
    "keep": "kept from its first use to the end",
}


def infeasible_screen(error: Infeasible, look: Look | None = None) -> str:
    """What ``graphrun plan`` and ``run`` show with exit code 3. With a byte less than the smallest
    budgets, no plan is found."""
    look = look or Look()
    budgets = f"{show_size(error.budget_bytes)} of VRAM and {show_size(error.ram_bytes)} of RAM"
    verdict = f"fits: no. No plan runs {error.graph} on {error.hardware} within {budgets}; {error.binding} binds"
    lines = [look.first(verdict), *map(look.folded, _directives(error.problem)), ""]
    if error.needs:
        units = Units(max(need.total_bytes for need in error.needs))
        rows = [["phase", "weights", "ring_buffer", "activation", "values", "least", "have"]]
        rows += [
            units.row(
                f"{need.phase} {need.part}",
                *figures(need, *TERMS, "total_bytes", "available_bytes").values(),
            )
            for need in error.needs
        ]
        note = f"sizes in {units.size}; weights: what cannot be streamed; values: outputs passed between stages"
        lines += [table(rows, left=(0,), width=look.width), f" {look.folded(note)}", ""]
    if error.smallest_ram_bytes > error.ram_bytes:
        units = Units(error.smallest_ram_bytes)
        rows = [
            units.row(*row)
            for row in (*error.host_bytes, ("at one time", error.smallest_ram_bytes))
        ]
        lines += [table([["minimum in RAM", units.size], *rows], left=(0,)), ""]
    lines += [
        look.folded(f"{_smallest_title(error.problem)}: {_smallest(error)}"),
        "what helps, by predicted time, changes of the output last:",
    ]
    return "\n".join([*lines, *_helping(error.repairs, error.capacity_bytes, look)])


def advice_screen(solution: Solution, found: Sequence[Repair], look: Look) -> str:
    """What would make a slow plan faster."""
    title = look.folded(
        "mostly waiting; what would help, seconds of a run, changes of the output last:"
    )
    return "\n".join(
        [title, *_helping(found, solution.problem.hardware.capacity_bytes, look, texts=True)]
    )


def _helping(
    repairs: Sequence[Repair], capacity_bytes: int, look: Look, texts: bool = False
) -> Iterator[str]:
    """A table of what can be typed, then the others. ``texts``: what each is in words."""

    def words(repair: Repair) -> str:
        files = ", from a checkpoint already in that precision" * (
            ("--source", "FOLDER") in repair.change
        )
        return f"changes the output{files}" if repair.changes_output else repair.text * texts

    options = {repair: typed(repair, capacity_bytes) for repair in repairs}
    if rows := [
        (of, show_seconds(repair.seconds), words(repair)) for repair, of in options.items() if of
    ]:
        yield table(list(_folded_rows(rows, look.width)), left=(0, 2))
    for repair, of in options.items():
        if repair.change and not of:
            yield look.folded(f" {repair.text}: {show_seconds(repair.seconds)}")
    allowed = [
        value for repair in repairs for option, value in repair.change if option == "--allow"
    ]
    yield from map(look.folded, measured(allowed))


def _folded_rows(
    rows: Sequence[tuple[str, str, str]], width: int
) -> Iterator[tuple[str, str, str]]:
    """``rows`` of options, seconds and words, each over several lines where it is wider than
    ``width``."""
    seconds_columns = max(len(seconds) for _, seconds, _ in rows)
    options = [
        folded_options(typed_options, width - seconds_columns - WORDS_COLUMNS - 5)
        for typed_options, _, _ in rows
    ]
    # 5: between columns
    words_columns = (
        width - seconds_columns - max(len(line) for lines in options for line in lines) - 5
    )
    for lines, (_, seconds, words) in zip(options, rows, strict=True):
        yield from zip_longest(lines, [seconds], textwrap.wrap(words, words_columns), fillvalue="")


def typed(repair: Repair, capacity_bytes: int) -> str:
    """The options to type for ``repair``, with rounded sizes; empty where options alone do not do:
    a directive left out, a second command, a larger device."""
    for option, value in repair.change:
        if (
            not value
            or option == "--until"
            or (option == "--vram" and sizes_in(value)[0] > capacity_bytes)
        ):
            return ""
    return " ".join(f"{option} {typed_value(option, value)}" for option, value in repair.change)


WORDS_COLUMNS = 25  # at least, of what a change means, beside its options
# The bytes of a slot, as in `graphrun.model.least_memory.PhaseMinimum`.
TERMS = ("weights_bytes", "ring_buffer_bytes", "activation_bytes", "values_bytes")


def _directives(problem: Problem) -> list[str]:
    """A line with the problem's directives and reserve; nothing where there are none."""
    reserve = [f"reserve {show_size(problem.reserve_bytes)}"] if problem.reserve_bytes else []
    return listed("directives", [*directives(problem), *reserve])


def _smallest_title(problem: Problem) -> str:
    """That no plan exists for less is proven in bytes of tensors; in pages, no plan was found."""
    return "minimum VRAM" if problem.counts_pages else "smallest budget that works"


def _smallest(error: Infeasible) -> str:
    """The smallest budgets as command line options, for those budgets that are too small."""
    names = {"VRAM": "--vram", "RAM": "--ram", "pinned RAM": "--pinned", "disk": "--disk"}
    options = [
        f"a device with {show_size(tier.least_bytes)}, and this one has {show_size(tier.have_bytes)}"
        if tier.name == "VRAM" and tier.least_bytes > error.capacity_bytes
        else _option(names[tier.name], tier.least_bytes, error.problem)
        for tier in error.tiers
        if tier.short
    ]
    return " and ".join(options) or "none, with what is allowed"


def _option(name: str, nbytes: int, problem: Problem) -> str:
    value = problem.vram_option(nbytes) if name == "--vram" else str(nbytes)
    return f"{name} {typed_value(name, value)} ({nbytes} bytes)"


def infeasible_json(error: Infeasible) -> dict[str, Any]:
    """The same as data: ``feasible`` is false."""
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
        "repairs": repairs_json(error.repairs),
    }


def repairs_json(repairs: Sequence[Repair]) -> list[dict[str, Any]]:
    """Repairs, or advice, as data."""
    return [
        {
            "text": repair.text,
            "change": [" ".join(pair).strip() for pair in repair.change],
            "predicted_seconds": repair.seconds,
            "changes_output": repair.changes_output,
        }
        for repair in repairs
    ]


def alternatives_screen(solution: Solution, component: str, found: Sequence[Alternative]) -> str:
    """The screen: a row per placement, each solved for, and the reasons why others are
    impossible."""
    problem, planned = solution.problem, found[0]
    demanded = problem.demanded(component)

    def against(option: Alternative) -> str:
        """The directives that an alternative does without."""
        dropped = sorted(demanded - {option.placement}) if option.placement else []
        return f"without the directive {', '.join(dropped)}" if dropped else ""

    weights = solution.chosen.component(component).weight_bytes()
    units = Units(max(planned.peak_bytes, weights))
    rows, notes = [[component, "predicted", "vs plan", f"moved {units.size}", "peak", ""]], []
    for option in found:
        title = TITLES[option.placement]
        if option.variant:
            precision, backing_store, device = option.variant.split()
            where = {"device": "", "cpu": ", on the CPU"}.get(device, f", on {device}")
            title = f"as {precision} from {backing_store}{where}"
        mark = f"needs --allow {option.permission}" if option.permission else ""
        if option.fits:
            difference = "" if option is planned else f"{option.seconds - planned.seconds:+.3f} s"
            mark = (
                "the same plan"
                if option.same and option is not planned
                else mark or against(option)
            )
            rows.append(
                units.row(
                    title,
                    show_seconds(option.seconds),
                    difference,
                    option.moved_bytes,
                    option.peak_bytes,
                    mark,
                )
            )
        else:
            rows.append(
                [title, "impossible" if option.refusal else "does not fit", "", "", "", mark]
            )
            notes.append(f" {title}: {_why(option, problem)}")
    (streamed,) = listed("streamed in", list(streams_of(solution.plan.slots, component))) or [
        "not streamed"
    ]
    head = f"{component} in {problem.graph}: {show_size(weights)} of weights, {streamed};"
    head += f" {show_size(problem.effective_bytes)} for tensors"
    foot = " every row is a separate plan, solved and simulated; the placement of the other components may differ in it"
    pictures = map(Look().folded, measured(option.permission for option in found))
    return "\n".join((head, "", table(rows, left=(0, 5)), foot, *notes, *pictures))


def faster_than(solution: Solution, kept: bool) -> str:
    """A line for a plan that takes the place of ``solution``; ``kept``: in the cache too."""
    seconds = show_seconds(solution.simulation.total_seconds)
    return f" as planned: found among these rows, faster than the {seconds} before{'; graphrun plan has it from now on' * kept}"


def _why(of: Alternative, problem: Problem) -> str:
    if of.refusal:
        return of.refusal
    needs = [
        f"{need.phase} {need.part} takes {show_size(need.total_bytes)} ="
        f" {terms(*figures(need, *TERMS).values())} > {show_size(need.available_bytes)}"
        for need in of.needs
    ]
    return (
        f"{'; '.join(needs)}; it takes {_option('--vram', of.smallest_budget_bytes, problem)}"
        if needs
        else f"{of.binding} binds"
    )


def alternatives_json(
    solution: Solution, component: str, found: Sequence[Alternative]
) -> dict[str, Any]:
    """The same as data; ``extra_seconds`` and ``extra_moved_bytes`` are the differences to the
    plan."""
    rows = []
    for option in found:
        row: dict[str, Any] = {
            "placement": option.placement or ("variant" if option.variant else "planned"),
            "feasible": option.fits,
        }
        row |= {"variant": option.variant} if option.variant else {}
        row |= {"needs_permission": option.permission} if option.permission else {}
        if option.fits:
            row |= {
                "predicted_seconds": option.seconds,
                "extra_seconds": option.seconds - found[0].seconds,
            }
            row |= {
                "moved_bytes": option.moved_bytes,
                "extra_moved_bytes": option.moved_bytes - found[0].moved_bytes,
            }
            row |= {"peak_bytes": option.peak_bytes, "same_plan": option.same}
        elif option.refusal:
            row["refusal"] = option.refusal
        else:
            row |= figures(option, "binding", "smallest_budget_bytes") | {
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


# (value of the swept input, its points); ("", points) without one
Swept = Sequence[tuple[str, Sequence[Point]]]


def frontier_screen(
    problem: Problem, swept: Swept, name: str = "", look: Look | None = None
) -> str:
    """What ``graphrun frontier`` shows: conclusions, then a row per budget (and per value of the
    input ``name``)."""
    look = look or Look()
    units = Units(max(point.budget_bytes for _, of in swept for point in of))
    rows = [
        [name, f"budget {units.size}", "predicted", "exposed", "moved", "peak", "headroom", "proof"]
    ]
    rows += [
        units.row(value, point.budget_bytes, *_cells(point)) for value, of in swept for point in of
    ]
    return "\n".join(
        (
            *(_largest(swept, name) if name else _notes(problem, swept[0][1])),
            *look.next_lines,
            "",
            look.folded(f"frontier {subject(problem, name)}"),
            f"hardware {problem.hardware.name} ({problem.hardware.basis})  RAM {show_size(problem.ram_bytes)}  cold run",
            *_other_budgets(problem, swept[0][1][0].device),
            *_directives(problem),
            "",
            table(rows if name else [row[1:] for row in rows], left=()),
            f" sizes in {units.size}; exposed: predicted time in which the device waits for copies",
        )
    )


def _other_budgets(problem: Problem, varied: int) -> list[str]:
    """Of several devices, which budget is varied, and those of the others."""
    if not problem.secondaries:
        return []
    of = enumerate(
        [
            (problem.hardware, problem.budget_bytes),
            *((of.hardware, of.budget_bytes) for of in problem.secondaries),
        ]
    )
    told = [
        f"device{n} {hardware.name} {'is varied' if n == varied else show_size(nbytes)}"
        for n, (hardware, nbytes) in of
    ]
    return [f"budgets: {', '.join(told)}"]


def _cells(point: Point) -> list[str | float]:
    if (solution := point.solution) is None:
        least = show_size(point.smallest_ram_bytes) + " of RAM"
        if point.smallest_budget_bytes > point.budget_bytes or point.device:
            least = (
                show_size(point.smallest_budget_bytes) if point.smallest_budget_bytes else "more"
            )
        return ["does not fit", "", "", "", "", f"needs {least}"]
    exposed = show_seconds(max(0.0, point.seconds - point.compute_seconds))
    problem = solution.problem
    spare_bytes = (
        problem.secondaries[point.device - 1] if point.device else problem
    ).effective_bytes - point.peak_bytes
    return [
        show_seconds(point.seconds),
        exposed,
        point.moved_bytes,
        point.peak_bytes,
        spare_bytes,
        proof(solution).removesuffix(" of optimal"),
    ]


def fastest(points: Sequence[Point]) -> Point | None:
    """The fastest point, with the smallest budget where several are as fast; None where nothing
    fits."""
    fitting = [point for point in points if point.fits]
    return min(
        fitting, key=lambda point: (round(point.seconds, 3), point.budget_bytes), default=None
    )


def _notes(problem: Problem, points: Sequence[Point]) -> list[str]:
    least = points[0].smallest_budget_bytes
    notes = [f"{_smallest_title(problem)}: {_option('--vram', least, problem)}"] if least else []
    if (best := fastest(points)) is not None:
        notes.insert(
            0, f"fastest: {show_seconds(best.seconds)}, from {show_size(best.budget_bytes)} on"
        )
    return notes


def _hardware(problem: Problem, device: int) -> Hardware:
    return problem.secondaries[device - 1].hardware if device else problem.hardware


def _largest_of(swept: Swept) -> list[tuple[int, str | None, float]]:
    """For each budget its bytes, the largest value that fits, and the seconds with it.

    Every value was solved for: smaller values are not assumed to fit.
    """
    found = []
    for number, first in enumerate(swept[0][1]):
        fitting = [(value, of[number].seconds) for value, of in swept if of[number].fits]
        found.append((first.budget_bytes, *(fitting[-1] if fitting else (None, 0.0))))
    return found


def _largest(swept: Swept, name: str) -> list[str]:
    return [
        f"within {show_size(nbytes)}: "
        + (
            f"{name} up to {value}, predicted {show_seconds(seconds)}"
            if value
            else f"none of these values of {name} fits"
        )
        for nbytes, value, seconds in _largest_of(swept)
    ]


def frontier_json(problem: Problem, swept: Swept, name: str = "") -> dict[str, Any]:
    """The same as data: ``points`` has an entry per row; ``largest`` (with a sweep) the largest
    value that fits each budget."""
    points = []
    for value, of in swept:
        for point in of:
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
        data["device"] = swept[0][1][0].device
    if name:
        largest = [{"budget_bytes": nbytes, name: value} for nbytes, value, _ in _largest_of(swept)]
        data |= {"sweep": name, "largest": largest}
    return data


WIDTH, HEIGHT, MARGIN = 720, 420, 60


def frontier_svg(
    problem: Problem, swept: Swept, name: str = "", *, marked_bytes: int | None = None
) -> str:
    """Predicted seconds (y, from 0) against budget (x, from 0) as SVG text, one line per value of
    ``name``.

    ``marked_bytes``: a budget to mark, such as that of the plan on the same page.
    """
    bottom = HEIGHT - MARGIN
    most_bytes = max((point.budget_bytes for _, of in swept for point in of), default=1)
    most_seconds = 1.05 * max(
        (point.seconds for _, of in swept for point in of if point.fits), default=1.0
    )

    def x(nbytes: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * nbytes / most_bytes

    def y(seconds: float) -> float:
        return bottom - (bottom - MARGIN) * seconds / most_seconds

    def text(x: float, y: float, shown: str, anchor: str = "start", color: str = "black") -> str:
        return element(
            "text", escape(shown), x=float(x), y=float(y), text_anchor=anchor, fill=color
        )

    def elements() -> Iterator[str]:
        units = Units(most_bytes)
        yield element("rect", width=WIDTH, height=HEIGHT, fill="white")
        hardware = _hardware(problem, swept[0][1][0].device if swept[0][1] else 0)
        yield text(
            MARGIN, 30, f"{problem.graph} on {hardware.name}: predicted time against VRAM budget"
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
        for number, (value, of) in enumerate(swept):
            color = f"hsl({210 + 360 * number // len(swept)},70%,40%)"
            if spots := [(x(point.budget_bytes), y(point.seconds)) for point in of if point.fits]:
                line = " ".join(f"{across:.1f},{up:.1f}" for across, up in spots)
                yield element("polyline", points=line, fill="none", stroke=color, stroke_width=2)
                for across, up in spots:
                    yield element("circle", cx=across, cy=up, r=3, fill=color)
                if name:
                    yield text(spots[-1][0] + 6, spots[-1][1] - 6, f"{name}={value}", color=color)

    return picture([*elements()], f"0 0 {WIDTH} {HEIGHT}", font_family="sans-serif", font_size=12)
