"""How finely components are cut: into blocks, and into layers where blocks do not fit. The one place that decides it.

    plan with blocks -> fits: done
                     -> a phase cannot fit: its components cut into layers, where these take less -> plan again
                     -> nothing that takes less is left to cut: nothing fits

Layers pass in many small copies, of which each may come alone: blocks are taken where they fit and layers do not gain. Must not
know how a plan is found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from graphrun.model.least_memory import PhaseMinimum, least_weights
from graphrun.model.problem import ComponentNumbers, PhaseNumbers, Problem, Use

T = TypeVar("T")


def cuttable(problem: Problem) -> tuple[str, ...]:
    """Components that can be cut into layers and are not yet."""
    return tuple(component.name for component in problem.components if component.layers is not None)


def smaller_by_layer(problem: Problem) -> set[str]:
    """Components that take less of the device at their least as layers than as blocks, in variants that may be chosen; where
    experts that data chooses stay with the rest, one takes more."""
    return _less(problem, _least_device)


def grains(problem: Problem) -> Iterator[Problem]:
    """``problem`` cut in each way that may take least of a tier, each finer than the one before: as it is; into layers what takes
    less of the device so; what takes less of the host and no more of the device; all that takes less of the host."""
    yield problem
    for names in (smaller_by_layer(problem), *_for_the_host(problem)):
        if (more := cut(problem, names)) is not problem:
            yield (problem := more)


def cut(problem: Problem, names: Collection[str]) -> Problem:
    """``problem`` with the components ``names`` cut into layers, those of them that can be."""
    names = set(names) & set(cuttable(problem))
    if not names:
        return problem
    components = tuple(c.layers if c.name in names and c.layers is not None else c for c in problem.components)

    def by_layer(phase: PhaseNumbers) -> PhaseNumbers:
        return replace(phase, uses=tuple(_finer(use) if use.component in names else use for use in phase.uses))

    return replace(
        problem,
        components=components,
        phases=tuple(by_layer(phase) for phase in problem.phases),
        options=tuple(replace(option, phases=tuple(by_layer(phase) for phase in option.phases)) for option in problem.options),
    )


def finer(problem: Problem, needs: Sequence[PhaseMinimum]) -> Problem | None:
    """``problem`` with the components of the phases that cannot fit cut into layers, those that take less so; None where nothing
    more can be gained.

    ``needs``: the least that each phase takes. Where every phase fits by itself, what is demanded of components binds, or the host:
    then those are cut that take less of it so, since layers are read from disk through a smaller buffer; first those that take no
    more of the device.
    """
    short = {need.phase for need in needs if need.short_bytes > 0}
    used = {use.component for phase in _phases(problem) if phase.name in short for use in phase.uses}
    tried = (used & smaller_by_layer(problem),) if short else _for_the_host(problem)
    return next((cut(problem, names) for names in tried if names), None)


def _phases(problem: Problem) -> tuple[PhaseNumbers, ...]:
    return (*problem.phases, *(phase for option in problem.options for phase in option.phases))


def _for_the_host(problem: Problem) -> tuple[set[str], set[str]]:
    """Components that take less of the host as layers: those that take no more of the device so, and all."""
    less = _less(problem, _least_host)
    return {name for name in less if _no_larger(problem, problem.component(name), _least_device)}, less


Least = Callable[[Problem, ComponentNumbers, bool], list[int]]  # bytes per variant that may be chosen, of layers or of blocks


def _less(problem: Problem, least: Least) -> set[str]:
    """Components that take less by ``least`` as layers than as blocks, in one variant at least, and more in none that counts."""
    found = (c for c in problem.components if c.layers is not None and _no_larger(problem, c, least))
    return {c.name for c in found if any(a < b for a, b in zip(least(problem, c, True), least(problem, c, False), strict=True))}


def _no_larger(problem: Problem, component: ComponentNumbers, least: Least) -> bool:
    return min(least(problem, component, True), default=0) <= min(least(problem, component, False), default=0)


def _least_device(problem: Problem, component: ComponentNumbers, by_layer: bool) -> list[int]:
    """The least with which every phase can use ``component``: what cannot be streamed, a ring for the largest other, activation."""
    of = component.layers if by_layer and component.layers is not None else component
    uses = [(phase, use) for phase in _phases(problem) for use in phase.uses if use.component == component.name]
    found = [(phase, _finer(use) if by_layer else use) for phase, use in uses]
    return [max((least_weights(problem, of, *at, n) for at in found), default=0) for n in problem.usable(component)]


def _least_host(problem: Problem, component: ComponentNumbers, by_layer: bool) -> list[int]:
    of = component.layers if by_layer and component.layers is not None else component
    return [of.variants[n].host_bytes for n in problem.usable(component)]


def until_it_fits(
    problem: Problem, attempt: Callable[[Problem], T | None], needs: Callable[[Problem], Sequence[PhaseMinimum]]
) -> T | None:
    """What ``attempt`` finds for ``problem``, cut as finely as that takes; None where it finds nothing at all."""
    tried: Problem | None = problem
    while tried is not None:
        if (found := attempt(tried)) is not None:
            return found
        tried = finer(tried, needs(tried))
    return None


def _finer(use: Use) -> Use:
    assert use.layers is not None
    return use.layers
