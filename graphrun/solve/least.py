"""Minimum budgets for which a plan exists: one at a time, the others unchanged. Exact to the byte.

Closed form if the only choice is which blocks are resident. Otherwise a MILP that minimises the
budget, with sums checked in integers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from graphrun.model.least_memory import PhaseMinimum, least_memory, needed_components
from graphrun.model.problem import ALLOCATION_BYTES, Problem
from graphrun.solve.bounds import surely_short
from graphrun.solve.dominance import only_blocks_to_choose, restrict_variants
from graphrun.solve.granularity import finer, granularities, smaller_as_layers, split_into_layers
from graphrun.solve.milp import Formulation
from graphrun.solve.orders import stage_choices
from graphrun.solve.program import HOST_TIERS, Choice, Memory, Program
from graphrun.solve.programs import usable
from graphrun.solve.rows import excess_bytes, rows_of, with_drops
from graphrun.solve.search import Goal, minimise_over

AMPLE = 1 << 50  # bytes: never the limit
ROUNDS = 4  # solves for the minimum device memory, each one byte below the last result


def smallest_tensor_budget(problem: Problem) -> int:
    """Return the minimum VRAM budget in bytes of tensors, without allocator pages.

    It includes the CUDA context, the workspace and the user's `reserve_bytes`, and ignores the
    card's capacity. Components are split into layers if layers need less. If the host budgets allow
    no plan at all: the minimum with unlimited host budgets. 0 if a component has no usable variant.
    """
    if not has_usable_variants(problem):
        return 0
    if only_blocks_to_choose(problem):
        problems = list(granularities(problem))
        return problem.budget_for(
            min(
                map(
                    _peak,
                    [
                        candidate
                        for candidate in problems
                        if backing_store_bytes(candidate) <= problem.ram_bytes
                    ]
                    or problems,
                )
            )
        )
    # No plan needs less: components as small as possible, unlimited host budgets.
    split = split_into_layers(problem, smaller_as_layers(problem))
    unlimited_host_result = least_device_bytes(with_ample_host(split))
    if unlimited_host_result is not None and _fits_host(split, *unlimited_host_result[1:]):
        return problem.budget_for(unlimited_host_result[0])
    minimum: int | None = None
    for candidate in granularities(problem):
        if (result := least_device_bytes(candidate)) is not None:
            minimum = result[0] if minimum is None else min(minimum, result[0])
        if (
            unlimited_host_result is not None
            and minimum is not None
            and minimum <= unlimited_host_result[0]
        ):
            break
    if minimum is None and unlimited_host_result is not None:
        minimum = unlimited_host_result[0]
    return 0 if minimum is None else problem.budget_for(minimum)


def _fits_host(problem: Problem, program: Program, choice: Choice) -> bool:
    """Whether ``choice`` is within the host budgets of ``problem``, not of its own problem."""
    names = ("ram_bytes", "pinned_bytes", "disk_bytes")
    limits = {name: getattr(problem, name) for name in names}
    limited = replace(program, problem=replace(program.problem, **limits))
    return not excess_bytes(limited, with_drops(limited, choice)).keys() & {*HOST_TIERS, "disk"}


def smallest_ram(problem: Problem) -> int:
    """Return the minimum RAM in bytes.

    If the VRAM budget allows no plan: the minimum with unlimited VRAM.
    """
    if not has_usable_variants(problem):
        return 0
    if only_blocks_to_choose(problem) and all(
        component.variants[0].device != "cpu"
        for component in with_only_variants(problem).components
    ):
        problems = list(granularities(problem))
        return min(
            map(
                backing_store_bytes,
                [candidate for candidate in problems if _peak(candidate) <= problem.effective_bytes]
                or problems,
            )
        )
    return _least_host(problem, "ram")


def backing_store_bytes(problem: Problem) -> int:
    """Return the bytes of all backing stores. Needs `only_blocks_to_choose`."""
    return sum(
        component.variants[0].host_bytes
        for component in needed_components(with_only_variants(problem))
    )


def _peak(problem: Problem) -> int:
    """Return the minimum device memory of the largest phase. Needs `only_blocks_to_choose`."""
    return max((need.total_bytes for need in least_memory(with_only_variants(problem))), default=0)


def smallest_pinned(problem: Problem) -> int:
    """Return the minimum page-locked RAM in bytes.

    If the VRAM budget allows no plan: the minimum with unlimited VRAM.
    """
    return _least_host(problem, "pinned") if has_usable_variants(problem) else 0


def smallest_disk(problem: Problem) -> int:
    """Return the minimum disk space in bytes.

    If the other budgets allow no plan: the minimum with these budgets unlimited.
    """
    return _least_host(problem, "disk") if has_usable_variants(problem) else 0


def has_usable_variants(problem: Problem) -> bool:
    """Whether every component has a usable variant."""
    return all(usable(problem, number) for number in range(len(problem.components)))


def with_only_variants(problem: Problem) -> Problem:
    """Return ``problem`` with only the first usable variant of each component."""
    return restrict_variants(
        problem, tuple(usable(problem, number)[0] for number in range(len(problem.components)))
    )


def with_ample_host(problem: Problem) -> Problem:
    """Return ``problem`` with unlimited RAM, page-locked RAM and disk."""
    return replace(problem, ram_bytes=AMPLE, pinned_bytes=None, disk_bytes=None)


def with_ample_device(problem: Problem) -> Problem:
    """Return ``problem`` with just enough VRAM that it is never the limit.

    The solver scales memory by the budget: with a much larger budget its tolerance would be too
    many bytes.
    """
    weights = sum(
        max((c.weight_bytes(v) for v in range(len(c.variants))), default=0)
        for c in problem.components
    )
    ring_buffers = sum(
        2 * max((b for v in c.variants for b in v.block_bytes), default=0)
        for c in problem.components
    )
    phases = (*problem.phases, *(phase for option in problem.options for phase in option.phases))
    scratch = max((v.scratch_bytes for c in problem.components for v in c.variants), default=0)
    activation = max(
        (max(p.first_bytes, p.steady_bytes) + p.input_bytes for p in phases), default=0
    )
    rounding = sum(ALLOCATION_BYTES * len(k.blocks) for c in problem.components for k in c.groups)
    total = (
        weights
        + ring_buffers
        + scratch
        + activation
        + rounding
        + sum(value.nbytes for value in problem.values)
        + ALLOCATION_BYTES
    )
    return _with_effective(problem, total)


def _with_effective(problem: Problem, effective_bytes: int) -> Problem:
    budget = problem.budget_for(effective_bytes)
    return replace(
        problem,
        budget_bytes=budget,
        hardware=replace(problem.hardware, capacity_bytes=max(budget, 1)),
    )


def least_device_bytes(problem: Problem) -> tuple[int, Program, Choice] | None:
    """Return the minimum device memory of tensors, in bytes, and a choice that needs no more.

    It does not depend on the device's budget.
    """
    return _least_device_bytes(with_ample_device(problem))


@functools.lru_cache(maxsize=16)
def _least_device_bytes(problem: Problem) -> tuple[int, Program, Choice] | None:
    best: tuple[int, Program, Choice] | None = None
    candidate = problem
    for _ in range(ROUNDS):
        result = _least_usage(
            candidate,
            0,
            lambda program, choice: int(rows_of(program, choice).peak_bytes(0)),
        )
        if result is None or (best is not None and result[0] >= best[0]):
            break
        best = result
        if best[0] == 0:
            break
        candidate = _with_effective(problem, best[0] - 1)
    return best


def _least_host(problem: Problem, tier: Literal["ram", "pinned", "disk"]) -> int:
    def usage_of(program: Program, choice: Choice) -> int:
        return int(rows_of(program, with_drops(program, choice, force=True)).peak_bytes(tier))

    unlimited_budget = {
        "ram": {"ram_bytes": AMPLE},
        "pinned": {"pinned_bytes": None},
        "disk": {"disk_bytes": None},
    }[tier]
    unlimited = replace(problem, **unlimited_budget)  # type: ignore[arg-type]
    for candidate in (
        unlimited,
        with_ample_device(unlimited),
        with_ample_device(with_ample_host(unlimited)),
    ):
        if minima := [
            result[0]
            for split in granularities(candidate)
            if (result := _least_usage(split, tier, usage_of)) is not None
        ]:
            return min(minima)
    return 0


def _least_usage(
    problem: Problem, memory: Memory, count_bytes: Callable[[Program, Choice], int]
) -> tuple[int, Program, Choice] | None:
    """Return the minimum bytes of ``memory`` over all stage orders and options, and the choice.

    ``count_bytes`` counts in integers.
    """
    formulations = [
        Formulation(stage_choice.program, minimised=memory)
        for stage_choice in stage_choices(problem, dominated=memory != 0)[0]
    ]
    goal = Goal(
        lambda formulation: (
            (formulation.minimised_bytes, 1.0)
            if memory
            else (formulation.peak, formulation.bytes_unit)
        ),
        gap=0.0,
    )
    good, _, _ = minimise_over(formulations, range(len(formulations)), goal)
    choices = [formulations[number].choice(answer.values) for number, answer in good.items()]
    return min(
        ((count_bytes(*pair), *pair) for pair in choices),
        key=lambda result: result[0],
        default=None,
    )


def surely_infeasible(problem: Problem) -> bool:
    """Whether a closed form shows that no plan exists. False proves nothing."""
    if not has_usable_variants(problem) or surely_short(problem):
        return True
    if not only_blocks_to_choose(problem):
        return False
    short = any(need.short_bytes > 0 for need in least_memory(with_only_variants(problem)))
    return short or (problem.runs == 1 and backing_store_bytes(problem) > problem.ram_bytes)


def least_memory_of(problem: Problem) -> tuple[PhaseMinimum, ...]:
    """Return the minimum device memory of each phase, ignoring host budgets.

    For the variants and the stage order that need the least memory.
    """
    if not has_usable_variants(problem):
        return ()
    if only_blocks_to_choose(problem):
        return least_memory(with_only_variants(problem))
    result = least_device_bytes(with_ample_host(problem))
    if result is None:
        return ()
    _, program, _ = result
    program_problem = replace(
        program.problem, budget_bytes=problem.budget_bytes, hardware=problem.hardware
    )
    return least_memory(
        restrict_variants(
            program_problem,
            tuple(variant_choice.index for variant_choice in program.variant_choices),
        )
    )


def ever_finer(problem: Problem) -> Iterator[Problem]:
    """Yield ``problem``, then with more and more components as layers while `finer` finds some."""
    candidate: Problem | None = problem
    while candidate is not None:
        yield candidate
        candidate = finer(candidate, least_memory_of(candidate))
