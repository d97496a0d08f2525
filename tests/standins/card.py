"""A card for tests that compute on the CPU, in its ordinary memory, and counts nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from graphrun.runtime.devices.device import Device


class Card(Device):
    """A device that calls itself ``cuda``. Both streams are the thread that calls."""

    name = "cuda"
    torch_device = torch.device("cpu")
    allocated_bytes = peak_bytes = 0
    available_bytes = 1 << 50

    def capped(self, cap_bytes: int, limit_bytes: int = 0) -> AbstractContextManager[None]:
        return nullcontext()

    def pin(self, arena: torch.Tensor) -> None:
        pass

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def background(self, job: Callable[[], None], queue: str = "disk") -> Callable[[], None]:
        job()
        return lambda: None

    def mark(self, stream: str) -> float:
        return time.perf_counter()

    def wait(self, stream: str, mark: Any) -> None:
        pass

    def barrier(self) -> None:
        pass

    def reset_peak(self) -> None:
        pass

    def holders(self) -> tuple[str, ...]:
        return ()

    def explain(self, error: BaseException) -> None:
        return None
