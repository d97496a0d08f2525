"""Which simulated machine new tensors belong to: the one whose context is entered, and what operators need of it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

import torch

from graphrun.sim.clock import Clock, Stream
from graphrun.sim.ledger import Ledger
from graphrun.sim.ordering import Ordering


class ActiveMachine(Protocol):
    """The part of `machine.Machine` that tensors and operators use."""

    device: torch.device
    ledger: Ledger
    clock: Clock
    hollow_bytes: int | None
    ordering: Ordering | None

    @property
    def capacity_bytes(self) -> int | None:
        """Bytes physically there, None for no limit."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all storages that live now."""

    def charge(self, flops: int) -> None:
        """Counts work done on the compute timeline."""

    def copy_in(self, nbytes: int, non_blocking: bool = False) -> bool:
        """Counts a copy of ``nbytes`` to the device: whether the host waits for it."""

    def copy_out(self, nbytes: int, non_blocking: bool = False) -> bool:
        """Counts a copy of ``nbytes`` to the host: whether the host waits for it."""

    def record(self, stream: Stream) -> float:
        """When what was issued to ``stream`` will be done."""

    def wait(self, stream: Stream, mark: float) -> None:
        """``stream`` goes on no earlier than ``mark``."""

    def synchronize(self) -> None:
        """Joins the timelines."""

    def join(self, stream: Stream) -> None:
        """The host waits for ``stream``."""


active: ContextVar[ActiveMachine | None] = ContextVar("graphrun_sim_machine", default=None)


def active_machine() -> ActiveMachine:
    """The machine whose context is entered; raises RuntimeError when there is none."""
    machine = active.get()
    if machine is None:
        raise RuntimeError("no simulated machine is active: make tensors on device 'sim' inside `with Machine(...):`")
    return machine
