"""graphrun is a guest in the user's process: what PyTorch and Python say of themselves is the same
before and after."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
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
def test_the_process_is_as_it_was(backend: str, tmp_path: Path) -> None:
    states = _states(ACTIONS, backend, tmp_path)
    assert tuple(states) == ACTIONS
    for action, (start_state, end_state) in states.items():
        assert start_state["privateuse1 backend"] == ("stranger" if backend else "privateuseone")
        assert {
            key: (start_state[key], end_state[key])
            for key in start_state
            if start_state[key] != end_state[key]
        } == {}, action


@pytest.mark.long
def test_only_who_asks_for_sim_gets_it(tmp_path: Path) -> None:
    start_state, end_state = _states(("sim",), "", tmp_path)["sim"]
    assert (start_state["privateuse1 backend"], end_state["privateuse1 backend"]) == (
        "privateuseone",
        "sim",
    )


def _states(actions: Sequence[str], backend: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the states of one process before and after each of ``actions``."""
    guest = str(FOLDER / "standins" / "guest.py")
    command = [sys.executable, guest, ",".join(actions), backend, str(folder)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    states: dict[str, list[dict[str, Any]]] = json.loads(process.stdout.splitlines()[-1])
    return states
