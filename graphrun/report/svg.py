"""Elements of SVG drawings as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from math import floor, log10
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from PIL import Image


def element(tag: str, content: str | None = None, /, **attributes: str | float) -> str:
    """Return the element ``tag`` around ``content``, which is SVG; escape text with `html.escape`.

    ``attributes``: ``class_`` becomes class, ``stroke_width`` stroke-width. A float gets one
    decimal.
    """
    attribute_text = "".join(
        f' {name.removesuffix("_").replace("_", "-")}="'
        f'{f"{value:.1f}" if isinstance(value, float) else escape(str(value))}"'
        for name, value in attributes.items()
    )
    return (
        f"<{tag}{attribute_text}/>"
        if content is None
        else f"<{tag}{attribute_text}>{content}</{tag}>"
    )


def block(x_start: float, x_end: float, y: float, height: float, kind: str, tooltip: str) -> str:
    """Return a rectangle of the class ``kind``, at least 0.6 wide, with ``tooltip``."""
    tooltip = element("title", escape(tooltip))
    return element(
        "rect", tooltip, class_=kind, x=x_start, y=y, width=max(0.6, x_end - x_start), height=height
    )


def picture(elements: Sequence[str], view_box: str, **attributes: str | float) -> str:
    """Return the text of an SVG file with ``elements``, one on each line."""
    whole = "\n".join(["", *elements, ""])
    return (
        element("svg", whole, xmlns="http://www.w3.org/2000/svg", viewBox=view_box, **attributes)
        + "\n"
    )


def round_ticks(maximum: float, count: int = 5) -> list[float]:
    """Return about ``count`` multiples of 1, 2 or 5 times a power of ten, from 0 to ``maximum``."""
    minimum_step = maximum / count
    power = 10.0 ** floor(log10(minimum_step)) if minimum_step > 0 else 1.0
    step = next((times * power for times in (1, 2, 5) if times * power >= minimum_step), 10 * power)
    return [number * step for number in range(int(maximum / step + 1e-9) + 1)]


def tick_seconds(seconds: float) -> str:
    """Return ``seconds`` at a tick: ``20 s``, ``2.5 s``, ``5 ms``."""
    return f"{seconds:g} s" if seconds >= 1 or not seconds else f"{1e3 * seconds:g} ms"


def rasterized(svg_text: str, scale: int = 2) -> Image.Image:
    """Return the picture ``svg_text`` in pixels, ``scale`` for each unit. Supported are rectangles,
    paths of M, H and V, polylines, circles and texts."""
    from PIL import Image, ImageDraw, ImageFont

    root = ElementTree.fromstring(svg_text)
    width, height = (scale * round(float(number)) for number in root.attrib["viewBox"].split()[2:])
    image = Image.new("RGB", (width, height), "white")
    canvas, font = (
        ImageDraw.Draw(image),
        ImageFont.load_default(scale * float(root.attrib["font-size"])),
    )
    for node in root:
        attributes, tag = node.attrib, node.tag.rpartition("}")[2]
        color, line_width = (
            attributes.get("stroke", "black"),
            round(scale * float(attributes.get("stroke-width", 1))),
        )
        if tag == "text":
            position = (scale * float(attributes["x"]), scale * float(attributes["y"]))
            canvas.text(
                position,
                node.text or "",
                attributes["fill"],
                font,
                anchor={"start": "ls", "middle": "ms", "end": "rs"}[attributes["text-anchor"]],
            )
        elif tag == "circle":
            canvas.circle(
                (scale * float(attributes["cx"]), scale * float(attributes["cy"])),
                scale * float(attributes["r"]),
                attributes["fill"],
            )
        elif tag in ("polyline", "path"):
            canvas.line(
                [
                    (scale * x, scale * y)
                    for x, y in _points(attributes.get("points") or attributes["d"])
                ],
                color,
                line_width,
                joint="curve",
            )
    return image


def _points(text: str) -> list[tuple[float, float]]:
    """Return the points of a polyline, or of a path of M, H and V."""
    if text[0] != "M":
        return [(float(x), float(y)) for x, y in (pair.split(",") for pair in text.split())]
    points, (x, y) = list[tuple[float, float]](), (0.0, 0.0)
    for command, numbers in re.findall(r"([MHV])([^MHV]*)", text):
        first, *rest = map(float, numbers.split())
        x, y = (first, rest[0]) if command == "M" else (first, y) if command == "H" else (x, first)
        points.append((x, y))
    return points
