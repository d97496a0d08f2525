"""Plans of real problems as text, next to the problems: what a change of the solver changes is a
readable difference. ``pytest tests/solve/test_plan_texts.py --update-golden`` writes them again."""

from __future__ import annotations

import pytest
from planner_real import FILES, real, with_backing_stores

from graphrun.model.problem import Problem
from graphrun.solve.solve import solve
from graphrun.units import show_seconds, show_size

PLANS = [
    ("sdxl", 6, 0),
    ("cogview4", 8, 0),
    ("auraflow", 12, 0),
    ("flux-dev", 12, 0),
    ("flux-dev", 8, 24),
    ("flux-dev-two-cards", 24, 0),
    ("wan-14b", 16, 0),
    ("hidream", 16, 0),
]


def problem_of(name: str, gib: int, ram_gib: int) -> Problem:
    """A problem with ``gib`` GiB of VRAM; with ``ram_gib`` of RAM and weights on disk, if not 0."""
    problem = real(name, gib)
    return with_backing_stores(problem, ram_gib) if ram_gib else problem


@pytest.mark.sweep("more", sample=2)
@pytest.mark.long
@pytest.mark.parametrize(("name", "gib", "ram_gib"), PLANS)
def test_the_plan_is_the_one_next_to_its_problem(
    name: str, gib: int, ram_gib: int, request: pytest.FixtureRequest
) -> None:
    solution = solve(problem_of(name, gib, ram_gib))
    simulation = solution.simulation
    text = (
        f"# {show_seconds(simulation.total_seconds)}, peak {show_size(simulation.peak_bytes)}, "
        f"{show_size(simulation.total_moved_bytes)} moved\n{solution.plan}\n"
    )
    file = FILES / f"{name}-{gib}G{f'-ram-{ram_gib}G' if ram_gib else ''}.plan.txt"
    if request.config.getoption("--update-golden"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), f"{file.name}: see the docstring"
