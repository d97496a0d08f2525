"""Lets this folder's tests import `executor_small`; the long sweeps run when they are asked for."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module", autouse=True)
def _libraries_are_not_collected() -> Iterator[None]:
    """Every run collects garbage once; what the imported libraries hold need not be looked at each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The long sweeps run when they are asked for: ``pytest -m faults``."""
    if "faults" not in config.getoption("-m"):
        for item in items:
            if item.get_closest_marker("faults"):
                item.add_marker(pytest.mark.skip(reason="run with -m faults"))
