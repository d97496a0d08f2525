"""``graphrun explain PLAN COMPONENT``: the cost of every other placement and variant of a component, as text and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from graphrun.model.choices import apply_choices
from graphrun.model.least_memory import PhaseMinimum
from graphrun.model.plan import Stream
from graphrun.model.solution import Solution
from graphrun.report.table import scale_of, size, table
from graphrun.solve.alternatives import Alternative
from graphrun.units import show_seconds, show_size

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
    weights = apply_choices(problem, solution.plan).component(component).weight_bytes()
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
        "weight_bytes": apply_choices(problem, solution.plan).component(component).weight_bytes(),
        "effective_bytes": problem.effective_bytes,
        "alternatives": rows,
    }
