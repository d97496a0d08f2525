"""The CPU as a device of the executor: resident weights are in ordinary memory, and both streams run on the host.

For measuring what following a plan costs where the plain pipeline runs on the very same hardware. Counts no bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphrun.errors import GraphrunError
from graphrun.runtime.devices.device import Arenas

AMPLE = 1 << 50


class CpuDevice:
    """Behind the protocol of `graphrun.runtime.devices.device.Device`."""

    name = "cpu"
    torch_device = torch.device("cpu")
    allocated_bytes = peak_bytes = 0
    available_bytes = AMPLE

    def __init__(self) -> None:
        self.arenas = Arenas()

    @contextmanager
    def session(self, cap_bytes: int) -> Iterator[None]:
        """Nothing to begin."""
        yield

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def arena(self, nbytes: int) -> torch.Tensor:
        """Ordinary memory, counted."""
        memory = torch.empty(nbytes, dtype=torch.uint8)
        self.arenas.count("arenas", memory)
        return memory

    def pin(self, arena: torch.Tensor) -> None:
        """Nothing is locked."""

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, *, pageable: bool = False) -> None:
        """Copies."""
        target.copy_(source)

    def copy_out(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies."""
        target.copy_(source)

    def read(self, target: torch.Tensor, nbytes: int) -> None:
        """The time has passed."""

    def background(self, job: Callable[[], None]) -> Callable[[], None]:
        """Done at once."""
        job()
        return lambda: None

    def reached(self, marks: Sequence[float]) -> bool:
        """Everything was."""
        return True

    queues_behind = reached

    def annotate(self, *, slot: str | None = None, block: str | None = None) -> None:
        """Does nothing."""

    @contextmanager
    def on_host(self, slowdown: float) -> Iterator[None]:
        """It is."""
        yield

    def mark(self, stream: str) -> float:
        """The time."""
        return time.perf_counter()

    def wait(self, stream: str, mark: float) -> None:
        """It is over."""

    def barrier(self) -> None:
        """Nothing is under way."""

    def seconds_at(self, mark: float) -> float:
        """A mark is its time."""
        return mark

    def reset_peak(self) -> None:
        """None is kept."""

    def release_cached(self) -> None:
        """Nothing is cached."""

    def holders(self) -> tuple[str, ...]:
        """Nothing is counted."""
        return ()

    def storage_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Address and bytes."""
        storage: Any = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()

    def explain(self, error: BaseException) -> GraphrunError | None:
        """Nothing that the device would say."""
        return None
