"""The variables of a `Program` as MILP columns, with all rows but the seconds and bytes.

Every variant has its own integers, bounded by whether the variant is chosen. That keeps the
relaxation tight.

Bytes are scaled so that a budget is 1000, and seconds so that all compute plus one copy of every
block is 100. HiGHS tolerates errors of 1e-6 in rows and integers: in scaled units 1e-9 of the
budget, less than the rounding of one allocation. With unscaled bytes, HiGHS reported 18.25 s as
optimal where 15.99 s was.

K, d, s, r and y are those of `graphrun.solve.program`; y has one column per variant choice.

Host memory:

    F[n,t]    1 if the backing store of n is read in interval t: in at most one interval, not later
              than the first use of n
    h[n,t]    1 if host memory has the backing store of n. Where RAM may be the limit:
              h[t] <= h[t-1] + F[t]; elsewhere h = 1 from the read on
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Literal

import numpy as np

from graphrun.model.choices import BUFFERED_BLOCKS
from graphrun.solve.linear import Linear, MilpModel, Row, total
from graphrun.solve.program import Group, Program
from graphrun.solve.rows import Variables
from graphrun.solve.split_columns import SplitColumns

MEMORY_SCALE = 1000.0
TIME_SCALE = 100.0
ZERO, ONE = Linear(), Linear({}, 1.0)


class Columns(Variables[Linear]):
    """The variables of ``program`` as columns of ``model``.

    Call `add_interval` for every interval, in order. ``stores_may_drop``: backing stores may be
    dropped before the end of the run. ``depth``: blocks in a double-buffered or deeper ring buffer.
    """

    def __init__(
        self,
        program: Program,
        model: MilpModel,
        *,
        stores_may_drop: bool,
        depth: int = BUFFERED_BLOCKS,
    ) -> None:
        self._program, self._model, self._depth = program, model, depth
        self._present: list[list[Linear]] = []
        self._loads: list[list[Linear]] = []
        self._end_blocks: list[list[Linear]] = []
        self._blocks: dict[int, Linear] = {}
        # per interval: group -> s, group -> r
        self._streamed: list[dict[int, Linear]] = []
        self._single: list[dict[int, Linear]] = []
        # (interval, variant choice with layers) -> r
        self._layer_singles: dict[tuple[int, int], Linear] = {}
        self._uses = [
            np.flatnonzero(program.calls[:, j]).tolist() for j in range(len(program.groups))
        ]
        self.selections: list[Linear] = []
        for numbers in program.choices_of:
            binaries = [model.binary() for _ in numbers] if len(numbers) > 1 else []
            if binaries:
                model.add(total(binaries).equals(1.0))
            self.selections += binaries or [ONE for _ in numbers]
        for copy, original in enumerate(program.stores):
            if copy != original and (selection := self.selections[copy]).terms:
                original_selection = self.selections[original] if original >= 0 else ZERO
                model.add(selection <= original_selection)
        self._reads: list[dict[int, Linear]] = []
        # h by interval; empty where the backing store stays from its read on
        self._stores: list[list[Linear]] = []
        for number in range(len(program.variant_choices)):
            self._add_store(number, stores_may_drop)
        self.splits = SplitColumns(program, model, self.selections)
        self._spills = [model.binary() for _ in program.spill_gaps]

    def bytes_unit(self, device: int) -> float:
        return max(1, self._program.limit(device) or 0) / MEMORY_SCALE

    @cached_property
    def seconds_unit(self) -> float:
        """Seconds per unit of the rows."""
        return max(self._program.reference_seconds, 1e-9) / TIME_SCALE

    # ---- Variables

    def present(self, t: int, j: int) -> Linear:
        return self._present[t][j]

    def loads(self, t: int, j: int) -> Linear:
        return self._loads[t][j]

    def blocks(self, j: int) -> Linear:
        """Return the number of blocks of group ``j``, less the blocks of its mirror groups.

        Blocks of mirror groups are on secondary devices. 0 if the group's variant is not chosen.
        """
        if j not in self._blocks:
            self._blocks[j] = self._count_blocks(j)
        return self._blocks[j]

    def _count_blocks(self, j: int) -> Linear:
        group, splits = self._program.groups[j], self.splits
        if group.mirror >= 0:
            return splits.blocks[j]
        count = self.selections[group.variant_choice] * float(group.count)
        mirrors = [splits.blocks[mirror] * -1.0 for mirror in splits.mirrors.get(j, ())]
        return total([count, *mirrors]) if mirrors else count

    def streamed(self, t: int, j: int) -> Linear:
        return self._streamed[t].get(j, ZERO)

    def single(self, t: int, j: int) -> Linear:
        return self._single[t].get(j, ZERO)

    def further_blocks(self, t: int, j: int) -> Linear:
        return (self.streamed(t, j) - self.single(t, j)) * float(self._depth - 1)

    def chosen(self, n: int) -> Linear:
        return self.selections[n]

    def reads(self, t: int, n: int) -> Linear:
        return self._reads[n].get(t, ZERO)

    def holds(self, t: int, n: int) -> Linear:
        if self._stores[n]:
            return self._stores[n][t]
        if self._reads[n]:
            return total(column for slot, column in self._reads[n].items() if slot <= t)
        return self.selections[n] if self._program.has_store(n) else ZERO

    def spilled(self, g: int) -> Linear:
        return self._spills[g]

    def split_seconds(self, t: int) -> list[Linear]:
        return self.splits.seconds(t)

    def saved_seconds(self, t: int, j: int) -> list[Linear]:
        return self.splits.saved_seconds(t, j)

    def split_working_sets(self, t: int, secondary: int) -> list[Linear]:
        return self.splits.working_sets(t, secondary)

    def maximum(self, parts: Iterable[Linear], scale: int | Literal["seconds"]) -> Linear:
        """Return a column no less than any of ``parts``.

        ``parts`` may be an iterator that adds columns when it is read. Their maximum gets its
        column first: in the reverse order, planning FLUX took 1.1 to 1.8 times as long.
        """
        unit = self.seconds_unit if scale == "seconds" else self.bytes_unit(scale)
        column, minimum = self._model.column(), 0.0
        for part in parts:
            if part.terms:
                self._model.add(column.at_least(part, unit))
            minimum = max(minimum, 0.0 if part.terms else part.constant)
        self._model.raise_lower(column, minimum / unit)
        return column * unit

    def any_of(self, flags: Sequence[Linear]) -> Linear:
        if any(not flag.terms and flag.constant for flag in flags):
            return ONE
        variable_flags = [flag for flag in flags if flag.terms]
        if len(variable_flags) < 2:
            return total(variable_flags)
        column = self._model.column(upper=1.0)
        self._model.add(
            column <= total(variable_flags), *(column >= flag for flag in variable_flags)
        )
        return column

    def number(self, value: float) -> Linear:
        return Linear({}, value)

    def total(self, parts: Iterable[Linear]) -> Linear:
        return total(parts)

    # ---- Rows

    def _add_store(self, number: int, may_drop: bool) -> None:
        program, model = self._program, self._model
        variant_choice, selection = program.variant_choices[number], self.selections[number]
        first = program.first_use(number) if variant_choice.read_seconds is not None else -1
        reads = (
            {t: model.binary() for t in range(first + 1)} if program.only_run != "further" else {}
        )
        if reads:
            model.add(total(reads.values()).equals(selection))
        store: list[Linear] = []
        for t in range(len(program.intervals)) if may_drop and variant_choice.is_used else ():
            store.append(model.binary())
            start = selection if variant_choice.read_seconds is None else ZERO
            previous = store[t - 1] if t else start
            model.add(store[t] <= previous + reads.get(t, ZERO))
            if t in reads:
                model.add(store[t] >= reads[t])
        self._reads.append(reads)
        self._stores.append(store)

    def add_interval(self, t: int) -> None:
        for columns in (self._present, self._loads, self._end_blocks):
            columns.append([])
        for flags in (self._streamed, self._single):
            flags.append({})
        for j in range(len(self._program.groups)):
            self._add_group(t, j)
        # a component on the CPU computes from its backing store
        for number, selection in enumerate(self.selections):
            if self._program.called_on_cpu(number, t) and not self._always_holds(number, t):
                self._model.add(self.holds(t, number) >= selection)

    def _add_group(self, t: int, j: int) -> None:
        program, model = self._program, self._model
        interval, group = program.intervals[t], program.groups[j]
        calls, count = interval.calls[j], float(group.count)
        # blocks that cannot be streamed; blocks that `keep` demands
        needs_all_blocks = bool(calls) and not group.streamable
        is_kept = "keep" in group.demanded and self._used_before(t, j)
        has_later_use = t <= max(self._uses[j], default=-1) or (
            program.session and bool(self._uses[j])
        )
        computes_in_steady_slot = (
            interval.part == "steady" and group.component in interval.computing_components
        )
        may_be_present, may_load = self._allowed(t, j)
        may_be_present = may_be_present and (has_later_use or is_kept or not group.movable)
        may_load = (
            may_load and has_later_use and not needs_all_blocks and not computes_in_steady_slot
        )
        block_count = self.blocks(j)
        minimum = count if (needs_all_blocks or is_kept) and not block_count.terms else 0.0
        present = model.column(minimum, count if may_be_present else 0.0, not group.by_layer)
        loads = model.column(0.0, count if may_load else 0.0, not group.by_layer)
        self._present[t].append(present)
        self._loads[t].append(loads)
        end_blocks = present + loads
        self._end_blocks[t].append(end_blocks)
        model.add(end_blocks <= block_count)
        if (needs_all_blocks or is_kept) and block_count.terms:
            model.add(present >= block_count)
        if t or program.only_run != "further":
            model.add(self.carry_row(j, t, t - 1))
        if not calls:
            self._require_store(t, group, loads)
        elif not needs_all_blocks:
            self._require_store(t, group, block_count - present)
            self._add_streaming(t, j, block_count - end_blocks)

    def _add_streaming(self, t: int, j: int, missing_blocks: Linear) -> None:
        """Add s and r of group ``j``. Blocks that are not on the device are streamed."""
        group, model = self._program.groups[j], self._model
        resident = bool(group.demanded & {"keep", "whole"})  # directives demand all blocks
        streamed = model.binary(upper=0.0 if resident else 1.0)
        # K and d of layers are fractions here, and are rounded down later. The layers that rounding
        # takes away are streamed, so s = 1 even if the fractions add up to all layers.
        if group.by_layer and not resident:
            model.add(streamed >= self.selections[group.variant_choice])
        model.add(streamed * float(group.count) >= missing_blocks)
        self._streamed[t][j] = streamed
        # One r for all groups of a variant: layers form many groups.
        single = self._layer_singles.get((t, group.variant_choice)) or model.binary()
        self._single[t][j] = single
        if group.by_layer:
            self._layer_singles[t, group.variant_choice] = single

    def single_columns(self, t: int) -> dict[int, Linear]:
        """Return r of each group that may be streamed in interval ``t``."""
        return self._single[t]

    def carry_row(self, j: int, t: int, previous: int) -> Row:
        """Bound K of group ``j`` in ``t`` by K + d in ``previous`` (-1: an empty device)."""
        end_blocks = self.end_blocks(previous, j) if previous >= 0 else ZERO
        present = self._present[t][j]
        movable = self._program.groups[j].movable
        return present <= end_blocks if movable else present.equals(end_blocks)

    def end_blocks(self, t: int, j: int) -> Linear:
        return self._end_blocks[t][j]

    def _require_store(self, t: int, group: Group, copied_blocks: Linear) -> None:
        """Forbid copies of ``group`` in interval ``t`` without its backing store."""
        store = self._program.stores[group.variant_choice]
        if store >= 0 and not self._always_holds(store, t):
            self._model.add(copied_blocks <= self.holds(t, store) * float(group.count))

    def _always_holds(self, number: int, t: int) -> bool:
        """Whether host memory has backing store ``number`` in ``t`` whenever it is chosen."""
        return not self._stores[number] and t >= max(self._reads[number], default=0)

    def _used_before(self, t: int, j: int) -> bool:
        """Whether an earlier interval of the same run uses group ``j``."""
        run_length = self._program.run_length
        start = run_length if self._program.session and t >= run_length else 0
        return any(start <= use < t for use in self._uses[j])

    def _allowed(self, t: int, j: int) -> tuple[bool, bool]:
        """Whether directives allow blocks of ``j`` at the start of ``t``, and loads during it."""
        program = self._program
        group, interval, problem = program.groups[j], program.intervals[t], program.problem
        if "drop" in group.demanded and not group.excluded:
            name = problem.components[group.component].name
            is_used = any(use.component == name for use in problem.phases[interval.phase].uses)
            return is_used and interval.part != "load", is_used
        return not group.excluded, not group.excluded
