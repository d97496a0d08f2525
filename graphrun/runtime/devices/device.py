"""What the executor needs of a device: bytes, two streams, a clock. Says how, never when.

    compute  |--block 0--|--block 1--|--block 2--|
    copy     |--in 1--|--in 2--|     ^  in 4 waits for the mark after block 2, whose bytes it overwrites
    disk   |--read 1--|--read 2--|   |                   reads are done by the host, or by a thread of it
                               mark -+

Memory is allocated on the compute stream and written on the copy stream, so order comes from marks alone: the copy stream waits for
a compute mark made after the allocation, compute waits for a mark after the copy, and a buffer is dropped behind a barrier.

Counts host memory that a device handed out and that still lives, for a run to compare before and after, and with its plan.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch

from graphrun.errors import GraphrunError


class Arenas:
    """Bytes by tier (``arenas``: all, ``pinned``: those with locked pages). They go down when a storage dies, not when asked to."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()
        self._peaks: Counter[str] = Counter()
        self._lock = threading.RLock()  # a filling thread counts too; a finalizer may run inside `count`

    def count(self, tier: str, memory: torch.Tensor) -> None:
        """``memory`` counts to ``tier`` for as long as its storage lives."""
        nbytes = memory.numel() * memory.element_size()
        self._add(tier, nbytes)
        weakref.finalize(memory.untyped_storage(), self._add, tier, -nbytes).atexit = False

    def nbytes(self, tier: str) -> int:
        """Bytes that live in ``tier``."""
        return self._bytes[tier]

    def peak_bytes(self, tier: str) -> int:
        """The most that lived in ``tier`` since `reset_peaks`."""
        return max(self._peaks[tier], self._bytes[tier])

    def reset_peaks(self) -> None:
        """The peaks restart at what lives now."""
        with self._lock:
            self._peaks = Counter(self._bytes)

    def _add(self, tier: str, nbytes: int) -> None:
        with self._lock:
            self._bytes[tier] += nbytes
            self._peaks[tier] = max(self._peaks[tier], self._bytes[tier])


Stream = Literal["compute", "copy", "disk"]
Mark = Any  # a point on a stream, opaque outside its device: a float on sim, an event on CUDA (a float on its disk stream)


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

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, *, pageable: bool = False) -> None:
        """Queues a copy from the host on the copy stream. Raises TransferFailed where it is known to have failed."""

    def copy_out(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy to the host on the copy stream. Raises as `copy_in`."""

    def read(self, target: torch.Tensor, nbytes: int) -> None:
        """``nbytes`` were read from disk just now, for ``target`` in host memory: a clock that is not the host's is charged."""

    def background(self, job: Callable[[], None]) -> Callable[[], None]:
        """Does ``job`` beside what the host does, one job after another: a function that waits for it and raises what it raised."""

    def reached(self, marks: Sequence[Mark]) -> bool:
        """Whether a read that left ``marks`` (none yet: it is under way) lies behind the copy stream already."""

    def on_host(self, slowdown: float) -> AbstractContextManager[None]:
        """What computes inside does so on the host, ``slowdown`` times as long as here: its clock is charged."""

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
    def available_bytes(self) -> int:
        """What this process may have allocated in all: what it has, and what is free now."""

    @property
    def peak_bytes(self) -> int:
        """The most the device had to hold since `reset_peak`."""

    def reset_peak(self) -> None:
        """Forgets the peak so far."""

    def release_cached(self) -> None:
        """Gives back memory that holds no tensor. Called behind a barrier."""

    def holders(self) -> tuple[str, ...]:
        """What lies on the device, largest first, as text for an error."""

    def storage_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        """What identifies the storage of ``tensor``, which is on the device, and its bytes."""

    def explain(self, error: BaseException) -> GraphrunError | None:
        """The typed error that ``error`` amounts to, or None when it says nothing of this device's memory or copies."""
