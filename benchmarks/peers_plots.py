"""Lines with a legend as an SVG picture, without a plotting library. Knows nothing of what the lines mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, MARGIN, LEGEND = 960, 440, 60, 290
DASHES = ("", "6 3", "2 3")


def plot(title: str, lines: Mapping[str, Sequence[tuple[float, float]]], across: str, up: str, first: str) -> str:
    """``lines`` by name, each a list of (x, y), both axes from 0. The line called ``first`` is drawn last, black and wide."""
    drawn = {name: points for name, points in lines.items() if points}
    most_x = max((x for points in drawn.values() for x, _ in points), default=1.0)
    most_y = 1.05 * max((y for points in drawn.values() for _, y in points), default=1.0)
    right = WIDTH - LEGEND

    def place(x: float, y: float) -> tuple[float, float]:
        return MARGIN + (right - MARGIN) * x / most_x, HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * y / most_y

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(MARGIN, 30, title, "start"),
        f'<path d="M{MARGIN} {MARGIN}V{HEIGHT - MARGIN}H{right}" fill="none" stroke="black"/>',
        _text(right, HEIGHT - MARGIN + 36, across, "end"),
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = place(share * most_x, share * most_y)
        out += [
            f'<path d="M{MARGIN} {y:.1f}H{right}" stroke="#ddd"/>',
            _text(x, HEIGHT - MARGIN + 18, f"{share * most_x:.3g}", "middle"),
            _text(MARGIN - 6, y + 4, f"{share * most_y:.3g} {up}" if share == 1.0 else f"{share * most_y:.3g}", "end"),
        ]
    order = sorted(drawn, key=lambda name: name == first)
    for number, name in enumerate(order):
        own = name == first
        color = "black" if own else f"hsl({360 * number // max(1, len(order) - 1)},65%,45%)"
        dash = "" if own or not DASHES[number % 3] else f' stroke-dasharray="{DASHES[number % 3]}"'
        style = f'stroke="{color}" stroke-width="{4 if own else 1.5}"{dash}'
        places = [place(x, y) for x, y in sorted(drawn[name])]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        out.append(f'<polyline points="{path}" fill="none" {style}/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{4 if own else 2.5}" fill="{color}"/>' for x, y in places]
        y = MARGIN + 20 * number
        out += [f'<path d="M{right + 16} {y}h24" {style}/>', _text(right + 46, y + 4, name, "start")]
    return "\n".join([*out, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    safe = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="black">{safe}</text>'
