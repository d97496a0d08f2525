"""Lets the scenarios use what the executor's tests are made of; one thread, so that the CPU's sums are in one order."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "executor"), str(HERE.parent / "standins")]
