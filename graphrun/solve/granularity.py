"""Granularity of components: blocks by default, layers where blocks do not fit. The only module
that decides it.

    solve with blocks -> fits: done
                      -> a phase cannot fit: its components are split into layers where these need
                      less -> solve again
                      -> no component is left that needs less as layers: infeasible

Layers are many small copies, each with its own overhead. So blocks are used where they fit and
layers are not faster. Independent of how a plan is found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from graphrun.model.least_memory import PhaseMinimum, least_weights
from graphrun.model.problem import ComponentNumbers, PhaseNumbers, Problem, Use


def splittable(problem: Problem) -> tuple[str, ...]:
    """Names of components that can be split into layers and are not yet."""
    return tuple(component.name for component in problem.components if component.layers is not None)


def smaller_as_layers(problem: Problem) -> set[str]:
    """Components whose least device memory is smaller as layers than as blocks, over the usable
    variants. It can be larger: experts that are chosen by data belong to the remainder when a
    component is split into layers."""
    return _components_with_less(problem, _device_minimum)


def granularities(problem: Problem) -> Iterator[Problem]:
    """``problem`` at every granularity that may need least of some budget, each finer than the one
    before: unchanged; layers for components that then need less device memory; also for those that
    need less host memory and no more device memory; also for all that need less host memory."""
    yield problem
    for names in (smaller_as_layers(problem), *_less_host_memory(problem)):
        if (more := split_into_layers(problem, names)) is not problem:
            yield (problem := more)


def split_into_layers(problem: Problem, names: Collection[str]) -> Problem:
    """``problem`` with those of the components ``names`` split into layers that can be."""
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


def finer(problem: Problem, needs: Sequence[PhaseMinimum]) -> Problem | None:
    """``problem`` with more components split into layers; None where that gains nothing.

    ``needs``: the least memory of each phase. Where phases do not fit, their components are split
    if they need less device memory as layers. Where every phase fits by itself, directives or the
    host budgets bind: then components are split that need less host memory as layers (these are
    read from disk through a smaller buffer), first those that need no more device memory.
    """
    short = {need.phase for need in needs if need.short_bytes > 0}
    used = {
        use.component for phase in _phases(problem) if phase.name in short for use in phase.uses
    }
    tried = (used & smaller_as_layers(problem),) if short else _less_host_memory(problem)
    return next((split_into_layers(problem, names) for names in tried if names), None)


def _phases(problem: Problem) -> tuple[PhaseNumbers, ...]:
    return (*problem.phases, *(phase for option in problem.options for phase in option.phases))


def _less_host_memory(problem: Problem) -> tuple[set[str], set[str]]:
    """Components that need less host memory as layers: first only those that need no more device
    memory, then all."""
    less = _components_with_less(problem, _host_minimum)
    return {
        name for name in less if _no_larger(problem, problem.component(name), _device_minimum)
    }, less


# least bytes per usable variant; the flag: as layers
Least = Callable[[Problem, ComponentNumbers, bool], list[int]]


def _components_with_less(problem: Problem, least: Least) -> set[str]:
    """Components for which ``least`` is smaller as layers than as blocks in at least one variant,
    while the least over all variants is not larger."""
    found = (
        c for c in problem.components if c.layers is not None and _no_larger(problem, c, least)
    )
    return {
        c.name
        for c in found
        if any(
            a < b for a, b in zip(least(problem, c, True), least(problem, c, False), strict=True)
        )
    }


def _no_larger(problem: Problem, component: ComponentNumbers, least: Least) -> bool:
    return min(least(problem, component, True), default=0) <= min(
        least(problem, component, False), default=0
    )


def _device_minimum(problem: Problem, component: ComponentNumbers, by_layer: bool) -> list[int]:
    """Per usable variant, the least device memory with which every phase can use ``component``:
    blocks that cannot be streamed, a ring buffer for the largest other block, activation."""
    of = component.layers if by_layer and component.layers is not None else component
    uses = [
        (phase, use)
        for phase in _phases(problem)
        for use in phase.uses
        if use.component == component.name
    ]
    found = [(phase, _layers_of(use) if by_layer else use) for phase, use in uses]
    return [
        max((least_weights(problem, of, *at, n) for at in found), default=0)
        for n in problem.usable(component)
    ]


def _host_minimum(problem: Problem, component: ComponentNumbers, by_layer: bool) -> list[int]:
    of = component.layers if by_layer and component.layers is not None else component
    return [of.variants[n].host_bytes for n in problem.usable(component)]


def _layers_of(use: Use) -> Use:
    assert use.layers is not None
    return use.layers
