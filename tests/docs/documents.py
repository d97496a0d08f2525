"""The pages that people read, cut into what can be run: blocks of code, and commands between
backticks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    page.relative_to(ROOT).as_posix()
    for page in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        ROOT / "benchmarks" / "README.md",
        ROOT / "packaging" / "RELEASING.md",
        ROOT / "tests" / "PROMISES.md",
    )
]
# what Python on pages gets in place of a large model and a card
STANDINS = {'"flux-dev"': '"flux-tiny"', 'hardware="rtx4090"': 'hardware="sim"'}
FENCE = re.compile(
    r"^(?P<note> *<!--[^>]*-->\n\n?)?^(?P<indent> *)```(?P<info>[^\n]*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
NOTE = re.compile(r"<!-- (not run|fails): (.+) -->")


@dataclass(frozen=True)
class Block:
    """A block of code. ``file``: what it is saved as (``title="graph.yaml"``), or ``prints``:
    output of the last command.

    A comment on the line before the block says what is special: ``<!-- not run: why -->``, or
    ``<!-- fails: message -->``, which the last command of the block has to print.
    """

    page: str
    line: int
    language: str
    text: str
    file: str = ""
    not_run: str = ""
    fails: str = ""

    @property
    def commands(self) -> list[str]:
        """The command lines of a block of ``sh``: without comments, with continued lines joined."""
        return [
            line
            for line in (command(raw) for raw in self.text.replace("\\\n", " ").splitlines())
            if line
        ]


def command(line: str) -> str:
    """``line`` without its comment."""
    return re.sub(r"(^|\s+)#\s.*$", "", line).strip()


def blocks(page: str) -> list[Block]:
    """The blocks of code of ``page``, in order."""
    text, page_blocks = (ROOT / page).read_text(encoding="utf-8"), []
    for match in FENCE.finditer(text):
        language, _, rest = match["info"].partition(" ")
        file = re.search(r'title="([^"]+)"', rest)
        body = "".join(
            line.removeprefix(match["indent"]) for line in match["text"].splitlines(keepends=True)
        )
        note = NOTE.search(match["note"] or "")
        special = {"not_run" if note[1] == "not run" else "fails": note[2]} if note else {}
        line = text.count("\n", 0, match.start("text")) + 1
        page_blocks.append(
            Block(page, line, language or "text", body, file[1] if file else "", **special)
        )
    return page_blocks


def quoted(page: str) -> list[str]:
    """The commands of ``page`` between backticks, outside of blocks: ``graphrun plan GRAPH``,
    ``make run``."""
    text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    return list(
        dict.fromkeys(re.findall(r"`((?:graphrun|make) [a-z-][^`]*)`", " ".join(text.split("\n"))))
    )


def parts(line: str) -> Iterator[list[str]]:
    """The words of each command in ``line``, which ``&&``, ``;`` or a pipe may join."""
    words: list[str] = []
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>{}")
    lexer.whitespace_split = True
    for word in lexer:
        if word in ("&&", ";", "|", "{", "}"):
            yield words
            words = []
        else:
            words.append(word)
    yield words


def readme_commands() -> list[str]:
    """Every command of graphrun in README, in order: in blocks of ``sh``, and between backticks."""
    lines = [
        line
        for block in blocks("README.md")
        if block.language == "sh" and not block.not_run
        for line in block.commands
    ]
    return [
        line
        for line in dict.fromkeys([*lines, *quoted("README.md")])
        if line.startswith("graphrun ")
    ]
