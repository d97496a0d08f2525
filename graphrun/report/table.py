"""Text tables, with one unit for all sizes and one for all times of a table."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from graphrun.units import GIB, KIB, MIB


def table(rows: Sequence[Sequence[str]], left: Collection[int], width: int | None = None) -> str:
    """``rows`` as aligned columns: those numbered in ``left`` left-aligned, the others
    right-aligned; one space before each row.

    ``width``: a wider table has its widest left-aligned column cut.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is not None and left:
        widest = max(left, key=lambda column: widths[column])
        widths[widest] = max(8, widths[widest] - max(0, sum(widths) + 2 * len(widths) - 1 - width))
    lines = []
    for row in rows:
        cut = (
            cell if len(cell) <= w else f"{cell[: w - 1]}…"
            for cell, w in zip(row, widths, strict=True)
        )
        cells = (
            cell.ljust(w) if n in left else cell.rjust(w)
            for n, (cell, w) in enumerate(zip(cut, widths, strict=True))
        )
        lines.append(f" {'  '.join(cells)}".rstrip())
    return "\n".join(lines)


class Units:
    """The units of a table: ``size`` (of ``size_bytes``) by its largest size, ``time`` by its
    longest time."""

    def __init__(self, largest_bytes: int, longest_seconds: float = 0.0) -> None:
        fitting = (unit for unit in (("GiB", GIB), ("MiB", MIB)) if largest_bytes >= unit[1] // 4)
        self.size, self.size_bytes = next(fitting, ("KiB", KIB))
        self.time, self._time_seconds = ("s", 1.0) if longest_seconds >= 1 else ("ms", 1e-3)

    def row(self, *cells: str | float) -> list[str]:
        """``cells`` as text: an int is bytes and gets two decimals, a float is seconds and gets
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
