"""What this machine has: the RAM that this process may use, its cgroup's limit before the machine's."""

from __future__ import annotations

from pathlib import Path

import psutil

# cgroup v2, then v1. A v1 group without a limit reports a number near 2**63.
LIMITS = ("memory.max", "memory/memory.limit_in_bytes")


def host_ram_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """The least of the machine's RAM and the cgroup limits found under ``root``."""
    limits = [int(psutil.virtual_memory().total)]
    for name in LIMITS:
        try:
            text = (root / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits)
