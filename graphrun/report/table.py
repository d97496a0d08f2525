"""Text tables, with one unit for all sizes of a table."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from graphrun.units import GIB, KIB, MIB


def table(rows: Sequence[Sequence[str]], left: Collection[int]) -> str:
    """``rows`` as aligned columns: those numbered in ``left`` left-aligned, the others right-aligned; one space before each row."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = (cell.ljust(w) if n in left else cell.rjust(w) for n, (cell, w) in enumerate(zip(row, widths, strict=True)))
        lines.append(f" {'  '.join(cells)}".rstrip())
    return "\n".join(lines)


def scale_of(largest_bytes: int) -> tuple[str, int]:
    """(unit, its bytes) for a table whose largest entry is ``largest_bytes``."""
    for unit, scale in (("GiB", GIB), ("MiB", MIB)):
        if largest_bytes >= scale // 4:
            return unit, scale
    return "KiB", KIB


def seconds_of(longest_seconds: float) -> tuple[str, float]:
    """(unit, its seconds) for a table whose longest entry is ``longest_seconds``."""
    return ("s", 1.0) if longest_seconds >= 1 else ("ms", 1e-3)


def size(nbytes: int, scale: int) -> str:
    """``nbytes`` in the table's unit with two decimals."""
    return f"{nbytes / scale:.2f}"
