"""The solver against brute force on random problems with every kind of choice: same feasibility,
seconds and bytes moved.

The solver's first choice is compared, before copy times are raised. Its plan passes `check`, and
`simulate` finds the same bytes.
"""

from __future__ import annotations

from collections import Counter

import pytest
from agreement import checked_optimum
from campaign import sampled
from planner_oracle import Oracle
from planner_random import random_problem

from graphrun.solve.bounds import surely_short
from graphrun.solve.infeasible import Infeasible
from graphrun.solve.least import smallest_tensor_budget
from graphrun.solve.milp import Formulation
from graphrun.solve.orders import stage_choices
from graphrun.solve.search import choose
from graphrun.solve.solve import solve
from graphrun.verify.check import check

pytestmark = pytest.mark.long

SEEDS = 1000


BLOCKS = [range(start, start + 50) for start in range(0, SEEDS, 50)]
EVERY_20TH = [range(start, SEEDS, 20) for start in (0, 10)]


@pytest.mark.parametrize("seeds", sampled(BLOCKS, BLOCKS[:2], "random", of_all=6), ids=str)
def test_solver_agrees_with_brute_force(seeds: range) -> None:
    for seed in seeds:
        problem = random_problem(seed)
        best = Oracle(problem).best(problem.effective_bytes)
        choices, is_complete = stage_choices(problem, dominated=True)
        answer = choose([Formulation(reordered.program) for reordered in choices])
        assert (answer is None) == (best is None), f"{seed}: feasible is {best is not None}"
        assert best is None or not surely_short(problem), f"{seed}: a lower bound is none"
        if answer is None or best is None:
            continue
        assert is_complete, seed
        plan, run = checked_optimum(problem, answer, choices[answer.number], best, seed)
        assert run.host_peak_bytes <= problem.ram_bytes, seed
        assert problem.pinned_bytes is None or run.pinned_peak_bytes <= problem.pinned_bytes, seed
        assert all(slot.seconds >= slot.compute_seconds - 1e-9 for slot in run.all_slots), seed


@pytest.mark.parametrize("seeds", sampled(EVERY_20TH, EVERY_20TH[:1], "random"), ids=str)
def test_solve_reports_the_same_optimum(seeds: range) -> None:
    for seed in seeds:
        problem = random_problem(seed)
        best = Oracle(problem).best(problem.effective_bytes)
        if best is None:
            continue  # explanations have tests of their own, and take solves
        solution = solve(problem)
        if (simulated := solution.simulation.total_seconds) < best[0] * (
            1 - 1e-6
        ):  # copies overlap what brute force leaves out
            assert 0 < solution.bound_seconds <= simulated * (1 + 1e-6), seed
        else:
            assert solution.bound_seconds == pytest.approx(best[0], rel=1e-5, abs=1e-4), seed
        assert solution.objective_seconds >= best[0] - 1e-6, seed
        assert check(problem, solution.plan) == (), seed


def test_lower_bounds_of_memory_are_at_most_the_minimum() -> None:
    """Some of them show without a solve that nothing fits; by brute force, a third has no plan."""
    short = 0
    for seed in range(0, SEEDS, 40):
        problem = random_problem(seed)
        short += bool(surely_short(problem))
        if smallest := smallest_tensor_budget(problem):
            assert not surely_short(problem.with_budget(smallest)), seed
    assert short >= 2


@pytest.mark.sweep("more")
def test_problems_that_are_infeasible_by_brute_force_are_refused() -> None:
    for seed in range(0, 120, 5):
        problem = random_problem(seed)
        if Oracle(problem).best(problem.effective_bytes) is None:
            with pytest.raises(Infeasible):
                solve(problem)


def test_the_random_problems_cover_every_feature() -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        problem = random_problem(seed)
        variants = [variant for component in problem.components for variant in component.variants]
        counts["session"] += problem.runs > 1
        counts["orders"] += problem.precedence is not None
        counts["option"] += bool(problem.options)
        counts["directive"] += bool(problem.directives)
        counts["two phases in a stage"] += any(phase.index for phase in problem.phases)
        counts["a value that is not read at once"] += any(
            any(
                phase.stage not in value.consumers
                for phase in problem.phases[value.first_phase : value.last_phase]
            )
            and value.nbytes
            for value in problem.values
        )
        for backing_store in ("pageable", "disk"):
            counts[backing_store] += any(
                variant.backing_store == backing_store for variant in variants
            )
        counts["cpu"] += any(variant.device == "cpu" for variant in variants)
        counts["needs"] += any(variant.needs for variant in variants)
        counts["read"] += any(variant.read_seconds for variant in variants)
        counts["transient"] += any(variant.transient_bytes for variant in variants)
        counts["immovable"] += any(not variant.movable for variant in variants)
    assert min(counts.values()) >= SEEDS // 20, counts
