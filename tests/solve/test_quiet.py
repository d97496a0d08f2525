"""Solving prints nothing: neither HiGHS nor another library writes to the streams of the
process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import highspy
import pytest
from forks import forked

import graphrun

BUDGETS = {"vram": "6M", "ram": "8G", "hardware": "sim"}
# What HiGHS 1.16 writes at its first call that may print, whichever version is installed.
LICENCE = b"Running HiGHS 1.16.0: Copyright (c) 2026 under MIT licence terms\n"


def print_as_1_16() -> None:
    def printing(plain: Callable[..., Any]) -> Callable[..., Any]:
        def called(highs: Any, *arguments: Any) -> Any:
            if highs.getOptionValue("output_flag")[1]:
                os.write(1, LICENCE)
            return plain(highs, *arguments)

        return called

    for name in ("setCallback", "passModel", "run"):
        setattr(highspy._Highs, name, printing(getattr(highspy._Highs, name)))


@pytest.mark.sweep("more")
@pytest.mark.long
@pytest.mark.parametrize("prepare", [None, print_as_1_16], ids=["installed", "as 1.16"])
def test_a_plan_in_python_prints_nothing(
    prepare: Callable[[], None] | None, cached_dry_runs: Path, tmp_path: Path
) -> None:
    # whose libraries print on import
    problem = graphrun.estimate(graphrun.load("flux-tiny"), cache=cached_dry_runs, **BUDGETS)

    def plan() -> None:
        if prepare is not None:
            prepare()
        graphrun.plan(problem)

    process = forked(plan, tmp_path)
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")


@pytest.mark.sweep("more")
@pytest.mark.long
def test_the_command_prints_its_screen_and_signs_of_life_only(tmp_path: Path) -> None:
    plan = ("plan", "flux-tiny", "--device", "sim", "--vram", "6M", "--ram", "8G", "--no-cache")
    command = [sys.executable, "-m", "graphrun", *plan]
    process = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert process.returncode == 0
    assert process.stdout.startswith("fits: yes. ")
    assert {line.strip() for line in process.stderr.splitlines()} <= {
        "dry run of flux-tiny",
        "planning flux-tiny",
    }
