"""Counts host memory that a device handed out and that still lives, for a run to compare before and after, and with its plan."""

from __future__ import annotations

import threading
import weakref
from collections import Counter

import torch


class Arenas:
    """Bytes by tier (``arenas``: all, ``pinned``: those with locked pages). They go down when a storage dies, not when asked to."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()
        self._peaks: Counter[str] = Counter()
        self._lock = threading.RLock()  # a filling thread counts too; a finalizer may run inside `count`

    def count(self, tier: str, memory: torch.Tensor) -> None:
        """``memory`` counts to ``tier`` for as long as its storage lives."""
        nbytes = memory.numel() * memory.element_size()
        self._add(tier, nbytes)
        weakref.finalize(memory.untyped_storage(), self._add, tier, -nbytes).atexit = False

    def nbytes(self, tier: str) -> int:
        """Bytes that live in ``tier``."""
        return self._bytes[tier]

    def peak_bytes(self, tier: str) -> int:
        """The most that lived in ``tier`` since `reset_peaks`."""
        return max(self._peaks[tier], self._bytes[tier])

    def reset_peaks(self) -> None:
        """The peaks restart at what lives now."""
        with self._lock:
            self._peaks = Counter(self._bytes)

    def _add(self, tier: str, nbytes: int) -> None:
        with self._lock:
            self._bytes[tier] += nbytes
            self._peaks[tier] = max(self._peaks[tier], self._bytes[tier])
