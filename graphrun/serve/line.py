"""The queue: who runs next, and how long everyone waits. Knows seconds, and neither graphs nor
clocks.

A run that finds the weights of its own plan on the device takes less than one after another plan.
So a request may overtake others to stand behind one of its shape, as long as nobody ends later than
was promised, by more than `PATIENCE`.

    waiting  A A B B C          A comes: behind the second A, if B, B and C still end in time; else
    at the end

Where the plan says that it takes less, requests of one shape go together, stage by stage. The first
of them wait for the others, so a request joins them only where they still end in time; the longer
the queue, the more go together.

    in turn     (encode denoise decode)1 (encode denoise decode)2
    together    encode1 encode2 | (denoise decode)1 (denoise decode)2
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PATIENCE = 0.1  # of the promised wait
MOST_TOGETHER = 16  # runs


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted seconds of a run: the first one by its plan, and one right after another by the
    same plan. ``segments``: the same of each part of a run, where runs may go together
    (`graphrun.batch.schedule`); such runs find and leave an empty device. ``stages``: of each
    segment. ``stream``: of runs that go through the devices of a cluster, when each has ended, in
    seconds from their begin: with nothing loaded, and with weights that are there; they stay
    there."""

    first_seconds: float
    again_seconds: float
    segments: tuple[tuple[float, float], ...] = ()
    stages: tuple[tuple[str, ...], ...] = ()
    stream: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    def once(self, warm: bool) -> float:
        """Seconds of a run by itself. ``warm``: its weights are there."""
        return self.again_seconds if warm else self.first_seconds

    def together(self, runs: int, warm: bool = False) -> list[float]:
        """When each of ``runs`` runs that go together has ended, in seconds from their begin."""
        if self.stream is not None:
            return list(self.stream[warm][:runs])
        *before, (first, again) = self.segments
        begin = sum(of[0] + (runs - 1) * of[1] for of in before)
        return [begin + first + number * again for number in range(runs)]

    def own(self, runs: int, warm: bool, later: bool) -> float:
        """Seconds of ``runs`` of the runs that go together, without those of others. ``later``:
        others came before them."""
        if self.stream is not None:
            return self.once(warm or later) + (runs - 1) * self.again_seconds
        return sum(of[later] + (runs - 1) * of[1] for of in self.segments)


@dataclass(slots=True, eq=False)
class Entry:
    """A request for ``runs`` runs of ``shape``. ``group``: its weights replace those of other
    shapes of the group. ``start`` and ``end``: as they were promised, on the clock of the caller.
    ``beside``: groups whose weights stay; those of all others leave. ``batch``: entries one after
    another with the same may go together; None: it runs by itself."""

    item: Any
    group: Hashable
    shape: Hashable
    cost: Cost
    runs: int
    start: float = 0.0
    beside: Collection[Hashable] = ()
    end: float = 0.0
    batch: object | None = field(default_factory=object)


class Line:
    """Waiting requests in order. ``warm``: group -> the shape whose weights are on the device once
    what runs now has ended."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.warm: dict[Hashable, Hashable] = {}

    def seconds(self, entry: Entry, warm: Mapping[Hashable, Hashable]) -> float:
        """Predicted seconds of ``entry`` where ``warm`` is on the device."""
        return _ends([entry], warm)[-1]

    def times(self, entries: Sequence[Entry], begin: float) -> Iterator[tuple[float, float]]:
        """When each of ``entries`` begins and ends if the first begins at ``begin``. Of entries
        that go together, the begin is the one with which they would end at the same time if nobody
        were between their stages."""
        warm, done = dict(self.warm), 0
        while done < len(entries):
            taken = _taken(entries[done : done + MOST_TOGETHER], warm)
            ends = _ends(taken, warm)
            for number, (entry, end) in enumerate(zip(taken, ends, strict=True)):
                own = taken[0].cost.own(entry.runs, is_warm(entry, warm), later=number > 0)
                yield begin + (end - own if len(taken) > 1 else 0.0), begin + end
            begin, warm, done = begin + ends[-1], _after(taken, warm), done + len(taken)

    def end(self, begin: float) -> float:
        """When all that waits has ended, if it begins at ``begin``."""
        return max((end for _, end in self.times(self.entries, begin)), default=begin)

    def add(self, entry: Entry, now: float, begin: float) -> None:
        """Places ``entry``, which is promised the start and the end that are predicted now. What
        runs now ends at ``begin``."""
        position, entry.batch, entry.start, entry.end = self.place(entry, now, begin)
        self.entries.insert(position, entry)

    def place(
        self, entry: Entry, now: float, begin: float
    ) -> tuple[int, object | None, float, float]:
        """Where ``entry`` would stand, in which batch, and when it begins and ends."""
        for position, batch, first in self._places(entry):
            entry.batch = batch
            trial = [*self.entries[:position], entry, *self.entries[position:]]
            times = list(self.times(trial, begin))
            delayed = zip(trial[first:], times[first:], strict=True)
            if all(each is entry or _in_time(each, of, now) for each, of in delayed):
                return position, batch, *times[position]
        raise AssertionError("at the end nobody is overtaken")

    def _places(self, entry: Entry) -> Iterator[tuple[int, object, int]]:
        """Positions for ``entry``, the best first, with its batch there, and the number of the
        first entry that it would delay."""
        end, own = len(self.entries), (entry.group, entry.shape)
        alike = [
            number for number, each in enumerate(self.entries) if (each.group, each.shape) == own
        ]
        if alike:
            last = self.entries[alike[-1]]
            batch = [number for number, each in enumerate(self.entries) if each.batch is last.batch]
            # else nobody knows whom it would delay
            planned = all(of.segments or of.stream for of in (entry.cost, last.cost))
            if (
                planned
                and last.batch is not None
                and sum(self.entries[of].runs for of in batch) + entry.runs <= MOST_TOGETHER
            ):
                yield batch[-1] + 1, last.batch, batch[0]
        behind = alike[-1] + 1 if alike else 0 if self.warm.get(entry.group) == entry.shape else end
        for position in dict.fromkeys((behind, end)):
            yield position, object(), position

    def pop(self) -> list[Entry]:
        """The next entry, or those that go together; what is warm after them is noted."""
        taken = _taken(self.entries[:MOST_TOGETHER], self.warm)
        del self.entries[: len(taken)]
        self.warm = _after(taken, self.warm)
        return taken

    def remove(self, item: Any) -> None:
        """Takes out the entry of ``item``, if it waits."""
        self.entries = [entry for entry in self.entries if entry.item is not item]


def _in_time(entry: Entry, times: tuple[float, float], now: float) -> bool:
    """Whether ``entry`` begins and ends at ``times`` as was promised, or nearly so."""
    patience = PATIENCE * max(0.0, entry.start - now)
    return times[0] <= entry.start + patience and times[1] <= entry.end + patience


def go_together(entries: Sequence[Entry], warm: Mapping[Hashable, Hashable]) -> bool:
    """Whether the runs of ``entries``, of one batch, take less together, the next one's weights
    included."""
    first, runs = entries[0], sum(entry.runs for entry in entries)
    cost, there = first.cost, is_warm(first, warm)
    if first.batch is None or not (cost.segments or cost.stream) or runs == 1:
        return False
    leaves = 0.0 if cost.stream else cost.first_seconds - cost.again_seconds
    return (
        cost.together(runs, there)[-1] + leaves < cost.once(there) + (runs - 1) * cost.again_seconds
    )


def is_warm(entry: Entry, warm: Mapping[Hashable, Hashable]) -> bool:
    """Whether the weights of ``entry`` are on the device."""
    return warm.get(entry.group) == entry.shape


def _taken(entries: Sequence[Entry], warm: Mapping[Hashable, Hashable]) -> list[Entry]:
    """The entries at the head of ``entries`` that run next: those of a batch where they go
    together, else one."""
    number = next(
        (number for number, each in enumerate(entries) if each.batch is not entries[0].batch),
        len(entries),
    )
    batch = list(entries[: number if entries[0].batch is not None else 1])
    return batch if go_together(batch, warm) else batch[:1]


def _ends(entries: Sequence[Entry], warm: Mapping[Hashable, Hashable]) -> list[float]:
    """When each of ``entries``, taken at once, has ended, in seconds from their begin."""
    cost, ends, runs, there = entries[0].cost, list[float](), 0, is_warm(entries[0], warm)
    if not go_together(entries, warm):
        return [cost.once(there) + (entries[0].runs - 1) * cost.again_seconds]
    each = cost.together(sum(entry.runs for entry in entries), there)
    for entry in entries:
        runs += entry.runs
        ends.append(each[runs - 1])
    return ends


def _after(entries: Sequence[Entry], warm: Mapping[Hashable, Hashable]) -> dict[Hashable, Hashable]:
    """What is warm after ``entries``, taken at once."""
    entry = entries[0]
    found = {
        group: shape
        for group, shape in warm.items()
        if group in entry.beside and group != entry.group
    }
    leaves = entry.cost.stream is None and go_together(entries, warm)
    return found if leaves else {**found, entry.group: entry.shape}
