"""Runs of a session's plan that begin with blocks which other plans left: valid, and blocks that
both plans keep are not moved."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from campaign import sampled
from planner_problems import component, hardware, problem
from test_solve_oracle import random_problem

from graphrun.model.plan import Evict, Load, parse
from graphrun.model.problem import PhaseNumbers, Problem, Use
from graphrun.model.solution import Solution
from graphrun.solve.infeasible import smallest_budget
from graphrun.solve.solve import solve
from graphrun.solve.transitions import continued
from graphrun.verify.check import check
from graphrun.verify.simulate import simulate

K = 1024


def two_phases(budget_bytes: int) -> Problem:
    """A text encoder that must be whole, then a transformer of six blocks in four calls."""
    te, dit = (
        component("te", ("unblocked", 1, 2 * K, False)),
        component("dit", ("block", 6, K), ("unblocked", 1, K, False)),
    )
    phases = (
        PhaseNumbers("encode", 0, (Use("te", 1, (1,), (1.0,)),), 0, 512, 0),
        PhaseNumbers("denoise", 0, (Use("dit", 4, (4, 4), (1.0, 1.0)),), 0, 512, 512),
    )
    return replace(problem(budget_bytes, (te, dit), phases, card=hardware()), runs=100)


def moved(solution: Solution) -> set[tuple[str, str, int]]:
    """(component, group, index) of the blocks that the first run loads or evicts."""
    keys = set()
    for action in (
        action
        for slot in solution.plan.slots
        for action in slot.actions
        if isinstance(action, Load | Evict)
    ):
        groups = solution.chosen.component(action.component).groups
        blocks = (
            action.blocks
            if action.blocks is not None
            else [(group.name, tuple(range(len(group.blocks)))) for group in groups]
        )
        keys |= {(action.component, name, index) for name, indices in blocks for index in indices}
    return keys


def test_a_run_that_finds_what_its_plan_keeps_moves_nothing_and_says_what_it_finds_and_leaves() -> (
    None
):
    solution = solve(two_phases(20 * K))
    warm = continued(
        solution,
        {
            c.name: [path for group in c.groups for path in group.blocks]
            for c in solution.chosen.components
        },
    )
    assert warm.simulation.moved_bytes == 0
    assert str(warm.plan).splitlines()[1:5] == [
        "finds te all",
        "finds dit all",
        "leaves te all",
        "leaves dit all",
    ]
    assert parse(str(warm.plan)) == warm.plan
    assert continued(solution, {}) is solution


def test_blocks_of_another_plan_are_evicted_for_room_and_missing_ones_are_loaded() -> None:
    solution = solve(two_phases(8 * K))
    paths = [path for group in solution.chosen.component("dit").groups for path in group.blocks]
    warm = continued(solution, {"dit": paths})
    assert not check(solution.problem, warm.plan)
    assert warm.simulation.peak_bytes <= solution.problem.effective_bytes
    assert warm.simulation.moved_bytes < solution.simulation.moved_bytes
    assert warm.simulation.further_slots == solution.simulation.further_slots


def test_only_as_many_blocks_of_other_plans_stay_as_fit_in_every_slot() -> None:
    """No phase runs the four blocks that the other plan left. Two fit."""
    dit = component("dit", ("block", 2, K), ("unused", 4, K))
    phases = (PhaseNumbers("denoise", 0, (Use("dit", 2, (2, 0), (1.0, 1.0)),), 0, 512, 512),)
    budget_bytes = 2 * K + 512 + 2 * K
    solution = solve(replace(problem(budget_bytes, (dit,), phases, card=hardware()), runs=100))
    warm = continued(solution, {"dit": dit.groups[1].blocks})
    assert check(solution.problem, warm.plan) == ()
    assert str(warm.plan).splitlines()[1:3] == [
        "finds dit unused[0-3]",
        "leaves dit block[0,1] unused[0,1]",
    ]


@pytest.mark.parametrize("seed", sampled(range(400), range(12), "warm"))
def test_random_plans_continue_from_what_random_blocks_others_left(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(seed)
    problem = replace(
        problem,
        runs=100,
        components=tuple(
            replace(c, variants=(replace(c.variants[0], movable=True),)) for c in problem.components
        ),
    )
    least_bytes = smallest_budget(problem)
    assert least_bytes is not None
    solution = solve(replace(problem, budget_bytes=int(least_bytes * rng.choice((1.0, 1.2, 2.0)))))
    components = solution.chosen.components
    keys = {
        c.name: [path for k in c.groups for path in k.blocks if rng.random() < 0.5]
        for c in components
    }
    warm = continued(solution, keys)
    assert check(solution.problem, warm.plan) == ()
    assert warm.simulation == simulate(solution.problem, warm.plan)
    assert warm.simulation.peak_bytes <= solution.problem.effective_bytes
    assert parse(str(warm.plan)) == warm.plan
    leaves = {name: blocks for name, blocks in solution.plan.leaves}
    further_keys = {
        (a.component, a.blocks)
        for slot in solution.plan.further_slots
        for a in slot.actions
        if isinstance(a, Load | Evict)
    }
    kept_keys = {
        (c.name, k.name, i)
        for c in components
        for k in c.groups
        for i, path in enumerate(k.blocks)
        if c.name in leaves
        and (leaves[c.name] is None or i in dict(leaves[c.name] or ()).get(k.name, ()))
        and path in keys[c.name]
    }
    assert further_keys or not kept_keys & moved(warm)
