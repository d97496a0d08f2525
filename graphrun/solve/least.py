"""The least budget for which a plan exists, of each tier, the others being as they are. Exact to the byte where nothing is to be
chosen but blocks (closed form), else from a program of its own, its sums taken in integers.

    smallest_budget   VRAM, as the user gives it        smallest_ram, smallest_pinned, smallest_disk
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from graphrun.model.least_memory import PhaseMinimum, least_memory, needed_components
from graphrun.model.problem import Problem
from graphrun.solve.granularity import split_into_layers, granularities, smaller_as_layers
from graphrun.solve.milp import Formulation, Tier, with_drops
from graphrun.solve.orders import stage_choices
from graphrun.solve.program import Choice, Program, program_of, usable
from graphrun.solve.search import Goal, minimise_over
from graphrun.solve.variants import only_blocks_to_choose, restrict_variants, undominated_variants

AMPLE = 1 << 50
ROUNDS = 4


def smallest_budget(problem: Problem) -> int:
    """The least total budget (context, workspace and reserve included) for which a plan exists, whatever the card's capacity, with
    components cut into layers where these take less.

    Where the host's budgets leave none at all, the least with ample ones. 0 where no variant may be chosen.
    """
    if not has_usable_variants(problem):
        return 0
    if only_blocks_to_choose(problem):
        every = list(granularities(problem))
        return problem.overhead_bytes + min(map(_peak, [of for of in every if backing_store_bytes(of) <= problem.ram_bytes] or every))
    floor = least_device_bytes(with_ample_host(split_into_layers(problem, smaller_as_layers(problem))))
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
    """The least RAM for which a plan exists; where VRAM leaves none at all, the least with ample VRAM."""
    if not has_usable_variants(problem):
        return 0
    if only_blocks_to_choose(problem) and all(component.variants[0].device != "cpu" for component in with_only_variants(problem).components):
        every = list(granularities(problem))
        return min(map(backing_store_bytes, [of for of in every if _peak(of) <= problem.effective_bytes] or every))
    return _least_host(problem, "ram")


def backing_store_bytes(problem: Problem) -> int:
    """What the backing stores take, cut as they are, of a problem in which nothing is to be chosen but blocks."""
    return sum(component.variants[0].host_bytes for component in needed_components(with_only_variants(problem)))


def _peak(problem: Problem) -> int:
    """The least that a phase takes at its peak, of such a problem."""
    return max((need.total_bytes for need in least_memory(with_only_variants(problem))), default=0)


def smallest_pinned(problem: Problem) -> int:
    """The least page-locked RAM for which a plan exists; where VRAM leaves none at all, the least with ample VRAM."""
    return _least_host(problem, "pinned") if has_usable_variants(problem) else 0


def smallest_disk(problem: Problem) -> int:
    """The fewest bytes on disk for which a plan exists; where the other budgets leave none at all, with ample ones."""
    return _least_host(problem, "disk") if has_usable_variants(problem) else 0


def has_usable_variants(problem: Problem) -> bool:
    """Whether every component has a variant that may be chosen."""
    return all(usable(problem, number) for number in range(len(problem.components)))


def with_only_variants(problem: Problem) -> Problem:
    """A problem in which one variant of each component may be chosen, with that one alone."""
    return restrict_variants(problem, tuple(usable(problem, number)[0] for number in range(len(problem.components))))


def with_ample_host(problem: Problem) -> Problem:
    """``problem`` with as much RAM, page-locked RAM and disk as it may want."""
    return replace(problem, ram_bytes=AMPLE, pinned_bytes=None, disk_bytes=None)


def with_ample_device(problem: Problem) -> Problem:
    """``problem`` with as much VRAM as it may want, and no more, since memory is scaled by the budget."""
    most = sum(max((c.weight_bytes(v) for v in range(len(c.variants))), default=0) for c in problem.components)
    rings = sum(2 * max(b for v in c.variants for b in v.block_bytes) for c in problem.components)
    phases = (*problem.phases, *(phase for option in problem.options for phase in option.phases))
    scratch = max((v.scratch_bytes for c in problem.components for v in c.variants), default=0)
    bytes_ = max((max(p.first_bytes, p.steady_bytes) + p.live_in_bytes for p in phases), default=0)
    blocks = sum(512 * len(k.blocks) for c in problem.components for k in c.groups)
    total = most + rings + scratch + bytes_ + blocks + sum(value.nbytes for value in problem.values) + 512
    return _with_effective(problem, total)


def _with_effective(problem: Problem, effective_bytes: int) -> Problem:
    budget = problem.overhead_bytes + effective_bytes
    return replace(problem, budget_bytes=budget, hardware=replace(problem.hardware, capacity_bytes=max(budget, 1)))


def least_device_bytes(problem: Problem) -> tuple[int, Program, Choice] | None:
    """The least that tensors take on the device, and a choice that takes it. Asked again one byte below, until nothing is found."""
    best: tuple[int, Program, Choice] | None = None
    tried = with_ample_device(problem)
    for _ in range(ROUNDS):
        found = _least_usage(tried, None, lambda program, choice: max(program.device_bytes(choice), default=0))
        if found is None or (best is not None and found[0] >= best[0]):
            break
        best = found
        if best[0] == 0:
            break
        tried = _with_effective(problem, best[0] - 1)
    return best


def _least_host(problem: Problem, tier: Tier) -> int:
    def taken_of(program: Program, choice: Choice) -> int:
        if tier == "disk":
            return sum(variant_choice.variant.stored_bytes for variant_choice in program.variant_choices if variant_choice.used)
        return max((of[tier == "pinned"] for of in program.host_bytes(with_drops(program, choice, always=True))), default=0)

    wide = {"ram": {"ram_bytes": AMPLE}, "pinned": {"pinned_bytes": None}, "disk": {"disk_bytes": None}}[tier]
    given = replace(problem, **wide)  # type: ignore[arg-type]
    for tried in (given, with_ample_device(given), with_ample_device(with_ample_host(given))):
        if found := [of[0] for each in granularities(tried) if (of := _least_usage(each, tier, taken_of)) is not None]:
            return min(found)
    return 0


def _least_usage(problem: Problem, tier: Tier | None, of: Callable[[Program, Choice], int]) -> tuple[int, Program, Choice] | None:
    """The least of ``tier`` (None: of VRAM) that any arrangement takes, counted by ``of``."""
    found_all = [each.problem for each in stage_choices(problem)[0]]
    programs = [program_of(each, None if tier else undominated_variants(each)) for each in found_all]
    formulations = [Formulation(program, (1.0,) * len(program.intervals), minimised_tier=tier) for program in programs]
    goal = Goal(lambda formulation: (formulation.tier_bytes, 1.0) if tier else (formulation.peak, formulation.bytes_unit), gap=0.0)
    good, _, _ = minimise_over(formulations, range(len(formulations)), goal)
    found = []
    for number, answer in good.items():
        variants, choice = formulations[number].choice(answer.values)
        program = programs[number].with_variants(variants)
        found.append((of(program, choice), program, choice))
    return min(found, key=lambda each: each[0], default=None)


def least_memory_of(problem: Problem) -> tuple[PhaseMinimum, ...]:
    """What each phase takes at least, with the variants and in the order that take least on the device, whatever the host has."""
    if not has_usable_variants(problem):
        return ()
    if only_blocks_to_choose(problem):
        return least_memory(with_only_variants(problem))
    found = least_device_bytes(with_ample_host(problem))
    if found is None:
        return ()
    _, program, _ = found
    of = replace(program.problem, budget_bytes=problem.budget_bytes, hardware=problem.hardware)
    return least_memory(restrict_variants(of, tuple(variant_choice.index for variant_choice in program.variant_choices)))
