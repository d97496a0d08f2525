"""A start for HiGHS, whose version 1.16.0 takes its value without the constant of its presolve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import highspy
import pytest
from planner_problems import MIB, component, problem

from graphrun.model.problem import PhaseNumbers, Problem, Use, Variant
from graphrun.solve import linear
from graphrun.solve.linear import Linear, MilpModel, MilpResult
from graphrun.solve.milp import Formulation
from graphrun.solve.orders import stage_choices
from graphrun.solve.search import minimise_over
from graphrun.solve.suggestions import ROUGH_SECONDS


def knapsack() -> tuple[MilpModel, Linear]:
    """Returns a model and the goal, at least 10 - 7 = 3 and with a start at 10 - 4 = 6."""
    model = MilpModel(0.0)
    items = [model.binary() for _ in range(3)]
    weights, values = (2.0, 3.0, 4.0), (3.0, 4.0, 5.0)
    weight = linear.total([w * item for w, item in zip(weights, items, strict=True)])
    model.add(weight <= 5.0)
    value = linear.total([v * item for v, item in zip(values, items, strict=True)])
    return model, value * -1.0 + 10.0


@pytest.mark.parametrize("defect", ["", "another value", "nothing"])
def test_a_start_that_highs_takes_for_the_optimum_is_left_out(
    defect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, goal = knapsack()
    first = model.minimise(goal, nodes=1)
    assert first is not None
    start = replace(first, value=6.0, values=first.values * 0 + [0.0, 1.0, 0.0])
    real_run, starts = linear._run, list[bool]()

    def run(lp: highspy.HighsLp, options: Any, begin: MilpResult | None) -> MilpResult | None:
        starts.append(begin is not None)
        if begin is not None and defect:
            wrong = replace(begin, value=begin.value - 2.0, bound=begin.value - 2.0)
            return wrong if defect == "another value" else None
        return real_run(lp, options, begin)

    monkeypatch.setattr(linear, "_run", run)
    result = model.minimise(goal, start=start)
    assert result is not None
    assert (result.value, result.bound) == pytest.approx((3.0, 3.0))
    assert starts == ([True, False] if defect else [True])
    assert model.minimise(goal, [goal <= 2.0]) is None


def two_of_which_one_fits_in_ram() -> Problem:
    """Two components that are faster from RAM, which has room for five thirds of one."""

    def variants(size: int) -> tuple[Variant, ...]:
        pinned = component("any", ("blocks", 4, size)).variants[0]
        on_disk = replace(
            pinned, backing_store="disk", host_bytes=2 * size, disk_seconds=(size / 1e9,)
        )
        return pinned, on_disk

    components = tuple(
        replace(component(name, ("blocks", 4, 8 * MIB)), variants=variants(8 * MIB))
        for name in ("first", "second")
    )
    phases = tuple(
        PhaseNumbers(name, 0, (Use(name, 10, (10,), (1e-3,)),), 0, 0, 0)
        for name in ("first", "second")
    )
    return problem(24 * MIB, components, phases, ram_bytes=53 * MIB)


def test_a_solution_within_the_rough_gap_is_not_searched_again_for_that_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A large program's likely variants do not fit, and its goal asks for the rough gap."""
    (choice,) = stage_choices(two_of_which_one_fits_in_ram())[0]
    formulation = Formulation(choice.program)
    real_run, searches = linear._run, list[bool]()

    def run(lp: highspy.HighsLp, options: Any, start: MilpResult | None) -> MilpResult | None:
        result = real_run(lp, options, start)
        if len(lp.integrality_):
            searches.append(result is not None)
        return result

    monkeypatch.setattr(linear, "_run", run)
    goal = ROUGH_SECONDS[0]
    rough = minimise_over([formulation], [0], goal, staged=True)
    assert searches == [False, True], "the likely variants, then all"
    best = minimise_over([formulation], [0], replace(goal, gap=0.0), staged=True)
    assert searches[2:4] == [False, True]
    assert len(searches) > 4, "another gap"
    assert best.value <= rough.value <= best.value / (1 - goal.gap)
