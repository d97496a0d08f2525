"""Makes the secondary device modules of this folder importable, and checks every run in it for
races."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphrun.sim import Machine

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "outside"))

# In a process of `test_outside`: its backend takes the slot of the simulated accelerator.
OUTSIDE: Any = None
if os.environ.get("GRAPHRUN_TESTS_OUTSIDE"):
    import brook

    OUTSIDE = brook.register()


@pytest.fixture(scope="session")
def outside_backend() -> Any:
    """The C++ module of the backend from outside, or None where it is not registered."""
    return OUTSIDE


@pytest.fixture(autouse=True, scope="module")
def check_ordering() -> Iterator[None]:
    """Every run here is checked for races: on the simulator bytes move at once, and a missing wait
    changes no result."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Machine, "check_ordering", True)
        yield
