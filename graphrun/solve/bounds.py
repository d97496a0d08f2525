"""Lower bounds of device memory that take no solve.

bound of a phase = input bytes + activation
                   + weights and ring buffer of each component, in the variant and granularity
                     that need least
"""

from __future__ import annotations

from graphrun.model.least_memory import PARTS, PhaseMinimum, weights_and_ring_buffer
from graphrun.model.plan import SlotPart
from graphrun.model.problem import PhaseNumbers, Problem, Use
from graphrun.solve.granularity import split_into_layers, splittable
from graphrun.solve.programs import usable


def surely_short(problem: Problem) -> tuple[PhaseMinimum, ...]:
    """Return the phases whose lower bound is above the device's budget: no plan exists.

    Empty proves nothing. Stages with options, which may need less, are left out.
    """
    if problem.secondaries:
        return ()
    numbers = {component.name: n for n, component in enumerate(problem.components)}
    if not all(usable(problem, number) for number in numbers.values()):
        return ()
    as_layers = split_into_layers(problem, splittable(problem))
    with_options = {
        option.stage
        for option in problem.options
        if not option.needs or option.needs in problem.allow
    }

    def weights(use: Use, layered: Use, phase: PhaseNumbers, part: SlotPart) -> tuple[int, int]:
        number = numbers[use.component]
        pairs = (
            weights_and_ring_buffer(split, split.components[number], split_use, phase, part, n)
            for split, split_use in ((problem, use), (as_layers, layered))
            for n in usable(split, number)
        )
        return min(pairs, key=sum)

    def bound(phase: PhaseNumbers, layered: PhaseNumbers, part: SlotPart) -> PhaseMinimum:
        may_leave = phase.uses and all(
            any(
                component.variants[n].device != "device"
                for component in [problem.components[numbers[use.component]]]
                for n in usable(problem, numbers[use.component])
            )
            for use in phase.uses
        )
        activation_bytes = phase.activation_bytes(part)
        pairs = [
            weights(use, layered_use, phase, part)
            for use, layered_use in zip(phase.uses, layered.uses, strict=True)
        ]
        return PhaseMinimum(
            phase.stage,
            phase.name,
            part,
            sum(resident for resident, _ in pairs),
            sum(ring_buffer for _, ring_buffer in pairs),
            min(activation_bytes, phase.pipeline_code_bytes) if may_leave else activation_bytes,
            phase.input_bytes,
            problem.effective_bytes,
        )

    bounds = [
        max(
            (bound(phase, layered, part) for part in PARTS[: 2 if phase.steady_calls else 1]),
            key=lambda need: need.total_bytes,
        )
        for phase, layered in zip(problem.phases, as_layers.phases, strict=True)
        if phase.stage not in with_options
    ]
    return tuple(need for need in bounds if need.short_bytes > 0)
