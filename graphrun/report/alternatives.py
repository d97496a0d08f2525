"""Why a component is where it is: the screen and the JSON of what each other placement of it would cost."""

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
        "whole": "whole wherever it computes",
        "exclude": "all of it streamed, nothing kept",
        "drop": "loaded anew for each of its phases",
        "keep": "kept from its first use to the end",
    }
)


def alternatives_screen(solution: Solution, component: str, found: Sequence[Alternative]) -> str:
    """What ``graphrun explain PLAN COMPONENT`` shows: a row per placement, each solved for, and why the others are impossible."""
    problem, planned = solution.problem, found[0]
    weights = apply_choices(problem, solution.plan).component(component).weight_bytes()
    unit, scale = scale_of(max(planned.peak_bytes, weights))
    rows = [[f"{component}", "predicted", "against plan", f"moved {unit}", "peak", ""]]
    notes = []
    for of in found:
        title = _title(of)
        if not of.fits:
            mark = f"needs --allow {of.permission}" if of.permission else ""
            rows.append([title, "impossible" if of.refusal else "does not fit", "", "", "", mark])
            notes.append(f" {title}: {_why(of)}")
            continue
        against = "" if of is planned else f"{of.seconds - planned.seconds:+.3f} s"
        mark = "the same plan" if of.same and of is not planned else f"needs --allow {of.permission}" if of.permission else ""
        rows.append([title, show_seconds(of.seconds), against, size(of.moved_bytes, scale), size(of.peak_bytes, scale), mark])
    head = (
        f"{component} in {problem.graph}: {show_size(weights)} of weights,"
        f" {_now(solution, component)}; {show_size(problem.effective_bytes)} for tensors"
    )
    foot = " every row is a plan of its own, solved and simulated; other components are placed anew to suit it"
    return "\n".join((head, "", table(rows, left=(0, 5)), foot, *notes))


def _title(of: Alternative) -> str:
    if not of.variant:
        return TITLES[of.placement]
    precision, backing_store, device = of.variant.split()
    return f"as {precision} from {backing_store}{', on the CPU' if device == 'cpu' else ''}"


def _now(solution: Solution, component: str) -> str:
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
        (need.values_bytes, "values and carry"),
    )
    return " + ".join(f"{show_size(nbytes)} {name}" for nbytes, name in named if nbytes)


def alternatives_json(solution: Solution, component: str, found: Sequence[Alternative]) -> dict[str, Any]:
    """The same as data; ``extra_seconds`` and ``extra_moved_bytes`` are against the plan."""
    rows = []
    for of in found:
        row: dict[str, Any] = {"placement": of.placement or ("variant" if of.variant else "planned"), "feasible": of.fits}
        row |= {"variant": of.variant} if of.variant else {}
        row |= {"needs_permission": of.permission} if of.permission else {}
        if of.fits:
            row |= {"predicted_seconds": of.seconds, "extra_seconds": of.seconds - found[0].seconds}
            row |= {"moved_bytes": of.moved_bytes, "extra_moved_bytes": of.moved_bytes - found[0].moved_bytes}
            row |= {"peak_bytes": of.peak_bytes, "same_plan": of.same}
        elif of.refusal:
            row["refusal"] = of.refusal
        else:
            row |= {
                "binding": of.binding,
                "smallest_budget_bytes": of.smallest_budget_bytes,
                "needs": [asdict(need) for need in of.needs],
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
