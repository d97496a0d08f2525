"""A run on the CPU in a memory cgroup of its budget, and of less than its planned peak."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from graphrun.memory_group import enforceable

REASON = enforceable()
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# Runs the command in a group of so many bytes, which it enters before it imports anything large. A
# group of graphrun's own is no reason to plan again.
RUN = """
import runpy, sys
from graphrun.memory_group import MemoryGroup
with MemoryGroup.create(int(sys.argv.pop(1))) as group:
    group.enter()
    try:
        runpy.run_module("graphrun", run_name="__main__")
    finally:
        print("peak", group.peak_bytes)
"""


@pytest.mark.sweep("cpu")
@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_a_run_lives_in_its_budget_and_is_killed_in_less_than_its_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has 3 GB: of a smaller one, the part that plans can only bound is larger."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    models = importlib.import_module("cpu_models")
    folder, plan = tmp_path / "flux", tmp_path / "plan.json"
    models.write(models.TRIAL, folder, lambda _: None)

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        arguments = [sys.executable, *command]
        return subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=tmp_path)

    settings = [f"{name}={value}" for name, value in (models.FLUX | {"steps": 1}).items()]
    options = ["--memory", "2G", *(word for setting in settings for word in ("--set", setting))]
    planning = run("-m", "graphrun", "plan", f"{folder}/graph.yaml", *options, "-o", str(plan))
    assert planning.returncode == 0, planning.stderr
    data = json.loads(plan.read_text(encoding="utf-8"))
    budget_bytes = data["problem"]["budget_bytes"]
    command = ("run", str(plan), "--prompt", "a", "-o", "a.png", "--overwrite")
    lived = run("-c", RUN, str(budget_bytes), *command)
    assert lived.returncode == 0, lived.stderr
    peak = re.search(r"peak (\d+)", lived.stdout)
    assert peak is not None
    peak_bytes = data["peak_bytes"] + data["overhead_bytes"]
    assert int(peak[1]) <= 1.03 * peak_bytes, (int(peak[1]), peak_bytes)
    assert run("-c", RUN, str(int(0.95 * peak_bytes)), *command).returncode == -9
