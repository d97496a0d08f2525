"""Which variants are worth solving for, and which of equally good ones a plan uses. Exact: no
optimal solution is lost.

dominated     another variant is no worse in any number, or worse only in a budget that cannot bind
removed before solving simplest      the earliest variant that does the same at no cost in seconds,
bytes moved or memory     chosen after solving
"""

from __future__ import annotations

from dataclasses import replace

from graphrun.model.least_memory import streamable_groups, used_components
from graphrun.model.problem import ComponentNumbers, Problem, Variant
from graphrun.solve.program import Choice, Program, program_of, usable

# relative: seconds that differ by no more are equal up to the order of additions
SAME_SECONDS = 1e-9


def undominated_variants(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Per component, indices of the usable variants that no other usable variant dominates."""
    program = program_of(problem)
    used = [
        [program.variant_choices[n] for n in of if program.variant_choices[n].used]
        for of in program.choices_of
    ]
    stored = [max((each.variant.stored_bytes for each in of), default=0) for of in used]
    limits = (problem.ram_bytes, problem.pinned_bytes, problem.disk_bytes)
    most = (program.most_host_bytes(False), program.most_host_bytes(True), sum(stored))
    binds = [
        limit is not None and nbytes > limit for nbytes, limit in zip(most, limits, strict=True)
    ]
    found = []
    for number, component in enumerate(problem.components):
        left = (
            list(usable(problem, number))
            if component in used_components(problem)
            else list(usable(problem, number)[:1])
        )
        for index in reversed(left.copy()):
            if any(_dominates(component, other, index, binds) for other in left if other != index):
                left.remove(index)
        found.append(tuple(left))
    return tuple(found)


def _dominates(component: ComponentNumbers, one: int, other: int, binds: list[bool]) -> bool:
    """Whether variant ``one`` is no worse than ``other`` in anything. ``binds``: whether RAM,
    page-locked RAM and disk can bind. Callers test the last variant first, so that the earlier of
    two equal ones stays."""
    a, b = component.variants[one], component.variants[other]
    if a.device != b.device or (
        b.read_seconds == () and a.read_seconds != () and a.backing_store != "disk"
    ):
        return False
    flags = [
        (b.movable, a.movable),
        *zip(streamable_groups(component, other), streamable_groups(component, one), strict=True),
    ]
    if any(needed and not offered for needed, offered in flags):
        return False
    ram, pinned, disk = binds
    if (
        b.read_seconds
        and not a.read_seconds
        and ((ram and a.host_bytes) or (pinned and a.locked_bytes))
    ):
        return False  # ``one`` takes host memory from the start, the other only from its read on
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
    """Bytes and seconds per block group. Reads for every copy (disk) and the one read into RAM
    count separately."""
    none = (0.0,) * len(component.groups)
    on_device = variant.device != "cpu"
    numbers: list[float] = []
    for of in (
        variant.block_bytes if on_device else none,
        variant.load_seconds if on_device else none,
        (variant.disk_seconds or none) if variant.backing_store == "disk" and on_device else none,
        variant.block_seconds or none,
        variant.read_seconds if variant.read_seconds and variant.backing_store != "disk" else none,
    ):
        numbers += [float(value) for value in of]
    return numbers


def simplest_variants(
    problem: Problem, variants: tuple[int, ...], choice: Choice
) -> tuple[tuple[int, ...], Choice]:
    """``variants`` and ``choice`` with the earliest variants for which the same integers cost no
    more."""
    program = program_of(problem, tuple((v,) for v in variants))
    for number, component in enumerate(problem.components):
        for earlier in usable(problem, number):
            if earlier >= variants[number]:
                break
            one, other = component.variants[earlier], component.variants[variants[number]]
            if (one.device, one.movable, bool(one.read_seconds)) != (
                other.device,
                other.movable,
                bool(other.read_seconds),
            ):
                continue
            if streamable_groups(component, earlier) != streamable_groups(
                component, variants[number]
            ):
                continue
            instead = (*variants[:number], earlier, *variants[number + 1 :])
            tried = program_of(problem, tuple((v,) for v in instead))
            if _no_worse(tried, program, choice):
                variants, program = instead, tried
                break
    return variants, choice


def _no_worse(tried: Program, program: Program, choice: Choice) -> bool:
    if tried.seconds(choice) > program.seconds(choice) * (1 + SAME_SECONDS):
        return False
    if tried.moved_bytes(choice) > program.moved_bytes(choice) or tried.excess_bytes(choice):
        return False
    return max(tried.device_bytes(choice), default=0) <= max(
        program.device_bytes(choice), default=0
    )


def only_blocks_to_choose(problem: Problem) -> bool:
    """Whether the only choice is which blocks are resident when: one usable variant per component,
    no reads of backing stores, one stage order, no options, nothing to spill."""
    if problem.precedence is not None or any(
        not of.needs or of.needs in problem.allow for of in problem.options
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
        not any(variant.read_seconds for variant in variants) and not program_of(problem).spill_gaps
    )


def restrict_variants(problem: Problem, variants: tuple[int, ...]) -> Problem:
    """``problem`` with one variant per component, given by index. Its slowdown, block_seconds and
    scratch_bytes stay in force."""
    components = tuple(
        replace(c, variants=(c.variants[v],))
        for c, v in zip(problem.components, variants, strict=True)
    )
    return replace(problem, components=components)
