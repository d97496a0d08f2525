"""The CPU as a device of the executor: resident weights are in ordinary memory, and both streams run on the host.

For measuring what following a plan costs where the plain pipeline runs on the very same hardware. Counts no bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from graphrun.errors import GraphrunError
from graphrun.runtime.devices.device import Device

AMPLE = 1 << 50


class CpuDevice(Device):
    """Behind the interface of `graphrun.runtime.devices.device.Device`."""

    name = "cpu"
    torch_device = torch.device("cpu")
    allocated_bytes = peak_bytes = 0
    available_bytes = AMPLE

    def session(self, cap_bytes: int) -> AbstractContextManager[None]:
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
