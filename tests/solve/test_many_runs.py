"""Sessions of many runs are solved one run after the other: programs of half the size, and further
runs that are as good."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from campaign import sampled
from test_solve_oracle import random_problem
from test_transitions import K, two_phases

from graphrun.solve import linear
from graphrun.solve.fastest import TOLERANCE, find, find_near
from graphrun.solve.milp import NEAR, Formulation
from graphrun.solve.orders import stage_choices
from graphrun.solve.program import Choice, Program
from graphrun.solve.rows import excess_bytes, rows_of
from graphrun.solve.search import choose
from graphrun.solve.sessions import choose_for
from graphrun.solve.solve import solve


def test_no_program_is_larger_than_that_of_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, sizes, run = two_phases(7 * K), list[int](), linear._run

    def counted(lp: Any, *arguments: Any) -> Any:
        sizes.append(lp.num_col_)
        return run(lp, *arguments)

    monkeypatch.setattr(linear, "_run", counted)
    single_run = solve(replace(problem, runs=1))
    largest, count = max(sizes), len(sizes)
    sizes.clear()
    session = solve(problem)
    assert max(sizes) <= largest
    assert len(sizes) <= 3 * count
    assert session.simulation.further_moved_bytes < single_run.simulation.moved_bytes


@pytest.mark.parametrize("seed", sampled(range(60), [3, 17, 21], "many runs"))
def test_further_runs_are_as_fast_and_move_as_little_as_in_one_program_of_both_runs(
    seed: int,
) -> None:
    programs = [
        stage_choice.program
        for stage_choice in stage_choices(replace(random_problem(seed), runs=100))[0]
    ]
    joint, stepwise = choose([Formulation(program) for program in programs]), choose_for(programs)
    if joint is None or stepwise is None:
        assert joint is stepwise is None
        return
    (minimum, least_bytes), (seconds, nbytes) = (
        further(answer.program, answer.choice) for answer in (joint, stepwise)
    )
    assert seconds <= minimum * (1 + 1e-5)
    assert nbytes <= least_bytes or seconds < minimum * (1 - 1e-5)
    assert stepwise.bound <= joint.rows.seconds() * (1 + 1e-5)
    assert not excess_bytes(stepwise.program, stepwise.choice)


def test_a_plan_near_another_is_near_it_in_both_runs() -> None:
    problem = two_phases(9 * K)
    previous = find(problem)
    assert previous is not None
    for budget_bytes in (8 * K, 6 * K):
        result = find_near(replace(problem, budget_bytes=budget_bytes), previous)
        assert result is not None
        assert previous.choice is not None
        assert result.choice is not None
        assert abs(result.choice.present - previous.choice.present).max() <= NEAR
        assert abs(result.choice.loads - previous.choice.loads).max() <= NEAR
        assert result.seconds <= TOLERANCE * previous.seconds
        assert result.solution.simulation.peak_bytes <= budget_bytes
    assert find_near(replace(problem, budget_bytes=4 * K), previous) is None


def further(program: Program, choice: Choice) -> tuple[float, int]:
    """Seconds of the further run, and the bytes that it moves."""
    rows, slots = rows_of(program, choice), range(program.run_length, len(program.intervals))
    nbytes = sum(
        rows.copied_blocks(t, j) * group.block_bytes
        for t in slots
        for j, group in enumerate(program.groups)
    )
    return sum(map(rows.slot_seconds, slots)), int(nbytes)
