"""Models of device allocators: how many bytes a sequence of allocations and releases reserves. Pure: no torch, no device.

Counting   every size rounded up to 512 bytes: the simulated accelerator
Caching    PyTorch's caching allocator with ``expandable_segments:True``
Native     PyTorch's caching allocator with native segments, its default

All three report `used_bytes` after every call. Rules of the caching allocator, from PyTorch's c10/cuda/CUDACachingAllocator.cpp:
sizes round up to 512 bytes; sizes up to 1 MiB come from a pool of small blocks, larger ones from a pool of large blocks. With
expandable segments each pool is one address range that grows page by page (2 MiB pages in the small pool, 20 MiB pages in the
large one). The search is best fit, and adjacent free ranges are merged.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from typing import Protocol

from graphrun.units import MIB, round_up

ROUND_BYTES = 512
SMALL_BYTES = MIB
SMALL_PAGE_BYTES, LARGE_PAGE_BYTES = 2 * MIB, 20 * MIB
PACKED_BYTES, SEGMENT_STEP_BYTES = 10 * MIB, 2 * MIB  # native segments: kMinLargeAlloc, kRoundLarge


class Allocator(Protocol):
    """Interface of the allocator models. ``key`` identifies an allocation."""

    @property
    def used_bytes(self) -> int:
        """Bytes reserved on the device now."""

    def allocate(self, key: int, nbytes: int) -> None:
        """Allocate ``nbytes`` as ``key``."""

    def release(self, key: int) -> None:
        """Release the allocation ``key``."""

    def trim(self) -> None:
        """Return unused pages or segments to the device, as `torch.cuda.empty_cache` does."""


class Counting:
    """Sum of all live allocations, each rounded up to 512 bytes: the simulated accelerator. Caches nothing."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self._live: dict[int, int] = {}

    def allocate(self, key: int, nbytes: int) -> None:
        """Allocate ``nbytes``, rounded up to 512, as ``key``."""
        self._live[key] = rounded = round_up(nbytes, ROUND_BYTES)
        self.used_bytes += rounded

    def release(self, key: int) -> None:
        """Release the allocation ``key``."""
        self.used_bytes -= self._live.pop(key)

    def trim(self) -> None:
        """No effect: nothing is cached."""


class Pool:
    """One growing address range with a best-fit search, mapped in pages of ``page_bytes``.

    0        offset                       end     mapped pages
    |##used##|..free..|##used##|...free...|       [0 1 2 3 4 5]
    """

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.end = 0
        self.free: dict[int, int] = {}  # offset -> size of a free range; adjacent ranges are merged
        self.ends: dict[int, int] = {}  # end of a free range -> its offset
        self.sizes: list[tuple[int, int]] = []  # (size, offset) of every free range, sorted
        self.mapped = bytearray()  # per page: 1 if mapped

    @property
    def mapped_bytes(self) -> int:
        """Bytes of all mapped pages."""
        return sum(self.mapped) * self.page_bytes

    def take(self, nbytes: int) -> tuple[tuple[int, int], int]:
        """Allocate ``nbytes``: arguments for `give`, and the bytes newly mapped.

        Takes the smallest free range that is large enough; without one, the pool grows at its end. A free range at the end is
        tried last: it can grow, so best fit treats it as the largest.
        """
        index = bisect_left(self.sizes, (nbytes, 0))
        if index < len(self.sizes) - 1 and self.sizes[index][0] + self.sizes[index][1] == self.end:
            index += 1
        if index < len(self.sizes):
            size, offset = self.sizes[index]
            self._remove_free(offset)
            if size > nbytes:
                self._add_free(offset + nbytes, size - nbytes)
        else:
            offset = self.ends.get(self.end, self.end)
            if offset != self.end:
                self._remove_free(offset)
            self.end = offset + nbytes
        return (offset, nbytes), self._map(offset, nbytes)

    def give(self, offset: int, nbytes: int) -> None:
        """Free a range and merge it with adjacent free ranges."""
        if (before := self.ends.get(offset)) is not None:
            nbytes += self.free[before]
            self._remove_free(before)
            offset = before
        if (size := self.free.get(offset + nbytes)) is not None:
            self._remove_free(offset + nbytes)
            nbytes += size
        self._add_free(offset, nbytes)

    def take_at(self, offset: int, nbytes: int) -> None:
        """Allocate a range within a free one, where `take` put an equal one before; no page of it was unmapped since."""
        begin, size = next((o, n) for o, n in self.free.items() if o <= offset and offset + nbytes <= o + n)
        self._remove_free(begin)
        if offset > begin:
            self._add_free(begin, offset - begin)
        if offset + nbytes < begin + size:
            self._add_free(offset + nbytes, begin + size - offset - nbytes)

    def trim(self) -> int:
        """Unmap pages that lie entirely in free ranges. Returns the bytes unmapped."""
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
        if self.mapped.find(0, first, last + 1) < 0:
            return 0
        new = last + 1 - first - sum(self.mapped[first : last + 1])
        self.mapped[first : last + 1] = b"\1" * (last + 1 - first)
        return new * self.page_bytes

    def _add_free(self, offset: int, size: int) -> None:
        self.free[offset] = size
        self.ends[offset + size] = offset
        insort(self.sizes, (size, offset))

    def _remove_free(self, offset: int) -> None:
        size = self.free.pop(offset)
        del self.ends[offset + size]
        del self.sizes[bisect_left(self.sizes, (size, offset))]


class Segments:
    """Segments returned by `cudaMalloc`, split into blocks, with a best-fit search over the free blocks.

    segment 0 |##used##|..free..|##used##|      segment 1 |....free....|      adjacent free blocks of a segment are merged

    ``min_split_bytes``: a block is split only if the remainder has at least this many bytes.
    """

    def __init__(self, min_split_bytes: int) -> None:
        self.min_split_bytes = min_split_bytes
        self.sizes: dict[int, int] = {}  # segment -> bytes
        self.free: dict[int, dict[int, int]] = {}  # segment -> offset -> bytes of the free block there
        self.blocks: list[tuple[int, int, int]] = []  # (bytes, segment, offset) of every free block, sorted
        self._next = 0

    def take(self, nbytes: int) -> tuple[tuple[int, int, int], int]:
        """Allocate ``nbytes`` from a free block, else from a new segment: arguments for `give`, and the bytes newly reserved."""
        index, reserved = bisect_left(self.blocks, (nbytes, -1, -1)), 0
        if index == len(self.blocks):
            reserved = self.sizes[self._next] = segment_bytes(nbytes)
            self.free[self._next] = {}
            self._add_free(self._next, 0, reserved)
            self._next += 1
            index = bisect_left(self.blocks, (nbytes, -1, -1))
        size, segment, offset = self.blocks[index]
        self._remove_free(segment, offset)
        if size - nbytes >= self.min_split_bytes:
            self._add_free(segment, offset + nbytes, size - nbytes)
            size = nbytes
        return (segment, offset, size), reserved

    def give(self, segment: int, offset: int, nbytes: int) -> None:
        """Free a block and merge it with adjacent free blocks."""
        if (size := self.free[segment].get(offset + nbytes)) is not None:
            self._remove_free(segment, offset + nbytes)
            nbytes += size
        before = next((o for o, size in self.free[segment].items() if o + size == offset), None)
        if before is not None:
            nbytes += self.free[segment][before]
            self._remove_free(segment, before)
            offset = before
        self._add_free(segment, offset, nbytes)

    def trim(self) -> int:
        """Release segments without a used block. Returns the bytes released."""
        empty = [segment for segment, size in self.sizes.items() if self.free[segment].get(0) == size]
        for segment in empty:
            self._remove_free(segment, 0)
            del self.free[segment]
        return sum(self.sizes.pop(segment) for segment in empty)

    def _add_free(self, segment: int, offset: int, size: int) -> None:
        self.free[segment][offset] = size
        insort(self.blocks, (size, segment, offset))

    def _remove_free(self, segment: int, offset: int) -> None:
        size = self.free[segment].pop(offset)
        del self.blocks[bisect_left(self.blocks, (size, segment, offset))]


class _Cached:
    """Small and large allocations in a pool each. `used_bytes` corresponds to `torch.cuda.memory_reserved`."""

    def __init__(self, small: Pool | Segments, large: Pool | Segments, small_bytes: int = SMALL_BYTES) -> None:
        self.used_bytes = 0
        self._small_bytes = small_bytes
        self._small, self._large = small, large
        self._live: dict[int, tuple[Pool | Segments, tuple[int, ...]]] = {}

    def allocate(self, key: int, nbytes: int) -> None:
        """Allocate ``nbytes``, rounded up to 512, from the small or the large pool."""
        pool = self._small if self.is_small(nbytes) else self._large
        block, reserved = pool.take(max(round_up(nbytes, ROUND_BYTES), ROUND_BYTES))
        self._live[key] = pool, block
        self.used_bytes += reserved

    def is_small(self, nbytes: int) -> bool:
        """Whether an allocation of ``nbytes`` comes from the small pool."""
        return round_up(nbytes, ROUND_BYTES) <= self._small_bytes

    def release(self, key: int) -> None:
        """Release the allocation ``key``; its pages or segment stay reserved."""
        pool, block = self._live.pop(key)
        pool.give(*block)

    def place(self, key: int) -> tuple[int, ...]:
        """Where in its pool the allocation ``key`` lies: its range or block."""
        return self._live[key][1]

    def trim(self) -> None:
        """Return unused pages or segments, as `torch.cuda.empty_cache` does."""
        self.used_bytes -= self._small.trim() + self._large.trim()


class Caching(_Cached):
    """PyTorch's caching allocator with expandable segments.

    ``page_scale``: factor on the sizes of pages, and on that up to which an allocation is small; for models in small.
    """

    def __init__(self, page_scale: float = 1.0) -> None:
        small_bytes, *pages = (
            round_up(max(1, int(page_scale * nbytes)), ROUND_BYTES) for nbytes in (SMALL_BYTES, SMALL_PAGE_BYTES, LARGE_PAGE_BYTES)
        )
        self._pools = [Pool(nbytes) for nbytes in pages]
        super().__init__(self._pools[0], self._pools[1], small_bytes)

    def allocate_at(self, key: int, small: bool, place: tuple[int, ...]) -> None:
        """Allocate as ``key`` what was released at ``place`` (see `place`)."""
        pool, (offset, nbytes) = self._pools[not small], place
        pool.take_at(offset, nbytes)
        self._live[key] = pool, place

    def state(self, small: bool) -> Hashable:
        """Of one of the pools, which know nothing of each other. Equal states answer equal allocations and releases alike."""
        pool = self._pools[not small]
        return pool.end, tuple(pool.sizes), bytes(pool.mapped)


class Native(_Cached):
    """PyTorch's caching allocator with native segments, its default.

    Sizes up to 1 MiB come from segments of 2 MiB, sizes below 10 MiB from segments of 20 MiB; a larger size gets a segment of that
    size, rounded up to 2 MiB. A small block is split if at least 512 bytes remain, a large one only if more than 1 MiB remains
    (`should_split`).
    """

    def __init__(self) -> None:
        super().__init__(Segments(ROUND_BYTES), Segments(SMALL_BYTES + 1))


def segment_bytes(nbytes: int) -> int:
    """Bytes requested from `cudaMalloc` when no cached block has room for ``nbytes`` (`get_allocation_size`)."""
    if nbytes <= SMALL_BYTES:
        return SMALL_PAGE_BYTES
    return LARGE_PAGE_BYTES if nbytes < PACKED_BYTES else round_up(nbytes, SEGMENT_STEP_BYTES)
