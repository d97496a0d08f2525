"""The active simulated machine, to which new tensors belong."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

active: ContextVar[Any] = ContextVar("graphrun_sim_machine", default=None)
"""The `graphrun.sim.machine.Machine` whose context is entered, or None."""


def active_machine() -> Any:
    """The machine whose context is entered; raises RuntimeError when there is none."""
    machine = active.get()
    if machine is None:
        raise RuntimeError("no simulated machine is active: make tensors on device 'sim' inside `with Machine(...):`")
    return machine
