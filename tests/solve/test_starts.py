"""A start for HiGHS, whose version 1.16.0 takes its value without the constant of its presolve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import highspy
import pytest

from graphrun.solve import linear
from graphrun.solve.linear import Linear, MilpModel, MilpResult


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
