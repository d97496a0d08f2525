"""Tables of `docs/pipelines.md` that have one row for all classes with the same cells."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "pipelines.md"


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
