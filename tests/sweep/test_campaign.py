"""What the whole sweep runs of grids that take too long."""

from __future__ import annotations

from typing import Any

import pytest
from campaign import of_the_day, sample_of

DAY = 86_400


class Case:
    """What is asked of a test of pytest's."""

    def __init__(self, nodeid: str, **counts: int) -> None:
        self.nodeid, self._mark = nodeid, pytest.mark.sweep("grid", **counts).mark

    def get_closest_marker(self, name: str) -> Any:
        return self._mark


def test_some_cases_of_a_grid_run_every_day_and_all_of_them_in_as_few_days_as_that_takes() -> None:
    other_cases = [Case("b.py::test_b[0]"), Case("b.py::test_b[1]")]
    grid = [Case(f"a.py::test_a[{number}]", of_all=4) for number in range(10)]
    days: Any = [of_the_day([*grid, *other_cases], day * DAY) for day in (20_000, 20_001, 20_002)]
    assert [len(day) for day in days] == [6, 6, 6]
    assert all(set(map(id, other_cases)) < set(map(id, day)) for day in days)
    assert set(map(id, grid)) < {id(case) for day in days for case in day}
    assert of_the_day(grid, 20_000 * DAY + 1) == of_the_day(grid, 20_000 * DAY)


def test_a_sample_of_a_long_test_has_its_first_and_its_last_case() -> None:
    cases = [Case(f"a.py::test_a[{number}]", sample=3) for number in range(8)]
    single_cases = [Case("b.py::test_b", sample=2), Case("c.py::test_c[x]", sample=1)]
    items: Any = [*cases, Case("d.py::test_d", of_all=4), *single_cases]
    assert sample_of(items) == {cases[0], cases[3], cases[7], *single_cases}
