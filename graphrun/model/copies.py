"""A copy of a component on a secondary device, which makes every other call.

Guidance calls a denoiser twice a step. Neither call needs the result of the other, so both may run
at once:

    step             | 1                  | 2                  |
    device1 (copy)   |>#### first ####    |>#### first ####    |     > arguments to device1
    device           | #### second ####  <| #### second ####  <|     < prediction to the device

The copy of ``transformer`` on the first secondary device is the component ``transformer@1``. It has
the variant of its original and is copied from the backing store of its original, so it takes no
further RAM. All of it is resident there while it computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from graphrun.errors import PlanError
from graphrun.model.phase_trace import CALL, CallTrace, Item, PhaseTrace
from graphrun.model.problem import ComponentNumbers, PhaseNumbers, Problem, Use, Variant
from graphrun.model.splits import twin

ComponentCopies = Sequence[tuple[str, int]]
"""(component, number of the secondary device with its copy)"""


def with_copies(problem: Problem, copies: ComponentCopies) -> Problem:
    """Return ``problem`` with a component for each of ``copies``. Raises PlanError."""
    for number, (name, secondary) in enumerate(copies):
        if name in {other for other, _ in copies[:number]}:
            raise PlanError(f"copy: {name} is copied twice")
        if secondary not in copyable_to(problem, name):
            raise PlanError(f"copy: {name} cannot be copied to device{secondary}")
        problem = _with_copy(problem, name, secondary)
    return problem


def copyable_to(problem: Problem, name: str) -> tuple[int, ...]:
    """Return the numbers of the secondary devices that may have a copy of the component ``name``.

    Its calls come in pairs (`Use.pairs`) in some phase, and it is not split.
    """
    component = next((c for c in problem.components if c.name == name), None)
    if component is None or component.granularity == "layers" or component.copy_of:
        return ()
    if any(group.secondary for group in component.groups):
        return ()
    if not any(use.pairs for use in _uses(problem, name)):
        return ()
    return tuple(
        number
        for number in range(1, len(problem.secondaries) + 1)
        if any(_pairs(component, number))
    )


def least_copy_bytes(problem: Problem, name: str, number: int) -> int:
    """Return the fewest bytes that a copy of the component ``name`` takes on a secondary device.

    Its weights in the smallest variant that is allowed, and the activation of a call.
    """
    copy_problem = with_copies(problem, [(name, number)])
    copy = next(component for component in copy_problem.components if component.copy_of == name)
    activation_bytes = [
        max(phase.first_bytes, phase.steady_bytes)
        for phase in copy_problem.phases
        if any(use.component == copy.name for use in phase.uses)
    ]
    return min(map(copy.weight_bytes, problem.usable(copy)), default=1 << 62) + max(
        activation_bytes, default=0
    )


def without_pairs(problem: Problem) -> Problem:
    """Return ``problem`` without copies to choose from."""

    def plain(phase: PhaseNumbers) -> PhaseNumbers:
        return replace(phase, uses=tuple(replace(use, pairs=()) for use in phase.uses))

    options = (
        replace(option, phases=tuple(map(plain, option.phases))) for option in problem.options
    )
    return replace(problem, phases=tuple(map(plain, problem.phases)), options=tuple(options))


def original_name(variant: Variant) -> str:
    """Return the name of the original's variant with the weights of a copy's ``variant``."""
    return f"{variant.name.rpartition(' ')[0]} device"


def copied_name(copy: ComponentNumbers, original: Variant) -> str:
    """Return the name of the variant of ``copy`` with the weights of ``original``."""
    weights = original.name.rpartition(" ")[0]
    return f"{weights} {copy.variants[0].device}"


def _uses(problem: Problem, name: str) -> Iterator[Use]:
    phases = (*problem.phases, *(phase for option in problem.options for phase in option.phases))
    return (use for phase in phases for use in phase.uses if use.component == name)


def _pairs(component: ComponentNumbers, secondary: int) -> Iterator[tuple[Variant, Variant]]:
    """Yield the variants on the main device that can be copied, each with the one of the copy."""
    for variant in component.variants:
        in_ram = variant.backing_store in ("pinned", "pageable")
        if in_ram and (twin_variant := twin(component, variant, secondary)) is not None:
            yield (
                variant,
                replace(
                    twin_variant,
                    host_bytes=0,
                    read_seconds=(),
                    transient_bytes=0,
                    stored_bytes=0,
                ),
            )


def _with_copy(problem: Problem, name: str, secondary: int) -> Problem:
    copy_name = f"{name}@{secondary}"

    def with_copied_calls(phase: PhaseNumbers) -> PhaseNumbers:
        use = next((use for use in phase.uses if use.component == name and use.pairs), None)
        plain_uses = tuple(
            replace(other, live_tensors=(), layers=None) if other.component == name else other
            for other in phase.uses
        )
        if use is None:
            return replace(phase, uses=plain_uses)
        # phases with pairs use one component (`graphrun.profile.pairs`)
        half = replace(
            use,
            calls=use.calls // 2,
            group_calls=tuple(calls // 2 for calls in use.group_calls),
            live_tensors=(),
            layers=None,
            pairs=(),
        )
        return replace(
            phase,
            uses=(
                replace(_scaled(half, use.pairs[0]), component=copy_name),
                _scaled(half, use.pairs[1]),
            ),
            first_bytes=max(phase.first_bytes, phase.steady_bytes),
            trace=_split_trace(phase.trace, copy_name),
        )

    components = list[ComponentNumbers]()
    for component in problem.components:
        if component.name != name:
            components.append(component)
            continue
        pairs = list(_pairs(component, secondary))
        original = replace(component, variants=tuple(pair[0] for pair in pairs), layers=None)
        components.append(original)
        components.append(
            replace(
                original, name=copy_name, variants=tuple(pair[1] for pair in pairs), copy_of=name
            )
        )
    return replace(
        problem,
        components=tuple(components),
        phases=tuple(map(with_copied_calls, problem.phases)),
        options=tuple(
            replace(option, phases=tuple(map(with_copied_calls, option.phases)))
            for option in problem.options
        ),
    )


def _scaled(use: Use, factor: float) -> Use:
    """Return ``use`` with ``factor`` times its seconds."""
    return replace(
        use,
        seconds=tuple(factor * seconds for seconds in use.seconds),
        order=tuple((k, i, factor * seconds) for k, i, seconds in use.order),
    )


def _split_trace(trace: PhaseTrace, copy_name: str) -> PhaseTrace:
    """Return ``trace`` with every other call, from the first on, made by ``copy_name``.

    The first part then has two calls.
    """
    calls = list[CallTrace](trace.calls)
    copied_indices = dict[int, int]()
    items, call_count, first_end = list[Item](), 0, 0
    for key, nbytes in (*trace.first, *trace.steady):
        if nbytes == CALL:
            if call_count == 2:
                first_end = len(items)
            if call_count % 2 == 0:
                if key not in copied_indices:
                    copied_indices[key] = len(calls)
                    calls.append(replace(trace.calls[key], component=copy_name))
                key = copied_indices[key]
            call_count += 1
        items.append((key, nbytes))
    first_end = first_end or len(items)
    return replace(
        trace, calls=tuple(calls), first=tuple(items[:first_end]), steady=tuple(items[first_end:])
    )
