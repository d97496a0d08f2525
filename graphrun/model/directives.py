"""Add directives to a problem, and refuse directives that no plan can satisfy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from graphrun.errors import InputError
from graphrun.model.least_memory import streamable_groups, used_components
from graphrun.model.problem import Directive, Problem

# pairs that no plan can satisfy together
_CONFLICTS = (("keep", "exclude"), ("keep", "drop"), ("exclude", "whole"))


def directed(problem: Problem, directives: Iterable[Directive]) -> Problem:
    """Return ``problem`` with exactly ``directives``, sorted and without duplicates.

    Raises InputError that names each directive no plan can satisfy.
    """
    sorted_directives = sorted(
        set(directives), key=lambda directive: (directive.component, directive.placement)
    )
    result = replace(problem, directives=tuple(sorted_directives))
    problems = [text for directive in sorted_directives if (text := _refusal(problem, directive))]
    for component in sorted({directive.component for directive in sorted_directives}):
        demanded = result.demanded(component)
        problems += [
            f"{first} and {other} {component}: do without one of them"
            for first, other in _CONFLICTS
            if {first, other} <= demanded
        ]
    if problems:
        raise InputError("\n".join(problems))
    return result


def _refusal(problem: Problem, directive: Directive) -> str:
    placement, name = directive.placement, directive.component
    components = {component.name: component for component in used_components(problem)}
    if name not in components:
        return (
            f"{placement} {name}: there is no such component in this problem; it has"
            f" {', '.join(components)}"
        )
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
        return (
            f"exclude {name}: none of its blocks can be streamed, so all of it must be on the"
            " device while it computes"
        )
    if placement in ("exclude", "drop") and not any(
        variant.movable for variant in component.variants
    ):
        return f"{placement} {name}: it cannot be moved off the device once it is there"
    return ""
