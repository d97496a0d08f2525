"""The RAM that this process may still take: what the machine and its cgroups have left."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from graphrun import kernel_memory
from graphrun.kernel_memory import CGROUP_ROOT, MEMBERSHIP, MEMINFO, Limit, memory_limits
from graphrun.units import parse_size


def host_ram_bytes(
    root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP, meminfo: Path = MEMINFO
) -> int:
    """Return the smaller of the machine's available memory and the rest of the cgroup limits.

    Swap and memory that this process already uses are not counted.
    """
    limits = (limit.left_bytes for limit in _foreign_limits(root, membership))
    return min([kernel_memory.available_bytes(meminfo), *limits])


def total_ram_bytes(root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP) -> int:
    """Return the smaller of the machine's RAM and its cgroups' limits, including memory in use."""
    import psutil

    limits = (limit.nbytes for limit in _foreign_limits(root, membership))
    return min([int(psutil.virtual_memory().total), *limits])


def _foreign_limits(root: Path, membership: Path) -> list[Limit]:
    """Return `memory_limits` without this process's budgets (`graphrun.memory_group`)."""
    budget_group = f"graphrun-{os.getpid()}-"
    return [
        limit
        for limit in memory_limits(root, membership)
        if not Path(limit.path).parent.name.startswith(budget_group)
    ]


def ram_budget(
    ram: str | int, modules: Iterable[Any] = (), left_bytes: Callable[[], int] = host_ram_bytes
) -> int:
    """Return the host RAM budget in bytes for ``ram``: ``auto``, a size, or a share of ``auto``.

    ``auto`` is the RAM left (`steady_bytes`) plus the weights of ``modules``, which are already in
    memory. Raises InputError for an invalid size.
    """
    auto_bytes = steady_bytes(left_bytes()) + taken_bytes(modules)
    return auto_bytes if ram == "auto" else parse_size(ram, whole_bytes=auto_bytes, name="ram")


def steady_bytes(free_bytes: int) -> int:
    """Return ``free_bytes`` less at most 1/32: small changes then give the same plans."""
    step = 1 << max(0, free_bytes.bit_length() - 6)
    return free_bytes // step * step


def taken_bytes(modules: Iterable[Any]) -> int:
    """Return the host RAM of the weights of ``modules`` in bytes, each storage once."""
    tensors = [
        tensor
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
        if tensor.device.type == "cpu"
    ]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): int(storage.nbytes()) for storage in storages}.values())
