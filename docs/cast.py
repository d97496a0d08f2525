"""Records `graphrun plan` and `graphrun run` on a terminal, and writes docs/cast.svg, which README
shows: ``make cast``.

The commands run on a pseudo-terminal of 80 columns with an empty cache. What they write is replayed
into rows of cells; each distinct state is a frame. Frames lie below each other, and a CSS animation
moves them past the window. Waiting is shortened.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path

COLUMNS, ROWS = 80, 29
COMMANDS = (
    "graphrun plan flux-dev --vram 8G --ram 64G --hardware rtx4090",
    "graphrun run flux-tiny --device sim --vram 6M --set steps=12 --overwrite",
)
# between recorded frames; shown for; a finished screen shown for
SAMPLE_SECONDS, FRAME_SECONDS, READ_SECONDS = (
    0.4,
    0.12,
    6.0,
)
X, Y, PAD = 8.4, 18, 14  # pixels of a cell, and around the screen
COLOURS = {"31": "#ff7b72", "32": "#7ee787", "33": "#e3b341", "34": "#79c0ff", "36": "#76e3ea"}
COLOURS |= {"38;5;197": "#f778ba", "38;5;237": "#30363d", "38;5;70": "#7ee787"}
CONTROL = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])")

Cell = tuple[str, str]  # a character, and its style as the parameters of SGR
Line = tuple[Cell, ...]
State = tuple[tuple[Line, ...], float]  # the lines of a frame, and the seconds it is shown for


class Screen:
    """Rows of cells: what is written to a terminal, as far as graphrun and rich use it (SGR, cursor
    up, erase line)."""

    def __init__(self) -> None:
        self.rows: list[list[Cell]] = [[]]
        self.row = self.column = 0
        self.style = ""

    def write(self, text: str) -> None:
        """Writes ``text`` with its control sequences."""
        while text:
            if match := CONTROL.match(text):
                self._control(*match.groups())
                text = text[match.end() :]
                continue
            character, text = text[0], text[1:]
            if character == "\n" or (character != "\r" and self.column == COLUMNS):
                self.row, self.column = self.row + 1, 0
                self.rows += [[]] if self.row == len(self.rows) else []
            if character == "\n":
                continue
            if character == "\r":
                self.column = 0
            else:
                row = self.rows[self.row]
                row += [(" ", "")] * (self.column + 1 - len(row))
                row[self.column] = (character, self.style)
                self.column += 1

    def _control(self, numbers: str, command: str) -> None:
        if command == "m":
            self.style = "" if numbers in ("", "0") else f"{self.style} {numbers}".strip()
        elif command == "A":
            self.row = max(0, self.row - int(numbers or 1))
        elif command == "K":
            self.rows[self.row] = []

    @property
    def shown(self) -> tuple[Line, ...]:
        """The last rows, as many as fit."""
        return tuple(tuple(row) for row in self.rows[-ROWS:])


def recorded(command: str) -> Iterator[str]:
    """What ``command`` writes to a terminal, every `SAMPLE_SECONDS`."""
    child, terminal = pty.fork()
    if not child:
        os.execvp(sys.executable, [sys.executable, "-m", *command.split()])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    data, last = b"", time.monotonic()
    try:
        while part := os.read(terminal, 65536):
            data += part
            if time.monotonic() - last > SAMPLE_SECONDS and data.endswith((b"\n", b"m")):
                yield data.decode()
                data, last = b"", time.monotonic()
    except OSError:  # the command has ended
        pass
    os.waitpid(child, 0)
    yield data.decode()


def frames() -> Iterator[State]:
    """The states of the screen, each with the seconds it is shown for."""
    for command in COMMANDS:
        screen = Screen()
        screen.write("\x1b[32m$\x1b[0m ")
        for word in command.split(" "):
            screen.write(f"{word} ")
            yield screen.shown, FRAME_SECONDS
        screen.write("\r\n")
        for text in recorded(command):
            screen.write(text)
            yield screen.shown, FRAME_SECONDS
        yield screen.shown, READ_SECONDS


def from_first_screen(states: list[State]) -> list[State]:
    """``states`` in a circle from the first finished screen on. Pages that do not animate show the
    first frame."""
    first = next(n for n, (_, seconds) in enumerate(states) if seconds == READ_SECONDS)
    return states[first:] + states[:first]


def drawn(line: Line) -> str:
    """The SVG text of a line: a span for each run of cells of one style, at its column."""
    spans, column = [], 0
    for style, cells in groupby(line, key=lambda cell: cell[1]):
        text, codes = "".join(character for character, _ in cells), style.split()
        color = next(
            (
                COLOURS[code]
                for code_group in codes
                for code in (code_group, *code_group.split(";"))
                if code in COLOURS
            ),
            "",
        )
        look = f' fill="{color}"' if color else ""
        look += ' font-weight="bold"' * any(code.split(";")[0] == "1" for code in codes)
        look += ' opacity=".6"' * any(code.split(";")[0] == "2" for code in codes)
        if text.strip():
            spans.append(
                f'<tspan x="{column * X:.1f}" '
                f'textLength="{len(text) * X:.1f}"{look}>{escape(text)}</tspan>'
            )
        column += len(text)
    return "".join(spans)


def svg(states: list[State]) -> str:
    """The animation: each distinct line once, frames below each other, and the window before which
    they pass."""
    width, height = round(COLUMNS * X + 2 * PAD), ROWS * Y + 2 * PAD
    lines = {
        line: number
        for number, line in enumerate(
            dict.fromkeys(line for screen_lines, _ in states for line in screen_lines)
        )
    }
    total, clock_seconds, steps, film = sum(seconds for _, seconds in states), 0.0, [], []
    for number, (screen_lines, seconds) in enumerate(states):
        steps.append(
            f"{100 * clock_seconds / total:.3f}% {{ transform: translateY({-number * height}px) }}"
        )
        uses = "".join(
            f'<use href="#l{lines[line]}" y="{n * Y}"/>'
            for n, line in enumerate(screen_lines)
            if line
        )
        film.append(f'<g transform="translate({PAD} {number * height + PAD + Y - 5})">{uses}</g>')
        clock_seconds += seconds
    texts = "\n".join(
        f'<text id="l{number}">{drawn(line)}</text>' for line, number in lines.items() if line
    )
    style = f"""
text {{ font: 14px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #e6edf3; \
white-space: pre }}
.film {{ animation: film {total:.1f}s step-end infinite }}
@media (prefers-reduced-motion) {{ .film {{ animation: none }} }}
@keyframes film {{ {" ".join(steps)} }}
"""
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" \
width="{width}" role="img">
<style>{style}</style>
<defs>{texts}</defs>
<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>
<svg width="{width}" height="{height}"><g class="film">
{chr(10).join(film)}
</g></svg>
</svg>
"""


def main() -> None:
    """Writes docs/cast.svg."""
    os.chdir(Path(__file__).parent.parent)
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"XDG_CACHE_HOME": cache, "TERM": "xterm-256color"}
        states: list[State] = []
        for screen_lines, seconds in frames():
            if not states or states[-1][0] != screen_lines or seconds == READ_SECONDS:
                states.append((screen_lines, seconds))
    Path("docs/cast.svg").write_text(svg(from_first_screen(states)))
    print(f"wrote docs/cast.svg: {len(states)} frames")


if __name__ == "__main__":
    main()
