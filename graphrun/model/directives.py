"""Adds directives to a problem and refuses those that no plan can satisfy. `problem.Directive`
documents what each one means.

The solver satisfies directives, `check` enforces them, and `graphrun.solve.infeasible` suggests
dropping one that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from graphrun.errors import InputError
from graphrun.model.least_memory import streamable_groups, used_components
from graphrun.model.problem import Directive, Problem

# Pairs that no plan can satisfy together.
_CONFLICTS = (("keep", "exclude"), ("keep", "drop"), ("exclude", "whole"))


def directed(problem: Problem, directives: Iterable[Directive]) -> Problem:
    """``problem`` with exactly ``directives``, sorted and deduplicated. Raises InputError naming
    each that no plan can satisfy."""
    chosen = sorted(set(directives), key=lambda of: (of.component, of.placement))
    found = replace(problem, directives=tuple(chosen))
    problems = [text for directive in chosen if (text := _refusal(problem, directive))]
    for component in sorted({directive.component for directive in chosen}):
        demanded = found.demanded(component)
        problems += [
            f"{one} and {other} {component}: do without one of them"
            for one, other in _CONFLICTS
            if {one, other} <= demanded
        ]
    if problems:
        raise InputError("\n".join(problems))
    return found


def _refusal(problem: Problem, directive: Directive) -> str:
    placement, name = directive.placement, directive.component
    components = {component.name: component for component in used_components(problem)}
    if name not in components:
        return f"{placement} {name}: there is no such component in this problem; it has {', '.join(components)}"
    component = components[name]
    groups = {
        k
        for phase in problem.phases
        for use in phase.uses
        if use.component == name
        for k, n in enumerate(use.group_calls)
        if n
    }
    numbers = range(len(component.variants))
    if placement == "pin" and not any(
        variant.backing_store == "pinned" for variant in component.variants
    ):
        return f"pin {name}: it has no variant with a pinned backing store"
    streamable = (
        yes
        for number in numbers
        for k, yes in enumerate(streamable_groups(component, number))
        if k in groups
    )
    if placement == "exclude" and not any(streamable):
        return f"exclude {name}: none of its blocks can be streamed, so all of it must be on the device while it computes"
    if placement in ("exclude", "drop") and not any(
        variant.movable for variant in component.variants
    ):
        return f"{placement} {name}: it cannot be moved off the device once it is there"
    return ""
