"""Two plans beside each other: what they are for, what they take, and which components lie
elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from graphrun.model.solution import Solution
from graphrun.report.screen import held_blocks, streams_of
from graphrun.report.summary import summarize
from graphrun.report.table import table
from graphrun.units import show_seconds, show_size

# Keys of `summarize` that say what a plan is for, and those that say what it takes.
_LIMITS = ("budget_bytes", "reserve_bytes", "ram_bytes", "pinned_bytes")
CONDITIONS = (
    "graph",
    "until",
    "hardware",
    "regime",
    *_LIMITS,
    "directives",
    "allow",
    "precomputed",
    "options",
    "order",
)
FIGURES = (
    "predicted_seconds",
    "compute_seconds",
    "peak_bytes",
    "host_peak_bytes",
    "moved_bytes",
    "disk_bytes_read",
)


def compared(a: Solution, b: Solution) -> dict[str, Any]:
    """The differences between two plans as data; every entry has the values ``a`` and ``b``, None
    where a plan has none.

    ``conditions``: what differs in what they are for. ``figures`` and ``stages``: what both take,
    equal or not. ``moved``: the components whose placement differs, in words, per phase and for the
    backing store (``held as``).
    """
    one, two = summarize(a, None), summarize(b, None)
    conditions = {name: (one[name], two[name]) for name in CONDITIONS} | _beside(
        one["settings"], two["settings"]
    )
    stages = [{stage["name"]: stage for stage in each["stages"]} for each in (one, two)]
    places = [_places(solution) for solution in (a, b)]
    return {
        "same_plan": replace(a.plan, problem="") == replace(b.plan, problem=""),
        "conditions": [
            _pair(name, *values) for name, values in conditions.items() if values[0] != values[1]
        ],
        "figures": [_pair(name, one[name], two[name]) for name in FIGURES],
        "stages": [
            {"stage": stage, **_pair(name, *(row[name] if row else None for row in rows))}
            for stage, rows in _beside(*stages).items()
            for name in ("seconds", "peak_bytes")
        ],
        "moved": [
            {"component": component, **_pair(where, *values)}
            for (component, where), values in _beside(*places).items()
            if values[0] != values[1]
        ],
    }


def _pair(name: str, a: Any, b: Any) -> dict[str, Any]:
    return {"name": name, "a": a, "b": b}


def _beside(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> dict[Any, tuple[Any, Any]]:
    """The values of both by key, in the order of ``a``; None where there is none."""
    return {key: (a.get(key), b.get(key)) for key in (*a, *(key for key in b if key not in a))}


def _places(solution: Solution) -> dict[tuple[str, str], str]:
    """Where each component is in each phase that uses it, and what it is loaded from, in words."""
    problem, slots = solution.chosen, (*solution.plan.slots, *solution.plan.again)
    places = {}
    for component in problem.components:
        variant, streams = component.variants[0], streams_of(slots, component.name)
        held = list(zip(slots, held_blocks(component, solution.plan.finds, slots), strict=True))
        blocks = sum(len(group.blocks) for group in component.groups)
        places[component.name, "stored as"] = f"{variant.precision}, {variant.backing_store}"
        for phase in problem.phases:
            if not any(use.component == component.name for use in phase.uses):
                continue
            where = "resident" if variant.device == "device" else "on the CPU"
            if phase.name in streams:
                stay = max(count for slot, count in held if slot.phase == phase.name)
                where = f"streamed, {stay} of {blocks} {component.granularity} stay"
            places[component.name, phase.name] = where
    return places


def comparison_screen(found: Mapping[str, Any], a: str, b: str) -> str:
    """``found``, from `compared`, as text; ``a`` and ``b`` are what the plans are called."""
    lines = [f"{a} -> {b}{': the same plan' if found['same_plan'] else ''}"]
    lines += [_change(each["name"], each) for each in found["conditions"]]
    rows = [["", a, b, "change"], *(_row(each["name"], each) for each in found["figures"])]
    rows += [_row(f"{each['stage']} {each['name']}", each) for each in found["stages"]]
    lines += ["", table([row for row in rows if row], left=(0,))]
    lines += (
        ["", *(_change(f"{each['component']} {each['name']}", each) for each in found["moved"])]
        if found["moved"]
        else []
    )
    return "\n".join(lines)


def _change(title: str, pair: Mapping[str, Any]) -> str:
    return f" {title.removesuffix('_bytes')}: {_shown(pair['name'], pair['a'])} -> {_shown(pair['name'], pair['b'])}"


def _row(title: str, pair: Mapping[str, Any]) -> list[str]:
    a, b, name = pair["a"], pair["b"], pair["name"]
    change = (
        ""
        if None in (a, b)
        else "="
        if a == b
        else f"{100 * (b - a) / a:+.1f} %"
        if a
        else _shown(name, b)
    )
    return [
        title.removesuffix("_bytes").removesuffix("_seconds").replace("_", " "),
        _shown(name, a),
        _shown(name, b),
        change,
    ]


def _shown(name: str, value: Any) -> str:
    if value is None or value == "" or value == []:
        return "none"
    if name.endswith(("_bytes", "_bytes_read")):
        return show_size(value)
    if name.endswith("seconds"):
        return show_seconds(value)
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
