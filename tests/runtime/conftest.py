"""Makes the secondary device modules of this folder importable, and checks every run in it for
races."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphrun.sim import Machine

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="module")
def check_ordering() -> Iterator[None]:
    """Every run here is checked for races: on the simulator bytes move at once, and a missing wait
    changes no result."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Machine, "check_ordering", True)
        yield
