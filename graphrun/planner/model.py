"""Columns and rows for a MILP solver, and what it answers. Knows nothing of plans.

HiGHS accepts rows that are violated by 1e-6 and integers that are off by as much: whoever builds a model scales it for that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray

Terms = Mapping[int, float]  # column -> coefficient
Sum = tuple[Terms, float]  # terms and a constant

# A bound by nodes, not by seconds: plans must not depend on how fast the machine is. Nodes times columns take about equally long.
NODES_TIMES_COLUMNS = 8_000_000
FEWEST_NODES = 200
GAP = 1e-6
COARSE_GAP = 1e-3  # where components are cut into layers: their many small classes leave far more plans that are as good
WHOLE, ENOUGH = 1e-6, 3e-4  # off a whole number, and above what the answer has with fractions
NEAR = 4.0  # how far from the answer the layers held may be that are made whole
OPTIONS = {"output_flag": False, "threads": 1}
# HiGHS's searches for a first answer: half of its time where answers are easily found, a quarter of it where they are not.
SEARCHES = ("mip_heuristic_run_feasibility_jump", "mip_heuristic_run_rens", "mip_heuristic_run_rins")
ROUGH = 0.02


@dataclass(frozen=True, slots=True)
class Found:
    """What the solver returned: a value per column, the goal's value and the solver's bound on it, whether it proved optimality."""

    values: NDArray[np.float64]
    value: float
    bound: float
    proven: bool


@dataclass(frozen=True, slots=True)
class _Arrays:
    """Rows as HiGHS takes them: coefficients and their columns row after row, how many each row has, and the rows' bounds."""

    values: NDArray[np.float64]
    columns: NDArray[np.int32]
    counts: NDArray[np.int32]
    lows: NDArray[np.float64]
    highs: NDArray[np.float64]

    def _all(self) -> tuple[NDArray[Any], ...]:
        return self.values, self.columns, self.counts, self.lows, self.highs

    def over(self, other: _Arrays) -> _Arrays:
        """These rows with ``other`` below them."""
        both = zip(self._all(), other._all(), strict=True)
        return _Arrays(*(np.concatenate(pair) for pair in both))


def _arrays(rows: Sequence[tuple[Terms, float, float]]) -> _Arrays:
    return _Arrays(
        np.array([value for terms, _, _ in rows for value in terms.values()], dtype=float),
        np.array([column for terms, _, _ in rows for column in terms], dtype=np.int32),
        np.array([len(terms) for terms, _, _ in rows], dtype=np.int32),
        np.array([low for _, low, _ in rows], dtype=float),
        np.array([high for _, _, high in rows], dtype=float),
    )


class Model:
    """Columns with bounds, rows with bounds; minimised as often as wanted."""

    def __init__(self, gap: float = GAP) -> None:
        self._gap = gap
        self._columns: list[tuple[float, float, bool]] = []
        self._rows: list[tuple[Terms, float, float]] = []
        self._arrays: _Arrays | None = None  # of all rows, once they were asked for

    def column(self, lower: float, upper: float, integer: bool = False) -> int:
        """A new column's number."""
        self._columns.append((lower, upper, integer))
        return len(self._columns) - 1

    def row(self, terms: Terms, lower: float, upper: float) -> None:
        """``lower <= terms <= upper``."""
        self._rows.append((terms, lower, upper))

    @property
    def size(self) -> int:
        """The number of columns."""
        return len(self._columns)

    def minimise(
        self,
        goal: Sum,
        limits: Sequence[tuple[Sum, float]] = (),
        *,
        whole: bool = True,
        gap: float = GAP,
        fixed: Mapping[int, float] | None = None,
        start: Found | None = None,
    ) -> Found | None:
        """The least ``goal`` while every limited sum stays at or below its limit. None: the solver found nothing.

        ``gap``: how far the answer may be from the least, relatively, ROUGH where one is hard to find; ``fixed``: columns that have
        these values; ``start``: an answer that keeps the limits, to be bettered.

        ``whole`` False lets integers be fractions: a bound. Deterministic: HiGHS without a time limit, one thread.
        """
        ranges = {column: (value, value) for column, value in (fixed or {}).items()}
        return self._solved(goal, limits, whole, max(gap, self._gap) if gap else gap, ranges, start=start)

    def nearest(self, known: Found, columns: Collection[int], goal: Sum, gap: float) -> Found | None:
        """The least ``goal`` with whole numbers in ``columns``: those that are whole in ``known`` as they are there, the others
        near that; if that cannot be, or costs much, all of them near. None: there is none."""
        apart = {column: abs(known.values[column] - round(known.values[column])) for column in columns}
        for still in (WHOLE, -1.0):
            off = {column: 0.0 if much <= still else NEAR for column, much in apart.items()}
            at = {column: round(known.values[column]) if not off[column] else known.values[column] for column in columns}
            ranges = {column: (at[column] - off[column], at[column] + off[column]) for column in columns}
            found = self._solved(goal, (), True, gap, ranges, integers=columns)
            enough = np.inf if still < 0 else value_of(goal, known.values) * (1 + ENOUGH)
            if found is not None and found.value <= enough:
                return replace(known, values=found.values, value=found.value)
        return None

    def _solved(
        self,
        goal: Sum,
        limits: Sequence[tuple[Sum, float]],
        whole: bool,
        gap: float,
        ranges: Mapping[int, tuple[float, float]],
        integers: Collection[int] = (),
        start: Found | None = None,
    ) -> Found | None:
        if self._arrays is None or len(self._arrays.lows) != len(self._rows):
            self._arrays = _arrays(self._rows)
        arrays = self._arrays.over(_arrays([(terms, -np.inf, limit - constant) for (terms, constant), limit in limits]))
        cost = np.zeros(self.size)
        cost[list(goal[0])] = list(goal[0].values())
        lower, upper, integer = (np.array(part, dtype=float) for part in zip(*self._columns, strict=True))
        for column, (low, high) in ranges.items():
            lower[column], upper[column] = max(low, lower[column]), min(high, upper[column])
        integer[list(integers)] = 1.0
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_, lp.offset_ = self.size, len(arrays.lows), goal[1]
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, lower, upper
        lp.row_lower_, lp.row_upper_ = arrays.lows, arrays.highs
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum(arrays.counts)])
        lp.a_matrix_.index_, lp.a_matrix_.value_ = arrays.columns, arrays.values
        if whole:
            lp.integrality_ = [highspy.HighsVarType(int(each)) for each in integer]
        options = {**OPTIONS, "mip_rel_gap": gap, "mip_max_nodes": max(FEWEST_NODES, NODES_TIMES_COLUMNS // self.size)}
        searched = gap == ROUGH or integers
        return _run(lp, options | ({} if searched else dict.fromkeys(SEARCHES, False)), start)


def _run(lp: highspy.HighsLp, options: Mapping[str, bool | int | float], start: Found | None) -> Found | None:
    highs = highspy.Highs()
    for name, value in options.items():
        highs.setOptionValue(name, value)
    highs.passModel(lp)
    if start is not None:
        highs.setSolution(len(start.values), np.arange(len(start.values), dtype=np.int32), start.values)
    highs.run()
    info = highs.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None
    value = float(info.objective_function_value)
    bound = float(info.mip_dual_bound) if len(lp.integrality_) else value
    values = np.array(highs.getSolution().col_value)
    return Found(values, value, bound, highs.getModelStatus() == highspy.HighsModelStatus.kOptimal)


def plus(*sums: tuple[float, Sum]) -> Sum:
    """The sum of ``(factor, sum)``s."""
    terms: dict[int, float] = {}
    constant = 0.0
    for factor, (of, more) in sums:
        constant += factor * more
        for column, value in of.items():
            terms[column] = terms.get(column, 0.0) + factor * value
    return terms, constant


def row_of(of: Sum, most: bool = False) -> tuple[Terms, float, float]:
    """The row ``of >= 0`` (``most``: ``<= 0``), its constant on the other side."""
    terms, constant = of
    return (terms, -np.inf, -constant) if most else (terms, -constant, np.inf)


def value_of(of: Sum, values: NDArray[np.float64]) -> float:
    """What ``of`` is with these ``values`` of the columns."""
    return of[1] + sum(float(values[column]) * value for column, value in of[0].items())
