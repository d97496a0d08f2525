"""Every order of the stages and every way to run them: what there is to choose from before a program is written. Solves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, pairwise, product

from graphrun.model.choices import reorder, stages_of
from graphrun.model.problem import Problem

# Of orders times options. Graphs of stages are nearly chains: four independent encoders make 24 orders.
MOST_STAGE_CHOICES = 512


@dataclass(frozen=True, slots=True)
class StageChoice:
    """``problem`` with its stages in ``order`` (empty: as they are), run by ``options``."""

    problem: Problem
    order: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()


def stage_choices(problem: Problem) -> tuple[tuple[StageChoice, ...], bool]:
    """Every arrangement, the plainest first, and whether these are all: there may be more than `MOST_STAGE_CHOICES`."""
    plain = stages_of(problem)
    choices = [("", *(of.name for of in problem.options if of.stage == stage and _allowed(problem, of.needs))) for stage in plain]
    every = ((order, names) for order in topological_orders(problem) for names in product(*choices))
    found = []
    for order, names in islice(every, MOST_STAGE_CHOICES + 1):
        options = tuple((stage, name) for stage, name in zip(plain, names, strict=True) if name)
        asked = order if order != plain else ()
        found.append(StageChoice(_reordered(problem, asked, options), asked, options))
    return tuple(found[:MOST_STAGE_CHOICES]), len(found) <= MOST_STAGE_CHOICES


def topological_orders(problem: Problem) -> Iterator[tuple[str, ...]]:
    """The orders of stages that the precedence allows, at most `MOST_STAGE_CHOICES` + 1 of them.

    The problem's own comes first, the others sorted by the places that stages have in it. A chain has its own order alone; for
    others networkx is imported.
    """
    stages, pairs = stages_of(problem), problem.precedence
    yield stages
    if pairs is None or all(pair in pairs for pair in pairwise(stages)):
        return
    import networkx

    places = {stage: place for place, stage in enumerate(stages)}
    order = networkx.DiGraph()
    order.add_nodes_from(reversed(stages))  # it begins with the last that is ready
    order.add_edges_from(pairs)
    found = islice(map(tuple, networkx.all_topological_sorts(order)), MOST_STAGE_CHOICES + 1)
    others = sorted((each for each in found if each != stages), key=lambda each: [places[stage] for stage in each])
    yield from others[:MOST_STAGE_CHOICES]


def _allowed(problem: Problem, needs: str) -> bool:
    return not needs or needs in problem.allow


def _reordered(problem: Problem, order: tuple[str, ...], options: tuple[tuple[str, str], ...]) -> Problem:
    if not order and not options:
        return replace(problem, precedence=None, options=())
    return reorder(problem, order, dict(options))
