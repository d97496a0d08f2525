"""Lets this folder's tests import the builders of tiny pipelines, the layouts of single files, and
its own."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(Path(__file__).parent), str(TESTS / "attach"), str(TESTS / "modules")]
