"""Commands on a screen, folded with backslashes so that they can still be copied."""

from __future__ import annotations

import re
from collections.abc import Iterator

# a word, with spaces if they are quoted
_WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""")


def folded_command(line: str, width: int) -> str:
    """Fold ``line`` between options if it is wider than ``width``. It ends in a command, such as
    ``next: graphrun plan ...``."""
    if len(line) <= width:
        return line
    first, *options = _options(line)
    lines = [first]
    for number, option in enumerate(options, 1):
        end = 0 if number == len(options) else 2  # the space and the backslash
        if len(lines[-1]) + 1 + len(option) + end <= width:
            lines[-1] += f" {option}"
        else:
            lines.append(f"  {option}")
    return " \\\n".join(lines)


def folded_options(options: str, width: int) -> list[str]:
    """Fold ``options`` into lines of at most ``width`` columns, each option next to its value."""
    lines = [""]
    for option in _options(options):
        if lines[-1] and len(lines[-1]) + 1 + len(option) > width:
            lines.append("")
        lines[-1] += f" {option}" if lines[-1] else option
    return lines


def _options(text: str) -> Iterator[str]:
    """Yield the text before the first option, then each option with its value."""
    words = list[str]()
    for word in _WORD.findall(text):
        if word.startswith("-") and words:
            yield " ".join(words)
            words = []
        words.append(word)
    yield " ".join(words)
