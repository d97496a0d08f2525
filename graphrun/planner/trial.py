"""What a problem would take, shortly: one answer in seconds, by the simulator, for the sake of comparison. Makes no promises."""

from __future__ import annotations

from graphrun.planner.actions import plan_of
from graphrun.planner.least import chosen_from
from graphrun.planner.orders import arrangements
from graphrun.planner.problem import Problem
from graphrun.planner.program import program_of
from graphrun.planner.search import choose
from graphrun.planner.simulate import simulate
from graphrun.planner.variants import worthwhile


def predicted_seconds(problem: Problem) -> float | None:
    """Seconds of the fastest plan for ``problem``; None where nothing fits."""
    if not chosen_from(problem):
        return None
    found, _ = arrangements(problem)
    answer = choose([program_of(of.problem, worthwhile(of.problem)) for of in found], goals=1)
    if answer is None:
        return None
    of = found[answer.number]
    return simulate(problem, plan_of(answer.program, answer.choice, problem, of.options, of.order)).seconds
