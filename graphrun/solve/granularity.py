"""Granularity of components: blocks, or layers where blocks do not fit or layers are faster.

    solve with blocks -> fits: done
                      -> a phase cannot fit: split its components into layers where these need less
                         memory, and solve again
                      -> no component needs less memory as layers: infeasible

Layers are many small copies, each with its own overhead. This module does not depend on how a plan
is found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from graphrun.model.least_memory import PhaseMinimum, least_weights
from graphrun.model.problem import ComponentNumbers, PhaseNumbers, Problem, Use


def splittable(problem: Problem) -> tuple[str, ...]:
    """Return the names of components that can still be split into layers."""
    return tuple(component.name for component in problem.components if component.layers is not None)


def smaller_as_layers(problem: Problem) -> set[str]:
    """Return the components whose minimum device memory is smaller as layers, over usable variants.

    Layers may also need more memory: if data decide which experts run, the layers of these experts
    cannot be streamed. They then count as weights outside of any block, which are loaded as a
    whole.
    """
    return _components_with_less(problem, _device_minimum)


def granularities(problem: Problem) -> Iterator[Problem]:
    """Yield ``problem`` at every granularity that may minimise a budget, each finer than the last.

    First ``problem`` itself, then with more components as layers:

    - components that need less device memory as layers
    - components that need less host memory, and no more device memory
    - all components that need less host memory
    """
    yield problem
    for names in (smaller_as_layers(problem), *_less_host_memory(problem)):
        if (split := split_into_layers(problem, names)) is not problem:
            yield (problem := split)


def split_into_layers(problem: Problem, names: Collection[str]) -> Problem:
    """Return ``problem`` with the components ``names`` split into layers, where possible."""
    names = set(names) & set(splittable(problem))
    if not names:
        return problem
    components = tuple(
        c.layers if c.name in names and c.layers is not None else c for c in problem.components
    )

    def by_layer(phase: PhaseNumbers) -> PhaseNumbers:
        return replace(
            phase,
            uses=tuple(_layers_of(use) if use.component in names else use for use in phase.uses),
        )

    return replace(
        problem,
        components=components,
        phases=tuple(by_layer(phase) for phase in problem.phases),
        options=tuple(
            replace(option, phases=tuple(by_layer(phase) for phase in option.phases))
            for option in problem.options
        ),
    )


def split_as(problem: Problem, model: Problem) -> Problem:
    """Return ``problem`` with the same components split into layers as in ``model``."""
    return split_into_layers(
        problem, {c.name for c in model.components if c.granularity == "layers"}
    )


def finer(problem: Problem, needs: Sequence[PhaseMinimum]) -> Problem | None:
    """Return ``problem`` with more components split into layers; None if that gains nothing.

    ``needs``: the minimum memory of each phase. If phases do not fit, their components that need
    less device memory as layers are split. If all fit, directives or host budgets are the limit:
    components that need less host memory as layers are split, because layers are read from disk
    through a smaller buffer. Components that need no more device memory come first.
    """
    short = {need.phase for need in needs if need.short_bytes > 0}
    short_components = {
        use.component for phase in _phases(problem) if phase.name in short for use in phase.uses
    }
    candidates = (
        (short_components & smaller_as_layers(problem),) if short else _less_host_memory(problem)
    )
    return next((split_into_layers(problem, names) for names in candidates if names), None)


def _phases(problem: Problem) -> tuple[PhaseNumbers, ...]:
    return (*problem.phases, *(phase for option in problem.options for phase in option.phases))


def _less_host_memory(problem: Problem) -> tuple[set[str], set[str]]:
    """Return components smaller on the host as layers: first no larger on the device, then all."""
    names = _components_with_less(problem, _host_minimum)
    return {
        name
        for name in names
        if _is_no_larger_as_layers(problem, problem.component(name), _device_minimum)
    }, names


# minimum bytes per usable variant; the flag: as layers
Least = Callable[[Problem, ComponentNumbers, bool], list[int]]


def _components_with_less(problem: Problem, minimum_bytes: Least) -> set[str]:
    """Return the components whose ``minimum_bytes`` are smaller as layers.

    Smaller in at least one variant, and not larger in the minimum over all variants.
    """
    candidates = (
        c
        for c in problem.components
        if c.layers is not None and _is_no_larger_as_layers(problem, c, minimum_bytes)
    )
    return {
        c.name
        for c in candidates
        if any(
            a < b
            for a, b in zip(
                minimum_bytes(problem, c, True), minimum_bytes(problem, c, False), strict=True
            )
        )
    }


def _is_no_larger_as_layers(
    problem: Problem, component: ComponentNumbers, minimum_bytes: Least
) -> bool:
    """Whether the minimum over all variants is no larger as layers than as blocks."""
    return min(minimum_bytes(problem, component, True), default=0) <= min(
        minimum_bytes(problem, component, False), default=0
    )


def _device_minimum(problem: Problem, component: ComponentNumbers, by_layer: bool) -> list[int]:
    """Return per usable variant the device memory that ``component`` needs in its largest phase.

    It has blocks that cannot be streamed, a ring buffer for the largest other block, and
    activation.
    """
    component_or_layers = (
        component.layers if by_layer and component.layers is not None else component
    )
    uses = [
        (phase, use)
        for phase in _phases(problem)
        for use in phase.uses
        if use.component == component.name
    ]
    phase_uses = [(phase, _layers_of(use) if by_layer else use) for phase, use in uses]
    return [
        max(
            (
                least_weights(problem, component_or_layers, *phase_use, n)
                for phase_use in phase_uses
            ),
            default=0,
        )
        for n in problem.usable(component)
    ]


def _host_minimum(problem: Problem, component: ComponentNumbers, by_layer: bool) -> list[int]:
    component_or_layers = (
        component.layers if by_layer and component.layers is not None else component
    )
    return [component_or_layers.variants[n].host_bytes for n in problem.usable(component)]


def _layers_of(use: Use) -> Use:
    assert use.layers is not None
    return use.layers
