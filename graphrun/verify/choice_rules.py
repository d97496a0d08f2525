"""Rules of `graphrun.verify.check` about the choices of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from graphrun.errors import PlanError
from graphrun.model.choices import apply_choices
from graphrun.model.copies import original_name
from graphrun.model.plan import Plan, Violation
from graphrun.model.problem import ComponentNumbers, PhaseNumbers, Problem, Variant
from graphrun.model.splits import with_splits


def choice_violations(problem: Problem, plan: Plan) -> Iterator[Violation]:
    """Yield violations of the rules variant, pin, option, order, split, copy and disk."""
    yield from _repeated_choices("variant", [name for name, _ in plan.variants])
    yield from _repeated_choices("option", [stage for stage, _ in plan.options])
    variant_names, components = (
        dict(plan.variants),
        {component.name for component in problem.components},
    )
    for name in variant_names:
        if name not in components:
            yield plan_violation("variant", f"the problem has no component {name!r}")
    for component in problem.components:
        yield from _variant(problem, component, variant_names.get(component.name))
    for stage, name in plan.options:
        yield from _option(problem, stage, name)
    yield from _order(problem, plan.order)
    yield from _splits(problem, plan)
    yield from _copies(problem, plan)
    used_components = {
        use.component for phase in chosen_phases(problem, plan) for use in phase.uses
    }
    used_variants = {
        c.name: _chosen_variant(c, variant_names.get(c.name))
        for c in problem.components
        if c.name in used_components
    }
    terms = {
        name: variant.stored_bytes
        for name, variant in used_variants.items()
        if variant and variant.stored_bytes
    }
    if problem.disk_bytes is not None and (total := sum(terms.values())) > problem.disk_bytes:
        yield plan_violation(
            "disk", f"{terms_text(terms)} = {total} bytes on disk > {problem.disk_bytes}"
        )


def _chosen_variant(component: ComponentNumbers, name: str | None) -> Variant | None:
    """Return the variant ``name`` (None: the only variant); None if there is no such variant."""
    if name is None:
        return component.variants[0] if len(component.variants) == 1 else None
    return next((variant for variant in component.variants if variant.name == name), None)


def chosen_phases(problem: Problem, plan: Plan) -> tuple[PhaseNumbers, ...]:
    """Return the phases of all stages with ``plan``'s options, without variants' effects."""
    options = {(option.stage, option.name): option for option in problem.options}
    selection = [options[choice] for choice in plan.options if choice in options]
    stages = {option.stage for option in selection}
    return (
        *(phase for phase in problem.phases if phase.stage not in stages),
        *(p for option in selection for p in option.phases),
    )


def _variant(
    problem: Problem, component: ComponentNumbers, name: str | None
) -> Iterator[Violation]:
    variant = _chosen_variant(component, name)
    if variant is None:
        names = ", ".join(variant.name for variant in component.variants)
        yield plan_violation(
            "variant",
            f"{component.name}: expected one of the variants {names}; found {name or 'none'}",
        )
        return
    if variant.needs and variant.needs not in problem.allow:
        yield plan_violation(
            "variant",
            f"{component.name} {variant.name} changes the output, and {variant.needs} is not "
            "allowed",
        )
    if variant.backing_store != "pinned" and "pin" in problem.demanded(component.name):
        yield plan_violation(
            "pin",
            f"the backing store of {component.name} is {variant.backing_store}, but a directive "
            "demands pinned",
        )


def _option(problem: Problem, stage: str, name: str) -> Iterator[Violation]:
    matches = [option for option in problem.options if (option.stage, option.name) == (stage, name)]
    if not matches:
        yield plan_violation("option", f"the problem has no {name!r} for stage {stage!r}")
    elif matches[0].needs and matches[0].needs not in problem.allow:
        yield plan_violation(
            "option", f"{name} of {stage} changes the output, and {matches[0].needs} is not allowed"
        )


def _order(problem: Problem, order: Sequence[str]) -> Iterator[Violation]:
    stages = list(dict.fromkeys(phase.stage for phase in problem.phases))
    if not order or list(order) == stages:
        return
    if problem.precedence is None:
        yield plan_violation(
            "order", f"the order of stages is fixed, {' '.join(stages)}; found {' '.join(order)}"
        )
    elif sorted(order) != sorted(stages):
        yield plan_violation(
            "order", f"expected each of {' '.join(stages)} once; found {' '.join(order)}"
        )
    else:
        for predecessor, successor in problem.precedence:
            if list(order).index(predecessor) > list(order).index(successor):
                yield plan_violation(
                    "order", f"{successor} runs before {predecessor}, which it depends on"
                )


def _splits(problem: Problem, plan: Plan) -> Iterator[Violation]:
    try:
        split = with_splits(problem, plan.splits)
    except PlanError as error:
        yield plan_violation("split", str(error))
        return
    variant_names = dict(plan.variants)
    for name, secondary, _ in plan.splits:
        if _chosen_variant(split.component(name), variant_names.get(name)) is None:
            yield plan_violation(
                "split",
                f"{name} with the variant {variant_names.get(name)} cannot be split over "
                f"device{secondary}",
            )


def _copies(problem: Problem, plan: Plan) -> Iterator[Violation]:
    variant_names = dict(plan.variants)
    chosen_variants = {
        c.name: _chosen_variant(c, variant_names.get(c.name)) for c in problem.components
    }
    for component in problem.components:
        variant, original = chosen_variants[component.name], chosen_variants.get(component.copy_of)
        if component.copy_of and variant and original and original_name(variant) != original.name:
            yield plan_violation(
                "copy",
                f"{component.name} is in the variant {variant.name}, and {component.copy_of} in "
                f"{original.name}",
            )
    if not plan.copies:
        return
    try:
        apply_choices(problem, plan)
    except PlanError as error:
        yield plan_violation("copy", str(error))


def _repeated_choices(rule: str, names: Sequence[str]) -> Iterator[Violation]:
    for name, count in Counter(names).items():
        if count > 1:
            yield plan_violation(rule, f"{name} is chosen {count} times")


def terms_text(terms: dict[str, int]) -> str:
    """Return a sum of bytes in words, such as ``100 te + 200 vae``."""
    return " + ".join(f"{nbytes} {name}" for name, nbytes in terms.items())


def plan_violation(rule: str, detail: str) -> Violation:
    """Return a violation by the whole plan."""
    return Violation(rule, -1, -1, detail)
