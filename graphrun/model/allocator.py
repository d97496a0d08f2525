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
PACKED_BYTES, SEGMENT_STEP_BYTES = 10 * MIB, 2 * MIB  # native segments: kMinLargeAlloc, kRoundLarge


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
        """(offset, bytes newly mapped): the smallest free range that is large enough, else the range grows at its end.

        A free range at the end comes last: it can grow, so for the best fit it is as large as what it can grow to.
        """
        index = bisect_left(self.sizes, (nbytes, 0))
        if index < len(self.sizes) - 1 and self.sizes[index][0] + self.sizes[index][1] == self.end:
            index += 1
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


class Segments:
    """Segments as `cudaMalloc` returned them, cut into blocks; the smallest free block that is large enough is taken.

    segment 0 |##used##|..free..|##used##|      segment 1 |....free....|      a block merges with free neighbours of its segment

    ``keep_bytes``: a remainder of less than this is not cut off, it stays with the block that is handed out.
    """

    def __init__(self, keep_bytes: int) -> None:
        self.keep_bytes = keep_bytes
        self.sizes: dict[int, int] = {}  # segment -> bytes
        self.free: dict[int, dict[int, int]] = {}  # segment -> offset -> bytes of a free block
        self.blocks: list[tuple[int, int, int]] = []  # (bytes, segment, offset) of every free block, sorted
        self._next = 0

    def take(self, nbytes: int, segment_bytes: int) -> tuple[int, int, int, int]:
        """(segment, offset, bytes handed out, bytes newly reserved): from a free block, else from a new segment."""
        index = bisect_left(self.blocks, (nbytes, -1, -1))
        reserved = 0
        if index == len(self.blocks):
            self.sizes[self._next], self.free[self._next], reserved = segment_bytes, {}, segment_bytes
            self._remember(self._next, 0, segment_bytes)
            self._next += 1
            index = bisect_left(self.blocks, (nbytes, -1, -1))
        size, segment, offset = self.blocks[index]
        self._forget(segment, offset)
        if size - nbytes >= self.keep_bytes:
            self._remember(segment, offset + nbytes, size - nbytes)
            size = nbytes
        return segment, offset, size, reserved

    def give(self, segment: int, offset: int, nbytes: int) -> None:
        """Free a block and merge it with its free neighbours."""
        if (size := self.free[segment].get(offset + nbytes)) is not None:
            self._forget(segment, offset + nbytes)
            nbytes += size
        before = next((o for o, size in self.free[segment].items() if o + size == offset), None)
        if before is not None:
            nbytes += self.free[segment][before]
            self._forget(segment, before)
            offset = before
        self._remember(segment, offset, nbytes)

    def trim(self) -> int:
        """Give back segments of which nothing is used; the bytes given back."""
        empty = [segment for segment, size in self.sizes.items() if self.free[segment].get(0) == size]
        for segment in empty:
            self._forget(segment, 0)
            del self.free[segment]
        return sum(self.sizes.pop(segment) for segment in empty)

    def _remember(self, segment: int, offset: int, size: int) -> None:
        self.free[segment][offset] = size
        insort(self.blocks, (size, segment, offset))

    def _forget(self, segment: int, offset: int) -> None:
        size = self.free[segment].pop(offset)
        del self.blocks[bisect_left(self.blocks, (size, segment, offset))]


class Native:
    """PyTorch's caching allocator with its native segments, the default: `used_bytes` is what it reserves.

    Up to 1 MiB from segments of 2 MiB; below 10 MiB from segments of 20 MiB; above, a segment of its own size rounded up to 2 MiB.
    A small block is cut wherever 512 bytes remain, a large one only where more than 1 MiB does (`should_split`).
    """

    def __init__(self) -> None:
        self.used_bytes = 0
        self._small, self._large = Segments(ROUND_BYTES), Segments(SMALL_BYTES + 1)
        self._live: dict[int, tuple[Segments, int, int, int]] = {}

    def allocate(self, key: int, nbytes: int) -> None:
        """Take ``nbytes``, rounded up, from the segments of its size."""
        rounded = max(round_up(nbytes, ROUND_BYTES), ROUND_BYTES)
        pool = self._small if rounded <= SMALL_BYTES else self._large
        segment, offset, size, reserved = pool.take(rounded, segment_bytes(rounded))
        self._live[key] = pool, segment, offset, size
        self.used_bytes += reserved

    def release(self, key: int) -> None:
        """Give back what was taken under ``key``; its segment stays reserved."""
        pool, *block = self._live.pop(key)
        pool.give(*block)

    def trim(self) -> None:
        """What `torch.cuda.empty_cache` does: segments that hold nothing go back to the device."""
        self.used_bytes -= self._small.trim() + self._large.trim()


def segment_bytes(nbytes: int) -> int:
    """Bytes that `cudaMalloc` is asked for when no cached block holds ``nbytes`` (`get_allocation_size`)."""
    if nbytes <= SMALL_BYTES:
        return SMALL_PAGE_BYTES
    return LARGE_PAGE_BYTES if nbytes < PACKED_BYTES else round_up(nbytes, SEGMENT_STEP_BYTES)
