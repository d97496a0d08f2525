"""The CPU as a device of the executor: resident weights are in ordinary memory, and both streams
run on the host.

For measuring what following a plan costs where the plain pipeline runs on the very same hardware.
Counts the bytes of weights and ring buffers, and not those of activations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from graphrun.errors import GraphrunError
from graphrun.model.problem import ALLOCATION_BYTES
from graphrun.runtime.devices.device import Device
from graphrun.units import round_up

AMPLE = 1 << 50


class CpuDevice(Device):
    """Behind the interface of `graphrun.runtime.devices.device.Device`."""

    name = "cpu"
    torch_device = torch.device("cpu")
    peak_bytes = 0
    available_bytes = AMPLE

    @property
    def allocated_bytes(self) -> int:
        """Of live weights and ring buffers."""
        return self.arenas.nbytes("device")

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Ordinary memory, counted as other devices round it up."""
        memory = super().allocate(round_up(nbytes, ALLOCATION_BYTES))
        self.arenas.count("device", memory)
        return memory[:nbytes]

    def session(self, cap_bytes: int, limit_bytes: int = 0) -> AbstractContextManager[None]:
        """Nothing to begin."""
        return nullcontext()

    def pin(self, arena: torch.Tensor) -> None:
        """Nothing is locked."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies."""
        target.copy_(source)

    def background(self, job: Callable[[], None], queue: str = "disk") -> Callable[[], None]:
        """Done at once."""
        job()
        return lambda: None

    def mark(self, stream: str) -> float:
        """The time."""
        return time.perf_counter()

    def wait(self, stream: str, mark: float) -> None:
        """It is over."""

    def barrier(self) -> None:
        """Nothing is under way."""

    def reset_peak(self) -> None:
        """None is kept."""

    def holders(self) -> tuple[str, ...]:
        """Nothing is counted."""
        return ()

    def explain(self, error: BaseException) -> GraphrunError | None:
        """Nothing that the device would say."""
        return None
