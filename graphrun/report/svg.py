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
    """The element ``tag`` around ``content``, which is SVG itself; text in it goes through
    `html.escape` first.

    ``attributes``: ``class_`` is written as class, ``stroke_width`` as stroke-width; a float gets
    one decimal.
    """
    shown = "".join(
        f' {name.removesuffix("_").replace("_", "-")}="{f"{value:.1f}" if isinstance(value, float) else escape(str(value))}"'
        for name, value in attributes.items()
    )
    return f"<{tag}{shown}/>" if content is None else f"<{tag}{shown}>{content}</{tag}>"


def block(left: float, right: float, y: float, height: float, kind: str, told: str) -> str:
    """A rectangle of the class ``kind``, at least 0.6 wide, with the text ``told`` where the
    pointer is on it."""
    told = element("title", escape(told))
    return element(
        "rect", told, class_=kind, x=left, y=y, width=max(0.6, right - left), height=height
    )


def picture(elements: Sequence[str], view_box: str, **attributes: str | float) -> str:
    """The text of an SVG file: ``elements``, one on each line."""
    whole = "\n".join(["", *elements, ""])
    return (
        element("svg", whole, xmlns="http://www.w3.org/2000/svg", viewBox=view_box, **attributes)
        + "\n"
    )


def round_ticks(most: float, count: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, from 0 to at most ``most``: about ``count`` of
    them."""
    least = most / count
    power = 10.0 ** floor(log10(least)) if least > 0 else 1.0
    step = next((times * power for times in (1, 2, 5) if times * power >= least), 10 * power)
    return [number * step for number in range(int(most / step + 1e-9) + 1)]


def tick_seconds(seconds: float) -> str:
    """``seconds`` at a tick: ``20 s``, ``2.5 s``, ``5 ms``."""
    return f"{seconds:g} s" if seconds >= 1 or not seconds else f"{1e3 * seconds:g} ms"


def rasterized(drawn: str, scale: int = 2) -> Image.Image:
    """The picture ``drawn``, SVG text of rectangles, paths of M, H and V, circles and texts, in
    pixels: ``scale`` a unit."""
    from PIL import Image, ImageDraw, ImageFont

    root = ElementTree.fromstring(drawn)
    width, height = (scale * round(float(of)) for of in root.attrib["viewBox"].split()[2:])
    image = Image.new("RGB", (width, height), "white")
    to, font = (
        ImageDraw.Draw(image),
        ImageFont.load_default(scale * float(root.attrib["font-size"])),
    )
    for each in root:
        of, tag = each.attrib, each.tag.rpartition("}")[2]
        color, wide = of.get("stroke", "black"), round(scale * float(of.get("stroke-width", 1)))
        if tag == "text":
            where = (scale * float(of["x"]), scale * float(of["y"]))
            to.text(
                where,
                each.text or "",
                of["fill"],
                font,
                anchor={"start": "ls", "middle": "ms", "end": "rs"}[of["text-anchor"]],
            )
        elif tag == "circle":
            to.circle(
                (scale * float(of["cx"]), scale * float(of["cy"])),
                scale * float(of["r"]),
                of["fill"],
            )
        elif tag in ("polyline", "path"):
            to.line(
                [(scale * x, scale * y) for x, y in _points(of.get("points") or of["d"])],
                color,
                wide,
                joint="curve",
            )
    return image


def _points(text: str) -> list[tuple[float, float]]:
    """The points of a polyline, or of a path of M, H and V."""
    if text[0] != "M":
        return [(float(x), float(y)) for x, y in (pair.split(",") for pair in text.split())]
    points, (x, y) = list[tuple[float, float]](), (0.0, 0.0)
    for command, numbers in re.findall(r"([MHV])([^MHV]*)", text):
        first, *others = map(float, numbers.split())
        x, y = (
            (first, others[0]) if command == "M" else (first, y) if command == "H" else (x, first)
        )
        points.append((x, y))
    return points
