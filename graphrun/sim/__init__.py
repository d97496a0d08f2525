"""A simulated accelerator, the torch device ``sim``.

    with Machine(capacity_bytes=8 * GIB) as machine:
        x = torch.zeros(1024, device="sim")

Results are bitwise equal to the CPU's. Memory (a hard capacity), time (a virtual clock) and faults
are simulated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from graphrun.sim.dry import PLANNED, DryMachine
from graphrun.sim.host_flops import HostFlops
from graphrun.sim.ledger import SimulatedOutOfMemory
from graphrun.sim.machine import Machine, SimulatedCopyError
from graphrun.sim.register import available, register

if TYPE_CHECKING:
    device: torch.device

__all__ = [
    "PLANNED",
    "DryMachine",
    "HostFlops",
    "Machine",
    "SimulatedCopyError",
    "SimulatedOutOfMemory",
    "available",
    "device",
    "register",
]


def __getattr__(name: str) -> torch.device:
    """Return ``device``, ``torch.device("sim:0")``, which needs the registered backend."""
    if name != "device":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    register()
    return torch.device("sim:0")
