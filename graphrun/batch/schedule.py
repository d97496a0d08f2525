"""In which order many items pass the stages: item by item, stage by stage, or something between, whichever is predicted fastest.

    item by item      (encode denoise decode)1 (encode denoise decode)2 ...        one session of all stages
    stage by stage    encode1..n | denoise1..n | decode1..n                        a session for each stage; values wait between
    between           encode1..n | (denoise decode)1 (denoise decode)2 ...

Each leg is a session that the planner plans; a course is a cut of the stages into legs. Values that wait lie in RAM that no leg
needs, then on disk; where both are short, items pass in groups. Knows no weights and no device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from graphrun.graph.graph import Graph
from graphrun.model.precomputed import without
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.solve.infeasible import Infeasible
from graphrun.verify.simulate import Simulation, simulate

Solve = Callable[[Problem], Solution]


@dataclass(frozen=True, slots=True)
class Segment:
    """Some stages in a row, planned as a session: ``graph`` has these alone, ``precomputed`` and outputs at its ends."""

    stages: tuple[str, ...]
    graph: Graph
    solution: Solution
    simulation: Simulation

    def seconds(self, runs: int) -> float:
        """Predicted for a session of ``runs`` runs; 0 for none."""
        further = self.simulation.again_seconds if self.simulation.again else self.simulation.seconds
        return self.simulation.seconds + (runs - 1) * further if runs else 0.0

    def moved_bytes(self, runs: int) -> int:
        """Weights copied to the device in them."""
        further = self.simulation.again_moved_bytes if self.simulation.again else self.simulation.moved_bytes
        return self.simulation.moved_bytes + (runs - 1) * further if runs else 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Parts in order, for groups of ``group`` items. ``seconds`` and ``moved_bytes`` are predicted for all items; ``waiting_bytes``
    wait between two legs at most, ``room_bytes`` of them in RAM."""

    segments: tuple[Segment, ...]
    requests: int
    group: int
    seconds: float
    moved_bytes: int
    waiting_bytes: int
    room_bytes: int

    @property
    def name(self) -> str:
        """``request by request``, ``stage by stage``, else the legs: ``encode | denoise decode``."""
        if len(self.segments) == 1:
            return "item by item" if self.requests > 1 or len(self.segments[0].stages) == 1 else "one run"
        if all(len(segment.stages) == 1 for segment in self.segments):
            return "stage by stage"
        return " | ".join(" ".join(segment.stages) for segment in self.segments)


def schedules(graph: Graph, problem: Problem, counts: Mapping[str, int], requests: int, solve: Solve) -> list[Schedule]:
    """Every course of ``requests`` items, the predicted fastest first; of equal ones the one with fewer bytes moved, then fewer legs.

    ``counts``: how many of a stage's runs differ, so that outputs of the others are theirs; a stage with 0 is done already, and its
    outputs are given. Raises Infeasible where no course fits the budgets.
    """
    order = [stage.name for stage in graph.stages if counts[stage.name]]
    segments: dict[tuple[str, ...], Segment | Infeasible] = {}
    found = []
    for cut in _cuts(order):
        runs = [max(counts[name] for name in stages) for stages in cut]
        for stages, number in zip(cut, runs, strict=True):
            if stages not in segments:
                segments[stages] = _segment(graph, problem, stages, number, solve)
        chosen = [segments[stages] for stages in cut]
        if all(isinstance(segment, Segment) for segment in chosen):
            found.append(_schedule(problem, tuple(segment for segment in chosen if isinstance(segment, Segment)), runs, requests))
    if not found:
        raise next(segment for segment in segments.values() if isinstance(segment, Infeasible))
    return sorted(found, key=lambda schedule: (round(schedule.seconds, 9), schedule.moved_bytes, len(schedule.segments)))


def segment_of(graph: Graph, problem: Problem, stages: tuple[str, ...], runs: int) -> tuple[Graph, Problem]:
    """The graph and the problem of ``stages`` alone, as a session of ``runs`` runs."""
    own = graph.part(stages)
    precomputed = {reference.name for reference in own.precomputed}
    return own, replace(without(problem, stages, precomputed, own.digest), runs=runs)


def _segment(graph: Graph, problem: Problem, stages: tuple[str, ...], runs: int, solve: Solve) -> Segment | Infeasible:
    own, cut = segment_of(graph, problem, stages, runs)
    try:
        solution = solve(cut)
    except Infeasible as error:
        return error
    return Segment(stages, own, solution, simulate(solution.problem, solution.plan))


def _schedule(problem: Problem, segments: tuple[Segment, ...], runs: list[int], requests: int) -> Schedule:
    crossing = [_crossing_bytes(problem, segments[: number + 1], segments[number + 1 :]) for number in range(len(segments) - 1)]
    waiting = max(crossing, default=0)
    room = max(0, problem.ram_bytes - max(segment.simulation.host_peak_bytes for segment in segments))
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


def _crossing_bytes(problem: Problem, before: tuple[Segment, ...], behind: tuple[Segment, ...]) -> int:
    """Bytes of one item's values that are made in the legs ``before`` and read in those ``behind``."""
    made = {name for segment in before for name in segment.stages}
    read = {name for segment in behind for name in segment.stages}
    return sum(value.nbytes for value in problem.values if value.producer in made and read & set(value.consumers))


def _cuts(order: list[str]) -> Iterator[list[tuple[str, ...]]]:
    """Every way to cut ``order`` into legs."""
    if not order:
        return
    for length in range(len(order), 0, -1):
        head = tuple(order[:length])
        if length == len(order):
            yield [head]
        for rest in _cuts(order[length:]):
            yield [head, *rest]
