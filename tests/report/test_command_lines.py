"""Folded commands are what a shell reads as one."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from graphrun.report.command_lines import folded_command, folded_options

LONG = (
    'graphrun run my/graph.yaml --vram 8G --ram 64G --set "prompt=a b c d e" --allow nf4 '
    '--no-cache --prompt "..."'
)
TITLE = "next, on that card: "


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_a_shell_reads_a_folded_command_as_the_plain_one(width: int) -> None:
    text = folded_command(TITLE + LONG, width)
    assert max(map(len, text.splitlines())) <= max(
        width, len(TITLE) + len("graphrun run my/graph.yaml \\")
    )
    assert (len(text.splitlines()) == 1) == (len(TITLE + LONG) <= width)
    command = text.removeprefix(TITLE).replace("graphrun ", "printf '%s\\n' ", 1)
    words = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert words == shlex.split(LONG)[1:]


def test_an_option_stays_beside_its_value() -> None:
    assert folded_options("--allow int8 --allow nf4 --source FOLDER", 26) == [
        "--allow int8 --allow nf4",
        "--source FOLDER",
    ]
    assert folded_options("--source A/VERY/LONG/FOLDER", 10) == ["--source A/VERY/LONG/FOLDER"]
    assert folded_options("--no-cache --vram 8G", 10) == ["--no-cache", "--vram 8G"]
