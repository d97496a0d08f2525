"""Programs of problems: variant choices, block groups, intervals and spill gaps."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from graphrun.model.choices import secondary_bytes as bytes_on_secondary
from graphrun.model.choices import use_with
from graphrun.model.least_memory import streamable_groups, used_components
from graphrun.model.plan import SlotPart
from graphrun.model.problem import ALLOCATION_BYTES, ComponentNumbers, Problem, Use
from graphrun.model.splits import (
    block_seconds,
    secondaries_for,
    slowdown_of,
    transfer_seconds,
    twin,
)
from graphrun.solve.program import Group, Interval, Program, SpillGap, VariantChoice
from graphrun.units import round_up


def program_of(
    problem: Problem, variants: Sequence[Sequence[int]] | None = None, *, split: bool = False
) -> Program:
    """Return the program of ``problem``, whose stage order and options are already applied.

    ``variants``: per component, indices of the variants to choose from; None: all usable.
    ``split``: blocks may be on a secondary device (`Group.mirror`), which only
    `graphrun.solve.columns` supports.
    """
    return _program(problem, None if variants is None else tuple(map(tuple, variants)), split)


@functools.lru_cache(maxsize=64)
def _program(
    problem: Problem, variants: tuple[tuple[int, ...], ...] | None, split: bool
) -> Program:
    components = used_components(problem)
    variant_choices: list[VariantChoice] = []
    for number, component in enumerate(problem.components):
        for index in variants[number] if variants is not None else usable(problem, number):
            variant = component.variants[index]
            pairs = zip(component.groups, variant.read_seconds, strict=False)
            read_seconds = (
                sum(len(group.blocks) * seconds for group, seconds in pairs)
                if variant.read_seconds
                else None
            )
            variant_choices.append(
                VariantChoice(number, index, variant, read_seconds, component in components)
            )
    groups = tuple(
        group
        for number, variant_choice in enumerate(variant_choices)
        for group in _groups(problem, number, variant_choice)
    )
    groups += tuple(_mirrors(problem, variant_choices, groups)) if split else ()
    # runs that the first and the further run stand for
    run_weights = (1.0, float(problem.runs - 1))[: min(2, problem.runs)]
    intervals = tuple(
        interval
        for weight in run_weights
        for number in range(len(problem.phases))
        for interval in _intervals(problem, variant_choices, groups, number, weight)
    )
    run_length = len(intervals) // len(run_weights)
    load_slots = {
        interval.phase: t
        for t, interval in enumerate(intervals[:run_length])
        if interval.part == "load"
    }
    return Program(
        problem,
        tuple(variant_choices),
        groups,
        intervals,
        spill_gaps_of(problem, load_slots, run_length, len(intervals)),
        run_length,
    )


def usable(problem: Problem, number: int) -> tuple[int, ...]:
    """Return the indices of the variants of component ``number`` that may be chosen.

    A variant on the CPU has no blocks on the device, so it violates `keep` and `whole`. It needs
    its weights in RAM.
    """
    component = problem.components[number]
    resident = problem.demanded(component.name) & {"keep", "whole"}
    variants = component.variants
    return tuple(
        n
        for n in problem.usable(component)
        if variants[n].device != "cpu" or (variants[n].backing_store != "disk" and not resident)
    )


def _groups(problem: Problem, number: int, variant_choice: VariantChoice) -> Iterator[Group]:
    component, variant = problem.components[variant_choice.component], variant_choice.variant
    demanded, by_layer = problem.demanded(component.name), component.granularity == "layers"
    for index, streamable in enumerate(
        streamable_groups(component, variant_choice.index) if variant_choice.computes else ()
    ):
        block_group, nbytes = component.groups[index], variant.block_bytes[index]
        yield Group(
            variant_choice=number,
            component=variant_choice.component,
            index=index,
            count=len(block_group.blocks),
            block_bytes=nbytes,
            held_bytes=round_up(nbytes, ALLOCATION_BYTES),
            load_seconds=variant.load_seconds[index],
            disk_seconds=variant.disk_seconds[index]
            if variant.backing_store == "disk" and variant.disk_seconds
            else 0.0,
            lost_seconds=variant.lost_seconds[index] if variant.lost_seconds else 0.0,
            streamable=streamable,
            movable=variant.movable,
            demanded=demanded,
            # Block groups run one after another, so each is its own overlap set. Calls of layers in
            # one child module alternate.
            overlap_key=block_group.blocks[0].split(".")[0] if by_layer else f"{index}",
            by_layer=by_layer,
            excluded=block_group.streamable and "exclude" in demanded,
            secondary=variant.secondary or block_group.secondary,
        )


def _mirrors(
    problem: Problem, variant_choices: Sequence[VariantChoice], groups: Sequence[Group]
) -> Iterator[Group]:
    """Yield a mirror group of each group for every device its component may be split over."""
    for j, group in enumerate(groups):
        component, variant_choice = (
            problem.components[group.component],
            variant_choices[group.variant_choice],
        )
        for secondary in (
            secondaries_for(problem, component)
            if variant_choice.is_used and not component.groups[group.index].is_unblocked
            else ()
        ):
            # the same variant on the secondary device
            if (
                secondary_variant := twin(component, variant_choice.variant, secondary)
            ) is not None:
                load = secondary_variant.load_seconds[group.index]
                yield replace(
                    group,
                    load_seconds=load,
                    disk_seconds=0.0,
                    lost_seconds=0.0,
                    streamable=False,
                    secondary=secondary,
                    mirror=j,
                )


def _intervals(
    problem: Problem,
    variant_choices: Sequence[VariantChoice],
    groups: Sequence[Group],
    number: int,
    weight: float,
) -> Iterator[Interval]:
    """Yield the intervals of phase ``number``.

    load if the phase uses components; first; steady if the phase has further calls.
    """
    phase = problem.phases[number]
    uses_by_name = {use.component: use for use in phase.uses}
    components = [
        problem.components[variant_choice.component] for variant_choice in variant_choices
    ]
    # per variant choice, the phase's use with the seconds of the variant
    uses = [
        use_with(uses_by_name[component.name], component, variant_choice.variant)
        if component.name in uses_by_name
        else None
        for component, variant_choice in zip(components, variant_choices, strict=True)
    ]
    seconds_by_choice = [
        block_seconds(use, component) if use else []
        for use, component in zip(uses, components, strict=True)
    ]
    pairs = [(uses[group.variant_choice], group.index) for group in groups]
    parts: tuple[tuple[SlotPart, int], ...] = (
        ("load", 0),
        ("first", 1),
        ("steady", phase.steady_calls),
    )
    for part, rounds in parts:
        if not rounds and (part != "load" or not phase.uses):
            continue
        calls = tuple(use.group_calls_in(part)[k] if use else 0 for use, k in pairs)
        activation = phase.activation_bytes(part)
        off_device = [
            _off_device(
                problem, part, activation, use, replace(component, variants=(choice.variant,))
            )
            if use is not None
            else (0.0, 0.0, (0,) * len(problem.secondaries))
            for use, component, choice in zip(uses, components, variant_choices, strict=True)
        ]
        yield Interval(
            phase=number,
            part=part,
            rounds=rounds,
            weight=weight,
            fixed_bytes=problem.value_bytes(number) + phase.input_bytes,
            activation_bytes=activation,
            pipeline_code_bytes=min(activation, phase.pipeline_code_bytes),
            calls=calls,
            seconds=tuple(
                _seconds(problem, group, variant_choices, use, uses_by_name) if use else 0.0
                for group, (use, _) in zip(groups, pairs, strict=True)
            ),
            passes=tuple(use.passes_of(k) if use else 1 for use, k in pairs),
            computing_components=frozenset(
                group.component for group, n in zip(groups, calls, strict=True) if n
            ),
            phase_components=frozenset(
                c
                for c, component in enumerate(problem.components)
                if component.name in uses_by_name and part != "load"
            ),
            off_device_seconds=tuple(seconds for seconds, _, _ in off_device),
            beside_seconds=tuple(seconds for _, seconds, _ in off_device),
            secondary_bytes=tuple(nbytes for _, _, nbytes in off_device),
            movable_seconds=tuple(
                seconds_by_choice[group.variant_choice][group.index]
                if use and group.mirror < 0
                else 0.0
                for group, (use, _) in zip(groups, pairs, strict=True)
            ),
        )


def _off_device(
    problem: Problem, part: SlotPart, activation: int, use: Use, component: ComponentNumbers
) -> tuple[float, float, tuple[int, ...]]:
    """Return the seconds of ``use`` in ``part`` off the main device, and its bytes there by device.

    ``component`` has one variant. Seconds: compute on the CPU or a secondary device, and transfers;
    first those in which the main device waits, then those of a copy.
    """
    variant = component.variants[0]
    seconds = sum(
        len(group.blocks) * calls * seconds_per_block
        for group, calls, seconds_per_block in zip(
            component.groups, use.group_calls_in(part), use.seconds, strict=True
        )
        if variant.device != "device" or group.secondary
    )
    if part == "load":
        return seconds, 0.0, (0,) * len(problem.secondaries)
    transfers = use.calls_in(part) * sum(transfer_seconds(problem, use, component).values())
    total, nbytes = (
        seconds + transfers,
        tuple(
            bytes_on_secondary(activation, [(use, component)], number)
            for number in range(1, len(problem.secondaries) + 1)
        ),
    )
    return (transfers, total, nbytes) if component.copy_of else (total, 0.0, nbytes)


def _seconds(
    problem: Problem,
    group: Group,
    variant_choices: Sequence[VariantChoice],
    use: Use,
    uses_by_name: Mapping[str, Use],
) -> float:
    """Return the seconds of one block in one call; 0 if `Interval.off_device_seconds` counts them.

    ``use`` includes the seconds of the variant, ``uses_by_name`` does not.
    """
    if group.mirror < 0:
        return 0.0 if group.secondary else use.seconds[group.index]
    component, main_variant = (
        problem.components[group.component],
        variant_choices[group.variant_choice].variant,
    )
    secondary_variant, k = twin(component, main_variant, group.secondary), group.index
    variant_seconds = (
        secondary_variant.block_seconds[k]
        if secondary_variant is not None and secondary_variant.block_seconds
        else 0.0
    )
    seconds = block_seconds(uses_by_name[component.name], component)[k]
    return max(
        0.0,
        main_variant.slowdown * seconds * slowdown_of(component, group.secondary) + variant_seconds,
    )


def spill_gaps_of(
    problem: Problem, load_slots: Mapping[int, int], run_length: int, count: int
) -> tuple[SpillGap, ...]:
    """Return the spill gaps of all values in each run.

    The first phase of a gap and the phase after it must have load slots. ``load_slots``: phase
    index -> its load slot in the first run. ``count``: intervals of the program, ``run_length`` per
    run.
    """
    gaps = []
    for number, value in enumerate(problem.values):
        if not value.nbytes or problem.hardware.unified:  # no second memory to spill to
            continue
        start = None  # first phase of the gap that ``phase`` is in
        for phase in range(value.first_phase, min(value.last_phase + 1, len(problem.phases))):
            if problem.phases[phase].stage not in (*value.consumers, value.producer):
                start = phase if start is None else start
                continue
            if start is not None and start in load_slots and phase in load_slots:
                gaps.append((number, value, load_slots[start], load_slots[phase]))
            start = None
    hardware = problem.hardware
    return tuple(
        SpillGap(
            number,
            value.nbytes,
            run_start + spill_slot,
            run_start + restore_slot,
            value.copy_seconds(hardware, to_host=True),
            value.copy_seconds(hardware, to_host=False),
        )
        for run_start in range(0, count, max(run_length, 1))
        for number, value, spill_slot, restore_slot in gaps
    )


def with_variants(program: Program, variants: Sequence[int]) -> Program:
    """Return the program with one variant per component, given by index."""
    return program_of(program.problem, tuple((variant,) for variant in variants)).single_run(
        program.only_run
    )


def on_first_device(program: Program) -> Program | None:
    """Return the program without variants on secondary devices.

    None if a component has variants on secondary devices only.
    """
    first_device = [
        [n for n in numbers if not program.variant_choices[n].variant.secondary]
        for numbers in program.choices_of
    ]
    return (
        program_of(
            program.problem,
            [[program.variant_choices[n].index for n in numbers] for numbers in first_device],
        )
        if all(first_device)
        else None
    )
