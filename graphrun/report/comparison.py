"""Comparison of two plans: conditions, figures, and components with other placements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from graphrun.model.solution import Solution
from graphrun.report.screen import backing_store_text, phase_streams, resident_counts
from graphrun.report.summary import summarize
from graphrun.report.table import table
from graphrun.units import show_seconds, show_size

# keys of `summarize`: the conditions of a plan, and its seconds and bytes
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


def compare(a: Solution, b: Solution) -> dict[str, Any]:
    """Return the differences between two plans as data.

    Every item has the values ``a`` and ``b``; None if a plan has no such value. ``conditions``:
    budgets, settings and other conditions that differ. ``figures`` and ``stages``: seconds and
    bytes, equal or not. ``moved``: components whose placement differs, in words, by phase and by
    backing store (``stored as``).
    """
    summary_a, summary_b = summarize(a, None), summarize(b, None)
    conditions = {
        name: (summary_a.get(name), summary_b.get(name)) for name in CONDITIONS
    } | _pairs_by_key(summary_a["settings"], summary_b["settings"])
    stages = [
        {stage["name"]: stage for stage in summary["stages"]} for summary in (summary_a, summary_b)
    ]
    places = [_places(solution) for solution in (a, b)]
    return {
        "same_plan": replace(a.plan, problem="") == replace(b.plan, problem=""),
        "conditions": [
            _pair(name, *values) for name, values in conditions.items() if values[0] != values[1]
        ],
        "figures": [
            _pair(name, summary_a.get(name), summary_b.get(name))
            for name in FIGURES
            if name in summary_a or name in summary_b
        ],
        "stages": [
            {"stage": stage, **_pair(name, *(row[name] if row else None for row in rows))}
            for stage, rows in _pairs_by_key(*stages).items()
            for name in ("seconds", "peak_bytes")
        ],
        "moved": [
            {"component": component, **_pair(place, *values)}
            for (component, place), values in _pairs_by_key(*places).items()
            if values[0] != values[1]
        ],
    }


def _pair(name: str, a: Any, b: Any) -> dict[str, Any]:
    return {"name": name, "a": a, "b": b}


def _pairs_by_key(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> dict[Any, tuple[Any, Any]]:
    """Return the values of ``a`` and ``b`` by key, in the order of ``a``; None if missing."""
    return {key: (a.get(key), b.get(key)) for key in (*a, *(key for key in b if key not in a))}


def _places(solution: Solution) -> dict[tuple[str, str], str]:
    """Return the placement and the storage of each component in words, by phase that uses it."""
    problem, slots = solution.chosen, solution.plan.all_slots
    places = {}
    for component in problem.components:
        variant, streams = component.variants[0], phase_streams(slots, component.name)
        resident = resident_counts(component, solution.plan.finds, slots)
        blocks = sum(len(group.blocks) for group in component.groups)
        places[component.name, "stored as"] = (
            f"{variant.precision}, {backing_store_text(variant.backing_store)}"
        )
        for phase in problem.phases:
            if not any(use.component == component.name for use in phase.uses):
                continue
            location = "resident" if variant.device == "device" else "on the CPU"
            if phase.name in streams:
                location = (
                    f"streamed, {resident[phase.name]} of {blocks} {component.granularity} stay"
                )
            places[component.name, phase.name] = location
    return places


def comparison_screen(comparison: Mapping[str, Any], a: str, b: str) -> str:
    """Return ``comparison``, from `compare`, as text; ``a`` and ``b`` name the plans."""
    lines = [f"{a} -> {b}{': the same plan' if comparison['same_plan'] else ''}"]
    lines += [_change(condition["name"], condition) for condition in comparison["conditions"]]
    rows = [
        ["", a, b, "change"],
        *(_row(figure["name"], figure) for figure in comparison["figures"]),
    ]
    rows += [_row(f"{stage['stage']} {stage['name']}", stage) for stage in comparison["stages"]]
    lines += ["", table([row for row in rows if row], left_columns=(0,))]
    lines += (
        [
            "",
            *(
                _change(f"{change['component']} {change['name']}", change)
                for change in comparison["moved"]
            ),
        ]
        if comparison["moved"]
        else []
    )
    return "\n".join(lines)


def _change(title: str, pair: Mapping[str, Any]) -> str:
    return (
        f" {title.removesuffix('_bytes')}: {_shown(pair['name'], pair['a'])} -> "
        f"{_shown(pair['name'], pair['b'])}"
    )


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
