"""Best integers of a session. In a session of many runs, a further run is solved before the first.

    single further run   starts with the blocks that it leaves        seconds, bytes moved, memory
    single first run     ends with the blocks the further run needs   the same goals

Each has half the columns of a program of both runs, which takes several times as long to solve. The
relaxation of the first run and the bound of the further run together bound the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from graphrun.model.choices import BUFFERED_BLOCKS
from graphrun.model.problem import Problem
from graphrun.solve.milp import Formulation
from graphrun.solve.program import Choice, Program
from graphrun.solve.programs import program_of
from graphrun.solve.rows import excess_bytes, rows_of
from graphrun.solve.search import GOALS, Answer, Goal, choose

# From here on, the first run is at most about a hundredth of the session. Its seconds would only
# decide between equally fast further runs.
MANY_RUNS = 100
MOST_GAP = 1e-2  # relative, of all runs


def many_runs(problem: Problem) -> bool:
    """Whether the session has so many runs that the further runs decide."""
    return problem.runs >= MANY_RUNS


def choose_for(
    programs: Sequence[Program],
    goals: Sequence[Goal] = GOALS,
    depth: int = BUFFERED_BLOCKS,
    neighbour: Choice | None = None,
) -> Answer | None:
    """Return `choose` over formulations of ``programs``.

    In a session of many runs, the further run is the best by ``goals``, and all runs together are
    within MOST_GAP of the best. With a ``neighbour``, they are solved run by run or not at all.
    """
    if many_runs(programs[0].problem):
        answer = _in_turn(programs, goals, depth, neighbour)
        if answer is not None or neighbour is not None:
            return answer
    formulations = [Formulation(program, depth=depth, neighbour=neighbour) for program in programs]
    return choose(formulations, goals)


def _in_turn(
    programs: Sequence[Program], goals: Sequence[Goal], depth: int, neighbour: Choice | None
) -> Answer | None:
    """Solve the further run, then the first run.

    None if one has no answer, if they exceed a budget together, or if the first run may be much
    longer than the best one, for example with a variant that is slow to read.
    """

    def of_run(
        program: Program, run: Literal["first", "further"], leaves: Sequence[int] = ()
    ) -> Formulation:
        length = program.run_length
        intervals = slice(length) if run == "first" else slice(length, None)
        run_neighbour = neighbour and neighbour.blocks_in(intervals)
        single_run = program.single_run(run)
        return Formulation(single_run, depth=depth, leaves=leaves, neighbour=run_neighbour)

    further_answer = choose([of_run(program, "further") for program in programs], goals)
    if further_answer is None:
        return None
    program = program_of(
        further_answer.program.problem,
        [(variant_choice.index,) for variant_choice in further_answer.program.variant_choices],
    )
    leaves = further_answer.choice.present[0].tolist()
    first = choose([of_run(program, "first", leaves)], goals)
    if first is None:
        return None
    first_choice, further_choice = first.choice, further_answer.choice
    present, loads, depths = np.concatenate(
        [
            (first_choice.present, first_choice.loads, first_choice.depths),
            (further_choice.present, further_choice.loads, further_choice.depths),
        ],
        axis=1,
    )
    choice = Choice(
        present,
        loads,
        depths,
        first_choice.reads,
        first_choice.drops,
        (*first_choice.spills, *further_choice.spills),
    )
    relaxed = (Formulation(program.single_run("first"), depth=depth) for program in programs)
    bounds = [
        result.value * formulation.seconds_unit
        for formulation in relaxed
        if (result := formulation.model.minimise(formulation.seconds, whole=False)) is not None
    ]
    bound = min(bounds, default=0.0) + (program.problem.runs - 1) * further_answer.bound
    if excess_bytes(program, choice) or (
        goals is GOALS and rows_of(program, choice).seconds() * (1 - MOST_GAP) > bound
    ):
        return None
    return replace(further_answer, program=program, choice=choice, bound=bound)
