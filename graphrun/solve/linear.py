"""Linear expressions and mixed-integer linear programs (MILP) for HiGHS.

x, y = model.column(upper=8.0, integer=True), model.column()
model.add(2.0 * x + 1.0 <= y, x >= 3.0)
model.minimise(y)
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from math import isclose
from types import FrameType
from typing import Any, NamedTuple

import highspy
import numpy as np
from numpy.typing import NDArray


class Row(NamedTuple):
    """``lower <= terms <= upper``. ``terms``: column -> coefficient."""

    terms: Mapping[int, float]
    lower: float
    upper: float


@dataclass(slots=True, eq=False)
class Linear:
    """A linear expression over columns of a `MilpModel`; ``terms``: column -> coefficient.

    Sums, differences and multiples are expressions; comparisons are rows for `MilpModel.add`.
    """

    terms: Mapping[int, float] = field(default_factory=dict)
    constant: float = 0.0

    def _plus(self, other: Linear | float, factor: float) -> Linear:
        if not isinstance(other, Linear):
            return Linear(self.terms, self.constant + factor * other)
        terms = dict(self.terms)
        for column, value in other.terms.items():
            change = factor * value
            terms[column] = terms[column] + change if column in terms else change
        return Linear(terms, self.constant + factor * other.constant)

    def __add__(self, other: Linear | float) -> Linear:
        return self._plus(other, 1.0)

    def __sub__(self, other: Linear | float) -> Linear:
        return self._plus(other, -1.0)

    def __mul__(self, factor: float) -> Linear:
        return Linear(
            {column: value * factor for column, value in self.terms.items()}, self.constant * factor
        )

    def __rmul__(self, factor: float) -> Linear:
        return self * factor

    def __truediv__(self, divisor: float) -> Linear:
        return Linear(
            {column: value / divisor for column, value in self.terms.items()},
            self.constant / divisor,
        )

    def __le__(self, other: Linear | float) -> Row:
        difference = self - other
        return Row(difference.terms, -np.inf, -difference.constant)

    def __ge__(self, other: Linear | float) -> Row:
        difference = self - other
        return Row(difference.terms, -difference.constant, np.inf)

    def at_least(self, other: Linear, unit: float) -> Row:
        """Return the row ``self >= other / unit`` for expressions without common columns."""
        terms = {column: -(value / unit) for column, value in other.terms.items()}
        bound = other.constant / unit - self.constant
        return Row({**self.terms, **terms}, bound, np.inf)

    def equals(self, other: Linear | float) -> Row:
        difference = self - other
        return Row(difference.terms, -difference.constant, -difference.constant)

    def at(self, values: NDArray[np.float64]) -> float:
        return self.constant + sum(
            float(values[column]) * value for column, value in self.terms.items()
        )


def total(parts: Iterable[Linear]) -> Linear:
    """Return the sum of ``parts``."""
    terms, constant = dict[int, float](), 0.0
    for part in parts:
        for column, value in part.terms.items():
            terms[column] = terms[column] + value if column in terms else value
        constant += part.constant
    return Linear(terms, constant)


# The search is limited by nodes, not by seconds: plans must not depend on the speed of the machine.
# Time is about proportional to nodes times columns.
NODES_TIMES_COLUMNS = 8_000_000
NODES, FEWEST_NODES = 1_000_000, 200
GAP = 1e-6
# distance from an integer; relative loss accepted for rounding
INTEGRALITY, ROUNDING_GAP = 1e-6, 1e-3
ROUNDING_RANGE = 4.0  # layers: how far rounding may move a column from its fractional value
OPTIONS = {"threads": 1}
COLUMN_TYPES = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
# Heuristics of HiGHS for a first solution. They take half of its time where solutions are easy to
# find and a quarter where they are not, so only ROUGH_GAP turns them on.
SEARCHES = (
    "mip_heuristic_run_feasibility_jump",
    "mip_heuristic_run_rens",
    "mip_heuristic_run_rins",
)
ROUGH_GAP = 0.02  # relative, of a first solution where one is hard to find


class SearchEnded(Exception):
    """The work of a `SearchBudget` is done."""


@dataclass(slots=True)
class SearchBudget:
    """The work left for searches: ``attempts`` (calls of HiGHS) and ``nodes`` (times columns).

    Counts work and not seconds, so that results do not depend on the machine.
    """

    attempts: int
    nodes: int

    @contextmanager
    def limiting(self) -> Iterator[None]:
        """Context in which every search takes from this budget; `SearchEnded` if it is used up."""
        token = _search_budget.set(self)
        try:
            yield
        finally:
            _search_budget.reset(token)


_search_budget: ContextVar[SearchBudget | None] = ContextVar("search_budget", default=None)


@dataclass(frozen=True, slots=True)
class MilpResult:
    """A value per column, the value of the objective, and the bound on it."""

    values: NDArray[np.float64]
    value: float
    bound: float


class MilpModel:
    """A MILP of bounded columns and rows.

    ``gap``: the least relative gap of `minimise`, which raises smaller gaps to it, except 0.
    """

    def __init__(self, gap: float) -> None:
        self._gap = gap
        self._columns: list[tuple[float, float, bool]] = []
        self._rows: list[Row] = []
        self._arrays: list[NDArray[Any]] = []  # of all rows, built on first use

    def column(self, lower: float = 0.0, upper: float = np.inf, integer: bool = False) -> Linear:
        """Add a column, and return it as an expression."""
        self._columns.append((lower, upper, integer))
        return Linear({self.size - 1: 1.0})

    def raise_lower(self, column: Linear, lower: float) -> None:
        (number,) = column.terms
        old, upper, integer = self._columns[number]
        self._columns[number] = max(old, lower), upper, integer

    def binary(self, upper: float = 1.0) -> Linear:
        """Add a column that is 0 or 1; ``upper`` 0: always 0."""
        return self.column(0.0, upper, True)

    def add(self, *rows: Row) -> None:
        self._rows += rows

    @property
    def size(self) -> int:
        return len(self._columns)

    def minimise(
        self,
        goal: Linear,
        limits: Sequence[Row] = (),
        *,
        whole: bool = True,
        gap: float = GAP,
        fixed: Mapping[int, float] | None = None,
        start: MilpResult | None = None,
        nodes: int = NODES,
    ) -> MilpResult | None:
        """Minimise ``goal`` subject to all rows and ``limits``. Return None without a solution.

        ``whole`` False relaxes integers to fractions, which gives a bound. ``gap``: relative
        optimality gap; ROUGH_GAP turns on the heuristics (SEARCHES), which find a first solution in
        hard cases. ``fixed``: column -> value. ``start``: a solution within the limits. ``nodes``:
        maximum number of nodes. Deterministic: one thread, no time limit.
        """
        ranges = {column: (value, value) for column, value in (fixed or {}).items()}
        return self._solved(
            goal,
            limits,
            max(gap, self._gap) if gap else gap,
            ranges,
            whole=whole,
            start=start,
            nodes=nodes,
        )

    def rounded(
        self,
        relaxed: MilpResult,
        columns: Collection[int],
        goal: Linear,
        gap: float,
    ) -> MilpResult | None:
        """Minimise ``goal`` with integers in ``columns``. Return None without a solution.

        Columns stay within ROUNDING_RANGE of their values in ``relaxed``. First, columns with
        integer values are fixed. If that is infeasible, or costs more than ROUNDING_GAP, none is.
        """
        # columns this close to an integer are fixed; -1.0: none
        for fixed_distance in (INTEGRALITY, -1.0):
            ranges = {}
            for column in columns:
                value = relaxed.values[column]
                is_integral = abs(value - round(value)) <= fixed_distance
                ranges[column] = (
                    (round(value),) * 2
                    if is_integral
                    else (value - ROUNDING_RANGE, value + ROUNDING_RANGE)
                )
            result = self._solved(goal, (), gap, ranges, integers=columns)
            if result is not None and (
                fixed_distance < 0 or result.value <= goal.at(relaxed.values) * (1 + ROUNDING_GAP)
            ):
                return replace(relaxed, values=result.values, value=result.value)
        return None

    def _solved(
        self,
        goal: Linear,
        limits: Sequence[Row],
        gap: float,
        ranges: Mapping[int, tuple[float, float]],
        *,
        whole: bool = True,
        integers: Collection[int] = (),
        start: MilpResult | None = None,
        nodes: int = NODES,
    ) -> MilpResult | None:
        self._arrays = self._arrays or _arrays(self._rows)
        values, columns, counts, lows, highs = map(
            np.concatenate, zip(self._arrays, _arrays(limits), strict=True)
        )
        cost = np.zeros(self.size)
        cost[list(goal.terms)] = list(goal.terms.values())
        lower, upper, integer = (
            np.array(part, dtype=float) for part in zip(*self._columns, strict=True)
        )
        for column, (low, high) in ranges.items():
            lower[column], upper[column] = max(low, lower[column]), min(high, upper[column])
        integer[list(integers)] = 1.0
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_, lp.offset_ = self.size, len(lows), goal.constant
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, lower, upper
        lp.row_lower_, lp.row_upper_ = lows, highs
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum(counts)])
        lp.a_matrix_.index_, lp.a_matrix_.value_ = columns, values
        if whole:
            lp.integrality_ = [COLUMN_TYPES[flag] for flag in integer.astype(int).tolist()]
        nodes = min(nodes, max(FEWEST_NODES, NODES_TIMES_COLUMNS // self.size))
        options: dict[str, bool | int | float] = {
            **OPTIONS,
            "mip_rel_gap": gap,
            "mip_max_nodes": nodes,
        }
        if gap != ROUGH_GAP:
            options |= dict.fromkeys(SEARCHES, False)
        result = _run(lp, options, start)
        if start is not None and (
            result is None or not isclose(result.value, goal.at(result.values), rel_tol=1e-6)
        ):
            # HiGHS 1.16.0 takes the value of a start without the constant of its presolve, so it
            # ends there as if optimal, or finds nothing.
            result = _run(lp, options, None)
        return result


class _Quiet(highspy.Highs):  # type: ignore[misc]
    """HiGHS without output.

    The constructor calls `enableCallbacks`, which prints from HiGHS 1.16 on. So the output is
    turned off before.
    """

    def enableCallbacks(self) -> None:
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()


def _run(
    lp: highspy.HighsLp, options: Mapping[str, bool | int | float], start: MilpResult | None
) -> MilpResult | None:
    budget, columns = _search_budget.get(), max(1, lp.num_col_)
    if budget is not None:
        if min(budget.attempts, budget.nodes) <= 0:
            raise SearchEnded
        nodes = max(1, min(int(options["mip_max_nodes"]), budget.nodes // columns))
        options = {**options, "mip_max_nodes": nodes}
    highs = _Quiet()
    for name, value in options.items():
        highs.setOptionValue(name, value)
    highs.passModel(lp)
    if start is not None:
        highs.setSolution(
            len(start.values), np.arange(len(start.values), dtype=np.int32), start.values
        )
    with _cancelled_by_ctrl_c(highs):
        highs.run()
    info = highs.getInfo()
    if budget is not None:
        budget.attempts -= 1
        budget.nodes -= max(1, int(info.mip_node_count)) * columns
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None
    value = float(info.objective_function_value)
    bound = float(info.mip_dual_bound) if len(lp.integrality_) else value
    values = np.array(highs.getSolution().col_value)
    return MilpResult(values, value, bound)


@contextmanager
def _cancelled_by_ctrl_c(highs: highspy.Highs) -> Iterator[None]:
    """Context in which Ctrl-C stops ``highs`` soon, and then raises KeyboardInterrupt.

    Otherwise Python would raise it only after `run`, which may take minutes. A handler that the
    process has installed is left alone.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupts = list[int]()

    def handle(number: int, _: FrameType | None) -> None:
        interrupts.append(number)
        highs.cancelSolve()

    highs.HandleUserInterrupt = True  # HiGHS asks now and then whether to stop
    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # or else a reference cycle keeps its memory until garbage collection
        highs.HandleUserInterrupt = False
    if interrupts:
        raise KeyboardInterrupt


def _arrays(rows: Sequence[Row]) -> list[NDArray[Any]]:
    """Return coefficients, their columns, coefficients per row, and bounds of ``rows``."""
    return [
        np.array([value for row in rows for value in row.terms.values()], dtype=float),
        np.array([column for row in rows for column in row.terms], dtype=np.int32),
        np.array([len(row.terms) for row in rows], dtype=np.int32),
        np.array([row.lower for row in rows], dtype=float),
        np.array([row.upper for row in rows], dtype=float),
    ]
