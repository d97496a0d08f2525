"""One problem at several budgets: each point equals the plan for that budget alone."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from campaign import sampled
from planner_problems import GIB, MIB, flux

from graphrun.disk_store import Store
from graphrun.errors import InputError
from graphrun.model.directives import directed
from graphrun.model.problem import Directive, Problem
from graphrun.model.solution import Solution
from graphrun.report.whatif_screens import fastest
from graphrun.solve.frontier import (
    FrontierPoint,
    at_budget,
    curve,
    curve_ends,
    frontier,
    sizes_between,
    values_between,
)
from graphrun.solve.infeasible import smallest_budget
from graphrun.solve.pages import carried_over, solved
from graphrun.solve.solve import solve
from graphrun.store import curve_for, fitting_for, frontier_for, keep_plan, quick_for
from graphrun.units import show_size
from graphrun.verify.simulate import simulate

GRAPHS = Path(__file__).parents[2] / "graphs"


@pytest.mark.long
def test_every_point_is_the_plan_for_its_budget_alone() -> None:
    problem = flux(8 * GIB, steps=4)
    for point in frontier(problem, (4 * GIB, 8 * GIB, 24 * GIB)):
        single_solution = solve(replace(problem, budget_bytes=point.budget_bytes))
        simulation = simulate(single_solution.problem, single_solution.plan)
        assert point.solution is not None
        assert str(point.solution.plan) == str(single_solution.plan)
        assert (point.seconds, point.peak_bytes, point.moved_bytes) == (
            simulation.seconds,
            simulation.peak_bytes,
            simulation.moved_bytes,
        )


def test_a_larger_card_that_saves_less_than_one_per_cent_is_not_advised() -> None:
    problem = flux(GIB)
    solution = solved(at_budget(problem, 24 * GIB))

    def best(*seconds: float) -> int:
        """The gibibytes advised, of 1, 2, ... GiB with these seconds."""
        points = [
            FrontierPoint(number * GIB, GIB, 0, solution if duration else None, duration)
            for number, duration in enumerate(seconds, 1)
        ]
        return point.budget_bytes // GIB if (point := fastest(points)) is not None else 0

    assert best(0, 404.0, 100.9, 100.05, 100.0) == 3
    assert best(0, 404.0, 101.1, 100.05, 100.0) == 4
    assert best(0.00102, 0.001) == 2
    assert best(0, 0) == 0


def test_time_never_rises_with_the_budget() -> None:
    points = frontier(flux(GIB), [gib * GIB for gib in (4, 6, 8, 12, 16, 24)])
    bounds = [point.solution.bound_seconds for point in points if point.solution]
    assert len(bounds) == 6
    assert all(
        bound <= previous + 1e-4 for previous, bound in zip(bounds, bounds[1:], strict=False)
    )


def test_what_a_frontier_carries_over_is_the_plan_for_the_larger_budget_from_then_on(
    tmp_path: Path,
) -> None:
    """flux-tiny took 39.8 ms in 6.42 MiB and 40.2 in 9.35. Here the plan that is known for more
    streams all of the transformer."""
    small, large = (flux(gib * GIB, steps=4) for gib in (8, 9))
    worse = solve(directed(large, [Directive("exclude", "transformer")]))
    slow = carried_over(large, worse, 0.0)
    assert slow is not None
    store = Store(tmp_path)
    keep_plan(large, slow, store)
    fast, carried = frontier_for(small, (8 * GIB, 9 * GIB), store)
    assert carried.seconds == fast.seconds < slow.simulation.total_seconds
    curve_points = fitting_for(large, store)
    assert curve_points is not None
    assert curve_points.simulation.total_seconds == fast.seconds


def test_a_quickly_found_plan_is_kept_and_the_plan_of_the_problem_is_preferred(
    tmp_path: Path,
) -> None:
    problem, store, steps = flux(8 * GIB, steps=4), Store(tmp_path), list[str]()
    quick = quick_for(problem, store, steps.append)
    assert quick is not None
    assert quick_for(problem, store, steps.append) == quick
    assert steps == ["8.00 GiB"], "searched once"
    best = fitting_for(problem, store, steps.append)
    assert best is not None
    assert len(steps) == 2, "a quickly found plan is not the plan of the problem"
    assert quick_for(problem, store, steps.append) == best


@pytest.mark.sweep("frontier", of_all=4)
@pytest.mark.parametrize(
    "name",
    sorted(
        path.stem
        for path in GRAPHS.glob("*.yaml")
        if "-tiny" not in path.stem and path.stem != "pyramid-flow"
    ),
)
def test_no_frontier_of_a_reference_graph_rises(name: str, make_problem: Any) -> None:
    """25 budgets, from the smallest that works to one for all components at once, or to the card's
    memory."""
    problem = make_problem(name, 24 * GIB, hardware="rtx4090")
    minimum, maximum = curve_ends(problem)
    points = frontier(
        problem, [minimum + (maximum - minimum) * number // 24 for number in range(25)]
    )
    assert len(points) >= 25
    assert all(point.fits for point in points)
    assert all(point.seconds <= previous.seconds for previous, point in pairwise(points))


def test_infeasible_points_name_the_smallest_budget_to_the_byte() -> None:
    problem = flux(GIB)
    minimum = smallest_budget(problem)
    unfitting_point, fitting_point = frontier(problem, (minimum - 1, minimum))
    assert (unfitting_point.fits, fitting_point.fits) == (False, True)
    assert unfitting_point.smallest_budget_bytes == fitting_point.smallest_budget_bytes == minimum


def test_an_earlier_plan_is_remembered_where_a_larger_budget_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plan for 8 GiB is carried over to 12 GiB, although 10 GiB has no plan."""
    module = import_module("graphrun.solve.frontier")
    carry = module.carried_over
    monkeypatch.setattr(
        module,
        "carried_over",
        lambda problem, *rest: None if problem.budget_bytes == 10 * GIB else carry(problem, *rest),
    )
    points = frontier(
        flux(GIB),
        (8 * GIB, 10 * GIB, 12 * GIB),
        lambda problem: solved(problem) if problem.budget_bytes == 8 * GIB else None,
    )
    assert [point.fits for point in points] == [True, False, True]
    assert points[2].seconds == points[0].seconds


def test_a_curve_without_a_plan_at_its_minimum_has_points_between() -> None:
    problem = on_card(8, 8 * GIB)
    minimum = curve_ends(problem)[0]

    def missing_at_minimum(candidate: Problem) -> Solution | None:
        return None if candidate.budget_bytes == minimum else solved(candidate)

    points = curve(problem, solve(problem), missing_at_minimum)
    assert not points[0].fits
    assert len([point for point in points if minimum < point.budget_bytes < 8 * GIB]) > 1


def on_card(gib: int, budget_bytes: int) -> Problem:
    """FLUX on a card with ``gib`` GiB."""
    problem = flux(budget_bytes, steps=4)
    return replace(problem, hardware=replace(problem.hardware, capacity_bytes=gib * GIB))


@pytest.mark.sweep("more")
def test_no_budget_is_solved_beyond_the_card() -> None:
    problem, solved_budgets = on_card(8, 8 * GIB), list[int]()

    def counted(candidate: Problem) -> Solution | None:
        solved_budgets.append(candidate.budget_bytes)
        return solved(candidate)

    minimum = smallest_budget(problem)
    points = frontier(
        problem, (GIB, minimum - 1, minimum, 6 * GIB, 12 * GIB, 24 * GIB, 48 * GIB), counted
    )
    assert solved_budgets == [GIB, minimum - 1, minimum, 6 * GIB, 8 * GIB]
    assert [point.fits for point in points] == [False, False, True, True, True, True, True]
    assert [point.budget_bytes // GIB for point in points[-3:]] == [12, 24, 48]
    for point in points[-3:]:
        single_solution = solve(at_budget(problem, point.budget_bytes))
        assert point.solution is not None
        assert str(point.solution.plan) == str(single_solution.plan), (
            "the same as if it were solved"
        )
    solved_budgets.clear()
    frontier(problem, (24 * GIB,), counted)
    assert solved_budgets == [8 * GIB]


# GiB of a card and of a budget: below it, above it, and far below it.
CURVES = [(8, 6), (8, 24), (96, 8), (8, 8), (16, 6), (96, 60)]


@pytest.mark.long
@pytest.mark.parametrize("case", sampled(CURVES, CURVES[:3], "frontier"), ids=str)
def test_a_curve_ends_at_the_card_and_solves_what_is_seen_of_it(
    case: tuple[int, int], tmp_path: Path
) -> None:
    """The plan that the curve is drawn around is not solved again, nor a budget between two that
    take as long."""
    card, budget = case
    problem, solved_budgets = on_card(card, budget * GIB), list[int]()
    solution = solve(problem)

    def counted(candidate: Problem) -> Solution | None:
        solved_budgets.append(candidate.budget_bytes)
        return solved(candidate)

    points = curve(problem, solution, counted)
    budgets = [point.budget_bytes for point in points]
    minimum, maximum = curve_ends(problem)
    assert minimum == smallest_budget(problem)
    end = max(maximum, min(budget, card) * GIB)
    assert end <= card * GIB
    assert budgets == sorted({minimum, min(budget, card) * GIB, end, *solved_budgets})
    assert min(budget, card) * GIB not in solved_budgets
    assert len(solved_budgets) == len(set(solved_budgets)) <= 9
    assert all(point.fits for point in points)
    assert all(point.seconds <= previous.seconds for previous, point in pairwise(points))
    highest = points[0].seconds
    for low, high in pairwise(points):
        steep = low.seconds - high.seconds > highest / 100
        assert not steep or high.budget_bytes - low.budget_bytes <= (end - minimum) / 8, (
            "steep parts are drawn finely"
        )
    store, steps = Store(tmp_path), list[str]()
    drawn_curve = curve_for(problem, solution, store, steps.append)
    assert len(steps) == len(
        {point.budget_bytes for point in drawn_curve} - {min(budget, card) * GIB}
    )
    assert "GiB" in steps[-1]
    for point in drawn_curve:
        best = solved(at_budget(problem, point.budget_bytes))
        assert best is not None
        assert point.seconds <= 1.03 * best.simulation.total_seconds, "a few per cent at most"
        keep_plan(best.problem, best, store)
    steps.clear()
    curve_for(problem, solution, store, steps.append)
    stored_budgets = {show_size(point.budget_bytes) for point in drawn_curve}
    assert not stored_budgets.intersection(steps), "plans in the cache are drawn"


def test_a_range_of_budgets() -> None:
    assert sizes_between("8G") == (8 * GIB,)
    assert [size // GIB for size in sizes_between("4G:48G")] == [4, 6, 8, 12, 16, 24, 32, 48]
    assert [size // GIB for size in sizes_between("5G:20G")] == [5, 6, 8, 12, 16, 20]
    assert [size // MIB for size in sizes_between("2M:5M:1M")] == [2, 3, 4, 5]
    assert sizes_between("50%:100%", whole_bytes=2 * GIB) == (GIB, 3 * GIB // 2, 2 * GIB)


@pytest.mark.parametrize("text", ["8G:4G", "4G:8G:1G:1G", "4G:", "4G:eight", "1:1G:1"])
def test_malformed_ranges_of_budgets_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="vram"):
        sizes_between(text)


def test_a_range_of_an_input() -> None:
    assert values_between("height=512:1100:256") == ("height", (512, 768, 1024))
    for text in (
        "height",
        "height=512",
        "height=9:8:1",
        "height=8:9:0",
        "=8:9:1",
        "height=a:9:1",
        "height=1:99999:1",
    ):
        with pytest.raises(InputError, match="sweep"):
            values_between(text)
