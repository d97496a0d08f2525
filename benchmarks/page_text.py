"""Fold the text of a page at the width of the documents."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

WIDTH = 120
_ITEM = re.compile(r"([-*] |\d+\. )")
_AS_IT_IS = re.compile(r"[|#<!:]|\s*$|    ")  # table, heading, comment, drawing, directive, code
# at the beginning of a line they would make a list, a heading or a table
_MARK = re.compile(r" (?=[-+*#|>] |\d+\. )")


def folded(text: str) -> str:
    """Return ``text`` with folded paragraphs and list items. Tables and code stay as they are."""
    return "\n".join(list(_lines(text.split("\n")))[:-1])


def _lines(lines: list[str]) -> Iterator[str]:
    paragraph, is_code = list[str](), False
    for line in (*lines, "```"):  # an end for the last paragraph
        is_fence = line.lstrip().startswith("```")
        is_text = not (is_code or is_fence or _AS_IT_IS.match(line))
        if paragraph and (not is_text or _ITEM.match(line)):
            yield from _filled(paragraph)
            paragraph = []
        is_code ^= is_fence
        if is_text:
            paragraph.append(line)
        else:
            yield line


def _filled(paragraph: list[str]) -> list[str]:
    item = _ITEM.match(paragraph[0])
    text = _MARK.sub("\u00a0", " ".join(line.strip() for line in paragraph))
    lines = textwrap.wrap(
        text,
        WIDTH,
        subsequent_indent=" " * len(item[1]) if item else "",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\u00a0", " ") for line in lines]
