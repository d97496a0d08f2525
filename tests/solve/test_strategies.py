"""The search without its heuristics: its plans are valid, and never faster than proven possible."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from campaign import sampled
from planner_random import random_problem, with_secondaries

from graphrun.solve.pages import solved
from graphrun.solve.strategies import STRATEGIES, Strategy, has, without
from graphrun.units import GIB
from graphrun.verify.check import check
from graphrun.verify.solution import broken_rules

SEEDS = (40, 41, 42, 43, 44, 45, 46, 47, 49, 50, 51)


def test_switches_are_off_inside_their_context_only() -> None:
    with without("layers"), without("baselines", "near plans"):
        names = {strategy for strategy in STRATEGIES if not has(strategy)}
        assert names == {"layers", "baselines", "near plans"}
    assert all(map(has, STRATEGIES))


@pytest.mark.parametrize("seed", SEEDS)
def test_plans_without_any_strategy_are_valid_and_within_the_bound(seed: int) -> None:
    """One program and one simulation are left. With all strategies the same problems have plans."""
    make = with_secondaries if seed % 3 == 0 else random_problem
    problem = replace(make(seed), budget_bytes=GIB)
    best = solved(problem)
    assert best is not None
    with without(*STRATEGIES):
        plain = solved(problem)
    assert plain is not None
    assert check(plain.problem, plain.plan) == ()
    bound = best.bound_seconds * (1 - 1e-6)
    assert bound <= best.simulation.total_seconds
    assert bound <= plain.simulation.total_seconds


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy",
    sampled(["near plans", "reserved pages", "paged baselines"], ["near plans"], "pages"),
)
def test_pages_are_kept_without_a_strategy(strategy: Strategy, make_problem: Any) -> None:
    """FLUX.1-dev in 8 GiB, whose first plan reserves more pages than that."""
    problem = make_problem("flux-dev", 8 * GIB, hardware="rtx4090")
    with without(strategy):
        solution = solved(problem)
    assert solution is not None
    assert broken_rules(solution.problem, solution.plan) == ()
