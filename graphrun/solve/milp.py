"""Mixed-integer linear program (MILP) of a `Program`: columns, rows, scaling, and the integers of
the solver's answer.

`graphrun.solve.program` defines the variables y, K, d, s, r, x and D, the constants, and the rows
for the device. Terms:

    interval       a slot of the program; its index is t. In comments here, slot means the same.
    group          a block group of one variant; its index is j
    mirror group   the blocks of a main-device group that are on one secondary device
    segment        consecutive blocks of a component. A split between any two of them costs the same
                   transfers (`graphrun.model.splits.segments_of`).

Bytes are scaled so that the effective budget is 1000. Seconds are scaled so that all compute plus
one copy of every block is 100. HiGHS tolerates row violations and fractions of 1e-6. In scaled
units that is 1e-9 of the budget, less than the rounding of one allocation on any card. With
unscaled byte coefficients HiGHS reported 18.25 s as optimal where 15.99 s was.

Every variant of a component has its own integers, bounded by whether the variant is chosen. That
keeps the relaxation tight.

Rows for host memory, only where it can be the limit:

    y[w]      1 if variant choice w is chosen; exactly one per component
    F[w,t]    1 if the backing store of w is read in interval t: in at most one interval, not later
              than the first use of w
    h[w,t]    1 if host memory has the backing store of w. Where RAM may be the limit:
              h[t] <= h[t-1] + F[t]; elsewhere h = 1 from the read on
    RAM(t)    sum host_bytes*h + transient_bytes*F + spilled values + activation on the CPU <= RAM;
              page-locked bytes likewise
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, combinations, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from graphrun.model.choices import BUFFERED_BLOCKS, activation_bytes
from graphrun.model.plan import Split
from graphrun.model.problem import LiveTensor
from graphrun.model.splits import BlockSegment, block_arguments, in_a_row, segments_of, with_splits
from graphrun.solve.linear import GAP, Linear, MilpModel, Row, total
from graphrun.solve.program import Choice, Group, Program

TierName = Literal["ram", "pinned", "disk"]
Margins = Mapping[str, NDArray[np.int64]]  # name of a budget -> bytes to keep free per interval

MEMORY_SCALE = 1000.0
TIME_SCALE = 100.0
BLOCK_TOLERANCE = 1e-5  # blocks by which the solver may miss an integer
# Relative gap with components split into layers: their many small groups make far more plans
# equally good.
COARSE_GAP = 1e-3
ZERO, ONE = Linear(), Linear({}, 1.0)
NEAR = 3.0  # blocks by which a group may differ from the neighbour choice


class Formulation:
    """Rows and columns of ``program``.

    ``factors[t]`` multiplies the copy times of interval t; empty: 1. ``margins``: bytes to keep
    free. ``minimised_tier``: host tier to minimise. ``depth``: blocks in a ring buffer, unless it
    is single-buffered. ``leaves``: what the program leaves on the device: for each group, the
    number of blocks at the end. ``neighbour``: a choice of a program with the same groups and
    intervals. K and d differ from that choice by at most NEAR. It is ignored if a component is
    split into layers.

    Goals, in scaled units: ``seconds``; ``copying``, seconds of copying blocks; ``moved_bytes``,
    bytes copied; ``memory``, the peak plus a little of the mean, so that no block is loaded earlier
    than useful; ``peak`` alone; ``tier_bytes``, bytes of the minimised tier.
    """

    def __init__(
        self,
        program: Program,
        factors: Sequence[float] = (),
        margins: Margins | None = None,
        minimised_tier: TierName | None = None,
        depth: int = BUFFERED_BLOCKS,
        leaves: Sequence[int] = (),
        neighbour: Choice | None = None,
    ) -> None:
        self.program, problem, intervals = program, program.problem, program.intervals
        self.factors, self.margins, self.minimised_tier, self.depth = (
            factors,
            margins or {},
            minimised_tier,
            depth,
        )
        self.leaves, self.neighbour = leaves, neighbour
        self.bytes_unit = max(1, problem.effective_bytes) / MEMORY_SCALE
        self.seconds_unit = max(program.reference_seconds, 1e-9) / TIME_SCALE
        model = self.model = MilpModel(
            COARSE_GAP if any(group.by_layer for group in program.groups) else GAP
        )
        self.present: list[list[Linear]] = []
        self.loads: list[list[Linear]] = []
        # per interval: number of a group that may be streamed -> r (1: single-buffered)
        self.single_buffered: list[dict[int, Linear]] = []
        self._host_activations: list[Linear] = []
        self._uses = [
            np.flatnonzero(program.calls[:, j]).tolist() for j in range(len(program.groups))
        ]
        self.peak = model.column()
        self._add_variants()
        self._add_splits()
        self._spills = [model.binary() for _ in program.spill_gaps]
        seconds, moved_bytes, copying, occupied, single_buffer_costs = (
            [],
            [],
            [],
            [],
            dict[int, float](),
        )
        for t, interval in enumerate(intervals):
            copies, streams = self._add_groups(t)
            seconds.append(interval.weight * self._time(t, copies))
            device_memory = self._device_use(t, streams)
            model.add(
                device_memory + self._margin("device", t) / self.bytes_unit <= MEMORY_SCALE,
                device_memory <= self.peak,
            )
            occupied += [
                memory * (1e-3 / len(intervals))
                for memory in (device_memory, *self._add_secondaries(t))
            ]
            for group, copied_blocks in zip(program.groups, copies, strict=True):
                moved_bytes.append(
                    copied_blocks * (interval.weight * (group.block_bytes / self.bytes_unit))
                )
                copying.append(
                    copied_blocks * (interval.weight * (group.load_seconds / self.seconds_unit))
                )
            # a small cost, so that r = 1 is not chosen where it saves no memory
            for j, single in self.single_buffered[t].items():
                cost = 2e-3 * program.groups[j].block_bytes / self.bytes_unit / len(intervals)
                single_buffer_costs |= dict.fromkeys(single.terms, cost)
        for gap, spill in zip(program.spill_gaps, self._spills, strict=True):
            moved_bytes.append(
                spill * (intervals[gap.restore_slot].weight * gap.nbytes / self.bytes_unit)
            )
        end = len(intervals) - 1
        # A further run starts with the blocks that the previous run leaves. Its first interval is
        # ``run_length`` in a program of both runs, and 0 in a program of the further run alone
        # (`Program.part`).
        if program.session and program.part != "first":
            start = 0 if program.part else program.run_length
            for j in range(len(program.groups)) if start != end else ():
                model.add(self._carry_row(j, start, end))
        if neighbour is not None and not any(group.by_layer for group in program.groups):
            for columns, counts in (
                (self.present, neighbour.present),
                (self.loads, neighbour.loads),
            ):
                for expression, count in zip(chain(*columns), counts.ravel().tolist(), strict=True):
                    model.add(expression >= count - NEAR, expression <= count + NEAR)
        for j, count in enumerate(leaves):
            end_blocks = self.present[end][j] + self.loads[end][j]
            model.add(
                end_blocks >= float(count)
                if program.groups[j].movable
                else end_blocks.equals(float(count))
            )
        self.seconds, self.moved_bytes, self.copying = (
            total(seconds),
            total(moved_bytes),
            total(copying),
        )
        self.memory = total([Linear(single_buffer_costs), *occupied, self.peak])
        self.tier_bytes = self._add_host_rows()

    def _margin(self, budget: str, t: int) -> int:
        return int(self.margins[budget][t]) if budget in self.margins else 0

    # ---- Variants and backing stores

    def _add_variants(self) -> None:
        """Add the columns y of the variant choices, and F and h of their backing stores."""
        program, model = self.program, self.model
        self.selections: list[Linear] = []
        for numbers in program.choices_of:
            binaries = [model.binary() for _ in numbers] if len(numbers) > 1 else []
            if binaries:
                model.add(total(binaries).equals(1.0))
            self.selections += binaries or [ONE for _ in numbers]
        may_drop = (self._may_limit("ram") or self._may_limit("pinned")) and not program.session
        self._reads: list[dict[int, Linear]] = []
        # h by interval; empty where the backing store stays from its read on
        self._store_columns: list[list[Linear]] = []
        for number, (variant_choice, selection) in enumerate(
            zip(program.variant_choices, self.selections, strict=True)
        ):
            first = program.first_use(number) if variant_choice.read_seconds is not None else -1
            reads = (
                {t: model.binary() for t in range(first + 1)} if program.part != "further" else {}
            )
            if reads:
                model.add(total(reads.values()).equals(selection))
            columns: list[Linear] = []
            for t in range(len(program.intervals)) if may_drop and variant_choice.is_used else ():
                columns.append(model.binary())
                previous = (
                    columns[t - 1]
                    if t
                    else selection
                    if variant_choice.read_seconds is None
                    else ZERO
                )
                model.add(columns[t] <= previous + reads.get(t, ZERO))
                if t in reads:
                    model.add(columns[t] >= reads[t])
            self._reads.append(reads)
            self._store_columns.append(columns)

    def _holds(self, number: int, t: int) -> Linear:
        """Return h: 1 if host memory has backing store ``number`` in interval ``t``."""
        if self._store_columns[number]:
            return self._store_columns[number][t]
        if self._reads[number]:
            return total(column for slot, column in self._reads[number].items() if slot <= t)
        is_read = (
            self.program.variant_choices[number].read_seconds is None
            or self.program.part == "further"
        )
        return self.selections[number] if is_read else ZERO

    def _always_holds(self, number: int, t: int) -> bool:
        """Whether host memory has backing store ``number`` in ``t`` whenever it is chosen."""
        return not self._store_columns[number] and t >= max(self._reads[number], default=0)

    # ---- Splits

    def _add_splits(self) -> None:
        """Add the columns of blocks on secondary devices: for each secondary device, a number of
        blocks in each segment.

        The blocks on one secondary device are consecutive, except with `Program.full_overlap`.
        """
        program, model, problem = self.program, self.model, self.program.problem
        # mirror group -> its number of blocks
        self._secondary_blocks: dict[int, Linear] = {}
        # group on the main device -> its mirror groups
        self._mirrors: dict[int, list[int]] = {}
        # variant choice that may be split -> its segments
        self._segments: dict[int, list[BlockSegment]] = {}
        # (variant choice, secondary device) -> per segment: number of blocks, and 1 if not 0
        self._split_columns: dict[tuple[int, int], list[tuple[Linear, Linear]]] = {}
        for j, group in enumerate(program.groups):
            if group.mirror < 0:
                continue
            self._mirrors.setdefault(group.mirror, []).append(j)
            number = group.variant_choice
            pair = number, group.secondary
            if number not in self._segments:
                self._segments[number] = segments_of(problem, problem.components[group.component])
            if pair not in self._split_columns:
                counts = [float(segment.stop - segment.start) for segment in self._segments[number]]
                columns = self._split_columns[pair] = [
                    (model.column(0.0, count, True), model.binary()) for count in counts
                ]
                for (blocks, has_blocks), count in zip(columns, counts, strict=True):
                    model.add(
                        blocks <= has_blocks * count,
                        blocks >= has_blocks,
                        has_blocks <= self.selections[number],
                    )
                if not program.full_overlap:
                    self._add_consecutive_rows(columns, counts)
            pairs = zip(self._segments[number], self._split_columns[pair], strict=True)
            self._secondary_blocks[j] = total(
                blocks for segment, (blocks, _) in pairs if segment.group == group.index
            )
        for number, segments in self._segments.items():
            column_lists = [
                columns for (n, _), columns in self._split_columns.items() if n == number
            ]
            for segment, segment_columns in (
                zip(segments, zip(*column_lists, strict=True), strict=True)
                if len(column_lists) > 1
                else ()
            ):
                model.add(
                    total(blocks for blocks, _ in segment_columns)
                    <= float(segment.stop - segment.start)
                )
        couples = combinations(self._split_columns.items(), 2) if not program.full_overlap else ()
        # at most one of two secondary devices has blocks on both sides of a segment boundary
        for (first_pair, first_columns), (second_pair, second_columns) in couples:
            for adjacent_pairs in (
                zip(pairwise(first_columns), pairwise(second_columns), strict=True)
                if first_pair[0] == second_pair[0]
                else ()
            ):
                model.add(
                    total(has_blocks for adjacent in adjacent_pairs for _, has_blocks in adjacent)
                    <= 3.0
                )

    def _add_consecutive_rows(
        self, columns: Sequence[tuple[Linear, Linear]], counts: Sequence[float]
    ) -> None:
        """Add the rows that make the blocks on a secondary device consecutive.

        At most one segment has blocks on the device while the segment before it has none. If both
        neighbours of a segment have blocks on the device, the device has all blocks of the segment.
        ``counts``: blocks per segment.
        """
        model, starts = self.model, list[Linear]()
        for (_, previous), (_, has_blocks) in pairwise(columns) if len(columns) > 2 else ():
            starts.append(model.column())
            model.add(starts[-1] >= has_blocks - previous)
        if starts:
            model.add(total([columns[0][1], *starts]) <= 1.0)
        for n in range(1, len(columns) - 1):
            model.add(columns[n][0] >= (columns[n - 1][1] + columns[n + 1][1] - 1.0) * counts[n])

    def _block_count(self, j: int) -> Linear:
        """Return the number of blocks of group ``j``: 0 if its variant is not chosen, and without
        the blocks of its mirror groups."""
        group = self.program.groups[j]
        if group.mirror >= 0:
            return self._secondary_blocks[j]
        count = self.selections[group.variant_choice] * float(group.count)
        return (
            total([count, *(self._secondary_blocks[mirror] * -1.0 for mirror in self._mirrors[j])])
            if j in self._mirrors
            else count
        )

    def _splits_in(
        self, values: NDArray[np.float64], numbers: Collection[int]
    ) -> tuple[Split, ...]:
        """Return the splits of the variant choices ``numbers``."""
        splits, problem = list[Split](), self.program.problem
        for number in numbers:
            component = problem.components[self.program.variant_choices[number].component]
            pairs = [
                (secondary, columns)
                for (n, secondary), columns in self._split_columns.items()
                if n == number
            ]
            counts = {
                secondary: {
                    k: round(block_count.at(values)) for k, (block_count, _) in enumerate(columns)
                }
                for secondary, columns in pairs
            }
            # `in_a_row` turns the counts into the consecutive blocks of each secondary device
            blocks_by_secondary = (
                in_a_row(component, self._segments[number], counts) if pairs else {}
            )
            splits += [
                (component.name, secondary, blocks)
                for secondary, blocks in blocks_by_secondary.items()
            ]
        return tuple(splits)

    def _secondary_seconds(self, t: int) -> list[Linear]:
        """Return the seconds of split components on secondary devices in interval ``t``: compute,
        and transfers to these devices and back."""
        program, unit, parts = self.program, self.seconds_unit, list[Linear]()
        interval = program.intervals[t]
        phase = program.problem.phases[interval.phase]
        for (number, secondary), columns in self._split_columns.items():
            name = program.problem.components[program.variant_choices[number].component].name
            use = next((use for use in phase.uses if use.component == name), None)
            if use is None or not (calls := use.calls_in(interval.part)):
                continue
            for j, group in enumerate(program.groups):
                if group.mirror >= 0 and (group.variant_choice, group.secondary) == (
                    number,
                    secondary,
                ):
                    # for a mirror group, `Interval.seconds` are seconds on the secondary device
                    parts.append(
                        self._secondary_blocks[j]
                        * (program.calls[t, j] * interval.seconds[j] / unit)
                    )
            has_blocks = [flag for _, flag in columns]
            parts += [
                transfer * (calls * seconds / unit)
                for transfer, seconds in self._tensor_transfers(
                    number, secondary, use.live_tensors, has_blocks
                )
            ]
        return parts

    def _tensor_transfers(
        self,
        number: int,
        secondary: int,
        tensors: Sequence[LiveTensor],
        has_blocks: Sequence[Linear],
    ) -> Iterator[tuple[Linear, float]]:
        """Yield the transfers of tensors to ``secondary`` and back: a column that is 1 if the
        transfer happens, and its seconds.

        Tensors with the same producer and consumer segments share a column. Between two blocks of
        one segment there is no transfer. ``has_blocks``: per segment, 1 if some of its blocks are
        on ``secondary``.
        """
        problem = self.program.problem
        # number of a block (`LiveTensor`: from 1; 0: other code) -> its segment; -1: other code
        segment_numbers = [
            -1,
            *(
                n
                for n, segment in enumerate(self._segments[number])
                for _ in range(segment.start, segment.stop)
            ),
        ]
        transfer_seconds = defaultdict[tuple[Literal["to", "back"], int, frozenset[int]], float](
            float
        )
        for tensor in tensors:
            maker, users = (
                segment_numbers[tensor.maker],
                frozenset(segment_numbers[n] for n in tensor.users),
            )
            to_seconds, back_seconds = problem.transfer_seconds(
                secondary, (tensor.nbytes, tensor.nbytes)
            )
            if receivers := users - {maker, -1}:
                transfer_seconds["to", maker, receivers] += to_seconds
            if maker >= 0 and users != {maker}:
                transfer_seconds[
                    "back", maker, frozenset({-1}) if -1 in users else users - {maker}
                ] += back_seconds
        for (direction, maker, users), seconds in transfer_seconds.items():
            maker_flag = has_blocks[maker] if maker >= 0 else ZERO
            bounds = [
                maker_flag
                if n < 0
                else maker_flag - has_blocks[n]
                if direction == "back"
                else has_blocks[n] - maker_flag
                for n in sorted(users)
            ]
            transfer = bounds[0]
            if len(bounds) > 1 or (maker >= 0 and -1 not in users):
                transfer = self.model.column()
                self.model.add(*(transfer >= bound for bound in bounds))
            if seconds:
                yield transfer, seconds

    # ---- Blocks

    def _add_groups(self, t: int) -> tuple[list[Linear], dict[int, list[tuple[Linear, int]]]]:
        """Add K, d and s of interval ``t``.

        Return x of each group. Return also, for each variant choice that may stream, pairs of s
        and the number of the group that s belongs to.
        """
        interval, model = self.program.intervals[t], self.model
        copies: list[Linear] = []
        streams: dict[int, list[tuple[Linear, int]]] = {}
        self.present.append([])
        self.loads.append([])
        self.single_buffered.append({})
        for j, group in enumerate(self.program.groups):
            calls, count, selection = (
                interval.calls[j],
                float(group.count),
                self.selections[group.variant_choice],
            )
            needs_all_blocks, is_kept = (
                bool(calls) and not group.streamable,
                "keep" in group.demanded and self._used_before(t, j),
            )
            # ``needs_all_blocks``: they cannot be streamed; ``is_kept``: `keep` demands them
            has_later_use = t <= max(self._uses[j], default=-1) or (
                self.program.session and bool(self._uses[j])
            )
            computes_in_steady_slot = (
                interval.part == "steady" and group.component in interval.computing_components
            )
            may_be_present, may_load = self._allowed(t, j)
            may_be_present = may_be_present and (has_later_use or is_kept or not group.movable)
            may_load = (
                may_load and has_later_use and not needs_all_blocks and not computes_in_steady_slot
            )
            block_count = self._block_count(j)
            minimum = count if (needs_all_blocks or is_kept) and not block_count.terms else 0.0
            present = model.column(minimum, count if may_be_present else 0.0, not group.by_layer)
            loads = model.column(0.0, count if may_load else 0.0, not group.by_layer)
            self.present[t].append(present)
            self.loads[t].append(loads)
            end_blocks = present + loads
            model.add(end_blocks <= block_count)
            if (needs_all_blocks or is_kept) and block_count.terms:
                model.add(present >= block_count)
            if t or self.program.part != "further":
                model.add(self._carry_row(j, t, t - 1))
            if not calls:
                copies.append(loads)
                self._require_backing_store(t, group, loads)
            elif needs_all_blocks:
                copies.append(ZERO)
            else:
                # A layer may run several times in one call. Directives may demand that all blocks
                # are resident.
                passes, resident = interval.passes[j], bool(group.demanded & {"keep", "whole"})
                copies.append(
                    (block_count - present) * float(calls * passes) - loads * float(passes - 1)
                )
                self._require_backing_store(t, group, block_count - present)
                streamed = model.binary(upper=0.0 if resident else 1.0)
                # `choice` rounds counts of layers down, and the missing layers are streamed
                if group.by_layer and not resident:
                    model.add(streamed >= selection)
                model.add(end_blocks + streamed * count >= block_count)
                streaming = streams.setdefault(group.variant_choice, [])
                # Layers form many groups: one binary column r for all groups of a variant.
                single_of_layers = (
                    self.single_buffered[t][streaming[0][1]]
                    if group.by_layer and streaming
                    else None
                )
                self.single_buffered[t][j] = single_of_layers or model.binary()
                streaming.append((streamed, j))
        return copies, streams

    def _carry_row(self, j: int, t: int, previous: int) -> Row:
        """Return the row that bounds K of group ``j`` in ``t`` by K + d of interval ``previous``.

        ``previous`` -1: the device is empty before.
        """
        end_blocks = self.present[previous][j] + self.loads[previous][j] if previous >= 0 else ZERO
        present = self.present[t][j]
        return (
            present <= end_blocks if self.program.groups[j].movable else present.equals(end_blocks)
        )

    def _require_backing_store(self, t: int, group: Group, copied_blocks: Linear) -> None:
        """Forbid copies of ``group`` in interval ``t`` without its backing store."""
        if not self._always_holds(group.variant_choice, t):
            self.model.add(
                copied_blocks <= self._holds(group.variant_choice, t) * float(group.count)
            )

    def _used_before(self, t: int, j: int) -> bool:
        """Whether an earlier interval of the same run uses group ``j``."""
        start = (
            self.program.run_length if self.program.session and t >= self.program.run_length else 0
        )
        return any(start <= use < t for use in self._uses[j])

    def _allowed(self, t: int, j: int) -> tuple[bool, bool]:
        """Return whether directives allow blocks of group ``j`` on the device at the start of
        interval ``t``, and loads of these blocks in the interval.

        Two directives forbid some of that: `exclude` (`Group.excluded`) and `drop`.
        """
        group, interval, problem = (
            self.program.groups[j],
            self.program.intervals[t],
            self.program.problem,
        )
        if "drop" in group.demanded and not group.excluded:
            name = problem.components[group.component].name
            is_used = any(use.component == name for use in problem.phases[interval.phase].uses)
            return is_used and interval.part != "load", is_used
        return not group.excluded, not group.excluded

    # ---- Seconds

    def _time(self, t: int, copies: list[Linear]) -> Linear:
        """Return D, the seconds of interval ``t``."""
        program, model, interval = self.program, self.model, self.program.intervals[t]
        time = model.column()
        load, disk = self._copy_seconds(t, copies)
        # with full overlap, copies take no time beyond the compute of their slot
        seconds_of = (
            self._compute_seconds
            if program.full_overlap
            else partial(self._overlapped, load=load, disk=disk)
        )
        overlapped = [seconds_of(t, members) for members in program.overlap_sets[t]]
        off_device = [
            selection * (s / self.seconds_unit)
            for s, selection in zip(interval.off_device_seconds, self.selections, strict=True)
            if s
        ]
        factor = self.factors[t] if self.factors else 1.0
        spills = [
            spill * (seconds * factor / self.seconds_unit)
            for gap, spill in zip(program.spill_gaps, self._spills, strict=True)
            if (seconds := gap.seconds(t))
        ]
        reads = [
            columns[t] * (variant_choice.read_seconds * factor / self.seconds_unit)
            for variant_choice, columns in zip(program.variant_choices, self._reads, strict=True)
            if t in columns and variant_choice.read_seconds
        ]
        links = [
            [
                copy_seconds
                for copy_seconds, group in zip(load, program.groups, strict=True)
                if group.secondary == n
            ]
            for n in (0, *program.secondaries)
        ]
        model.add(
            time >= total([*overlapped, *off_device, *self._secondary_seconds(t)]),
            time >= total([*links[0], *spills]),
        )
        for to_secondary in filter(None, links[1:]):
            model.add(time >= total(to_secondary))
        if reads or any(group.disk_seconds for group in program.groups):
            model.add(time >= total([*disk, *reads]))
        # a component on the CPU computes from its backing store
        for number, variant_choice in enumerate(program.variant_choices):
            if (
                not variant_choice.computes
                and variant_choice.component in interval.phase_components
                and not self._always_holds(number, t)
            ):
                model.add(self._holds(number, t) >= self.selections[number])
        return time

    def _copy_seconds(self, t: int, copies: list[Linear]) -> tuple[list[Linear], list[Linear]]:
        """Return per group the seconds of its copies in interval ``t``, and of their disk reads."""
        factor, groups = (self.factors[t] if self.factors else 1.0), self.program.groups
        load = [
            copied_blocks * (group.load_seconds * factor / self.seconds_unit)
            for group, copied_blocks in zip(groups, copies, strict=True)
        ]
        disk = [
            copied_blocks * (group.disk_seconds * factor / self.seconds_unit)
            if group.disk_seconds
            else ZERO
            for group, copied_blocks in zip(groups, copies, strict=True)
        ]
        return load, disk

    def _saved_seconds(self, t: int, members: list[int]) -> list[Linear]:
        """Return the compute seconds that the main device saves in interval ``t`` by blocks of
        ``members`` on secondary devices, as negative numbers."""
        unit, interval = self.seconds_unit, self.program.intervals[t]
        pairs = [(j, mirror) for j in members for mirror in self._mirrors.get(j, ())]
        return [
            self._secondary_blocks[mirror] * (-interval.calls[j] * interval.block_seconds[j] / unit)
            for j, mirror in pairs
        ]

    def _compute_seconds(self, t: int, members: list[int]) -> Linear:
        """Return the compute seconds of the groups ``members`` on the device in interval ``t``."""
        seconds = sum(self.program.compute_seconds[t, members]) / self.seconds_unit
        compute, savings = (
            self.selections[self.program.groups[members[0]].variant_choice] * seconds,
            self._saved_seconds(t, members),
        )
        return total([compute, *savings]) if savings else compute

    def _overlapped(
        self, t: int, members: list[int], load: list[Linear], disk: list[Linear]
    ) -> Linear:
        """Return the seconds of the overlap set ``members`` in interval ``t``.

        They are the maximum of three: compute; disk reads; copies, plus compute of the groups with
        r = 1.
        """
        compute_seconds, groups = (
            self.program.compute_seconds[t] / self.seconds_unit,
            self.program.groups,
        )
        compute, savings = self._compute_seconds(t, members), self._saved_seconds(t, members)
        longest = self.model.column(0.0 if compute.terms else compute.constant)
        if compute.terms:
            self.model.add(longest >= compute)
        copy_seconds = total(load[j] for j in members)
        self.model.add(longest >= copy_seconds)
        if any(groups[j].disk_seconds for j in members):
            self.model.add(longest >= total(disk[j] for j in members))
        if serial := [
            self.single_buffered[t][j] * compute_seconds[j]
            for j in members
            if j in self.single_buffered[t]
        ]:
            self.model.add(longest >= total([copy_seconds, *serial, *savings]))
        return longest

    # ---- Bytes

    def _device_use(self, t: int, streams: dict[int, list[tuple[Linear, int]]]) -> Linear:
        """Return the scaled bytes on the device in interval ``t``."""
        program, model, interval = self.program, self.model, self.program.intervals[t]
        parts: list[Linear] = []
        for group, present, loads in zip(
            program.groups, self.present[t], self.loads[t], strict=True
        ):
            if not group.secondary:
                parts.append((present + loads) * (group.held_bytes / self.bytes_unit))
        for members in streams.values():
            largest, extra = model.column(), model.column()
            parts += [largest, extra]
            for streamed, j in members:
                size, single = (
                    program.groups[j].held_bytes / self.bytes_unit,
                    self.single_buffered[t][j],
                )
                model.add(
                    largest >= streamed * size,
                    extra >= (streamed - single) * ((self.depth - 1) * size),
                )
        on_device, on_host = self._activation(t)
        self._host_activations.append(on_host)
        gaps = zip(program.spill_gaps, self._spills, strict=True)
        absent = [spill * -float(gap.nbytes) for gap, spill in gaps if gap.absent(t)]
        return total(
            [*parts, (total([on_device, *absent]) + interval.fixed_bytes) / self.bytes_unit]
        )

    def _add_secondaries(self, t: int) -> list[Linear]:
        """Add the memory rows of the secondary devices in interval ``t``.

        Return the bytes on each of them, scaled by its budget.
        """
        program, model, totals = self.program, self.model, list[Linear]()
        pairs = list(zip(program.groups, self.present[t], self.loads[t], strict=True))
        for number, secondary in enumerate(program.problem.secondaries, 1):
            unit = max(1, secondary.effective_bytes) / MEMORY_SCALE
            parts = [
                (present + loads) * (group.held_bytes / unit)
                for group, present, loads in pairs
                if group.secondary == number
            ]
            numbered_bytes = enumerate(program.intervals[t].secondary_bytes)
            working_sets = [
                self.selections[n] * (bytes_by_secondary[number - 1] / unit)
                for n, bytes_by_secondary in numbered_bytes
                if bytes_by_secondary[number - 1]
            ]
            working_sets += [working_set / unit for working_set in self._working_sets(t, number)]
            if working_sets:
                maximum = model.column()
                model.add(*(maximum >= working_set for working_set in working_sets))
                parts.append(maximum)
            totals.append(total(parts))
            if parts:
                model.add(
                    totals[-1] + self._margin(f"secondary device {number}", t) / unit
                    <= secondary.effective_bytes / unit
                )
        return totals

    def _working_sets(self, t: int, secondary: int) -> list[Linear]:
        """Return the bytes beyond weights on ``secondary`` in interval ``t``, one expression for
        each segment that may have blocks there."""
        program, interval = self.program, self.program.intervals[t]
        uses, working_sets = (
            {use.component: use for use in program.problem.phases[interval.phase].uses},
            list[Linear](),
        )
        for (number, device), columns in self._split_columns.items():
            variant_choice = program.variant_choices[number]
            if device == secondary and variant_choice.component in interval.phase_components:
                argument_bytes, block_number = (
                    block_arguments(
                        uses[program.problem.components[variant_choice.component].name].live_tensors
                    ),
                    1,
                )
                # ``block_number``: of the segment's first block; numbers start at 1 (`LiveTensor`)
                for segment, (_, has_blocks) in zip(self._segments[number], columns, strict=True):
                    nbytes = (
                        interval.activation_bytes
                        + variant_choice.variant.scratch_bytes
                        + argument_bytes[block_number]
                    )
                    working_sets.append(has_blocks * float(nbytes))
                    block_number += segment.stop - segment.start
        return working_sets

    def _activation(self, t: int) -> tuple[Linear, Linear]:
        """Return the activation bytes in interval ``t``: on the device, and on the host."""
        program, interval = self.program, self.program.intervals[t]
        if not interval.rounds:  # a load slot, which has no calls
            return ZERO, ZERO
        nbytes, pipeline_code_bytes = interval.activation_bytes, interval.pipeline_code_bytes
        choices_in_phase = [program.choices_of[c] for c in sorted(interval.phase_components)]
        if all(len(numbers) == 1 for numbers in choices_in_phase):
            variant_choices = [program.variant_choices[n] for (n,) in choices_in_phase]
            device = activation_bytes(
                nbytes,
                [variant_choice.variant for variant_choice in variant_choices],
                pipeline_code_bytes,
            )
            return ONE * float(device), ONE * (
                0.0
                if not choices_in_phase
                or any(variant_choice.computes for variant_choice in variant_choices)
                else float(nbytes)
            )
        if len(choices_in_phase) == 1:
            pairs = [(program.variant_choices[n], self.selections[n]) for n in choices_in_phase[0]]
            return total(
                y * float(activation_bytes(nbytes, [variant_choice.variant], pipeline_code_bytes))
                for variant_choice, y in pairs
            ), total(
                y * float(nbytes) for variant_choice, y in pairs if not variant_choice.computes
            )
        return self._shared_activation(nbytes, choices_in_phase, pipeline_code_bytes)

    def _shared_activation(
        self, nbytes: int, choices_in_phase: list[list[int]], pipeline_code_bytes: int
    ) -> tuple[Linear, Linear]:
        """Return `_activation` of a phase of several components, some with more than one variant.

        z = 1 if any of them computes on the device. Then the activation is at least ``nbytes`` plus
        the largest scratch. It is on the host if all of them compute on the CPU.
        """
        model, unit = self.model, self.bytes_unit
        activation, z = model.column(), model.column(upper=1.0)
        pairs_by_component = [
            [(self.program.variant_choices[n], self.selections[n]) for n in numbers]
            for numbers in choices_in_phase
        ]
        on_device = [
            total(y for variant_choice, y in pairs if variant_choice.variant.device == "device")
            for pairs in pairs_by_component
        ]
        model.add(z <= total(on_device))
        for pairs, is_on_device in zip(pairs_by_component, on_device, strict=True):
            scratch = [
                y * (float(variant_choice.variant.scratch_bytes) / unit)
                for variant_choice, y in pairs
                if variant_choice.variant.device == "device"
            ]
            model.add(
                z >= is_on_device,
                activation >= total([z * ((nbytes - pipeline_code_bytes) / unit), *scratch]),
            )
            for variant_choice, y in pairs:
                if variant_choice.variant.device != "device" and (
                    extra := float(variant_choice.variant.scratch_bytes)
                ):
                    model.add(
                        activation
                        >= z * ((nbytes - pipeline_code_bytes) / unit)
                        + (y + z - 1.0) * (extra / unit)
                    )
        off_cpu = z
        if self.program.secondaries:
            off_cpu, computing = (
                model.column(upper=1.0),
                [
                    total(y for variant_choice, y in pairs if variant_choice.computes)
                    for pairs in pairs_by_component
                ],
            )
            model.add(
                off_cpu <= total(computing),
                *(off_cpu >= is_computing for is_computing in computing),
            )
        return activation * unit + pipeline_code_bytes, (ONE - off_cpu) * float(nbytes)

    def _may_limit(self, tier: TierName) -> bool:
        limit = self._limit(tier)
        return self.minimised_tier == tier or (
            limit is not None and self.program.most_host_bytes(tier == "pinned") > limit
        )

    def _limit(self, tier: TierName) -> int | None:
        problem = self.program.problem
        return problem.ram_bytes if tier == "ram" else problem.pinned_bytes

    def _add_host_rows(self) -> Linear:
        """Add the rows of RAM, page-locked RAM and disk where these can be the limit.

        Return the bytes of the tier to minimise.
        """
        program, model, goal = self.program, self.model, ZERO
        tiers: tuple[TierName, ...] = ("ram", "pinned")
        for tier in tiers:
            limit, minimised = self._limit(tier), self.minimised_tier == tier
            unit = (
                max(
                    1,
                    program.most_host_bytes(tier == "pinned")
                    if limit is None or minimised
                    else limit,
                )
                / MEMORY_SCALE
            )
            maximum = model.column() if minimised else (limit or 0) / unit
            for t in range(len(program.intervals)) if self._may_limit(tier) else ():
                model.add(
                    (self._host_bytes(t, tier) + (0 if minimised else self._margin(tier, t))) / unit
                    <= maximum
                )
            goal = maximum * unit if isinstance(maximum, Linear) else goal
        pairs = zip(program.variant_choices, self.selections, strict=True)
        stored_bytes = total(
            selection * float(variant_choice.variant.stored_bytes)
            for variant_choice, selection in pairs
            if variant_choice.is_used
        )
        if self.minimised_tier == "disk":
            return stored_bytes
        if (disk_bytes := program.problem.disk_bytes) is not None:
            unit = max(1.0, float(disk_bytes)) / MEMORY_SCALE
            model.add(stored_bytes / unit <= disk_bytes / unit)
        return goal

    def _host_bytes(self, t: int, tier: TierName) -> Linear:
        """Return the bytes of backing stores in interval ``t``. In RAM, add the extra bytes of
        stores that are read in the interval, the activation on the CPU, and spilled values."""
        parts: list[Linear] = []
        for number, variant_choice in enumerate(self.program.variant_choices):
            nbytes = (
                variant_choice.variant.locked_bytes
                if tier == "pinned"
                else variant_choice.variant.host_bytes
            )
            if variant_choice.is_used and nbytes:
                parts.append(self._holds(number, t) * float(nbytes))
            if (
                tier == "ram"
                and variant_choice.variant.transient_bytes
                and t in self._reads[number]
            ):
                parts.append(self._reads[number][t] * float(variant_choice.variant.transient_bytes))
        if tier == "ram":
            gaps = zip(self.program.spill_gaps, self._spills, strict=True)
            parts += [
                self._host_activations[t],
                *(
                    s * float(gap.nbytes)
                    for gap, s in gaps
                    if gap.spill_slot <= t <= gap.restore_slot
                ),
            ]
        return total(parts)

    # ---- The solver's answer

    def choice(self, values: NDArray[np.float64]) -> tuple[Program, Choice]:
        """Return the program with the chosen variants, and its integers.

        Backing stores are dropped as in `Program.with_drops`.
        """
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
        for t, single in enumerate(self.single_buffered):
            for n, (j, group) in enumerate(groups):
                present_blocks, load_blocks = (
                    self.present[t][j].at(values),
                    self.loads[t][j].at(values),
                )
                # Fractions are rounded down: the missing layers are streamed.
                if group.by_layer:
                    present[t, n] = int(present_blocks + BLOCK_TOLERANCE)
                    loads[t, n] = (
                        int(present_blocks + load_blocks + BLOCK_TOLERANCE) - present[t, n]
                    )
                else:
                    present[t, n], loads[t, n] = round(present_blocks), round(load_blocks)
                depths[t, n] = 1 if j in single and single[j].at(values) > 0.5 else self.depth
        reads = tuple(
            max((t for t, column in self._reads[n].items() if column.at(values) > 0.5), default=-1)
            for n in numbers
        )
        spills = tuple(bool(spill.at(values) > 0.5) for spill in self._spills)
        return program, program.with_drops(
            Choice(present, loads, depths, reads, (-1,) * len(numbers), spills)
        )

    def _program_in(self, values: NDArray[np.float64], numbers: Sequence[int]) -> Program:
        """Return the program with the variant choices ``numbers`` and the splits of ``values``."""
        program = self.program
        if not (splits := self._splits_in(values, numbers)):
            return program.with_variants([program.variant_choices[n].index for n in numbers])
        problem, names = (
            with_splits(program.problem, splits),
            [program.variant_choices[n].variant.name for n in numbers],
        )
        pairs = zip(problem.components, names, strict=True)
        indices = [
            [variant.name for variant in component.variants].index(name)
            for component, name in pairs
        ]
        return replace(program, problem=problem).with_variants(indices)

    def _has_blocks(self, j: int, values: NDArray[np.float64]) -> bool:
        """Whether group ``j`` has any blocks on its own device."""
        return (
            j not in (self._secondary_blocks | self._mirrors)
            or self._block_count(j).at(values) > 0.5
        )

    @property
    def layer_columns(self) -> list[int]:
        """Columns that count layers. They are continuous in the program and rounded afterwards."""
        rows = [
            zip(expressions, self.program.groups, strict=True)
            for expressions in (*self.present, *self.loads)
        ]
        return [
            column
            for row in rows
            for expression, group in row
            if group.by_layer
            for column in expression.terms
        ]

    def variant_columns(self, numbers: Collection[int]) -> dict[int, float]:
        """Return the columns y with the values that choose the variant choices ``numbers``."""
        return {
            column: float(n in numbers)
            for n, selection in enumerate(self.selections)
            for column in selection.terms
        }

    def compute_slot_columns(self, values: NDArray[np.float64]) -> dict[int, float]:
        """Return the columns K and d of each group, in the intervals that compute with the group,
        with ``values``."""
        columns = dict[int, float]()
        for interval, *rows in zip(self.program.intervals, self.present, self.loads, strict=True):
            for row in rows:
                compute_columns = [
                    column
                    for expression, calls in zip(row, interval.calls, strict=True)
                    if calls
                    for column in expression.terms
                ]
                columns |= {column: float(round(values[column])) for column in compute_columns}
        return columns

    @property
    def first_choices(self) -> list[int]:
        """The first variant choice of each component."""
        return [numbers[0] for numbers in self.program.choices_of]

    def chosen_in(self, values: NDArray[np.float64]) -> list[int]:
        """Return for each component the variant choice with the largest y in ``values``."""
        return [
            max(numbers, key=lambda n: self.selections[n].at(values))
            for numbers in self.program.choices_of
        ]
