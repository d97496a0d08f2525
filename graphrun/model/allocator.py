"""Models of device allocators: the bytes that allocations, releases and trims reserve.

Counting   every size rounded up to 512 bytes: the simulated accelerator
Heap       the C library's memory on a CPU, and Heaps, the most that it may take
Caching    PyTorch's caching allocator with ``expandable_segments:True``
Native     PyTorch's caching allocator with native segments, its default

The rules of PyTorch's caching allocator are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.11
to 2.13), for one stream and the default settings. Sizes up to 1 MiB come from a small pool, larger
ones from a large pool. With expandable segments each pool is one address range, mapped in pages: 2
MiB in the small pool, 20 MiB in the large one. The search is best fit over mapped ranges; only
where none has room, pages are mapped, at the lowest address with room. A trim unmaps all pages
without an allocation.

Not modelled: the addresses that the driver returns. A new segment is assumed above all others.
"""

from __future__ import annotations

import copy
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from typing import Protocol

from graphrun.c_heap import FIRST_MAPPED_BYTES, MAPPED_BYTES
from graphrun.units import KIB, MIB, PAGE_BYTES, round_up

ROUND_BYTES = 512
SMALL_BYTES = MIB
# The C library's heap, malloc/malloc.c of glibc 2.36 on 64-bit systems: room kept above the top;
# sizes of chunks.
TOP_BYTES = 128 * KIB
CHUNK_STEP, LEAST_CHUNK, LEAST_LARGE, MERGING_BYTES = 16, 32, KIB, 64 * KIB
# Chunks up to these sizes are kept by size (tcache), or merged later (fast bins).
LARGEST_KEPT, LARGEST_BIT = 1040, 128
# PyTorch aligns tensors to so many bytes (c10/core/alignment.h).
ALIGNMENT = 64
ALIGNING_BYTES = ALIGNMENT + LEAST_CHUNK
# What a heap may begin with: (chunks of each size that it keeps, its first byte). It keeps none, as
# `HeapFragments` fills its cache of chunks, or rarely one.
BEGINNINGS = ((0, 0), (0, 32), (1, 32))
# The heap without live tensors, counted more than it is, for small objects and huge pages.
FRAGMENTS_SHARE = 1.3
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
    """Sum of all live allocations, each rounded up to 512 bytes. Caches nothing."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self._live: dict[int, int] = {}

    def allocate(self, key: int, nbytes: int) -> None:
        self._live[key] = rounded = round_up(nbytes, ROUND_BYTES)
        self.used_bytes += rounded

    def release(self, key: int) -> None:
        self.used_bytes -= self._live.pop(key)

    def trim(self) -> None:
        """No effect: nothing is cached."""


class Heap:
    """The C library's memory on a CPU: the heap of glibc, at first empty (`HeapFragments.take`).

    0                                                         top            end
    |##|..free..|#####|.free.|###|......free......|####|.free.|   never given   |

    Follows malloc/malloc.c of glibc 2.36 (`_int_memalign`, `_int_malloc`, `_int_free`, `systrim`,
    `mtrim`): a request asks for `ALIGNING_BYTES` more, and gives back what is left before and
    behind the aligned tensor. In a call, the first ``most_kept`` such bits of each size stay, and
    part the free ranges next to them; others are merged at the next large request. The smallest
    range that is large enough is taken, the last one freed among equals; without one, the heap
    grows, or from ``mapped_bytes`` on the range is mapped. Bytes count from the first write until a
    trim.
    """

    mapped_bytes = MAPPED_BYTES

    def __init__(self, most_kept: int = 0, first_byte: int = 0) -> None:
        self._most_kept = most_kept
        self._live: dict[int, tuple[int, int]] = {}  # key -> (begin or -1, bytes)
        self._live_bytes = self._mapped_bytes = 0
        self._top = self._end = self._begin = first_byte
        self._free: dict[int, int] = {}  # begin -> end, of the ranges below the top
        self._begins: dict[int, int] = {}  # end -> begin
        self._sizes: list[tuple[int, int, int]] = []  # (bytes, -number, begin), sorted
        self._numbers: dict[int, int] = {}  # begin -> -number
        self._freed = 0
        self._cached: dict[int, int] = {}  # size of bits -> how many are kept
        self._bits: dict[int, int] = {}  # begin -> end, of bits to be merged
        self._cold: list[tuple[int, int]] = []  # ranges without memory, in order
        self._cold_bytes = 0

    @property
    def used_bytes(self) -> int:
        return self._mapped_bytes + self._end - self._begin - self._cold_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes of the live tensors, with the rest of their chunks."""
        return self._live_bytes

    def allocate(self, key: int, nbytes: int) -> None:
        chunk_bytes = _chunk(nbytes)
        begin, taken_bytes = self._take(chunk_bytes + ALIGNING_BYTES + CHUNK_STEP)
        if begin >= 0:
            gap_bytes = -(begin + CHUNK_STEP) % ALIGNMENT
            if 0 < gap_bytes < LEAST_CHUNK:
                gap_bytes += ALIGNMENT
            self._give(begin, begin + gap_bytes)
            begin, taken_bytes = begin + gap_bytes, taken_bytes - gap_bytes
            if taken_bytes > chunk_bytes + LEAST_CHUNK:
                self._give(begin + chunk_bytes, begin + taken_bytes)
                taken_bytes = chunk_bytes
            self._warm(begin, begin + taken_bytes)
        self._live[key] = begin, taken_bytes
        self._live_bytes += taken_bytes

    def release(self, key: int) -> None:
        begin, nbytes = self._live.pop(key)
        self._live_bytes -= nbytes
        if begin < 0:
            self._mapped_bytes -= nbytes
        else:
            self._give(begin, begin + nbytes)

    def trim(self) -> None:
        """Return the memory of whole free pages, as `malloc_trim` does."""
        self._cached.clear()  # small objects have taken them
        self._merge_bits()
        for begin, end in self._free.items():
            # the library's own words are at the begin of a range
            self._cool(begin + LEAST_CHUNK, end)
        self._shrink(0)

    def _take(self, nbytes: int) -> tuple[int, int]:
        """Return (begin, bytes) of a chunk; begin -1: mapped."""
        if nbytes >= LEAST_LARGE:
            self._merge_bits()
        index = bisect_left(self._sizes, (nbytes,))
        if index < len(self._sizes):
            size, _, begin = self._sizes[index]
            self._remove(begin)
            if size < nbytes + LEAST_CHUNK:
                return begin, size
            self._add(begin + nbytes, begin + size)
            return begin, nbytes
        if self._end - self._top < nbytes + LEAST_CHUNK:
            if nbytes >= self.mapped_bytes:
                nbytes = round_up(nbytes + CHUNK_STEP, PAGE_BYTES)
                self._mapped_bytes += nbytes
                return -1, nbytes
            end = round_up(self._top + nbytes + LEAST_CHUNK + TOP_BYTES, PAGE_BYTES)
            self._cold.append((self._end, end))
            self._cold_bytes += end - self._end
            self._end = end
        begin = self._top
        self._top += nbytes
        return begin, nbytes

    def _give(self, begin: int, end: int) -> None:
        nbytes = end - begin
        if nbytes <= 0:
            return
        if nbytes <= LARGEST_KEPT and self._cached.get(nbytes, 0) < self._most_kept:
            self._cached[nbytes] = self._cached.get(nbytes, 0) + 1
        elif nbytes <= LARGEST_BIT:
            self._bits[begin] = end
        elif self._merge(begin, end) >= MERGING_BYTES:
            self._merge_bits()
            if self._end - self._top >= 2 * MAPPED_BYTES:
                self._shrink(TOP_BYTES)

    def _merge(self, begin: int, end: int) -> int:
        """Free a range together with the free ranges next to it; return the bytes of all."""
        if begin in self._begins:
            begin = self._begins[begin]
            self._remove(begin)
        if end == self._top:
            self._top = begin
            return self._end - begin
        if end in self._free:
            end = self._remove(end)
        self._add(begin, end)
        return end - begin

    def _merge_bits(self) -> None:
        while self._bits:
            self._merge(*self._bits.popitem())

    def _add(self, begin: int, end: int) -> None:
        self._freed -= 1
        self._free[begin], self._begins[end] = end, begin
        self._numbers[begin] = self._freed
        insort(self._sizes, (end - begin, self._freed, begin))

    def _remove(self, begin: int) -> int:
        """Remove a free range; return its end."""
        end = self._free.pop(begin)
        del self._begins[end]
        row = end - begin, self._numbers.pop(begin), begin
        del self._sizes[bisect_left(self._sizes, row)]
        return end

    def _shrink(self, spare_bytes: int) -> None:
        """Return the pages above the top to the system, without ``spare_bytes`` of them."""
        end = round_up(self._top + LEAST_CHUNK + spare_bytes, PAGE_BYTES)
        if end < self._end:
            self._warm(end, self._end)
            self._end = end

    def _warm(self, begin: int, end: int) -> None:
        """Note that a range has memory."""
        first = index = bisect_left(self._cold, (begin,))
        if index and self._cold[index - 1][1] > begin:
            first = index = index - 1
        rest = list[tuple[int, int]]()
        while index < len(self._cold) and self._cold[index][0] < end:
            cold_begin, cold_end = self._cold[index]
            self._cold_bytes -= min(end, cold_end) - max(begin, cold_begin)
            if cold_begin < begin:
                rest.append((cold_begin, begin))
            if cold_end > end:
                rest.append((end, cold_end))
            index += 1
        self._cold[first:index] = rest

    def _cool(self, begin: int, end: int) -> None:
        """Note that the whole pages of a range have no memory."""
        begin, end = round_up(begin, PAGE_BYTES), end // PAGE_BYTES * PAGE_BYTES
        if begin < end:
            self._warm(begin, end)
            insort(self._cold, (begin, end))
            self._cold_bytes += end - begin


class Heaps:
    """The most that the C library's heap may take: one heap of each of the `BEGINNINGS`.

    Small objects, which part ranges too, and the ends of huge pages are not recorded:
    `FRAGMENTS_SHARE` allows for them.
    """

    def __init__(self) -> None:
        self._heaps = [Heap(*beginning) for beginning in BEGINNINGS]

    @property
    def used_bytes(self) -> int:
        """Bytes of the live tensors, plus `FRAGMENTS_SHARE` of the other bytes of the heap."""
        return max(
            heap.live_bytes + int(FRAGMENTS_SHARE * (heap.used_bytes - heap.live_bytes))
            for heap in self._heaps
        )

    def begin_call(self, *, first: bool) -> None:
        """Let a component's ``first`` call map more tensors, as `HeapFragments.take` does."""
        for heap in self._heaps:
            heap.mapped_bytes = FIRST_MAPPED_BYTES if first else MAPPED_BYTES

    def allocate(self, key: int, nbytes: int) -> None:
        for heap in self._heaps:
            heap.allocate(key, nbytes)

    def release(self, key: int) -> None:
        for heap in self._heaps:
            heap.release(key)

    def trim(self) -> None:
        """Return the memory of whole free pages, as `malloc_trim` does."""
        for heap in self._heaps:
            heap.trim()


def _chunk(nbytes: int) -> int:
    """Return the bytes that the C library takes for a request of ``nbytes``."""
    return max(LEAST_CHUNK, round_up(nbytes + CHUNK_STEP // 2, CHUNK_STEP))


class Pool:
    """Expandable segments: address ranges of ``space_bytes``, mapped in pages of ``page_bytes``.

    |##used##|..free..|##used##|..free..|  unmapped  |##used##|..free..|   unmapped   |
    0                                     whole pages                    whole pages  space_bytes

    Free ranges are mapped. Adjacent free ranges are merged, and adjacent unmapped ones. Most plans
    need one segment; where its addresses run out, a second one follows at 2 ``space_bytes``.
    """

    def __init__(self, page_bytes: int, space_bytes: int) -> None:
        self.page_bytes, self.space_bytes = page_bytes, round_up(space_bytes, page_bytes)
        self.segments: list[int] = []  # begins, ascending
        self.free: dict[int, int] = {}  # begin -> end
        self.begins: dict[int, int] = {}  # end -> begin of the free ranges
        self.sizes: list[tuple[int, int]] = []  # (size, begin) of the free ranges, sorted
        self.unmapped: dict[int, int] = {}  # begin -> end

    def take(self, nbytes: int) -> tuple[tuple[int, int], int]:
        """Allocate ``nbytes``. Return the arguments for `give`, and the newly mapped bytes.

        Takes the smallest free range that is large enough, and maps pages if there is none. A free
        range before an unmapped range could grow: it is replaced by the next larger free range as
        long as that one has less room, including its unmapped range (`get_free_block`).
        """
        index = bisect_left(self.sizes, (nbytes, 0))
        if index == len(self.sizes):
            return self._map(nbytes)
        while index + 1 < len(self.sizes) and self._room(index) > self._room(index + 1):
            index += 1
        size, begin = self.sizes.pop(index)
        end = self.free.pop(begin)
        del self.begins[end]
        if size > nbytes:
            self._add_free(begin + nbytes, end)
        return (begin, nbytes), 0

    def copy(self) -> Pool:
        other = copy.copy(self)
        other.free, other.begins = self.free.copy(), self.begins.copy()
        other.sizes, other.unmapped = self.sizes.copy(), self.unmapped.copy()
        other.segments = self.segments.copy()
        return other

    def give(self, begin: int, nbytes: int) -> None:
        """Free a range and merge it with adjacent free ranges."""
        end = begin + nbytes
        if (previous_begin := self.begins.get(begin)) is not None:
            self._remove_free(previous_begin)
            begin = previous_begin
        if (next_end := self.free.get(end)) is not None:
            self._remove_free(end)
            end = next_end
        self._add_free(begin, end)

    def take_at(self, begin: int, nbytes: int) -> None:
        """Allocate a range within a free one."""
        end = begin + nbytes
        first, last = next(
            span for span in self.free.items() if span[0] <= begin and end <= span[1]
        )
        self._remove_free(first)
        if first < begin:
            self._add_free(first, begin)
        if end < last:
            self._add_free(end, last)

    def trim(self) -> int:
        """Unmap the pages that are entirely in free ranges. Return the unmapped bytes."""
        trimmed = 0
        for begin, end in list(self.free.items()):
            first, last = round_up(begin, self.page_bytes), end // self.page_bytes * self.page_bytes
            if first < last:
                trimmed += last - first
                self._remove_free(begin)
                if begin < first:
                    self._add_free(begin, first)
                if last < end:
                    self._add_free(last, end)
                first = next((begin for begin, end in self.unmapped.items() if end == first), first)
                last = self.unmapped.pop(last, last)
                if last - first < self.space_bytes:
                    self.unmapped[first] = last
                else:
                    self.unmapped.pop(first, None)
                    self.segments.remove(first)
        return trimmed

    def _map(self, nbytes: int) -> tuple[tuple[int, int], int]:
        """Map pages for ``nbytes`` at the lowest address with room. Return as `take`."""
        row = self._row(nbytes)
        begin, mapped_bytes = row[0][0], 0
        limit = begin + nbytes
        for first, end in row:
            if first in self.free:
                self._remove_free(first)
            else:
                last = self.unmapped.pop(first)
                end = min(last, round_up(limit, self.page_bytes))
                if end < last:
                    self.unmapped[end] = last
                mapped_bytes += end - first
        if end > limit:
            self.give(limit, end - limit)
        return (begin, nbytes), mapped_bytes

    def _row(self, nbytes: int) -> list[tuple[int, int]]:
        """Return adjacent ranges with room together, at least one unmapped and the others free.

        They begin at the lowest unmapped range with enough room, or at the free range before it
        (`find_expandable_block`); otherwise in a new segment.
        """
        for unmapped in sorted(self.unmapped):
            begin = end = self.begins.get(unmapped, unmapped)
            row = []
            while end - begin < nbytes and (
                next_end := self.free.get(end) or self.unmapped.get(end)
            ):
                row.append((end, next_end))
                end = next_end
            if end - begin >= nbytes:
                return row
        begin = self.segments[-1] + 2 * self.space_bytes if self.segments else 0
        self.segments.append(begin)
        self.unmapped[begin] = begin + self.space_bytes
        return [(begin, begin + self.space_bytes)]

    def _room(self, index: int) -> int:
        """Return the bytes of free range ``sizes[index]`` and of the unmapped range after it."""
        size, begin = self.sizes[index]
        return self.unmapped.get(begin + size, begin + size) - begin

    def _add_free(self, begin: int, end: int) -> None:
        self.free[begin] = end
        self.begins[end] = begin
        insort(self.sizes, (end - begin, begin))

    def _remove_free(self, begin: int) -> None:
        end = self.free.pop(begin)
        del self.begins[end]
        del self.sizes[bisect_left(self.sizes, (end - begin, begin))]


class Segments:
    """Segments returned by `cudaMalloc`, split into blocks; best-fit search over the free blocks.

    segment 0 |##used##|..free..|##used##|      segment 1 |....free....|

    Adjacent free blocks of a segment are merged. A block is split only if at least
    ``min_split_bytes`` remain.
    """

    def __init__(self, min_split_bytes: int) -> None:
        self.min_split_bytes = min_split_bytes
        self.sizes: dict[int, int] = {}  # segment -> bytes
        # segment -> offset -> bytes of the free block there
        self.free: dict[int, dict[int, int]] = {}
        # (bytes, segment, offset) of every free block, sorted
        self.blocks: list[tuple[int, int, int]] = []
        self._next = 0

    def take(self, nbytes: int) -> tuple[tuple[int, int, int], int]:
        """Allocate ``nbytes``. Return the arguments for `give`, and the newly reserved bytes."""
        index, reserved_bytes = bisect_left(self.blocks, (nbytes, -1, -1)), 0
        if index == len(self.blocks):
            reserved_bytes = self.sizes[self._next] = segment_bytes(nbytes)
            self.free[self._next] = {}
            self._add_free(self._next, 0, reserved_bytes)
            self._next += 1
            index = bisect_left(self.blocks, (nbytes, -1, -1))
        size, segment, offset = self.blocks[index]
        self._remove_free(segment, offset)
        if size - nbytes >= self.min_split_bytes:
            self._add_free(segment, offset + nbytes, size - nbytes)
            size = nbytes
        return (segment, offset, size), reserved_bytes

    def give(self, segment: int, offset: int, nbytes: int) -> None:
        """Free a block and merge it with adjacent free blocks."""
        if (size := self.free[segment].get(offset + nbytes)) is not None:
            self._remove_free(segment, offset + nbytes)
            nbytes += size
        previous_offset = next(
            (o for o, size in self.free[segment].items() if o + size == offset), None
        )
        if previous_offset is not None:
            nbytes += self.free[segment][previous_offset]
            self._remove_free(segment, previous_offset)
            offset = previous_offset
        self._add_free(segment, offset, nbytes)

    def trim(self) -> int:
        """Release segments without a used block. Return the released bytes."""
        empty = [
            segment for segment, size in self.sizes.items() if self.free[segment].get(0) == size
        ]
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
    """A small and a large pool. `used_bytes` corresponds to `torch.cuda.memory_reserved`."""

    def __init__(
        self, small: Pool | Segments, large: Pool | Segments, small_bytes: int = SMALL_BYTES
    ) -> None:
        self.used_bytes = 0
        self._small_bytes = small_bytes
        self._small, self._large = small, large
        self._live: dict[int, tuple[Pool | Segments, tuple[int, ...]]] = {}

    def allocate(self, key: int, nbytes: int) -> None:
        rounded = max(round_up(nbytes, ROUND_BYTES), ROUND_BYTES)
        pool = self._small if rounded <= self._small_bytes else self._large
        block, reserved_bytes = pool.take(rounded)
        self._live[key] = pool, block
        self.used_bytes += reserved_bytes

    def is_small(self, nbytes: int) -> bool:
        return round_up(nbytes, ROUND_BYTES) <= self._small_bytes

    def release(self, key: int) -> None:
        pool, block = self._live.pop(key)
        pool.give(*block)

    def place(self, key: int) -> tuple[int, ...]:
        """Return the range or block of the allocation ``key`` in its pool."""
        return self._live[key][1]

    def trim(self) -> None:
        self.used_bytes -= self._small.trim() + self._large.trim()


class Caching(_Cached):
    """PyTorch's caching allocator with expandable segments.

    ``page_scale``: factor on the sizes of pages and small allocations, for tiny models.
    ``card_bytes``: memory of the card. A segment's address space is 9/8 of that.
    """

    def __init__(self, page_scale: float = 1.0, card_bytes: int = 1 << 50) -> None:
        small_bytes, *pages = (
            round_up(max(1, int(page_scale * nbytes)), ROUND_BYTES)
            for nbytes in (SMALL_BYTES, SMALL_PAGE_BYTES, LARGE_PAGE_BYTES)
        )
        self._pools = [Pool(nbytes, card_bytes + card_bytes // 8) for nbytes in pages]
        super().__init__(self._pools[0], self._pools[1], small_bytes)

    def used_bytes_with(self, sizes: Iterable[int]) -> int:
        """Return the reserved bytes if allocations of ``sizes`` (above 0) followed."""
        pools = [pool.copy() for pool in self._pools]
        return self.used_bytes + sum(
            pools[not self.is_small(nbytes)].take(round_up(nbytes, ROUND_BYTES))[1]
            for nbytes in sizes
        )

    def allocate_at(self, key: int, small: bool, place: tuple[int, ...]) -> None:
        """Allocate as ``key`` the range that was released at ``place``."""
        pool, (offset, nbytes) = self._pools[not small], place
        pool.take_at(offset, nbytes)
        self._live[key] = pool, place

    def state(self, small: bool) -> Hashable:
        """Return the state of one pool. The same calls in the same state have the same results."""
        pool = self._pools[not small]
        return tuple(pool.sizes), frozenset(pool.unmapped.items()), tuple(pool.segments)


class Native(_Cached):
    """PyTorch's caching allocator with native segments, its default.

    Sizes up to 1 MiB come from segments of 2 MiB, sizes below 10 MiB from segments of 20 MiB; a
    larger size gets its own segment, rounded up to 2 MiB. A small block is split if at least 512
    bytes remain, a large one only if more than 1 MiB remains (`should_split`).
    """

    def __init__(self) -> None:
        super().__init__(Segments(ROUND_BYTES), Segments(SMALL_BYTES + 1))


def segment_bytes(nbytes: int) -> int:
    """Return the bytes requested from `cudaMalloc` for ``nbytes`` (`get_allocation_size`)."""
    if nbytes <= SMALL_BYTES:
        return SMALL_PAGE_BYTES
    return LARGE_PAGE_BYTES if nbytes < PACKED_BYTES else round_up(nbytes, SEGMENT_STEP_BYTES)
