"""Apply a plan's choices (variants, stage options, order of stages) to a problem.

    problem + order + options -> reorder       -> final phases and values; every component still has
                                                  all its variants
            + variants        -> apply_choices -> one variant per component; its slowdown and
                                                  scratch are in the numbers of the phases

Executor, simulator and `check` use the problem with choices applied, in which ``variants[0]`` is
the chosen variant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from graphrun.errors import PlanError
from graphrun.model.copies import copied_name, with_copies
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

# Blocks with room in a ring buffer, and in the bounce buffer of a backing store on disk
# (`Variant.host_bytes`).
BUFFERED_BLOCKS = 2


def with_each_variant(problem: Problem, change: Callable[[Variant], Variant]) -> Problem:
    """Return ``problem`` with ``change`` applied to every variant, of layers too."""

    def changed(component: ComponentNumbers) -> ComponentNumbers:
        layers = component.layers and changed(component.layers)
        return replace(component, variants=tuple(map(change, component.variants)), layers=layers)

    return replace(problem, components=tuple(map(changed, problem.components)))


def overlap_seconds(order: Sequence[tuple[int, int, float]], variant: Variant) -> list[float]:
    """Return per block group the compute seconds of one call that copies of the group can overlap.

    ``order``: as `Use.order`, where group 0 is the unblocked weights. The copy of a block overlaps
    the compute of its group, and the unblocked compute directly before the block, during which the
    ring buffer is filled:

        unblocked |  block  |  block  | unblocked |  block  | unblocked |

    Of the unblocked compute at most the seconds of two copies count, since the ring buffer has room
    for two blocks. With a backing store on disk at most the seconds of four reads count, two of
    them into the bounce buffer. Any excess stays with group 0. Unblocked compute after the last
    block counts before the next call's first block.
    """
    group_seconds = [0.0] * len(variant.block_bytes)
    blocks = [number for number, (k, _, _) in enumerate(order) if k]
    if not blocks:
        group_seconds[0] = sum(seconds for _, _, seconds in order)
        return group_seconds
    reads = (
        variant.disk_seconds
        if variant.backing_store == "disk" and variant.disk_seconds
        else (0.0,) * len(group_seconds)
    )
    gap_seconds = sum(seconds for _, _, seconds in order[blocks[-1] + 1 :])
    for k, _, seconds in order[: blocks[-1] + 1]:
        if k:
            overlapped = min(
                gap_seconds, BUFFERED_BLOCKS * max(variant.load_seconds[k], 2 * reads[k])
            )
            group_seconds[k] += seconds + overlapped
            group_seconds[0] += gap_seconds - overlapped
            gap_seconds = 0.0
        else:
            gap_seconds += seconds
    return group_seconds


def read_from_disk(use: Use, variant: Variant, counts: Sequence[int]) -> Use:
    """Return ``use`` with its `seconds` divided among groups by `overlap_seconds`, for disk reads.

    Unchanged if the backing store of ``variant`` is not on disk, or the order of compute is
    unknown. ``counts``: blocks per group.
    """
    if variant.backing_store != "disk" or not use.order:
        return use
    shares = zip(overlap_seconds(use.order, variant), counts, use.group_calls, strict=True)
    seconds = tuple(use.calls * total / (count * max(1, calls)) for total, count, calls in shares)
    return replace(use, seconds=seconds)


def stages_of(problem: Problem) -> tuple[str, ...]:
    """Return the stages of ``problem`` in the order of its phases."""
    return tuple(dict.fromkeys(phase.stage for phase in problem.phases))


def reorder(
    problem: Problem, order: Sequence[str] = (), options: Mapping[str, str] | None = None
) -> Problem:
    """Return ``problem`` with stages in ``order``, run with ``options`` (stage -> name).

    The result has no choice of order or option left. A value is live from the phase after its
    producer to its last consumer in that order. Raises PlanError for an unknown or forbidden
    option, and for an order that is no permutation of the stages or violates their precedence.
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


def with_variants_of(problem: Problem, plan: Plan) -> Problem:
    """Return ``problem`` with only the variants of ``plan``, on any device, which then need no
    permission. Components without a choice in ``plan`` stay as they are."""
    names = dict(plan.variants)
    components = tuple(
        component.stored_as(names[component.name], anywhere=True)
        if component.name in names
        else component
        for component in problem.components
    )
    return replace(problem, components=components)


def apply_choices(problem: Problem, plan: Plan) -> Problem:
    """Return ``problem`` reordered, with one variant per component and its numbers in the phases.

    Raises PlanError if a choice does not exist in the problem or is not allowed.
    """
    reordered = with_splits(reorder(problem, plan.order, dict(plan.options)), plan.splits)
    reordered = with_copies(reordered, plan.copies)
    names = dict(plan.variants)
    if unknown := sorted(set(names) - {component.name for component in problem.components}):
        raise PlanError(f"variant: the problem has no component {', '.join(unknown)}")
    variants_by_name = dict[str, Variant]()
    for component in reordered.components:
        name = names.get(component.name)
        if component.copy_of and name is None:  # the plan names the variant of the original
            name = copied_name(component, variants_by_name[component.copy_of])
        variants_by_name[component.name] = _variant(reordered, component, name)
    components = tuple(
        replace(
            component,
            variants=(
                replace(
                    variants_by_name[component.name],
                    slowdown=1.0,
                    block_seconds=(),
                    scratch_bytes=0,
                    needs="",
                ),
            ),
        )
        for component in reordered.components
    )
    phases = tuple(_with_variants(reordered, phase, variants_by_name) for phase in reordered.phases)
    return replace(reordered, components=components, phases=phases)


def use_with(use: Use, component: ComponentNumbers, variant: Variant) -> Use:
    """Return ``use`` of ``component`` with the compute seconds of ``variant``.

    The seconds are divided among groups by `read_from_disk`, multiplied by `slowdown`, and
    increased by `block_seconds` once per block and call; at least 0, since `block_seconds` may be
    negative.
    """
    use = read_from_disk(use, variant, [len(group.blocks) for group in component.groups])
    extra = variant.block_seconds or (0.0,) * len(use.seconds)
    if variant.slowdown == 1.0 and not any(extra):
        return use
    seconds = tuple(
        max(0.0, variant.slowdown * block_seconds + extra_seconds)
        for block_seconds, extra_seconds in zip(use.seconds, extra, strict=True)
    )
    order, seen_blocks = [], set[tuple[int, int]]()
    for k, i, block_seconds in use.order:
        order.append(
            (
                k,
                i,
                max(
                    0.0,
                    variant.slowdown * block_seconds + (0.0 if (k, i) in seen_blocks else extra[k]),
                ),
            )
        )
        seen_blocks.add((k, i))
    return replace(use, seconds=seconds, order=tuple(order))


def activation_bytes(
    phase_bytes: int, variants: Iterable[Variant], pipeline_code_bytes: int = 0
) -> int:
    """Return the activation bytes on the device of a phase with ``variants``, one per component.

    ``phase_bytes``, the traced activation, plus the largest `scratch_bytes`. If nothing computes on
    the main device: ``pipeline_code_bytes``, at most ``phase_bytes``.
    """
    variant_list = list(variants)
    if variant_list and all(variant.device != "device" for variant in variant_list):
        return min(phase_bytes, pipeline_code_bytes)
    return phase_bytes + max((variant.scratch_bytes for variant in variant_list), default=0)


def secondary_bytes(
    phase_bytes: int, pairs: Iterable[tuple[Use, ComponentNumbers]], secondary: int
) -> int:
    """Return the bytes beyond weights on ``secondary`` in a slot; 0 without compute there.

    ``pairs``: the phase's uses and components, with variants chosen. The traced activation
    ``phase_bytes``, plus the largest sum of scratch and transferred tensors of a component.
    """
    totals = [
        component.variants[0].scratch_bytes + nbytes
        for use, component in pairs
        for n, nbytes in arguments_bytes(use, component).items()
        if n == secondary
    ]
    return phase_bytes + max(totals) if totals else 0


def _with_variants(
    problem: Problem, phase: PhaseNumbers, variants_by_name: Mapping[str, Variant]
) -> PhaseNumbers:
    variants = [variants_by_name[use.component] for use in phase.uses]
    pairs = [
        (use, replace(problem.component(use.component), variants=(variant,)))
        for use, variant in zip(phase.uses, variants, strict=True)
    ]
    return replace(
        phase,
        uses=tuple(
            use_with(use, problem.component(use.component), variants_by_name[use.component])
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
            {name: variant.scratch_bytes for name, variant in variants_by_name.items()}
        ),
    )


def _variant(problem: Problem, component: ComponentNumbers, name: str | None) -> Variant:
    usable = [component.variants[index] for index in problem.usable(component)]
    if name is None and len(component.variants) == 1:
        return component.variants[0]
    for variant in usable:
        if variant.name == name:
            return variant
    names = ", ".join(variant.name for variant in usable) or "none that is allowed"
    reason = (
        f"{component.name} has no {name!r}"
        if name
        else f"the plan chooses none for {component.name}"
    )
    raise PlanError(f"variant: {reason}; it has {names}")


def _option(problem: Problem, stage: str, name: str) -> tuple[PhaseNumbers, ...]:
    for option in problem.options:
        if (option.stage, option.name) == (stage, name):
            if option.needs and option.needs not in problem.allow:
                raise PlanError(
                    f"option: {name} of {stage} changes the output, and {option.needs} is not"
                    " allowed"
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
    for first, second in problem.precedence:
        if position[first] > position[second]:
            raise PlanError(f"order: {second} depends on {first}, so it must come after it")


def with_live_range(
    value: ValueNumbers, order: Sequence[str], phases: Sequence[PhaseNumbers]
) -> ValueNumbers:
    """Return ``value`` with its live phases for ``order``; unchanged without a consumer."""
    position = {stage: number for number, stage in enumerate(order)}
    last = max((position[stage] for stage in value.consumers if stage in position), default=-1)
    begin = position.get(value.producer, -1)
    live = [number for number, phase in enumerate(phases) if begin < position[phase.stage] <= last]
    return replace(value, first_phase=live[0], last_phase=live[-1]) if live else value
