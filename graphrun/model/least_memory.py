"""Minimum device memory of each phase, in exact bytes, for one variant per component. No solver.

Blocks that a slot uses and that cannot be streamed must be resident. All others pass through a ring
buffer with room for the largest of them; keeping that block resident would take as much. A load
slot never needs more than the first slot.

    first    | resident: not streamable | ring buffer | first activation  | values + inputs |
    steady   | resident: not streamable | ring buffer | steady activation | values + inputs |
             <= effective budget
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from graphrun.model.choices import activation_bytes
from graphrun.model.plan import SlotPart
from graphrun.model.problem import ALLOCATION_BYTES, ComponentNumbers, PhaseNumbers, Problem, Use
from graphrun.units import round_up

# slots that compute
PARTS: tuple[SlotPart, ...] = ("first", "steady")


@dataclass(frozen=True, slots=True)
class PhaseMinimum:
    """Minimum device bytes of a phase, in the slot (``part``: first or steady) that needs more.

    ``weights_bytes``: blocks that cannot be streamed. ``values_bytes``: includes the phase's
    inputs. ``available_bytes``: the effective budget.
    """

    stage: str
    phase: str
    part: str
    weights_bytes: int
    ring_buffer_bytes: int
    activation_bytes: int
    values_bytes: int
    available_bytes: int

    @property
    def total_bytes(self) -> int:
        return (
            self.weights_bytes + self.ring_buffer_bytes + self.activation_bytes + self.values_bytes
        )

    @property
    def short_bytes(self) -> int:
        """Bytes missing from the budget; 0 or less if the phase fits."""
        return self.total_bytes - self.available_bytes


def used_components(problem: Problem) -> tuple[ComponentNumbers, ...]:
    """Return the components that some phase calls, in the problem's order."""
    names = {use.component for phase in problem.phases for use in phase.uses}
    return tuple(component for component in problem.components if component.name in names)


def needed_components(problem: Problem) -> tuple[ComponentNumbers, ...]:
    """Return the components of which some phase runs a block; in a session, all that are called.

    The backing store of any other component is dropped before the first slot.
    """
    names = {
        use.component
        for phase in problem.phases
        for use in phase.uses
        if any(use.group_calls) or problem.runs > 1
    }
    return tuple(component for component in problem.components if component.name in names)


def streamable_groups(component: ComponentNumbers, number: int = 0) -> tuple[bool, ...]:
    """Return for each block group whether it may be streamed in variant ``number``."""
    variant = component.variants[number]
    return tuple(
        group.streamable and variant.streamable and variant.movable for group in component.groups
    )


def least_memory(problem: Problem) -> tuple[PhaseMinimum, ...]:
    """Return the minimum of each phase, with first variants and no value spilled."""
    minima, resident_groups = [], dict[str, set[int]]()
    for index, phase in enumerate(problem.phases):
        values = problem.value_bytes(index) + phase.input_bytes
        weights, ring_buffers = 0, {"first": 0, "steady": 0}
        fixed = {"first": 0, "steady": 0}
        for component in problem.components:
            use = next((use for use in phase.uses if use.component == component.name), None)
            if component.variants[0].device != "device":
                continue
            demanded = problem.demanded(component.name)
            if not component.variants[0].movable or "keep" in demanded:
                called_groups = {
                    k for k, calls in enumerate(use.group_calls if use else ()) if calls
                }
                resident_groups[component.name] = (
                    resident_groups.get(component.name, set()) | called_groups
                )
                weights += _group_bytes(component, resident_groups[component.name])
                continue
            if use is None:
                continue
            for part in PARTS:
                resident, ring_buffer = weights_and_ring_buffer(
                    problem, component, use, phase, part
                )
                fixed[part], ring_buffers[part] = (
                    fixed[part] + resident,
                    ring_buffers[part] + ring_buffer,
                )
        part_minima = [
            _minimum(problem, phase, part, weights + fixed[part], ring_buffers[part], values)
            for part in ("first", "steady")
        ]
        minima.append(
            part_minima[1]
            if phase.steady_calls and part_minima[1].total_bytes > part_minima[0].total_bytes
            else part_minima[0]
        )
    return tuple(minima)


def least_weights(
    problem: Problem, component: ComponentNumbers, phase: PhaseNumbers, use: Use, number: int
) -> int:
    """Return the minimum bytes of weights, ring buffer and activation for ``use`` in ``phase``."""
    if component.variants[number].device != "device":
        return 0
    part_bytes = []
    for part in PARTS:
        resident, ring_buffer = weights_and_ring_buffer(
            problem, component, use, phase, part, number
        )
        part_bytes.append(resident + ring_buffer + phase.activation_bytes(part))
    return max(part_bytes)


def weights_and_ring_buffer(
    problem: Problem,
    component: ComponentNumbers,
    use: Use,
    phase: PhaseNumbers,
    part: SlotPart,
    number: int = 0,
) -> tuple[int, int]:
    """Return the bytes that ``use`` needs resident in ``part``, and as ring buffer."""
    if component.variants[number].device != "device":
        return 0, 0
    sizes, unstreamed = (
        component.variants[number].block_bytes,
        problem.demanded(component.name) & {"keep", "whole"},
    )
    streamed = {
        k for k, yes in enumerate(streamable_groups(component, number)) if yes and not unstreamed
    }
    called_groups = {k for k, calls in enumerate(use.group_calls_in(part)) if calls}
    ring_buffer = max((sizes[k] for k in called_groups & streamed), default=0)
    return _group_bytes(component, called_groups - streamed, number), round_up(
        ring_buffer, ALLOCATION_BYTES
    )


def _minimum(
    problem: Problem,
    phase: PhaseNumbers,
    part: SlotPart,
    weights: int,
    ring_buffer: int,
    values: int,
) -> PhaseMinimum:
    variants = [problem.component(use.component).variants[0] for use in phase.uses]
    activation = activation_bytes(
        phase.activation_bytes(part),
        variants,
        phase.pipeline_code_bytes,
    )
    return PhaseMinimum(
        phase.stage,
        phase.name,
        part,
        weights,
        ring_buffer,
        activation,
        values,
        problem.effective_bytes,
    )


def _group_bytes(component: ComponentNumbers, groups: Iterable[int], number: int = 0) -> int:
    """Return the main-device allocations of all blocks of ``groups``."""
    sizes = component.variants[number].block_bytes
    device_groups = (k for k in groups if not component.groups[k].secondary)
    return sum(
        len(component.groups[k].blocks) * round_up(sizes[k], ALLOCATION_BYTES)
        for k in device_groups
    )
