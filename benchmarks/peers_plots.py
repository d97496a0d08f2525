"""Plot lines with a legend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

INCHES, DOTS = (9.6, 4.4), 120
DASHES = ("-", "--", ":")


def plot(
    title: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    x_label: str,
    y_label: str,
    first: str,
) -> Figure:
    """Plot ``lines``, each a list of (x, y), both axes from 0. The line called ``first`` is drawn
    last, black and wide."""
    figure = Figure(figsize=INCHES, dpi=DOTS, layout="constrained")
    axes = figure.add_subplot(title=title, xlabel=x_label, ylabel=y_label)
    order = sorted(
        (name for name, points in lines.items() if points), key=lambda name: name == first
    )
    for number, name in enumerate(order):
        style = (
            {"color": "black", "linewidth": 3.0}
            if name == first
            else {"linestyle": DASHES[number % 3], "linewidth": 1.3}
        )
        axes.plot(
            *zip(*sorted(lines[name]), strict=True), marker="o", markersize=4, label=name, **style
        )
    axes.set(xlim=(0, None), ylim=(0, None))
    axes.grid(color="#ddd")
    axes.legend(
        loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8, reverse=True
    )
    return figure
