"""What a problem would take, shortly: one answer in seconds, by the program alone, for the sake of comparison."""

from __future__ import annotations

from graphrun.planner.cut import until_it_fits
from graphrun.planner.least import chosen_from, least_needs_of
from graphrun.planner.orders import arrangements
from graphrun.planner.problem import Problem
from graphrun.planner.program import program_of
from graphrun.planner.search import SECONDS, choose
from graphrun.planner.variants import worthwhile


def predicted_seconds(problem: Problem) -> float | None:
    """Seconds of the fastest plan for ``problem``; None where nothing fits."""
    return until_it_fits(problem, _seconds, least_needs_of) if chosen_from(problem) else None


def _seconds(problem: Problem) -> float | None:
    found, _ = arrangements(problem)
    answer = choose([program_of(of.problem, worthwhile(of.problem)) for of in found], goals=SECONDS)
    return None if answer is None else answer.program.seconds(answer.choice)
