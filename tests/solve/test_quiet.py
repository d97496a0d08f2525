"""Solving prints nothing: neither HiGHS nor another library writes to the streams of the
process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import graphrun

BUDGETS = {"vram": "6M", "ram": "8G", "hardware": "sim"}
PLAN = f"""
import sys, pathlib, graphrun
graph = graphrun.load("flux-tiny")
problem = graphrun.estimate(graph, cache=pathlib.Path(sys.argv[1]), **{BUDGETS})
graphrun.plan(problem)
"""
# What HiGHS 1.16 does, whichever version is installed: the first call that may print writes the
# licence.
AS_1_16 = """
import os, highspy
def says(name, plain):
    def called(self, *arguments):
        if self.getOptionValue("output_flag")[1]:
            os.write(1, b"Running HiGHS 1.16.0: Copyright (c) 2026 under MIT licence terms\\n")
        return plain(self, *arguments)
    setattr(highspy._Highs, name, called)
for name in ("setCallback", "passModel", "run"):
    says(name, getattr(highspy._Highs, name))
"""


@pytest.mark.long
@pytest.mark.parametrize("preamble", ["", AS_1_16], ids=["installed", "as 1.16"])
def test_a_plan_in_python_prints_nothing(preamble: str, cached_dry_runs: Path) -> None:
    # whose libraries print on import
    graphrun.estimate(graphrun.load("flux-tiny"), cache=cached_dry_runs, **BUDGETS)
    command = [sys.executable, "-c", preamble + PLAN, str(cached_dry_runs)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")


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
