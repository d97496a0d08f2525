"""The least that each phase takes on the device: exact byte arithmetic with one variant to a component. No solver.

What a slot uses and cannot stream must be whole; all that can be streamed passes through a ring with room for the largest block
alone, and to hold that block instead would take as much. A layer needs only as much of a ring as it does not find among the
activation's bytes while it runs. `load` never needs more than `first`.

    first   | fixed: used | ring | first activation | values + carry |
    rest    | fixed: used | ring | rest activation  | values + carry |  <= effective budget
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from graphrun.model.choices import activation_bytes
from graphrun.model.plan import Part
from graphrun.model.problem import ALLOCATION_BYTES, ComponentNumbers, PhaseNumbers, Problem, Use
from graphrun.units import round_up

# Blocks of a ring in which the next one is copied while one computes.
DEPTH = 2
# The slots of a phase that compute.
PARTS: tuple[Part, ...] = ("first", "steady")


@dataclass(frozen=True, slots=True)
class PhaseMinimum:
    """The least that a phase takes in its tighter slot ``part``. ``weights_bytes`` must be whole (what cannot be streamed),
    ``values_bytes`` includes carry; ``available_bytes`` is the effective budget."""

    stage: str
    phase: str
    part: str
    weights_bytes: int
    ring_bytes: int
    activation_bytes: int
    values_bytes: int
    available_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum of the terms."""
        return self.weights_bytes + self.ring_bytes + self.activation_bytes + self.values_bytes

    @property
    def short_bytes(self) -> int:
        """Bytes missing; 0 or less where the phase fits."""
        return self.total_bytes - self.available_bytes


def used_components(problem: Problem) -> tuple[ComponentNumbers, ...]:
    """Components that some phase enters, in the problem's order."""
    names = {use.component for phase in problem.phases for use in phase.uses}
    return tuple(component for component in problem.components if component.name in names)


def needed_components(problem: Problem) -> tuple[ComponentNumbers, ...]:
    """Components of which some phase runs a block; the backing store of any other is not needed, and freed before the first slot."""
    names = {use.component for phase in problem.phases for use in phase.uses if any(use.group_calls) or problem.runs > 1}
    return tuple(component for component in problem.components if component.name in names)


def streamable_groups(component: ComponentNumbers, number: int = 0) -> tuple[bool, ...]:
    """Which classes may be streamed in variant ``number``. What cannot be moved cannot be streamed either."""
    variant = component.variants[number]
    return tuple(of.streamable and variant.streamable and variant.movable for of in component.groups)


def room_bytes(phase_bytes: int, use: Use, number: int) -> int:
    """What of an activation of ``phase_bytes`` is not there while a block of class ``number`` runs: so much of it passes without a
    ring."""
    return max(0, phase_bytes - use.beside_bytes[number]) if use.beside_bytes else 0


def least_memory(problem: Problem) -> tuple[PhaseMinimum, ...]:
    """What each phase takes at least with the first variants, in the slot (first or rest) that decides; nothing is spilled."""
    needs, held = [], dict[str, set[int]]()
    for index, phase in enumerate(problem.phases):
        values = problem.value_bytes(index) + phase.live_in_bytes
        weights, rings = 0, {"first": 0, "steady": 0}
        fixed = {"first": 0, "steady": 0}
        for component in problem.components:
            use = next((use for use in phase.uses if use.component == component.name), None)
            if component.variants[0].device == "cpu":
                continue
            demanded = problem.demanded(component.name)
            if not component.variants[0].movable or "keep" in demanded:
                here = {k for k, calls in enumerate(use.group_calls if use else ()) if calls}
                held[component.name] = held.get(component.name, set()) | here
                weights += _whole(component, held[component.name])
                continue
            if use is None:
                continue
            for part in PARTS:
                whole, ring = _passing(problem, component, use, phase, part)
                fixed[part], rings[part] = fixed[part] + whole, rings[part] + ring
        both = [_minimum(problem, phase, part, weights + fixed[part], rings[part], values) for part in ("first", "steady")]
        needs.append(both[1] if phase.steady_calls and both[1].total_bytes > both[0].total_bytes else both[0])
    return tuple(needs)


def least_weights(problem: Problem, component: ComponentNumbers, phase: PhaseNumbers, use: Use, number: int) -> int:
    """The least with which ``phase`` can make this ``use`` of ``component`` in variant ``number``: weights and activation."""
    if component.variants[number].device == "cpu":
        return 0
    found = []
    for part in PARTS:
        whole, ring = _passing(problem, component, use, phase, part, number)
        found.append(whole + ring + (phase.first_bytes if part == "first" else phase.steady_bytes))
    return max(found)


def _passing(
    problem: Problem, component: ComponentNumbers, use: Use, phase: PhaseNumbers, part: Part, number: int = 0
) -> tuple[int, int]:
    """What ``use`` needs whole of ``component`` in ``part``, and the ring for what passes: bytes, in variant ``number``."""
    sizes, whole = component.variants[number].block_bytes, problem.demanded(component.name) & {"keep", "whole"}
    passes = {k for k, yes in enumerate(streamable_groups(component, number)) if yes and not whole}
    used = {k for k, calls in enumerate(use.group_calls_in(part)) if calls}
    activation = phase.first_bytes if part == "first" else phase.steady_bytes
    ring = max((sizes[k] - room_bytes(activation, use, k) for k in used & passes), default=0)
    return _whole(component, used - passes, number), round_up(max(0, ring), ALLOCATION_BYTES)


def _minimum(problem: Problem, phase: PhaseNumbers, part: Part, weights: int, ring: int, values: int) -> PhaseMinimum:
    variants = [problem.component(use.component).variants[0] for use in phase.uses]
    activation = activation_bytes(phase.first_bytes if part == "first" else phase.steady_bytes, variants, phase.glue_bytes)
    return PhaseMinimum(phase.stage, phase.name, part, weights, ring, activation, values, problem.effective_bytes)


def _whole(component: ComponentNumbers, groups: Iterable[int], number: int = 0) -> int:
    sizes = component.variants[number].block_bytes
    return sum(len(component.groups[k].blocks) * round_up(sizes[k], ALLOCATION_BYTES) for k in groups)
