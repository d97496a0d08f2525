"""Recording of a phase's device memory in the dry run: every allocation and release, in order.

prelude    before the phase's first call, if no phase came before
first      the first call of every component, and the code after it
steady     all further calls
"""

from __future__ import annotations

import functools
from bisect import bisect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import compress, count, pairwise
from operator import ne

# (key, bytes): more than 0 bytes allocates, 0 releases. In a `PhaseTrace` also (index of its
# `CallTrace`, CALL).
Item = tuple[int, int]
CALL = -1
SCRATCH = -(2**40)  # keys of scratch are below; no recording has such keys
# of repeats: fewest events, and number of distances between equal events to try
SHORTEST, DISTANCES = (
    4,
    12,
)


@dataclass(frozen=True, slots=True)
class CallTrace:
    """One kind of call into ``component``.

    Every key is released before the call ends, except ``results`` and ``persistent_keys``. The
    component reuses the latter in further calls and releases them when the phase ends. ``results``:
    keys of the returned tensors, which keep their memory: after the call, the phase allocates the
    same sizes in the same order.
    """

    component: str
    events: tuple[Item, ...]
    persistent_keys: tuple[int, ...] = ()
    results: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PhaseTrace:
    """One phase, or empty. Keys are unique in the recording: later phases release tensors."""

    calls: tuple[CallTrace, ...] = ()
    first: tuple[Item, ...] = ()
    steady: tuple[Item, ...] = ()
    prelude: tuple[Item, ...] = ()

    def with_scratch(self, nbytes: Mapping[str, int]) -> PhaseTrace:
        """Return the trace with ``nbytes`` (by component) more during every call."""
        extra = {name: n for name, n in nbytes.items() if n}
        if not extra:
            return self
        calls = (
            replace(
                call,
                events=(
                    (key := SCRATCH - len(call.events), extra[call.component]),
                    *call.events,
                    (key, 0),
                ),
            )
            if call.component in extra
            else call
            for call in self.calls
        )
        return replace(self, calls=tuple(calls))


@dataclass(frozen=True, slots=True)
class Repeat:
    """``period`` events that repeat ``times`` times from event ``begin`` on."""

    begin: int
    period: int
    times: int

    @property
    def end(self) -> int:
        """The first event after the repeats."""
        return self.begin + self.period * self.times


@functools.lru_cache(maxsize=256)
def repeats_in(events: tuple[Item, ...]) -> tuple[tuple[int, ...], tuple[Repeat, ...]]:
    """Return for each event the number of its tensor's allocation, and the repeats in order.

    The blocks of a transformer repeat the same events. Two events are alike if they allocate the
    same number of bytes, or release tensors allocated the same number of events before.
    """
    born = dict[int, int]()
    numbers = list[int]()
    kinds = dict[tuple[bool, int], int]()
    alike = list[int]()
    for number, (key, nbytes) in enumerate(events):
        if nbytes:
            born[key] = number
        numbers.append(born[key])
        kind = (True, nbytes) if nbytes else (False, number - born[key])
        alike.append(kinds.setdefault(kind, len(kinds)))
    return tuple(numbers), _longest(alike)


def _longest(alike: list[int]) -> tuple[Repeat, ...]:
    """Return the repeats in ``alike`` that skip the most events, without overlaps."""
    last = dict[int, int]()
    distances = Counter[int]()
    for number, kind in enumerate(alike):
        if kind in last:
            distances[number - last[kind]] += 1
        last[kind] = number
    candidates = list[Repeat]()
    lengths = Counter({period: period * times for period, times in distances.items()})
    for period in {
        period for counter in (distances, lengths) for period, _ in counter.most_common(DISTANCES)
    }:
        if period < SHORTEST:
            continue
        breaks = [
            -1,
            *compress(count(), map(ne, alike, alike[period:])),
            len(alike) - period,
        ]
        for previous, next_break in pairwise(breaks):
            if next_break - previous > period:
                candidates.append(
                    Repeat(previous + 1, period, (next_break - previous - 1 + period) // period)
                )
    repeats = list[Repeat]()  # in order
    for candidate in sorted(
        candidates, key=lambda repeat: (repeat.period - (repeat.end - repeat.begin), repeat.begin)
    ):
        next_break = bisect(repeats, candidate.begin, key=lambda repeat: repeat.begin)
        if (not next_break or repeats[next_break - 1].end <= candidate.begin) and (
            next_break == len(repeats) or candidate.end <= repeats[next_break].begin
        ):
            repeats.insert(next_break, candidate)
    return tuple(repeats)
