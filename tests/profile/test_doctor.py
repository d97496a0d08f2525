"""What the doctor reads from the system, and its version rules."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graphrun.host_ram import host_ram_bytes
from graphrun.kernel_memory import memory_limits
from graphrun.profile import doctor
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
    files(
        tmp_path, user__memory_dot_max=f"{2 * GIB}\n", memory_dot_max="max\n", own="0::/user/job\n"
    )
    limits = memory_limits(tmp_path, tmp_path / "own")
    assert [(limit.nbytes, limit.version, limit.used_bytes) for limit in limits] == [
        (2 * GIB, 2, 0),
        (3 * GIB, 2, 5),
    ]
    assert host_ram_bytes(tmp_path, tmp_path / "own", available(tmp_path)) == 2 * GIB


def test_cgroup_v1_reports_no_limit_as_a_number(tmp_path: Path) -> None:
    (tmp_path / "memory/job").mkdir(parents=True)
    (tmp_path / "own").write_text("5:cpu:/\n4:memory:/job\n0::/\n")
    (tmp_path / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_limits(tmp_path, tmp_path / "own") == ()
    (tmp_path / "memory/job/memory.limit_in_bytes").write_text(f"{GIB}\n")
    assert [
        (limit.nbytes, limit.version) for limit in memory_limits(tmp_path, tmp_path / "own")
    ] == [(GIB, 1)]


def test_a_container_finds_its_limit_at_the_cgroup_root(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("4:memory:/docker/0123\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text(f"{GIB}\n")
    assert host_ram_bytes(tmp_path, tmp_path / "own", available(tmp_path)) == GIB


def test_without_cgroups_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert host_ram_bytes(tmp_path, tmp_path / "own", available(tmp_path)) == 9 * GIB


@pytest.mark.parametrize(
    ("number", "allowed_count", "broken_count"),
    [
        ("0.43.1", 0, 2),
        ("0.43.2", 1, 1),
        ("0.47.0", 1, 1),
        ("0.48.0", 2, 0),
        ("0.50.2", 2, 0),
        ("not a version", 0, 2),
    ],
)
def test_what_a_version_of_bitsandbytes_supports(
    number: str, allowed_count: int, broken_count: int
) -> None:
    status = doctor.package_status("bitsandbytes", number)
    assert (len(status["allows"]), len(status["breaks"])) == (allowed_count, broken_count)


def test_a_missing_package_is_a_problem() -> None:
    assert doctor.package_status("bitsandbytes", None)["breaks"] == [
        "no nf4 and no int8 components"
    ]


def test_limits_of_a_cgroup_and_of_locked_memory_are_noted_with_what_to_type() -> None:
    memory = {
        "total_bytes": 8 * GIB,
        "available_bytes": 5 * GIB,
        "swap_bytes": 0,
        "usable_bytes": 3 * GIB,
        "auto_bytes": 2 * GIB,
        "pinned_limit_bytes": 8,
        "limits": [{"path": "/x", "nbytes": 4 * GIB, "used_bytes": GIB, "version": 2}],
    }
    rows = {check.name: check for check in doctor.memory_checks(memory, card=True)}
    assert {name: check.verdict for name, check in rows.items()} == {
        "memory": "ok",
        "swap": "ok",
        "cgroup": "note",
        "pinned": "note",
    }
    assert (
        rows["cgroup"].text == "v2: 4.00 GiB (1.00 GiB used) /x; "
        "--memory and --ram auto use what is left of it"
    )
    assert rows["pinned"].fix == "ulimit -l unlimited"
    rows = {
        check.name: check for check in doctor.memory_checks({**memory, "limits": []}, card=False)
    }
    assert (rows["cgroup"].text, rows["pinned"].verdict) == ("no limit", "ok")


ROCM, XPU, CUDA, CPU = (
    SimpleNamespace(cuda=cuda, hip=hip, xpu=xpu)
    for cuda, hip, xpu in (
        (None, "6.4.4", None),
        (None, None, "20250101"),
        ("12.8", None, None),
        (None, None, None),
    )
)


@pytest.mark.parametrize(
    ("versions", "signs", "verdict", "text", "fix"),
    [
        (
            CPU,
            [],
            "note",
            "no CUDA device; this torch is built for the CPU",
            "graphrun plan flux-schnell --device cpu",
        ),
        (
            ROCM,
            [],
            "note",
            "no CUDA device; this torch is built for ROCm 6.4.4",
            "graphrun plan flux-schnell --device cpu",
        ),
        (
            XPU,
            [],
            "note",
            "no XPU device; this torch is built for XPU 20250101",
            "graphrun plan flux-schnell --device cpu",
        ),
        (
            CPU,
            ["/dev/nvidiactl"],
            "problem",
            "(/dev/nvidiactl), and this torch is built for the CPU",
            "install torch for CUDA",
        ),
        (
            CPU,
            ["C:/nvidia-smi.exe"],
            "problem",
            "and this torch is built for the CPU",
            "install torch for CUDA",
        ),
        (
            ROCM,
            ["/dev/nvidiactl"],
            "problem",
            "and this torch is built for ROCm 6.4.4",
            "install torch for CUDA",
        ),
        (
            CUDA,
            ["/dev/kfd"],
            "problem",
            "and this torch is built for CUDA 12.8",
            "install torch for ROCm",
        ),
        (
            XPU,
            ["/dev/dxg"],
            "problem",
            "built for XPU 20250101, cannot open it: is the driver new",
            "nvidia-smi",
        ),
        (
            CPU,
            ["/dev/dxg"],
            "problem",
            "and this torch is built for the CPU",
            "install torch for CUDA or ROCm or XPU",
        ),
        (
            CPU,
            ["/sys/module/i915"],
            "note",
            "no CUDA device; this torch is built for the CPU; torch for XPU opens the Intel GPU",
            "graphrun plan flux-schnell --device cpu",
        ),
        (
            XPU,
            ["/sys/module/xe"],
            "problem",
            "built for XPU 20250101, cannot open it",
            "sudo usermod -aG render,video $USER",
        ),
        (
            CUDA,
            ["/dev/nvidiactl"],
            "problem",
            "built for CUDA 12.8, cannot open it: is the driver new",
            "nvidia-smi",
        ),
        (CUDA, ["/dev/nvidiactl", "/dev/kfd"], "problem", "cannot open it", "nvidia-smi"),
        (
            ROCM,
            ["/dev/kfd"],
            "problem",
            "built for ROCm 6.4.4, cannot open it",
            "sudo usermod -aG render,video $USER",
        ),
    ],
)
def test_a_device_that_torch_does_not_open_is_explained_by_the_build(
    versions: Any, signs: list[str], verdict: str, text: str, fix: str
) -> None:
    device = {"card": None, "driver": None, "signs": signs, "build": doctor.torch_build(versions)}
    check = doctor.device_check(device)
    assert check.verdict == verdict
    assert text in check.text
    assert check.fix.startswith(fix)


def test_a_card_of_a_rocm_build_is_shown_with_it() -> None:
    card = {
        "name": "mi300x",
        "free_bytes": 5 * GIB,
        "total_bytes": 6 * GIB,
        "capability": None,
        "architecture": "gfx942",
    }
    check = doctor.device_check(
        {"card": card, "driver": None, "signs": ["/dev/kfd"], "build": "ROCm 6.4.4"}
    )
    assert (check.verdict, check.text) == (
        "ok",
        "mi300x, 5.00 GiB of 6.00 GiB free, gfx942, ROCm 6.4.4",
    )


def test_every_row_has_a_verdict_and_problems_say_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        doctor, "_version", lambda name: {"bitsandbytes": None, "accelerate": "1.0"}.get(name, "99")
    )
    findings = doctor.examine(tmp_path / "cache")
    rows = {check["name"]: check for check in findings["checks"]}
    assert {check["verdict"] for check in findings["checks"]} <= {"ok", "note", "problem"}
    assert rows["bitsandbytes"]["fix"] == "pip install -U 'bitsandbytes>=0.48'"
    assert rows["accelerate"]["fix"] == "pip install -U 'accelerate>=1.13'"
    assert rows["gguf"]["verdict"] == "note"
    assert [text.partition(":")[0] for text in findings["problems"]] == [
        "accelerate",
        "bitsandbytes",
    ]
    lines = doctor_screen(findings).splitlines()
    assert "problems: accelerate, bitsandbytes" in lines
    row = next(
        number for number, line in enumerate(lines) if line.startswith(" problem  bitsandbytes")
    )
    assert lines[row + 1].strip() == "next: pip install -U 'bitsandbytes>=0.48'"


def test_the_driver_s_version_is_read_from_the_kernel_module(tmp_path: Path) -> None:
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 16\nGCC version: "
        "13.2.0\n"
    )
    assert doctor.driver(tmp_path / "version") == "570.86.15"
    assert doctor.driver(tmp_path / "nothing") is None


def test_all_findings_are_json_and_on_the_screen(tmp_path: Path) -> None:
    findings: dict[str, Any] = json.loads(json.dumps(doctor.examine(tmp_path / "cache")))
    assert {item["name"] for item in findings["versions"]} >= {
        "torch",
        "diffusers",
        "transformers",
        "accelerate",
        "bitsandbytes",
    }
    screen = doctor_screen(findings)
    flat = " ".join(screen.split())
    available, budget, usable = (
        show_size(findings["memory"][f"{name}_bytes"]) for name in ("available", "auto", "usable")
    )
    assert f"{available} of " in flat
    assert f"--memory auto is {budget}, --ram auto {usable}" in flat
    for name, precision_flags in findings["precisions"].items():
        line = next(line for line in screen.splitlines() if re.match(rf" (ok|note) +{name} ", line))
        assert ("moves" in line) == precision_flags["movable"]
        assert ("unavailable" in line) == (not precision_flags["available"])
    for word in (
        "device",
        "cgroup",
        "pinned",
        "disk",
        str(tmp_path / "cache"),
        "torch",
        "bitsandbytes",
    ):
        assert word in flat
    folded = [
        line for line in screen.splitlines() if "next: " not in line and str(tmp_path) not in line
    ]
    assert max(map(len, folded)) <= 80
