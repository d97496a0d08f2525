"""The programs to solve for a problem: every order of the stages with every combination of stage
options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, pairwise, product

from graphrun.model.choices import reorder, stages_of
from graphrun.model.problem import Problem
from graphrun.solve.dominance import undominated_variants
from graphrun.solve.milp import Formulation
from graphrun.solve.program import Program, program_of

# Of orders times options. Graphs of stages are nearly chains: four independent encoders make 24
# orders.
MOST_STAGE_CHOICES = 512
# Columns of the programs of all of them together, which take about 10 s; but FEW_STAGE_CHOICES are
# solved whatever they take.
MOST_STAGE_COLUMNS, FEW_STAGE_CHOICES = 2**16, 24


@dataclass(frozen=True, slots=True)
class StageChoice:
    """The program of a problem with its stages in ``order`` (empty: as they are), run by
    ``options``."""

    program: Program
    order: tuple[str, ...]
    options: tuple[tuple[str, str], ...]


def stage_choices(problem: Problem, *, dominated: bool = False) -> tuple[list[StageChoice], bool]:
    """The candidate programs of ``problem`` at its granularity: every order with every combination
    of options, own order first; and whether these are all (see `MOST_STAGE_CHOICES`,
    `MOST_STAGE_COLUMNS`). ``dominated``: with all usable variants, not only those worth solving
    for."""
    plain = stages_of(problem)
    choices = [
        (
            "",
            *(
                of.name
                for of in problem.options
                if of.stage == stage and (not of.needs or of.needs in problem.allow)
            ),
        )
        for stage in plain
    ]
    pairs = ((order, names) for order in topological_orders(problem) for names in product(*choices))
    every = list(islice(pairs, MOST_STAGE_CHOICES + 1))
    found, most = list[StageChoice](), MOST_STAGE_CHOICES
    for order, names in every[:MOST_STAGE_CHOICES]:
        if len(found) == FEW_STAGE_CHOICES:
            most = max(
                FEW_STAGE_CHOICES, MOST_STAGE_COLUMNS // Formulation(found[0].program).model.size
            )
        if len(found) >= most:
            break
        options = tuple((stage, name) for stage, name in zip(plain, names, strict=True) if name)
        asked = order if order != plain else ()
        of = (
            reorder(problem, asked, dict(options))
            if asked or options
            else replace(problem, precedence=None, options=())
        )
        found.append(
            StageChoice(
                program_of(of, None if dominated else undominated_variants(of), split=True),
                asked,
                options,
            )
        )
    return found, len(found) == len(every)


def topological_orders(problem: Problem) -> Iterator[tuple[str, ...]]:
    """The orders of stages that the precedence allows, at most `MOST_STAGE_CHOICES` + 1 of them.

    They are sorted by the places that stages have in the problem's own order. Where that is the
    only one, networkx is not imported.
    """
    stages, pairs = stages_of(problem), problem.precedence
    places = {stage: place for place, stage in enumerate(stages)}
    own = pairs is None or all(places[earlier] < places[later] for earlier, later in pairs)
    if own:
        yield stages
    if pairs is None or (own and all(pair in pairs for pair in pairwise(stages))):
        return
    import networkx

    order = networkx.DiGraph()
    order.add_nodes_from(reversed(stages))  # networkx begins with the last stage that is ready
    order.add_edges_from(pairs)
    found = islice(map(tuple, networkx.all_topological_sorts(order)), MOST_STAGE_CHOICES + 1)
    others = sorted(
        (each for each in found if each != stages),
        key=lambda each: [places[stage] for stage in each],
    )
    yield from others[:MOST_STAGE_CHOICES]
