"""Memory counters of a simulated machine, with a hard capacity limit and fault injection.

Every storage is counted. Pure: sizes only, no tensors, operators or time.

    allocated_bytes  |      ____            capacity  - - - - - - - - - -
                     |  ___|    |___                       (never exceeded: an allocation
                     | |  a   b     |                       that would is refused whole)
                     +-+---+----+---+--> order of allocations and frees
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch

from graphrun.errors import InputError
from graphrun.units import round_up, show_size

BLOCK_BYTES = 512
"""Granularity of sizes, which are rounded up, as in PyTorch's CUDA caching allocator.
``kMinBlockSize`` in c10/cuda/CUDACachingAllocator."""


class SimulatedOutOfMemory(torch.OutOfMemoryError):
    """The simulated machine refused an allocation: above its capacity, or an injected fault."""


class Listener(Protocol):
    """Receives every allocation and free, in order. ``key`` is unique within a machine; sizes are
    rounded up to 512."""

    def allocated(self, key: int, nbytes: int) -> None:
        """Storage ``key`` of ``nbytes`` was allocated."""

    def freed(self, key: int) -> None:
        """Storage ``key`` was freed."""


class Pages(Protocol):
    """Model of an allocator that reserves pages (`graphrun.model.allocator`). Without one, memory
    is counted in bytes."""

    @property
    def used_bytes(self) -> int:
        """Bytes reserved now."""

    def allocate(self, key: int, nbytes: int) -> None:
        """Allocate ``nbytes`` as ``key``."""

    def release(self, key: int) -> None:
        """Release the allocation ``key``; its pages stay reserved."""

    def trim(self) -> None:
        """Return unused pages."""

    def used_bytes_with(self, sizes: Sequence[int]) -> int:
        """Return the bytes reserved once ``sizes`` are allocated too. Changes nothing."""


class Allocation:
    """One counted storage, as an attribute of the storage: released with the last view. 0 bytes:
    not counted."""

    __slots__ = ("key", "machine", "nbytes")

    def __init__(self, machine: Any, key: int, nbytes: int) -> None:
        self.machine = machine
        self.key = key
        self.nbytes = nbytes

    def __del__(self) -> None:
        if self.nbytes:
            self.machine.release(self.key, self.nbytes)


class Ledger:
    """Counters of allocated and peak bytes, with refusals, in storages rounded to ``BLOCK_BYTES``.

    ``pages``: an allocator model, whose reserved bytes count against the capacity and for the peak.
    """

    name = "sim:0"
    """The device's name in messages."""
    first_key = 0
    """Keys of storages are above this number; keys of several machines do not overlap."""
    allocated_bytes = 0
    """Bytes of all live storages."""
    peak_bytes = 0
    """Peak bytes in use since the start or the last ``reset_peak``."""
    allocations = 0
    """Number of storages allocated so far."""
    listener: Listener | None = None
    """Called for each allocation and free, in order."""

    def __init__(
        self,
        capacity_bytes: int | None = None,
        fail_allocation: int | None = None,
        pages: Pages | None = None,
    ) -> None:
        self.capacity_bytes, self.fail_allocation, self.pages = (
            capacity_bytes,
            fail_allocation,
            pages,
        )
        self._storages: dict[int, tuple[int, tuple[int, ...], torch.dtype]] = {}

    @property
    def capacity_bytes(self) -> int | None:
        """Physical memory in bytes, None for no limit. May be set below the allocated bytes."""
        return self._capacity_bytes

    @capacity_bytes.setter
    def capacity_bytes(self, nbytes: int | None) -> None:
        self._capacity_bytes = positive("capacity_bytes", nbytes)

    @property
    def fail_allocation(self) -> int | None:
        """n: the n-th allocation from now fails, once. None: none fails."""
        return self._fail_in

    @fail_allocation.setter
    def fail_allocation(self, count: int | None) -> None:
        self._fail_in = positive("fail_allocation", count)

    def reset_peak(self) -> None:
        self.peak_bytes = self.used_bytes

    def live(self) -> list[tuple[int, tuple[int, ...], torch.dtype]]:
        """Return (nbytes, shape, dtype) of every live storage, largest first, for reports of leaks.
        Shape and dtype are of the tensor that allocated the storage."""
        return sorted(self._storages.values(), key=lambda entry: -entry[0])

    def admit(self, sizes: Sequence[int]) -> None:
        """Raise SimulatedOutOfMemory unless storages of ``sizes`` (rounded) all fit. Changes no
        counter."""
        request_bytes = sum(sizes)
        if self._fail_in is not None and sum(map(bool, sizes)) >= self._fail_in:
            self._fail_in = None
            raise SimulatedOutOfMemory(
                f"sim out of memory: injected fault, allocating {show_size(request_bytes)} "
                f"({request_bytes} bytes) on {self.name}"
            )
        capacity_bytes = self._capacity_bytes
        if (
            capacity_bytes is not None
            and request_bytes
            and self._used_bytes_with(sizes, capacity_bytes) > capacity_bytes
        ):
            free_bytes = capacity_bytes - self.allocated_bytes
            raise SimulatedOutOfMemory(
                f"sim out of memory. Tried to allocate {show_size(request_bytes)} "
                f"({request_bytes} bytes). {self.name} has a capacity of "
                f"{show_size(capacity_bytes)}, of which {show_size(max(free_bytes, 0))} "
                f"({free_bytes} bytes) is free "
                f"and {show_size(self.allocated_bytes)} in {len(self._storages)} storages is "
                "allocated"
            )

    @property
    def used_bytes(self) -> int:
        """Bytes that count against the capacity."""
        return self.allocated_bytes if self.pages is None else self.pages.used_bytes

    def trim(self) -> None:
        if self.pages is not None:
            self.pages.trim()

    def _used_bytes_with(self, sizes: Sequence[int], capacity_bytes: int) -> int:
        """Return `used_bytes` once storages of ``sizes`` are allocated. As in PyTorch's allocator,
        unused pages are returned before an allocation is refused."""
        if self.pages is None:
            return self.allocated_bytes + sum(sizes)
        sizes = [size for size in sizes if size]
        if (used_bytes := self.pages.used_bytes_with(sizes)) > capacity_bytes:
            self.pages.trim()
            used_bytes = self.pages.used_bytes_with(sizes)
        return used_bytes

    def enter(self, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Count a storage of ``size`` bytes (rounded) that ``admit`` accepted. Return its key; 0
        for 0 bytes."""
        if not size:
            return 0
        if self._fail_in is not None:
            self._fail_in -= 1
        self.allocations += 1
        key = self.first_key + self.allocations
        self._storages[key] = (size, shape, dtype)
        self.allocated_bytes += size
        if self.pages is not None:
            self.pages.allocate(key, size)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        if self.listener is not None:
            self.listener.allocated(key, size)
        return key

    def release(self, key: int, size: int) -> None:
        if self._storages.pop(key, None) is None:
            return
        self.allocated_bytes -= size
        if self.pages is not None:
            self.pages.release(key)
        if self.listener is not None:
            self.listener.freed(key)


def rounded(nbytes: int) -> int:
    """Return ``nbytes`` rounded up as the ledger counts it."""
    return round_up(nbytes, BLOCK_BYTES)


Number = TypeVar("Number", float, int | None)


def positive(name: str, value: Number) -> Number:
    """Return ``value``, which is None or above zero, or raise InputError. ``name``: of the setting,
    in the message."""
    if value is not None and not value > 0:
        raise InputError(f"simulated machine: {name} is {value}; give a number above 0")
    return value
