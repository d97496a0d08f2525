"""Columns and rows for a MILP solver, and what it answers. Knows nothing of plans.

HiGHS accepts rows that are violated by 1e-6 and integers that are off by as much: whoever builds a model scales it for that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import coo_array

Terms = Mapping[int, float]  # column -> coefficient
Sum = tuple[Terms, float]  # terms and a constant

# A bound by nodes, not by seconds: plans must not depend on how fast the machine is. Nodes times columns take about equally long.
NODES_TIMES_COLUMNS = 8_000_000
FEWEST_NODES = 200
GAP = 1e-6
SOLVED, INFEASIBLE = 0, 2  # what `milp` says it came to
COARSE_GAP = 1e-3  # where components are cut into layers: their many small classes leave far more plans that are as good
WHOLE, ENOUGH = 1e-6, 3e-4  # off a whole number, and above what the answer has with fractions
NEAR, NEAR_GAP = 4.0, 2e-4  # of the layers held, made whole around the answer: how far from it they may be, and the gap


@dataclass(frozen=True, slots=True)
class Found:
    """What the solver returned: a value per column, the goal's value and the solver's bound on it, whether it proved optimality."""

    values: NDArray[np.float64]
    value: float
    bound: float
    proven: bool


@dataclass(frozen=True, slots=True)
class _Arrays:
    """Rows as HiGHS takes them: what stands in which row and column, and the rows' bounds."""

    values: NDArray[np.float64]
    numbers: NDArray[np.int32]
    columns: NDArray[np.int32]
    lows: NDArray[np.float64]
    highs: NDArray[np.float64]

    def _all(self) -> tuple[NDArray[Any], ...]:
        return self.values, self.numbers, self.columns, self.lows, self.highs

    def over(self, other: _Arrays) -> _Arrays:
        """These rows with ``other`` below them."""
        both = zip(self._all(), other._all(), strict=True)
        return _Arrays(*(np.concatenate(pair) for pair in both))


def _arrays(rows: Sequence[tuple[Terms, float, float]], first: int = 0) -> _Arrays:
    """``rows``, numbered from ``first`` on. Indices of 32 bits: older SciPy's HiGHS takes no other."""
    counts = [len(terms) for terms, _, _ in rows]
    return _Arrays(
        np.array([value for terms, _, _ in rows for value in terms.values()], dtype=float),
        np.repeat(np.arange(first, first + len(rows), dtype=np.int32), counts),
        np.array([column for terms, _, _ in rows for column in terms], dtype=np.int32),
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
    ) -> Found | None:
        """The least ``goal`` while every limited sum stays at or below its limit. None: the solver found nothing.

        ``gap``: how far the answer may be from the least, relatively; ``fixed``: columns that have these values.

        ``whole`` False lets integers be fractions: a bound. Deterministic: HiGHS without a time limit, one thread.
        """
        ranges = {column: (value, value) for column, value in (fixed or {}).items()}
        result = self._solved(goal, limits, whole, max(gap, self._gap) if gap else gap, ranges)
        if result.x is None:
            return None
        bound = result.mip_dual_bound if result.mip_dual_bound is not None else result.fun
        return Found(result.x, float(result.fun) + goal[1], float(bound) + goal[1], result.status == SOLVED)

    def improved(self, known: Found, goal: Sum, limits: Sequence[tuple[Sum, float]] = (), *, gap: float = GAP) -> Found:
        """An answer better than ``known`` by more than ``gap``; where there is none ``known``, with a bound that says so."""
        least = known.value * (1 - gap)
        result = self._solved(goal, [*limits, (goal, least)], True, max(gap, self._gap), {})
        proven = result.status in (SOLVED, INFEASIBLE)
        bound = least if proven else min(least, float(result.mip_dual_bound or 0.0) + goal[1])
        if result.x is None:
            return replace(known, bound=bound, proven=proven)
        bound = min(float(result.fun), float(result.mip_dual_bound or 0.0)) + goal[1]
        return Found(result.x, float(result.fun) + goal[1], bound, result.status == SOLVED)

    def nearest(self, known: Found, columns: Collection[int], goal: Sum) -> Found | None:
        """The least ``goal`` with whole numbers in ``columns``: those that are whole in ``known`` as they are there, the others
        near that; if that cannot be, or costs much, all of them near. None: there is none."""
        apart = {column: abs(known.values[column] - round(known.values[column])) for column in columns}
        for still in (WHOLE, -1.0):
            off = {column: 0.0 if much <= still else NEAR for column, much in apart.items()}
            at = {column: round(known.values[column]) if not off[column] else known.values[column] for column in columns}
            ranges = {column: (at[column] - off[column], at[column] + off[column]) for column in columns}
            result = self._solved(goal, (), True, NEAR_GAP, ranges, integers=columns)
            enough = np.inf if still < 0 else value_of(goal, known.values) * (1 + ENOUGH)
            if result.x is not None and float(result.fun) + goal[1] <= enough:
                return replace(known, values=result.x, value=float(result.fun) + goal[1])
        return None

    def _solved(
        self,
        goal: Sum,
        limits: Sequence[tuple[Sum, float]],
        whole: bool,
        gap: float,
        ranges: Mapping[int, tuple[float, float]],
        integers: Collection[int] = (),
    ) -> OptimizeResult:
        if self._arrays is None or len(self._arrays.lows) != len(self._rows):
            self._arrays = _arrays(self._rows)
        rows = [(terms, -np.inf, limit - constant) for (terms, constant), limit in limits]
        arrays = self._arrays.over(_arrays(rows, len(self._rows)))
        if not arrays.values.size:
            arrays = _arrays([({0: 0.0}, -np.inf, np.inf)])
        shape = (len(arrays.lows), len(self._columns))
        cost = np.zeros(shape[1])
        for column, value in goal[0].items():
            cost[column] = value
        lower, upper, integer = (np.array(part, dtype=float) for part in zip(*self._columns, strict=True))
        for column, (low, high) in ranges.items():
            lower[column], upper[column] = max(low, lower[column]), min(high, upper[column])
        integer[list(integers)] = 1.0
        matrix = coo_array((arrays.values, (arrays.numbers, arrays.columns)), shape=shape).tocsc()
        return milp(
            c=cost,
            integrality=integer if whole else np.zeros_like(integer),
            bounds=Bounds(lower, upper),
            constraints=LinearConstraint(matrix, arrays.lows, arrays.highs),
            options={
                "mip_rel_gap": gap,
                "node_limit": max(FEWEST_NODES, NODES_TIMES_COLUMNS // self.size),
            },
        )


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
