"""A plan with its simulation."""

from __future__ import annotations

import functools
from dataclasses import replace

from graphrun.model.choices import apply_choices
from graphrun.model.plan import Plan, Violation
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.verify.check import check
from graphrun.verify.pages import reserved_bytes
from graphrun.verify.simulate import simulate


def solution_of(
    problem: Problem, plan: Plan, bound_seconds: float = 0.0, objective_seconds: float = 0.0
) -> Solution:
    """Return the solution with ``plan``, simulated and not checked.

    By default, nothing is known about how good the plan is.
    """
    return in_pages(
        Solution(problem, plan, simulate(problem, plan), bound_seconds, objective_seconds)
    )


def in_pages(solution: Solution) -> Solution:
    """Return ``solution`` with peaks in allocator pages, if `Problem.counts_pages`."""
    if not solution.problem.counts_pages:
        return solution
    devices = range(len(solution.problem.secondaries) + 1)
    # `Solution.chosen`: the problem with the choices of its plan applied
    pages = [_replayed(solution.chosen, solution.plan, number) for number in devices]
    return replace(solution, simulation=solution.simulation.in_pages(*pages))


# a plan that is checked and then simulated is replayed once
_replayed = functools.lru_cache(maxsize=8)(reserved_bytes)


def broken_rules(problem: Problem, plan: Plan) -> tuple[Violation, ...]:
    """Return the rules of `check` that ``plan`` violates, else those of the rule ``pages``.

    ``pages``: the memory that a device's allocator reserves in a slot is within the budget.
    """
    violations = check(problem, plan)
    if violations or not problem.counts_pages:
        return violations
    applied = apply_choices(problem, plan)
    budgets = (
        problem.effective_bytes,
        *(secondary.effective_bytes for secondary in problem.secondaries),
    )
    return tuple(
        Violation("pages", slot, -1, f"{nbytes} bytes reserved in pages > {budget} bytes")
        for number, budget in enumerate(budgets)
        for slot, nbytes in enumerate(_replayed(applied, plan, number))
        if nbytes > budget
    )


def checked_solution(
    problem: Problem, plan: Plan, bound_seconds: float, objective_seconds: float
) -> Solution | None:
    """Return the solution with ``plan``, checked and simulated; None if the plan breaks a rule."""
    return (
        None
        if check(problem, plan)
        else solution_of(problem, plan, bound_seconds, objective_seconds)
    )
