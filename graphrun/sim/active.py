"""The active simulated machine, to which new tensors belong, and its interface for tensors and operators."""

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
        """Physical memory in bytes, None for no limit."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all live storages."""

    def charge(self, flops: int) -> None:
        """Charges ``flops`` to the current timeline."""

    def copy_in(self, nbytes: int, non_blocking: bool = False) -> bool:
        """Counts and charges a copy of ``nbytes`` to the device. Returns whether the host waits for it."""

    def copy_out(self, nbytes: int, non_blocking: bool = False) -> bool:
        """Counts and charges a copy of ``nbytes`` to the host. Returns whether the host waits for it."""

    def record(self, stream: Stream) -> float:
        """Time at which the work issued to ``stream`` is finished."""

    def wait(self, stream: Stream, mark: float) -> None:
        """``stream`` continues no earlier than ``mark``."""

    def synchronize(self) -> None:
        """Waits for all timelines."""

    def join(self, stream: Stream) -> None:
        """The host waits for ``stream``."""


active: ContextVar[ActiveMachine | None] = ContextVar("graphrun_sim_machine", default=None)


def active_machine() -> ActiveMachine:
    """The machine whose context is entered; raises RuntimeError when there is none."""
    machine = active.get()
    if machine is None:
        raise RuntimeError("no simulated machine is active: make tensors on device 'sim' inside `with Machine(...):`")
    return machine
