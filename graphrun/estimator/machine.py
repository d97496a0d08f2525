"""What this machine has: the RAM that this process may use, its cgroup's limit before the machine's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")

# A v1 group without a limit reports 2**63 rounded down to a page.
UNLIMITED_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class Limit:
    """A cgroup's limit on memory: where it stands, the version of cgroups, and bytes (the limit, and what is in use)."""

    path: str
    version: int
    nbytes: int
    used_bytes: int


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
    for number, folder, limit, used in (
        (2, root, "memory.max", "memory.current"),
        (1, root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for group in groups[number]:
            path = folder / group.lstrip("/")
            text = _read(path / limit).strip()
            if text.isdigit() and int(text) < UNLIMITED_BYTES:
                usage = _read(path / used).strip()
                found.append(Limit(str(path / limit), number, int(text), int(usage) if usage.isdigit() else 0))
    return tuple(sorted(found, key=lambda item: item.nbytes))


def host_ram_bytes(root: Path = ROOT, own: Path = OWN) -> int:
    """The least of the machine's RAM and the limits of this process's cgroups."""
    return min([int(psutil.virtual_memory().total), *(limit.nbytes for limit in memory_limits(root, own))])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
