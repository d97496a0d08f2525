"""The best integers of a session. Where it has many runs, those of the further run are found first,
then those of the first run.

    further run alone    begins with what it leaves             seconds, bytes moved, memory
    first run alone      leaves what the other begins with      the same

Each has half the columns of one program of both runs, which takes several times as long to solve.
What is lost is known: the relaxation of the first run and the bound of the further one are a bound
on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from graphrun.model.choices import BUFFERED_BLOCKS
from graphrun.model.problem import Problem
from graphrun.solve.milp import Formulation
from graphrun.solve.program import Choice, Program, program_of
from graphrun.solve.search import GOALS, Answer, Goal, choose

MANY_RUNS = 100  # the first run is a hundredth of the session, or a tie-break
MOST_GAP = 1e-2  # relative, of all runs


def many_runs(problem: Problem) -> bool:
    """Whether the further runs decide."""
    return problem.runs >= MANY_RUNS


def choose_for(
    programs: Sequence[Program],
    factors: Sequence[float] = (),
    goals: Sequence[Goal] = GOALS,
    depth: int = BUFFERED_BLOCKS,
) -> Answer | None:
    """As `choose` over the formulations of ``programs``, of which each has the copy times
    ``factors`` and the ring buffer ``depth``. Of many runs, the further one is the best by
    ``goals``, and all together are within MOST_GAP of the best."""
    found = _in_turn(programs, factors, goals, depth) if many_runs(programs[0].problem) else None
    return found or choose(
        [Formulation(program, factors, depth=depth) for program in programs], goals
    )


def _in_turn(
    programs: Sequence[Program], factors: Sequence[float], goals: Sequence[Goal], depth: int
) -> Answer | None:
    """The answer found one run after the other. None where there is none, host memory does not
    allow it, or the first run may be much longer than the best one, such as with a variant that is
    slow to read."""
    length = programs[0].run_length
    further = choose(
        [Formulation(of.alone("further"), factors[length:], depth=depth) for of in programs], goals
    )
    if further is None:
        return None
    program = program_of(
        further.program.problem, [(of.index,) for of in further.program.variant_choices]
    )
    leaves = further.choice.present[0].tolist()
    first = choose(
        [Formulation(program.alone("first"), factors[:length], depth=depth, leaves=leaves)], goals
    )
    if first is None:
        return None
    one, other = first.choice, further.choice
    present, loaded, depths = np.concatenate(
        [(one.present, one.loaded, one.depths), (other.present, other.loaded, other.depths)], axis=1
    )
    choice = Choice(present, loaded, depths, one.reads, one.drops, (*one.spills, *other.spills))
    relaxed = (Formulation(of.alone("first"), factors[:length], depth=depth) for of in programs)
    least = [
        found.value * of.seconds_unit
        for of in relaxed
        if (found := of.model.minimise(of.seconds, whole=False)) is not None
    ]
    bound = min(least, default=0.0) + (program.problem.runs - 1) * further.bound
    if program.excess_bytes(choice) or (
        goals is GOALS and program.seconds(choice, factors) * (1 - MOST_GAP) > bound
    ):
        return None
    return replace(further, program=program, choice=choice, bound=bound)
