"""A device, as the executor uses it: memory, two streams and a disk queue, a clock; and counters of
host memory.

    compute  |--block 0--|--block 1--|--block 2--| copy     |--in 1--|--in 2--|
    |--in 4--|     in 4 overwrites block 2, so it waits for the mark after block 2 disk   |--read
    1--|--read 2--|                              reads run on the host, or on a thread of it

Memory is allocated on the compute stream and written on the copy stream; only marks order the two.
The copy stream waits for a compute mark made after the allocation, compute waits for a mark after
the copy, and a buffer is released after a barrier.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from graphrun.errors import GraphrunError


class Arenas:
    """Counters of live host memory by tier: ``arenas`` (all) and ``pinned`` (page-locked). A
    storage counts until it is freed."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()
        self._peaks: Counter[str] = Counter()
        # the reader thread counts too, and a finalizer may run inside `count`
        self._lock = threading.RLock()

    def count(self, tier: str, memory: torch.Tensor) -> None:
        """Counts ``memory`` in ``tier`` until its storage is freed."""
        nbytes = memory.numel() * memory.element_size()
        self._add(tier, nbytes)
        weakref.finalize(memory.untyped_storage(), self._add, tier, -nbytes).atexit = False

    def nbytes(self, tier: str) -> int:
        """Live bytes in ``tier``."""
        return self._bytes[tier]

    def peak_bytes(self, tier: str) -> int:
        """Most live bytes in ``tier`` since `reset_peaks`."""
        return max(self._peaks[tier], self._bytes[tier])

    def reset_peaks(self) -> None:
        """Restarts the peaks at the live bytes."""
        with self._lock:
            self._peaks = Counter(self._bytes)

    def _add(self, tier: str, nbytes: int) -> None:
        with self._lock:
            self._bytes[tier] += nbytes
            self._peaks[tier] = max(self._peaks[tier], self._bytes[tier])


@functools.cache
def device_lock(name: str) -> threading.RLock:
    """The lock of the devices called ``name``, shared by everything in the process that runs on
    one: one run at a time."""
    return threading.RLock()


# A thread of the parent may hold a lock at the moment of a fork; the child has none of the parent's
# runs.
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=device_lock.cache_clear)

Queue = Literal["disk", "lock"]  # of work in the background: reads, page locking
Stream = Literal["compute", "copy"] | Queue
# a point on a stream, opaque outside its device: a float on sim, an event on CUDA (a float on
# queues of the host)
Mark = Any


class Device(ABC):
    """An accelerator with one compute stream, one copy stream, and a disk queue that feeds it.

    The methods that are not abstract suit a device on which time passes by itself.
    """

    name: str  # in a trace
    torch_device: torch.device  # on which ops compute
    secondaries: tuple[
        Device, ...
    ] = ()  # further devices of the machine, on which components may compute as a whole

    def __init__(self) -> None:
        # counters of the live host memory that `arena` allocated, and of its page-locked part
        self.arenas = Arenas()

    def with_secondaries(self, secondaries: Sequence[Device]) -> Device:
        """This device, with ``secondaries``, whose host memory counts as its own."""
        self.secondaries = tuple(secondaries)
        for secondary in secondaries:
            secondary.arenas = self.arenas
        return self

    @property
    def every(self) -> tuple[Device, ...]:
        """This device and its secondary devices, by number."""
        return self, *self.secondaries

    def current(self) -> AbstractContextManager[Any]:
        """Context in which kernels are launched on this device."""
        return nullcontext()

    @property
    def memory(self) -> Any:
        """Equal for devices whose tensors are in the same memory."""
        return self.torch_device

    @abstractmethod
    def session(self, cap_bytes: int, limit_bytes: int = 0) -> AbstractContextManager[None]:
        """Activate the device, and refuse allocations beyond ``cap_bytes``, until the context is
        left.

        ``limit_bytes``: of the plan, `verify.pages.limit_bytes`. PyTorch's allocator gets the
        larger of both as its limit.
        """

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor on the device. Raises torch.OutOfMemoryError past the cap."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def arena(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor on the host, in memory that `pin` can lock."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self.arenas.count("arenas", memory)
        return memory

    def pin(self, arena: torch.Tensor) -> None:
        """Page-locks ``arena`` until its storage is freed. Only counts it on devices without page
        locking."""
        self.arenas.count("pinned", arena)

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy between host and device on the copy stream. Raises TransferFailed if it is
        known to have failed."""

    def read(self, target: torch.Tensor, nbytes: int) -> None:  # noqa: B027 (most devices need nothing)
        """Call after reading ``nbytes`` from disk into ``target``, which lies in host memory:
        charges a virtual clock."""

    @abstractmethod
    def background(self, job: Callable[[], None], queue: Queue = "disk") -> Callable[[], None]:
        """Queues ``job`` to run in the background, one job of a queue after another.

        Returns a function that waits for it and raises its error.
        """

    def reached(self, marks: Sequence[Mark]) -> bool:
        """Whether a read with ``marks`` (empty: still under way) ends before the current end of the
        copy stream."""
        return bool(marks)

    def queues_behind(self, marks: Sequence[Mark]) -> bool:
        """Whether a copy of what a read with ``marks`` (empty: still under way) reads can be queued
        without the host's waiting."""
        return bool(marks)

    def annotate(self, *, slot: str | None = None, block: str | None = None) -> None:  # noqa: B027 (most devices need nothing)
        """Names the ``slot`` that begins, or the ``block`` that is copied next, in the messages of
        a checker."""

    def on_host(self, slowdown: float) -> AbstractContextManager[None]:
        """Context of compute on the CPU, which takes ``slowdown`` times as long as on the device:
        charges a virtual clock."""
        return nullcontext()

    @abstractmethod
    def mark(self, stream: Stream) -> Mark:
        """A mark after everything queued on ``stream`` so far."""

    @abstractmethod
    def wait(self, stream: Stream, mark: Mark) -> None:
        """Makes work queued on ``stream`` from now on start after ``mark``. The host does not
        wait."""

    @abstractmethod
    def barrier(self) -> None:
        """Waits on the host until both streams are empty. Both continue from the same time."""

    def seconds_at(self, mark: Mark) -> float:
        """Time of ``mark`` on the device's clock. Valid after a barrier."""
        return float(mark)

    @property
    @abstractmethod
    def allocated_bytes(self) -> int:
        """Bytes of tensors on the device now."""

    @property
    @abstractmethod
    def available_bytes(self) -> int:
        """Bytes that this process can have allocated in total: what it has now, plus what is
        free."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """Peak bytes on the device since `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Restarts the peak at the bytes allocated now."""

    def release_cached(self) -> None:  # noqa: B027 (most devices need nothing)
        """Returns cached memory without tensors to the device. Call after a barrier."""

    @abstractmethod
    def holders(self) -> tuple[str, ...]:
        """Text for an error: the allocations on the device, largest first."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is in this device's own memory, which is not that of the host."""
        return tensor.device == self.torch_device and tensor.device.type != "cpu"

    def storage_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        """(key, bytes) of the storage of ``tensor``, which is on the device."""
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()

    @abstractmethod
    def explain(self, error: BaseException) -> GraphrunError | None:
        """The GraphrunError for ``error``, or None if it does not concern this device's memory or
        copies."""

    def refused(self, error: BaseException) -> bool:
        """Whether ``error``, of memory, is about this device: its message names it."""
        return str(self.torch_device) in str(error)

    def tiers(self) -> dict[str, int]:
        """Bytes in use by memory tier (see `graphrun.trace.Tier`)."""
        found = {
            "device": self.allocated_bytes,
            **{name: self.arenas.nbytes(name) for name in ("arenas", "pinned")},
        }
        return found | {
            f"device{number}": secondary.allocated_bytes
            for number, secondary in enumerate(self.secondaries, 1)
        }
