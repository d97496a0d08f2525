"""What the doctor reads from the system, and its version rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graphrun.profile import doctor
from graphrun.profile.host_ram import host_ram_bytes, memory_limits
from graphrun.report.machine_screens import doctor_screen
from graphrun.units import GIB, show_size


def files(root: Path, **texts: str) -> None:
    for name, text in texts.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def available(root: Path) -> Path:
    (root / "meminfo").write_text(f"MemAvailable: {9 * GIB // 1024} kB\n")
    return root / "meminfo"


def test_cgroup_v2_limits_of_all_parent_groups_count(tmp_path: Path) -> None:
    files(tmp_path, user__job__memory_dot_max=f"{3 * GIB}\n", user__job__memory_dot_current="5\n")
    files(tmp_path, user__memory_dot_max=f"{2 * GIB}\n", memory_dot_max="max\n", own="0::/user/job\n")
    limits = memory_limits(tmp_path, tmp_path / "own")
    assert [(limit.nbytes, limit.version, limit.used_bytes) for limit in limits] == [(2 * GIB, 2, 0), (3 * GIB, 2, 5)]
    assert host_ram_bytes(tmp_path, tmp_path / "own", available(tmp_path)) == 2 * GIB


def test_cgroup_v1_reports_no_limit_as_a_number(tmp_path: Path) -> None:
    (tmp_path / "memory/job").mkdir(parents=True)
    (tmp_path / "own").write_text("5:cpu:/\n4:memory:/job\n0::/\n")
    (tmp_path / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_limits(tmp_path, tmp_path / "own") == ()
    (tmp_path / "memory/job/memory.limit_in_bytes").write_text(f"{GIB}\n")
    assert [(limit.nbytes, limit.version) for limit in memory_limits(tmp_path, tmp_path / "own")] == [(GIB, 1)]


def test_a_container_finds_its_limit_at_the_cgroup_root(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("4:memory:/docker/0123\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text(f"{GIB}\n")
    assert host_ram_bytes(tmp_path, tmp_path / "own", available(tmp_path)) == GIB


def test_without_cgroups_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert host_ram_bytes(tmp_path, tmp_path / "own", available(tmp_path)) == 9 * GIB


@pytest.mark.parametrize(
    ("number", "allowed", "broken"),
    [("0.43.1", 0, 2), ("0.43.2", 1, 1), ("0.47.0", 1, 1), ("0.48.0", 2, 0), ("0.50.2", 2, 0), ("not a version", 0, 2)],
)
def test_what_a_version_of_bitsandbytes_supports(number: str, allowed: int, broken: int) -> None:
    found = doctor.about("bitsandbytes", number)
    assert (len(found["allows"]), len(found["breaks"])) == (allowed, broken)


def test_a_missing_package_is_a_problem() -> None:
    assert doctor.about("bitsandbytes", None)["breaks"] == ["no nf4 and no int8 components"]


def test_a_limit_below_the_machine_s_memory_and_a_small_lock_limit_are_problems() -> None:
    memory = {
        "total_bytes": 8 * GIB,
        "usable_bytes": 3 * GIB,
        "pinned_limit_bytes": 8,
        "limits": [{"path": "/x", "nbytes": 4 * GIB}],
    }
    assert len(doctor._memory_problems(memory, {"card": None})) == 1
    assert len(doctor._memory_problems(memory, {"card": {}})) == 2


def test_the_driver_s_version_is_read_from_the_kernel_module(tmp_path: Path) -> None:
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 16\nGCC version: 13.2.0\n"
    )
    assert doctor.driver(tmp_path / "version") == "570.86.15"
    assert doctor.driver(tmp_path / "nothing") is None


def test_all_findings_are_json_and_on_the_screen(tmp_path: Path) -> None:
    found: dict[str, Any] = json.loads(json.dumps(doctor.examine(tmp_path / "cache")))
    assert {item["name"] for item in found["versions"]} >= {"torch", "diffusers", "transformers", "accelerate", "bitsandbytes"}
    screen = doctor_screen(found)
    usable, available = (show_size(found["memory"][f"{name}_bytes"]) for name in ("usable", "available"))
    assert f"{usable} for --ram auto, {available} of " in screen
    for name, of in found["precisions"].items():
        line = next(line for line in screen.splitlines() if f"{name}: " in line)
        assert ("moves" in line) == of["movable"]
        assert ("unavailable" in line) == (not of["available"])
    for word in ("device", "cgroup", "pinned", "disk", str(tmp_path / "cache"), "torch", "bitsandbytes"):
        assert word in screen
