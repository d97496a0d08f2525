"""The planned bytes of a slot by use: weights, ring buffers, activation, values."""

from __future__ import annotations

from typing import NamedTuple

from graphrun.model.blocks import resident_blocks
from graphrun.model.plan import Stream
from graphrun.model.problem import ALLOCATION_BYTES
from graphrun.model.solution import Solution
from graphrun.units import round_up


class MemoryPart(NamedTuple):
    """``nbytes`` of a slot's peak. ``kind``: ``weights``, ``ring_buffer``, ``activation``,
    ``values`` or ``other``."""

    kind: str
    component: str  # empty for activation, values and other
    nbytes: int


def parts_of(solution: Solution) -> list[list[MemoryPart]]:
    """Return the parts of each slot of the first run, which sum to its planned peak. ``other`` is
    the part that the other kinds do not explain."""
    plan, slot_parts = solution.plan, list[list[MemoryPart]]()
    components = solution.chosen.components
    resident = [resident_blocks(component, plan.finds, plan.slots) for component in components]
    for slot, report, *blocks in zip(plan.slots, solution.simulation.slots, *resident, strict=True):
        ring_buffers = {
            a.component: round_up(a.ring_buffer_bytes, ALLOCATION_BYTES)
            for a in slot.actions
            if isinstance(a, Stream)
        }
        parts = [
            MemoryPart("weights", component.name, component_blocks.nbytes)
            for component, component_blocks in zip(components, blocks, strict=True)
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
