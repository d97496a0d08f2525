"""The screen of ``graphrun compare``, and what ``graphrun export`` says about an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphrun.report.command_lines import folded_command
from graphrun.report.screen import Look, range_note
from graphrun.report.table import Units, table
from graphrun.units import roughly, show_size

SIMULATED = "by simulation of its placement of weights, with PyTorch's kernels"


def compare_screen(summary: Mapping[str, Any], width: int = 80) -> str:
    """Return graphrun and the engines of ``summary`` in a table, and what to type for each."""
    look, rows = Look(width), summary["engines"]
    peaks = [summary["peak_bytes"], *(row["peak_bytes"] for row in rows)]
    seconds = [summary["seconds"] or 0.0, *(row["seconds"] for row in rows)]
    units = Units(max(peaks), max(seconds))
    lines = [
        ["engine", units.time, "range", "ratio", f"peak {units.size}", ""],
        [
            "graphrun",
            *(units.row(summary["seconds"]) if summary["seconds"] is not None else ["-"]),
            _range(summary, units),
            "1.00",
            *units.row(summary["peak_bytes"]),
            "",
        ],
    ]
    for row in rows:
        figures = units.row(row["seconds"], _range(row, units), _ratio(row), row["peak_bytes"])
        lines.append([row["engine"], *figures, _remark(row)])
    parts = [
        look.folded(_verdict(summary)),
        "",
        table(lines, left_columns=(0, 5)),
        look.folded(
            f" a warm run on {summary['hardware']} ({summary['basis']}), {SIMULATED}; whether an "
            f"engine has the model is not checked{range_note([summary, *rows])}"
        ),
    ]
    for row in rows:
        reason = f" ({row['reason']})" if row["reason"] else ""
        parts += ["", look.folded(f"{row['engine']}{reason}:")]
        parts.append(folded_command(row["command"], width))
    return "\n".join(parts)


def export_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return what there is to say about the one engine of ``summary``: what it costs, what is
    lost."""
    (row,) = summary["engines"]
    name, budget = row["engine"], show_size(summary["budget_bytes"])
    figures = f"a warm run takes {roughly(row['seconds'])}"
    if row["ratio"] is not None:
        figures = (
            f"within {row['ratio']:.2f}x of the plan: {figures}, the plan's "
            f"{roughly(summary['seconds'])}"
        )
    figures += f", and {show_size(row['peak_bytes'])} of {budget}"
    lines = [f"{name}: {figures}, {SIMULATED}"]
    lines += [f"not counted for {name}: {row['caveat']}"] if row["caveat"] else []
    if not row["fits"]:
        lines.append(f"{name} does not fit: {row['reason']}")
    elif summary["fastest"] == name:
        lines.append(f"use {name}: it is faster than the plan")
    return lines + [f"lost in {name}: {sentence}" for sentence in row["lost"]]


def _remark(row: Mapping[str, Any]) -> str:
    """Return whether the engine of ``row`` does not fit, and what its figures leave out."""
    caveat = f"not counted: {row['caveat']}" if row["caveat"] else ""
    return "; ".join(filter(None, ("" if row["fits"] else "does not fit", caveat)))


def _range(row: Mapping[str, Any], units: Units) -> str:
    """Return the probable range of a row's seconds; "-" if there is none."""
    bounds = row["seconds_range"]
    if not bounds or bounds[0] == bounds[1]:
        return "-"
    scale = 1 if units.time == "s" else 1e3
    return " to ".join(f"{scale * bound:.0f}" for bound in bounds)


def _ratio(row: Mapping[str, Any]) -> str:
    return f"{row['ratio']:.2f}" if row["ratio"] is not None else "-"


def _verdict(summary: Mapping[str, Any]) -> str:
    """Return which engine to use."""
    budget, best = show_size(summary["budget_bytes"]), summary["fastest"]
    rows = {row["engine"]: row for row in summary["engines"]}
    if summary["seconds"] is None:
        return f"{summary['graph']} within {budget}: no session of graphrun fits"
    seconds = roughly(summary["seconds"])
    if best in rows:
        return (
            f"use {best}: {roughly(rows[best]['seconds'])} a warm run of {summary['graph']} within "
            f"{budget}, graphrun {seconds}"
        )
    ratios = {
        name: row["ratio"]
        for name, row in rows.items()
        if row["fits"] and row["ratio"] and (row["ratio"] >= 1 or not row["caveat"])
    }
    verdict = f"use graphrun: {seconds} a warm run of {summary['graph']} within {budget}"
    if not ratios:
        return f"{verdict}; no other engine fits"
    second = min(ratios, key=lambda name: ratios[name])
    return f"{verdict}; {second} takes {ratios[second]:.2f} times as long"
