"""A problem with its choices made: what a plan's variants, options and order of stages turn it into. Chooses nothing itself.

    problem + order + options -> arrange -> phases and values as they will be; variants still open
            + variants        -> settle  -> one variant to a component, its slowdown and scratch in the phases' numbers

Whoever follows, simulates or judges a plan does so on the settled problem, in which ``variants[0]`` is the one chosen.

Which compute copies of blocks can hide in: their own, and what of the rest computes between them. Decides nothing.

rest |  block  |  block  | rest |  block  | rest |      the ring, and the buffer for reads, fill while the rest computes
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from graphrun.errors import PlanError
from graphrun.model.plan import Plan
from graphrun.model.problem import ComponentNumbers, PhaseNumbers, Problem, Use, ValueNumbers, Variant

COPIES = 2  # blocks that a ring has room for, and the buffer for reads of a backing store on disk: `Variant.host_bytes`


def overlap_seconds(order: Sequence[tuple[int, int, float]], variant: Variant) -> list[float]:
    """Seconds per class of one call that computes in ``order`` (`Use.order`), in which copies of the class can hide.

    While the rest (class 0) computes between two blocks, the ring fills for the block that follows: that hides two copies at most,
    and of a backing store on disk four reads, two of them into the buffer. What is longer hides nothing and stays with the rest. The stretch
    behind the last block joins the one before the next call's first.
    """
    found = [0.0] * len(variant.block_bytes)
    blocks = [number for number, (k, _, _) in enumerate(order) if k]
    if not blocks:
        found[0] = sum(seconds for _, _, seconds in order)
        return found
    reads = variant.disk_seconds if variant.backing_store == "disk" and variant.disk_seconds else (0.0,) * len(found)
    waiting = sum(seconds for _, _, seconds in order[blocks[-1] + 1 :])
    for k, _, seconds in order[: blocks[-1] + 1]:
        if k:
            hidden = min(waiting, COPIES * max(variant.load_seconds[k], 2 * reads[k]))
            found[k] += seconds + hidden
            found[0] += waiting - hidden
            waiting = 0.0
        else:
            waiting += seconds
    return found


def read_from_disk(use: Use, variant: Variant, counts: Sequence[int]) -> Use:
    """``use`` with the seconds in which reads can hide too, where ``variant`` is read from disk and the order of compute is known.

    ``counts``: blocks per class.
    """
    if variant.backing_store != "disk" or not use.order:
        return use
    shares = zip(overlap_seconds(use.order, variant), counts, use.group_calls, strict=True)
    seconds = tuple(use.calls * total / (count * max(1, calls)) for total, count, calls in shares)
    return replace(use, seconds=seconds)


def stages_of(problem: Problem) -> tuple[str, ...]:
    """The stages of ``problem`` in the order of its phases."""
    return tuple(dict.fromkeys(phase.stage for phase in problem.phases))


def reorder(problem: Problem, order: Sequence[str] = (), options: Mapping[str, str] | None = None) -> Problem:
    """``problem`` with its stages in ``order`` (empty: as they are), run by ``options`` (stage -> name), and no such choice left.

    Values live from behind their producer to their last consumer in that order. Raises PlanError for an unknown option, for an
    option that needs what is not allowed, and for an order that is not one of these stages or breaks their precedence.
    """
    order, options = tuple(order) or stages_of(problem), dict(options or {})
    _require_order(problem, order)
    phases = {stage: tuple(phase for phase in problem.phases if phase.stage == stage) for stage in order}
    for stage, name in options.items():
        phases[stage] = _option(problem, stage, name)
    reordered = tuple(phase for stage in order for phase in phases[stage])
    values = tuple(living(value, order, reordered) for value in problem.values)
    return replace(problem, phases=reordered, values=values, precedence=None, options=())


def apply_choices(problem: Problem, plan: Plan) -> Problem:
    """``problem`` as ``plan`` chose: arranged, one variant to a component, the phases' seconds and bytes as with that variant.

    Raises PlanError where the plan chooses what the problem does not have, or does not allow.
    """
    reordered = reorder(problem, plan.order, dict(plan.options))
    names = dict(plan.variants)
    if unknown := sorted(set(names) - {component.name for component in problem.components}):
        raise PlanError(f"variant: the problem has no component {', '.join(unknown)}")
    chosen = {component.name: _variant(problem, component, names.get(component.name)) for component in problem.components}
    components = tuple(
        replace(component, variants=(replace(chosen[component.name], slowdown=1.0, block_seconds=(), scratch_bytes=0, needs=""),))
        for component in reordered.components
    )
    phases = tuple(_with_variants(reordered, phase, chosen) for phase in reordered.phases)
    return replace(reordered, components=components, phases=phases)


def use_with(use: Use, component: ComponentNumbers, variant: Variant) -> Use:
    """``use`` of ``component`` with seconds as ``variant`` computes: slowed down, with its block_seconds once a block and call, and
    shared among classes as its reads from disk can hide."""
    use = read_from_disk(use, variant, [len(of.blocks) for of in component.groups])
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


def activation_bytes(phase_bytes: int, variants: Iterable[Variant], glue_bytes: int = 0) -> int:
    """What a phase that takes ``phase_bytes`` of activation takes with ``variants``, one for each component it uses.

    Where all of them compute on the CPU what is handed out of them, at most; else the phase's bytes and the largest scratch.
    """
    found = list(variants)
    if found and all(variant.device == "cpu" for variant in found):
        return min(phase_bytes, glue_bytes)
    return phase_bytes + max((variant.scratch_bytes for variant in found), default=0)


def _with_variants(problem: Problem, phase: PhaseNumbers, chosen: Mapping[str, Variant]) -> PhaseNumbers:
    variants = [chosen[use.component] for use in phase.uses]
    return replace(
        phase,
        uses=tuple(use_with(use, problem.component(use.component), chosen[use.component]) for use in phase.uses),
        first_bytes=activation_bytes(phase.first_bytes, variants, phase.glue_bytes),
        steady_bytes=activation_bytes(phase.steady_bytes, variants, phase.glue_bytes),
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
