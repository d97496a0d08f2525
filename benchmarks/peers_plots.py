"""Plot lines with a legend, for light and for dark pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

INCHES, DOTS = (9.6, 4.4), 120
DASHES = ("-", "--", ":")
TEXT, LINE, PAPER = "#e6edf3", "#6e7681", "#0d1117"
DARK = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), TEXT)
DARK |= dict.fromkeys(("figure.facecolor", "axes.facecolor"), PAPER) | {"axes.edgecolor": LINE}
LIGHT_GRID, DARK_GRID = {"grid.color": "#ddd"}, {"grid.color": "#30363d"}


def dark_of(path: Path) -> Path:
    """Return the path of the dark version of the picture ``path``."""
    return path.with_stem(f"{path.stem}-dark")


def save(draw: Callable[[], Figure], path: Path, *, dark: bool = True, **arguments: Any) -> None:
    """Save the figure that ``draw`` makes as ``path``, and its ``dark`` version next to it."""
    with matplotlib.rc_context(LIGHT_GRID):
        draw().savefig(path, **arguments)
    if dark:
        with matplotlib.rc_context(DARK | DARK_GRID):
            draw().savefig(dark_of(path), **arguments)


def plot(
    title: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    x_label: str,
    y_label: str,
    first: str,
) -> Figure:
    """Plot ``lines``, each a list of (x, y), both axes from 0. The line called ``first`` is drawn
    last, wide and in the colour of text."""
    figure = Figure(figsize=INCHES, dpi=DOTS, layout="constrained")
    axes = figure.add_subplot(title=title, xlabel=x_label, ylabel=y_label)
    order = sorted(
        (name for name, points in lines.items() if points), key=lambda name: name == first
    )
    for number, name in enumerate(order):
        style = (
            {"color": matplotlib.rcParams["text.color"], "linewidth": 3.0}
            if name == first
            else {"linestyle": DASHES[number % 3], "linewidth": 1.3}
        )
        axes.plot(
            *zip(*sorted(lines[name]), strict=True), marker="o", markersize=4, label=name, **style
        )
    axes.set(xlim=(0, None), ylim=(0, None))
    axes.grid()
    axes.legend(
        loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8, reverse=True
    )
    return figure
