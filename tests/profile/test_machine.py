"""Available RAM: what the kernel reports, limited by the cgroups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch import nn

from graphrun.errors import InputError
from graphrun.host_ram import host_ram_bytes, ram_budget, taken_bytes, total_ram_bytes
from graphrun.units import GIB, MIB

# A virtual machine that began with 8 GiB and has 64 by now would say so in MemTotal; swap is in no
# figure.
MEMINFO = (
    "MemTotal:  8388608 kB\nMemFree:  1024 kB\nMemAvailable:  6291456 kB\nSwapTotal:  67108864 "
    "kB\nSwapFree:  67108864 kB\n"
)


def left(tmp_path: Path, meminfo: str = MEMINFO, **texts: str) -> int:
    """RAM left with the cgroup files in ``texts``, by name with ``__`` for ``/``."""
    (tmp_path / "meminfo").write_text(meminfo)
    (tmp_path / "own").write_text("4:memory:/a/job\n0::/a/job\n")
    for name, text in texts.items():
        path = tmp_path / "cgroup" / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return host_ram_bytes(tmp_path / "cgroup", tmp_path / "own", tmp_path / "meminfo")


@pytest.mark.parametrize("total", [1024, 8388608, 1 << 30])
def test_available_memory_counts_not_the_total_or_swap(tmp_path: Path, total: int) -> None:
    assert left(tmp_path, MEMINFO.replace("8388608", str(total))) == 6 * GIB


@pytest.mark.parametrize("text", ["max\n", str(2**63 - 4096)])
def test_without_a_limit_the_available_memory_counts(tmp_path: Path, text: str) -> None:
    assert left(tmp_path, memory_dot_max=text, memory_dot_current=f"{5 * GIB}") == 6 * GIB


@pytest.mark.parametrize("group", ["", "a__", "a__job__"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_has_its_limit_minus_its_usage_left(
    tmp_path: Path, group: str, version: int
) -> None:
    folder = group if version == 2 else f"memory__{group}"
    limit, usage = [
        ("memory_dot_limit_in_bytes", "memory_dot_usage_in_bytes"),
        ("memory_dot_max", "memory_dot_current"),
    ][version - 1]
    free_bytes = left(tmp_path, **{folder + limit: f"{4 * GIB}\n", folder + usage: f"{3 * GIB}\n"})
    assert free_bytes == GIB
    prefix = ["total_", ""][version - 1]
    stat = f"anon 5\n{prefix}inactive_file {GIB}\n{prefix}active_file {GIB}\n"
    assert left(tmp_path, **{folder + "memory_dot_stat": stat}) == 3 * GIB
    assert left(tmp_path, **{folder + usage: f"{9 * GIB}\n"}) == 0


def test_loaded_modules_are_in_the_budget_once() -> None:
    module = nn.Linear(MIB // 4, 4, bias=False)
    shared_layer = nn.Linear(1, 1)
    shared_layer.weight = module.weight
    assert taken_bytes([module]) == 4 * MIB
    assert taken_bytes([module, shared_layer]) == 4 * MIB + 4
    assert taken_bytes([nn.Linear(8, 8, device="meta")]) == 0
    assert ram_budget("auto", [module], lambda: 64 * GIB) == 64 * GIB + 4 * MIB
    assert ram_budget("50%", [module], lambda: 64 * GIB) == 32 * GIB + 2 * MIB
    assert ram_budget("3G", [module], lambda: 64 * GIB) == 3 * GIB
    with pytest.raises(InputError):
        ram_budget("much", [module], lambda: 64 * GIB)


def test_small_changes_of_free_memory_give_the_same_budget() -> None:
    budgets = {
        ram_budget("auto", (), lambda nbytes=nbytes: nbytes)
        for nbytes in range(40 * GIB, 41 * GIB, 100 * MIB)
    }
    assert budgets == {40 * GIB}
    assert ram_budget("auto", (), lambda: 0) == 0
    assert ram_budget("auto", (), lambda: 127) == 126
    assert all(
        31 * n <= 32 * ram_budget("auto", (), lambda n=n: n) <= 32 * n for n in range(1, 5000)
    )


def test_a_group_of_graphruns_own_is_a_budget_and_no_limit(tmp_path: Path) -> None:
    name = f"graphrun-{os.getpid()}-run"
    for folder, nbytes in ((tmp_path, 4 << 20), (tmp_path / name, 1 << 20)):
        folder.mkdir(exist_ok=True)
        (folder / "memory.max").write_text(f"{nbytes}\n")
        (folder / "memory.current").write_text("0\n")
    membership = tmp_path / "cgroup"
    membership.write_text(f"0::/{name}\n")
    assert host_ram_bytes(tmp_path, membership) == 4 << 20
    assert total_ram_bytes(tmp_path, membership) == 4 << 20
    (tmp_path / name).rename(tmp_path / "other")
    membership.write_text("0::/other\n")
    assert host_ram_bytes(tmp_path, membership) == 1 << 20
