"""One component over several devices: secondary devices compute intervals of its blocks.

    call       | unblocked |  block 0  |  block 1  |  block 2  | unblocked |  block 3  | unblocked |
    device     |###########|###########|           |           |###########|###########|###########|
    device1             transfer there |###########|###########| transfer back

The blocks of an interval form groups of their own, ``NAME@1`` on the first secondary device. They
are not streamed. The solver decides which component is split, and how many blocks of each segment
are on which device; this module decides which blocks.

`Use.live_tensors` determine the transfers. A tensor that a block on a secondary device receives is
transferred to it once a call, unless a block on that device produced it. A tensor that a block on a
secondary device produces is transferred back if anything else may read it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

from graphrun.errors import PlanError
from graphrun.model.plan import BlockNames, Split
from graphrun.model.problem import (
    ALLOCATION_BYTES,
    BlockGroup,
    ComponentNumbers,
    LiveTensor,
    Problem,
    Use,
    Variant,
)
from graphrun.units import round_up


def secondaries_for(problem: Problem, component: ComponentNumbers) -> tuple[int, ...]:
    """Return the numbers of the secondary devices over which ``component`` may be split.

    Only the largest component whose blocks all run in every call (`Use.live_tensors`) may be split,
    unless a directive demands that its blocks leave the device.
    """
    uses = _uses(problem)
    candidates = [
        candidate
        for candidate in problem.components
        if all(use.live_tensors for use in uses if use.component == candidate.name)
    ]
    if not candidates or component != max(
        candidates, key=lambda candidate: candidate.weight_bytes()
    ):
        return ()
    if problem.demanded(component.name) & {"exclude", "drop"}:
        return ()
    if any(group.secondary for candidate in problem.components for group in candidate.groups):
        return ()
    numbers = range(1, len(problem.secondaries) + 1)
    return tuple(
        n for n in numbers if any(twin(component, variant, n) for variant in component.variants)
    )


def twin(component: ComponentNumbers, variant: Variant, secondary: int) -> Variant | None:
    """Return the same variant of ``component`` on ``secondary``; None if it may not be split.

    A backing store on disk may not: its bounce buffer serves one device.
    """
    if variant.device != "device" or variant.backing_store == "disk":
        return None
    name = f"{variant.precision} {variant.backing_store} device{secondary}"
    return next((candidate for candidate in component.variants if candidate.name == name), None)


def _uses(problem: Problem) -> list[Use]:
    phases = (*problem.phases, *(phase for option in problem.options for phase in option.phases))
    return [use for phase in phases for use in phase.uses]


def slowdown_of(component: ComponentNumbers, secondary: int) -> float:
    """Return the factor on the compute seconds of a block on ``secondary``."""
    pairs = ((variant, twin(component, variant, secondary)) for variant in component.variants)
    return next(
        secondary_variant.slowdown / main_variant.slowdown
        for main_variant, secondary_variant in pairs
        if secondary_variant is not None
    )


class BlockSegment(NamedTuple):
    """Blocks ``start`` to ``stop`` (half-open) of group ``group``, with equal transfers."""

    group: int
    start: int
    stop: int


def segments_of(problem: Problem, component: ComponentNumbers) -> list[BlockSegment]:
    """Return the blocks of ``component`` in call order, as segments.

    Wherever in a segment an interval begins or ends, the transfers have the same number of tensors
    and bytes. A block of a segment receives the results of the previous block, and tensors that
    every block of the segment receives.
    """
    uses = [_Tensors(use.live_tensors) for use in _uses(problem) if use.component == component.name]
    number, segments = 0, list[BlockSegment]()
    for k, group in enumerate(component.groups):
        for i in range(0 if group.is_unblocked else len(group.blocks)):
            number += 1
            if i and all(tensors.alike(number - 1) for tensors in uses):
                segments[-1] = segments[-1]._replace(stop=i + 1)
            else:
                segments.append(BlockSegment(k, i, i + 1))
    return segments


class _Tensors:
    """Tensors of a use. ``rows_made``, ``rows_got``: positions of a block's results, arguments."""

    def __init__(self, rows: Sequence[LiveTensor]) -> None:
        self.rows, self.arguments = rows, block_arguments(rows)
        self.rows_made, self.rows_got = (defaultdict[int, set[int]](set) for _ in range(2))
        for place, row in enumerate(rows):
            self.rows_made[row.maker].add(place)
            for n in row.users:
                self.rows_got[n].add(place)

    def alike(self, n: int) -> bool:
        """Whether blocks ``n`` and ``n`` + 1 may be in one segment."""
        outputs, next_outputs = (
            [self.rows[place] for place in self.rows_made[block]] for block in (n, n + 1)
        )
        inputs = [
            self.rows[place]
            for place in self.rows_got[n]
            if self.rows[place].maker or place not in self.rows_got[n + 1]
        ]
        next_inputs = [place for place in self.rows_got[n + 1] if self.rows[place].maker != n]
        return (
            self.arguments[n] == self.arguments[n + 1]
            and all(row.users == (n + 1,) for row in outputs)
            and all(row.users in ((n,), (0, n)) for row in inputs)
            and all(
                place in self.rows_got[n] and not self.rows[place].maker for place in next_inputs
            )
            and sorted(row.nbytes for row in outputs)
            == sorted(row.nbytes for row in inputs)
            == sorted(row.nbytes for row in next_outputs)
        )


def in_a_row(
    component: ComponentNumbers,
    segments: Sequence[BlockSegment],
    counts: Mapping[int, Mapping[int, int]],
) -> dict[int, BlockNames]:
    """Return for each secondary device the consecutive blocks of its interval.

    ``counts[secondary]``: index of a segment -> number of its blocks there. An interval from an
    earlier segment takes the first blocks of a segment. An interval that starts in the segment
    takes the last blocks, or the blocks before these if it also ends there.
    """
    segment_numbers = {
        secondary: sorted(k for k, count in block_counts.items() if count)
        for secondary, block_counts in counts.items()
    }
    blocks_by_secondary = {
        secondary: dict[str, tuple[int, ...]]()
        for secondary in segment_numbers
        if segment_numbers[secondary]
    }
    for k, segment in enumerate(segments):
        stop, name = segment.stop, component.groups[segment.group].name
        last = [
            secondary
            for secondary, numbers in segment_numbers.items()
            if numbers and numbers[0] == k
        ]
        indices_by_secondary = {}
        for secondary in sorted(
            last, key=lambda secondary: (segment_numbers[secondary][-1] == k, -secondary)
        ):
            indices_by_secondary[secondary] = range(stop - counts[secondary][k], stop)
            stop -= counts[secondary][k]
        for secondary, numbers in segment_numbers.items():
            if k in numbers:
                indices = indices_by_secondary.get(
                    secondary, range(segment.start, segment.start + counts[secondary][k])
                )
                blocks_by_secondary[secondary][name] = (
                    *blocks_by_secondary[secondary].get(name, ()),
                    *indices,
                )
    return {
        secondary: tuple(blocks_by_group.items())
        for secondary, blocks_by_group in sorted(blocks_by_secondary.items())
    }


class DeviceTransfer(NamedTuple):
    """Tensors transferred to ``secondary`` before a block there computes, and back after it.

    ``stay``: numbers of the block's results that only blocks there receive.
    """

    secondary: int
    to_bytes: tuple[int, ...]
    back_bytes: tuple[int, ...]
    stay: frozenset[int]


def transfers(use: Use, component: ComponentNumbers) -> dict[tuple[int, int], DeviceTransfer]:
    """Return the transfers of one call at each block on a secondary device, by (group, block).

    ``component`` has only its chosen variant, here and in the functions below.
    """
    secondary_of = [group.secondary for group in component.groups]
    if component.variants[0].secondary or not any(secondary_of) or not use.live_tensors:
        return {}
    order = _blocks_in_order(use, component)
    device_numbers = {0: 0} | {n: secondary_of[k] for n, (k, _) in enumerate(order, 1)}
    to_bytes, back_bytes, stay = (defaultdict[int, list[int]](list) for _ in range(3))
    makes = Counter[int]()
    for row in use.live_tensors:
        first = dict[int, int]()  # by secondary device, the first block there that gets it
        for n in row.users:
            first.setdefault(device_numbers[n], n)
        for secondary, n in first.items():
            if secondary not in (0, device_numbers[row.maker]):
                to_bytes[n].append(row.nbytes)
        if row.maker:
            if first.keys() == {device_numbers[row.maker]}:
                stay[row.maker].append(makes[row.maker])
            else:
                back_bytes[row.maker].append(row.nbytes)
            makes[row.maker] += 1
    return {
        key: DeviceTransfer(
            device_numbers[n], tuple(to_bytes[n]), tuple(back_bytes[n]), frozenset(stay[n])
        )
        for n, key in enumerate(order, 1)
        if device_numbers[n]
    }


def _blocks_in_order(use: Use, component: ComponentNumbers) -> list[tuple[int, int]]:
    """Return (group, block) of each block in call order, without the unblocked weights."""
    blocks = {k for k, group in enumerate(component.groups) if not group.is_unblocked}
    return list(dict.fromkeys((k, i) for k, i, _ in use.order if k in blocks))


def transfer_seconds(problem: Problem, use: Use, component: ComponentNumbers) -> dict[int, float]:
    """Return for each secondary device the seconds of transfers to it and back in one call."""
    if secondary := component.variants[0].secondary:
        return {secondary: sum(problem.transfer_seconds(secondary, use.transfer))}
    seconds = defaultdict[int, float](float)
    for transfer in transfers(use, component).values():
        seconds[transfer.secondary] += sum(
            problem.tensor_transfer_seconds(
                transfer.secondary, transfer.to_bytes, transfer.back_bytes
            )
        )
    return dict(seconds)


def arguments_bytes(use: Use, component: ComponentNumbers) -> dict[int, int]:
    """Return per secondary device the bytes of tensors transferred to it for ``component``.

    Of the whole call, or the maximum over the blocks of a split component.
    """
    if secondary := component.variants[0].secondary:
        return {secondary: (use.transfer or (0,))[0]}
    totals = dict[int, int]()
    order = _blocks_in_order(use, component)
    for (k, _), nbytes in zip(order, block_arguments(use.live_tensors)[1:], strict=False):
        if secondary := component.groups[k].secondary:
            totals[secondary] = max(totals.get(secondary, 0), nbytes)
    return totals


def block_arguments(rows: Sequence[LiveTensor]) -> list[int]:
    """Return the bytes that each block gets, with earlier blocks' inputs; others are activation."""
    count = 1 + max((n for row in rows for n in (row.maker, *row.users)), default=0)
    block_bytes, input_bytes = [0] * count, [0] * count  # bytes at a block; bytes from a block on
    for row in rows:
        users = [n for n in row.users if n]
        for n in users[:1] if row.is_input else users:
            (input_bytes if row.is_input else block_bytes)[n] += round_up(
                row.nbytes, ALLOCATION_BYTES
            )
    return [
        nbytes + held_bytes
        for nbytes, held_bytes in zip(block_bytes, accumulate(input_bytes), strict=True)
    ]


def block_seconds(use: Use, component: ComponentNumbers) -> list[float]:
    """Return per group the seconds of a block in a call, without unblocked compute."""
    group_seconds = [0.0] * len(component.groups)
    for k, _, seconds in use.order:
        group_seconds[k] += seconds / len(component.groups[k].blocks)
    return group_seconds if use.order else list(use.seconds)


def with_splits(problem: Problem, splits: Sequence[Split]) -> Problem:
    """Return ``problem`` with the blocks of ``splits`` on their devices. Raises PlanError."""
    splits_by_component: dict[str, dict[int, BlockNames]] = {}
    for name, secondary, blocks in splits:
        if secondary in splits_by_component.setdefault(name, {}):
            raise PlanError(f"split: {name} is split twice over device{secondary}")
        splits_by_component[name][secondary] = blocks
    for name, component_splits in splits_by_component.items():
        problem = _split(problem, name, component_splits)
    return problem


def _split(problem: Problem, name: str, splits: Mapping[int, BlockNames]) -> Problem:
    component = next(
        (candidate for candidate in problem.components if candidate.name == name), None
    )
    secondaries = secondaries_for(problem, component) if component is not None else ()
    if component is None or not set(splits) <= set(secondaries):
        raise PlanError(
            f"split: {name} cannot be split over device{min(set(splits) - set(secondaries))}"
        )
    secondary_of = _secondary_of_blocks(component, splits)
    groups, sources, places = (
        list[BlockGroup](),
        list[tuple[int, int]](),
        dict[tuple[int, int], tuple[int, int]](),
    )
    for secondary in (0, *sorted(splits)):
        for k, block_group in enumerate(component.groups):
            indices = [
                i
                for i in range(len(block_group.blocks))
                if secondary_of.get((k, i), 0) == secondary
            ]
            if indices:
                places |= {(k, i): (len(groups), n) for n, i in enumerate(indices)}
                paths = tuple(block_group.blocks[i] for i in indices)
                groups.append(
                    BlockGroup(f"{block_group.name}@{secondary}", paths, False, secondary)
                    if secondary
                    else replace(block_group, blocks=paths)
                )
                sources.append((k, secondary))
    twins = [
        [variant, *(twin(component, variant, secondary) for secondary in sorted(splits))]
        for variant in component.variants
    ]
    complete_twins = [
        [variant for variant in row if variant is not None] for row in twins if None not in row
    ]
    variants = tuple(
        _variant({variant.secondary: variant for variant in row}, sources) for row in complete_twins
    )
    slowdowns = {0: 1.0} | {secondary: slowdown_of(component, secondary) for secondary in splits}
    split_component = replace(component, groups=tuple(groups), variants=variants, layers=None)

    def split_use(use: Use) -> Use:
        if use.component != name:
            return use
        order = use.order or [
            (k, i, use.seconds[k])
            for k, group in enumerate(component.groups)
            for i in range(len(group.blocks))
        ]
        return replace(
            use,
            group_calls=tuple(use.group_calls[k] for k, _ in sources),
            seconds=tuple(_seconds(use, component, secondary_of, sources, slowdowns)),
            order=tuple(
                (*places[k, i], seconds * slowdowns[secondary_of.get((k, i), 0)])
                for k, i, seconds in order
            ),
            passes=tuple(use.passes[k] for k, _ in sources) if use.passes else (),
            layers=None,
        )

    return replace(
        problem,
        components=tuple(
            split_component if candidate.name == name else candidate
            for candidate in problem.components
        ),
        phases=tuple(
            replace(phase, uses=tuple(map(split_use, phase.uses))) for phase in problem.phases
        ),
        options=tuple(
            replace(
                option,
                phases=tuple(
                    replace(phase, uses=tuple(map(split_use, phase.uses)))
                    for phase in option.phases
                ),
            )
            for option in problem.options
        ),
    )


def _seconds(
    use: Use,
    component: ComponentNumbers,
    secondary_of: Mapping[tuple[int, int], int],
    sources: Sequence[tuple[int, int]],
    slowdowns: Mapping[int, float],
) -> Iterator[float]:
    """Yield `Use.seconds` of the groups ``sources``.

    The unblocked compute of a group stays with its blocks on the main device. If none is left
    there, it counts for the first group.
    """
    own_seconds, away_counts = block_seconds(use, component), Counter(k for k, _ in secondary_of)
    unblocked_seconds = [
        len(group.blocks) * (use.seconds[k] - own_seconds[k]) if away_counts[k] else 0.0
        for k, group in enumerate(component.groups)
    ]
    unassigned_seconds = sum(
        seconds for k, seconds in enumerate(unblocked_seconds) if (k, 0) not in sources
    )
    for k, secondary in sources:
        count = len(component.groups[k].blocks) - away_counts[k]
        if secondary or not away_counts[k]:
            yield (
                own_seconds[k] * slowdowns[secondary]
                if secondary
                else use.seconds[k]
                + unassigned_seconds * (k == 0) / len(component.groups[k].blocks)
            )
        else:
            yield own_seconds[k] + unblocked_seconds[k] / count


def _secondary_of_blocks(
    component: ComponentNumbers, splits: Mapping[int, BlockNames]
) -> dict[tuple[int, int], int]:
    """Return (group, index) -> secondary device. Raises PlanError unless blocks are consecutive."""
    number = {group.name: k for k, group in enumerate(component.groups) if not group.is_unblocked}
    order = [(k, i) for k in number.values() for i in range(len(component.groups[k].blocks))]
    secondary_of: dict[tuple[int, int], int] = {}
    for secondary, blocks in splits.items():
        blocks_in_order = sorted(
            (number[name], i) for name, indices in blocks or () if name in number for i in indices
        )
        begin = (
            order.index(blocks_in_order[0])
            if blocks_in_order and blocks_in_order[0] in order
            else -1
        )
        if (
            begin < 0
            or len({k for k, _ in blocks_in_order}) < len(blocks or ())
            or order[begin : begin + len(blocks_in_order)] != blocks_in_order
        ):
            raise PlanError(
                f"split: {component.name} is split at blocks that are not in a row, or that it does"
                " not have"
            )
        if secondary_of.keys() & set(blocks_in_order):
            raise PlanError(f"split: {component.name} has blocks that would compute on two devices")
        secondary_of |= dict.fromkeys(blocks_in_order, secondary)
    return secondary_of


def _variant(by_secondary: Mapping[int, Variant], sources: Iterable[tuple[int, int]]) -> Variant:
    """Return ``by_secondary[0]``, with its twins' numbers for groups on their devices."""
    main_variant, pairs = (
        by_secondary[0],
        [(by_secondary[secondary], k) for k, secondary in sources],
    )
    fields_of_groups: dict[str, Any] = {
        field: tuple(getattr(variant, field)[k] for variant, k in pairs)
        if getattr(main_variant, field)
        else ()
        for field in (
            "block_bytes",
            "load_seconds",
            "read_seconds",
            "disk_seconds",
            "block_seconds",
            "read_bytes",
            "lost_seconds",
        )
    }
    return replace(main_variant, **fields_of_groups)


def splits_of(original: Problem, split: Problem) -> tuple[Split, ...]:
    """Return the splits that turn ``original`` into ``split``."""
    splits = []
    for component in split.components:
        whole = original.component(component.name).groups
        for secondary in sorted(
            {group.secondary for group in component.groups} - {group.secondary for group in whole}
        ):
            paths = {
                path
                for group in component.groups
                if group.secondary == secondary
                for path in group.blocks
            }
            groups = [
                (group.name, tuple(i for i, path in enumerate(group.blocks) if path in paths))
                for group in whole
            ]
            splits.append(
                (
                    component.name,
                    secondary,
                    tuple(named_group for named_group in groups if named_group[1]),
                )
            )
    return tuple(splits)


def computing_on(problem: Problem, secondary: int) -> list[str]:
    """Return the components that compute on ``secondary``, with block counts if split.

    ``problem``: with a plan's choices applied.
    """
    texts = []
    for component in problem.components:
        blocks = sum(
            len(group.blocks) for group in component.groups if group.secondary == secondary
        )
        total = sum(len(group.blocks) for group in component.groups)
        if component.variants[0].secondary == secondary or blocks:
            name = f"a copy of {component.copy_of}" if component.copy_of else component.name
            texts.append(f"{name} ({blocks} of {total} blocks)" if blocks else name)
    return texts
