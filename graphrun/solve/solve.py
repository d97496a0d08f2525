"""The planner's entry: the fastest plan within all budgets, or the reasons why there is none."""

from __future__ import annotations

from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.solve.infeasible import refusal
from graphrun.solve.pages import solved


def solve(problem: Problem) -> Solution:
    """The fastest plan within the budgets; among equally fast plans the one that moves fewest bytes, then the one with the lowest
    peak.

    Deterministic: equal problems give plans that are equal byte for byte. Raises Infeasible.
    """
    if (solution := solved(problem)) is None:
        raise refusal(problem)
    return solution
