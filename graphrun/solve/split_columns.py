"""Columns of the blocks of split components on secondary devices, and their rows.

segment     consecutive blocks of a component. A split between any two of them costs the same
            transfers (`graphrun.model.splits.segments_of`)
columns     for each variant choice that may be split, secondary device and segment: the number
            of its blocks on that device, and 1 if there are any
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import combinations, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from graphrun.model.plan import Split
from graphrun.model.problem import LiveTensor
from graphrun.model.splits import BlockSegment, block_arguments, in_a_row, segments_of
from graphrun.solve.linear import Linear, MilpModel, total
from graphrun.solve.program import Program

ZERO = Linear()


class SplitColumns:
    """The split columns of ``program`` in ``model``; ``selections``: y of each variant choice.

    Blocks on one secondary device are consecutive, except with `Program.full_overlap`. ``blocks``:
    number of blocks per mirror group. ``mirrors``: main-device group -> its mirror groups.
    """

    def __init__(self, program: Program, model: MilpModel, selections: Sequence[Linear]) -> None:
        self._program, self._model = program, model
        self.blocks: dict[int, Linear] = {}
        self.mirrors: dict[int, list[int]] = {}
        # variant choice that may be split -> its segments
        self._segments: dict[int, list[BlockSegment]] = {}
        # (variant choice, secondary device) -> per segment: number of blocks, and 1 if there are
        # any
        self._columns: dict[tuple[int, int], list[tuple[Linear, Linear]]] = {}
        for j, group in enumerate(program.groups):
            if group.mirror < 0:
                continue
            self.mirrors.setdefault(group.mirror, []).append(j)
            number = group.variant_choice
            pair = number, group.secondary
            if number not in self._segments:
                component = program.problem.components[group.component]
                self._segments[number] = segments_of(program.problem, component)
            if pair not in self._columns:
                self._columns[pair] = self._segment_columns(number, selections[number])
            pairs = zip(self._segments[number], self._columns[pair], strict=True)
            self.blocks[j] = total(
                blocks for segment, (blocks, _) in pairs if segment.group == group.index
            )
        self._limit_sums()

    def _segment_columns(self, number: int, selection: Linear) -> list[tuple[Linear, Linear]]:
        model = self._model
        counts = [float(segment.stop - segment.start) for segment in self._segments[number]]
        columns = [(model.column(0.0, count, True), model.binary()) for count in counts]
        for (blocks, has_blocks), count in zip(columns, counts, strict=True):
            model.add(blocks <= has_blocks * count, blocks >= has_blocks, has_blocks <= selection)
        if not self._program.full_overlap:
            self._add_consecutive_rows(columns, counts)
        return columns

    def _limit_sums(self) -> None:
        """Limit the blocks of all secondary devices together.

        They have at most all blocks of a segment. At most one of two devices has blocks on both
        sides of a segment boundary.
        """
        model = self._model
        for number, segments in self._segments.items():
            column_lists = [columns for (n, _), columns in self._columns.items() if n == number]
            if len(column_lists) > 1:
                for segment, columns in zip(segments, zip(*column_lists, strict=True), strict=True):
                    model.add(
                        total(blocks for blocks, _ in columns)
                        <= float(segment.stop - segment.start)
                    )
        couples = combinations(self._columns.items(), 2) if not self._program.full_overlap else ()
        for ((number, _), first_columns), ((other_number, _), second_columns) in couples:
            if number != other_number:
                continue
            for adjacent_pairs in zip(
                pairwise(first_columns), pairwise(second_columns), strict=True
            ):
                model.add(
                    total(has_blocks for adjacent in adjacent_pairs for _, has_blocks in adjacent)
                    <= 3.0
                )

    def _add_consecutive_rows(
        self, columns: Sequence[tuple[Linear, Linear]], counts: Sequence[float]
    ) -> None:
        """Make the blocks on a secondary device consecutive.

        At most one segment has blocks there while the segment before it has none. A segment between
        two segments with blocks there is there as a whole. ``counts``: blocks per segment.
        """
        model, starts = self._model, list[Linear]()
        for (_, previous), (_, has_blocks) in pairwise(columns) if len(columns) > 2 else ():
            starts.append(model.column())
            model.add(starts[-1] >= has_blocks - previous)
        if starts:
            model.add(total([columns[0][1], *starts]) <= 1.0)
        for n in range(1, len(columns) - 1):
            model.add(columns[n][0] >= (columns[n - 1][1] + columns[n + 1][1] - 1.0) * counts[n])

    def seconds(self, t: int) -> list[Linear]:
        """Return the seconds of split components in ``t``: secondary compute and transfers."""
        program, parts = self._program, list[Linear]()
        interval = program.intervals[t]
        uses = {use.component: use for use in program.problem.phases[interval.phase].uses}
        for (number, secondary), columns in self._columns.items():
            use = uses.get(self._name(number))
            if use is None or not (calls := use.calls_in(interval.part)):
                continue
            for j, blocks in self.blocks.items():
                group = program.groups[j]
                if (group.variant_choice, group.secondary) == (number, secondary):
                    # of a mirror group, `Interval.seconds` are seconds on the secondary device
                    parts.append(blocks * (interval.calls[j] * interval.seconds[j]))
            has_blocks = [flag for _, flag in columns]
            parts += [
                transfer * (calls * seconds)
                for transfer, seconds in self._transfers(
                    number, secondary, use.live_tensors, has_blocks
                )
            ]
        return parts

    def saved_seconds(self, t: int, j: int) -> list[Linear]:
        """Return minus the seconds that mirror groups of ``j`` save the main device in ``t``."""
        interval = self._program.intervals[t]
        return [
            self.blocks[mirror] * (-interval.calls[j] * interval.movable_seconds[j])
            for mirror in self.mirrors.get(j, ())
        ]

    def working_sets(self, t: int, secondary: int) -> list[Linear]:
        """Return the bytes beyond weights on ``secondary`` in ``t``, per possible segment."""
        program, interval = self._program, self._program.intervals[t]
        uses = {use.component: use for use in program.problem.phases[interval.phase].uses}
        working_sets = list[Linear]()
        for (number, device), columns in self._columns.items():
            variant_choice = program.variant_choices[number]
            if device != secondary or variant_choice.component not in interval.phase_components:
                continue
            argument_bytes = block_arguments(uses[self._name(number)].live_tensors)
            block_number = 1  # of the segment's first block; numbers start at 1 (`LiveTensor`)
            for segment, (_, has_blocks) in zip(self._segments[number], columns, strict=True):
                nbytes = interval.activation_bytes + variant_choice.variant.scratch_bytes
                working_sets.append(has_blocks * float(nbytes + argument_bytes[block_number]))
                block_number += segment.stop - segment.start
        return working_sets

    def chosen_in(self, values: NDArray[np.float64], numbers: Collection[int]) -> tuple[Split, ...]:
        splits, problem = list[Split](), self._program.problem
        for number in numbers:
            counts = {
                secondary: {k: round(blocks.at(values)) for k, (blocks, _) in enumerate(columns)}
                for (n, secondary), columns in self._columns.items()
                if n == number
            }
            if not counts:
                continue
            component = problem.components[self._program.variant_choices[number].component]
            # `in_a_row` turns the counts into the consecutive blocks of each secondary device
            splits += [
                (component.name, secondary, blocks)
                for secondary, blocks in in_a_row(component, self._segments[number], counts).items()
            ]
        return tuple(splits)

    def _name(self, number: int) -> str:
        program = self._program
        return program.problem.components[program.variant_choices[number].component].name

    def _transfers(
        self,
        number: int,
        secondary: int,
        tensors: Sequence[LiveTensor],
        has_blocks: Sequence[Linear],
    ) -> Iterator[tuple[Linear, float]]:
        """Yield the transfers to ``secondary`` and back: a column (1: it happens) and seconds.

        Tensors with the same producer and consumer segments share a column. ``has_blocks``: per
        segment, 1 if some of its blocks are on ``secondary``.
        """
        problem = self._program.problem
        # block number (`LiveTensor`: from 1; 0: other code) -> its segment; -1: other code
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
            # The transfer happens if one of ``bounds`` is 1. A difference of flags may be -1: it
            # needs a column of its own, which is at least 0.
            transfer = bounds[0]
            if len(bounds) > 1 or (maker >= 0 and -1 not in users):
                transfer = self._model.column()
                self._model.add(*(transfer >= bound for bound in bounds))
            if seconds:
                yield transfer, seconds
