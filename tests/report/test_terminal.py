"""What a terminal sees and a pipe does not: colour, width, a sign of life, the bar of a run."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from graphrun.cli import terminal
from graphrun.cli.terminal import alive

ROOT = Path(__file__).parents[2]


def seen(code: str, columns: int = 80, **environment: str) -> str:
    """What a terminal of so many columns gets from a Python program, stdout and stderr."""
    reader, terminal_file = pty.openpty()
    environment = {
        **os.environ,
        "TERM": "xterm-256color",
        "COLUMNS": str(columns),
        "PYTHONPATH": str(ROOT),
        **environment,
    }
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=terminal_file,
        stdout=terminal_file,
        stderr=terminal_file,
        env=environment,
    )
    os.close(terminal_file)
    parts = []
    try:
        while part := os.read(reader, 65536):
            parts.append(part)
    except OSError:  # the other end is closed
        pass
    process.wait()
    os.close(reader)
    return b"".join(parts).decode()


SCREEN = (
    "from graphrun.cli.terminal import print_coloured, width; print_coloured(f'fits: yes. "
    "{width()}')"
)


@pytest.mark.parametrize(("columns", "text"), [(60, 80), (100, 100), (300, 120)])
def test_a_terminal_has_colour_and_its_width(columns: int, text: int) -> None:
    assert seen(SCREEN, columns) == f"\x1b[1;32mfits: yes\x1b[0m. {text}\r\n"


def test_colour_can_be_turned_off() -> None:
    assert seen(SCREEN, NO_COLOR="1") == "\x1b[1mfits: yes\x1b[0m. 80\r\n"


BAR = """
import sys
from graphrun.cli.common import say
from graphrun.report.progress import Shown
with Shown(10.0, print) as shown:
    shown._reach(5.0, "step 1/2")
    shown._bar.refresh()
    say("something to say")
    shown._bar.refresh()
print("graphrun: an error", file=sys.stderr)
"""


def test_nothing_is_written_on_the_line_of_the_bar() -> None:
    lines = [line.rpartition("\x1b[2K")[2] for line in seen(BAR).split("\n")]
    assert any("step 1/2" in line for line in lines)
    for text in ("something to say\r", "graphrun: an error\r"):
        assert text in [line.replace("\x1b[0m", "") for line in lines], lines


def test_in_a_pipe_a_line_says_what_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "SOON_SECONDS", 0.2)
    with alive("a short thing"):
        pass
    with alive("a long thing"):
        time.sleep(0.6)
    with alive("a quiet thing", quiet=True) as step:
        step("one")
        time.sleep(0.6)
    with alive("two things") as step:
        step("short")
        step("long")
        time.sleep(0.6)
    assert capsys.readouterr().err == "  a long thing\n  two things: long\n"
