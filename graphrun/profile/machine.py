"""What this machine has: the RAM that this process may still take, from the kernel and from its cgroups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from graphrun.units import parse_size

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")

# A v1 group without a limit reports 2**63 rounded down to a page.
UNLIMITED_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class Limit:
    """A cgroup's limit on memory: where it stands, the version of cgroups, and bytes: the limit, and what is in use apart from
    inactive files, which the kernel drops first."""

    path: str
    version: int
    nbytes: int
    used_bytes: int

    @property
    def left_bytes(self) -> int:
        """What the group may still take."""
        return max(0, self.nbytes - self.used_bytes)


def memory_limits(root: Path = ROOT, own: Path = OWN) -> tuple[Limit, ...]:
    """The limits on this process: of its own group and of every group around it, cgroup v2 then v1; the smallest first.

    ``own`` lists this process's groups as ``number:controllers:path``; a container may see its group's files at ``root`` itself.
    """
    groups: dict[int, tuple[str, ...]] = {2: ("/",), 1: ("/",)}
    for line in _read(own).splitlines():
        _, _, named = line.partition(":")
        controllers, _, name = named.partition(":")
        if not controllers or "memory" in controllers.split(","):
            inner = Path(name.strip() or "/")
            groups[1 if controllers else 2] = tuple(str(group) for group in (inner, *inner.parents))
    found = []
    for number, folder, limit, used, idle in (
        (2, root, "memory.max", "memory.current", "inactive_file"),
        (1, root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for group in groups[number]:
            path = folder / group.lstrip("/")
            text = _read(path / limit).strip()
            if text.isdigit() and int(text) < UNLIMITED_BYTES:
                usage = _number(_read(path / used)) - _number(_read(path / "memory.stat"), idle)
                found.append(Limit(str(path / limit), number, int(text), max(0, usage)))
    return tuple(sorted(found, key=lambda item: item.nbytes))


def available_bytes(meminfo: Path = MEMINFO) -> int:
    """What may be taken without swapping: the kernel's MemAvailable, psutil's estimate where there is none.

    MemTotal does not say that: a virtual machine may begin with less than it gets, and others have taken a part of it.
    """
    return _number(_read(meminfo), "MemAvailable:") * 1024 or int(psutil.virtual_memory().available)


def host_ram_bytes(root: Path = ROOT, own: Path = OWN, meminfo: Path = MEMINFO) -> int:
    """The least of what the machine has available and what this process's cgroups have left. Swap does not count, and what this
    process holds already is no part of it."""
    return min([available_bytes(meminfo), *(limit.left_bytes for limit in memory_limits(root, own))])


def total_ram_bytes(root: Path = ROOT, own: Path = OWN) -> int:
    """The least of the machine's RAM and its cgroups' limits, whoever uses it now."""
    return min([int(psutil.virtual_memory().total), *(limit.nbytes for limit in memory_limits(root, own))])


def ram_budget(ram: str | int, modules: Iterable[Any] = (), left_bytes: Callable[[], int] = host_ram_bytes) -> int:
    """The budget of host RAM that ``ram`` asks for: ``auto``, a size, or a share of what ``auto`` is.

    The weights of ``modules`` are there already and in the budget, but no part of what is left. That is rounded down by at most a
    32nd, so that free memory that varies a little makes the same plans. Raises InputError for what is no size.
    """
    left = left_bytes()
    step = 1 << max(0, left.bit_length() - 6)
    auto_bytes = left // step * step + taken_bytes(modules)
    return auto_bytes if ram == "auto" else parse_size(ram, whole_bytes=auto_bytes, name="ram")


def taken_bytes(modules: Iterable[Any]) -> int:
    """RAM that the weights of ``modules`` take, every storage once."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers()) if tensor.device.type == "cpu"]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): int(storage.nbytes()) for storage in storages}.values())


def _number(text: str, name: str = "") -> int:
    """The number in ``text``, or behind ``name`` at the beginning of a line of it; 0 where there is none."""
    rows = (line.split() for line in text.splitlines())
    found = (row[1:] if name else row for row in rows if row and (not name or row[0] == name))
    return next((int(row[0]) for row in found if row and row[0].isdigit()), 0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
