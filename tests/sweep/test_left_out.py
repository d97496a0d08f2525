"""Each wait, join and barrier of the executor is left out in turn: its tests, which run under the ordering checker, notice it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent.parent
RUNTIME = ROOT / "graphrun" / "runtime"
ORDERING = {"wait", "join", "barrier", "wait_copy", "wait_read"}
TESTS = [
    "test_streaming.py",
    "test_backing_stores.py",
    "test_cpu_components.py",
    "test_plan_choices.py::test_a_value_is_spilled_over_a_stage_that_does_not_read_it",
]

# (file, function, called): why leaving it out is not noticed by these tests.
CPU = "no test computes on the CPU with weights that are read during the run"
BUFFER = "no test here streams a block that is larger than its ring"
NOT_NOTICED = {
    ("residency.py", "wait_read", "self.backing_store.wait_read"): CPU,
    ("residency.py", "wait_read", "self.device.wait"): CPU,
    ("slots.py", "_run_on_cpu", "self._open.wait_read"): CPU,
    ("slots.py", "wait_read", "self._residencies[component].wait_read"): CPU,
    ("spilled.py", "spill", "device.wait"): "the value is spilled in a slot behind the barrier that follows its producer",
    ("spilled.py", "restore", "device.wait"): "the value is restored in a slot before that of its consumer",
    ("streamer.py", "_buffer_of", "self._device.wait"): BUFFER,
    ("backing.py", "abandon", "self.join"): "called for reads that nothing uses any more",
}


class Site(NamedTuple):
    """A call: ``file`` under graphrun/runtime, where in it, and the ``function`` that calls ``called``."""

    file: str
    line: int
    column: int
    function: str
    called: str


def sites() -> Iterator[Site]:
    for path in sorted(RUNTIME.glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            for node in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ORDERING:
                    if isinstance(node.func.value, ast.Constant):
                        continue  # the join of a text
                    yield Site(path.name, node.lineno, node.col_offset, function.name, ast.unparse(node.func))


SITES = {site[:3]: site for site in sites()}.values()  # of functions in one another, the inner one


def test_the_list_names_call_sites_that_exist() -> None:
    assert len(SITES) >= 24
    assert set(NOT_NOTICED) <= {(site.file, site.function, site.called) for site in SITES}


@pytest.mark.sweep
@pytest.mark.parametrize("site", SITES, ids=lambda site: f"{site.file}:{site.line} {site.called}")
def test_a_call_left_out_is_noticed(site: Site) -> None:
    """``site`` is left out in a process of its own, which runs `TESTS` up to the first failure."""
    here = str(Path(__file__).parent)
    environment = {**os.environ, "LEFT_OUT": f"runtime/{site.file}:{site.line}:{site.column}", "PYTHONPATH": f"{ROOT}:{here}"}
    command = [sys.executable, "-m", "pytest", "-p", "left_out", "-x", "-p", "no:cacheprovider"]
    found = subprocess.run(
        [*command, *(f"tests/runtime/{test}" for test in TESTS)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode in (0, 1), found.stdout + found.stderr
    noticed = found.returncode == 1
    assert noticed != ((site.file, site.function, site.called) in NOT_NOTICED), found.stdout[-2000:]
