"""Where streamed blocks lie in a component's staging buffer, and whom each has to wait for. Pure arithmetic: simulator and executor
place the same blocks in the same order and so get the same offsets; neither time nor device is known here.

    capacity  |  block 3  |    block 1    |  block 2 |free|           |  block 3  |free|    block 1    | block 2 |
              ^ placed after 2, over block 0                          2 lies at the end where 3 is the longer of the two

A block that is larger than the ring passes alone: it comes when compute has reached it, in the ring's place, and takes what the
ring has not from the activation that is not there while it runs.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class RingSlot(NamedTuple):
    """Bytes ``offset .. offset + nbytes`` of the ring, and the placements (numbered from 0, ascending) that lay there or before
    them: all must have been computed with before the new block may be written. Waiting for the last suffices where compute runs in
    the order of placing. A number is released once. ``offset`` -1: the block lies alone, in a buffer of its own in place of the
    ring, from when compute comes to it until it was computed with."""

    offset: int
    released: tuple[int, ...]

    @property
    def alone(self) -> bool:
        """Whether the block does not lie in the ring."""
        return self.offset < 0


class Ring:
    """A ring of ``capacity_bytes`` in which blocks lie whole, first in, first out. The i-th call of `place` is placement number i.

    Where the sizes of blocks and of the ring are multiples of an alignment, so are the offsets.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._head = 0
        self._count = 0
        self._live: deque[tuple[int, int, int]] = deque()  # number, start, end; oldest first

    def place(self, nbytes: int, following_bytes: int = 0, room_bytes: int = 0) -> RingSlot:
        """The next block's place: behind the last one, or at 0 where it would not fit there whole.

        ``following_bytes``: of the block after it, where that is known. If it will have to go to 0 and would lie over this one
        there, this one goes to the ring's very end, so that the two never wait for each other in a ring with room for both.
        ``room_bytes``: what of the activation is not there while the block runs. Raises ValueError for one larger than that and the
        ring together.
        """
        if nbytes > self.capacity_bytes:
            if nbytes > self.capacity_bytes + room_bytes:
                raise ValueError(f"a block of {nbytes} bytes does not fit a ring of {self.capacity_bytes} bytes")
            before = tuple(number for number, _, _ in self._live)
            self._live = deque([(self._count, 0, nbytes)])
            self._head = self.capacity_bytes
            self._count += 1
            return RingSlot(-1, before)
        start = self._head if self._head + nbytes <= self.capacity_bytes else 0
        if start < following_bytes and start + nbytes + following_bytes > self.capacity_bytes:
            start = self.capacity_bytes - nbytes
        end = start + nbytes
        last = max((number for number, begin, stop in self._live if begin < end and start < stop), default=-1)
        released = []
        while self._live and self._live[0][0] <= last:
            released.append(self._live.popleft()[0])
        self._live.append((self._count, start, end))
        self._head = end
        self._count += 1
        return RingSlot(start, tuple(released))
