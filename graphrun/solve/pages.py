"""Plans within a budget counted in the pages that the device's allocator reserves.

A replay (`graphrun.verify.pages`) runs a plan through a model of the allocator. The page overhead
of a slot is its reserved bytes beyond tensors.

    fastest -> replay -> over the budget?
        round 2     fastest, with the page overhead of each slot set aside in that slot
        rounds 3-5  fastest, with the budget reduced in all slots by the excess of earlier plans
        then        fastest within 15/16, 7/8, 3/4 of the budget

Round 2 may not help: pages from earlier slots of a phase stay reserved, whatever is set aside later
in the phase. Later rounds therefore reduce the budget in all slots.

The bound on seconds is the bound of the program with nothing set aside. A plan that is not
`proven_optimal` with this bound is compared with the baselines.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from operator import attrgetter

from graphrun.model.choices import with_each_variant
from graphrun.model.plan import Plan
from graphrun.model.problem import ComponentNumbers, PhaseNumbers, Problem, Variant
from graphrun.model.solution import Solution
from graphrun.solve.fastest import (
    ProgramSolution,
    faster_baselines,
    fastest,
    find,
    find_near,
)
from graphrun.solve.granularity import split_as
from graphrun.solve.least import has_usable_variants, smallest_tensor_budget, with_ample_host
from graphrun.solve.milp import Formulation
from graphrun.solve.orders import stage_choices
from graphrun.solve.search import can_reach
from graphrun.solve.strategies import has
from graphrun.verify.check import check
from graphrun.verify.simulate import simulate
from graphrun.verify.solution import checked_solution, in_pages

ROUNDS = 5
# In code, rounds are numbered from 0. `find_near` sets the page overhead aside slot by slot up to
# this number, and from it on also tries a reduced budget. `find`, which takes longer, sets the
# overhead aside in number 1 only; in later rounds it reduces the budget.
LAST_SLOTWISE_ROUND = 2
SHARES = (1 / 16, 1 / 8, 1 / 4)  # of the budget, left free
# If the disk rate is not measured, reads may take SLOWER_DISK times the assumed seconds, as in
# `benchmarks/regret.py`. The plan for such a slower disk is taken if, on the slower disk, it saves
# LEAST_LOSS and, on the assumed disk, costs at most MOST_PRICE.
SLOWER_DISK = 1.3
LEAST_LOSS, MOST_PRICE = 0.03, 0.03

# (phase, part), or ("deviceN", "") for a secondary device -> bytes
PageOverheads = Mapping[tuple[str, str], int]


def solved(problem: Problem) -> Solution | None:
    """Return the fastest plan found, within budgets counted in allocator pages; None if none fits.

    On one device with an assumed disk rate, prefer the plan for a slower disk if it is nearly as
    fast and the fastest plan would lose LEAST_LOSS on that disk. Not compared if the fastest plan
    may itself be slower than the best possible one by more than LEAST_LOSS.
    """
    fast = _fastest_in_pages(problem)
    if (
        fast is None
        or problem.hardware.basis != "data sheet"
        or problem.secondaries
        or fast.gap > LEAST_LOSS
        or not has("slower disk")
    ):
        return fast
    slow_disk = with_other_disk(problem, SLOWER_DISK)
    limit_seconds = simulate(*_plan_for(slow_disk, fast)).total_seconds / (1 + LEAST_LOSS)
    if (
        limit_seconds < fast.bound_seconds  # no plan is faster on a slower disk
        or not _has_plan_within(slow_disk, fast, limit_seconds)
        or (slow := _fastest_in_pages(slow_disk)) is None
        or slow.seconds > limit_seconds
    ):
        return fast
    slow_disk_plan = carried_over(problem, slow, fast.bound_seconds)
    bound, most_seconds = fast.bound_seconds, (1 + MOST_PRICE) * fast.seconds
    if slow_disk_plan is None or not bound <= slow_disk_plan.seconds <= most_seconds:
        return fast
    return replace(slow_disk_plan, bound_seconds=bound, objective_seconds=fast.objective_seconds)


def _has_plan_within(problem: Problem, solution: Solution, seconds: float) -> bool:
    """Whether quick checks show a plan within ``seconds``, with layers as in ``solution``."""
    choices, _ = stage_choices(split_as(problem, solution.problem))
    return seconds > 0 and any(
        can_reach(Formulation(stage_choice.program), seconds) for stage_choice in choices
    )


def with_other_disk(problem: Problem, factor: float) -> Problem:
    """Return ``problem`` with disk reads that take ``factor`` times as long."""

    def read(variant: Variant) -> Variant:
        reads = {
            name: tuple(factor * seconds for seconds in getattr(variant, name))
            for name in ("read_seconds", "disk_seconds")
        }
        return replace(variant, **reads)  # type: ignore[arg-type]

    return with_each_variant(problem, read)


def _fastest_in_pages(problem: Problem) -> Solution | None:
    """Return the fastest plan found for these disk rates, else one of least memory, else None."""
    solution, bound = within_pages(problem)
    if solution is not None and problem.secondaries and has("main device"):
        return min(
            solution,
            _on_first_device(problem, solution) or solution,
            key=attrgetter("seconds"),
        )
    if solution is not None or bound is None:
        return solution
    unlimited = _without_budget(problem)
    for is_proven in (False, True):
        minimum = _least(unlimited) if is_proven else _small(unlimited)[0]
        if minimum is not None and _peak_bytes(minimum) <= problem.effective_bytes:
            return carried_over(problem, minimum, bound)
    return None


def _on_first_device(problem: Problem, reference: Solution) -> Solution | None:
    """Return the plan without secondary devices: ``reference`` is only optimal within a gap.

    Its problem has no secondary devices. With budgets of 0 for them, a plan would never fit in
    pages, since every device gets the workspace of kernels.
    """

    def only_main(component: ComponentNumbers) -> ComponentNumbers:
        return replace(
            component,
            variants=tuple(variant for variant in component.variants if not variant.secondary),
            layers=component.layers and only_main(component.layers),
        )

    components = tuple(map(only_main, problem.components))
    main_problem = replace(problem, components=components, secondaries=())
    solution, _ = within_pages(main_problem)
    if solution is None:
        return None
    plan = replace(solution.plan, variants=problem.named_variants(solution.variant_names))
    return carried_over(problem, replace(solution, plan=plan), reference.bound_seconds)


def smallest_budget(problem: Problem) -> int:
    """Return the minimum VRAM budget for which `solved` finds a plan, in bytes.

    It includes the CUDA context, the workspace and the user's `reserve_bytes`, and ignores the
    card's capacity. With one byte less `solved` finds no plan; where memory is counted in bytes of
    tensors, none exists. If the host budgets allow no plan: the minimum with unlimited host
    budgets. 0 without usable variants.
    """
    return _budget_of(problem, _least(_without_budget(problem)) if problem.counts_pages else None)


def sufficient_budget(problem: Problem, rounds: int = ROUNDS) -> int:
    """Return a VRAM budget for which a plan exists, in bytes.

    Usually it equals `smallest_budget`. It takes less time, because it does not prove that nothing
    fits into less. ``rounds``: as for `_small`.
    """
    small = _small(_without_budget(problem), rounds)[0] if problem.counts_pages else None
    return _budget_of(problem, small)


def _budget_of(problem: Problem, solution: Solution | None) -> int:
    if solution is None:
        return smallest_tensor_budget(problem)
    return problem.budget_for(solution.simulation.peak_bytes)


@functools.lru_cache(maxsize=8)
def _least(problem: Problem) -> Solution | None:
    """Return the plan of least memory: solve one byte below the last peak until there is none."""
    minimum, floor_bytes = _small(problem)
    while minimum is not None:
        budget = problem.budget_for(_peak_bytes(minimum))
        solution, _ = (
            within_pages(_with_budget(problem, budget - 1))
            if budget > floor_bytes
            else (None, None)
        )
        if solution is None:
            break
        minimum = solution
    return minimum


@functools.lru_cache(maxsize=8)
def _small(problem: Problem, rounds: int = ROUNDS) -> tuple[Solution | None, int]:
    """Return a plan of little memory, and the minimum budget of the program, in bytes.

    Solves at that minimum with the replay's page overhead set aside, until a plan fits its budget,
    but at most ``rounds`` times.
    """
    if not has_usable_variants(problem):
        return None, 0
    solutions = list[Solution]()
    floors = list[int]()
    set_aside = dict[tuple[str, str], int]()
    while len(floors) < rounds:
        floors.append(smallest_tensor_budget(with_overheads(problem, set_aside)))
        if solutions and floors[-1] >= problem.budget_for(min(map(_peak_bytes, solutions))):
            break
        budget_problem = _with_budget(problem, floors[-1])
        # only the peak of this plan matters, not its time
        candidate = fastest(
            with_overheads(budget_problem, set_aside), layers=False, target_seconds=inf
        )
        if candidate is None and (ample := with_ample_host(problem)) != problem:
            problem = ample
            continue
        if (
            candidate is None
            or (solution := carried_over(budget_problem, candidate, candidate.bound_seconds))
            is None
        ):
            break
        overheads = solution.excess_page_overheads()
        # True if only the main device exceeds its budget. Keys of the main device are (phase,
        # part), keys of secondary devices ("deviceN", "").
        if all(part for _, part in overheads):
            solutions.append(solution)
        if not overheads:
            break
        set_aside |= overheads
    return min(solutions, key=_peak_bytes, default=None), floors[0]


def forget_least() -> None:
    """Forget the plans of least memory."""
    _least.cache_clear()
    _small.cache_clear()


def _peak_bytes(solution: Solution) -> int:
    return solution.simulation.peak_bytes


def _without_budget(problem: Problem) -> Problem:
    """Return ``problem`` without its own budget, so that `_least` runs once for all budgets."""
    return replace(
        problem, budget_bytes=0, hardware=replace(problem.hardware, capacity_bytes=1 << 50)
    )


def _with_budget(problem: Problem, nbytes: int) -> Problem:
    capacity = max(problem.hardware.capacity_bytes, nbytes)
    return replace(
        problem, budget_bytes=nbytes, hardware=replace(problem.hardware, capacity_bytes=capacity)
    )


def within_pages(problem: Problem) -> tuple[Solution | None, float | None]:
    """Return the best plan by allocator pages (None: not found) and the bound (None: none fits)."""
    best, bound = _in_rounds(problem)
    if bound is None:
        return None, None
    for share in SHARES if best is None else ():
        candidate = find(_with_less(problem, int(share * problem.effective_bytes)))
        if candidate is None:
            break
        solution = carried_over(problem, candidate.solution, bound)
        if solution is not None and not solution.excess_page_overheads():
            best = solution
            break
    if best is None or best.proven_optimal or not has("paged baselines"):
        return best, bound
    faster = (other for other in faster_baselines(best) if not other.excess_page_overheads())
    return min(faster, key=attrgetter("seconds"), default=best), bound


def _in_rounds(problem: Problem) -> tuple[Solution | None, float | None]:
    """Return the first plan that fits by allocator pages, and the bound, as `within_pages`.

    A round first searches near the plan of the previous full search, which was made for more
    memory. A full search stops when it is as fast as that plan. The page overhead of
    secondary devices is set aside in every round.
    """
    first: Solution | None = None
    previous: ProgramSolution | None = None
    set_aside = dict[tuple[str, str], int]()
    reduction_bytes = 0
    for number in range(ROUNDS):
        secondary_set_aside = {key: nbytes for key, nbytes in set_aside.items() if not key[1]}
        slotwise_problem, smaller_problem = (
            with_overheads(problem, set_aside),
            with_overheads(_with_less(problem, reduction_bytes), secondary_set_aside),
        )
        problems = [slotwise_problem] * (number <= LAST_SLOTWISE_ROUND) + [smaller_problem] * (
            number >= LAST_SLOTWISE_ROUND
        )
        near_results = (
            (find_near(problem, previous, smaller) for smaller in problems)
            if previous and has("near plans")
            else iter(())
        )
        near_result = next((result for result in near_results if result is not None), None)
        if near_result is None:
            target_seconds = previous.solution.seconds if previous else 0.0
            previous = find(
                slotwise_problem if number == 1 and has("reserved pages") else smaller_problem,
                target_seconds=target_seconds,
                template=previous,
            )
        if (candidate := near_result or previous) is None:
            break
        if candidate is near_result or first is None:
            solution = _valid_in_pages(candidate.solution, first)
        else:
            solution = carried_over(problem, candidate.solution, first.bound_seconds)
        first = first or solution
        if solution is None or not (overheads := solution.excess_page_overheads()):
            return solution, first.bound_seconds if first else None
        set_aside |= overheads
        if number != 1 or not has("reserved pages"):
            reduction_bytes = _total_reduction(solution, reduction_bytes)
    return None, first.bound_seconds if first else None


def _valid_in_pages(solution: Solution, first: Solution | None) -> Solution | None:
    """Return ``solution`` counted in pages, with the bound of ``first``; None if it is invalid."""
    if first is not None:
        if check(solution.problem, solution.plan):
            return None
        bound = min(first.bound_seconds, solution.objective_seconds)
        solution = replace(solution, bound_seconds=bound)
    return in_pages(solution)


def _total_reduction(solution: Solution, reduction_bytes: int) -> int:
    """Return the bytes by which to reduce the budget in the next round.

    ``reduction_bytes``, the reduction for ``solution``, grows by the largest excess of a slot in
    pages. If the tensors of ``solution`` still fit the reduced budget, the solver could return the
    same plan. So the reduction is at least the smallest page overhead of the slots that exceed the
    budget: tensors plus overhead are above the budget there, so the tensors of that slot no longer
    fit.
    """
    budget = solution.problem.effective_bytes
    exceeding_slots = [slot for slot in solution.simulation.all_slots if slot.peak_bytes > budget]
    excess_bytes = reduction_bytes + max(
        (slot.peak_bytes - budget for slot in exceeding_slots), default=0
    )
    fits = all(
        slot.peak_bytes - slot.pages_bytes <= budget - excess_bytes for slot in exceeding_slots
    )
    return (
        max(excess_bytes, min((slot.pages_bytes for slot in exceeding_slots), default=0))
        if fits
        else excess_bytes
    )


def _with_less(problem: Problem, nbytes: int) -> Problem:
    return (
        replace(
            problem,
            budget_bytes=min(problem.budget_bytes, problem.hardware.capacity_bytes) - nbytes,
        )
        if nbytes
        else problem
    )


def carried_over(problem: Problem, solution: Solution, bound_seconds: float) -> Solution | None:
    """Return the plan of ``solution`` for ``problem``, with other budgets; None if invalid."""
    objective = solution.objective_seconds
    return checked_solution(*_plan_for(problem, solution), min(bound_seconds, objective), objective)


def _plan_for(problem: Problem, solution: Solution) -> tuple[Problem, Plan]:
    """Return ``problem`` split into layers as in ``solution``, and its plan for that problem."""
    split = split_as(problem, solution.problem)
    return split, replace(solution.plan, problem=split.digest)


def with_page_overhead_of_minimum(problem: Problem, rounds: int | None = None) -> Problem:
    """Return ``problem`` with the page overhead of the plan of least memory set aside.

    ``rounds``: the overhead of a plan of little memory, as for `_small`, which takes less time.
    """
    minimum: Solution | None = None
    if problem.counts_pages:
        unlimited = _without_budget(problem)
        minimum = _least(unlimited) if rounds is None else _small(unlimited, rounds)[0]
    slots = minimum.simulation.all_slots if minimum is not None else ()
    set_aside: dict[tuple[str, str], int] = {}
    for slot in slots:
        set_aside[slot.phase, slot.part] = max(
            slot.pages_bytes, set_aside.get((slot.phase, slot.part), 0)
        )
    return with_overheads(problem, set_aside)


def with_overheads(problem: Problem, overheads: PageOverheads) -> Problem:
    """Return ``problem`` with ``overheads`` set aside.

    The overhead of a first or steady slot is added to its activation bytes, of a load slot to the
    input bytes. The overhead of a secondary device is taken from its budget.
    """
    if not overheads:
        return problem

    def more(phase: PhaseNumbers) -> PhaseNumbers:
        load, first, steady = (
            overheads.get((phase.name, part), 0) for part in ("load", "first", "steady")
        )
        return replace(
            phase,
            input_bytes=phase.input_bytes + load,
            first_bytes=phase.first_bytes + max(0, first - load),
            steady_bytes=phase.steady_bytes + max(0, steady - load),
        )

    options = tuple(
        replace(option, phases=tuple(map(more, option.phases))) for option in problem.options
    )
    secondaries = tuple(
        replace(
            secondary,
            budget_bytes=max(0, secondary.budget_bytes - overheads.get((f"device{number}", ""), 0)),
        )
        for number, secondary in enumerate(problem.secondaries, 1)
    )
    return replace(
        problem, phases=tuple(map(more, problem.phases)), options=options, secondaries=secondaries
    )
