"""Lets this folder's tests import its builders."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module", autouse=True)
def _libraries_are_not_collected() -> Iterator[None]:
    """Every call collects garbage once; what the imported libraries hold need not be looked at each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
