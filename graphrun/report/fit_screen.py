"""The screen of ``graphrun fit``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphrun.report.command_lines import folded_command
from graphrun.report.precisions import precision_lines
from graphrun.report.screen import Look, range_note
from graphrun.report.table import table
from graphrun.units import GIB, roughly

SIZES = ("enough_vram_bytes", "enough_ram_bytes", "download_bytes")
HEAD = ("enough VRAM", "enough RAM", "download")
NOTE = (
    "sizes in GiB; enough: with all of the budgets, a run is at most 3 % faster; every format but "
    "the graph's own changes the output"
)

MARK = " *"
PLANNED_ONLY_NOTE = (
    "planned only, not run: graphrun does not load SVDQuant checkpoints; its command shows a plan"
)


def fit_screen(
    summary: Mapping[str, Any], command: str, width: int = 80, faster_options: str = ""
) -> str:
    """Return the choices of ``summary``, best first, each with its command.

    ``command``: shows what would help where nothing fits. ``faster_options``: what to add to a
    command for fewer steps or a smaller picture.
    """
    look, rows = Look(width), summary["choices"]
    place = f"{summary['graph']} on {summary['hardware']} ({summary['basis']})"
    if not rows:
        verdict = look.folded(f"fits: no. No format runs {place}; this shows what would help:")
        return f"{verdict}\n{folded_command(f' {command}', width)}"
    best, want = rows[0], summary["want_seconds"]
    verdict = f"fits: yes. {place}: {roughly(best['seconds'])} with {_name(best)}"
    if want is not None:
        quick_rows = [row for row in rows if row["within"] and not row["planned_only"]]
        verdict += (
            f"; within {roughly(want)}: {', '.join(map(_name, quick_rows))}"
            if quick_rows
            else f"; nothing runs within {roughly(want)}"
        )
        if not quick_rows and faster_options:
            verdict += f". Fewer steps and smaller pictures are faster: add {faster_options}"
    head = ["format", "seconds", "range", *HEAD]
    lines = [
        [
            _name(row) + MARK * row["planned_only"],
            f"{row['seconds']:.0f}",
            "{:.0f} to {:.0f}".format(*row["seconds_range"]),
            *(f"{row[key] / GIB:.1f}" for key in SIZES),
        ]
        for row in rows
    ]
    parts = [
        look.folded(verdict),
        "",
        table([head, *lines], left_columns=(0,)),
        look.folded(
            f" seconds of one run from files, predicted; {NOTE}; download: published checkpoints "
            f"as their pages state them, others by their parameters{range_note(rows)}"
        ),
        *(look.folded(f" {note}") for note in summary["notes"]),
    ]
    if any(row["planned_only"] for row in rows):
        parts.append(look.folded(f" {MARK.strip()} {PLANNED_ONLY_NOTE}"))
    for row in rows:
        mark = " (planned only)" * row["planned_only"]
        parts += ["", look.folded(f"{_name(row)}{mark}: {_formats(row)}")]
        if row["quantizing_seconds"]:
            time = roughly(row["quantizing_seconds"])
            parts.append(look.folded(f" the first run also quantizes weights, once: about {time}"))
        parts += [look.folded(f" {name} from {source}") for name, source in row["sources"].items()]
        parts.append(folded_command(f" {row['command']}", width))
    names = {name for row in rows for name in row["formats"].values()}
    return "\n".join([*parts, *map(look.folded, precision_lines(sorted(names)))])


def fits_screen(summary: Mapping[str, Any], width: int = 80) -> str:
    """Return a row for each graph with its best choice, the graphs that fit first."""
    look, head = Look(width), ["graph", "format", "seconds", *HEAD]
    rows, notes = [head], []
    for graph in sorted(summary["graphs"], key=lambda graph: graph["best"] is None):
        best = graph["best"]
        if best is None:
            rows.append([graph["name"], "does not fit" if "error" not in graph else "-", *4 * "-"])
            notes += [f" {graph['name']}: {graph['error']}"] if "error" in graph else []
            continue
        sizes = (best[key] / GIB for key in SIZES)
        rows.append(
            [
                graph["name"],
                _name(best),
                f"{best['seconds']:.0f}",
                *(f"{size:.1f}" for size in sizes),
            ]
        )
    note = f" on {summary['hardware']} ({summary['basis']}); seconds of one run from files; {NOTE}"
    ram = f" --ram {summary['ram']}" if summary["ram"] != "auto" else ""
    next_line = f"next: graphrun fit flux-dev --card {summary['hardware']}{ram}"
    return "\n".join(
        [
            table(rows, left_columns=(0, 1)),
            look.folded(note),
            *(look.folded(f" {text}") for text in summary["notes"]),
            *map(look.folded, notes),
            next_line,
        ]
    )


def _name(row: Mapping[str, Any]) -> str:
    names: Sequence[str] = row["allow"]
    return ", ".join(names) or "as in the graph"


def _formats(row: Mapping[str, Any]) -> str:
    formats = ", ".join(f"{name} in {precision}" for name, precision in row["formats"].items())
    return formats or "the precisions of the graph file"
