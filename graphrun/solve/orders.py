"""Programs to solve for a problem: every stage order with every combination of stage options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, pairwise, product

from graphrun.model.choices import reorder, stages_of
from graphrun.model.problem import Problem
from graphrun.solve.dominance import undominated_variants
from graphrun.solve.milp import Formulation
from graphrun.solve.program import Program
from graphrun.solve.programs import program_of

# Limit of orders times options. Graphs of stages are nearly chains; four independent encoders make
# 24 orders.
MOST_STAGE_CHOICES = 512
# Limit of columns of all programs, about 10 s. FEW_STAGE_CHOICES are always solved.
MOST_STAGE_COLUMNS, FEW_STAGE_CHOICES = 2**16, 24


@dataclass(frozen=True, slots=True)
class StageChoice:
    """A program, its stage ``order`` (empty: the problem's order) and its stage ``options``."""

    program: Program
    order: tuple[str, ...]
    options: tuple[tuple[str, str], ...]


def stage_choices(problem: Problem, *, dominated: bool = False) -> tuple[list[StageChoice], bool]:
    """Return the candidate programs of ``problem`` at its granularity, and whether they are all.

    The problem's order comes first. At most `MOST_STAGE_CHOICES` and `MOST_STAGE_COLUMNS`.
    ``dominated``: include variants that are not worth solving for.
    """
    original_order = stages_of(problem)
    option_names = [
        (
            "",
            *(
                option.name
                for option in problem.options
                if option.stage == stage and (not option.needs or option.needs in problem.allow)
            ),
        )
        for stage in original_order
    ]
    pairs = (
        (order, names) for order in topological_orders(problem) for names in product(*option_names)
    )
    pair_list = list(islice(pairs, MOST_STAGE_CHOICES + 1))
    choices, limit = list[StageChoice](), MOST_STAGE_CHOICES
    for order, names in pair_list[:MOST_STAGE_CHOICES]:
        if len(choices) == FEW_STAGE_CHOICES:
            limit = max(
                FEW_STAGE_CHOICES, MOST_STAGE_COLUMNS // Formulation(choices[0].program).model.size
            )
        if len(choices) >= limit:
            break
        options = tuple(
            (stage, name) for stage, name in zip(original_order, names, strict=True) if name
        )
        new_order = order if order != original_order else ()
        reordered = (
            reorder(problem, new_order, dict(options))
            if new_order or options
            else replace(problem, precedence=None, options=())
        )
        choices.append(
            StageChoice(
                program_of(
                    reordered, None if dominated else undominated_variants(reordered), split=True
                ),
                new_order,
                options,
            )
        )
    return choices, len(choices) == len(pair_list)


def topological_orders(problem: Problem) -> Iterator[tuple[str, ...]]:
    """Yield the stage orders that the precedence allows, at most `MOST_STAGE_CHOICES` + 1.

    Sorted by the stages' positions in the problem. A single order needs no import of networkx.
    """
    stages, pairs = stages_of(problem), problem.precedence
    places = {stage: place for place, stage in enumerate(stages)}
    is_valid = pairs is None or all(places[first] < places[second] for first, second in pairs)
    if is_valid:
        yield stages
    if pairs is None or (is_valid and all(pair in pairs for pair in pairwise(stages))):
        return
    import networkx

    order = networkx.DiGraph()
    order.add_nodes_from(reversed(stages))  # networkx begins with the last ready stage
    order.add_edges_from(pairs)
    orders = islice(map(tuple, networkx.all_topological_sorts(order)), MOST_STAGE_CHOICES + 1)
    other_orders = sorted(
        (candidate for candidate in orders if candidate != stages),
        key=lambda candidate: [places[stage] for stage in candidate],
    )
    yield from other_orders[:MOST_STAGE_CHOICES]
