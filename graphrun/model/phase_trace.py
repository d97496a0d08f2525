"""What the dry run recorded of a phase's device memory: every allocation and release, in order.
Pure data.

prelude    before the phase's first call, where no phase came before
first      the first call of every component, and the code after it
steady     all further calls
"""

from __future__ import annotations

import functools
from bisect import bisect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

# (key, bytes): bytes > 0 allocates, 0 releases. In a `PhaseTrace` also (number of the call's kind,
# -1): a call.
Item = tuple[int, int]
CALL = -1
SCRATCH = -(2**40)  # keys of scratch are below; no recording has these
# of what repeats: least events, and how many distances between equal events are tried
SHORTEST, DISTANCES = (
    4,
    12,
)


@dataclass(frozen=True, slots=True)
class CallTrace:
    """One kind of call into ``component``. Every key is released before the end, except ``kept``
    ones, which the component reuses in its further calls and releases when the phase ends.
    ``results``: keys of what it returns. These stay where they are: behind the call, the phase
    allocates tensors of their sizes, in this order, which are the same ones."""

    component: str
    events: tuple[Item, ...]
    kept: tuple[int, ...] = ()
    results: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PhaseTrace:
    """One phase; empty where nothing was recorded. Keys are those of the whole recording, so a
    tensor may be allocated in one phase and released in a later one."""

    calls: tuple[CallTrace, ...] = ()
    first: tuple[Item, ...] = ()
    steady: tuple[Item, ...] = ()
    prelude: tuple[Item, ...] = ()

    def with_scratch(self, nbytes: Mapping[str, int]) -> PhaseTrace:
        """The trace where every call of a component takes so many bytes more while it runs."""
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
    """From event ``begin`` on, ``times`` times ``period`` events that are alike."""

    begin: int
    period: int
    times: int

    @property
    def end(self) -> int:
        """The first event behind all of them."""
        return self.begin + self.period * self.times


@functools.lru_cache(maxsize=256)
def repeats_in(events: tuple[Item, ...]) -> tuple[tuple[int, ...], tuple[Repeat, ...]]:
    """For each event the number of the one that allocated its tensor, its own where it allocates;
    and what repeats, in order: the blocks of a transformer do the same, one after another. Events
    are alike that allocate equally many bytes, or release what was allocated equally many events
    before."""
    import numpy as np  # a plan that is known is shown without it

    born = dict[int, int]()
    numbers = list[int]()
    kinds = dict[tuple[bool, int], int]()
    alike = np.empty(len(events), dtype=np.int64)
    for number, (key, nbytes) in enumerate(events):
        if nbytes:
            born[key] = number
        numbers.append(born[key])
        kind = (True, nbytes) if nbytes else (False, number - born[key])
        alike[number] = kinds.setdefault(kind, len(kinds))
    return tuple(numbers), _longest(alike)


def _longest(alike: np.typing.NDArray[np.int64]) -> tuple[Repeat, ...]:
    """Of the repeats in ``alike`` those that leave out most, none within another."""
    last = dict[int, int]()
    distances = Counter[int]()
    for number, kind in enumerate(alike.tolist()):
        if kind in last:
            distances[number - last[kind]] += 1
        last[kind] = number
    found = list[Repeat]()
    lengths = Counter({period: period * times for period, times in distances.items()})
    for period in {
        period for of in (distances, lengths) for period, _ in of.most_common(DISTANCES)
    }:
        if period < SHORTEST:
            continue
        breaks = [
            -1,
            *(alike[:-period] != alike[period:]).nonzero()[0].tolist(),
            len(alike) - period,
        ]
        for before, after in pairwise(breaks):
            if after - before > period:
                found.append(Repeat(before + 1, period, (after - before - 1 + period) // period))
    kept = list[Repeat]()  # in order
    for one in sorted(found, key=lambda of: (of.period - (of.end - of.begin), of.begin)):
        after = bisect(kept, one.begin, key=lambda of: of.begin)
        if (not after or kept[after - 1].end <= one.begin) and (
            after == len(kept) or one.end <= kept[after].begin
        ):
            kept.insert(after, one)
    return tuple(kept)
