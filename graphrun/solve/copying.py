"""Plans with copies of components on secondary devices (`graphrun.model.copies`).

The problem with copies is solved like any other. Its plan replaces the plan without copies if it is
clearly faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from graphrun.model.copies import ComponentCopies, copyable_to, least_copy_bytes, with_copies
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.solve.granularity import split_as
from graphrun.solve.interrupts import recording_candidates
from graphrun.solve.pages import within_pages
from graphrun.verify.solution import checked_solution

# Factor by which a plan with copies must be faster. A copy takes memory and power.
CLEARLY = 1.01


def fastest_with_copies(problem: Problem, solution: Solution) -> Solution:
    """Return ``solution``, or the fastest plan with copies if that is clearly faster.

    Its bound covers plans with and without copies.
    """
    best, bound = solution, solution.bound_seconds
    for copies in copies_that_fit(problem):
        with recording_candidates():  # which are for another problem
            other, other_bound = within_pages(with_copies(problem, copies))
        if other_bound is not None:
            bound = min(bound, other_bound)
        if other is None or other.seconds * CLEARLY > best.seconds:
            continue
        candidate = _for_original(problem, other, copies)
        if candidate is not None and not candidate.excess_page_overheads():
            best = candidate
    return replace(best, bound_seconds=min(bound, best.bound_seconds))


def copies_that_fit(problem: Problem) -> Iterator[ComponentCopies]:
    """Yield for each secondary device the copies that it has room for, one at a time.

    Of equal devices, only the first.
    """
    for number, secondary in enumerate(problem.secondaries, 1):
        if secondary in problem.secondaries[: number - 1]:
            continue
        copies = tuple(
            (component.name, number)
            for component in problem.components
            if number in copyable_to(problem, component.name)
            and least_copy_bytes(problem, component.name, number) <= secondary.effective_bytes
        )
        if copies:
            yield copies


def _for_original(problem: Problem, solution: Solution, copies: ComponentCopies) -> Solution | None:
    """Return the plan of ``solution``, whose problem has ``copies``, for ``problem``."""
    original = split_as(problem, solution.problem)
    plan = replace(
        solution.plan,
        problem=original.digest,
        copies=tuple(copies),
        variants=original.named_variants(solution.variant_names),
    )
    return checked_solution(original, plan, solution.bound_seconds, solution.objective_seconds)
