"""The RAM that counts is the cgroup's, where it has less than the machine."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from graphrun.estimator.machine import host_ram_bytes


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_a_cgroup_limit_comes_before_the_machines_ram(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("1073741824\n")
    assert host_ram_bytes(tmp_path) == 2**30


@pytest.mark.parametrize("text", ["max\n", str(2**63 - 4096)])
def test_no_limit_leaves_the_machines_ram(tmp_path: Path, text: str) -> None:
    (tmp_path / "memory.max").write_text(text)
    assert host_ram_bytes(tmp_path) == psutil.virtual_memory().total
