"""Lets this folder's tests import the builders of tiny pipelines, and its own."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "integrations")]
