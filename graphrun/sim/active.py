"""Decides which simulated machine new tensors belong to: the one whose context is entered. It must not know what a machine does."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphrun.sim.machine import Machine

active: ContextVar[Machine | None] = ContextVar("graphrun_sim_machine", default=None)


def active_machine() -> Machine:
    """The machine whose context is entered; raises RuntimeError when there is none."""
    machine = active.get()
    if machine is None:
        raise RuntimeError("no simulated machine is active: make tensors on device 'sim' inside `with Machine(...):`")
    return machine
