"""How much a device must hold for a sequence of allocations: counted alone, or as PyTorch's caching allocator reserves it.

Both answer `used_bytes` after every event. Rules of the caching allocator with expandable segments, from PyTorch's
c10/cuda/CUDACachingAllocator.cpp: sizes round up to 512 bytes; up to 1 MiB they come from a pool of small blocks, above from a
pool of large ones; each pool is one address range that grows page by page (2 MiB pages in the small pool, 20 MiB in the large
one) and is searched best fit, free neighbours being merged.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol

from graphrun.units import MIB, round_up

ROUND_BYTES = 512
SMALL_BYTES = MIB
SMALL_PAGE_BYTES, LARGE_PAGE_BYTES = 2 * MIB, 20 * MIB


class Allocator(Protocol):
    """What a replay needs: allocate, release, and the bytes a device must hold now."""

    @property
    def used_bytes(self) -> int:
        """Bytes the device must hold now."""

    def allocate(self, key: int, nbytes: int) -> None:
        """Take ``nbytes`` under ``key``."""

    def release(self, key: int) -> None:
        """Give back what was taken under ``key``."""

    def trim(self) -> None:
        """Give pages that hold nothing back to the device."""


class Counting:
    """Every allocation rounded to 512 bytes, nothing else: the simulated accelerator."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self._live: dict[int, int] = {}

    def allocate(self, key: int, nbytes: int) -> None:
        """Take ``nbytes``, rounded up, under ``key``."""
        self._live[key] = rounded = round_up(nbytes, ROUND_BYTES)
        self.used_bytes += rounded

    def release(self, key: int) -> None:
        """Give back what was taken under ``key``."""
        self.used_bytes -= self._live.pop(key)

    def trim(self) -> None:
        """Nothing to do: nothing is kept."""


class Pool:
    """One growing address range, searched best fit.

    0        offset                       end     mapped pages
    |##used##|..free..|##used##|...free...|       [0 1 2 3 4 5]
    """

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.end = 0
        self.free: dict[int, int] = {}  # offset -> size, merged
        self.ends: dict[int, int] = {}  # end of a free range -> its offset
        self.sizes: list[tuple[int, int]] = []  # (size, offset), sorted
        self.mapped = bytearray()

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the pages that are mapped."""
        return sum(self.mapped) * self.page_bytes

    def take(self, nbytes: int) -> tuple[int, int]:
        """(offset, bytes newly mapped): the smallest free range that is large enough, else the range grows at its end."""
        index = bisect_left(self.sizes, (nbytes, 0))
        if index < len(self.sizes):
            size, offset = self.sizes[index]
            self._forget(offset)
            if size > nbytes:
                self._remember(offset + nbytes, size - nbytes)
        else:
            offset = self.ends.get(self.end, self.end)
            if offset != self.end:
                self._forget(offset)
            self.end = offset + nbytes
        return offset, self._map(offset, nbytes)

    def give(self, offset: int, nbytes: int) -> None:
        """Free a range and merge it with its neighbours."""
        if (before := self.ends.get(offset)) is not None:
            nbytes += self.free[before]
            self._forget(before)
            offset = before
        if (size := self.free.get(offset + nbytes)) is not None:
            self._forget(offset + nbytes)
            nbytes += size
        self._remember(offset, nbytes)

    def trim(self) -> int:
        """Unmap pages that lie whole in free ranges; the bytes given back."""
        before = self.mapped_bytes
        for offset, size in self.free.items():
            first, last = -(-offset // self.page_bytes), (offset + size) // self.page_bytes
            if offset + size == self.end:
                last = len(self.mapped)
            for page in range(first, min(last, len(self.mapped))):
                self.mapped[page] = 0
        return before - self.mapped_bytes

    def _map(self, offset: int, nbytes: int) -> int:
        first, last = offset // self.page_bytes, (offset + nbytes - 1) // self.page_bytes
        self.mapped.extend(bytes(max(0, last + 1 - len(self.mapped))))
        new = last + 1 - first - sum(self.mapped[first : last + 1])
        self.mapped[first : last + 1] = b"\1" * (last + 1 - first)
        return new * self.page_bytes

    def _remember(self, offset: int, size: int) -> None:
        self.free[offset] = size
        self.ends[offset + size] = offset
        insort(self.sizes, (size, offset))

    def _forget(self, offset: int) -> None:
        size = self.free.pop(offset)
        del self.ends[offset + size]
        del self.sizes[bisect_left(self.sizes, (size, offset))]


class Caching:
    """PyTorch's caching allocator with expandable segments: `used_bytes` is what it reserves."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self._small, self._large = Pool(SMALL_PAGE_BYTES), Pool(LARGE_PAGE_BYTES)
        self._live: dict[int, tuple[Pool, int, int]] = {}

    def allocate(self, key: int, nbytes: int) -> None:
        """Take ``nbytes``, rounded up, from the pool of its size."""
        rounded = max(round_up(nbytes, ROUND_BYTES), ROUND_BYTES)
        pool = self._small if rounded <= SMALL_BYTES else self._large
        offset, mapped = pool.take(rounded)
        self._live[key] = pool, offset, rounded
        self.used_bytes += mapped

    def release(self, key: int) -> None:
        """Give back what was taken under ``key``; its pages stay reserved."""
        pool, offset, nbytes = self._live.pop(key)
        pool.give(offset, nbytes)

    def trim(self) -> None:
        """What `torch.cuda.empty_cache` does: pages that hold nothing go back to the device."""
        self.used_bytes -= self._small.trim() + self._large.trim()
