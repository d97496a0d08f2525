"""What the executor needs of a device: bytes, two streams, a clock. Says how, never when.

    compute  |--block 0--|--block 1--|--block 2--|
    copy     |--in 1--|--in 2--|     ^  in 4 waits for the mark after block 2, whose bytes it overwrites
                               mark -+

Memory is allocated on the compute stream and written on the copy stream, so order comes from marks alone: the copy stream waits for
a compute mark made after the allocation, compute waits for a mark after the copy, and a buffer is dropped behind a barrier.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch

from graphrun.errors import GraphrunError
from graphrun.executor.arenas import Arenas

Stream = Literal["compute", "copy"]
Mark = Any  # a point on a stream, opaque outside its device: a float on sim, an event on CUDA


class Device(Protocol):
    """An accelerator with one compute stream and one copy stream into it."""

    @property
    def name(self) -> str:
        """What a trace calls the device."""

    @property
    def torch_device(self) -> torch.device:
        """Where the ops compute."""

    def session(self, cap_bytes: int) -> AbstractContextManager[None]:
        """The device is active, and tensors beyond ``cap_bytes`` are refused, for as long as the context stands."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor on the device. Raises torch.OutOfMemoryError past the cap."""

    def arena(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor on the host, in memory that `pin` can lock."""

    def pin(self, arena: torch.Tensor) -> None:
        """Locks the pages of ``arena`` for as long as its storage lives. A no-op where nothing pins."""

    @property
    def arenas(self) -> Arenas:
        """The host memory that `arena` handed out and that still lives, and what of it is pinned."""

    def copy_in(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy from the host on the copy stream. Raises TransferFailed where it is known to have failed."""

    def mark(self, stream: Stream) -> Mark:
        """A point behind everything queued on ``stream`` so far."""

    def wait(self, stream: Stream, mark: Mark) -> None:
        """What is queued on ``stream`` from now on starts behind ``mark``. The host does not wait."""

    def barrier(self) -> None:
        """The host waits until both streams are empty, and both go on from the same time."""

    def seconds_at(self, mark: Mark) -> float:
        """When ``mark`` was reached, on the device's clock. Valid behind a barrier."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes of tensors on the device now."""

    @property
    def peak_bytes(self) -> int:
        """The most the device had to hold since `reset_peak`."""

    def reset_peak(self) -> None:
        """Forgets the peak so far."""

    def release_cached(self) -> None:
        """Gives back memory that holds no tensor. Called behind a barrier."""

    def holders(self) -> tuple[str, ...]:
        """What lies on the device, largest first, as text for an error."""

    def explain(self, error: BaseException) -> GraphrunError | None:
        """The typed error that ``error`` amounts to, or None when it says nothing of this device's memory or copies."""
