"""The program as columns and rows for a MILP solver, scaled; and its integers read back. Decides nothing.

Bytes are scaled so that the effective budget is 1000, seconds so that all compute and one copy of everything are 100. HiGHS accepts
rows that are violated by 1e-6: that is then 1e-9 of the budget, less than one allocation's rounding on any card.
Byte-sized coefficients made it call 18.25 s optimal where 15.99 s was.

Every way has integers of its own, bounded by whether it is taken: that keeps the relaxation tight.

Columns and rows for a MILP solver, and what it answers. Knows nothing of plans.

HiGHS accepts rows that are violated by 1e-6 and integers that are off by as much: whoever builds a model scales it for that.

The host's side of the program: which way of each component is taken, when its backing store is filled and freed, what RAM that takes.

    y[w]          way w is taken; one of each component
    F[w,t]        its backing store is filled in interval t: at most once, no later than its first use
    h[w,t]        its backing store is held, where RAM may bind: h[t] <= h[t-1] + F[t]; else it is held from its fill on
    RAM(t)        sum host_bytes*h + transient_bytes*F + spilled values + activation on the CPU <= RAM; page-locked bytes likewise

Rows that cannot bind are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import highspy
import numpy as np
from numpy.typing import NDArray

from graphrun.model.choices import activation_bytes
from graphrun.model.least_memory import DEPTH
from graphrun.solve.program import Choice, Group, Program, VariantChoice, usual_seconds

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


NOTHING: Sum = ({}, 0.0)
ONE: Sum = ({}, 1.0)


class BackingStores:
    """Columns for ``program``'s ways. ``tight``: whether backing stores may have to be freed."""

    def __init__(self, model: Model, program: Program, tight: bool) -> None:
        self.program = program
        self.taken: list[Sum] = []
        self.reads: list[Mapping[int, int]] = []
        self._held: list[list[int] | None] = []
        of = [
            [variant_choice for variant_choice in program.variant_choices if variant_choice.component == c]
            for c in range(len(program.problem.components))
        ]
        for variant_choices in of:
            columns = [model.column(0.0, 1.0, True) for _ in variant_choices] if len(variant_choices) > 1 else []
            if columns:
                model.row(dict.fromkeys(columns, 1.0), 1.0, 1.0)
            self.taken += [({column: 1.0}, 0.0) for column in columns] or [ONE for _ in variant_choices]
        for number, variant_choice in enumerate(program.variant_choices):
            self.reads.append(self._filled(model, number, variant_choice))
            self._held.append(
                self._holding(model, number, variant_choice) if tight and variant_choice.used and not program.session else None
            )

    def _filled(self, model: Model, number: int, variant_choice: VariantChoice) -> Mapping[int, int]:
        """F of a way that has to be filled: its columns by interval, up to its first use."""
        first = first_use(self.program, number)
        if variant_choice.read_seconds is None or first < 0:
            return {}
        columns = {t: model.column(0.0, 1.0, True) for t in range(first + 1)}
        terms, constant = self.taken[number]
        model.row(
            {**dict.fromkeys(columns.values(), 1.0), **{column: -value for column, value in terms.items()}}, constant, constant
        )
        return columns

    def _holding(self, model: Model, number: int, variant_choice: VariantChoice) -> list[int]:
        """h of a way in every interval."""
        columns = [model.column(0.0, 1.0, True) for _ in self.program.intervals]
        for t, column in enumerate(columns):
            before = ({columns[t - 1]: 1.0}, 0.0) if t else self.taken[number] if variant_choice.read_seconds is None else NOTHING
            fill = self.reads[number].get(t)
            terms, constant = plus(
                (1.0, ({column: 1.0}, 0.0)), (-1.0, before), (-1.0, NOTHING if fill is None else ({fill: 1.0}, 0.0))
            )
            model.row(terms, -np.inf, -constant)
            if fill is not None:
                model.row({column: 1.0, fill: -1.0}, 0.0, np.inf)
        return columns

    def held(self, number: int, t: int) -> Sum:
        """Whether the backing store of way ``number`` is held in interval ``t``."""
        if (columns := self._held[number]) is not None:
            return {columns[t]: 1.0}, 0.0
        if self.reads[number]:
            return {column: 1.0 for at, column in self.reads[number].items() if at <= t}, 0.0
        return self.taken[number] if self.program.variant_choices[number].read_seconds is None else NOTHING

    def always_held(self, number: int, t: int) -> bool:
        """Whether it is held in interval ``t`` wherever the way is taken at all."""
        if self._held[number] is not None:
            return False
        return not self.reads[number] or t >= max(self.reads[number])

    def host(self, t: int, locked: bool) -> Sum:
        """Bytes of backing stores in interval ``t``: in RAM, or page-locked ones only."""
        parts: list[tuple[float, Sum]] = []
        for number, variant_choice in enumerate(self.program.variant_choices):
            nbytes = variant_choice.of.locked_bytes if locked else variant_choice.of.host_bytes
            if variant_choice.used and nbytes:
                parts.append((float(nbytes), self.held(number, t)))
            if not locked and variant_choice.of.transient_bytes and (fill := self.reads[number].get(t)) is not None:
                parts.append((float(variant_choice.of.transient_bytes), ({fill: 1.0}, 0.0)))
        return plus(*parts)


def first_use(program: Program, number: int) -> int:
    """The first interval that needs something of way ``number``; -1: none does."""
    variant_choice = program.variant_choices[number]
    groups = [j for j, group in enumerate(program.groups) if group.variant_choice == number]
    for t, interval in enumerate(program.intervals):
        if (not variant_choice.computes and variant_choice.component in interval.around) or any(interval.calls[j] for j in groups):
            return t
    return -1


def most_host_bytes(program: Program, locked: bool) -> int:
    """More RAM than any choice takes in any interval."""
    total = 0
    for component in range(len(program.problem.components)):
        variant_choices = [
            variant_choice
            for variant_choice in program.variant_choices
            if variant_choice.component == component and variant_choice.used
        ]
        total += max(
            (
                variant_choice.of.locked_bytes if locked else variant_choice.of.host_bytes + variant_choice.of.transient_bytes
                for variant_choice in variant_choices
            ),
            default=0,
        )
    if locked:
        return total
    if any(not variant_choice.computes for variant_choice in program.variant_choices):
        total += max((interval.activation_bytes for interval in program.intervals), default=0)
    return total + sum(gap.nbytes for gap in program.spill_gaps)


def freed(program: Program, choice: Choice, *, always: bool = False) -> Choice:
    """``choice`` with every backing store freed when nothing needs it any more, where RAM would not hold them all to the end."""
    problem, host = program.problem, program.host_bytes(choice)
    limits = (problem.ram_bytes, problem.pinned_bytes)
    fits = all(limit is None or taken <= limit for slot in host for taken, limit in zip(slot, limits, strict=True))
    if (fits and not always) or program.session:
        return choice
    after = [need + 1 for need in program.last_need(choice)]
    end = len(program.intervals)
    held = [
        variant_choice.used and (variant_choice.read_seconds is None or fill >= 0)
        for variant_choice, fill in zip(program.variant_choices, choice.reads, strict=True)
    ]
    drops = tuple(at if at < end and is_held else -1 for at, is_held in zip(after, held, strict=True))
    return replace(choice, drops=drops)


MEMORY_SCALE = 1000.0
TIME_SCALE = 100.0
ROUNDED = 1e-5  # blocks: by how much the solver may miss an integer

Tier = Literal["ram", "pinned", "disk"]


@dataclass(frozen=True, slots=True)
class Spare:
    """Bytes that are kept free in each interval, on the device and of both budgets of the host."""

    device: Mapping[int, int] = field(default_factory=dict)
    ram: Mapping[int, int] = field(default_factory=dict)
    pinned: Mapping[int, int] = field(default_factory=dict)


class Matrix:
    """Rows and columns of ``program``. ``factors[t]`` multiplies copy times of interval t; ``weigh``: a tier whose least is sought;
    ``depth``: for how many blocks a ring has room, unless for one alone.

    ``seconds``, ``copying`` (of blocks), ``moved``, ``memory``: goals in scaled units, the last one being the peak plus a little of
    the mean, so that nothing is loaded earlier than it helps. ``peak`` alone; ``tier``: the most bytes taken of the tier weighed.
    """

    def __init__(
        self,
        program: Program,
        factors: Sequence[float],
        spare: Spare | None = None,
        weigh: Tier | None = None,
        depth: int = DEPTH,
    ) -> None:
        self.program, problem = program, program.problem
        self.factors, self.spare, self.weigh, self.depth = factors, spare or Spare(), weigh, depth
        self.bytes_unit = max(1, problem.effective_bytes) / MEMORY_SCALE
        self.seconds_unit = max(usual_seconds(program), 1e-9) / TIME_SCALE
        self.model = Model(COARSE_GAP if any(group.by_layer for group in program.groups) else GAP)
        self.present: list[list[int]] = []
        self.loaded: list[list[int]] = []
        self.alone: list[dict[int, int]] = []  # per interval: r of the cells that may be streamed
        self._activations: list[tuple[Sum, Sum]] = []  # per interval: on the device, on the host
        self._uses = [[t for t, interval in enumerate(program.intervals) if interval.calls[j]] for j in range(len(program.groups))]
        self._starts = (0, program.turn) if program.session else (0,)
        peak = self.model.column(0.0, np.inf)
        self._ram, self._pinned = self._binds("ram"), self._binds("pinned")
        self.backing_stores = BackingStores(self.model, program, self._ram or self._pinned)
        self._spills = [self.model.column(0.0, 1.0, True) for _ in program.spill_gaps]
        seconds: dict[int, float] = {}
        moved, copying = dict[int, float](), dict[int, float]()
        occupied: dict[int, float] = {}
        always = 0.0
        for t, interval in enumerate(program.intervals):
            self.present.append([])
            self.loaded.append([])
            self.alone.append({})
            copies, rings = self._groups(t)
            seconds[self._time(t, copies, factors[t])] = interval.weight
            used, fixed = self._memory(t, rings)
            kept = self.spare.device.get(t, 0) / self.bytes_unit
            self.model.row(used, -np.inf, MEMORY_SCALE - fixed - kept)
            self.model.row({**used, peak: -1.0}, -np.inf, -fixed)
            for j, column in self.alone[t].items():  # nor is a ring for one block alone chosen where it saves nothing
                occupied[column] = 2e-3 * program.groups[j].block_bytes / self.bytes_unit / len(program.intervals)
            for column, value in used.items():
                occupied[column] = occupied.get(column, 0.0) + 1e-3 * value / len(program.intervals)
            for group, (terms, constant) in zip(program.groups, copies, strict=True):
                size, takes = group.block_bytes / self.bytes_unit, group.load_seconds / self.seconds_unit
                for column, value in terms.items():
                    moved[column] = moved.get(column, 0.0) + interval.weight * size * value
                    copying[column] = copying.get(column, 0.0) + interval.weight * takes * value
                always += interval.weight * size * constant
        for gap, column in zip(program.spill_gaps, self._spills, strict=True):
            moved[column] = program.intervals[gap.back].weight * gap.nbytes / self.bytes_unit
        self._returns()
        self.seconds: Sum = (seconds, 0.0)
        self.moved: Sum = (moved, always)
        self.copying: Sum = (copying, 0.0)
        self.memory: Sum = ({**occupied, peak: 1.0 + occupied.get(peak, 0.0)}, 0.0)
        self.peak: Sum = ({peak: 1.0}, 0.0)
        self.tier: Sum = self._hosts()

    def _binds(self, tier: Tier) -> bool:
        problem, most = self.program.problem, most_host_bytes(self.program, tier == "pinned")
        limit = problem.ram_bytes if tier == "ram" else problem.pinned_bytes
        return self.weigh == tier or (limit is not None and most > limit)

    def _groups(self, t: int) -> tuple[list[Sum], dict[int, list[tuple[int, int]]]]:
        """K, d and s of interval ``t``. Returns blocks moved per cell, and per streaming way its (s column, cell)s."""
        interval, model = self.program.intervals[t], self.model
        copies: list[Sum] = []
        streams: dict[int, list[tuple[int, int]]] = {}
        for j, group in enumerate(self.program.groups):
            calls, count = interval.calls[j], float(group.count)
            whole, stays = bool(calls) and not group.streamable, "keep" in group.demanded and self._used_before(t, j)
            needed = t <= max(self._uses[j], default=-1) or (self.program.session and bool(self._uses[j]))
            beside = interval.part == "steady" and group.component in interval.used
            may_be, may_load = self._allowed(t, j)
            may_be = may_be and (needed or stays or not group.movable)
            all_of: Sum = plus((count, self.backing_stores.taken[group.variant_choice]))
            fixed = count if (whole or stays) and not all_of[0] else 0.0
            present = model.column(fixed, count if may_be else 0.0, not group.by_layer)
            loaded = model.column(0.0, count if may_load and needed and not whole and not beside else 0.0, not group.by_layer)
            self.present[t].append(present)
            self.loaded[t].append(loaded)
            here: Sum = ({present: 1.0}, 0.0)
            after: Sum = ({present: 1.0, loaded: 1.0}, 0.0)
            model.row(*row_of(plus((1.0, after), (-1.0, all_of)), most=True))
            if (whole or stays) and all_of[0]:
                model.row(*row_of(plus((1.0, here), (-1.0, all_of))))
            self._follows(t, j)
            if not calls:
                copies.append(({loaded: 1.0}, 0.0))
                self._ready(t, group.variant_choice, ({loaded: 1.0}, 0.0), count)
            elif whole:
                copies.append(({}, 0.0))
            else:
                passes = interval.passes[j]
                times, kept = float(calls * passes), float(passes - 1)
                copies.append(plus((times, all_of), (-times, here), (-kept, ({loaded: 1.0}, 0.0))))
                self._ready(t, group.variant_choice, plus((1.0, all_of), (-1.0, here)), count)
                streamed = model.column(0.0, 0.0 if group.demanded & {"keep", "whole"} else 1.0, True)
                if group.by_layer and not group.demanded & {"keep", "whole"}:  # a ring for the way that is taken, and for no other
                    model.row(*row_of(plus((1.0, ({streamed: 1.0}, 0.0)), (-1.0, self.backing_stores.taken[group.variant_choice]))))
                model.row(*row_of(plus((1.0, after), (count, ({streamed: 1.0}, 0.0)), (-1.0, all_of))))
                streams.setdefault(group.variant_choice, []).append((streamed, j))
                known = [self.alone[t][i] for _, i in streams[group.variant_choice][:-1]] if group.by_layer else []
                self.alone[t][j] = known[0] if known else model.column(0.0, 1.0, True)
        return copies, streams

    def _follows(self, t: int, j: int) -> None:
        """K in interval ``t`` against what the interval before left; nothing at the very first."""
        group, present = self.program.groups[j], self.present[t][j]
        before = {self.present[t - 1][j]: -1.0, self.loaded[t - 1][j]: -1.0} if t else {}
        self.model.row({present: 1.0, **before}, -np.inf if group.movable else 0.0, 0.0)

    def _returns(self) -> None:
        """A session's further run begins with what the run before it left, be that the first or one of its own kind."""
        if not self.program.session:
            return
        start, end = self.program.turn, len(self.program.intervals) - 1
        for j, group in enumerate(self.program.groups):
            terms = {self.present[start][j]: 1.0, self.present[end][j]: -1.0}
            terms[self.loaded[end][j]] = -1.0
            if start != end:
                self.model.row(terms, -np.inf if group.movable else 0.0, 0.0)

    def _ready(self, t: int, variant_choice: int, copied: Sum, most: float) -> None:
        """Nothing is copied while the backing store is not held. ``copied``: blocks, ``most`` of them."""
        if not self.backing_stores.always_held(variant_choice, t):
            terms, constant = plus((1.0, copied), (-most, self.backing_stores.held(variant_choice, t)))
            self.model.row(terms, -np.inf, -constant)

    def _used_before(self, t: int, j: int) -> bool:
        """Whether an earlier interval of the same run uses cell ``j``."""
        start = max(begin for begin in self._starts if begin <= t)
        return any(start <= use < t for use in self._uses[j])

    def _allowed(self, t: int, j: int) -> tuple[bool, bool]:
        """Whether directives let blocks of cell ``j`` be present when interval ``t`` starts, and be loaded in it."""
        group, interval = self.program.groups[j], self.program.intervals[t]
        if group.excluded:
            return False, False
        if "drop" in group.demanded:
            name = self.program.problem.components[group.component].name
            own = any(use.component == name for use in self.program.problem.phases[interval.phase].uses)
            return own and interval.part != "load", own
        return True, True

    def _time(self, t: int, copies: list[Sum], factor: float) -> int:
        """D of interval ``t``: its column."""
        program, model = self.program, self.model
        every: list[tuple[float, Sum]] = []
        reads: list[tuple[float, Sum]] = []
        time = model.column(0.0, np.inf)
        own: list[tuple[float, Sum]] = [(1.0, ({time: 1.0}, 0.0))]
        for j, blocks in enumerate(copies):
            group = program.groups[j]
            every.append((-group.load_seconds * factor / self.seconds_unit, blocks))
            reads += [(-group.disk_seconds * factor / self.seconds_unit, blocks)] if group.disk_seconds else []
        for groups in program.stretches(t):
            longer = self._stretch(t, groups, copies, factor)
            own.append((-1.0, ({longer: 1.0}, 0.0)))
        interval = program.intervals[t]
        own += [(-s / self.seconds_unit, y) for s, y in zip(interval.cpu_seconds, self.backing_stores.taken, strict=True) if s]
        model.row(*row_of(plus(*own)))
        for gap, column in zip(program.spill_gaps, self._spills, strict=True):
            if seconds := gap.seconds(t):
                every.append((-seconds * factor / self.seconds_unit, ({column: 1.0}, 0.0)))
        model.row(*row_of(plus((1.0, ({time: 1.0}, 0.0)), *every)))
        for variant_choice, filled in zip(program.variant_choices, self.backing_stores.reads, strict=True):
            if t in filled and variant_choice.read_seconds:
                reads.append((-variant_choice.read_seconds * factor / self.seconds_unit, ({filled[t]: 1.0}, 0.0)))
        if reads:
            model.row(*row_of(plus((1.0, ({time: 1.0}, 0.0)), *reads)))
        for number, variant_choice in enumerate(program.variant_choices):
            if (
                not variant_choice.computes
                and variant_choice.component in interval.around
                and not self.backing_stores.always_held(number, t)
            ):
                model.row(*row_of(plus((1.0, self.backing_stores.held(number, t)), (-1.0, self.backing_stores.taken[number]))))
        return time

    def _stretch(self, t: int, groups: list[int], copies: list[Sum], factor: float) -> int:
        """E of ``groups``, whose copies can hide behind each other's compute in interval ``t``: its column."""
        program, model, unit = self.program, self.model, self.seconds_unit
        compute = plus(
            (
                sum(program.compute_seconds(t, j) for j in groups) / unit,
                self.backing_stores.taken[program.groups[groups[0]].variant_choice],
            )
        )
        longer = model.column(compute[1], np.inf)
        if compute[0]:
            model.row(*row_of(plus((1.0, ({longer: 1.0}, 0.0)), (-1.0, compute))))
        copied = [(-program.groups[j].load_seconds * factor / unit, copies[j]) for j in groups]
        reads = [(-program.groups[j].disk_seconds * factor / unit, copies[j]) for j in groups if program.groups[j].disk_seconds]
        for rated in (copied, reads) if reads else (copied,):
            model.row(*row_of(plus((1.0, ({longer: 1.0}, 0.0)), *rated)))
        turns = [(-program.compute_seconds(t, j) / unit, ({self.alone[t][j]: 1.0}, 0.0)) for j in groups if j in self.alone[t]]
        if turns:
            model.row(*row_of(plus((1.0, ({longer: 1.0}, 0.0)), *copied, *turns)))
        return longer

    def _memory(self, t: int, streams: dict[int, list[tuple[int, int]]]) -> tuple[dict[int, float], float]:
        """What interval ``t`` takes on the device: scaled terms, and what it takes anyway."""
        used: dict[int, float] = {}
        for j, group in enumerate(self.program.groups):
            used[self.present[t][j]] = used[self.loaded[t][j]] = group.held_bytes / self.bytes_unit
        fixed = float(self.program.intervals[t].fixed_bytes)
        for members in streams.values():
            largest, beside = self.model.column(0.0, np.inf), self.model.column(0.0, np.inf)
            used[largest] = used[beside] = 1.0
            for streamed, j in members:
                size = self.program.groups[j].held_bytes / self.bytes_unit
                least, more = self.program.in_ring(t, j, False) / self.bytes_unit, (self.depth - 1) * size
                self.model.row({largest: 1.0, streamed: -least}, 0.0, np.inf)
                self.model.row({beside: 1.0, streamed: -more, self.alone[t][j]: more}, 0.0, np.inf)
                if least < size:
                    self.model.row({largest: 1.0, streamed: -size, self.alone[t][j]: size}, 0.0, np.inf)
        self._activations.append(self._activation(t))
        activation, _ = self._activations[t]
        spilled = [
            (-float(g.nbytes), ({s: 1.0}, 0.0)) for g, s in zip(self.program.spill_gaps, self._spills, strict=True) if g.absent(t)
        ]
        terms, constant = plus((1.0, activation), *spilled)
        for column, value in terms.items():
            used[column] = used.get(column, 0.0) + value / self.bytes_unit
        return used, (fixed + constant) / self.bytes_unit

    def _activation(self, t: int) -> tuple[Sum, Sum]:
        """Activation on the device in interval ``t``, in bytes, and on the host."""
        interval, taken = self.program.intervals[t], self.backing_stores.taken
        if not interval.rounds:
            return NOTHING, NOTHING
        nbytes = interval.activation_bytes
        around = [
            [n for n, variant_choice in enumerate(self.program.variant_choices) if variant_choice.component == c]
            for c in sorted(interval.around)
        ]
        variant_choices = self.program.variant_choices
        if all(len(of) == 1 for of in around):
            device = activation_bytes(nbytes, [variant_choices[n].of for of in around for n in of], interval.glue_bytes)
            return ({}, float(device)), (
                {},
                0.0 if not around or any(variant_choices[n].computes for of in around for n in of) else nbytes,
            )
        if len(around) == 1:
            (of,) = around
            device_of = [(float(activation_bytes(nbytes, [variant_choices[n].of], interval.glue_bytes)), taken[n]) for n in of]
            return plus(*device_of), plus(*((float(nbytes), taken[n]) for n in of if not variant_choices[n].computes))
        return self._shared_activation(nbytes, around, interval.glue_bytes)

    def _shared_activation(self, nbytes: int, around: list[list[int]], handed: int) -> tuple[Sum, Sum]:
        """Several components, some with a choice. A >= nbytes and the largest scratch where one is on the device (z)."""
        model, variant_choices, taken, more = self.model, self.program.variant_choices, self.backing_stores.taken, nbytes - handed
        on_device = [plus(*((1.0, taken[n]) for n in of if variant_choices[n].computes)) for of in around]
        unit = self.bytes_unit
        activation, awake = model.column(0.0, np.inf), model.column(0.0, 1.0)
        a: Sum = ({activation: unit}, 0.0)
        z: Sum = ({awake: 1.0}, 0.0)
        model.row(*row_of(plus((1.0, z), *((-1.0, of) for of in on_device)), most=True))
        for of, here in zip(around, on_device, strict=True):
            model.row(*row_of(plus((1.0, z), (-1.0, here))))
            scratch = [(-float(variant_choices[n].of.scratch_bytes) / unit, taken[n]) for n in of if variant_choices[n].computes]
            model.row(*row_of(plus((1.0 / unit, a), (-more / unit, z), *scratch)))
            for n in of:
                if not variant_choices[n].computes and (extra := float(variant_choices[n].of.scratch_bytes)):
                    both = plus((1.0, taken[n]), (1.0, z), (-1.0, ONE))
                    model.row(*row_of(plus((1.0 / unit, a), (-more / unit, z), (-extra / unit, both))))
        return plus((1.0, a), (handed, ONE)), plus((float(nbytes), ONE), (-float(nbytes), z))

    def _hosts(self) -> Sum:
        """Rows of RAM, page-locked RAM and disk, where they can bind; the goal of the tier that is weighed."""
        problem, goal = self.program.problem, NOTHING
        tiers: list[tuple[Tier, int | None, bool]] = [
            ("ram", problem.ram_bytes, self._ram),
            ("pinned", problem.pinned_bytes, self._pinned),
        ]
        for tier, limit, binds in tiers:
            most_bytes = most_host_bytes(self.program, tier == "pinned")
            unit = max(1, most_bytes if limit is None or self.weigh == tier else limit) / MEMORY_SCALE
            most = self.model.column(0.0, np.inf) if self.weigh == tier else None
            for t in range(len(self.program.intervals)) if binds else ():
                nbytes, constant = self._host(t, tier)
                terms = {column: value / unit for column, value in nbytes.items()}
                kept = (self.spare.ram if tier == "ram" else self.spare.pinned).get(t, 0)
                if most is not None:
                    self.model.row({**terms, most: -1.0}, -np.inf, -constant / unit)
                elif limit is not None:
                    self.model.row(terms, -np.inf, (limit - constant - kept) / unit)
            goal = ({most: unit}, 0.0) if most is not None else goal
        variant_choices = zip(self.program.variant_choices, self.backing_stores.taken, strict=True)
        stored = plus(*((float(variant_choice.of.stored_bytes), y) for variant_choice, y in variant_choices if variant_choice.used))
        if self.weigh == "disk":
            return stored
        if problem.disk_bytes is not None:
            unit = max(1.0, float(problem.disk_bytes)) / MEMORY_SCALE
            terms = {column: value / unit for column, value in stored[0].items()}
            self.model.row(terms, -np.inf, (problem.disk_bytes - stored[1]) / unit)
        return goal

    def _host(self, t: int, tier: Tier) -> Sum:
        backing_stores = self.backing_stores.host(t, tier == "pinned")
        if tier == "pinned":
            return backing_stores
        spill_gaps = zip(self.program.spill_gaps, self._spills, strict=True)
        spilled = [(float(g.nbytes), ({column: 1.0}, 0.0)) for g, column in spill_gaps if g.out <= t <= g.back]
        return plus((1.0, backing_stores), (1.0, self._activations[t][1]), *spilled)

    def choice(self, values: NDArray[np.float64]) -> tuple[tuple[int, ...], Choice]:
        """The variant of each component, and the integers of the program that takes them. Backing stores are freed as `freed` says."""
        program = self.program
        variant_choices = self._taken(values)
        groups = [j for j, group in enumerate(program.groups) if group.variant_choice in variant_choices]
        counts = [
            [_whole_blocks(program.groups[j], float(values[here[j]]), float(values[more[j]])) for j in groups]
            for here, more in zip(self.present, self.loaded, strict=True)
        ]
        present, loaded = (tuple(tuple(of[n] for of in row) for row in counts) for n in (0, 1))
        reads = tuple(
            max((t for t, c in self.backing_stores.reads[n].items() if values[c] > 0.5), default=-1) for n in variant_choices
        )
        spills = tuple(bool(values[column] > 0.5) for column in self._spills)
        variants = tuple(program.variant_choices[n].variant for n in variant_choices)
        depths = tuple(tuple(1 if j in alone and values[alone[j]] > 0.5 else self.depth for j in groups) for alone in self.alone)
        kept = Choice(present, loaded, reads, (-1,) * len(variant_choices), spills, depths)
        return variants, freed(program.taking(variants), kept)

    @property
    def layers(self) -> list[int]:
        """The columns that count layers, of which the program lets parts be held."""
        found = list[int]()
        for of in (*self.present, *self.loaded):
            found += [column for column, group in zip(of, self.program.groups, strict=True) if group.by_layer]
        return found

    def taken(self, values: NDArray[np.float64]) -> dict[int, float]:
        """The columns that say which variant of each component is taken, as in ``values``, where these are whole."""
        variants, fixed = self._taken(values), dict[int, float]()
        for number, (terms, _) in enumerate(self.backing_stores.taken):
            fixed |= dict.fromkeys(terms, float(number in variants))
        return fixed

    def computing(self, values: NDArray[np.float64]) -> dict[int, float]:
        """The columns of blocks in the slots that compute with them, as in ``values``."""
        found = dict[int, float]()
        for t, interval in enumerate(self.program.intervals):
            here = [column for of in (self.present[t], self.loaded[t]) for column, n in zip(of, interval.calls, strict=True) if n]
            found |= {column: float(round(values[column])) for column in here}
        return found

    @property
    def first(self) -> dict[int, float]:
        """As `taken`, of the first variant of each component."""
        fixed = dict[int, float]()
        for number, (terms, _) in enumerate(self.backing_stores.taken):
            fixed |= dict.fromkeys(terms, float(number == self._variant_choices(self.program.variant_choices[number].component)[0]))
        return fixed

    def _taken(self, values: NDArray[np.float64]) -> list[int]:
        """The way of each component that ``values`` take, or are nearest to taking."""
        components = range(len(self.program.problem.components))
        return [max(self._variant_choices(c), key=lambda n: value_of(self.backing_stores.taken[n], values)) for c in components]

    def _variant_choices(self, component: int) -> list[int]:
        return [n for n, variant_choice in enumerate(self.program.variant_choices) if variant_choice.component == component]


def _whole_blocks(group: Group, present: float, loaded: float) -> tuple[int, int]:
    """K and d as integers. Layers are so small and so many that what is left of one is given away: it is streamed."""
    if not group.by_layer:
        return round(present), round(loaded)
    held = int(present + ROUNDED)
    return held, int(present + loaded + ROUNDED) - held
