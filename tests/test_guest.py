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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a saved pipeline."""
    sys.path.append(str(FOLDER / "attach"))
    from tiny_pipelines import cases

    folder = tmp_path_factory.mktemp("guest")
    cases()["FluxPipeline"].build().save_pretrained(folder / "flux")
    return folder


@pytest.mark.sweep("more")
@pytest.mark.long
@pytest.mark.parametrize("backend", ["", "another backend"])
def test_the_process_is_as_it_was(backend: str, folder: Path) -> None:
    """Only the user who asks for the simulated accelerator gets it in PyTorch's one slot."""
    states = _states(ACTIONS if backend else (*ACTIONS, "sim"), backend, folder)
    if not backend:
        sim_states = states.pop("sim")
        assert [state["privateuse1 backend"] for state in sim_states] == ["privateuseone", "sim"]
    assert tuple(states) == ACTIONS
    for action, (start_state, end_state) in states.items():
        assert start_state["privateuse1 backend"] == ("stranger" if backend else "privateuseone")
        assert {
            key: (start_state[key], end_state[key])
            for key in start_state
            if start_state[key] != end_state[key]
        } == {}, action


def _states(actions: Sequence[str], backend: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the states of one process before and after each of ``actions``."""
    guest = str(FOLDER / "standins" / "guest.py")
    command = [sys.executable, guest, ",".join(actions), backend, str(folder)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    states: dict[str, list[dict[str, Any]]] = json.loads(process.stdout.splitlines()[-1])
    return states
