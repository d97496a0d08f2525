"""A plan with its simulation, after a check."""

from __future__ import annotations

from dataclasses import replace

from graphrun.model.plan import Plan
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.verify.check import check
from graphrun.verify.pages import reserved_bytes
from graphrun.verify.simulate import simulate


def checked_solution(
    problem: Problem, plan: Plan, proven_optimal: bool, bound_seconds: float, objective_seconds: float, gap: float
) -> Solution | None:
    """The solution with ``plan``, checked and simulated once; None where the plan breaks a rule."""
    if check(problem, plan):
        return None
    simulation = simulate(problem, plan)
    return in_pages(Solution(problem, plan, simulation, proven_optimal, bound_seconds, objective_seconds, gap))


def in_pages(solution: Solution) -> Solution:
    """``solution`` with peaks as the device's allocator reserves memory. Unchanged on a device that counts bytes of tensors, and
    where a phase has no trace."""
    chosen = solution.chosen
    if not chosen.hardware.caching_allocator or not all(phase.trace.first for phase in chosen.phases):
        return solution
    reserved = reserved_bytes(chosen, solution.plan)
    return replace(solution, simulation=solution.simulation.in_pages(reserved))
