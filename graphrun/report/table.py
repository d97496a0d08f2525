"""Text tables, with one unit for all sizes and one for all times of a table."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from graphrun.units import GIB, KIB, MIB


def table(
    rows: Sequence[Sequence[str]], left_columns: Collection[int], width: int | None = None
) -> str:
    """Return ``rows`` as aligned columns, with one space before each row.

    ``left_columns``: numbers of the left-aligned columns; the others are right-aligned. ``width``:
    in a wider table, the widest left-aligned column is cut.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is not None and left_columns:
        widest = max(left_columns, key=lambda column: widths[column])
        widths[widest] = max(8, widths[widest] - max(0, sum(widths) + 2 * len(widths) - 1 - width))
    lines = []
    for row in rows:
        cut = (
            cell if len(cell) <= w else f"{cell[: w - 1]}…"
            for cell, w in zip(row, widths, strict=True)
        )
        cells = (
            cell.ljust(w) if n in left_columns else cell.rjust(w)
            for n, (cell, w) in enumerate(zip(cut, widths, strict=True))
        )
        lines.append(f" {'  '.join(cells)}".rstrip())
    return "\n".join(lines)


class Units:
    """The units of a table: ``size`` (of ``size_bytes``) fits the largest size, ``time`` the
    longest time."""

    def __init__(self, largest_bytes: int, longest_seconds: float = 0.0) -> None:
        candidates = (
            unit for unit in (("GiB", GIB), ("MiB", MIB)) if largest_bytes >= unit[1] // 4
        )
        self.size, self.size_bytes = next(candidates, ("KiB", KIB))
        self.time, self._time_seconds = ("s", 1.0) if longest_seconds >= 1 else ("ms", 1e-3)

    def row(self, *cells: str | float) -> list[str]:
        """Return ``cells`` as text: ints are bytes with two decimals, floats are seconds with
        three."""
        return [self._text(cell) for cell in cells]

    def _text(self, cell: str | float) -> str:
        match cell:
            case str():
                return cell
            case int():
                return f"{cell / self.size_bytes:.2f}"
            case _:
                return f"{cell / self._time_seconds:.3f}"
