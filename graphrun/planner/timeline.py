"""One slot in time: every block's copy and compute on two timelines. Knows sizes and seconds of blocks, nothing of plans.

    copy     |d3 |s8 |s9 |f |s1 |  |s2 |  |s8 |f            s  streamed: waits until its place in the ring was computed with
    compute      |  d3  |  s8   |  s9   |  s1   |  s2  |    d  loaded and kept by the slot that computes with it
             ^ start                                        f  prefetch: loaded for later

Copies run one after the other. Streamed blocks, and blocks that the slot loads for itself, are copied in call order, across calls.
A prefetch goes in where the ring is full, in step with the streamed bytes (the executor issues copies by the same rule, since it
cannot know how long they take), once it is in RAM: of a home on disk the next block is read meanwhile. What is left of it comes
last. One whose home is filled in the same slot comes behind the others. A block's compute waits for its own copy; on the CPU, for
its own fill in that slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from graphrun.errors import PlanError
from graphrun.planner.disk import Disk, Key, Size
from graphrun.planner.ring import Ring

Source = Literal["present", "load", "stream", "host"]


class Work(NamedTuple):
    """Compute of one block in one call: number ``turn`` of its component. ``source``: where the block is when the slot begins;
    ``host``: it is computed with on the CPU."""

    key: Key
    seconds: float
    turn: int
    source: Source


class Span(NamedTuple):
    """Something that took time: ``load`` or ``stream`` of a block, ``run`` of a call (``key`` is its first block)."""

    kind: str
    key: Key
    turn: int
    start_seconds: float
    end_seconds: float


class Timeline:
    """Runs ``works`` from ``start_seconds`` on. ``prefetch``: blocks loaded for later, in order. ``rings``: bytes per component.
    ``copies_from_seconds``: when the copies may begin (spills and restores go before them). ``rooms``: activation that is not there
    while a block runs."""

    def __init__(
        self,
        start_seconds: float,
        works: Sequence[Work],
        prefetch: Iterable[Key],
        sizes: Mapping[Key, Size],
        rings: Mapping[str, int],
        disk: Disk,
        copies_from_seconds: float,
        rooms: Mapping[Key, int] | None = None,
    ) -> None:
        self.copies: list[Span] = []
        self.calls: dict[tuple[str, int], Span] = {}
        self._sizes, self._disk, self._rooms = sizes, disk, rooms or {}
        self._computed = self._start = start_seconds
        self._copied = copies_from_seconds
        self._prefetch = sorted(prefetch, key=lambda key: disk.fills(key[0]))[::-1]
        self._prefetch_bytes = sum(sizes[key].nbytes for key in self._prefetch)
        self._stream_bytes = sum(sizes[work.key].nbytes for work in works if work.source == "stream")
        self._prefetched_bytes = self._streamed_bytes = 0
        self._arrived: dict[Key, float] = {}
        self._rings = {name: Ring(nbytes) for name, nbytes in rings.items()}
        self._left: dict[str, list[float]] = {name: [] for name in rings}  # when compute left each placement
        streamed = [work for work in works if work.source == "stream"]
        self._following = {name: _following(streamed, name, sizes) for name in rings}
        for (name, turn), of in groupby(works, key=lambda work: (work.key[0], work.turn)):
            self._call(name, turn, list(of))
        while self._prefetch:
            self._issue_prefetch()
        disk.finish()
        self.end_seconds = max(self._copied, self._computed, disk.free_seconds)

    def _call(self, name: str, turn: int, works: Sequence[Work]) -> None:
        """Computes with the blocks of one call of a component."""
        began: float | None = None
        for work in works:
            if work.source != "present":
                self._computed = max(self._computed, self._arrives(work))
            began = self._computed if began is None else began
            self._computed += work.seconds
            if work.source == "stream":
                self._left[name].append(self._computed)
        known = self.calls.get((name, turn), Span("run", works[0].key, turn, began or 0.0, 0.0))
        self.calls[name, turn] = known._replace(end_seconds=self._computed)

    def _arrives(self, work: Work) -> float:
        """When the block that ``work`` computes with is there."""
        if work.source == "stream":
            return self._stream(work.key)
        if work.source == "host":
            return self._disk.arrives(work.key)
        if work.key not in self._arrived:
            self._arrived[work.key] = self._copy("load", work.key, self._disk.arrives(work.key))
        return self._arrived[work.key]

    def _stream(self, key: Key) -> float:
        try:
            nbytes, following, room = self._sizes[key].nbytes, next(self._following[key[0]], 0), self._rooms.get(key, 0)
            place = self._rings[key[0]].place(nbytes, following, room)
        except ValueError as error:
            raise PlanError(f"stream {key[0]}: {error}") from error
        ready = self._left[key[0]][place.released[-1]] if place.released else self._start
        ready = self._computed if place.alone else ready
        if place.released or place.alone:
            self._pace(self._copied)
            self._pace(max(self._copied, ready))
        self._streamed_bytes += self._sizes[key].nbytes
        return self._copy("stream", key, max(ready, self._disk.arrives(key)))

    def _pace(self, at_seconds: float) -> None:
        """Prefetch whose turn it is, as far as it is in RAM by then: streamed blocks do not wait behind it."""
        while self._prefetch:
            self._disk.begin(self._prefetch[-1])
            due = self._prefetched_bytes * self._stream_bytes <= self._streamed_bytes * self._prefetch_bytes
            if not due or not self._disk.holds(self._prefetch[-1], at_seconds):
                break
            self._issue_prefetch(at_seconds)

    def _issue_prefetch(self, at_seconds: float = 0.0) -> None:
        key = self._prefetch.pop()
        self._prefetched_bytes += self._sizes[key].nbytes
        self._copy("load", key, max(at_seconds, self._disk.arrives(key)))

    def _copy(self, kind: str, key: Key, ready: float) -> float:
        start = max(self._copied, ready)
        self._copied = start + self._sizes[key].seconds
        self._disk.copied(key, self._copied)
        self.copies.append(Span(kind, key, 0, start, self._copied))
        return self._copied


def _following(streamed: Sequence[Work], component: str, sizes: Mapping[Key, Size]) -> Iterator[int]:
    """For each block of ``component`` that passes, the bytes of the one behind it."""
    return iter([sizes[work.key].nbytes for work in streamed if work.key[0] == component][1:])
