"""The planned bytes of a slot by use: weights, ring buffers, activation, values."""

from __future__ import annotations

from typing import NamedTuple

from graphrun.model.plan import Blocks, Evict, Load, Stream
from graphrun.model.problem import ALLOCATION_BYTES
from graphrun.model.solution import Solution
from graphrun.units import round_up


class MemoryPart(NamedTuple):
    """``nbytes`` of a slot's peak.

    ``kind``: ``weights``, ``ring_buffer``, ``activation``, ``values`` or ``other``.
    """

    kind: str
    component: str  # empty for activation, values and other
    nbytes: int


def parts_of(solution: Solution) -> list[list[MemoryPart]]:
    """Return the parts of each slot of the first run, which sum to its planned peak.

    ``other`` is the part of the peak that the other kinds do not explain.
    """
    problem, slot_parts = solution.chosen, list[list[MemoryPart]]()

    def block_keys(component: str, blocks: Blocks) -> set[tuple[int, int]]:
        groups = problem.component(component).groups
        group_numbers = {group.name: number for number, group in enumerate(groups)}
        all_blocks = ((group.name, range(len(group.blocks))) for group in groups)
        return {
            (group_numbers[name], index)
            for name, indices in (all_blocks if blocks is None else blocks)
            for index in indices
        }

    resident = {name: block_keys(name, blocks) for name, blocks in solution.plan.finds}
    for slot, report in zip(solution.plan.slots, solution.simulation.slots, strict=True):
        ring_buffers = {
            a.component: round_up(a.ring_buffer_bytes, ALLOCATION_BYTES)
            for a in slot.actions
            if isinstance(a, Stream)
        }
        for action in slot.actions:
            if isinstance(action, Load | Evict):
                blocks = block_keys(action.component, action.blocks)
                previous = resident.get(action.component, set())
                resident[action.component] = (
                    previous | blocks if isinstance(action, Load) else previous - blocks
                )
        parts = [
            MemoryPart("weights", name, _bytes(solution, name, blocks))
            for name, blocks in resident.items()
        ]
        parts += [MemoryPart("ring_buffer", name, nbytes) for name, nbytes in ring_buffers.items()]
        parts += [
            MemoryPart("activation", "", report.working_bytes),
            MemoryPart("values", "", report.values_bytes),
        ]
        parts.append(
            MemoryPart("other", "", report.peak_bytes - sum(part.nbytes for part in parts))
        )
        slot_parts.append([part for part in parts if part.nbytes > 0])
    return slot_parts


def _bytes(solution: Solution, component: str, blocks: set[tuple[int, int]]) -> int:
    sizes = solution.chosen.component(component).variants[0].block_bytes
    return sum(round_up(sizes[group], ALLOCATION_BYTES) for group, _ in blocks)
