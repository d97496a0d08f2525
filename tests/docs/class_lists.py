"""Tables of `docs/pipelines.md` that have one row for all classes with the same cells."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "pipelines.md"
MODULAR = ROOT / "benchmarks" / "results" / "modular.json"
MODULAR_CELLS = {
    "ample": "attached, ample",
    "least": "attached, minimum",
    "object": "imported live",
    "folder": "imported from its folder",
}
MODULAR_HEAD = (
    f"| {' | '.join(MODULAR_CELLS.values())} | blocks and workflows |\n"
    f"|{'---|' * (len(MODULAR_CELLS) + 1)}\n"
)
CELL_CHARACTERS = 100


def rows_below(head: str) -> list[str]:
    """The rows below ``head`` in the document."""
    return DOCUMENT.read_text().partition(head)[2].partition("\n\n")[0].splitlines()


def classes_below(head: str) -> dict[str, tuple[str, ...]]:
    """The cells of each class: a row has these cells, then its classes."""
    cells_by_class: dict[str, tuple[str, ...]] = {}
    for row in rows_below(head):
        *cells, names = re.split(r" \| ", row.removeprefix("| ").removesuffix(" |"))
        cells_by_class |= dict.fromkeys(names.split(", "), tuple(cells))
    return cells_by_class


def grouped(cells_by_class: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """The rows of a table: classes with the same cells together, in the order of the cells."""
    for cells in sorted(set(cells_by_class.values())):
        names = sorted(name for name in cells_by_class if cells_by_class[name] == cells)
        yield f"| {' | '.join(cells)} | {', '.join(names)} |"


def write(head: str, rows: Iterator[str]) -> None:
    """Puts ``rows`` in the place of those below ``head``."""
    head_text, separator, tail_text = DOCUMENT.read_text().partition(head)
    assert separator, f"{DOCUMENT} has no table {head}"
    DOCUMENT.write_text(
        head_text + head + "\n".join(rows) + "\n\n" + tail_text.partition("\n\n")[2]
    )


def modular_rows() -> Iterator[str]:
    """The rows of the table of modular pipelines, from the recorded results."""
    return grouped(
        {
            _blocks(name): tuple(
                _cell(cells.get(kind) or cells.get("not_built", "-")) for kind in MODULAR_CELLS
            )
            for name, cells in _modular_results()["rows"].items()
        }
    )


def modular_counts() -> str:
    """The sentence about the counts in the recorded results."""
    results = _modular_results()
    equal = results["equal"]
    return (
        f"Of {results['cases']} workflows, {equal['ample']} are equal attached with ample VRAM and "
        f"{equal['least']} with the minimum; {equal['object']} imported live and "
        f"{equal['folder']} from a folder."
    )


def _modular_results() -> dict[str, Any]:
    results: dict[str, Any] = json.loads(MODULAR.read_text())
    return results


def _blocks(name: str) -> str:
    kind, _, workflow = name.partition(":")
    short_name = kind.removesuffix("Blocks").removesuffix("Auto")
    return f"{short_name} ({workflow})" if workflow else short_name


def _cell(text: str) -> str:
    # an error of a dry run ends with its cause
    short_text = text if len(text) <= CELL_CHARACTERS else f"...{text[-CELL_CHARACTERS:]}"
    return short_text.replace("|", "/").replace(" / ", "/")
