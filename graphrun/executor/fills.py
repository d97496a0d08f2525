"""The disk in one slot: homes that it fills, beside blocks that are read for copies. Decides nothing: it keeps the plan's pace.

    disk   |r1|r2|fill a|r3|fill b|      a fill goes in where a bounce buffer is full, in step with the bytes read

What a copy waits for is filled at once, up to there; what is left comes last. Where nothing is read, all fills begin at once.
The simulator does the same (`graphrun.planner.disk`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from graphrun.executor.homes import Arena, Disk
from graphrun.executor.residency import Residency


class Fills:
    """``filling``: residencies whose homes the slot fills, in order. ``reading``: those on disk, ``read_bytes`` of them."""

    def __init__(self, filling: Iterable[Residency], reading: Iterable[Residency], read_bytes: int) -> None:
        self._waiting: deque[tuple[Arena, str, int]] = deque()
        self._read_bytes = read_bytes
        self._read_so_far = self._filled_so_far = 0
        for residency in filling:
            blocks = residency.fill()
            if isinstance(residency.home, Arena):
                home = residency.home
                self._waiting += [(home, path, nbytes) for path, nbytes in blocks]
                home.wanted = self._until(home)
        self._fill_bytes = sum(nbytes for _, _, nbytes in self._waiting)
        for residency in reading:
            if isinstance(residency.home, Disk):
                residency.home.before_read = self._beside
        if not read_bytes:
            self.finish()

    def finish(self) -> None:
        """Begins what is left."""
        while self._waiting:
            self._begin()

    def _begin(self) -> None:
        home, path, nbytes = self._waiting.popleft()
        self._filled_so_far += nbytes
        home.begin(path)

    def _beside(self, nbytes: int, full: bool) -> None:
        while full and self._waiting and self._filled_so_far * self._read_bytes <= self._read_so_far * self._fill_bytes:
            self._begin()
        self._read_so_far += nbytes

    def _until(self, home: Arena) -> Callable[[str], None]:
        def until(path: str) -> None:
            while self._waiting:
                done = self._waiting[0][0] is home and self._waiting[0][1] == path
                self._begin()
                if done:
                    break

        return until
