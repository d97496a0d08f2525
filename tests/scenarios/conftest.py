"""Makes the secondary devices of other tests and of the benchmarks importable; the tiny FLUX,
profiled once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "runtime")]
sys.path.append(str(HERE.parent.parent / "benchmarks"))


@pytest.fixture(scope="session")
def flux() -> Any:
    """Its graph, plans, host memory, and the picture of the plain pipeline."""
    from whole_pipelines import TinyPipeline

    return TinyPipeline("flux-tiny", {"steps": 2, "height": 64, "width": 64})
