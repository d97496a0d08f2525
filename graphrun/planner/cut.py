"""How finely components are cut: into blocks, and into layers where blocks do not fit. The one place that decides it.

    plan with blocks -> fits: done
                     -> a phase cannot fit: its components cut into layers -> plan again
                     -> no phase can be cut further: nothing fits

Layers pass in many small copies, of which each may come alone: blocks are taken where they fit and layers do not gain. Must not
know how a plan is found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TypeVar

from graphrun.planner.needs import Need
from graphrun.planner.problem import ComponentNumbers, PhaseNumbers, Problem, Use, Variant

T = TypeVar("T")


def cuttable(problem: Problem) -> tuple[str, ...]:
    """Components that can be cut into layers and are not yet."""
    return tuple(component.name for component in problem.components if component.layers is not None)


def smaller_as_layers(problem: Problem) -> set[str]:
    """Components that take less of the device at their least as layers than as blocks; where experts that data chooses stay with
    the rest, one takes more."""
    return {c.name for c in problem.components if c.layers is not None and _least_device(c.layers) < _least_device(c)}


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


def finer(problem: Problem, needs: Sequence[Need]) -> Problem | None:
    """``problem`` with the components of the phases that cannot fit cut into layers; None where nothing more can be cut.

    ``needs``: the least that each phase takes. Where every phase fits by itself, what is demanded of components binds, or the host:
    then those are cut that take less of it so, since layers are read from disk through a smaller buffer.
    """
    short = {need.phase for need in needs if need.short_bytes > 0}
    phases = (*problem.phases, *(phase for option in problem.options for phase in option.phases))
    names = {use.component for phase in phases if phase.name in short for use in phase.uses} & set(cuttable(problem))
    if not short:
        names = {c.name for c in problem.components if c.layers is not None and _least_host(c.layers) < _least_host(c)}
    return cut(problem, names) if names else None


def _least_device(component: ComponentNumbers) -> int:
    """Least bytes with which one of its variants can be used: what cannot be streamed, and a ring for the largest other."""

    def least(variant: Variant) -> int:
        streamed = [k.streamable and variant.streamable for k in component.classes]
        sized = list(zip(component.classes, variant.block_bytes, streamed, strict=True))
        fixed = sum(len(k.blocks) * nbytes for k, nbytes, passes in sized if not passes)
        return fixed + max((nbytes for _, nbytes, passes in sized if passes), default=0)

    return min(map(least, component.variants), default=0)


def _least_host(component: ComponentNumbers) -> int:
    return min((variant.host_bytes for variant in component.variants), default=0)


def until_it_fits(problem: Problem, attempt: Callable[[Problem], T | None], needs: Callable[[Problem], Sequence[Need]]) -> T | None:
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
