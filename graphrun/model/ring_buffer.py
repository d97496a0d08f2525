"""Ring buffer for streamed blocks: the offset of each block, and the blocks that it overwrites.

Pure arithmetic, without time or device: simulator and executor get the same offsets.

    capacity  |  block 3  |    block 1    |  block 2 |free|
              ^ placed after block 2, over block 0

    capacity  |  block 3  |free|    block 1    | block 2 |
              block 3 is longer: block 2 goes to the end of the ring buffer
"""

from __future__ import annotations

import functools
from bisect import bisect_left, insort
from collections import deque
from typing import NamedTuple


class RingPlace(NamedTuple):
    """Position of a block: bytes ``offset .. offset + nbytes`` of the ring buffer.

    ``released_numbers``: ascending numbers (from 0) of the earlier placements that are overwritten,
    and of all placements before them, each released once. Their compute must end before the new
    block is written; if compute runs in placement order, waiting for the last number is enough.
    """

    offset: int
    released_numbers: tuple[int, ...]


class RingBuffer:
    """A first-in first-out ring buffer. Every block is contiguous; `place` call i is placement i.

    If all sizes are multiples of an alignment, so are the offsets.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._head = 0
        self._count = 0
        # (start, end, number), oldest first, without overlaps
        self._live: deque[tuple[int, int, int]] = deque()
        self._by_start: list[tuple[int, int, int]] = []  # the same, sorted

    def place(self, nbytes: int, following_bytes: int = 0) -> RingPlace:
        """Place the next block after the previous one, or at offset 0 if it does not fit there.

        ``following_bytes``: size of the block after it, 0 if unknown. If that block must go to
        offset 0 and would overlap this block there, this block goes to the end of the ring buffer.
        So two consecutive blocks never overlap in a ring buffer with room for both. Raises
        ValueError if the block is larger than the ring buffer.
        """
        if nbytes > self.capacity_bytes:
            raise ValueError(
                f"a block of {nbytes} bytes does not fit a ring buffer of {self.capacity_bytes}"
                " bytes"
            )
        start = self._head if self._head + nbytes <= self.capacity_bytes else 0
        if start < following_bytes and start + nbytes + following_bytes > self.capacity_bytes:
            start = self.capacity_bytes - nbytes
        end = start + nbytes
        last, index = -1, bisect_left(self._by_start, (end, -1, -1))
        while index and self._by_start[index - 1][1] > start:
            index -= 1
            last = max(last, self._by_start[index][2])
        released_numbers = []
        while self._live and self._live[0][2] <= last:
            oldest = self._live.popleft()
            del self._by_start[bisect_left(self._by_start, oldest)]
            released_numbers.append(oldest[2])
        self._live.append(placement := (start, end, self._count))
        insort(self._by_start, placement)
        self._head = end
        self._count += 1
        return RingPlace(start, tuple(released_numbers))

    def renumber(self, count: int) -> None:
        """Number the blocks as if the first ``count`` placements had come before them."""
        self._count += count
        self._live = deque((start, end, number + count) for start, end, number in self._live)
        self._by_start = [(start, end, number + count) for start, end, number in self._by_start]

    @property
    def oldest_distance(self) -> int:
        """How many placements before the next one its oldest block was placed; 0: empty."""
        return self._count - self._live[0][2] if self._live else 0

    def layout(self) -> tuple[int, ...]:
        """Return all that later placements depend on, whatever the number of earlier ones."""
        numbers = (
            x for start, end, number in self._live for x in (start, end, self._count - number)
        )
        return self._head, *numbers


@functools.lru_cache(maxsize=256)
def release_distances(
    capacity_bytes: int, nbytes: tuple[int, ...], repeats: int = 1
) -> tuple[int, ...]:
    """Return how many placements before each block its last released placement is; 0: none.

    The blocks of ``nbytes`` are placed in order, ``repeats`` times. The same layout is followed by
    the same placements, so these are made only once. Raises ValueError if a block is larger than
    the ring buffer.
    """
    ring_buffer, period, number = RingBuffer(capacity_bytes), len(nbytes), 0
    distances: list[int] = []
    round_of_layout = dict[tuple[int, ...], int]()
    while number < repeats:
        same_round = round_of_layout.setdefault(ring_buffer.layout(), number)
        # in the last round, no block follows its last one
        if same_round < number and (cycles := (repeats - 1 - number) // (number - same_round)):
            placements = (number - same_round) * period
            ring_buffer.renumber(cycles * placements)
            number += cycles * (number - same_round)
            distances += distances[len(distances) - placements :] * cycles
            continue
        following_sizes = (*nbytes[1:], nbytes[0] if number + 1 < repeats else 0) if nbytes else ()
        for size, following_bytes in zip(nbytes, following_sizes, strict=True):
            released_numbers = ring_buffer.place(size, following_bytes).released_numbers
            distances.append(len(distances) - released_numbers[-1] if released_numbers else 0)
        number += 1
    return tuple(distances)
