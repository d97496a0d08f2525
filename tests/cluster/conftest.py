"""Lets this folder's tests import `placing` and `random_clusters`; the graph that they place."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import graphrun

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def flux() -> Any:
    from placing import GRAPH

    return graphrun.load(GRAPH)
