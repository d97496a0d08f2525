"""Best plan so far when planning is interrupted, with a bound.

Within `recording_candidates`, the solver `offer`s candidates. They are checked only after the
interrupt, so offering is almost free.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from graphrun.model.plan import Plan
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.solve.granularity import granularities, split_as, splittable
from graphrun.solve.milp import Formulation
from graphrun.solve.orders import stage_choices
from graphrun.verify.solution import checked_solution


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its simulated seconds; ``problem`` may differ from the one to plan."""

    problem: Problem
    plan: Plan
    seconds: float
    objective_seconds: float
    bound_seconds: float


_CANDIDATES: ContextVar[list[Candidate] | None] = ContextVar("candidates", default=None)


@contextmanager
def recording_candidates() -> Iterator[list[Candidate]]:
    """Context that records the candidates which the solver offers."""
    candidates = list[Candidate]()
    token = _CANDIDATES.set(candidates)
    try:
        yield candidates
    finally:
        _CANDIDATES.reset(token)


def offer(candidate: Candidate) -> None:
    """Record ``candidate`` within `recording_candidates`; no effect outside."""
    if (candidates := _CANDIDATES.get()) is not None:
        candidates.append(candidate)


def best_of(candidates: list[Candidate], problem: Problem) -> Solution | None:
    """Return the fastest candidate that is valid for ``problem``, with a bound; None if none."""
    for candidate in sorted(candidates, key=lambda candidate: candidate.seconds):
        split = split_as(problem, candidate.problem)
        if candidate.problem.components != split.components:
            continue  # made for other copy or disk times (`graphrun.solve.pages.with_other_disk`)
        solution = checked_solution(
            split, replace(candidate.plan, problem=split.digest), 0.0, candidate.objective_seconds
        )
        if solution is not None and not solution.excess_page_overheads():
            bound = _bound_seconds(candidates, problem, solution.seconds)
            return replace(solution, bound_seconds=min(bound, candidate.objective_seconds))
    return None


def _bound_seconds(candidates: list[Candidate], problem: Problem, best_seconds: float) -> float:
    """Return a lower bound on the seconds of any plan for ``problem``. 0.0: unknown.

    ``best_seconds``: of the best candidate. Searches with blocks end before searches with layers
    begin. So once a search with layers has a candidate, only a plan with layers can be faster than
    ``best_seconds``, and the least bound of the searches with layers holds. A problem that cannot
    be split into layers has one search, whose bound holds. Without such a bound, or if it is above
    ``best_seconds``: the minimum over the relaxed programs at every granularity. Unknown if some
    orders of stages are left out.
    """
    if not stage_choices(problem)[1]:
        return 0.0
    bounds = list[float]()
    for candidate in candidates:
        split = split_as(problem, candidate.problem)
        is_finest = split is not problem or not splittable(problem)
        if is_finest and candidate.problem == split and candidate.bound_seconds:
            bounds.append(candidate.bound_seconds)
    if bounds and min(bounds) <= best_seconds:
        return min(bounds)
    bounds.clear()
    for split in granularities(problem):
        formulations = [
            Formulation(replace(choice.program, full_overlap=True))
            for choice in stage_choices(split)[0]
        ]
        relaxed = (
            (formulation, formulation.model.minimise(formulation.seconds, whole=False))
            for formulation in formulations
        )
        bounds += [
            result.value * formulation.seconds_unit
            for formulation, result in relaxed
            if result is not None
        ]
    return min(bounds, default=0.0)
