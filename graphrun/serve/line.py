"""The queue: who runs next, and how long everyone waits. Knows seconds, and neither graphs nor clocks.

A run that finds the weights of its own plan on the device takes less than one after another plan. So a request may overtake others
to stand behind one of its shape, as long as nobody waits longer than was promised, by more than `PATIENCE`.

    waiting  A A B B C          A comes: behind the second A, if B, B and C still begin in time; else at the end
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PATIENCE = 0.1  # of the promised wait


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted seconds of a run: the first one by its plan, and one right after another by the same plan."""

    first_seconds: float
    again_seconds: float


@dataclass(slots=True)
class Entry:
    """A request for ``runs`` runs of ``shape``. ``group``: its weights replace those of other shapes of the group. ``start``: when
    it was promised to begin, on the clock of the caller."""

    item: Any
    group: Hashable
    shape: Hashable
    cost: Cost
    runs: int
    start: float = 0.0


class Line:
    """Waiting requests in order. ``warm``: group -> the shape whose weights are on the device once what runs now has ended."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.warm: dict[Hashable, Hashable] = {}

    def seconds(self, entry: Entry, warm: Mapping[Hashable, Hashable]) -> float:
        """Predicted seconds of ``entry`` where ``warm`` is on the device."""
        cost = entry.cost
        once = cost.again_seconds if warm.get(entry.group) == entry.shape else cost.first_seconds
        return once + (entry.runs - 1) * cost.again_seconds

    def starts(self, entries: list[Entry], begin: float) -> Iterator[float]:
        """When each of ``entries`` begins if the first begins at ``begin``, and then when the last one ends."""
        warm = dict(self.warm)
        for entry in entries:
            yield begin
            begin += self.seconds(entry, warm)
            warm[entry.group] = entry.shape
        yield begin

    def end(self, begin: float) -> float:
        """When all that waits has ended, if it begins at ``begin``."""
        return list(self.starts(self.entries, begin))[-1]

    def place(self, entry: Entry, now: float, begin: float) -> tuple[int, float]:
        """Where ``entry`` would stand, and when it begins. What runs now ends at ``begin``."""
        end = len(self.entries)
        last = max((number for number, each in enumerate(self.entries) if each.shape == entry.shape), default=None)
        behind = 0 if last is None and self.warm.get(entry.group) == entry.shape else end if last is None else last + 1
        for position in dict.fromkeys((behind, end)):
            trial = [*self.entries[:position], entry, *self.entries[position:]]
            starts = list(self.starts(trial, begin))
            overtaken = zip(trial[position + 1 :], starts[position + 1 :], strict=False)
            if all(start <= each.start + PATIENCE * max(0.0, each.start - now) for each, start in overtaken):
                return position, starts[position]
        raise AssertionError("at the end nobody is overtaken")

    def add(self, entry: Entry, now: float, begin: float) -> None:
        """Places ``entry``, which is promised the start that is predicted now."""
        position, entry.start = self.place(entry, now, begin)
        self.entries.insert(position, entry)

    def pop(self) -> Entry:
        """The next entry; what is warm after it is noted."""
        entry = self.entries.pop(0)
        self.warm[entry.group] = entry.shape
        return entry

    def remove(self, item: Any) -> None:
        """Takes out the entry of ``item``, if it waits."""
        self.entries = [entry for entry in self.entries if entry.item is not item]
