"""graphrun is a guest in the user's process: what PyTorch and Python say of themselves is the same
before and after."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
ACTIONS = (
    "import graphrun",
    "plan",
    "estimate",
    "attach",
    "attach to the CPU",
    "import a folder",
    "serve",
)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["", "another backend"])
@pytest.mark.parametrize("action", ACTIONS)
def test_the_process_is_as_it_was(action: str, backend: str, tmp_path: Path) -> None:
    start_state, end_state = _states(action, backend, tmp_path)
    assert start_state["privateuse1 backend"] == ("stranger" if backend else "privateuseone")
    assert {
        key: (start_state[key], end_state[key])
        for key in start_state
        if start_state[key] != end_state[key]
    } == {}


@pytest.mark.long
def test_only_who_asks_for_sim_gets_it(tmp_path: Path) -> None:
    start_state, end_state = _states("sim", "", tmp_path)
    assert (start_state["privateuse1 backend"], end_state["privateuse1 backend"]) == (
        "privateuseone",
        "sim",
    )


def _states(action: str, backend: str, folder: Path) -> list[dict[str, Any]]:
    command = [sys.executable, str(FOLDER / "standins" / "guest.py"), action, backend, str(folder)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    states: list[dict[str, Any]] = json.loads(process.stdout.splitlines()[-1])
    return states
