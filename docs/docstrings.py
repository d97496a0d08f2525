"""What mkdocstrings does to a docstring: its aligned blocks of arguments, ``name``  text, become
Markdown lists, and its indented blocks become Python."""

from __future__ import annotations

import re
import textwrap

import griffe

EXAMPLE = re.compile(r"(?<=\n\n)(?: {4}.*\n|\n(?= {4}))+(?=\n|\Z)")
ARGUMENT = re.compile(r"^(``[^ ]+``(?:, ``[^ ]+``)*) {2,}(\S.*)$")


def listed(text: str) -> str:
    """``text`` with each aligned line as an item of a list, and the indented lines below it as part
    of the item."""
    lines: list[str] = []
    is_in_list = False
    for line in text.splitlines():
        if match := ARGUMENT.match(line):
            lines += ([] if is_in_list else [""]) + [f"- {match[1]}: {match[2]}"]
            is_in_list = True
        elif is_in_list and line.startswith("  "):
            lines.append(f"  {line.strip()}")
        else:
            is_in_list = is_in_list and not line.strip()
            lines.append(line)
    return EXAMPLE.sub(
        lambda block: f"```python\n{textwrap.dedent(block[0])}```\n", "\n".join(lines) + "\n"
    )


class Lists(griffe.Extension):
    """Rewrites the docstrings of functions and classes when they are loaded."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring:
            obj.docstring.value = listed(obj.docstring.value)
