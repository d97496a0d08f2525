"""Elements of SVG drawings as text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def element(tag: str, content: str | None = None, /, **attributes: str | float) -> str:
    """The element ``tag`` around ``content``, which is SVG itself; text in it goes through `html.escape` first.

    ``attributes``: ``class_`` is written as class, ``stroke_width`` as stroke-width; a float gets one decimal.
    """
    shown = "".join(
        f' {name.removesuffix("_").replace("_", "-")}="{f"{value:.1f}" if isinstance(value, float) else escape(str(value))}"'
        for name, value in attributes.items()
    )
    return f"<{tag}{shown}/>" if content is None else f"<{tag}{shown}>{content}</{tag}>"


def block(left: float, right: float, y: float, height: float, kind: str, told: str) -> str:
    """A rectangle of the class ``kind``, at least 0.6 wide, with the text ``told`` where the pointer is on it."""
    told = element("title", escape(told))
    return element("rect", told, class_=kind, x=left, y=y, width=max(0.6, right - left), height=height)


def picture(elements: Sequence[str], view_box: str, **attributes: str | float) -> str:
    """The text of an SVG file: ``elements``, one on each line."""
    whole = "\n".join(["", *elements, ""])
    return element("svg", whole, xmlns="http://www.w3.org/2000/svg", viewBox=view_box, **attributes) + "\n"
