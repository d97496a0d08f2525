"""Schedules of a batch: how the stages are split into segments, each run for all requests before the next one begins.

    request by request    (encode denoise decode)1 (encode denoise decode)2 ...    one segment with all stages
    stage by stage        encode1..n | denoise1..n | decode1..n                    a segment per stage; values wait between them
    in between            encode1..n | (denoise decode)1 (denoise decode)2 ...

Each segment is planned as a session. The schedule with the least predicted time is chosen. Values wait in RAM that no segment
needs, then on disk; where both are short, the requests are run in groups. Pure: no torch, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from graphrun.graph.graph import Graph
from graphrun.model.precomputed import without
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.solve.infeasible import Infeasible

Solve = Callable[[Problem], Solution]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive stages, planned as a session.

    ``graph`` has only these stages: values of earlier stages are precomputed, values that later stages read are outputs.
    """

    stages: tuple[str, ...]
    graph: Graph
    solution: Solution

    def seconds(self, runs: int) -> float:
        """Predicted seconds of a session of ``runs`` runs; 0 for no runs."""
        simulation = self.solution.simulation
        further = simulation.again_seconds if simulation.again else simulation.seconds
        return simulation.seconds + (runs - 1) * further if runs else 0.0

    def moved_bytes(self, runs: int) -> int:
        """Bytes of weights copied to the device in a session of ``runs`` runs."""
        simulation = self.solution.simulation
        further = simulation.again_moved_bytes if simulation.again else simulation.moved_bytes
        return simulation.moved_bytes + (runs - 1) * further if runs else 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Segments in order, run for groups of ``group`` requests.

    ``seconds`` and ``moved_bytes`` are predicted for all requests. ``waiting_bytes``: the most that waits between two segments, of
    which ``room_bytes`` fit in RAM.
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
        """``request by request``, ``stage by stage``, ``one run``, else the segments: ``encode | denoise decode``."""
        if len(self.segments) == 1:
            return "request by request" if self.requests > 1 or len(self.segments[0].stages) == 1 else "one run"
        if all(len(segment.stages) == 1 for segment in self.segments):
            return "stage by stage"
        return " | ".join(" ".join(segment.stages) for segment in self.segments)


def schedules(graph: Graph, problem: Problem, counts: Mapping[str, int], requests: int, solve: Solve) -> list[Schedule]:
    """Every schedule of ``requests`` requests that fits, ordered by predicted seconds, then bytes moved, then number of segments.

    ``counts``: how many distinct runs each stage needs (equal requests share outputs); a stage with 0 needs none, since all of its
    outputs are precomputed. Raises Infeasible where no schedule fits the budgets.
    """
    order = [stage.name for stage in graph.stages if counts[stage.name]]
    segments: dict[tuple[str, ...], Segment | Infeasible] = {}
    found = []
    for parts in _partitions(order):
        runs = [max(counts[name] for name in stages) for stages in parts]
        for stages, number in zip(parts, runs, strict=True):
            if stages not in segments:
                segments[stages] = _segment(graph, problem, stages, number, solve)
        chosen = [segments[stages] for stages in parts]
        if all(isinstance(segment, Segment) for segment in chosen):
            found.append(_schedule(problem, tuple(segment for segment in chosen if isinstance(segment, Segment)), runs, requests))
    if not found:
        raise next(segment for segment in segments.values() if isinstance(segment, Infeasible))
    return sorted(found, key=lambda schedule: (round(schedule.seconds, 9), schedule.moved_bytes, len(schedule.segments)))


def segment_of(graph: Graph, problem: Problem, stages: tuple[str, ...], runs: int) -> tuple[Graph, Problem]:
    """The graph with only ``stages``, and its problem as a session of ``runs`` runs."""
    own = graph.part(stages)
    precomputed = {reference.name for reference in own.precomputed}
    return own, replace(without(problem, stages, precomputed, own.digest), runs=runs)


def _segment(graph: Graph, problem: Problem, stages: tuple[str, ...], runs: int, solve: Solve) -> Segment | Infeasible:
    own, part = segment_of(graph, problem, stages, runs)
    try:
        return Segment(stages, own, solve(part))
    except Infeasible as error:
        return error


def _schedule(problem: Problem, segments: tuple[Segment, ...], runs: list[int], requests: int) -> Schedule:
    crossing = [_crossing_bytes(problem, segments[: number + 1], segments[number + 1 :]) for number in range(len(segments) - 1)]
    waiting = max(crossing, default=0)
    room = max(0, problem.ram_bytes - max(segment.solution.simulation.host_peak_bytes for segment in segments))
    group = requests
    if waiting and problem.disk_bytes is not None:
        stored = max(
            sum(v.stored_bytes for c in segment.solution.problem.components for v in c.variants[:1]) for segment in segments
        )
        group = max(1, min(requests, (room + max(0, problem.disk_bytes - stored)) // waiting))
    sizes = [group] * (requests // group) + ([requests % group] if requests % group else [])
    pairs = [(segment, min(number, size)) for size in sizes for segment, number in zip(segments, runs, strict=True)]
    moving = sum(crossing) * (1 / problem.hardware.h2d_bytes_per_second + 1 / problem.hardware.d2h_bytes_per_second)
    return Schedule(
        segments,
        requests,
        group,
        sum(segment.seconds(number) for segment, number in pairs) + requests * moving,
        sum(segment.moved_bytes(number) for segment, number in pairs),
        waiting * group,
        room,
    )


def _crossing_bytes(problem: Problem, before: tuple[Segment, ...], after: tuple[Segment, ...]) -> int:
    """Bytes of one request's values that are made in the segments ``before`` and read in the segments ``after``."""
    made = {name for segment in before for name in segment.stages}
    read = {name for segment in after for name in segment.stages}
    return sum(value.nbytes for value in problem.values if value.producer in made and read & set(value.consumers))


def _partitions(order: list[str]) -> Iterator[list[tuple[str, ...]]]:
    """Every partition of ``order`` into consecutive parts."""
    if not order:
        return
    for length in range(len(order), 0, -1):
        head = tuple(order[:length])
        if length == len(order):
            yield [head]
        for tail in _partitions(order[length:]):
            yield [head, *tail]
