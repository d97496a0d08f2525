"""The screens of FLUX.1-dev: plans at three budgets, a budget that does not fit; at two widths, in
a pipe and on a terminal.

Update with ``make golden`` after looking at every difference.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from graphrun.cli.terminal import print_to
from graphrun.report.call_screen import call_screen
from graphrun.report.comparison import compare as compare_plans
from graphrun.report.comparison import comparison_screen
from graphrun.report.page import planned_slots, report_page
from graphrun.report.screen import (
    Look,
    check_screen,
    explain_screen,
    measured_screen,
    plan_screen,
)
from graphrun.report.summary import summarize
from graphrun.report.verdicts import run_verdict
from graphrun.report.whatif_screens import frontier_screen, infeasible_screen
from graphrun.solve.frontier import FrontierPoint
from graphrun.solve.infeasible import Infeasible
from graphrun.solve.solve import solve
from graphrun.trace import Trace
from graphrun.units import GIB, typed_size

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


@pytest.mark.sweep("more")
@pytest.mark.parametrize("gib", [12, 24])
def test_plan_screen(make_problem: Any, compare: Any, gib: int) -> None:
    solution = solve(make_problem("flux-dev", gib * GIB, hardware="rtx4090"))
    assert solution.gap <= 1e-2, "the bound counts tensors, the plan pages"
    compare(f"flux-dev-{gib}g", plan_screen(solution))


THEN = (
    "next, on that card: graphrun run flux-dev --vram 8G --ram 64G --hardware rtx4090 --prompt "
    '"..."'
)


@pytest.mark.sweep("more")
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


REST = "--ram 16G --hardware rtx4090"


@pytest.mark.sweep("more")
@pytest.mark.long
def test_infeasible_screen(make_problem: Any, compare: Any) -> None:
    with pytest.raises(Infeasible) as error:
        solve(make_problem("flux-dev", 2 * GIB, 16 * GIB, hardware="rtx4090"))
    screen = infeasible_screen(
        error.value, Look(next_command=f"next: graphrun plan flux-dev {REST} --vram 3.4G")
    )
    assert max(map(len, screen.splitlines())) <= 80
    compare("flux-dev-2g-infeasible", screen)
    compare("flux-dev-2g-infeasible-terminal", shown(screen, 80))


@pytest.fixture(scope="module")
def cpu_solution(make_problem: Any) -> Iterator[Any]:
    """The plan of FLUX.1-dev in 8 GiB, for a CPU of eight cores in a machine of 32 GiB."""
    with pytest.MonkeyPatch.context() as patch:
        features = frozenset({"avx512f", "avx512_bf16"})
        facts = ("a CPU", 8, features)
        patch.setattr("graphrun.profile.processor._cpu_facts", lambda: facts)
        patch.setattr("graphrun.profile.processor.cpu_threads", lambda: 8)
        patch.setattr("graphrun.profile.processor.total_ram_bytes", lambda: 32 * GIB)
        yield solve(make_problem("flux-dev", 8 * GIB, 8 * GIB, hardware="cpu"))


@pytest.fixture(scope="module")
def cpu_trace(cpu_solution: Any) -> Trace:
    """A run that took the planned bytes and seconds."""
    slots = planned_slots(cpu_solution.simulation.slots)
    return Trace("digest", "cpu", slots, (), 0, 0, process_bytes=442 * 2**20)


def test_screens_on_the_cpu(cpu_solution: Any, cpu_trace: Trace, compare: Any) -> None:
    look = Look(next_command="next: graphrun run flux-dev --device cpu --memory 8G")
    screens = {
        "plan": plan_screen(cpu_solution, look=look),
        "verbose": plan_screen(cpu_solution, look=Look(verbose=True)),
        "run": measured_screen(cpu_solution, cpu_trace, ["out/flux-dev.png"]).strip("\n"),
    }
    for name, screen in screens.items():
        compare(f"flux-dev-cpu-8g-{name}", screen)
    for name in ("plan", "run"):
        assert max(map(len, screens[name].splitlines())) <= 80


@pytest.mark.parametrize(("seconds_of_a_byte", "is_slow"), [(1e-6, True), (1e-8, False)])
def test_slow_new_memory_is_the_reason_why_memory_stays_unused(
    seconds_of_a_byte: float, is_slow: bool, cpu_solution: Any
) -> None:
    """28 calls wait for a disk of 0.2 GB/s: a byte that stays saves 135 ns."""
    hardware = replace(
        cpu_solution.problem.hardware,
        disk_bytes_per_second=2e8,
        first_touch_seconds=seconds_of_a_byte,
    )
    solution = solve(replace(cpu_solution.problem, hardware=hardware))
    lines = plan_screen(solution, look=Look(verbose=True)).splitlines()
    (reason_line,) = (line for line in lines if "why transformer is streamed" in line)
    reason = "GiB more would fit, but new memory comes at 0.001 GB/s, so reading again in 28 calls"
    assert (reason in reason_line) == is_slow
    (encoder,) = (line for line in lines if "why text_encoder_2 is streamed" in line)
    assert "new memory" not in encoder, "it is read once"


def test_a_run_next_to_its_data_sheet_estimate_says_how_far_that_may_be_off(
    solution_8g: Any,
) -> None:
    slots = planned_slots(solution_8g.simulation.slots)
    trace = Trace("digest", "cuda", slots, (), 0, 0)
    verdict = run_verdict(solution_8g, trace)
    assert "(planned 47 s, 34 s to 2 min 49 s, host copies vary)" in verdict


# Words for two memories, and for devices that are not there.
OTHER_DEVICES = re.compile(r"\b(VRAM|RAM|GPU|nvidia|card|host|pinned|the device)\b")


def test_no_screen_on_the_cpu_speaks_of_a_card(cpu_solution: Any, cpu_trace: Trace) -> None:
    problem = cpu_solution.problem
    smaller_solution = solve(problem.with_budget(6 * GIB))
    comparison = compare_plans(cpu_solution, smaller_solution)
    with pytest.raises(Infeasible) as error:
        solve(problem.with_budget(GIB // 2))
    points = [point_of(cpu_solution), point_of(smaller_solution)]
    page = report_page(cpu_solution, cpu_trace, points)
    screens = [
        plan_screen(cpu_solution),
        plan_screen(cpu_solution, look=Look(verbose=True)),
        explain_screen(cpu_solution),
        check_screen(cpu_solution),
        measured_screen(cpu_solution, cpu_trace, []),
        measured_screen(cpu_solution, cpu_trace, [], Look(verbose=True)),
        call_screen(cpu_solution, cpu_trace),
        comparison_screen(comparison, "a.json", "b.json"),
        infeasible_screen(error.value),
        str(error.value),
        frontier_screen(problem, [("", points)]),
        re.sub(r"<style>.*?</style>|class=\"\w+\"", "", page, flags=re.DOTALL),
        json.dumps(summarize(cpu_solution, None, cpu_trace)).replace("_", " "),
    ]
    for screen in screens:
        assert OTHER_DEVICES.findall(screen) == [], screen


def point_of(solution: Any) -> FrontierPoint:
    problem, simulation = solution.problem, solution.simulation
    sizes = (problem.budget_bytes, problem.budget_bytes, 0)
    return FrontierPoint(*sizes, solution, simulation.seconds, 1.0, simulation.peak_bytes)


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


ONE_POOL = ("m4max-64", "gb10", "strixhalo-128")


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize("name", ONE_POOL)
def test_plan_screen_of_one_pool_of_memory(make_problem: Any, compare: Any, name: str) -> None:
    solution = solve(make_problem("flux-dev", 20 * GIB, 20 * GIB, hardware=name))
    compare(f"flux-dev-{name}-20g", plan_screen(solution))


@pytest.mark.sweep("more", sample=1)
@pytest.mark.parametrize("name", ONE_POOL)
def test_refusal_of_one_pool_of_memory(make_problem: Any, compare: Any, name: str) -> None:
    with pytest.raises(Infeasible) as error_info:
        solve(make_problem("flux-dev", 3 * GIB, 3 * GIB, hardware=name))
    minimum = typed_size(error_info.value.smallest_budget_bytes)
    look = Look(next_command=f"next: graphrun plan flux-dev --hardware {name} --memory {minimum}")

    compare(f"flux-dev-{name}-3g-infeasible", infeasible_screen(error_info.value, look))


@pytest.mark.sweep("more")
@pytest.mark.parametrize(("name", "gib"), [("arc-b580", 10), ("rx7900xtx", 20)])
def test_plan_screen_of_other_vendors_cards(
    make_problem: Any, compare: Any, name: str, gib: int
) -> None:
    solution = solve(make_problem("flux-dev", gib * GIB, hardware=name))
    compare(f"flux-dev-{name}-{gib}g", plan_screen(solution))
