"""The planned bytes of a slot by what they are for: the weights and the ring buffer of each
component, activation, values."""

from __future__ import annotations

from typing import NamedTuple

from graphrun.model.plan import Blocks, Evict, Load, Stream
from graphrun.model.problem import ALLOCATION_BYTES
from graphrun.model.solution import Solution
from graphrun.units import round_up


class Part(NamedTuple):
    """``nbytes`` of a slot's peak. ``kind``: ``weights``, ``ring_buffer``, ``activation``,
    ``values``, or ``other``."""

    kind: str
    component: str  # empty for activation, values and other
    nbytes: int


def parts_of(solution: Solution) -> list[list[Part]]:
    """For each slot of the first run its parts, which sum to its planned peak; ``other`` is what
    the peak has beyond them."""
    problem, found = solution.chosen, list[list[Part]]()

    def numbered(component: str, blocks: Blocks) -> set[tuple[int, int]]:
        groups = problem.component(component).groups
        named = {group.name: number for number, group in enumerate(groups)}
        every = ((group.name, range(len(group.blocks))) for group in groups)
        return {
            (named[name], index)
            for name, of in (every if blocks is None else blocks)
            for index in of
        }

    held = {name: numbered(name, blocks) for name, blocks in solution.plan.finds}
    for slot, report in zip(solution.plan.slots, solution.simulation.slots, strict=True):
        ring_buffers = {
            a.component: round_up(a.ring_buffer_bytes, ALLOCATION_BYTES)
            for a in slot.actions
            if isinstance(a, Stream)
        }
        for action in slot.actions:
            if isinstance(action, Load | Evict):
                blocks = numbered(action.component, action.blocks)
                before = held.get(action.component, set())
                held[action.component] = (
                    before | blocks if isinstance(action, Load) else before - blocks
                )
        parts = [
            Part("weights", name, _bytes(solution, name, blocks)) for name, blocks in held.items()
        ]
        parts += [Part("ring_buffer", name, nbytes) for name, nbytes in ring_buffers.items()]
        parts += [
            Part("activation", "", report.working_bytes),
            Part("values", "", report.values_bytes),
        ]
        parts.append(Part("other", "", report.peak_bytes - sum(part.nbytes for part in parts)))
        found.append([part for part in parts if part.nbytes > 0])
    return found


def _bytes(solution: Solution, component: str, blocks: set[tuple[int, int]]) -> int:
    sizes = solution.chosen.component(component).variants[0].block_bytes
    return sum(round_up(sizes[group], ALLOCATION_BYTES) for group, _ in blocks)
