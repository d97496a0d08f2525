"""A backend of PyTorch that graphrun does not know (tests/outside/brook.cpp), in processes of its
own: PyTorch has one slot for such backends, which the simulated accelerator takes in this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "outside"))

import brook

pytestmark = [
    pytest.mark.sweep("outside"),
    pytest.mark.skipif(not brook.can_build(), reason="no compiler for C++, or no ninja"),
]
FILES = ("test_contract.py", "test_accelerator.py")


@pytest.mark.parametrize("name", FILES)
def test_in_a_process_with_the_backend(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "outside"]
    process = subprocess.run(
        [*command, str(Path(__file__).with_name(name))],
        env={**os.environ, "GRAPHRUN_TESTS_OUTSIDE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-2000:]
    assert " passed" in process.stdout
