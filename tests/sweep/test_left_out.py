"""Each wait, join, barrier and mark of the executor is left out in turn: tests of it under the
ordering checker notice that.

A mark that is left out is one recorded before all work: what waits for it waits for nothing, and
times are wrong."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent.parent
RUNTIME = ROOT / "graphrun" / "runtime"
ORDERING = {"wait", "join", "barrier", "wait_copy", "wait_read", "mark"}
TESTS = [
    "test_spilled.py",
    "test_executor.py::test_a_trace_has_every_slot_and_every_event_in_seconds_from_its_start",
    "test_cpu_components.py",
    "test_backing_stores.py",
    "test_streaming.py",
    "test_host_memory.py",
    "test_secondaries_run.py::test_a_load_for_the_secondary_overlaps_one_for_the_device",
]


class Site(NamedTuple):
    """A call: ``file`` under graphrun/runtime, where in it the call ends, and the ``function`` that
    calls ``callee``."""

    file: str
    line: int
    column: int
    function: str
    callee: str


def sites() -> Iterator[Site]:
    for path in sorted(RUNTIME.glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            for node in ast.walk(function) if isinstance(function, ast.FunctionDef) else ():
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr in ORDERING
                ):
                    if isinstance(node.func.value, ast.Constant):
                        continue  # the join of a text
                    assert node.end_lineno
                    assert node.end_col_offset
                    yield Site(
                        path.name,
                        node.end_lineno,
                        node.end_col_offset,
                        function.name,
                        ast.unparse(node.func),
                    )


SITES = {site[:3]: site for site in sites()}.values()  # of functions in one another, the inner one


def test_every_call_of_the_source_is_a_site() -> None:
    """As many as a search of the text finds, texts' own ``join`` left out."""
    calls = rf"(?<![\"'])\.({'|'.join(sorted(ORDERING))})\("
    assert len(SITES) == sum(
        len(re.findall(calls, path.read_text())) for path in RUNTIME.glob("*.py")
    )


@pytest.mark.sweep
@pytest.mark.parametrize("site", SITES, ids=lambda site: f"{site.file}:{site.line} {site.callee}")
def test_a_call_left_out_is_noticed(site: Site) -> None:
    """``site`` is left out in a process of its own, which runs `TESTS` up to the first failure."""
    folder = str(Path(__file__).parent)
    environment = {
        **os.environ,
        "LEFT_OUT": f"runtime/{site.file}:{site.line}:{site.column}",
        "PYTHONPATH": f"{ROOT}:{folder}",
    }
    command = [sys.executable, "-m", "pytest", "-p", "left_out", "-x", "-p", "no:cacheprovider"]
    process = subprocess.run(
        [*command, *(f"tests/runtime/{test}" for test in TESTS)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode in (0, 1), process.stdout + process.stderr
    assert process.returncode == 1, process.stdout[-2000:]
