"""A plan with its simulation, after a check."""

from __future__ import annotations

from graphrun.model.plan import Plan
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.verify.check import check
from graphrun.verify.simulate import simulate


def checked_solution(
    problem: Problem, plan: Plan, proven_optimal: bool, bound_seconds: float, objective_seconds: float, gap: float
) -> Solution | None:
    """The solution with ``plan``, checked and simulated once; None where the plan breaks a rule."""
    if check(problem, plan):
        return None
    return Solution(problem, plan, simulate(problem, plan), proven_optimal, bound_seconds, objective_seconds, gap)
