"""The active simulated machine, to which new tensors belong."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch

active: ContextVar[Any] = ContextVar("graphrun_sim_machine", default=None)
"""The `graphrun.sim.machine.Machine` whose context is entered, or None."""


def active_machine(device: Any = None) -> Any:
    """Return the active machine, or its sibling for a ``device`` such as ``sim:1``. Raises
    RuntimeError if there is none."""
    machine = active.get()
    if machine is None:
        raise RuntimeError(
            "no simulated machine is active: make tensors on device 'sim' inside `with "
            "Machine(...):`"
        )
    number = None if device is None else torch.device(device).index
    if number is None:
        return machine
    if number >= len(machine.machines):
        raise RuntimeError(
            f"there is no device sim:{number}: the active machine has {len(machine.machines)}"
        )
    return machine.machines[number]


def is_simulated(device: Any) -> bool:
    """Return whether ``device`` is ``sim``, or a device that the active machine simulates."""
    kind = torch.device(device).type
    machine = active.get()
    return kind == "sim" or (machine is not None and kind in machine.device_types)
