"""Applies a plan's choices (variants, stage options, order of stages) to a problem. Pure functions;
the solver makes the choices.

    problem + order + options -> reorder       -> final phases and values; every component still has
    all its variants
            + variants        -> apply_choices -> one variant per component; its slowdown and
            scratch are in the phases' numbers

Executor, simulator and `check` work on the problem with choices applied, in which ``variants[0]``
is the chosen variant.

Also computes with how much compute the copies of each block group can overlap (`overlap_seconds`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from graphrun.errors import PlanError
from graphrun.model.plan import Plan
from graphrun.model.problem import (
    ComponentNumbers,
    PhaseNumbers,
    Problem,
    Use,
    ValueNumbers,
    Variant,
)
from graphrun.model.splits import arguments_bytes, with_splits

# Blocks for which a ring buffer has room, and likewise the bounce buffer of a backing store on disk
# (`Variant.host_bytes`).
BUFFERED_BLOCKS = 2


def with_each_variant(problem: Problem, change: Callable[[Variant], Variant]) -> Problem:
    """``problem`` with ``change`` applied to every variant of its components, and of their
    layers."""

    def changed(component: ComponentNumbers) -> ComponentNumbers:
        layers = component.layers and changed(component.layers)
        return replace(component, variants=tuple(map(change, component.variants)), layers=layers)

    return replace(problem, components=tuple(map(changed, problem.components)))


def overlap_seconds(order: Sequence[tuple[int, int, float]], variant: Variant) -> list[float]:
    """Compute seconds per block group with which copies of that group can overlap, in one call that
    computes in ``order``.

    ``order`` is `Use.order`: (group, block, seconds) in call order; group 0 is the remainder. A
    block's copy overlaps with the compute of its group, and with the remainder's compute directly
    before the block:

        remainder |  block  |  block  | remainder |  block  | remainder |      while the remainder
        computes, the ring buffer is filled

    Of the latter only as much counts as two copies take, since the ring buffer has room for two
    blocks; with a backing store on disk as much as four reads take, two of them into the bounce
    buffer. Any excess stays with group 0. The remainder's compute after the last block is added to
    that before the next call's first block.
    """
    found = [0.0] * len(variant.block_bytes)
    blocks = [number for number, (k, _, _) in enumerate(order) if k]
    if not blocks:
        found[0] = sum(seconds for _, _, seconds in order)
        return found
    reads = (
        variant.disk_seconds
        if variant.backing_store == "disk" and variant.disk_seconds
        else (0.0,) * len(found)
    )
    between = sum(seconds for _, _, seconds in order[blocks[-1] + 1 :])
    for k, _, seconds in order[: blocks[-1] + 1]:
        if k:
            overlapped = min(between, BUFFERED_BLOCKS * max(variant.load_seconds[k], 2 * reads[k]))
            found[k] += seconds + overlapped
            found[0] += between - overlapped
            between = 0.0
        else:
            between += seconds
    return found


def read_from_disk(use: Use, variant: Variant, counts: Sequence[int]) -> Use:
    """``use`` with `seconds` divided among groups by `overlap_seconds`, which counts reads from
    disk.

    Unchanged if the backing store of ``variant`` is not on disk, or the order of compute is
    unknown. ``counts``: blocks per group.
    """
    if variant.backing_store != "disk" or not use.order:
        return use
    shares = zip(overlap_seconds(use.order, variant), counts, use.group_calls, strict=True)
    seconds = tuple(use.calls * total / (count * max(1, calls)) for total, count, calls in shares)
    return replace(use, seconds=seconds)


def stages_of(problem: Problem) -> tuple[str, ...]:
    """The stages of ``problem`` in the order of its phases."""
    return tuple(dict.fromkeys(phase.stage for phase in problem.phases))


def reorder(
    problem: Problem, order: Sequence[str] = (), options: Mapping[str, str] | None = None
) -> Problem:
    """``problem`` with its stages in ``order`` (empty: unchanged) and run with ``options`` (stage
    -> option name).

    The result has no choice of order or option left. A value is live from the phase after its
    producer to its last consumer in that order. Raises PlanError for an unknown option, for an
    option that needs a permission which is not in `Problem.allow`, and for an order that is not a
    permutation of the stages or violates their precedence.
    """
    order, options = tuple(order) or stages_of(problem), dict(options or {})
    _require_order(problem, order)
    phases = {
        stage: tuple(phase for phase in problem.phases if phase.stage == stage) for stage in order
    }
    for stage, name in options.items():
        phases[stage] = _option(problem, stage, name)
    reordered = tuple(phase for stage in order for phase in phases[stage])
    values = tuple(with_live_range(value, order, reordered) for value in problem.values)
    return replace(problem, phases=reordered, values=values, precedence=None, options=())


def apply_choices(problem: Problem, plan: Plan) -> Problem:
    """``problem`` with all choices of ``plan``: reordered, one variant per component, its seconds
    and bytes in the phases.

    Raises PlanError if the plan chooses something that the problem does not have or does not allow.
    """
    reordered = with_splits(reorder(problem, plan.order, dict(plan.options)), plan.splits)
    names = dict(plan.variants)
    if unknown := sorted(set(names) - {component.name for component in problem.components}):
        raise PlanError(f"variant: the problem has no component {', '.join(unknown)}")
    chosen = {
        component.name: _variant(reordered, component, names.get(component.name))
        for component in reordered.components
    }
    components = tuple(
        replace(
            component,
            variants=(
                replace(
                    chosen[component.name],
                    slowdown=1.0,
                    block_seconds=(),
                    scratch_bytes=0,
                    needs="",
                ),
            ),
        )
        for component in reordered.components
    )
    phases = tuple(_with_variants(reordered, phase, chosen) for phase in reordered.phases)
    return replace(reordered, components=components, phases=phases)


def use_with(use: Use, component: ComponentNumbers, variant: Variant) -> Use:
    """``use`` of ``component`` with the compute seconds of ``variant``.

    They are multiplied by `slowdown`, increased by `block_seconds` once per block and call (which
    may be negative; the sum is not), and divided among groups as `read_from_disk` says.
    """
    use = read_from_disk(use, variant, [len(of.blocks) for of in component.groups])
    extra = variant.block_seconds or (0.0,) * len(use.seconds)
    if variant.slowdown == 1.0 and not any(extra):
        return use
    seconds = tuple(
        max(0.0, variant.slowdown * each + more)
        for each, more in zip(use.seconds, extra, strict=True)
    )
    order, seen = [], set[tuple[int, int]]()
    for k, i, each in use.order:
        order.append(
            (k, i, max(0.0, variant.slowdown * each + (0.0 if (k, i) in seen else extra[k])))
        )
        seen.add((k, i))
    return replace(use, seconds=seconds, order=tuple(order))


def activation_bytes(
    phase_bytes: int, variants: Iterable[Variant], pipeline_code_bytes: int = 0
) -> int:
    """Device bytes of activation of a phase that runs with ``variants``, one per component it uses.

    ``phase_bytes``: the phase's activation as traced. If all variants compute on the CPU or on
    secondary devices: ``pipeline_code_bytes``, at most ``phase_bytes``. Otherwise: ``phase_bytes``
    plus the largest `scratch_bytes`.
    """
    found = list(variants)
    if found and all(variant.device != "device" for variant in found):
        return min(phase_bytes, pipeline_code_bytes)
    return phase_bytes + max((variant.scratch_bytes for variant in found), default=0)


def secondary_bytes(
    phase_bytes: int, pairs: Iterable[tuple[Use, ComponentNumbers]], secondary: int
) -> int:
    """Bytes beyond weights on ``secondary`` in a slot of a phase that runs ``pairs``, components
    with their variants chosen: 0 if none of them computes there, else the activation as traced,
    ``phase_bytes``, and the most that scratch and what crosses take."""
    own = [
        of.variants[0].scratch_bytes + to
        for use, of in pairs
        for n, to in arguments_bytes(use, of).items()
        if n == secondary
    ]
    return phase_bytes + max(own) if own else 0


def _with_variants(
    problem: Problem, phase: PhaseNumbers, chosen: Mapping[str, Variant]
) -> PhaseNumbers:
    variants = [chosen[use.component] for use in phase.uses]
    pairs = [
        (use, replace(problem.component(use.component), variants=(of,)))
        for use, of in zip(phase.uses, variants, strict=True)
    ]
    return replace(
        phase,
        uses=tuple(
            use_with(use, problem.component(use.component), chosen[use.component])
            for use in phase.uses
        ),
        first_bytes=activation_bytes(phase.first_bytes, variants, phase.pipeline_code_bytes),
        steady_bytes=activation_bytes(phase.steady_bytes, variants, phase.pipeline_code_bytes),
        secondary_bytes=tuple(
            (
                secondary_bytes(phase.first_bytes, pairs, number),
                secondary_bytes(phase.steady_bytes, pairs, number),
            )
            for number in range(1, len(problem.secondaries) + 1)
        ),
        trace=phase.trace.with_scratch(
            {name: variant.scratch_bytes for name, variant in chosen.items()}
        ),
    )


def _variant(problem: Problem, component: ComponentNumbers, name: str | None) -> Variant:
    usable = [component.variants[index] for index in problem.usable(component)]
    if name is None and len(component.variants) == 1:
        return component.variants[0]
    for variant in usable:
        if variant.name == name:
            return variant
    known = ", ".join(variant.name for variant in usable) or "none that is allowed"
    found = (
        f"{component.name} has no {name!r}"
        if name
        else f"the plan chooses none for {component.name}"
    )
    raise PlanError(f"variant: {found}; it has {known}")


def _option(problem: Problem, stage: str, name: str) -> tuple[PhaseNumbers, ...]:
    for option in problem.options:
        if (option.stage, option.name) == (stage, name):
            if option.needs and option.needs not in problem.allow:
                raise PlanError(
                    f"option: {name} of {stage} changes the output, and {option.needs} is not allowed"
                )
            return option.phases
    raise PlanError(f"option: the problem has no {name!r} for stage {stage!r}")


def _require_order(problem: Problem, order: tuple[str, ...]) -> None:
    stages = stages_of(problem)
    if order == stages:
        return
    if sorted(order) != sorted(stages) or problem.precedence is None:
        raise PlanError(
            f"order: the problem has the stages {' '.join(stages)}, the plan {' '.join(order)}"
        )
    position = {stage: number for number, stage in enumerate(order)}
    for earlier, later in problem.precedence:
        if position[earlier] > position[later]:
            raise PlanError(f"order: {later} depends on {earlier}, so it must come after it")


def with_live_range(
    value: ValueNumbers, order: Sequence[str], phases: Sequence[PhaseNumbers]
) -> ValueNumbers:
    """``value`` with its first and last live phase for stages in ``order``; unchanged if no later
    stage consumes it."""
    position = {stage: number for number, stage in enumerate(order)}
    last = max((position[stage] for stage in value.consumers if stage in position), default=-1)
    begin = position.get(value.producer, -1)
    live = [number for number, phase in enumerate(phases) if begin < position[phase.stage] <= last]
    return replace(value, first_phase=live[0], last_phase=live[-1]) if live else value
