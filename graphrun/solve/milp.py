"""Mixed-integer linear program (MILP) of a `Program`: goals, budgets, and its integers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from graphrun.model.choices import BUFFERED_BLOCKS
from graphrun.model.splits import with_splits
from graphrun.solve.columns import MEMORY_SCALE, Columns
from graphrun.solve.linear import GAP, Linear, MilpModel, total
from graphrun.solve.program import HOST_TIERS, Choice, HostTier, Memory, Program
from graphrun.solve.programs import with_variants
from graphrun.solve.rows import Rows, with_drops

Margins = Mapping[Memory, NDArray[np.int64]]  # bytes to keep free per interval

BLOCK_TOLERANCE = 1e-5  # blocks by which the solver may miss an integer
# Relative gap with layers: their many small groups make far more plans equally good.
COARSE_GAP = 1e-3
NEAR = 3.0  # blocks by which a group may differ from the neighbour choice


class Formulation:
    """Rows and columns of ``program``.

    ``margins``: bytes to keep free. ``minimised``: the host tier or disk to minimise. A device
    needs no rows for it: its goal is ``peak``. ``depth``: blocks in a ring buffer, unless it is
    single-buffered. ``leaves``: blocks per group on the device at the end. ``neighbour``: a choice
    of a program with the same groups and intervals, from which K and d differ by at most NEAR;
    ignored if a component is split into layers.

    Goals, in scaled units: ``seconds``; ``copying``, seconds of copying blocks; ``moved_bytes``,
    bytes copied; ``memory``, the peak plus a little of the mean, so that no block is loaded earlier
    than useful; ``peak``; ``minimised_bytes``, not scaled.
    """

    def __init__(
        self,
        program: Program,
        margins: Margins | None = None,
        minimised: Memory | None = None,
        depth: int = BUFFERED_BLOCKS,
        leaves: Sequence[int] = (),
        neighbour: Choice | None = None,
    ) -> None:
        self.program, self.margins, self.minimised = program, margins or {}, minimised
        self.depth, self.leaves, self.neighbour = depth, leaves, neighbour
        is_by_layer = any(group.by_layer for group in program.groups)
        model = self.model = MilpModel(COARSE_GAP if is_by_layer else GAP)
        self.peak = model.column()
        may_limit = any(self._may_limit(tier) for tier in HOST_TIERS)
        columns = self.columns = Columns(
            program, model, stores_may_drop=may_limit and not program.session, depth=depth
        )
        rows = Rows(program, columns, full_overlap=program.full_overlap)
        self.bytes_unit, self.seconds_unit = columns.bytes_unit(0), columns.seconds_unit
        seconds, occupied, single_buffer_costs = list[Linear](), list[Linear](), dict[int, float]()
        for t, interval in enumerate(program.intervals):
            columns.add_interval(t)
            seconds.append(rows.slot_seconds(t) * interval.weight)
            for device in program.devices:
                unit = columns.bytes_unit(device)
                device_memory = rows.bytes(t, device) / unit
                occupied.append(device_memory * (1e-3 / len(program.intervals)))
                limit = (program.limit(device) or 0) / unit
                model.add(device_memory + self._margin(device, t) / unit <= limit)
                if not device:
                    model.add(device_memory <= self.peak)
            # a small cost, so that r = 1 is not chosen where it saves no memory
            for j, single in columns.single_columns(t).items():
                block_bytes = program.groups[j].block_bytes / self.bytes_unit
                cost = 2e-3 * block_bytes / len(program.intervals)
                single_buffer_costs |= dict.fromkeys(single.terms, cost)
        self._add_transitions(is_by_layer)
        first_touch_seconds = rows.first_touch_seconds(self.peak * self.bytes_unit)
        self.seconds = total([*seconds, first_touch_seconds]) / self.seconds_unit
        self.moved_bytes = rows.moved_bytes() / self.bytes_unit
        self.copying = rows.copy_seconds() / self.seconds_unit
        self.memory = total([Linear(single_buffer_costs), *occupied, self.peak])
        self.minimised_bytes = self._add_host_rows(rows)

    def _margin(self, memory: Memory, t: int) -> int:
        return int(self.margins[memory][t]) if memory in self.margins else 0

    def _add_transitions(self, is_by_layer: bool) -> None:
        """Add the rows of the program's first and last interval, and of the neighbour."""
        program, columns, model = self.program, self.columns, self.model
        end, groups = len(program.intervals) - 1, range(len(program.groups))
        # A further run starts with the blocks that the previous run leaves. Its first interval is
        # ``run_length`` in a program of both runs, 0 in one of a single run (`Program.single_run`).
        if program.session and program.only_run != "first":
            start = 0 if program.only_run else program.run_length
            model.add(*(columns.carry_row(j, start, end) for j in groups if start != end))
        if (neighbour := self.neighbour) is not None and not is_by_layer:
            for column, counts in (
                (columns.present, neighbour.present),
                (columns.loads, neighbour.loads),
            ):
                for (t, j), number in np.ndenumerate(counts):
                    expression, blocks = column(t, j), float(number)
                    model.add(expression >= blocks - NEAR, expression <= blocks + NEAR)
        for j, count in enumerate(self.leaves):
            end_blocks, movable = columns.end_blocks(end, j), program.groups[j].movable
            model.add(end_blocks >= float(count) if movable else end_blocks.equals(float(count)))

    def _may_limit(self, tier: HostTier) -> bool:
        limit = self.program.limit(tier)
        return self.minimised == tier or (
            limit is not None and self.program.most_host_bytes(tier) > limit
        )

    def _add_host_rows(self, rows: Rows[Linear]) -> Linear:
        """Add the rows of host memory and disk if they may limit; return the minimised bytes."""
        program, model, goal = self.program, self.model, Linear()
        for tier in HOST_TIERS:
            limit, is_minimised = program.limit(tier), self.minimised == tier
            if not self._may_limit(tier):
                continue
            most_bytes = program.most_host_bytes(tier) if limit is None or is_minimised else limit
            unit = max(1, most_bytes) / MEMORY_SCALE
            maximum = model.column() if is_minimised else Linear({}, (limit or 0) / unit)
            for t in range(len(program.intervals)):
                margin = 0 if is_minimised else self._margin(tier, t)
                model.add((rows.bytes(t, tier) + margin) / unit <= maximum)
            goal = maximum * unit if is_minimised else goal
        stored_bytes, disk_bytes = rows.bytes(0, "disk"), program.limit("disk")
        if self.minimised == "disk":
            return stored_bytes
        if disk_bytes is not None:
            unit = max(1.0, float(disk_bytes)) / MEMORY_SCALE
            model.add(stored_bytes / unit <= disk_bytes / unit)
        return goal

    # ---- The solver's answer

    def choice(self, values: NDArray[np.float64]) -> tuple[Program, Choice]:
        """Return the program with the chosen variants, and its integers."""
        numbers = self.chosen_in(values)
        program = self._program_in(values, numbers)
        numbered_groups = enumerate(self.program.groups)
        groups = [
            (j, group)
            for j, group in numbered_groups
            if group.variant_choice in numbers and self._has_blocks(j, values)
        ]
        groups.sort(
            key=lambda pair: (
                pair[1].component,
                pair[1].secondary if pair[1].mirror >= 0 else 0,
                pair[1].index,
            )
        )
        present, loads, depths = np.zeros((3, len(program.intervals), len(groups)), dtype=np.int64)
        columns = self.columns
        for t in range(len(self.program.intervals)):
            for n, (j, group) in enumerate(groups):
                present_blocks, load_blocks = (
                    columns.present(t, j).at(values),
                    columns.loads(t, j).at(values),
                )
                # fractions are rounded down: the missing layers are streamed
                if group.by_layer:
                    present[t, n] = int(present_blocks + BLOCK_TOLERANCE)
                    loads[t, n] = (
                        int(present_blocks + load_blocks + BLOCK_TOLERANCE) - present[t, n]
                    )
                else:
                    present[t, n], loads[t, n] = round(present_blocks), round(load_blocks)
                depths[t, n] = 1 if columns.single(t, j).at(values) > 0.5 else self.depth
        slots = range(len(self.program.intervals))
        reads = tuple(
            max((t for t in slots if columns.reads(t, n).at(values) > 0.5), default=-1)
            for n in numbers
        )
        spills = tuple(
            columns.spilled(g).at(values) > 0.5 for g in range(len(self.program.spill_gaps))
        )
        return program, with_drops(
            program, Choice(present, loads, depths, reads, (-1,) * len(numbers), spills)
        )

    def _program_in(self, values: NDArray[np.float64], numbers: Sequence[int]) -> Program:
        """Return the program with the variant choices ``numbers`` and the splits of ``values``."""
        program = self.program
        if not (splits := self.columns.splits.chosen_in(values, numbers)):
            return with_variants(program, [program.variant_choices[n].index for n in numbers])
        problem, names = (
            with_splits(program.problem, splits),
            [program.variant_choices[n].variant.name for n in numbers],
        )
        pairs = zip(problem.components, names, strict=True)
        indices = [
            [variant.name for variant in component.variants].index(name)
            for component, name in pairs
        ]
        return with_variants(replace(program, problem=problem), indices)

    def _has_blocks(self, j: int, values: NDArray[np.float64]) -> bool:
        splits = self.columns.splits
        may_be_split = j in splits.blocks or j in splits.mirrors
        return not may_be_split or self.columns.blocks(j).at(values) > 0.5

    @property
    def layer_columns(self) -> list[int]:
        """Columns that count layers: continuous in the program, rounded afterwards."""
        return [
            column
            for t in range(len(self.program.intervals))
            for j, group in enumerate(self.program.groups)
            if group.by_layer
            for expression in (self.columns.present(t, j), self.columns.loads(t, j))
            for column in expression.terms
        ]

    def variant_columns(self, numbers: Collection[int]) -> dict[int, float]:
        """Return the columns y and the values that choose the variant choices ``numbers``."""
        return {
            column: float(n in numbers)
            for n, selection in enumerate(self.columns.selections)
            for column in selection.terms
        }

    def compute_slot_columns(self, values: NDArray[np.float64]) -> dict[int, float]:
        """Return K and d, with their ``values``, of each group in the intervals that run it."""
        return {
            column: float(round(values[column]))
            for t, interval in enumerate(self.program.intervals)
            for j, calls in enumerate(interval.calls)
            if calls
            for expression in (self.columns.present(t, j), self.columns.loads(t, j))
            for column in expression.terms
        }

    @property
    def first_choices(self) -> list[int]:
        return [numbers[0] for numbers in self.program.choices_of]

    def chosen_in(self, values: NDArray[np.float64]) -> list[int]:
        """Return for each component the variant choice with the largest y."""
        return [
            max(numbers, key=lambda n: self.columns.selections[n].at(values))
            for numbers in self.program.choices_of
        ]
