"""A device as the executor uses it: memory, streams, a clock, and counters of host memory.

    compute  |--block 0--|--block 1--|--block 2--|
    copy     |--in 1--|--in 2--|                 |--in 4--|   in 4 overwrites block 2, so it waits
                                                              for the mark after block 2
    disk   |--read 1--|--read 2--|                            reads run on the host or its thread

Memory is allocated on the compute stream and written on the copy stream; only marks order the two.
The copy stream waits for a compute mark made after the allocation. Compute waits for a mark after
the copy. A buffer is released after a barrier.
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
from mmap import PAGESIZE
from typing import Any, Literal

import torch

from graphrun.errors import GraphrunError
from graphrun.runtime.direct_reads import Span
from graphrun.units import round_up


class Arenas:
    """Counters of live host memory by tier: ``arenas`` (all) and ``pinned`` (page-locked).

    A storage counts until it is freed. A forked process counts nothing here.
    """

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()
        self._peaks: Counter[str] = Counter()
        # the reader thread also counts, and a finalizer may run inside `count`
        self._lock, self._process = threading.RLock(), os.getpid()

    def count(self, tier: str, memory: torch.Tensor) -> None:
        """Count ``memory`` in ``tier`` until its storage is freed."""
        self._add(tier, memory.nbytes)
        weakref.finalize(memory.untyped_storage(), self._add, tier, -memory.nbytes).atexit = False

    def nbytes(self, tier: str) -> int:
        """Return the live bytes in ``tier``."""
        return 0 if os.getpid() != self._process else self._bytes[tier]

    def peak_bytes(self, tier: str) -> int:
        """Return the most live bytes in ``tier`` since `reset_peaks`."""
        return max(self._peaks[tier], self._bytes[tier])

    def reset_peaks(self) -> None:
        """Restart the peaks at the live bytes."""
        with self._lock:
            self._peaks = Counter(self._bytes)

    def _add(self, tier: str, nbytes: int) -> None:
        if os.getpid() != self._process:
            return  # a thread of the other process may have had the lock
        with self._lock:
            self._bytes[tier] += nbytes
            self._peaks[tier] = max(self._peaks[tier], self._bytes[tier])


@functools.cache
def device_lock(name: str) -> threading.RLock:
    """Return the lock of this process for devices called ``name``: one run at a time has it."""
    return threading.RLock()


# At a fork, a thread of the parent may hold a lock; the child runs none of the parent's runs.
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=device_lock.cache_clear)

Queue = Literal["disk", "lock"]  # background work: reads, page locking
StreamName = Literal["compute", "copy"] | Queue
# A point on a stream, opaque outside its device: a float on sim, an event on CUDA (on queues of the
# host, a float).
Mark = Any


class Device(ABC):
    """An accelerator with one compute stream, one copy stream, and a disk queue that feeds it.

    Methods that are not abstract suit a device on which time passes by itself.
    """

    name: str  # name in a trace
    torch_device: torch.device  # device of the ops
    unified = False  # whether its memory is the host's
    serial_copies = False  # whether copies and compute take turns
    notices: tuple[str, ...] = ()  # sentences on what the device does not promise
    # further devices of the machine, on which components or some of their blocks may compute
    secondaries: tuple[Device, ...] = ()
    # of tensors of other code in this process, outside the budget; set by whoever shares the device
    foreign_bytes = 0

    def __init__(self) -> None:
        # counters of live host memory from `arena`, and of its page-locked part
        self.arenas = Arenas()

    def with_secondaries(self, secondaries: Sequence[Device]) -> Device:
        """Return this device with ``secondaries``, whose host memory counts as its own."""
        self.secondaries = tuple(secondaries)
        for secondary in secondaries:
            secondary.arenas = self.arenas
        return self

    @property
    def all_devices(self) -> tuple[Device, ...]:
        """This device and its secondary devices, by number."""
        return self, *self.secondaries

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which kernels are launched on this device."""
        return nullcontext()

    @property
    def memory(self) -> Any:
        """Identity of the memory, equal for devices with tensors in the same memory."""
        return self.torch_device

    @abstractmethod
    def capped(self, cap_bytes: int, limit_bytes: int = 0) -> AbstractContextManager[None]:
        """Activate the device, and refuse allocations beyond ``cap_bytes`` within the context.

        ``limit_bytes``: `verify.pages.limit_bytes` of the plan. The limit of PyTorch's allocator is
        the larger of both.
        """

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return a flat uint8 tensor on the device.

        Raises torch.OutOfMemoryError beyond the cap.
        """
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def arena(self, nbytes: int, *, pinned: bool = False) -> torch.Tensor:
        """Return a flat uint8 tensor on the host, in memory that `pin` can lock.

        ``pinned``: whether `pin` follows, for devices whose memory is locked when it is allocated.
        The tensor starts within its storage, on pages of its own, because CUDA registers a page
        only once.
        """
        memory = torch.empty(round_up(nbytes, PAGESIZE) + PAGESIZE, dtype=torch.uint8, device="cpu")
        start = -memory.data_ptr() % PAGESIZE
        arena = memory[start : start + nbytes]
        self.arenas.count("arenas", arena)
        return arena

    def pin(self, arena: torch.Tensor) -> None:
        """Page-lock ``arena`` until its storage is freed, or, without page locking, count it."""
        self.arenas.count("pinned", arena)

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between host and device on the copy stream.

        Raises TransferFailed if the copy is known to have failed.
        """

    def read(self, target: torch.Tensor, nbytes: int) -> None:  # noqa: B027 (most devices need nothing)
        """Charge a virtual clock, after reading ``nbytes`` from disk into ``target`` in RAM."""

    def read_block(
        self,
        spans: Sequence[tuple[Span, torch.Tensor]],
        write: tuple[Callable[[], None], torch.Tensor] | None,
    ) -> None:
        """Queue the reads of file ranges into device memory on the copy stream, and then ``write``.

        ``write``: a function that a thread calls, and the flat memory that it fills. Only on
        unified memory.
        """
        raise NotImplementedError(f"{self.name} does not share its memory with the host")

    @abstractmethod
    def background(self, job: Callable[[], None], queue: Queue = "disk") -> Callable[[], None]:
        """Queue ``job`` to run in the background, one job of a queue after another.

        Return a function that waits for the job and raises its error.
        """

    def reached(self, marks: Sequence[Mark]) -> bool:
        """Return whether a read ends before the current end of the copy stream.

        ``marks``: of the read; empty while it is under way.
        """
        return bool(marks)

    def queues_behind(self, marks: Sequence[Mark]) -> bool:
        """Return whether a copy of the read bytes can be queued without making the host wait.

        ``marks``: as for `reached`.
        """
        return bool(marks)

    def annotate(self, *, slot: str | None = None, block: str | None = None) -> None:  # noqa: B027 (most devices need nothing)
        """Set the ``slot`` that begins, or the ``block`` to copy next, for a checker's messages."""

    def on_host(self, slowdown: float) -> AbstractContextManager[None]:
        """Return a context of compute on the CPU, ``slowdown`` times as long on a virtual clock."""
        return nullcontext()

    @abstractmethod
    def mark(self, stream: StreamName) -> Mark:
        """Return a mark after everything queued on ``stream`` so far."""

    @abstractmethod
    def wait(self, stream: StreamName, mark: Mark) -> None:
        """Make later work on ``stream`` start after ``mark``. The host does not wait."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait on the host until both streams are empty. Both continue from the same time."""

    def seconds_at(self, mark: Mark) -> float:
        """Return the time of ``mark`` on the device's clock. Valid after a barrier."""
        return float(mark)

    @property
    @abstractmethod
    def allocated_bytes(self) -> int:
        """Bytes of tensors on the device now."""

    @property
    @abstractmethod
    def available_bytes(self) -> int:
        """Bytes that this process can allocate in total: bytes allocated now plus free bytes."""

    @property
    def plannable_bytes(self) -> int:
        """Bytes that plans of this process can have: available bytes without foreign bytes."""
        return self.available_bytes - self.foreign_bytes

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """Peak bytes on the device since `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Restart the peak at the bytes allocated now."""

    def release_cached(self) -> None:  # noqa: B027 (most devices need nothing)
        """Return cached memory without tensors to the device. Call after a barrier."""

    def before_call(self, *, first: bool) -> None:  # noqa: B027 (most devices need nothing)
        """Bring memory other than tensors into the state that plans assume.

        Called before each call into a component (``first``: in a slot of first calls): releases
        freed host memory to the system, and allocates the workspace of kernels.
        """

    @abstractmethod
    def holders(self) -> tuple[str, ...]:
        """Return text for an error: the allocations on the device, largest first."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is in this device's own memory, separate from host memory."""
        return tensor.device == self.torch_device and tensor.device.type != "cpu"

    def storage_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return (key, bytes) of the storage of ``tensor``, which is on the device."""
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()

    @abstractmethod
    def explain(self, error: BaseException) -> GraphrunError | None:
        """Return the GraphrunError for ``error``; None unless it is about memory or copies."""

    def refused(self, error: BaseException) -> bool:
        """Return whether ``error``, an out-of-memory error, names this device in its message."""
        return str(self.torch_device) in str(error)

    def tiers(self) -> dict[str, int]:
        """Return the bytes in use by memory tier (see `graphrun.trace.Tier`)."""
        tier_bytes = {
            "device": self.allocated_bytes,
            **{name: self.arenas.nbytes(name) for name in ("arenas", "pinned")},
        }
        return tier_bytes | {
            f"device{number}": secondary.allocated_bytes
            for number, secondary in enumerate(self.secondaries, 1)
        }
