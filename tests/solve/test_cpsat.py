"""The solver agrees with an independent CP-SAT formulation, run in a process of its own: OR-tools
and HiGHS cannot share one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from campaign import sampled
from planner_random import random_problem
from planner_real import real, with_backing_stores
from test_splits import splittable

from graphrun.model.problem import Problem
from graphrun.solve.infeasible import Infeasible
from graphrun.solve.milp import Formulation
from graphrun.solve.orders import stage_choices
from graphrun.solve.search import choose
from graphrun.solve.solve import solve

pytestmark = pytest.mark.long

MODEL = Path(__file__).parent / "cpsat_model.py"
LIMIT = 60  # of CP-SAT's deterministic time per order and option; several times what any needs


def least(problems: dict[str, Problem], folder: Path) -> dict[str, dict[str, float | None]]:
    """CP-SAT's answer per problem: seconds (None: infeasible), its bound, whether it is proven."""
    files = []
    for name, problem in problems.items():
        files.append(folder / f"{name}.json")
        files[-1].write_text(json.dumps(problem.to_json()))
    command = [sys.executable, str(MODEL), str(LIMIT), *map(str, files)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, (
        f"ortools is a test dependency (pip install -e .[test]): {run.stderr[-500:]}"
    )
    return dict(zip(problems, map(json.loads, run.stdout.splitlines()), strict=True))


def agrees(problem: Problem, reference: dict[str, float | None]) -> None:
    try:
        solution = solve(problem)
    except Infeasible:
        assert reference["seconds"] is None
        return
    assert reference["proven"]
    assert reference["seconds"] is not None
    bound, simulated = solution.bound_seconds, solution.simulation.total_seconds
    if (
        simulated < reference["seconds"]
    ):  # its copies overlap more than the program knows, and the bound is another one
        assert bound <= simulated * (1 + 1e-6)
        answer = choose(
            [Formulation(stage_choice.program) for stage_choice in stage_choices(problem)[0]]
        )
        assert answer is not None
        bound = answer.bound
    assert reference["seconds"] == pytest.approx(bound, rel=1e-3, abs=1e-3)


GRAPHS = ("flux-dev", "sdxl", "hidream", "cogview4", "wan-14b", "auraflow")


@pytest.mark.long
@pytest.mark.parametrize("name", sampled(GRAPHS, ["flux-dev", "cogview4", "wan-14b"], "cpsat"))
def test_real_graphs_at_several_budgets(name: str, tmp_path: Path) -> None:
    # CP-SAT is slow with four encoders
    budgets = (2, 8, 48) if name == "hidream" else (2, 4, 6, 8, 12, 16, 24)
    problems = {str(gib): real(name, gib) for gib in budgets}
    answers = least(problems, tmp_path)
    for gib, problem in problems.items():
        agrees(problem, answers[gib])


@pytest.mark.sweep("more")
@pytest.mark.long
def test_real_graphs_with_backing_stores_and_precisions(tmp_path: Path) -> None:
    problems = {
        f"{gib} {ram} {len(allow)}": replace(
            with_backing_stores(real("flux-dev", gib), ram), allow=allow
        )
        for gib, ram, allow in ((8, 16, ()), (8, 32, ()), (16, 16, ()), (8, 16, ("fp8",)))
    }
    answers = least(problems, tmp_path)
    assert len({answer["seconds"] for answer in answers.values()}) == 4, (
        "each setting changes the result"
    )
    for name, problem in problems.items():
        agrees(problem, answers[name])


TWO_CARDS = ((8, 8, 10), (8, 6, 2), (6, 12, 1), (8, 1, 10))  # GiB of each, runs


@pytest.mark.sweep("cpsat")
@pytest.mark.parametrize("case", TWO_CARDS, ids=str)
def test_a_real_graph_over_two_cards(case: tuple[int, int, int], tmp_path: Path) -> None:
    """CP-SAT says of every block where it lies, the solver how many of each segment are
    elsewhere."""
    gib, on_secondary, runs = case
    problem = real("flux-dev-two-cards", gib)
    problem = replace(
        problem,
        secondaries=(replace(problem.secondaries[0], budget_bytes=on_secondary * 2**30),),
        runs=runs,
    )
    assert bool(solve(problem).plan.splits) == (on_secondary > 1)
    agrees(problem, least({"it": problem}, tmp_path)["it"])


@pytest.mark.sweep("more")
@pytest.mark.long
def test_a_session_of_a_real_graph(tmp_path: Path) -> None:
    problems = {str(gib): replace(real("sdxl", gib), runs=4) for gib in (12, 24)}
    answers = least(problems, tmp_path)
    for name, problem in problems.items():
        agrees(problem, answers[name])


@pytest.mark.parametrize(
    "seeds", sampled((range(60, 65), range(65, 75)), (range(60, 65),), "cpsat"), ids=str
)
def test_random_problems_in_which_a_component_may_be_split(seeds: range, tmp_path: Path) -> None:
    problems = {str(seed): splittable(seed)[0] for seed in seeds}
    answers = least(problems, tmp_path)
    feasible = [name for name in problems if answers[name]["seconds"] is not None]
    assert sum(bool(solve(problems[name]).plan.splits) for name in feasible) >= len(seeds) / 5
    for name in problems:
        agrees(problems[name], answers[name])


@pytest.mark.sweep("more")
def test_random_problems_with_every_kind_of_choice(tmp_path: Path) -> None:
    problems = {str(seed): random_problem(seed) for seed in range(2000, 2060)}
    answers = least(problems, tmp_path)
    feasible = [name for name in problems if answers[name]["seconds"] is not None]
    assert 20 <= len(feasible) <= 50
    for name in feasible[::2]:
        agrees(problems[name], answers[name])
