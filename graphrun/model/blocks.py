"""Sets of blocks of a component.

names    as plans write them: group -> indices; None: all blocks     double[0,8] single[0-11]
keys     (number of the group, index of the block in it)             (1, 0) (1, 8) (2, 0) ...
paths    of the blocks' modules                                      transformer_blocks.0 ...
counts   blocks per group                                            0 2 12
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from graphrun.errors import PlanError
from graphrun.model.plan import BlockNames, Evict, Load, Slot, blocks_text
from graphrun.model.problem import ALLOCATION_BYTES, ComponentNumbers
from graphrun.units import round_up

BlockKey = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks ``keys`` of ``component``, with set operators."""

    component: ComponentNumbers
    keys: frozenset[BlockKey]

    def __or__(self, other: Blocks) -> Blocks:
        return Blocks(self.component, self.keys | other.keys)

    def __and__(self, other: Blocks) -> Blocks:
        return Blocks(self.component, self.keys & other.keys)

    def __sub__(self, other: Blocks) -> Blocks:
        return Blocks(self.component, self.keys - other.keys)

    def __xor__(self, other: Blocks) -> Blocks:
        return Blocks(self.component, self.keys ^ other.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[BlockKey]:
        """In the order of groups, and of blocks in them."""
        return iter(sorted(self.keys))

    def in_groups(self, groups: Collection[int]) -> Blocks:
        return Blocks(self.component, frozenset(key for key in self.keys if key[0] in groups))

    @property
    def counts(self) -> tuple[int, ...]:
        counter = Counter(k for k, _ in self.keys)
        return tuple(counter[k] for k in range(len(self.component.groups)))

    @property
    def groups(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(group name, indices of its blocks), for groups with blocks."""
        indices = dict[str, list[int]]()
        for k, i in self:
            indices.setdefault(self.component.groups[k].name, []).append(i)
        return tuple((name, tuple(group)) for name, group in indices.items())

    @property
    def names(self) -> BlockNames:
        """The blocks as a plan names them."""
        is_whole = len(self) == sum(len(group.blocks) for group in self.component.groups)
        return None if is_whole else self.groups

    @property
    def paths(self) -> list[str]:
        return [self.component.groups[k].blocks[i] for k, i in self]

    @property
    def nbytes(self) -> int:
        """Device allocations of the blocks in the component's only variant."""
        sizes = self.component.variants[0].block_bytes
        return sum(round_up(sizes[k], ALLOCATION_BYTES) for k, _ in self.keys)


def all_blocks(component: ComponentNumbers, groups: Iterable[int] | None = None) -> Blocks:
    """Return all blocks of ``component``, or of its ``groups``."""
    numbers = range(len(component.groups)) if groups is None else groups
    counts = {k: len(component.groups[k].blocks) for k in numbers}
    return Blocks(component, frozenset((k, i) for k, count in counts.items() for i in range(count)))


def named(component: ComponentNumbers, names: BlockNames) -> Blocks:
    """Return the blocks that a plan names. Raises PlanError for unknown blocks."""
    if names is None:
        return all_blocks(component)
    numbers = {group.name: k for k, group in enumerate(component.groups)}
    for name, indices in names:
        count = len(component.groups[numbers[name]].blocks) if name in numbers else 0
        if absent := tuple(i for i in indices if not 0 <= i < count):
            layers = component.layers
            by_layer = layers is not None and name in {group.name for group in layers.groups}
            hint = (
                f": they are layers, but in this problem {component.name} consists of blocks; use "
                "the plan's `Solution.problem`"
                if by_layer
                else ""
            )
            raise PlanError(
                f"{component.name} has no blocks {blocks_text(((name, absent),))}{hint}"
            )
    keys = ((numbers[name], i) for name, indices in names for i in indices)
    return Blocks(component, frozenset(keys))


def at_paths(component: ComponentNumbers, paths: Collection[str]) -> Blocks:
    """Return the blocks of ``component`` whose module paths are in ``paths``."""
    keys = (
        (k, i)
        for k, group in enumerate(component.groups)
        for i, path in enumerate(group.blocks)
        if path in paths
    )
    return Blocks(component, frozenset(keys))


def kept(component: ComponentNumbers, counts: Sequence[int], skips: Sequence[int] = ()) -> Blocks:
    """Return the blocks at positions ``skips`` (or 0) to ``counts`` of each `keep_order`."""
    begins = skips or (0,) * len(counts)
    keys = (
        (k, i)
        for k, (group, begin, end) in enumerate(zip(component.groups, begins, counts, strict=True))
        for i in keep_order(len(group.blocks))[begin:end]
    )
    return Blocks(component, frozenset(keys))


def resident_blocks(
    component: ComponentNumbers, finds: Iterable[tuple[str, BlockNames]], slots: Iterable[Slot]
) -> Iterator[Blocks]:
    """Yield the blocks of ``component`` there or loaded in each slot; ``finds``: `Plan.finds`."""
    resident = named(component, ())
    for name, blocks in finds:
        if name == component.name:
            resident |= named(component, blocks)
    for slot in slots:
        for action in slot.actions:
            if isinstance(action, Load | Evict) and action.component == component.name:
                action_blocks = named(component, action.blocks)
                resident = (
                    resident | action_blocks
                    if isinstance(action, Load)
                    else resident - action_blocks
                )
        yield resident


@functools.cache
def keep_order(count: int) -> tuple[int, ...]:
    """Return a permutation of ``0 .. count - 1``: to keep K blocks, keep the first K.

    Bit reversal (the van der Corput sequence), scaled to ``count``. Every prefix is spread evenly
    over the call order, so copies of streamed blocks overlap compute of resident blocks. Measured:
    at most 1.5 % slower than the best set for each K; blocks 0 .. K-1 are 6 to 17 % slower.

        keep_order(8)     0 4 2 6 1 5 3 7
        K = 3 of 8        # . # . # . . .      # kept   . streamed
    """
    bits = max(count - 1, 0).bit_length()
    order: dict[int, None] = {}
    for step in range(1 << bits):
        reverse = int(format(step, f"0{bits}b")[::-1], 2) if bits else 0
        order.setdefault((reverse * count) >> bits)
    return tuple(order)[:count]
