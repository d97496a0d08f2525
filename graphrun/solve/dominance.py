"""Variants worth solving for, and the simplest of equally good variants. No optimum is lost.

dominated   Another variant is no worse in any number, or worse only in a budget that cannot be
            the limit. Removed before solving.
simplest    The earliest variant that does the same at no cost in seconds, bytes moved or
            memory. Chosen after solving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphrun.model.copies import original_name
from graphrun.model.least_memory import streamable_groups, used_components
from graphrun.model.problem import ComponentNumbers, Problem, Variant
from graphrun.solve.program import HOST_TIERS, Choice, Program
from graphrun.solve.programs import program_of, usable
from graphrun.solve.rows import excess_bytes, rows_of

# Relative tolerance: sums differ with the order of additions.
SAME_SECONDS = 1e-9


def undominated_variants(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Return per component the indices of the usable variants that none dominates."""
    program = program_of(problem)
    choices_by_component = [
        [program.variant_choices[n] for n in numbers if program.variant_choices[n].is_used]
        for numbers in program.choices_of
    ]
    stored_bytes = [
        max((variant_choice.variant.stored_bytes for variant_choice in variant_choices), default=0)
        for variant_choices in choices_by_component
    ]
    limits = (problem.ram_bytes, problem.pinned_bytes, problem.disk_bytes)
    # RAM, page-locked RAM and disk, in the order of ``limits``
    maxima = (*map(program.most_host_bytes, HOST_TIERS), sum(stored_bytes))
    can_limit = [
        limit is not None and nbytes > limit for nbytes, limit in zip(maxima, limits, strict=True)
    ]
    undominated = list[tuple[int, ...]]()
    for number, component in enumerate(problem.components):
        if component.copy_of:  # the variants of its original, which comes before it
            undominated.append(_like_original(problem, number, undominated))
            continue
        candidates = (
            list(usable(problem, number))
            if component in used_components(problem)
            else list(usable(problem, number)[:1])
        )
        for index in reversed(candidates.copy()):
            if any(
                _dominates(component, other, index, can_limit)
                for other in candidates
                if other != index
            ):
                candidates.remove(index)
        undominated.append(tuple(candidates))
    return tuple(undominated)


def _like_original(
    problem: Problem, number: int, undominated: Sequence[tuple[int, ...]]
) -> tuple[int, ...]:
    """Return the variants of the copy ``number`` whose originals are ``undominated``."""
    component = problem.components[number]
    names = {
        original.variants[index].name
        for original, indices in zip(problem.components, undominated, strict=False)
        if original.name == component.copy_of
        for index in indices
    }
    return tuple(
        index
        for index in usable(problem, number)
        if original_name(component.variants[index]) in names
    )


def _dominates(component: ComponentNumbers, first: int, second: int, can_limit: list[bool]) -> bool:
    """Whether variant ``first`` is no worse than ``second`` in anything.

    ``can_limit``: whether RAM, page-locked RAM and disk can be the limit. Callers test the last
    variant first, so of two equal variants the earlier one stays.
    """
    a, b = component.variants[first], component.variants[second]
    # if the plan reads ``first`` into RAM, but not ``second``, the read is extra time of ``first``
    if a.device != b.device or (
        a.is_read_by_plan and not b.is_read_by_plan and a.backing_store != "disk"
    ):
        return False
    # A movable variant or a streamable group allows more plans: ``first`` needs it where ``second``
    # has it.
    flags = [
        (b.movable, a.movable),
        *zip(
            streamable_groups(component, second), streamable_groups(component, first), strict=True
        ),
    ]
    if any(is_needed and not is_offered for is_needed, is_offered in flags):
        return False
    ram, pinned, disk = can_limit
    if (
        b.is_read_by_plan
        and not a.is_read_by_plan
        and ((ram and a.host_bytes) or (pinned and a.locked_bytes))
    ):
        return False  # ``first`` takes host memory from the start, ``second`` from its read on
    pairs = [(a.slowdown, b.slowdown), (float(a.scratch_bytes), float(b.scratch_bytes))]
    pairs += [(x, y) for x, y in zip(_numbers(component, a), _numbers(component, b), strict=True)]
    pairs += (
        [
            (float(a.host_bytes), float(b.host_bytes)),
            (float(a.transient_bytes), float(b.transient_bytes)),
        ]
        if ram
        else []
    )
    pairs += [(float(a.locked_bytes), float(b.locked_bytes))] if pinned else []
    pairs += [(float(a.stored_bytes), float(b.stored_bytes))] if disk else []
    return all(x <= y for x, y in pairs)


def _numbers(component: ComponentNumbers, variant: Variant) -> list[float]:
    """Return bytes and seconds per group.

    Seconds of disk reads are two numbers: of a read for every copy, and of one read into RAM.
    """
    none = (0.0,) * len(component.groups)
    on_device = variant.device != "cpu"
    numbers: list[float] = []
    for values in (
        variant.block_bytes if on_device else none,
        variant.load_seconds if on_device else none,
        (variant.disk_seconds or none) if variant.backing_store == "disk" and on_device else none,
        variant.block_seconds or none,
        variant.lost_seconds or none,
        variant.read_seconds if variant.read_seconds and variant.backing_store != "disk" else none,
    ):
        numbers += [float(value) for value in values]
    return numbers


def simplest_variants(
    problem: Problem, variants: tuple[int, ...], choice: Choice
) -> tuple[tuple[int, ...], Choice]:
    """Return the earliest variants for which the integers of ``choice`` cost no more."""
    program = program_of(problem, tuple((v,) for v in variants))
    copied_names = {component.copy_of for component in problem.components}
    for number, component in enumerate(problem.components):
        if component.copy_of or component.name in copied_names:
            continue  # they have equal variants
        for candidate in usable(problem, number):
            if candidate >= variants[number]:
                break
            candidate_variant, current_variant = (
                component.variants[candidate],
                component.variants[variants[number]],
            )
            if (
                candidate_variant.device,
                candidate_variant.movable,
                candidate_variant.is_read_by_plan,
            ) != (
                current_variant.device,
                current_variant.movable,
                current_variant.is_read_by_plan,
            ):
                continue
            if streamable_groups(component, candidate) != streamable_groups(
                component, variants[number]
            ):
                continue
            candidate_variants = (*variants[:number], candidate, *variants[number + 1 :])
            candidate_program = program_of(problem, tuple((v,) for v in candidate_variants))
            if _no_worse(candidate_program, program, choice):
                variants, program = candidate_variants, candidate_program
                break
    return variants, choice


def _no_worse(candidate_program: Program, program: Program, choice: Choice) -> bool:
    candidate_rows, rows = rows_of(candidate_program, choice), rows_of(program, choice)
    return (
        candidate_rows.seconds() <= rows.seconds() * (1 + SAME_SECONDS)
        and candidate_rows.moved_bytes() <= rows.moved_bytes()
        and not excess_bytes(candidate_program, choice)
        and candidate_rows.peak_bytes(0) <= rows.peak_bytes(0)
    )


def only_blocks_to_choose(problem: Problem) -> bool:
    """Whether a plan only chooses which blocks are resident when.

    That is: one usable variant per component, no reads of backing stores, one stage order, no
    options, nothing to spill.
    """
    if problem.precedence is not None or any(
        not option.needs or option.needs in problem.allow for option in problem.options
    ):
        return False
    if any(len(usable(problem, number)) != 1 for number in range(len(problem.components))):
        return False
    only = restrict_variants(
        problem, tuple(usable(problem, number)[0] for number in range(len(problem.components)))
    )
    variants = [component.variants[0] for component in only.components]
    if any(variant.secondary for variant in variants):
        return False
    if problem.runs > 1 and not all(variant.movable for variant in variants):
        return False
    return (
        not any(variant.is_read_by_plan for variant in variants)
        and not program_of(problem).spill_gaps
    )


def restrict_variants(problem: Problem, variants: tuple[int, ...]) -> Problem:
    """Return ``problem`` with one variant per component, given by index.

    The numbers that a variant adds to phases (slowdown, block_seconds, scratch_bytes) stay in the
    variant. `apply_choices` adds them to the phases.
    """
    components = tuple(
        replace(c, variants=(c.variants[v],))
        for c, v in zip(problem.components, variants, strict=True)
    )
    return replace(problem, components=components)
