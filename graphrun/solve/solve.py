"""Entry point of the planner."""

from __future__ import annotations

from functools import partial

from graphrun.errors import PlanningInterrupted
from graphrun.garbage import rare_garbage_collection
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.solve.copying import fastest_with_copies
from graphrun.solve.infeasible import refusal
from graphrun.solve.interrupts import best_of, recording_candidates
from graphrun.solve.pages import solved


def solve(problem: Problem) -> Solution:
    """Return the fastest plan within the budgets.

    Equally fast plans are compared by bytes moved, then by peak. Deterministic: equal problems give
    plans that are equal byte for byte. Raises Infeasible, and PlanningInterrupted on Ctrl-C.
    """
    infeasible = False
    with rare_garbage_collection(), recording_candidates() as candidates:
        try:
            if (solution := solved(problem)) is None:
                infeasible = True
                raise refusal(problem)
            solution = fastest_with_copies(problem, solution)
        except KeyboardInterrupt:
            raise PlanningInterrupted(
                partial(best_of, candidates, problem), infeasible=infeasible
            ) from None
    return solution
