"""What is measured on cards, run on the simulated accelerator with graphs tiny: nothing fails,
and every promise is kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.mark.sweep("rehearsal")
@pytest.mark.parametrize("section", ["tiny", "sdxl", "flux"])
def test_a_section_of_the_benchmark_on_cards_runs_without_one(section: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        BENCHMARKS / "gpu.py",
        "--rehearse",
        "--sections",
        section,
        "--out",
        tmp_path / "results.json",
    ]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.sweep("rehearsal")
@pytest.mark.parametrize("step", ["rates", "flux", "check", "peers"])
def test_a_step_of_the_card_script_runs_without_one(step: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        BENCHMARKS / "card.py",
        step,
        "--rehearse",
        "--out",
        tmp_path / "results.json",
    ]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
