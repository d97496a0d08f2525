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
from graphrun.planner.given import without
from graphrun.planner.infeasible import Infeasible
from graphrun.planner.problem import Problem
from graphrun.planner.simulate import Simulation, simulate
from graphrun.planner.solution import Solution

Solve = Callable[[Problem], Solution]


@dataclass(frozen=True, slots=True)
class Leg:
    """Some stages in a row, planned as a session: ``graph`` has these alone, ``given`` and outputs at its ends."""

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
class Course:
    """Parts in order, for groups of ``group`` items. ``seconds`` and ``moved_bytes`` are predicted for all items; ``waiting_bytes``
    wait between two legs at most, ``room_bytes`` of them in RAM."""

    legs: tuple[Leg, ...]
    items: int
    group: int
    seconds: float
    moved_bytes: int
    waiting_bytes: int
    room_bytes: int

    @property
    def name(self) -> str:
        """``item by item``, ``stage by stage``, else the legs: ``encode | denoise decode``."""
        if len(self.legs) == 1:
            return "item by item" if self.items > 1 or len(self.legs[0].stages) == 1 else "one run"
        if all(len(leg.stages) == 1 for leg in self.legs):
            return "stage by stage"
        return " | ".join(" ".join(leg.stages) for leg in self.legs)


def courses(graph: Graph, problem: Problem, counts: Mapping[str, int], items: int, solve: Solve) -> list[Course]:
    """Every course of ``items`` items, the predicted fastest first; of equal ones the one with fewer bytes moved, then fewer legs.

    ``counts``: how many of a stage's runs differ, so that outputs of the others are theirs; a stage with 0 is done already, and its
    outputs are given. Raises Infeasible where no course fits the budgets.
    """
    order = [stage.name for stage in graph.stages if counts[stage.name]]
    legs: dict[tuple[str, ...], Leg | Infeasible] = {}
    found = []
    for cut in _cuts(order):
        runs = [max(counts[name] for name in stages) for stages in cut]
        for stages, number in zip(cut, runs, strict=True):
            if stages not in legs:
                legs[stages] = _leg(graph, problem, stages, number, solve)
        chosen = [legs[stages] for stages in cut]
        if all(isinstance(leg, Leg) for leg in chosen):
            found.append(_course(problem, tuple(leg for leg in chosen if isinstance(leg, Leg)), runs, items))
    if not found:
        raise next(leg for leg in legs.values() if isinstance(leg, Infeasible))
    return sorted(found, key=lambda course: (round(course.seconds, 9), course.moved_bytes, len(course.legs)))


def leg_of(graph: Graph, problem: Problem, stages: tuple[str, ...], runs: int) -> tuple[Graph, Problem]:
    """The graph and the problem of ``stages`` alone, as a session of ``runs`` runs."""
    own = graph.part(stages)
    given = {reference.name for reference in own.given}
    return own, replace(without(problem, stages, given, own.digest), runs=runs)


def _leg(graph: Graph, problem: Problem, stages: tuple[str, ...], runs: int, solve: Solve) -> Leg | Infeasible:
    own, cut = leg_of(graph, problem, stages, runs)
    try:
        solution = solve(cut)
    except Infeasible as error:
        return error
    return Leg(stages, own, solution, simulate(solution.problem, solution.plan))


def _course(problem: Problem, legs: tuple[Leg, ...], runs: list[int], items: int) -> Course:
    crossing = [_crossing_bytes(problem, legs[: number + 1], legs[number + 1 :]) for number in range(len(legs) - 1)]
    waiting = max(crossing, default=0)
    room = max(0, problem.ram_bytes - max(leg.simulation.host_peak_bytes for leg in legs))
    group = items
    if waiting and problem.disk_bytes is not None:
        stored = max(sum(v.stored_bytes for c in leg.solution.problem.components for v in c.variants[:1]) for leg in legs)
        group = max(1, min(items, (room + max(0, problem.disk_bytes - stored)) // waiting))
    sizes = [group] * (items // group) + ([items % group] if items % group else [])
    pairs = [(leg, min(number, size)) for size in sizes for leg, number in zip(legs, runs, strict=True)]
    moving = sum(crossing) * (1 / problem.hardware.h2d_bytes_per_second + 1 / problem.hardware.d2h_bytes_per_second)
    return Course(
        legs,
        items,
        group,
        sum(leg.seconds(number) for leg, number in pairs) + items * moving,
        sum(leg.moved_bytes(number) for leg, number in pairs),
        waiting * group,
        room,
    )


def _crossing_bytes(problem: Problem, before: tuple[Leg, ...], behind: tuple[Leg, ...]) -> int:
    """Bytes of one item's values that are made in the legs ``before`` and read in those ``behind``."""
    made = {name for leg in before for name in leg.stages}
    read = {name for leg in behind for name in leg.stages}
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
