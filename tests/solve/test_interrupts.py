"""Ctrl-C while planning: HiGHS stops, and the best plan so far is known with a bound that holds."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from campaign import sampled
from planner_problems import GIB, MIB, flux

from graphrun.errors import PlanningInterrupted
from graphrun.solve import fastest, interrupts, linear, solve
from graphrun.solve.interrupts import Candidate, best_of, recording_candidates
from graphrun.verify.check import check


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    """That of a process with a terminal: a shell has its background jobs ignore interrupts."""
    old_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old_handler)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def hard_program() -> tuple[linear.MilpModel, linear.Linear]:
    """A market split problem of 5 rows and 40 columns, which branch and bound enumerates for
    hours."""
    model, numbers = linear.MilpModel(0.0), np.random.default_rng(1).integers(0, 100, (5, 40))
    columns, excess = [model.binary() for _ in range(40)], []
    for row in numbers:
        positive, negative = model.column(), model.column()
        excess += [positive, negative]
        distance = linear.total(
            [column * float(number) for column, number in zip(columns, row, strict=True)]
        )
        model.add((distance + positive - negative).equals(float(row.sum() // 2)))
    return model, linear.total(excess)


def test_ctrl_c_stops_the_solver_in_the_middle_of_a_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, solvers = list[int](), list[Any]()
    run = linear._Quiet.run

    def interrupted(self: Any) -> Any:
        solvers.append(weakref.ref(self))

        def called(event: Any) -> None:
            calls.append(1)
            if len(calls) == 20:
                interrupt()

        self.cbMipInterrupt.subscribe(called)
        try:
            return run(self)
        finally:
            self.cbMipInterrupt.unsubscribe(called)

    monkeypatch.setattr(linear._Quiet, "run", interrupted)
    model, goal = hard_program()
    with pytest.raises(KeyboardInterrupt):
        model.minimise(goal)
    assert 20 <= len(calls) < 200
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_process_is_left_alone_and_called(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = list[int]()
    signal.signal(signal.SIGINT, lambda number, frame: codes.append(number))
    run = linear._Quiet.run
    monkeypatch.setattr(linear._Quiet, "run", lambda self: (interrupt(), run(self))[1])
    model = linear.MilpModel(0.0)
    column = model.binary()
    model.add(column >= 0.5)
    result = model.minimise(column)
    assert (result is not None and result.value, codes) == (1.0, [signal.SIGINT])


def test_a_solver_is_freed_without_garbage_collection() -> None:
    instances, init = list[Any](), linear._Quiet.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            linear._Quiet,
            "__init__",
            lambda self: (init(self), instances.append(weakref.ref(self)))[0],
        )
        gc.disable()
        try:
            model = linear.MilpModel(0.0)
            model.minimise(model.column(1.0))
            assert [solver() for solver in instances] == [None]
        finally:
            gc.enable()


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    sampled(["flux-tiny", "blocks", "flux-dev", "session"], ["flux-tiny", "blocks"], "interrupts"),
)
def test_after_a_candidate_the_best_plan_so_far_fits_and_its_bound_holds(
    name: str, make_problem: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first, the middle and the last one are interrupted, by a signal."""
    if name == "blocks":
        problem = flux(8 * GIB, steps=4)
    elif name == "flux-tiny":
        problem = make_problem(name, 6 * MIB, hardware="sim:pages=0.0005")
    else:
        problem = replace(
            make_problem("flux-dev", 8 * GIB, hardware="rtx4090"),
            runs=8 if name == "session" else 1,
        )
    offer, offered = interrupts.offer, list[Candidate]()
    monkeypatch.setattr(
        fastest, "offer", lambda candidate: (offered.append(candidate), offer(candidate))[1]
    )
    final = solve.solve(problem)
    count, bounded_count = len(offered), 0
    assert count > 1
    for number in sorted({1, count // 2, count}):
        offered.clear()

        def until(candidate: Candidate, number: int = number) -> None:
            offered.append(candidate)
            offer(candidate)
            if len(offered) == number:
                interrupt()

        monkeypatch.setattr(fastest, "offer", until)
        with pytest.raises(PlanningInterrupted) as error_info:
            solve.solve(problem)
        best = error_info.value.best()
        assert not error_info.value.infeasible
        if best is not None:
            bounded_count += 1
            assert check(best.problem, best.plan) == ()
            assert best.excess_page_overheads() == {}
            assert best.simulation.peak_bytes <= problem.effective_bytes
            final_seconds, seconds = final.simulation.total_seconds, best.simulation.total_seconds
            assert 0 < best.bound_seconds <= min(final_seconds, seconds)
            assert final_seconds <= seconds * fastest.TOLERANCE, "faster by less is not looked for"
            assert best.problem.budget_bytes == problem.budget_bytes
    assert bounded_count


def test_before_the_first_candidate_there_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solve, "solved", lambda problem: interrupt())
    with pytest.raises(PlanningInterrupted) as error_info:
        solve.solve(flux(8 * GIB))
    assert error_info.value.best() is None
    assert isinstance(error_info.value, KeyboardInterrupt), (
        "as Python's own: nothing swallows it by accident"
    )


def test_while_looking_for_what_helps_it_is_known_that_nothing_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(solve, "refusal", lambda problem: interrupt())
    with pytest.raises(PlanningInterrupted) as error_info:
        solve.solve(flux(GIB))
    assert error_info.value.infeasible
    assert error_info.value.best() is None


def test_a_candidate_for_other_times_or_beyond_the_budget_is_no_plan() -> None:
    problem = flux(8 * GIB, steps=4)
    with recording_candidates() as candidates:
        solve.solved(problem)
    assert best_of(candidates, problem) is not None
    assert best_of(candidates, replace(problem, budget_bytes=GIB)) is None
    coarse_candidates = [
        replace(
            candidate,
            problem=replace(candidate.problem, components=candidate.problem.components[:1]),
        )
        for candidate in candidates
    ]
    assert best_of(coarse_candidates, problem) is None


def test_a_bound_holds_for_every_search_and_for_plans_that_simulate_faster() -> None:
    problem = flux(8 * GIB, steps=4)
    with recording_candidates() as candidates:
        solve.solved(problem)
    best = best_of(candidates, problem)
    assert best is not None
    assert best.bound_seconds <= best.seconds
    first, last = candidates[0], candidates[-1]
    lower = 0.5 * best.bound_seconds
    for searches in (
        [replace(first, bound_seconds=best.bound_seconds), replace(last, bound_seconds=lower)],
        [replace(first, bound_seconds=lower), replace(last, bound_seconds=best.bound_seconds)],
    ):
        solution = best_of(searches, problem)
        assert solution is not None
        assert solution.bound_seconds == lower
    too_high = [
        replace(candidate, bound_seconds=2 * best.seconds, objective_seconds=3 * best.seconds)
        for candidate in candidates
    ]
    solution = best_of(too_high, problem)
    assert solution is not None
    assert 0 < solution.bound_seconds <= solution.seconds
