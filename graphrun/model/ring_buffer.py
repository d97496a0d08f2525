"""Ring buffer for streamed blocks: the offset of each block, and the blocks that it overwrites.

Pure arithmetic, without time or device: simulator and executor get the same offsets.

    capacity  |  block 3  |    block 1    |  block 2 |free|
              ^ placed after block 2, over block 0

    capacity  |  block 3  |free|    block 1    | block 2 |
              block 3 is longer: block 2 goes to the end of the ring buffer
"""

from __future__ import annotations

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
