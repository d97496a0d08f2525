"""The queue: which request runs next, and how long each waits. Predicted seconds only, no clock.

A run is faster if the weights of its own plan are still on the device. So a request may overtake
others to queue behind one of its shape, unless someone then ends later than promised by more than
`PATIENCE`.

    waiting  A A B B C
    A comes: behind the second A, if B, B and C still end in time; else at the end

Requests of one shape run as a batch, stage by stage, if the plan predicts that this is faster. The
first requests of a batch wait for the others, so a request joins only if all still end in time. The
longer the queue, the larger the batches.

    in turn     (encode denoise decode)1 (encode denoise decode)2
    together    encode1 encode2 | (denoise decode)1 (denoise decode)2
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# as a fraction of the promised wait: little more than waits differ from predictions anyway, 7.1 %
# (docs/serving.md)
PATIENCE = 0.1
MOST_TOGETHER = 16  # runs


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted seconds of a plan's first run, and of a run right after another run of the plan.

    ``segments``: the same two numbers for each segment of a batch (`graphrun.batch.schedule`), if
    batches are possible; they start and end with an empty device. ``stages``: of each segment.
    ``concurrent_end_seconds``: on a cluster, when each run of a batch ends, in seconds from the
    start: with nothing loaded, and with the weights on the devices, where they stay.
    """

    first_seconds: float
    again_seconds: float
    segments: tuple[tuple[float, float], ...] = ()
    stages: tuple[tuple[str, ...], ...] = ()
    concurrent_end_seconds: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    def run_seconds(self, warm: bool) -> float:
        """Return the seconds of a run by itself. ``warm``: its weights are on the device."""
        return self.again_seconds if warm else self.first_seconds

    def end_seconds(self, runs: int, warm: bool = False) -> list[float]:
        """Return when each of ``runs`` runs of a batch ends, in seconds from its start."""
        if self.concurrent_end_seconds is not None:
            return list(self.concurrent_end_seconds[warm][:runs])
        *head, (first_seconds, repeat_seconds) = self.segments
        begin = sum(segment[0] + (runs - 1) * segment[1] for segment in head)
        return [begin + first_seconds + number * repeat_seconds for number in range(runs)]

    def own_seconds(self, runs: int, warm: bool, is_follower: bool) -> float:
        """Return the seconds of ``runs`` runs of a batch, without the batch's other runs.
        ``is_follower``: others come first."""
        if self.concurrent_end_seconds is not None:
            return self.run_seconds(warm or is_follower) + (runs - 1) * self.again_seconds
        return sum(segment[is_follower] + (runs - 1) * segment[1] for segment in self.segments)


@dataclass(slots=True, eq=False)
class QueueEntry:
    """A request for ``runs`` runs of ``shape``.

    ``group``: its weights replace the weights of other shapes of the group. ``resident_groups``:
    groups whose weights stay on the device; all others are evicted. ``start`` and ``end``: the
    promised times, on the caller's clock. ``batch``: consecutive entries with the same value may
    run as a batch; None: the entry runs by itself.
    """

    item: Any
    group: Any  # hashable
    shape: Hashable
    cost: Cost
    runs: int
    start: float = 0.0
    resident_groups: Collection[Any] = ()
    end: float = 0.0
    batch: object | None = field(default_factory=object)


class Line:
    """The waiting requests, in order. ``warm_shapes``: by group, the shape whose weights are on the
    device after the current run."""

    def __init__(self) -> None:
        self.entries: list[QueueEntry] = []
        self.warm_shapes: dict[Hashable, Hashable] = {}

    def times(self, entries: Sequence[QueueEntry], begin: float) -> Iterator[tuple[float, float]]:
        """Yield the start and end of each of ``entries`` if the first starts at ``begin``.

        The start of an entry in a batch is its end minus its own seconds, as if no other entry ran
        between its stages.
        """
        warm, position = dict(self.warm_shapes), 0
        while position < len(entries):
            batch = _next_batch(entries[position : position + MOST_TOGETHER], warm)
            ends = _ends(batch, warm)
            for number, (entry, end) in enumerate(zip(batch, ends, strict=True)):
                own_seconds = batch[0].cost.own_seconds(
                    entry.runs, is_warm(entry, warm), is_follower=number > 0
                )
                yield begin + (end - own_seconds if len(batch) > 1 else 0.0), begin + end
            begin, warm, position = (
                begin + ends[-1],
                _warm_after(batch, warm),
                position + len(batch),
            )

    def end(self, begin: float) -> float:
        """Return when all waiting requests have ended, if the first starts at ``begin``."""
        return max((end for _, end in self.times(self.entries, begin)), default=begin)

    def add(self, entry: QueueEntry, clock: float, begin: float) -> None:
        """Place ``entry``, and promise it the predicted start and end. The current run ends at
        ``begin``."""
        for position, batch, first in self._places(entry):
            entry.batch = batch
            trial = [*self.entries[:position], entry, *self.entries[position:]]
            times = list(self.times(trial, begin))
            delayed = zip(trial[first:], times[first:], strict=True)
            if all(other is entry or _in_time(other, span, clock) for other, span in delayed):
                entry.start, entry.end = times[position]
                self.entries = trial
                return
        raise AssertionError("at the end nobody is overtaken")

    def _places(self, entry: QueueEntry) -> Iterator[tuple[int, object, int]]:
        """Yield possible positions for ``entry``, the best first, each with its batch. The third
        value is the number of the first delayed entry."""
        end, kind = len(self.entries), (entry.group, entry.shape)
        alike_numbers = [
            number
            for number, other in enumerate(self.entries)
            if (other.group, other.shape) == kind
        ]
        if alike_numbers:
            last = self.entries[alike_numbers[-1]]
            batch = [
                number for number, other in enumerate(self.entries) if other.batch is last.batch
            ]
            # without plans the delays of others are unknown
            are_planned = all(
                cost.segments or cost.concurrent_end_seconds for cost in (entry.cost, last.cost)
            )
            if (
                are_planned
                and last.batch is not None
                and sum(self.entries[number].runs for number in batch) + entry.runs <= MOST_TOGETHER
            ):
                yield batch[-1] + 1, last.batch, batch[0]
        best_position = (
            alike_numbers[-1] + 1
            if alike_numbers
            else 0
            if self.warm_shapes.get(entry.group) == entry.shape
            else end
        )
        for position in dict.fromkeys((best_position, end)):
            yield position, object(), position

    def pop(self) -> list[QueueEntry]:
        """Remove and return the next entry or batch, and update ``warm_shapes``."""
        batch = _next_batch(self.entries[:MOST_TOGETHER], self.warm_shapes)
        del self.entries[: len(batch)]
        self.warm_shapes = _warm_after(batch, self.warm_shapes)
        return batch

    def remove(self, item: Any) -> None:
        self.entries = [entry for entry in self.entries if entry.item is not item]


def _in_time(entry: QueueEntry, times: tuple[float, float], clock: float) -> bool:
    """Whether ``entry`` at ``times`` (start, end) keeps its promise, within `PATIENCE`."""
    patience = PATIENCE * max(0.0, entry.start - clock)
    return times[0] <= entry.start + patience and times[1] <= entry.end + patience


def go_together(entries: Sequence[QueueEntry], warm: Mapping[Hashable, Hashable]) -> bool:
    """Whether ``entries`` are faster as a batch, including the reload of the next weights."""
    first, runs = entries[0], sum(entry.runs for entry in entries)
    cost, has_weights = first.cost, is_warm(first, warm)
    if first.batch is None or not (cost.segments or cost.concurrent_end_seconds) or runs == 1:
        return False
    leaves = 0.0 if cost.concurrent_end_seconds else cost.first_seconds - cost.again_seconds
    return (
        cost.end_seconds(runs, has_weights)[-1] + leaves
        < cost.run_seconds(has_weights) + (runs - 1) * cost.again_seconds
    )


def is_warm(entry: QueueEntry, warm: Mapping[Hashable, Hashable]) -> bool:
    """Whether the weights of ``entry`` are on the device."""
    return warm.get(entry.group) == entry.shape


def _next_batch(
    entries: Sequence[QueueEntry], warm: Mapping[Hashable, Hashable]
) -> list[QueueEntry]:
    """Return the entries that run next: a batch from the head of ``entries`` if faster, else
    one."""
    number = next(
        (number for number, other in enumerate(entries) if other.batch is not entries[0].batch),
        len(entries),
    )
    batch = list(entries[: number if entries[0].batch is not None else 1])
    return batch if go_together(batch, warm) else batch[:1]


def _ends(entries: Sequence[QueueEntry], warm: Mapping[Hashable, Hashable]) -> list[float]:
    """Return when each of ``entries``, run next, ends, in seconds from their start."""
    cost, ends, runs, has_weights = entries[0].cost, list[float](), 0, is_warm(entries[0], warm)
    if not go_together(entries, warm):
        return [cost.run_seconds(has_weights) + (entries[0].runs - 1) * cost.again_seconds]
    run_ends = cost.end_seconds(sum(entry.runs for entry in entries), has_weights)
    for entry in entries:
        runs += entry.runs
        ends.append(run_ends[runs - 1])
    return ends


def _warm_after(
    entries: Sequence[QueueEntry], warm: Mapping[Hashable, Hashable]
) -> dict[Hashable, Hashable]:
    """Return the weights on the device after ``entries``, run next."""
    entry = entries[0]
    resident = {
        group: shape
        for group, shape in warm.items()
        if group in entry.resident_groups and group != entry.group
    }
    leaves = entry.cost.concurrent_end_seconds is None and go_together(entries, warm)
    return resident if leaves else {**resident, entry.group: entry.shape}
