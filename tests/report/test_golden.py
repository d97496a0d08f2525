"""The plan screens of FLUX.1-dev at three budgets, and the screen of a budget that does not fit.

Update with ``make golden`` after looking at every difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphrun.report.screen import explain_screen, plan_screen
from graphrun.report.whatif_screens import infeasible_screen
from graphrun.solve.infeasible import Infeasible
from graphrun.solve.solve import solve
from graphrun.units import GIB

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def compare(request: pytest.FixtureRequest) -> Any:
    def check(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text + "\n")
        assert text + "\n" == path.read_text()

    return check


@pytest.mark.parametrize("gib", [8, 12, 24])
def test_plan_screen(make_problem: Any, compare: Any, gib: int) -> None:
    solution = solve(make_problem("flux-dev", gib * GIB, hardware="rtx4090"))
    assert solution.gap <= 1e-2, "the bound counts tensors, the plan pages"
    compare(f"flux-dev-{gib}g", plan_screen(solution))


def test_plan_text_at_8_gib(make_problem: Any, compare: Any) -> None:
    plan = solve(make_problem("flux-dev", 8 * GIB, hardware="rtx4090")).plan
    compare("flux-dev-8g-plan", str(plan).replace(plan.problem, "DIGEST"))  # it depends on the versions of the libraries too


def test_explain_screen_at_8_gib(make_problem: Any, compare: Any) -> None:
    compare("flux-dev-8g-explain", explain_screen(solve(make_problem("flux-dev", 8 * GIB, hardware="rtx4090"))))


def test_infeasible_screen(make_problem: Any, compare: Any) -> None:
    with pytest.raises(Infeasible) as caught:
        solve(make_problem("flux-dev", 2 * GIB, 16 * GIB, hardware="rtx4090"))
    compare("flux-dev-2g-infeasible", infeasible_screen(caught.value))


def test_the_readme_shows_the_screen_as_it_is_printed() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert (GOLDEN / "flux-dev-8g.txt").read_text().strip("\n") in readme
