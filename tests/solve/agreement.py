"""What the solver's answer and the plan made from it have to be where brute force has found the
optimum."""

from __future__ import annotations

import pytest

from graphrun.model.plan import Plan, parse
from graphrun.model.problem import Problem
from graphrun.model.simulation import Simulation
from graphrun.solve.actions import plan_of
from graphrun.solve.orders import StageChoice
from graphrun.solve.search import Answer
from graphrun.verify.check import check
from graphrun.verify.simulate import simulate


def checked_optimum(
    problem: Problem, answer: Answer, stage_choice: StageChoice, best: tuple[float, int], seed: int
) -> tuple[Plan, Simulation]:
    """The plan of ``answer``, for the stage order and options ``chosen``, and its simulation. Fails
    unless seconds and bytes moved are those of the optimum ``best``, and the plan keeps every
    rule."""
    program, choice = answer.program, answer.choice
    assert answer.bound == pytest.approx(best[0], rel=1e-5, abs=1e-4), seed
    assert answer.rows.seconds() == pytest.approx(best[0], rel=1e-6, abs=1e-6), seed
    assert answer.rows.moved_bytes() == best[1], seed
    plan = plan_of(program, choice, problem, stage_choice.options, stage_choice.order)
    assert check(problem, plan) == (), seed
    assert parse(str(plan)) == plan, seed
    run = simulate(problem, plan)
    assert run.total_moved_bytes == best[1], seed
    assert run.peak_bytes <= problem.effective_bytes, seed
    return plan, run
