"""The smallest budgets for which a plan exists, one at a time while the others are unchanged. Exact
to the byte.

    smallest_tensor_budget   VRAM, as the user states it, where memory is counted in bytes of
    tensors smallest_ram, smallest_pinned, smallest_disk

Closed form where the only choice is which blocks are resident; otherwise a MILP whose goal is that
budget, with sums checked in integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from graphrun.model.least_memory import PhaseMinimum, least_memory, needed_components
from graphrun.model.problem import Problem
from graphrun.solve.dominance import only_blocks_to_choose, restrict_variants
from graphrun.solve.granularity import finer, granularities, smaller_as_layers, split_into_layers
from graphrun.solve.milp import Formulation, Tier
from graphrun.solve.orders import stage_choices
from graphrun.solve.program import Choice, Program, usable
from graphrun.solve.search import Goal, minimise_over

AMPLE = 1 << 50  # bytes: never binds
ROUNDS = 4  # solves for the least device memory, each one byte below the last result


def smallest_tensor_budget(problem: Problem) -> int:
    """The least VRAM budget in bytes (context, workspace and reserve included) for which a plan
    exists, regardless of the card's capacity, with components split into layers where these need
    less.

    Where the host budgets allow no plan at all: the least with unlimited host budgets. 0 where a
    component has no usable variant.
    """
    if not has_usable_variants(problem):
        return 0
    if only_blocks_to_choose(problem):
        every = list(granularities(problem))
        return problem.overhead_bytes + min(
            map(
                _peak, [of for of in every if backing_store_bytes(of) <= problem.ram_bytes] or every
            )
        )
    floor = least_device_bytes(
        with_ample_host(split_into_layers(problem, smaller_as_layers(problem)))
    )
    least: int | None = None
    for of in granularities(problem):
        if (found := least_device_bytes(of)) is not None:
            least = found[0] if least is None else min(least, found[0])
        if floor is not None and least is not None and least <= floor[0]:
            break
    if least is None:
        least = floor[0] if floor is not None else -problem.overhead_bytes
    return problem.overhead_bytes + least


def smallest_ram(problem: Problem) -> int:
    """The least RAM in bytes for which a plan exists; where VRAM allows no plan at all, the least
    with unlimited VRAM."""
    if not has_usable_variants(problem):
        return 0
    if only_blocks_to_choose(problem) and all(
        component.variants[0].device != "cpu"
        for component in with_only_variants(problem).components
    ):
        every = list(granularities(problem))
        return min(
            map(
                backing_store_bytes,
                [of for of in every if _peak(of) <= problem.effective_bytes] or every,
            )
        )
    return _least_host(problem, "ram")


def backing_store_bytes(problem: Problem) -> int:
    """Bytes of all backing stores, for a problem as in `only_blocks_to_choose`, at its
    granularity."""
    return sum(
        component.variants[0].host_bytes
        for component in needed_components(with_only_variants(problem))
    )


def _peak(problem: Problem) -> int:
    """The least device memory of the largest phase, for such a problem."""
    return max((need.total_bytes for need in least_memory(with_only_variants(problem))), default=0)


def smallest_pinned(problem: Problem) -> int:
    """The least page-locked RAM in bytes for which a plan exists; where VRAM allows no plan at all,
    the least with unlimited VRAM."""
    return _least_host(problem, "pinned") if has_usable_variants(problem) else 0


def smallest_disk(problem: Problem) -> int:
    """The least disk space in bytes for which a plan exists; where the other budgets allow no plan
    at all, with unlimited ones."""
    return _least_host(problem, "disk") if has_usable_variants(problem) else 0


def has_usable_variants(problem: Problem) -> bool:
    """Whether every component has a usable variant."""
    return all(usable(problem, number) for number in range(len(problem.components)))


def with_only_variants(problem: Problem) -> Problem:
    """``problem``, in which each component has one usable variant, with that variant alone."""
    return restrict_variants(
        problem, tuple(usable(problem, number)[0] for number in range(len(problem.components)))
    )


def with_ample_host(problem: Problem) -> Problem:
    """``problem`` with unlimited RAM, page-locked RAM and disk."""
    return replace(problem, ram_bytes=AMPLE, pinned_bytes=None, disk_bytes=None)


def with_ample_device(problem: Problem) -> Problem:
    """``problem`` with VRAM that never binds, but not arbitrarily much, because the solver scales
    memory by the budget."""
    most = sum(
        max((c.weight_bytes(v) for v in range(len(c.variants))), default=0)
        for c in problem.components
    )
    ring_buffers = sum(
        2 * max(b for v in c.variants for b in v.block_bytes) for c in problem.components
    )
    phases = (*problem.phases, *(phase for option in problem.options for phase in option.phases))
    scratch = max((v.scratch_bytes for c in problem.components for v in c.variants), default=0)
    activation = max(
        (max(p.first_bytes, p.steady_bytes) + p.input_bytes for p in phases), default=0
    )
    rounding = sum(512 * len(k.blocks) for c in problem.components for k in c.groups)
    total = (
        most
        + ring_buffers
        + scratch
        + activation
        + rounding
        + sum(value.nbytes for value in problem.values)
        + 512
    )
    return _with_effective(problem, total)


def _with_effective(problem: Problem, effective_bytes: int) -> Problem:
    budget = problem.overhead_bytes + effective_bytes
    return replace(
        problem,
        budget_bytes=budget,
        hardware=replace(problem.hardware, capacity_bytes=max(budget, 1)),
    )


def least_device_bytes(problem: Problem) -> tuple[int, Program, Choice] | None:
    """The least device memory of tensors, in bytes, and a choice that needs no more. Solves again
    with one byte less until nothing is found."""
    best: tuple[int, Program, Choice] | None = None
    tried = with_ample_device(problem)
    for _ in range(ROUNDS):
        found = _least_usage(
            tried, None, lambda program, choice: int(max(program.device_bytes(choice), default=0))
        )
        if found is None or (best is not None and found[0] >= best[0]):
            break
        best = found
        if best[0] == 0:
            break
        tried = _with_effective(problem, best[0] - 1)
    return best


def _least_host(problem: Problem, tier: Tier) -> int:
    def usage_of(program: Program, choice: Choice) -> int:
        if tier == "disk":
            return program.stored_bytes
        return int(
            max(
                program.host_bytes(program.with_drops(choice, always=True))[
                    :, int(tier == "pinned")
                ],
                default=0,
            )
        )

    wide = {
        "ram": {"ram_bytes": AMPLE},
        "pinned": {"pinned_bytes": None},
        "disk": {"disk_bytes": None},
    }[tier]
    unlimited = replace(problem, **wide)  # type: ignore[arg-type]
    for tried in (
        unlimited,
        with_ample_device(unlimited),
        with_ample_device(with_ample_host(unlimited)),
    ):
        if found := [
            of[0]
            for each in granularities(tried)
            if (of := _least_usage(each, tier, usage_of)) is not None
        ]:
            return min(found)
    return 0


def _least_usage(
    problem: Problem, tier: Tier | None, of: Callable[[Program, Choice], int]
) -> tuple[int, Program, Choice] | None:
    """The least use of ``tier`` (None: VRAM) over all stage orders and options, counted in integers
    by ``of``, and the choice."""
    formulations = [
        Formulation(each.program, minimised_tier=tier)
        for each in stage_choices(problem, dominated=tier is not None)[0]
    ]
    goal = Goal(
        lambda formulation: (
            (formulation.tier_bytes, 1.0) if tier else (formulation.peak, formulation.bytes_unit)
        ),
        gap=0.0,
    )
    good, _, _ = minimise_over(formulations, range(len(formulations)), goal)
    found = [formulations[number].choice(answer.values) for number, answer in good.items()]
    return min(((of(*each), *each) for each in found), key=lambda each: each[0], default=None)


def surely_infeasible(problem: Problem) -> bool:
    """Whether closed forms already show that no plan exists. False says nothing."""
    if not has_usable_variants(problem):
        return True
    if not only_blocks_to_choose(problem):
        return False
    short = any(need.short_bytes > 0 for need in least_memory(with_only_variants(problem)))
    return short or (problem.runs == 1 and backing_store_bytes(problem) > problem.ram_bytes)


def least_memory_of(problem: Problem) -> tuple[PhaseMinimum, ...]:
    """The least device memory of each phase, with the variants and the stage order that need least,
    ignoring host budgets."""
    if not has_usable_variants(problem):
        return ()
    if only_blocks_to_choose(problem):
        return least_memory(with_only_variants(problem))
    found = least_device_bytes(with_ample_host(problem))
    if found is None:
        return ()
    _, program, _ = found
    of = replace(program.problem, budget_bytes=problem.budget_bytes, hardware=problem.hardware)
    return least_memory(
        restrict_variants(
            of, tuple(variant_choice.index for variant_choice in program.variant_choices)
        )
    )


def ever_finer(problem: Problem) -> Iterator[Problem]:
    """``problem``, then with more and more components split into layers (see `finer`), while there
    is something to gain."""
    tried: Problem | None = problem
    while tried is not None:
        yield tried
        tried = finer(tried, least_memory_of(tried))
