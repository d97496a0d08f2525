"""The program as columns and rows for a MILP solver, scaled; and its integers read back. Decides nothing.

Bytes are scaled so that the effective budget is 1000, seconds so that all compute and one copy of everything are 100. HiGHS accepts
rows that are violated by 1e-6: that is then 1e-9 of the budget, less than one allocation's rounding on any card.
Byte-sized coefficients made it call 18.25 s optimal where 15.99 s was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from graphrun.planner.infeasible import ring_bytes
from graphrun.planner.problem import ALLOCATION_BYTES
from graphrun.planner.program import Choice, Program
from graphrun.units import round_up

MEMORY_SCALE = 1000.0
TIME_SCALE = 100.0
NODE_LIMIT = 20_000  # a bound by nodes, not by seconds: plans must not depend on how fast the machine is
GAP = 1e-6

Terms = Mapping[int, float]  # column -> coefficient
Sum = tuple[Terms, float]  # terms and a constant


@dataclass(frozen=True, slots=True)
class Answer:
    """What the solver returned: integers, the scaled goal's value and the solver's bound on it, whether it proved optimality."""

    choice: Choice
    value: float
    bound: float
    proven: bool


class Matrix:
    """Rows and columns of ``program``. ``factors[t]`` multiplies copy times of interval t, ``spare_bytes[t]`` is kept free in it.

    ``seconds``, ``moved``, ``memory``: goals in scaled units, the last one being the peak plus a little of the mean, so that
    nothing is loaded earlier than it helps.
    """

    def __init__(self, program: Program, factors: Sequence[float], spare_bytes: Sequence[int]) -> None:
        self.program = program
        self.bytes_unit = max(1, program.problem.effective_bytes) / MEMORY_SCALE
        self.seconds_unit = max(_usual_seconds(program), 1e-9) / TIME_SCALE
        self._columns: list[tuple[float, float, bool]] = []
        self._rows: list[tuple[Terms, float, float]] = []
        self.present: list[list[int]] = []
        self.loaded: list[list[int]] = []
        uses = [[t for t, interval in enumerate(program.intervals) if interval.calls[j]] for j in range(len(program.cells))]
        self._first, self._last = [min(of, default=-1) for of in uses], [max(of, default=-1) for of in uses]
        peak = self._column(0.0, np.inf)
        seconds: dict[int, float] = {}
        moved: dict[int, float] = {}
        occupied: dict[int, float] = {}
        always = 0.0
        for t, interval in enumerate(program.intervals):
            self.present.append([])
            self.loaded.append([])
            copies, rings = self._cells(t)
            seconds[self._time(t, copies, factors[t])] = 1.0
            used = self._memory(t, rings)
            fixed = interval.fixed_bytes / self.bytes_unit
            self._row(used, -np.inf, MEMORY_SCALE - fixed - spare_bytes[t] / self.bytes_unit)
            self._row({**used, peak: -1.0}, -np.inf, -fixed)
            occupied |= {column: 1e-3 * value / len(program.intervals) for column, value in used.items()}
            for cell, (terms, constant) in zip(program.cells, copies, strict=True):
                size = cell.block_bytes / self.bytes_unit
                moved |= {column: size * value for column, value in terms.items()}
                always += size * constant
        self.seconds: Sum = (seconds, 0.0)
        self.moved: Sum = (moved, always)
        self.memory: Sum = ({**occupied, peak: 1.0}, 0.0)

    def _column(self, lower: float, upper: float, integer: bool = False) -> int:
        self._columns.append((lower, upper, integer))
        return len(self._columns) - 1

    def _row(self, terms: Terms, lower: float, upper: float) -> None:
        self._rows.append((terms, lower, upper))

    def _cells(self, t: int) -> tuple[list[Sum], dict[int, list[tuple[int, int]]]]:
        """K, d and s of interval ``t``. Returns blocks moved per cell, and per streaming component its (s column, cell)s."""
        interval = self.program.intervals[t]
        copies: list[Sum] = []
        streams: dict[int, list[tuple[int, int]]] = {}
        for j, cell in enumerate(self.program.cells):
            calls, count = interval.calls[j], float(cell.count)
            whole, needed = bool(calls) and not cell.streamable, t <= self._last[j]
            beside = interval.part == "rest" and cell.component in interval.used
            stays = "keep" in cell.demanded and 0 <= self._first[j] < t
            may_be, may_load = self._allowed(t, j)
            may_be = may_be and (needed or stays or not cell.movable)
            present = self._column(count if whole or stays else 0.0, count if may_be else 0.0, True)
            loaded = self._column(0.0, count if may_load and needed and not whole and not beside else 0.0, True)
            self.present[t].append(present)
            self.loaded[t].append(loaded)
            self._row({present: 1.0, loaded: 1.0}, 0.0, count)
            before = {self.present[t - 1][j]: -1.0, self.loaded[t - 1][j]: -1.0} if t else {}
            self._row({present: 1.0, **before}, -np.inf if cell.movable else 0.0, 0.0)
            if not calls:
                copies.append(({loaded: 1.0}, 0.0))
            elif whole:
                copies.append(({}, 0.0))
            else:
                copies.append(({present: -float(calls)}, calls * count))
                streamed = self._column(0.0, 0.0 if cell.demanded & {"keep", "whole"} else 1.0, True)
                self._row({present: 1.0, loaded: 1.0, streamed: count}, count, np.inf)
                streams.setdefault(cell.component, []).append((streamed, j))
        return copies, streams

    def _allowed(self, t: int, j: int) -> tuple[bool, bool]:
        """Whether directives let blocks of cell ``j`` be present when interval ``t`` starts, and be loaded in it."""
        cell, interval = self.program.cells[j], self.program.intervals[t]
        if "exclude" in cell.demanded and cell.streamable:
            return False, False
        if "drop" in cell.demanded:
            name = self.program.problem.components[cell.component].name
            own = any(use.component == name for use in self.program.problem.phases[interval.phase].uses)
            return own and interval.part != "load", own
        return True, True

    def _time(self, t: int, copies: list[Sum], factor: float) -> int:
        """D of interval ``t``: its column."""
        program, calls = self.program, self.program.intervals[t].calls
        time, every, every_constant = self._column(0.0, np.inf), dict[int, float](), 0.0
        own = {time: 1.0}
        for j, (terms, constant) in enumerate(copies):
            load = program.cells[j].load_seconds * factor / self.seconds_unit
            every |= {column: -load * value for column, value in terms.items()}
            every_constant += load * constant
            if calls[j]:
                compute = program.compute_seconds(t, j) / self.seconds_unit
                longer = self._column(compute, np.inf)
                self._row({longer: 1.0, **{column: -load * value for column, value in terms.items()}}, load * constant, np.inf)
                own[longer] = -1.0
        self._row(own, 0.0, np.inf)
        self._row({time: 1.0, **every}, every_constant, np.inf)
        return time

    def _memory(self, t: int, streams: dict[int, list[tuple[int, int]]]) -> dict[int, float]:
        """What weights and rings take in interval ``t``."""
        used: dict[int, float] = {}
        for j, cell in enumerate(self.program.cells):
            used[self.present[t][j]] = used[self.loaded[t][j]] = cell.held_bytes / self.bytes_unit
        for members in streams.values():
            cells = [self.program.cells[j] for _, j in members]
            if "exclude" in cells[0].demanded:  # all of it streams, and holding an only block instead is not allowed
                least = ring_bytes((cell.block_bytes, cell.count) for cell in cells) / self.bytes_unit
                used[self._column(least, least)] = 1.0
                continue
            ring = self._column(0.0, np.inf)
            used[ring] = 1.0
            for streamed, j in members:
                size = round_up(2 * self.program.cells[j].block_bytes, ALLOCATION_BYTES) / self.bytes_unit
                self._row({ring: 1.0, streamed: -size}, 0.0, np.inf)
        return used

    def solve(self, goal: Sum, limits: Sequence[tuple[Sum, float]] = ()) -> Answer | None:
        """Minimises ``goal`` while every limited goal stays at or below its limit. None: the solver found nothing.

        Deterministic: HiGHS without a time limit, one thread.
        """
        rows = [*self._rows, *((terms, -np.inf, limit - constant) for (terms, constant), limit in limits)]
        entries = [(number, column, value) for number, (terms, _, _) in enumerate(rows) for column, value in terms.items()]
        numbers, columns, values = zip(*entries, strict=True)
        places = (np.array(numbers, dtype=np.int32), np.array(columns, dtype=np.int32))  # older SciPy's HiGHS takes no other
        shape = (len(rows), len(self._columns))
        cost = np.zeros(shape[1])
        for column, value in goal[0].items():
            cost[column] = value
        lower, upper, integer = (np.array(part, dtype=float) for part in zip(*self._columns, strict=True))
        result = milp(
            c=cost,
            integrality=integer,
            bounds=Bounds(lower, upper),
            constraints=LinearConstraint(coo_array((values, places), shape=shape).tocsc(), *_limits(rows)),
            options={"mip_rel_gap": GAP, "node_limit": NODE_LIMIT},
        )
        if result.x is None:
            return None
        present, loaded = (
            tuple(tuple(round(result.x[column]) for column in row) for row in of) for of in (self.present, self.loaded)
        )
        bound = result.mip_dual_bound if result.mip_dual_bound is not None else result.fun
        return Answer(Choice(present, loaded), float(result.fun) + goal[1], float(bound) + goal[1], result.status == 0)


def _limits(rows: Sequence[tuple[Terms, float, float]]) -> tuple[list[float], list[float]]:
    return [lower for _, lower, _ in rows], [upper for _, _, upper in rows]


def _usual_seconds(program: Program) -> float:
    compute = sum(program.compute_seconds(t, j) for t in range(len(program.intervals)) for j in range(len(program.cells)))
    return compute + sum(cell.count * cell.load_seconds for cell in program.cells)
