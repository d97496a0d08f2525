"""Whether what a plan chooses is there to be chosen: variants, options, the order of stages, bytes on disk. Knows no slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphrun.planner.plan import Plan, Violation
from graphrun.planner.problem import ComponentNumbers, PhaseNumbers, Problem, Variant


def broken_choices(problem: Problem, plan: Plan) -> Iterator[Violation]:
    """The rules ``variant``, ``pin``, ``option``, ``order`` and ``disk``, which belong to no slot."""
    yield from _twice("variant", [name for name, _ in plan.variants])
    yield from _twice("option", [stage for stage, _ in plan.options])
    named, known = dict(plan.variants), {component.name for component in problem.components}
    for name in named:
        if name not in known:
            yield _broken("variant", f"the problem has no component {name!r}")
    for component in problem.components:
        yield from _variant(problem, component, named.get(component.name))
    for stage, name in plan.options:
        yield from _option(problem, stage, name)
    yield from _order(problem, plan.order)
    used = {use.component for phase in chosen_phases(problem, plan) for use in phase.uses}
    stored = {c.name: chosen(c, named.get(c.name)) for c in problem.components if c.name in used}
    terms = {name: variant.stored_bytes for name, variant in stored.items() if variant and variant.stored_bytes}
    if problem.disk_bytes is not None and (total := sum(terms.values())) > problem.disk_bytes:
        yield _broken("disk", f"{_sum(terms)} = {total} bytes on disk > {problem.disk_bytes}")


def chosen(component: ComponentNumbers, name: str | None) -> Variant | None:
    """The variant called ``name``; the only one where nothing is named."""
    if name is None:
        return component.variants[0] if len(component.variants) == 1 else None
    return next((variant for variant in component.variants if variant.name == name), None)


def chosen_phases(problem: Problem, plan: Plan) -> tuple[PhaseNumbers, ...]:
    """The phases of every stage as ``plan`` runs it, with the numbers that they have whatever the variants; in no special order."""
    options = {(option.stage, option.name): option for option in problem.options}
    picked = [options[choice] for choice in plan.options if choice in options]
    stages = {option.stage for option in picked}
    return (*(phase for phase in problem.phases if phase.stage not in stages), *(p for option in picked for p in option.phases))


def _variant(problem: Problem, component: ComponentNumbers, name: str | None) -> Iterator[Violation]:
    variant = chosen(component, name)
    if variant is None:
        known = ", ".join(variant.name for variant in component.variants)
        yield _broken("variant", f"{component.name} is to be one of {known}; found {name or 'none of them'}")
        return
    if variant.needs and variant.needs not in problem.allow:
        yield _broken("variant", f"{component.name} {variant.name} changes the output, and {variant.needs} is not allowed")
    if variant.home != "pinned" and "pin" in problem.demanded(component.name):
        yield _broken("pin", f"{component.name} has the home {variant.home}, and the directive wants it pinned")


def _option(problem: Problem, stage: str, name: str) -> Iterator[Violation]:
    found = [option for option in problem.options if (option.stage, option.name) == (stage, name)]
    if not found:
        yield _broken("option", f"the problem has no {name!r} for stage {stage!r}")
    elif found[0].needs and found[0].needs not in problem.allow:
        yield _broken("option", f"{name} of {stage} changes the output, and {found[0].needs} is not allowed")


def _order(problem: Problem, order: Sequence[str]) -> Iterator[Violation]:
    stages = list(dict.fromkeys(phase.stage for phase in problem.phases))
    if not order or list(order) == stages:
        return
    if problem.precedence is None:
        yield _broken("order", f"the stages run as they stand, {' '.join(stages)}; found {' '.join(order)}")
    elif sorted(order) != sorted(stages):
        yield _broken("order", f"each of {' '.join(stages)} once; found {' '.join(order)}")
    else:
        for earlier, later in problem.precedence:
            if list(order).index(earlier) > list(order).index(later):
                yield _broken("order", f"{later} runs before {earlier}, which it needs")


def _twice(rule: str, names: Sequence[str]) -> Iterator[Violation]:
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield _broken(rule, f"{name} is chosen {names.count(name)} times")


def _sum(terms: dict[str, int]) -> str:
    return " + ".join(f"{nbytes} {name}" for name, nbytes in terms.items())


def _broken(rule: str, detail: str) -> Violation:
    return Violation(rule, -1, -1, detail)
