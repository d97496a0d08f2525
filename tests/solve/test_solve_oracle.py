"""The solver against brute force on small random problems: same seconds, bytes moved and smallest
budget."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from campaign import sampled
from planner_oracle import Oracle
from planner_problems import component, hardware, problem

from graphrun.errors import InputError
from graphrun.model.directives import directed
from graphrun.model.plan import Plan, parse
from graphrun.model.problem import (
    ComponentPlacement,
    Directive,
    PhaseNumbers,
    Problem,
    Use,
    ValueNumbers,
)
from graphrun.solve.actions import plan_of
from graphrun.solve.infeasible import Infeasible, smallest_budget
from graphrun.solve.milp import Formulation
from graphrun.solve.programs import program_of
from graphrun.solve.search import Answer, choose
from graphrun.solve.solve import solve
from graphrun.verify.check import check
from graphrun.verify.simulate import simulate

pytestmark = pytest.mark.long


def random_problem(seed: int) -> Problem:
    """Two or three components with one or two block groups, one to three phases, integer seconds so
    that ties are exact."""
    rng = random.Random(seed)
    size = lambda: rng.choice((512, 1024, 1536, 2048, 1000, 700, 256, 0))  # noqa: E731
    components = []
    for name in "abc"[: rng.choice((2, 2, 3))]:
        groups = [
            (f"k{i}", rng.choice((1, 2, 3)), size(), rng.random() < 0.8)
            for i in range(rng.choice((1, 2)) if name != "c" else 1)
        ]
        random_component = component(
            name, *groups, movable=rng.random() < 0.85, streamable=rng.random() < 0.9
        )
        loads = tuple(float(rng.randint(0, 4)) for _ in groups)
        components.append(
            replace(
                random_component,
                variants=(replace(random_component.variants[0], load_seconds=loads),),
            )
        )
    phases = []
    for index in range(rng.choice((1, 2, 2, 3))):
        uses = []
        for user in rng.sample(components, rng.choice((0, 1, 1, 1, 2))):
            calls = rng.choice((1, 1, 2, 5))
            group_calls = tuple(
                rng.choice((calls, calls, rng.randint(0, calls))) for _ in user.groups
            )
            uses.append(
                Use(
                    user.name,
                    calls,
                    group_calls,
                    tuple(float(rng.randint(0, 3)) for _ in user.groups),
                )
            )
        activation = rng.choice((0, 512, 1000, 2048))
        phases.append(
            PhaseNumbers(
                f"s{index}",
                0,
                tuple(uses),
                rng.choice((0, 100)),
                activation,
                rng.choice((activation, 0, 3000)),
            )
        )
    values = tuple(
        ValueNumbers(f"v{i}", rng.choice((0, 300)), "s0", ("s1",), 1, 1)
        for i in range(rng.choice((0, 1, 2)))
    )
    card = hardware(context_bytes=rng.choice((0, 4096)), workspace_bytes=rng.choice((0, 100)))
    return problem(2**20, tuple(components), tuple(phases), values, card=card)


def compared(
    seed: int, problem: Problem, oracle: Oracle
) -> tuple[Problem, Plan, Answer, tuple[float, float]]:
    """``of`` with a budget that suffices, the solver's plan and answer, and the oracle's least
    seconds and bytes, which are equal."""
    overhead = problem.budget_bytes - problem.effective_bytes
    minimum = oracle.smallest_effective()
    assert smallest_budget(problem) == minimum + overhead, seed
    spare = random.Random(seed).choice((0, 1, 512, 1500, 3000, 6000))
    fits = replace(problem, budget_bytes=minimum + overhead + spare)
    best, program = oracle.best(minimum + spare), program_of(fits)
    assert best is not None
    answer = choose([Formulation(program)])
    assert answer is not None
    assert answer.rows.seconds() == pytest.approx(best[0], abs=1e-6), seed
    assert answer.rows.moved_bytes() == best[1], seed
    return fits, plan_of(program, answer.choice), answer, best


@pytest.mark.parametrize(
    "seeds",
    sampled(
        (TWENTIES := [range(start, start + 20) for start in range(0, 120, 20)]),
        TWENTIES[:3],
        "random",
    ),
    ids=str,
)
def test_solver_agrees_with_brute_force(seeds: range) -> None:
    for seed in seeds:
        problem = random_problem(seed)
        oracle = Oracle(problem)
        fits, plan, answer, best = compared(seed, problem, oracle)
        assert answer.bound == pytest.approx(best[0], abs=1e-4), seed
        assert check(fits, plan) == (), seed
        assert parse(str(plan)) == plan, seed
        run = simulate(fits, plan)
        assert run.moved_bytes == best[1], seed
        assert run.peak_bytes <= fits.effective_bytes, seed
        assert oracle.best(run.peak_bytes - 1) != best, f"{seed}: a lower peak costs nothing"


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize("seeds", [range(start, start + 10) for start in range(0, 40, 10)], ids=str)
def test_a_byte_below_the_smallest_budget_is_infeasible(seeds: range) -> None:
    for seed in seeds:
        problem = random_problem(seed)
        smallest = smallest_budget(problem)
        solution = solve(replace(problem, budget_bytes=smallest))
        assert check(solution.problem, solution.plan) == (), seed
        with pytest.raises(Infeasible) as error_info:
            solve(replace(problem, budget_bytes=smallest - 1))
        assert error_info.value.smallest_budget_bytes == smallest, seed
        assert error_info.value.binding == "VRAM", seed
        assert max(need.short_bytes for need in error_info.value.needs) == 1, seed


def directed_problem(seed: int) -> Problem | None:
    """A random problem with one to three random directives; None where they cannot be obeyed."""
    problem, rng = random_problem(seed), random.Random(-seed)
    names = [component.name for component in problem.components]
    kinds: tuple[ComponentPlacement, ...] = ("keep", "exclude", "whole", "drop")
    try:
        return directed(
            problem,
            [
                Directive(rng.choice(kinds), rng.choice(names))
                for _ in range(rng.choice((1, 2, 2, 3)))
            ],
        )
    except InputError:
        return None


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize(
    "seeds", [range(start, start + 40) for start in range(1000, 1160, 40)], ids=str
)
def test_directives_are_obeyed_at_the_least_cost_that_brute_force_finds(seeds: range) -> None:
    for seed in seeds:
        problem = directed_problem(seed)
        if problem is None:
            continue
        fits, plan, _, best = compared(seed, problem, Oracle(problem))
        assert check(fits, plan) == (), seed
        assert simulate(fits, plan).moved_bytes == best[1], seed


@pytest.mark.sweep("more")
@pytest.mark.parametrize("seeds", [range(start, start + 15) for start in range(0, 60, 15)], ids=str)
def test_writing_new_memory_is_weighed_against_copies(seeds: range) -> None:
    """Of all peaks within the budget, the plan has the one with the least sum of the seconds of
    brute force and of `Hardware.first_touch_seconds` for each byte."""
    preferred_less = 0
    for seed in seeds:
        problem = random_problem(seed)
        overhead = problem.budget_bytes - problem.effective_bytes
        oracle, byte_seconds = Oracle(problem), random.Random(seed).choice((1e-3, 4e-3, 1e-2))
        budget = oracle.smallest_effective() + 6000
        costs, peak = list[float](), budget
        while (best := oracle.best(peak)) is not None:
            fits = replace(problem, budget_bytes=peak + overhead)
            answer = choose([Formulation(program_of(fits))])
            assert answer is not None
            peak = int(answer.rows.peak_bytes(0))
            costs.append(best[0] + byte_seconds * peak)
            peak -= 1
        card = replace(problem.hardware, first_touch_seconds=byte_seconds)
        touching = replace(problem, hardware=card, budget_bytes=budget + overhead)
        answer = choose([Formulation(program_of(touching))])
        assert answer is not None
        assert answer.rows.seconds() == pytest.approx(min(costs), abs=1e-4), seed
        assert answer.bound == pytest.approx(min(costs), abs=1e-3), seed
        preferred_less += costs[0] > min(costs) + 1e-6
        plan = plan_of(answer.program, answer.choice)
        run = simulate(touching, plan)
        assert run.seconds - simulate(without_touch(touching), plan).seconds == pytest.approx(
            byte_seconds * run.peak_bytes
        ), seed
    assert preferred_less


def without_touch(problem: Problem) -> Problem:
    """``problem`` on a device where new memory takes no time."""
    return replace(problem, hardware=replace(problem.hardware, first_touch_seconds=0.0))
