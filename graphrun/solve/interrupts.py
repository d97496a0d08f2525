"""What is known where planning is interrupted: the best plan so far, and a bound on how much faster
another may be.

While `collecting`, the solver `offer`s its candidates, which costs next to nothing: they are judged
after the interrupt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from graphrun.model.plan import Plan
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.solve.granularity import granularities, split_into_layers, splittable
from graphrun.solve.milp import Formulation
from graphrun.solve.orders import stage_choices
from graphrun.verify.solution import checked_solution


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan for ``problem``, which may have less memory or other times than the one to be planned.
    ``seconds``: simulated."""

    problem: Problem
    plan: Plan
    seconds: float
    objective_seconds: float
    bound_seconds: float


_CANDIDATES: ContextVar[list[Candidate] | None] = ContextVar("candidates", default=None)


@contextmanager
def collecting() -> Iterator[list[Candidate]]:
    """A context in which the candidates that are offered are kept."""
    candidates = list[Candidate]()
    token = _CANDIDATES.set(candidates)
    try:
        yield candidates
    finally:
        _CANDIDATES.reset(token)


def offer(candidate: Candidate) -> None:
    """Keep ``candidate`` if candidates are collected."""
    if (candidates := _CANDIDATES.get()) is not None:
        candidates.append(candidate)


def best_of(candidates: list[Candidate], problem: Problem) -> Solution | None:
    """The fastest of ``candidates`` that is a plan for ``problem``, with a bound on any plan; None
    where none is."""
    for candidate in sorted(candidates, key=lambda each: each.seconds):
        split = as_in(problem, candidate)
        if candidate.problem.components != split.components:
            continue  # with other times
        solution = checked_solution(
            split, replace(candidate.plan, problem=split.digest), 0.0, candidate.objective_seconds
        )
        if solution is not None and not solution.short_of_pages():
            bound = min(_bound_seconds(candidates, problem), candidate.objective_seconds)
            return replace(solution, bound_seconds=bound)
    return None


def as_in(problem: Problem, candidate: Candidate) -> Problem:
    """``problem`` with the components split into layers that ``candidate`` has so."""
    return split_into_layers(
        problem, {c.name for c in candidate.problem.components if c.granularity == "layers"}
    )


def _bound_seconds(candidates: list[Candidate], problem: Problem) -> float:
    """A lower bound on the seconds of any plan for ``problem``: that of a search among layers, else
    of the programs' relaxations at every granularity. 0.0 where not every order of the stages is
    considered."""
    if not stage_choices(problem)[1]:
        return 0.0
    for candidate in candidates:
        split = as_in(problem, candidate)
        if (split is not problem or not splittable(problem)) and candidate.problem == split:
            return candidate.bound_seconds
    bounds = list[float]()
    for split in granularities(problem):
        formulations = [
            Formulation(replace(choice.program, full_overlap=True))
            for choice in stage_choices(split)[0]
        ]
        relaxed = ((of, of.model.minimise(of.seconds, whole=False)) for of in formulations)
        bounds += [found.value * of.seconds_unit for of, found in relaxed if found is not None]
    return min(bounds, default=0.0)
