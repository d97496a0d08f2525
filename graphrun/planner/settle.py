"""A problem with its choices made: what a plan's variants, options and order of stages turn it into. Chooses nothing itself.

    problem + order + options -> arrange -> phases and values as they will be; variants still open
            + variants        -> settle  -> one variant to a component, its slowdown and scratch in the phases' numbers

Whoever follows, simulates or judges a plan does so on the settled problem, in which ``variants[0]`` is the one chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from graphrun.errors import PlanError
from graphrun.planner.hiding import read_from_disk
from graphrun.planner.plan import Plan
from graphrun.planner.problem import ComponentNumbers, PhaseNumbers, Problem, Use, ValueNumbers, Variant


def stages_of(problem: Problem) -> tuple[str, ...]:
    """The stages of ``problem`` in the order of its phases."""
    return tuple(dict.fromkeys(phase.stage for phase in problem.phases))


def arrange(problem: Problem, order: Sequence[str] = (), options: Mapping[str, str] | None = None) -> Problem:
    """``problem`` with its stages in ``order`` (empty: as they are), run by ``options`` (stage -> name), and no such choice left.

    Values live from behind their producer to their last consumer in that order. Raises PlanError for an unknown option, for an
    option that needs what is not allowed, and for an order that is not one of these stages or breaks their precedence.
    """
    order, options = tuple(order) or stages_of(problem), dict(options or {})
    _require_order(problem, order)
    phases = {stage: tuple(phase for phase in problem.phases if phase.stage == stage) for stage in order}
    for stage, name in options.items():
        phases[stage] = _option(problem, stage, name)
    arranged = tuple(phase for stage in order for phase in phases[stage])
    values = tuple(living(value, order, arranged) for value in problem.values)
    return replace(problem, phases=arranged, values=values, precedence=None, options=())


def settle(problem: Problem, plan: Plan) -> Problem:
    """``problem`` as ``plan`` chose: arranged, one variant to a component, the phases' seconds and bytes as with that variant.

    Raises PlanError where the plan chooses what the problem does not have, or does not allow.
    """
    arranged = arrange(problem, plan.order, dict(plan.options))
    names = dict(plan.variants)
    if unknown := sorted(set(names) - {component.name for component in problem.components}):
        raise PlanError(f"variant: the problem has no component {', '.join(unknown)}")
    chosen = {component.name: _variant(problem, component, names.get(component.name)) for component in problem.components}
    components = tuple(
        replace(component, variants=(replace(chosen[component.name], slowdown=1.0, block_seconds=(), scratch_bytes=0, needs=""),))
        for component in arranged.components
    )
    phases = tuple(_with_variants(arranged, phase, chosen) for phase in arranged.phases)
    return replace(arranged, components=components, phases=phases)


def use_with(use: Use, component: ComponentNumbers, variant: Variant) -> Use:
    """``use`` of ``component`` with seconds as ``variant`` computes: slowed down, with its block_seconds once a block and call, and
    shared among classes as its reads from disk can hide."""
    use = read_from_disk(use, variant, [len(of.blocks) for of in component.classes])
    use = replace(use, beside_bytes=()) if variant.scratch_bytes and use.beside_bytes else use  # scratch is not told apart
    extra = variant.block_seconds or (0.0,) * len(use.seconds)
    if variant.slowdown == 1.0 and not any(extra):
        return use
    seconds = tuple(variant.slowdown * each + more for each, more in zip(use.seconds, extra, strict=True))
    order, seen = [], set[tuple[int, int]]()
    for k, i, each in use.order:
        order.append((k, i, variant.slowdown * each + (0.0 if (k, i) in seen else extra[k])))
        seen.add((k, i))
    return replace(use, seconds=seconds, order=tuple(order))


def activation_bytes(phase_bytes: int, variants: Iterable[Variant], handed_bytes: int = 0) -> int:
    """What a phase that takes ``phase_bytes`` of activation takes with ``variants``, one for each component it uses.

    Where all of them compute on the CPU what is handed out of them, at most; else the phase's bytes and the largest scratch.
    """
    found = list(variants)
    if found and all(variant.device == "cpu" for variant in found):
        return min(phase_bytes, handed_bytes)
    return phase_bytes + max((variant.scratch_bytes for variant in found), default=0)


def _with_variants(problem: Problem, phase: PhaseNumbers, chosen: Mapping[str, Variant]) -> PhaseNumbers:
    variants = [chosen[use.component] for use in phase.uses]
    return replace(
        phase,
        uses=tuple(use_with(use, problem.component(use.component), chosen[use.component]) for use in phase.uses),
        first_bytes=activation_bytes(phase.first_bytes, variants, phase.handed_bytes),
        rest_bytes=activation_bytes(phase.rest_bytes, variants, phase.handed_bytes),
    )


def _variant(problem: Problem, component: ComponentNumbers, name: str | None) -> Variant:
    usable = [component.variants[index] for index in problem.usable(component)]
    if name is None and len(component.variants) == 1:
        return component.variants[0]
    for variant in usable:
        if variant.name == name:
            return variant
    known = ", ".join(variant.name for variant in usable) or "none that is allowed"
    raise PlanError(f"variant: {component.name} has no {name!r}; it has {known}" if name else f"variant: {component.name} has none")


def _option(problem: Problem, stage: str, name: str) -> tuple[PhaseNumbers, ...]:
    for option in problem.options:
        if (option.stage, option.name) == (stage, name):
            if option.needs and option.needs not in problem.allow:
                raise PlanError(f"option: {name} of {stage} changes the output, and {option.needs} is not allowed")
            return option.phases
    raise PlanError(f"option: the problem has no {name!r} for stage {stage!r}")


def _require_order(problem: Problem, order: tuple[str, ...]) -> None:
    stages = stages_of(problem)
    if order == stages:
        return
    if sorted(order) != sorted(stages) or problem.precedence is None:
        raise PlanError(f"order: the problem has {' '.join(stages)}, the plan {' '.join(order)}")
    place = {stage: number for number, stage in enumerate(order)}
    for earlier, later in problem.precedence:
        if place[earlier] > place[later]:
            raise PlanError(f"order: {later} needs {earlier} before it")


def living(value: ValueNumbers, order: Sequence[str], phases: Sequence[PhaseNumbers]) -> ValueNumbers:
    """``value`` with the phases at whose entry it lives, in ``order``; a value that no later stage consumes keeps none."""
    place = {stage: number for number, stage in enumerate(order)}
    last = max((place[stage] for stage in value.consumers if stage in place), default=-1)
    begin = place.get(value.producer, -1)
    lives = [number for number, phase in enumerate(phases) if begin < place[phase.stage] <= last]
    return replace(value, first_phase=lives[0], last_phase=lives[-1]) if lives else value
