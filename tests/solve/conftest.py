"""Puts this folder on the import path, for `planner_problems`, `planner_oracle` and the other
secondary device modules."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def equal_programs_are_solved_once() -> None:
    """Here HiGHS runs at every solve."""
