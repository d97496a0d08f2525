"""Schedules of a batch: how the stages are split into segments, each run for all requests before
the next one begins.

    request by request    (encode denoise decode)1 (encode denoise decode)2 ...    one segment with
    all stages stage by stage        encode1..n | denoise1..n | decode1..n                    a
    segment per stage; values wait between them in between            encode1..n | (denoise decode)1
    (denoise decode)2 ...

Each segment is planned as a session. The schedule with the least predicted time is chosen. Values
wait in RAM that no segment needs, then on disk; where both are short, the requests are run in
groups. Pure: no torch, no I/O.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from graphrun.graph.graph import Graph
from graphrun.model.precomputed import without
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.solve.infeasible import Infeasible

Solve = Callable[[Problem], Solution]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive stages, planned as a session.

    ``graph`` has only these stages: values of earlier stages are precomputed, values that later
    stages read are outputs.
    """

    stages: tuple[str, ...]
    graph: Graph
    solution: Solution

    def total(self, runs: int) -> tuple[float, int]:
        """Predicted seconds, and bytes of weights copied to the device, of a session of ``runs``
        runs; 0 for no runs."""
        of = self.solution.simulation
        seconds, nbytes = (
            (of.again_seconds, of.again_moved_bytes) if of.again else (of.seconds, of.moved_bytes)
        )
        return (
            (of.seconds + (runs - 1) * seconds, of.moved_bytes + (runs - 1) * nbytes)
            if runs
            else (0.0, 0)
        )


@dataclass(frozen=True, slots=True)
class Schedule:
    """Segments in order, run for groups of ``group`` requests.

    ``seconds`` and ``moved_bytes`` are predicted for all requests. ``waiting_bytes``: the most that
    waits between two segments, of which ``room_bytes`` fit in RAM.
    """

    segments: tuple[Segment, ...]
    requests: int
    group: int
    seconds: float
    moved_bytes: int
    waiting_bytes: int
    room_bytes: int

    @property
    def name(self) -> str:
        """``request by request``, ``stage by stage``, ``one run``, else the segments: ``encode |
        denoise decode``."""
        if len(self.segments) == 1:
            return (
                "request by request"
                if self.requests > 1 or len(self.segments[0].stages) == 1
                else "one run"
            )
        if all(len(segment.stages) == 1 for segment in self.segments):
            return "stage by stage"
        return " | ".join(" ".join(segment.stages) for segment in self.segments)


def schedules(
    graph: Graph,
    problem: Problem,
    counts: Mapping[str, int],
    requests: int,
    solve: Solve,
    segments: Sequence[tuple[str, ...]] | None = None,
) -> list[Schedule]:
    """Every schedule of ``requests`` requests that fits, ordered by predicted seconds, then bytes
    moved, then number of segments.

    ``segments``: the stages of each, where that is decided; else every split is tried. ``counts``:
    how many distinct runs each stage needs (equal requests share outputs); a stage with 0 needs
    none, since all of its outputs are precomputed. Raises Infeasible where no schedule fits the
    budgets.
    """
    refused: list[Infeasible] = []

    @functools.cache
    def segment(stages: tuple[str, ...]) -> Segment | None:
        own, part = segment_of(graph, problem, stages, max(counts[name] for name in stages))
        try:
            return Segment(stages, own, solve(part))
        except Infeasible as error:
            refused.append(error)
            return None

    found = []
    every = _partitions([stage.name for stage in graph.stages if counts[stage.name]])
    if segments is not None:
        every = iter(
            [[part for each in segments if (part := tuple(name for name in each if counts[name]))]]
        )
    for parts in every:
        solved = [segment(stages) for stages in parts]
        if all(solved):
            chosen = [each for each in solved if each is not None]
            found.append(_schedule(problem, chosen, counts, requests))
    if not found:
        raise refused[0]
    return sorted(
        found,
        key=lambda schedule: (
            round(schedule.seconds, 9),
            schedule.moved_bytes,
            len(schedule.segments),
        ),
    )


def segment_of(
    graph: Graph, problem: Problem, stages: tuple[str, ...], runs: int
) -> tuple[Graph, Problem]:
    """The graph with only ``stages``, and its problem as a session of ``runs`` runs."""
    own = graph.part(stages)
    precomputed = {reference.name for reference in own.precomputed}
    return own, replace(without(problem, stages, precomputed, own.digest), runs=runs)


def _schedule(
    problem: Problem, segments: Sequence[Segment], counts: Mapping[str, int], requests: int
) -> Schedule:
    transfer = [
        _transfer_bytes(problem, segments[:number], segments[number:])
        for number in range(1, len(segments))
    ]
    waiting = max(transfer, default=0)
    room = max(
        0,
        problem.ram_bytes
        - max(segment.solution.simulation.host_peak_bytes for segment in segments),
    )
    group = requests
    if waiting and problem.disk_bytes is not None:
        stored = max(
            sum(v.stored_bytes for c in segment.solution.problem.components for v in c.variants[:1])
            for segment in segments
        )
        group = max(1, min(requests, (room + max(0, problem.disk_bytes - stored)) // waiting))
    runs = [(segment, max(counts[name] for name in segment.stages)) for segment in segments]
    sizes = [min(group, requests - begin) for begin in range(0, requests, group)]
    totals = [segment.total(min(number, size)) for size in sizes for segment, number in runs]
    moving = sum(transfer) * (
        1 / problem.hardware.h2d_bytes_per_second + 1 / problem.hardware.d2h_bytes_per_second
    )
    return Schedule(
        segments=tuple(segments),
        requests=requests,
        group=group,
        seconds=sum(seconds for seconds, _ in totals) + requests * moving,
        moved_bytes=sum(nbytes for _, nbytes in totals),
        waiting_bytes=waiting * group,
        room_bytes=room,
    )


def _transfer_bytes(problem: Problem, before: Sequence[Segment], after: Sequence[Segment]) -> int:
    """Bytes of one request's values that are made in the segments ``before`` and read in the
    segments ``after``."""
    made, read = (
        {name for segment in segments for name in segment.stages} for segments in (before, after)
    )
    return sum(
        value.nbytes
        for value in problem.values
        if value.producer in made and read & set(value.consumers)
    )


def _partitions(order: Sequence[str]) -> Iterator[list[tuple[str, ...]]]:
    """Every partition of ``order`` into consecutive parts, those with few and with long first parts
    first."""
    for count in range(len(order)):
        for cuts in sorted(combinations(range(1, len(order)), count), reverse=True):
            yield [tuple(order[begin:end]) for begin, end in pairwise((0, *cuts, len(order)))]
