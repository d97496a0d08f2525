"""The disk in one slot: fills of homes, and what is read for copies from homes on disk. Knows blocks and seconds, nothing of plans.

    disk   |r d3|r d8|fill a|r s1|fill b|fill b|      one read after another
    copy        |d3  |d8    |s1  |                    a block's copy waits for its own read, or for its own fill

A block read for a copy lies in its component's bounce buffer until it was copied on; a read waits for its place there. Beside such
reads fills go in where a buffer is full, in step with the bytes read, as a prefetch does beside streamed blocks; what a copy or a
computation waits for is filled up to there at once, and what is left comes last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from graphrun.errors import PlanError
from graphrun.planner.ring import Ring

Key = tuple[str, int, int]  # component, class, block within the class


@dataclass(frozen=True, slots=True)
class Size:
    """One copy of a block to the device; ``disk_seconds`` to read it from disk, for its copy or for its home's fill, where files
    hold ``read_bytes`` of it."""

    nbytes: int
    seconds: float
    disk_seconds: float = 0.0
    read_bytes: int = 0


class Disk:
    """The channel from ``start_seconds`` on. ``fills``: blocks in order. ``bounces``: bytes of each disk home's buffer.
    ``read_bytes``: how much the slot will read for copies. ``spans`` are (``fill`` or ``read``, block, start, end)."""

    def __init__(
        self, start_seconds: float, fills: Iterable[Key], sizes: Mapping[Key, Size], bounces: Mapping[str, int], read_bytes: int
    ) -> None:
        self.spans: list[tuple[str, Key, float, float]] = []
        self.free_seconds = self._start = start_seconds
        self._sizes = sizes
        self._fills = list(reversed(list(fills)))
        self._filling = {key[0] for key in self._fills}
        self._fill_bytes, self._read_bytes = sum(sizes[key].nbytes for key in self._fills), read_bytes
        self._filled_so_far = self._read_so_far = 0
        self._filled: dict[Key, float] = {}
        self._bounces = {name: Ring(nbytes) for name, nbytes in bounces.items()}
        self._left: dict[str, list[float]] = {name: [] for name in bounces}  # when each read was copied on
        self._ahead: dict[Key, float] = {}  # when reads end that were begun before their copies' turn
        if not read_bytes:
            self.finish()

    def arrives(self, key: Key) -> float:
        """When the block is in RAM for a copy: its own read's end (one read a copy), its own fill's, or the slot's start."""
        if key[0] not in self._bounces:
            return self.filled(key)
        self.begin(key)
        return self._ahead.pop(key)

    def begin(self, key: Key) -> None:
        """Begins the read of a block that will be copied once; nothing where its home is not on disk."""
        if key[0] in self._bounces and key not in self._ahead:
            self._ahead[key] = self._read(key)

    def filled(self, key: Key) -> float:
        """When the block's fill ends; the slot's start where its home is not filled in this slot."""
        if key[0] not in self._filling:
            return self._start
        while key not in self._filled:
            self._fill()
        return self._filled[key]

    def holds(self, key: Key, at_seconds: float) -> bool:
        """Whether the block need not be waited for then: what was begun is read by then, and its home, or this block, is filled."""
        if key[0] in self._bounces:
            return self._ahead.get(key, at_seconds + 1.0) <= at_seconds
        return key[0] not in self._filling or self._filled.get(key, at_seconds + 1.0) <= at_seconds

    def fills(self, component: str) -> bool:
        """Whether the component's home is filled in this slot."""
        return component in self._filling

    def copied(self, key: Key, end_seconds: float) -> None:
        """The block was copied on: its place in the buffer is free from then."""
        if key[0] in self._bounces:
            self._left[key[0]].append(end_seconds)

    def finish(self) -> None:
        """Fills what is left."""
        while self._fills:
            self._fill()

    def _fill(self) -> None:
        key = self._fills.pop()
        self._filled_so_far += self._sizes[key].nbytes
        self._filled[key] = self._take("fill", key, self._start)

    def _read(self, key: Key) -> float:
        try:
            released = self._bounces[key[0]].place(self._sizes[key].nbytes).released
        except ValueError as error:
            raise PlanError(f"the bounce buffer of {key[0]}: {error}") from error
        if released:
            while self._fills and self._filled_so_far * self._read_bytes <= self._read_so_far * self._fill_bytes:
                self._fill()
        self._read_so_far += self._sizes[key].nbytes
        return self._take("read", key, self._left[key[0]][released[-1]] if released else self._start)

    def _take(self, kind: str, key: Key, ready: float) -> float:
        start = max(self.free_seconds, ready)
        self.free_seconds = start + self._sizes[key].disk_seconds
        self.spans.append((kind, key, start, self.free_seconds))
        return self.free_seconds
