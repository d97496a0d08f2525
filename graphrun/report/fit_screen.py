"""The screen of ``graphrun fit``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphrun.report.command_lines import folded_command
from graphrun.report.precisions import precision_lines
from graphrun.report.screen import Look
from graphrun.report.table import table
from graphrun.units import GIB, roughly


def fit_screen(summary: Mapping[str, Any], width: int = 80) -> str:
    """Return the choices of ``summary``, best first, each with its command."""
    look, rows = Look(width), summary["choices"]
    place = f"{summary['graph']} on {summary['hardware']} ({summary['basis']})"
    if not rows:
        return look.folded(f"fits: no. Nothing runs {place}; the plan of it says what helps")
    best, want = rows[0], summary["want_seconds"]
    verdict = f"fits: yes. {place}: {roughly(best['seconds'])} with {_name(best)}"
    if want is not None:
        within = [row for row in rows if row["within"]]
        verdict += (
            f"; within {roughly(want)}: {', '.join(map(_name, within))}"
            if within
            else f"; nothing runs within {roughly(want)}"
        )
    head = ["format", "seconds", "range", "VRAM", "RAM", "download", "output"]
    lines = [
        [
            _name(row),
            f"{row['seconds']:.0f}",
            "{:.0f} to {:.0f}".format(*row["seconds_range"]),
            *(f"{row[key] / GIB:.1f}" for key in ("vram_bytes", "ram_bytes", "download_bytes")),
            "changes" if row["changes_output"] else "the same",
        ]
        for row in rows
    ]
    parts = [
        look.folded(verdict),
        "",
        table([head, *lines], left_columns=(0, 6)),
        look.folded(
            " seconds of one run from files, predicted; sizes in GiB; download: published "
            "checkpoints as their pages state them, others by their parameters"
        ),
    ]
    for row in rows:
        parts += ["", f"{_name(row)}: {_formats(row)}"]
        parts += [look.folded(f" {name} from {source}") for name, source in row["sources"].items()]
        parts.append(folded_command(f" {row['command']}", width))
    names = {name for row in rows for name in row["formats"].values()}
    return "\n".join([*parts, *map(look.folded, precision_lines(sorted(names)))])


def _name(row: Mapping[str, Any]) -> str:
    names: Sequence[str] = row["allow"]
    return ", ".join(names) or "as in the graph"


def _formats(row: Mapping[str, Any]) -> str:
    formats = ", ".join(f"{name} in {precision}" for name, precision in row["formats"].items())
    return formats or "the precisions of the graph file"
