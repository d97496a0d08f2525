"""Memory counters of a simulated machine: every storage is counted, capacity is a hard limit, faults can be injected.

Pure: knows sizes, no tensors, operators or time.

    allocated_bytes  |      ____            capacity  - - - - - - - - - -
                     |  ___|    |___                       (never crossed: an allocation
                     | |  a   b     |                       that would is refused whole)
                     +-+---+----+---+--> order of allocations and frees
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from graphrun.errors import InputError
from graphrun.units import round_up, show_size

BLOCK_BYTES = 512
"""Sizes are rounded up to this, as PyTorch's CUDA caching allocator does (``kMinBlockSize`` in c10/cuda/CUDACachingAllocator)."""


class SimulatedOutOfMemory(torch.OutOfMemoryError):
    """The simulated machine refused an allocation: its capacity would be exceeded, or a fault was injected."""


class Listener(Protocol):
    """Receives every allocation and free, in order. ``key`` is unique within a machine; sizes are rounded up to 512."""

    def allocated(self, key: int, nbytes: int) -> None:
        """Storage ``key`` of ``nbytes`` was allocated."""

    def freed(self, key: int) -> None:
        """Storage ``key`` was freed."""


class Pages(Protocol):
    """Model of an allocator that reserves pages (`graphrun.model.allocator`). Without one, memory is counted in bytes."""

    @property
    def used_bytes(self) -> int:
        """Bytes reserved now."""

    def allocate(self, key: int, nbytes: int) -> None:
        """Allocate ``nbytes`` as ``key``."""

    def release(self, key: int) -> None:
        """Release the allocation ``key``; its pages stay reserved."""

    def trim(self) -> None:
        """Return unused pages."""


class Allocation:
    """One counted storage, held as an attribute of it, so it is released with the last view. 0 bytes: not counted."""

    __slots__ = ("key", "machine", "nbytes")

    def __init__(self, machine: Any, key: int, nbytes: int) -> None:
        self.machine = machine
        self.key = key
        self.nbytes = nbytes

    def __del__(self) -> None:
        if self.nbytes:
            release(self.machine, self.key, self.nbytes)


def release(machine: Any, key: int, nbytes: int) -> None:
    """Storage ``key`` of ``machine`` is gone."""
    machine.ledger.release(key, nbytes)
    if machine.ordering is not None:
        machine.ordering.freed(key, nbytes)


class Ledger:
    """Counters of allocated and peak bytes, with refusals. Each storage is rounded up to ``BLOCK_BYTES``. ``pages``: what counts
    against the capacity, and for the peak, is what it reserves."""

    def __init__(self, capacity_bytes: int | None = None, pages: Pages | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.pages = pages
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self.allocations = 0
        self.fail_in: int | None = None
        self.listener: Listener | None = None
        self.live: dict[int, tuple[int, tuple[int, ...], torch.dtype]] = {}

    def admit(self, sizes: Sequence[int]) -> None:
        """Raises SimulatedOutOfMemory unless storages of ``sizes`` (rounded) can all be allocated now. Changes no counter."""
        wanted = sum(sizes)
        if self.fail_in is not None:
            counted = sum(1 for size in sizes if size)
            if counted >= self.fail_in:
                self.fail_in = None
                raise SimulatedOutOfMemory(f"sim out of memory: injected fault, allocating {show_size(wanted)} ({wanted} bytes)")
        if self.capacity_bytes is not None and wanted and self._used_bytes_with(sizes) > self.capacity_bytes:
            free = self.capacity_bytes - self.allocated_bytes
            raise SimulatedOutOfMemory(
                f"sim out of memory. Tried to allocate {show_size(wanted)} ({wanted} bytes). sim:0 has a capacity of "
                f"{show_size(self.capacity_bytes)}, of which {show_size(max(free, 0))} ({free} bytes) is free "
                f"and {show_size(self.allocated_bytes)} in {len(self.live)} storages is allocated"
            )

    @property
    def used_bytes(self) -> int:
        """Bytes that count against the capacity."""
        return self.allocated_bytes if self.pages is None else self.pages.used_bytes

    def trim(self) -> None:
        """Returns pages without storages."""
        if self.pages is not None:
            self.pages.trim()

    def _used_bytes_with(self, sizes: Sequence[int]) -> int:
        """`used_bytes` once storages of ``sizes`` are allocated. As PyTorch's allocator does, unused pages are returned, and it is
        tried again, before an allocation is refused."""
        if self.pages is None:
            return self.allocated_bytes + sum(sizes)
        used = 0
        for last in (False, True):
            trial = [(-1 - number, size) for number, size in enumerate(sizes) if size]
            for key, size in trial:
                self.pages.allocate(key, size)
            used = self.pages.used_bytes
            for key, _ in trial:
                self.pages.release(key)
            if self.capacity_bytes is None or used <= self.capacity_bytes or last:
                break
            self.pages.trim()
        if self.capacity_bytes is not None and used > self.capacity_bytes:
            self.pages.trim()
        return used

    def enter(self, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Counts a storage of ``size`` bytes (rounded), which ``admit`` has accepted, and returns its key; 0 for 0 bytes."""
        if not size:
            return 0
        if self.fail_in is not None:
            self.fail_in -= 1
        self.allocations = key = self.allocations + 1
        self.live[key] = (size, shape, dtype)
        self.allocated_bytes += size
        if self.pages is not None:
            self.pages.allocate(key, size)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        if self.listener is not None:
            self.listener.allocated(key, size)
        return key

    def release(self, key: int, size: int) -> None:
        """Stops counting storage ``key`` of ``size`` bytes."""
        if self.live.pop(key, None) is None:
            return
        self.allocated_bytes -= size
        if self.pages is not None:
            self.pages.release(key)
        if self.listener is not None:
            self.listener.freed(key)


def rounded(nbytes: int) -> int:
    """``nbytes`` rounded up as the ledger counts it."""
    return round_up(nbytes, BLOCK_BYTES)


def positive(name: str, value: float) -> None:
    """Raises InputError unless ``value`` is above zero; ``name`` is used in the message."""
    if not value > 0:
        raise InputError(f"simulated machine: {name} is {value}; give a number above 0")
