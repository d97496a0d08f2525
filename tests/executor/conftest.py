"""Lets this folder's tests import `executor_small`; one thread, so that the CPU's sums are in one order."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
