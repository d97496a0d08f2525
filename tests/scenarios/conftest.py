"""Lets the scenarios use what other tests and the side-by-side runs are made of; the small FLUX, estimated once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "runtime"), str(HERE.parent / "standins")]
sys.path.append(str(HERE.parent.parent / "benchmarks"))


@pytest.fixture(scope="session")
def flux() -> Any:
    """Its graph, plans, host memory, and the picture of the plain pipeline."""
    from tiny_pipelines import Whole

    return Whole("flux-tiny", {"steps": 2, "height": 64, "width": 64})
