"""Counts host memory that a device handed out and that still lives, so that a run can compare before and after."""

from __future__ import annotations

import weakref
from collections import Counter

import torch


class Arenas:
    """Bytes by tier (``arenas``: all, ``pinned``: those with locked pages). They go down when a storage dies, not when asked to."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()

    def count(self, tier: str, memory: torch.Tensor) -> None:
        """``memory`` counts to ``tier`` for as long as its storage lives."""
        nbytes = memory.numel()
        self._bytes[tier] += nbytes
        weakref.finalize(memory.untyped_storage(), self._bytes.subtract, {tier: nbytes}).atexit = False

    def nbytes(self, tier: str) -> int:
        """Bytes that live in ``tier``."""
        return self._bytes[tier]
