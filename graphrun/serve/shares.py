"""Which graphs stay on the device together, each within a share of the budgets, and which have all
of them in turn. Pure.

    runs of late     A B A B B A C ... {}               each in turn: whoever runs has all of the
    budgets, and every change of graph loads weights again {A: .5, B: .5}   A and B find their
    weights and stream more; C takes everything, and both load again after it

Shares are of VRAM, RAM, page-locked RAM and disk alike, and add up to 1 at most: each graph is
planned within its own, so that all of them are within the budgets whoever runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product

from graphrun.serve.line import Cost

SHARES = (0.25, 0.5, 0.75)
WHOLE = 1.0
RECENT = 64  # runs by which arrangements are judged

Arrangement = Mapping[str, float]
"""Name of a graph -> its share. A graph that is not there has all in turn."""


def arrangements(runs: Sequence[str]) -> Iterator[Arrangement]:
    """Every arrangement of the graphs most often among ``runs``: as many as have shares at once."""
    graphs = sorted(graph for graph, _ in Counter(runs).most_common(int(WHOLE / SHARES[0])))
    for shares in product((0.0, *SHARES), repeat=len(graphs)):
        held = {graph: share for graph, share in zip(graphs, shares, strict=True) if share}
        if len(held) != 1 and sum(held.values()) <= WHOLE:
            yield held


def seconds_of(
    arrangement: Arrangement,
    runs: Sequence[str],
    costs: Mapping[tuple[str, float], Cost],
    warm: Collection[str] = (),
) -> float:
    """Predicted seconds of ``runs``, one after another. ``costs``: by graph and share. ``warm``:
    graphs whose weights are there."""
    total, warm = 0.0, set(warm)
    for graph in runs:
        cost = costs[graph, arrangement.get(graph, WHOLE)]
        total += cost.again_seconds if graph in warm else cost.first_seconds
        warm = {graph} | (warm & arrangement.keys() if graph in arrangement else set())
    return total


def best(
    now: Arrangement, runs: Sequence[str], costs: Mapping[tuple[str, float], Cost]
) -> Arrangement:
    """The arrangement with the least predicted seconds if the next runs are as ``runs`` were. A
    change begins with an empty device.

    Shares that ``costs`` lacks are not among the choices: nothing fits them, or their plan is not
    there yet.
    """
    known = [
        each
        for each in arrangements(runs)
        if each != now and all(item in costs for item in each.items())
    ]
    there = now or runs[-1:]
    return min(
        [now, *known], key=lambda each: seconds_of(each, runs, costs, there if each is now else ())
    )
