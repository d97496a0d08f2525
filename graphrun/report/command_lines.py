"""Commands on a screen, folded so that they can still be copied: a backslash ends every line but
the last."""

from __future__ import annotations

import re
from collections.abc import Iterator

# A word, with spaces where they are quoted.
_WORD = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""")


def folded_command(line: str, width: int) -> str:
    """``line``, which ends in a command (``next: graphrun plan ...``), folded between options where
    it is wider than ``width``."""
    if len(line) <= width:
        return line
    first, *others = _options(line)
    lines = [first]
    for number, option in enumerate(others, 1):
        end = 0 if number == len(others) else 2  # the space and the backslash
        if len(lines[-1]) + 1 + len(option) + end <= width:
            lines[-1] += f" {option}"
        else:
            lines.append(f"  {option}")
    return " \\\n".join(lines)


def folded_options(options: str, width: int) -> list[str]:
    """``options`` as lines of at most ``width`` columns; an option stays beside its value."""
    lines = [""]
    for option in _options(options):
        if lines[-1] and len(lines[-1]) + 1 + len(option) > width:
            lines.append("")
        lines[-1] += f" {option}" if lines[-1] else option
    return lines


def _options(text: str) -> Iterator[str]:
    """What comes before the first option of ``text``, then each option with its value."""
    held = list[str]()
    for word in _WORD.findall(text):
        if word.startswith("-") and held:
            yield " ".join(held)
            held = []
        held.append(word)
    yield " ".join(held)
