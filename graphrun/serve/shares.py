"""Which graphs keep their weights on the device, each within a share of the budgets. Pure.

    recent runs   A B A B B A C ...
    {}               take turns: the running graph has the whole budgets, and every change of graph
                     reloads weights
    {A: .5, B: .5}   A and B find their weights but stream more; C takes everything, and both reload
                     after it

A share applies to VRAM, RAM, page-locked RAM and disk alike. Each graph is planned within its
share, and the shares add up to at most 1, so all graphs together stay within the budgets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product

from graphrun.serve.line import Cost

SHARES = (0.25, 0.5, 0.75)
WHOLE = 1.0
RECENT = 64  # latest runs on which arrangements are compared

Arrangement = Mapping[str, float]
"""The share of each graph, by name. A missing graph takes turns with the whole budgets."""


def arrangements(runs: Sequence[str]) -> Iterator[Arrangement]:
    """Yield every arrangement of the most frequent graphs in ``runs``; shares add up to 1 at
    most."""
    graphs = sorted(graph for graph, _ in Counter(runs).most_common(int(WHOLE / SHARES[0])))
    for shares in product((0.0, *SHARES), repeat=len(graphs)):
        arrangement = {graph: share for graph, share in zip(graphs, shares, strict=True) if share}
        if len(arrangement) != 1 and sum(arrangement.values()) <= WHOLE:
            yield arrangement


def seconds_of(
    arrangement: Arrangement,
    runs: Sequence[str],
    costs: Mapping[tuple[str, float], Cost],
    warm: Collection[str] = (),
) -> float:
    """Return the predicted seconds of ``runs``, one after another. ``costs``: by graph and share.
    ``warm``: graphs whose weights are on the device."""
    total, warm = 0.0, set(warm)
    for graph in runs:
        cost = costs[graph, arrangement.get(graph, WHOLE)]
        total += cost.again_seconds if graph in warm else cost.first_seconds
        warm = {graph} | (warm & arrangement.keys() if graph in arrangement else set())
    return total


def best(
    current: Arrangement, runs: Sequence[str], costs: Mapping[tuple[str, float], Cost]
) -> Arrangement:
    """Return the arrangement with the fewest predicted seconds, if the next runs are like ``runs``.

    A change of arrangement starts with an empty device. A share without costs is skipped: it does
    not fit, or its plan is not ready.
    """
    candidates = [
        candidate
        for candidate in arrangements(runs)
        if candidate != current and all(item in costs for item in candidate.items())
    ]
    warm = current or runs[-1:]
    return min(
        [current, *candidates],
        key=lambda candidate: seconds_of(
            candidate, runs, costs, warm if candidate is current else ()
        ),
    )
