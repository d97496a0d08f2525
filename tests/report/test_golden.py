"""The screens of FLUX.1-dev: plans at three budgets, a budget that does not fit; at two widths, in
a pipe and on a terminal.

Update with ``make golden`` after looking at every difference.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from graphrun.cli.terminal import print_to
from graphrun.report.screen import Look, explain_screen, plan_screen
from graphrun.report.whatif_screens import infeasible_screen
from graphrun.solve.infeasible import Infeasible
from graphrun.solve.solve import solve
from graphrun.units import GIB

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def compare(request: pytest.FixtureRequest) -> Any:
    def check(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text + "\n")
        assert text + "\n" == path.read_text()

    return check


def shown(screen: str, width: int) -> str:
    """What a terminal gets: ``screen`` with its colours."""
    from rich.console import Console

    buffer = io.StringIO()
    print_to(
        Console(file=buffer, force_terminal=True, color_system="standard", width=width), screen
    )
    return buffer.getvalue().removesuffix("\n")


@pytest.fixture(scope="module")
def solution_8g(make_problem: Any) -> Any:
    return solve(make_problem("flux-dev", 8 * GIB, hardware="rtx4090"))


@pytest.mark.parametrize("gib", [12, 24])
def test_plan_screen(make_problem: Any, compare: Any, gib: int) -> None:
    solution = solve(make_problem("flux-dev", gib * GIB, hardware="rtx4090"))
    assert solution.gap <= 1e-2, "the bound counts tensors, the plan pages"
    compare(f"flux-dev-{gib}g", plan_screen(solution))


THEN = (
    "next, on that card: graphrun run flux-dev --vram 8G --ram 64G --hardware rtx4090 --prompt "
    '"..."'
)


@pytest.mark.parametrize("width", [80, 120])
def test_plan_screen_at_two_widths_in_a_pipe_and_on_a_terminal(
    solution_8g: Any, compare: Any, width: int
) -> None:
    screen = plan_screen(solution_8g, look=Look(width, product="a picture", next_command=THEN))
    assert max(map(len, screen.splitlines())) <= width
    compare(f"flux-dev-8g-{width}", screen)
    compare(f"flux-dev-8g-{width}-terminal", shown(screen, width))


def test_plan_screen_with_all_figures(solution_8g: Any, compare: Any) -> None:
    compare("flux-dev-8g-verbose", plan_screen(solution_8g, look=Look(verbose=True)))


def test_plan_text_at_8_gib(solution_8g: Any, compare: Any) -> None:
    plan = solution_8g.plan
    # it depends on the versions of the libraries too
    compare("flux-dev-8g-plan", str(plan).replace(plan.problem, "DIGEST"))


def test_explain_screen_at_8_gib(solution_8g: Any, compare: Any) -> None:
    compare("flux-dev-8g-explain", explain_screen(solution_8g))


@pytest.mark.long
def test_infeasible_screen(make_problem: Any, compare: Any) -> None:
    with pytest.raises(Infeasible) as error:
        solve(make_problem("flux-dev", 2 * GIB, 16 * GIB, hardware="rtx4090"))
    screen = infeasible_screen(
        error.value, Look(next_command="next: graphrun plan flux-dev --vram 3.4G")
    )
    assert max(map(len, screen.splitlines())) <= 80
    compare("flux-dev-2g-infeasible", screen)
    compare("flux-dev-2g-infeasible-terminal", shown(screen, 80))


def test_the_readme_shows_the_screen_as_it_is_printed() -> None:
    screen = (GOLDEN / "flux-dev-8g-80.txt").read_text().strip("\n")
    assert screen in (ROOT / "docs" / "tutorial" / "read-a-plan.md").read_text()
    assert screen.partition("\n\n")[0] in (ROOT / "README.md").read_text()


def test_the_cast_in_the_readme_shows_the_screens_as_they_are() -> None:
    """Update with ``make cast``."""
    texts = ElementTree.parse(ROOT / "docs" / "cast.svg").getroot().findall(".//{*}text")
    lines = {"".join("".join(text.itertext()).split()) for text in texts}
    screen = (GOLDEN / "flux-dev-8g-80.txt").read_text().splitlines()
    assert {
        "".join(line.split()) for line in screen if line and not line.startswith("next")
    } <= lines  # next is folded
    assert any(line.startswith("done:") for line in lines)
    assert any(re.search(r"step\d+/12,", line) for line in lines)
    assert (
        "![graphrun plan and graphrun run on a terminal](docs/cast.svg)"
        in (ROOT / "README.md").read_text()
    )
