"""Plans within a budget counted as the device's allocator reserves memory: in pages, not in bytes
of tensors.

    fastest -> replay -> over the budget? -> fastest, with what pages took beyond tensors set aside
    in the slots concerned
                                          -> fastest within the budget less what the first plan
                                          exceeded it by -> again, twice
                                          -> fastest within 15/16, 7/8, 3/4 of the budget

The program counts bytes of tensors. Where the replay of its plan reserves more than the budget in a
slot, what it reserves beyond the bytes of tensors is set aside in that slot, and the problem is
solved again. Pages that were reserved earlier in a phase stay, though, whatever is set aside later
in it: then less of the budget is used in all slots. The bound on seconds stays that of the program
with nothing set aside; a plan that is farther from it than `OPTIMAL_GAP` is compared with the
baselines.

Where the rate of the disk is assumed, the plan found is compared with those for a slower and a
faster disk.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from math import inf

from graphrun.model.choices import with_each_variant
from graphrun.model.plan import Plan
from graphrun.model.problem import PhaseNumbers, Problem, Variant
from graphrun.model.solution import Solution
from graphrun.solve.fastest import Found, as_split, faster_baselines, fastest, find, find_near
from graphrun.solve.least import has_usable_variants, smallest_tensor_budget, with_ample_host
from graphrun.solve.milp import Formulation
from graphrun.solve.orders import stage_choices
from graphrun.solve.search import can_reach
from graphrun.verify.simulate import simulate
from graphrun.verify.solution import checked_solution, in_pages

ROUNDS = 5
RESERVED = 2  # the last round in which pages may be set aside by slot
SHARES = (1 / 16, 1 / 8, 1 / 4)  # of the budget, left free
# Reads of a disk whose rate was not measured may take one of DISK_ERRORS of the time assumed, as in
# `benchmarks/regret.py`. A plan that would lose LEAST_LOSS there may give way to the one for such a
# disk, if that is slower by MOST_PRICE at most.
DISK_ERRORS = (1.3, 1 / 1.3)
LEAST_LOSS, MOST_PRICE, ASSUMED_COUNTS = 0.03, 0.03, 4

Reserve = Mapping[tuple[str, str], int]  # (phase, part) -> bytes


def solved(problem: Problem) -> Solution | None:
    """The fastest plan within the budgets that was found, None where nothing fits. As `fastest`,
    with peaks in pages on a device that reserves these.

    On one device whose disk's rate is assumed, a nearly equal plan that loses less on a slower or
    faster disk is preferred; not to a plan that may lose as much to a faster one on the disk
    assumed.
    """
    found = _solved(problem)
    known = problem.hardware.basis != "prior" or problem.secondaries
    return found if found is None or known or found.gap > LEAST_LOSS else _preferred(problem, found)


def _preferred(problem: Problem, fast: Solution) -> Solution:
    """``fast``, or of it and the plans for other disks that are nearly as fast the one that loses
    least at worst. What it loses on the disk assumed counts four times."""
    found, others = [fast], [with_other_disk(problem, error) for error in DISK_ERRORS]
    for other in others:
        if _may_lose(other, fast) and (sure := _solved(other)) is not None:
            here = carried_over(problem, sure, fast.bound_seconds)
            if here is not None and fast.bound_seconds <= _seconds(here) <= (
                1 + MOST_PRICE
            ) * _seconds(fast):
                found.append(
                    replace(
                        here,
                        bound_seconds=fast.bound_seconds,
                        objective_seconds=fast.objective_seconds,
                    )
                )
    if len(found) == 1:
        return fast
    taken = [[_seconds_with(of, each) for each in found] for of in (problem, *others)]
    rows = list(zip((ASSUMED_COUNTS, 1, 1), taken, strict=True))
    worst = [
        max(times * (row[number] - min(row)) for times, row in rows) for number in range(len(found))
    ]
    return fast if worst[0] <= LEAST_LOSS * _seconds(fast) else found[worst.index(min(worst))]


def _may_lose(problem: Problem, fast: Solution) -> bool:
    """Whether a plan for ``problem`` may take less than ``fast`` does there, by LEAST_LOSS, as far
    as that is quick to find out."""
    most = _seconds_with(problem, fast) / (1 + LEAST_LOSS)
    programs = (each.program for each in stage_choices(as_split(problem, fast))[0])
    return most > 0 and any(can_reach(Formulation(program), most) for program in programs)


def _seconds_with(problem: Problem, found: Solution) -> float:
    """What the plan of ``found`` takes with the times of ``problem``."""
    return simulate(*_plan_for(problem, found)).total_seconds


def with_other_disk(problem: Problem, error: float) -> Problem:
    """``problem`` with reads from disk that take ``error`` times as long."""

    def read(variant: Variant) -> Variant:
        reads = {
            name: tuple(error * of for of in getattr(variant, name))
            for name in ("read_seconds", "disk_seconds")
        }
        return replace(variant, **reads)  # type: ignore[arg-type]

    return with_each_variant(problem, read)


def _solved(problem: Problem) -> Solution | None:
    found, bound = _within_pages(problem)
    if found is not None and problem.secondaries:
        return min(found, _on_first_device(problem, found) or found, key=_seconds)
    if found is not None or bound is None:
        return found
    least = _least(_unlimited(problem))
    return (
        carried_over(problem, least, bound)
        if least is not None and _peak_bytes(least) <= problem.effective_bytes
        else None
    )


def _on_first_device(problem: Problem, known: Solution) -> Solution | None:
    """The plan that leaves secondary devices alone: within the gap of ``known`` it may be the
    faster one."""
    found, _ = _within_pages(
        replace(
            problem,
            secondaries=tuple(
                replace(secondary, budget_bytes=0) for secondary in problem.secondaries
            ),
        )
    )
    return None if found is None else carried_over(problem, found, known.bound_seconds)


def smallest_budget(problem: Problem) -> int:
    """The least VRAM budget in bytes (context, workspace and reserve included) for which `solved`
    finds a plan, regardless of the card's capacity; with one byte less it finds none. Where memory
    is counted in bytes of tensors, no plan exists below it.

    Where the host budgets allow no plan at all: the least with unlimited host budgets. 0 where a
    component has no usable variant.
    """
    least = _least(_unlimited(problem)) if problem.counts_pages else None
    return (
        smallest_tensor_budget(problem)
        if least is None
        else problem.overhead_bytes + least.simulation.peak_bytes
    )


@functools.lru_cache(maxsize=8)
def _least(problem: Problem) -> Solution | None:
    """The plan of least memory that was found. Solves at the least budget of the program, with what
    the replay reserves beyond it set aside, until a plan keeps to its budget; then one byte below
    the least that was found, until nothing is found."""
    if not has_usable_variants(problem):
        return None
    solutions = list[Solution]()
    floors = list[int]()
    reserve = dict[tuple[str, str], int]()
    while len(floors) < ROUNDS:
        floors.append(smallest_tensor_budget(with_reserve(problem, reserve)))
        if solutions and floors[-1] >= problem.overhead_bytes + min(map(_peak_bytes, solutions)):
            break
        of = _with_budget(problem, floors[-1])
        # its peak counts, not its time
        found = fastest(with_reserve(of, reserve), layers=False, enough=inf)
        if found is None and (ample := with_ample_host(problem)) != problem:
            problem = ample
            continue
        if found is None or (solution := carried_over(of, found, found.bound_seconds)) is None:
            break
        short = solution.short_of_pages()
        if all(part for _, part in short):  # secondary devices keep to their budgets
            solutions.append(solution)
        if not short:
            break
        reserve |= short
    least = min(solutions, key=_peak_bytes, default=None)
    while least is not None and (budget := problem.overhead_bytes + _peak_bytes(least)) > floors[0]:
        solution, _ = _within_pages(_with_budget(problem, budget - 1))
        if solution is None:
            break
        least = solution
    return least


def _seconds(solution: Solution) -> float:
    return solution.simulation.total_seconds


def _peak_bytes(solution: Solution) -> int:
    return solution.simulation.peak_bytes


def _unlimited(problem: Problem) -> Problem:
    """The same for every budget and capacity."""
    return replace(
        problem, budget_bytes=0, hardware=replace(problem.hardware, capacity_bytes=1 << 50)
    )


def _with_budget(problem: Problem, nbytes: int) -> Problem:
    capacity = max(problem.hardware.capacity_bytes, nbytes)
    return replace(
        problem, budget_bytes=nbytes, hardware=replace(problem.hardware, capacity_bytes=capacity)
    )


def _within_pages(problem: Problem) -> tuple[Solution | None, float | None]:
    """The best plan found that keeps to the budget in pages, a baseline where one that does is
    faster, None where none is found; and the bound, None where nothing fits."""
    best, bound = _in_rounds(problem)
    if bound is None:
        return None, None
    for share in SHARES if best is None else ():
        found = find(_with_less(problem, int(share * problem.effective_bytes)))
        if found is None:
            break
        solution = carried_over(problem, found.solution, bound)
        if solution is not None and not solution.short_of_pages():
            best = solution
            break
    if best is None or best.proven_optimal:
        return best, bound
    faster = (other for other in faster_baselines(best) if not other.short_of_pages())
    return min(faster, key=_seconds, default=best), bound


def _in_rounds(problem: Problem) -> tuple[Solution | None, float | None]:
    """The first plan that keeps to the budget in pages, None where no round comes to one, and the
    bound, None where nothing fits. A plan is first sought near the one before, of more memory; one
    as fast as that is not refined. What secondary devices lack is set aside in every round."""
    first: Solution | None = None
    known: Found | None = None
    reserve = dict[tuple[str, str], int]()
    less = 0
    for number in range(ROUNDS):
        of_secondaries = {key: nbytes for key, nbytes in reserve.items() if not key[1]}
        aside, smaller = (
            with_reserve(problem, reserve),
            with_reserve(_with_less(problem, less), of_secondaries),
        )
        near = [aside] * (number <= RESERVED) + [smaller] * (number >= RESERVED)
        found = (
            next((of for each in near if (of := find_near(each, known)) is not None), None)
            if known
            else None
        )
        if found is None:
            enough = known.solution.simulation.total_seconds if known else 0.0
            found = known = find(aside if number == 1 else smaller, enough=enough, like=known)
        if found is None:
            break
        solution = (
            in_pages(found.solution)
            if first is None
            else carried_over(problem, found.solution, first.bound_seconds)
        )
        first = first or solution
        if solution is None or not (short := solution.short_of_pages()):
            return solution, first.bound_seconds if first else None
        reserve |= short
        if number != 1:
            less = _less_than_it_takes(solution, less)
    return None, first.bound_seconds if first else None


def _less_than_it_takes(solution: Solution, less: int) -> int:
    """Bytes off the budget, of which ``less`` are off already: also what ``solution`` exceeds it
    by. Where its tensors would fit in what that leaves, all that pages take beyond them."""
    budget = solution.problem.effective_bytes
    short = [
        slot
        for slot in (*solution.simulation.slots, *solution.simulation.again)
        if slot.peak_bytes > budget
    ]
    most = less + max((slot.peak_bytes - budget for slot in short), default=0)
    fits = all(slot.peak_bytes - slot.pages_bytes <= budget - most for slot in short)
    return max(most, min((slot.pages_bytes for slot in short), default=0)) if fits else most


def _with_less(problem: Problem, nbytes: int) -> Problem:
    """``problem`` with so many bytes less for tensors."""
    return (
        replace(
            problem,
            budget_bytes=min(problem.budget_bytes, problem.hardware.capacity_bytes) - nbytes,
        )
        if nbytes
        else problem
    )


def carried_over(problem: Problem, found: Solution, bound_seconds: float) -> Solution | None:
    """The plan of ``found`` as a solution of ``problem``, whose numbers differ in budgets and in
    what is set aside."""
    objective = found.objective_seconds
    return checked_solution(*_plan_for(problem, found), min(bound_seconds, objective), objective)


def _plan_for(problem: Problem, found: Solution) -> tuple[Problem, Plan]:
    """``problem``, split as for ``found``, and the plan of ``found`` for it."""
    of = as_split(problem, found)
    return of, replace(found.plan, problem=of.digest)


def with_pages_of_least(problem: Problem) -> Problem:
    """``problem`` with what pages take beyond tensors in the plan of least memory set aside."""
    least = _least(_unlimited(problem)) if problem.counts_pages else None
    slots = (*least.simulation.slots, *least.simulation.again) if least is not None else ()
    reserve: dict[tuple[str, str], int] = {}
    for slot in slots:
        reserve[slot.phase, slot.part] = max(
            slot.pages_bytes, reserve.get((slot.phase, slot.part), 0)
        )
    return with_reserve(problem, reserve)


def with_reserve(problem: Problem, reserve: Reserve) -> Problem:
    """``problem`` with ``reserve`` set aside: as activation of the slots that compute, as inputs
    bytes of load slots, of the budget of secondary devices."""
    if not reserve:
        return problem

    def more(phase: PhaseNumbers) -> PhaseNumbers:
        load, first, steady = (
            reserve.get((phase.name, part), 0) for part in ("load", "first", "steady")
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
            budget_bytes=max(0, secondary.budget_bytes - reserve.get((f"device{number}", ""), 0)),
        )
        for number, secondary in enumerate(problem.secondaries, 1)
    )
    return replace(
        problem, phases=tuple(map(more, problem.phases)), options=options, secondaries=secondaries
    )
