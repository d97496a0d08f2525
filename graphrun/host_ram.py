"""The RAM that this process may still take, from the kernel and from its cgroups."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphrun.units import parse_size

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")

# a v1 group without a limit reports 2**63 rounded down to a page
UNLIMITED_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class Limit:
    """A cgroup's memory limit.

    ``path``: the file with the limit. ``version``: of cgroups. ``used_bytes``: without the page
    cache of files, which the kernel reclaims before it refuses memory.
    """

    path: str
    version: int
    nbytes: int
    used_bytes: int

    @property
    def left_bytes(self) -> int:
        return max(0, self.nbytes - self.used_bytes)


def memory_limits(root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP) -> tuple[Limit, ...]:
    """Return the memory limits of this process's cgroup and its parents, smallest first.

    ``membership``: the file that lists this process's groups as ``number:controllers:path``. In a
    container, the group's files may be at ``root`` itself.
    """
    groups: dict[int, tuple[str, ...]] = {2: ("/",), 1: ("/",)}
    for line in _read(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if not controllers or "memory" in controllers.split(","):
            inner = Path(name.strip() or "/")
            groups[1 if controllers else 2] = tuple(str(group) for group in (inner, *inner.parents))
    limits = []
    for number, folder, limit_file, usage_file, cache_keys in (
        (2, root, "memory.max", "memory.current", ("inactive_file", "active_file")),
        (
            1,
            root / "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            ("total_inactive_file", "total_active_file"),
        ),
    ):
        for group in groups[number]:
            path = folder / group.lstrip("/")
            text = _read(path / limit_file).strip()
            if text.isdigit() and int(text) < UNLIMITED_BYTES:
                stat = _read(path / "memory.stat")
                cache_bytes = sum(_number(stat, key) for key in cache_keys)
                used_bytes = max(0, _number(_read(path / usage_file)) - cache_bytes)
                limits.append(Limit(str(path / limit_file), number, int(text), used_bytes))
    return tuple(sorted(limits, key=lambda item: item.nbytes))


def available_bytes(meminfo: Path = MEMINFO) -> int:
    """Return the bytes that can be taken without swapping.

    That is the kernel's MemAvailable, or psutil's estimate if there is none. Not MemTotal: a
    virtual machine may start with less memory than it gets later, and other processes use a part of
    it.
    """
    if available_kib := _number(_read(meminfo), "MemAvailable:"):
        return available_kib * 1024
    import psutil

    return int(psutil.virtual_memory().available)


def host_ram_bytes(
    root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP, meminfo: Path = MEMINFO
) -> int:
    """Return the smaller of the machine's available memory and the rest of the cgroup limits.

    Swap and memory that this process already uses are not counted.
    """
    limits = (limit.left_bytes for limit in _foreign_limits(root, membership))
    return min([available_bytes(meminfo), *limits])


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


def _number(text: str, name: str = "") -> int:
    """Return the first number in ``text``, or in the line that begins with ``name``; else 0."""
    rows = (line.split() for line in text.splitlines())
    matching_rows = (
        row[1:] if name else row for row in rows if row and (not name or row[0] == name)
    )
    return next((int(row[0]) for row in matching_rows if row and row[0].isdigit()), 0)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
