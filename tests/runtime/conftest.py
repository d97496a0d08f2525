"""Makes the helper modules of this folder importable; skips the long fault sweeps unless they are requested."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphrun.sim import Machine

sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The long sweeps run when they are asked for: ``pytest -m faults``."""
    if "faults" not in config.getoption("-m"):
        for item in items:
            if item.get_closest_marker("faults"):
                item.add_marker(pytest.mark.skip(reason="run with -m faults"))


@pytest.fixture(autouse=True, scope="module")
def check_ordering() -> Iterator[None]:
    """Every run here is checked for races: on the simulator bytes move at once, and a missing wait changes no result."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Machine, "check_ordering", True)
        yield
