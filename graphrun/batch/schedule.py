"""Schedules of a batch: its stages in segments, each of which runs all requests before the next.

    request by request    (encode denoise decode)1 (encode denoise decode)2 ...
                          one segment with all stages
    stage by stage        encode1..n | denoise1..n | decode1..n
                          one segment per stage; values wait between the segments
    in between            encode1..n | (denoise decode)1 (denoise decode)2 ...

Each segment is planned as a session. The schedule with the least predicted time is chosen. Values
wait in RAM that no segment needs, then on disk. If both are short, the requests run in groups.
Pure: no torch, no I/O.
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

SolveFunction = Callable[[Problem], Solution]


@dataclass(frozen=True, slots=True)
class StageSegment:
    """Consecutive stages, planned as a session. ``graph`` has only these stages: values of earlier
    stages are precomputed, values that later stages read are outputs."""

    stages: tuple[str, ...]
    graph: Graph
    solution: Solution

    def total(self, runs: int) -> tuple[float, int]:
        """Return the predicted seconds and copied bytes of a session of ``runs`` runs."""
        simulation = self.solution.simulation
        seconds, nbytes = (
            (simulation.further_seconds, simulation.further_moved_bytes)
            if simulation.further_slots
            else (simulation.seconds, simulation.moved_bytes)
        )
        return (
            (
                simulation.seconds + (runs - 1) * seconds,
                simulation.moved_bytes + (runs - 1) * nbytes,
            )
            if runs
            else (0.0, 0)
        )


@dataclass(frozen=True, slots=True)
class Schedule:
    """Segments in order, run for groups of ``group`` requests.

    ``seconds`` and ``moved_bytes``: predicted, for all requests. ``waiting_bytes``: the most that
    waits between two segments; ``room_bytes``: the RAM for it, on a CPU the budget less the plans'
    use.
    """

    segments: tuple[StageSegment, ...]
    requests: int
    group: int
    seconds: float
    moved_bytes: int
    waiting_bytes: int
    room_bytes: int

    @property
    def name(self) -> str:
        """``request by request``, ``stage by stage``, ``one run`` or ``encode | denoise
        decode``."""
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
    solve: SolveFunction,
    segments: Sequence[tuple[str, ...]] | None = None,
) -> list[Schedule]:
    """Return every schedule that fits, by predicted seconds, then bytes moved, then segments.

    ``segments``: the stages of each, if fixed; by default every split is tried. ``counts``: the
    distinct runs that each stage needs (equal requests share outputs); a stage with 0 is
    precomputed. Raises Infeasible if no schedule fits the budgets.
    """
    failures: list[Infeasible] = []

    @functools.cache
    def segment(stages: tuple[str, ...]) -> StageSegment | None:
        segment_graph, part = segment_of(
            graph, problem, stages, max(counts[name] for name in stages)
        )
        try:
            return StageSegment(stages, segment_graph, solve(part))
        except Infeasible as error:
            failures.append(error)
            return None

    candidates = []
    partitions = _partitions([stage.name for stage in graph.stages if counts[stage.name]])
    if segments is not None:
        partitions = iter(
            [
                [
                    part
                    for names in segments
                    if (part := tuple(name for name in names if counts[name]))
                ]
            ]
        )
    for parts in partitions:
        segment_plans = [segment(stages) for stages in parts]
        if all(segment_plans):
            plan_segments = [plan for plan in segment_plans if plan is not None]
            candidates.append(_schedule(problem, plan_segments, counts, requests))
    if not candidates:
        raise failures[0]
    return sorted(
        candidates,
        key=lambda schedule: (
            round(schedule.seconds, 9),
            schedule.moved_bytes,
            len(schedule.segments),
        ),
    )


def segment_of(
    graph: Graph, problem: Problem, stages: tuple[str, ...], runs: int
) -> tuple[Graph, Problem]:
    """Return the graph with only ``stages``, and its problem as a session of ``runs`` runs."""
    segment_graph = graph.part(stages)
    precomputed = {reference.name for reference in segment_graph.precomputed}
    return segment_graph, replace(
        without(problem, stages, precomputed, segment_graph.digest), runs=runs
    )


def _schedule(
    problem: Problem, segments: Sequence[StageSegment], counts: Mapping[str, int], requests: int
) -> Schedule:
    transfer = [
        _transfer_bytes(problem, segments[:number], segments[number:])
        for number in range(1, len(segments))
    ]
    waiting_bytes = max(transfer, default=0)
    simulations = [segment.solution.simulation for segment in segments]
    room = max(
        0,
        problem.effective_bytes - max(simulation.peak_bytes for simulation in simulations)
        if problem.hardware.unified
        else problem.ram_bytes - max(simulation.host_peak_bytes for simulation in simulations),
    )
    group = requests
    if waiting_bytes and problem.disk_bytes is not None:
        stored_bytes = max(
            sum(v.stored_bytes for c in segment.solution.problem.components for v in c.variants[:1])
            for segment in segments
        )
        group = max(
            1, min(requests, (room + max(0, problem.disk_bytes - stored_bytes)) // waiting_bytes)
        )
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
        waiting_bytes=waiting_bytes * group,
        room_bytes=room,
    )


def _transfer_bytes(
    problem: Problem,
    earlier_segments: Sequence[StageSegment],
    later_segments: Sequence[StageSegment],
) -> int:
    """Return the bytes of a request's values that earlier segments make and later ones read."""
    producers, consumers = (
        {name for segment in segments for name in segment.stages}
        for segments in (earlier_segments, later_segments)
    )
    return sum(
        value.nbytes
        for value in problem.values
        if value.producer in producers and consumers & set(value.consumers)
    )


def _partitions(order: Sequence[str]) -> Iterator[list[tuple[str, ...]]]:
    """Yield every partition of ``order`` into consecutive parts: few and long ones first."""
    for count in range(len(order)):
        for cuts in sorted(combinations(range(1, len(order)), count), reverse=True):
            yield [tuple(order[begin:end]) for begin, end in pairwise((0, *cuts, len(order)))]
