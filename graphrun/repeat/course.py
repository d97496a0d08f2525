"""In which order many items pass the stages: item by item, stage by stage, or something between, whichever is predicted fastest.

    item by item      (encode denoise decode)1 (encode denoise decode)2 ...        one session of all stages
    stage by stage    encode1..n | denoise1..n | decode1..n                        a session for each stage; values wait between
    between           encode1..n | (denoise decode)1 (denoise decode)2 ...

Each part is a session that the planner plans; a course is a cut of the stages into parts. Values that wait lie in RAM that no part
needs, then on disk; where both are short, items pass in groups. Knows no weights and no device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from graphrun.graph.graph import Graph
from graphrun.planner.given import without
from graphrun.planner.infeasible import Infeasible
from graphrun.planner.problem import Problem
from graphrun.planner.simulate import Simulation, simulate
from graphrun.planner.solution import Solution

Solve = Callable[[Problem], Solution]


@dataclass(frozen=True, slots=True)
class Part:
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
    wait between two parts at most, ``room_bytes`` of them in RAM."""

    parts: tuple[Part, ...]
    items: int
    group: int
    seconds: float
    moved_bytes: int
    waiting_bytes: int
    room_bytes: int

    @property
    def name(self) -> str:
        """``item by item``, ``stage by stage``, else the parts: ``encode | denoise decode``."""
        if len(self.parts) == 1:
            return "item by item" if self.items > 1 or len(self.parts[0].stages) == 1 else "one run"
        if all(len(part.stages) == 1 for part in self.parts):
            return "stage by stage"
        return " | ".join(" ".join(part.stages) for part in self.parts)


def courses(graph: Graph, problem: Problem, counts: Mapping[str, int], items: int, solve: Solve) -> list[Course]:
    """Every course of ``items`` items, the predicted fastest first; of equal ones the one with fewer bytes moved, then fewer parts.

    ``counts``: how many of a stage's runs differ, so that outputs of the others are theirs; a stage with 0 is done already, and its
    outputs are given. Raises Infeasible where no course fits the budgets.
    """
    order = [stage.name for stage in graph.stages if counts[stage.name]]
    parts: dict[tuple[str, ...], Part | Infeasible] = {}
    found = []
    for cut in _cuts(order):
        runs = [max(counts[name] for name in stages) for stages in cut]
        for stages, number in zip(cut, runs, strict=True):
            if stages not in parts:
                parts[stages] = _part(graph, problem, stages, number, solve)
        chosen = [parts[stages] for stages in cut]
        if all(isinstance(part, Part) for part in chosen):
            found.append(_course(problem, tuple(part for part in chosen if isinstance(part, Part)), runs, items))
    if not found:
        raise next(part for part in parts.values() if isinstance(part, Infeasible))
    return sorted(found, key=lambda course: (round(course.seconds, 9), course.moved_bytes, len(course.parts)))


def part_of(graph: Graph, problem: Problem, stages: tuple[str, ...], runs: int) -> tuple[Graph, Problem]:
    """The graph and the problem of ``stages`` alone, as a session of ``runs`` runs."""
    own = graph.part(stages)
    given = {reference.name for reference in own.given}
    return own, replace(without(problem, stages, given, own.digest), runs=runs)


def _part(graph: Graph, problem: Problem, stages: tuple[str, ...], runs: int, solve: Solve) -> Part | Infeasible:
    own, cut = part_of(graph, problem, stages, runs)
    try:
        solution = solve(cut)
    except Infeasible as error:
        return error
    return Part(stages, own, solution, simulate(solution.problem, solution.plan))


def _course(problem: Problem, parts: tuple[Part, ...], runs: list[int], items: int) -> Course:
    crossing = [_crossing_bytes(problem, parts[: number + 1], parts[number + 1 :]) for number in range(len(parts) - 1)]
    waiting = max(crossing, default=0)
    room = max(0, problem.ram_bytes - max(part.simulation.host_peak_bytes for part in parts))
    group = items
    if waiting and problem.disk_bytes is not None:
        stored = max(sum(v.stored_bytes for c in part.solution.problem.components for v in c.variants[:1]) for part in parts)
        group = max(1, min(items, (room + max(0, problem.disk_bytes - stored)) // waiting))
    sizes = [group] * (items // group) + ([items % group] if items % group else [])
    pairs = [(part, min(number, size)) for size in sizes for part, number in zip(parts, runs, strict=True)]
    moving = sum(crossing) * (1 / problem.hardware.h2d_bytes_per_second + 1 / problem.hardware.d2h_bytes_per_second)
    return Course(
        parts,
        items,
        group,
        sum(part.seconds(number) for part, number in pairs) + items * moving,
        sum(part.moved_bytes(number) for part, number in pairs),
        waiting * group,
        room,
    )


def _crossing_bytes(problem: Problem, before: tuple[Part, ...], behind: tuple[Part, ...]) -> int:
    """Bytes of one item's values that are made in the parts ``before`` and read in those ``behind``."""
    made = {name for part in before for name in part.stages}
    read = {name for part in behind for name in part.stages}
    return sum(value.nbytes for value in problem.values if value.producer in made and read & set(value.consumers))


def _cuts(order: list[str]) -> Iterator[list[tuple[str, ...]]]:
    """Every way to cut ``order`` into parts."""
    if not order:
        return
    for length in range(len(order), 0, -1):
        head = tuple(order[:length])
        if length == len(order):
            yield [head]
        for rest in _cuts(order[length:]):
            yield [head, *rest]


def as_json(course: Course, runs: Mapping[str, int]) -> dict[str, Any]:
    """What a screen or ``--json`` shows of a course."""
    return {
        "name": course.name,
        "items": course.items,
        "group": course.group,
        "predicted_seconds": course.seconds,
        "moved_bytes": course.moved_bytes,
        "waiting_bytes": course.waiting_bytes,
        "parts": [{"stages": list(part.stages), "runs": max(runs[name] for name in part.stages)} for part in course.parts],
    }
