"""Tests outside of this folder solve equal programs once: the plans are those of HiGHS."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from answers import RememberingHighs

from graphrun.solve import linear
from graphrun.solve.solve import solve
from graphrun.units import MIB


@pytest.mark.sweep("more")
@pytest.mark.long
def test_remembered_answers_are_those_of_another_run(
    make_problem: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = [make_problem("flux-tiny", size * MIB) for size in (4, 6)]
    expected = [str(solve(problem).plan) for problem in problems]
    monkeypatch.setattr(RememberingHighs, "answers", {})
    monkeypatch.setattr(linear, "_Quiet", RememberingHighs)
    first = [str(solve(problem).plan) for problem in problems]
    count = len(RememberingHighs.answers)
    assert [str(solve(problem).plan) for problem in problems] == first == expected
    assert len(RememberingHighs.answers) == count > 0, "nothing was solved again"
    solve(replace(problems[0], runs=2))
    assert len(RememberingHighs.answers) > count, "another program is solved"
