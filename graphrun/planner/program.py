"""The exact program behind a plan: its integers, and what they cost in seconds and bytes. Knows no solver.

Per slot t and class j (a class of blocks of one component): K blocks present at its start, d loaded in it, n calls, nb blocks.

    unused      any K + d <= nb                                     x = d        blocks moved: prefetch
    used        K = nb, d = 0             not streamable            x = 0
    used        K + d + nb*s >= nb        first: x = nb - K         s: the rest of them pass through the ring, ring >= 2*b*s
                                          rest:  x = n*(nb - K), d = 0 for the whole component
    next slot   K' <= K + d               eviction is free; immovable: K' = K + d;  K = 0 at first
    demanded    keep     s = 0 in its first slot, K = nb in later ones       exclude  K = d = 0 where streamable
                whole    s = 0 where used         drop     K = 0 in load slots, K = d = 0 in phases of others
    time        D >= sum of max(compute of j, load_seconds*x) over the used j,   D >= load_seconds*x summed over all j
    memory      sum b*(K + d) + rings + activation + values + carry <= effective budget

x follows from K and d, so it is no variable. A ring for one block alone (b) never pays: holding that block costs the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphrun.planner.infeasible import ring_bytes, streamable_classes
from graphrun.planner.plan import Part
from graphrun.planner.problem import ALLOCATION_BYTES, Placement, Problem
from graphrun.units import round_up


@dataclass(frozen=True, slots=True)
class Cell:
    """One class of blocks of one component. ``held_bytes``: what a block takes on the device, rounded up. ``demanded`` of the
    component by directives."""

    component: int
    index: int
    count: int
    block_bytes: int
    held_bytes: int
    load_seconds: float
    streamable: bool
    movable: bool
    demanded: frozenset[Placement] = frozenset()


@dataclass(frozen=True, slots=True)
class Interval:
    """A slot of the problem. ``calls[j]``, ``seconds[j]`` (one block, one call) per cell; ``used``: components it computes with."""

    phase: int
    part: Part
    rounds: int
    fixed_bytes: int
    calls: tuple[int, ...]
    seconds: tuple[float, ...]
    used: frozenset[int]


@dataclass(frozen=True, slots=True)
class Choice:
    """Integers of a solution: ``present[t][j]`` and ``loaded[t][j]``."""

    present: tuple[tuple[int, ...], ...]
    loaded: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A problem as cells and intervals (the end slot is no interval: it only evicts)."""

    problem: Problem
    cells: tuple[Cell, ...]
    intervals: tuple[Interval, ...]

    def moved(self, t: int, j: int, present: int, loaded: int) -> int:
        """x: blocks of cell ``j`` copied in interval ``t``."""
        calls, cell = self.intervals[t].calls[j], self.cells[j]
        return calls * (cell.count - present) if calls else loaded

    def compute_seconds(self, t: int, j: int) -> float:
        """Compute of cell ``j`` in interval ``t``."""
        return self.intervals[t].calls[j] * self.cells[j].count * self.intervals[t].seconds[j]

    def slot_seconds(self, choice: Choice, factors: Sequence[float] = ()) -> tuple[float, ...]:
        """D per interval, copy times multiplied by ``factors`` where there are any."""
        found = []
        for t, interval in enumerate(self.intervals):
            factor = factors[t] if factors else 1.0
            blocks = [self.moved(t, j, k, d) for j, (k, d) in enumerate(zip(choice.present[t], choice.loaded[t], strict=True))]
            copies = [factor * cell.load_seconds * moved for cell, moved in zip(self.cells, blocks, strict=True)]
            own = sum(max(self.compute_seconds(t, j), copies[j]) for j, calls in enumerate(interval.calls) if calls)
            found.append(max(own, sum(copies)))
        return tuple(found)

    def moved_bytes(self, choice: Choice) -> int:
        """Bytes copied to the device, streamed ones each time."""
        return sum(
            cell.block_bytes * self.moved(t, j, choice.present[t][j], choice.loaded[t][j])
            for t in range(len(self.intervals))
            for j, cell in enumerate(self.cells)
        )

    def streamed(self, choice: Choice, t: int, component: int) -> list[tuple[int, int]]:
        """Bytes of a block and blocks streamed, per class of ``component`` of which some are streamed in interval ``t``."""
        return [
            (cell.block_bytes, cell.count - choice.present[t][j] - choice.loaded[t][j])
            for j, cell in enumerate(self.cells)
            if cell.component == component
            and self.intervals[t].calls[j]
            and cell.count > choice.present[t][j] + choice.loaded[t][j]
        ]

    def excess_bytes(self, choice: Choice) -> tuple[int, ...]:
        """Bytes above the effective budget per interval (negative: headroom), in integers."""
        found = []
        for t, interval in enumerate(self.intervals):
            held = sum(c.held_bytes * (choice.present[t][j] + choice.loaded[t][j]) for j, c in enumerate(self.cells))
            rings = sum(ring_bytes(self.streamed(choice, t, component)) for component in interval.used)
            found.append(interval.fixed_bytes + held + rings - self.problem.effective_bytes)
        return tuple(found)


def program_of(problem: Problem) -> Program:
    """The program of ``problem``, first variants only."""
    cells: list[Cell] = []
    for number, component in enumerate(problem.components):
        variant = component.variants[0]
        for index, streamable in enumerate(streamable_classes(component)):
            nbytes = variant.block_bytes[index]
            held, count = round_up(nbytes, ALLOCATION_BYTES), len(component.classes[index].blocks)
            demanded = problem.demanded(component.name)
            cells.append(
                Cell(number, index, count, nbytes, held, variant.load_seconds[index], streamable, variant.movable, demanded)
            )
    intervals = (interval for number in range(len(problem.phases)) for interval in _intervals(problem, cells, number))
    return Program(problem, tuple(cells), tuple(intervals))


def _intervals(problem: Problem, cells: Sequence[Cell], number: int) -> Iterator[Interval]:
    """The slots of phase ``number``: load where it uses anything, first, rest where there are further calls."""
    phase = problem.phases[number]
    uses = {use.component: use for use in phase.uses}
    found = [uses.get(problem.components[cell.component].name) for cell in cells]
    seconds = tuple(use.seconds[cell.index] if use else 0.0 for use, cell in zip(found, cells, strict=True))
    values = problem.value_bytes(number) + phase.carry_bytes
    parts: tuple[tuple[Part, int, int], ...] = (
        ("load", 0, 0),
        ("first", 1, phase.first_bytes),
        ("rest", phase.rest_calls, phase.rest_bytes),
    )
    for part, rounds, activation in parts:
        if rounds or (part == "load" and phase.uses):
            calls = tuple(use.class_calls_in(part)[cell.index] if use else 0 for use, cell in zip(found, cells, strict=True))
            used = frozenset(cell.component for cell, n in zip(cells, calls, strict=True) if n)
            yield Interval(number, part, rounds, values + activation, calls, seconds, used)
