"""A simulated machine as a device for the executor. Bytes move at once; its virtual clock is as asynchronous as a card's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from graphrun import sim
from graphrun.errors import GraphrunError, OutOfMemory, TransferFailed
from graphrun.runtime.devices.device import Arenas, Stream
from graphrun.units import show_size


class SimulatedDevice:
    """``machine`` behind the protocol of `graphrun.runtime.devices.device.Device`."""

    def __init__(self, machine: sim.Machine) -> None:
        self.machine = machine
        self.arenas = Arenas()

    @property
    def name(self) -> str:
        """``sim``."""
        return "sim"

    @property
    def torch_device(self) -> torch.device:
        """``sim:0``."""
        return sim.device

    @contextmanager
    def session(self, cap_bytes: int) -> Iterator[None]:
        """The machine is active, with a capacity of at most ``cap_bytes``; leaving restores its own, unless it shrank meanwhile."""
        before = self.machine.capacity_bytes
        capped = cap_bytes if before is None else min(before, cap_bytes)
        with self.machine, self._watched():
            self.machine.capacity_bytes = capped
            try:
                yield
            finally:
                if self.machine.capacity_bytes == capped:
                    self.machine.capacity_bytes = before

    def _watched(self) -> AbstractContextManager[None]:
        ordering = self.machine.ordering
        return contextlib.nullcontext() if ordering is None else ordering.watching()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor on the machine."""
        return torch.empty(nbytes, dtype=torch.uint8, device=sim.device)

    def arena(self, nbytes: int) -> torch.Tensor:
        """Ordinary host memory."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self.arenas.count("arenas", memory)
        return memory

    def pin(self, arena: torch.Tensor) -> None:
        """Is counted alone."""
        self.arenas.count("pinned", arena)

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, *, pageable: bool = False) -> None:
        """The bytes move now; the copy timeline is charged."""
        with self.machine.on_copy_stream(pageable):
            target.copy_(source)

    def copy_out(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Likewise."""
        with self.machine.on_copy_stream():
            target.copy_(source)

    def read(self, target: torch.Tensor, nbytes: int) -> None:
        """The disk timeline is charged."""
        self.machine.read(nbytes)
        if self.machine.ordering is not None:
            self.machine.ordering.host_wrote(target, "read from disk")

    def background(self, job: Callable[[], None]) -> Callable[[], None]:
        """The job is done now; its time passes on the disk timeline."""
        if self.machine.ordering is not None:
            return self.machine.ordering.background(job)
        job()
        return lambda: None

    def reached(self, marks: Sequence[float]) -> bool:
        """Whether the copy timeline is past the end of the read."""
        return bool(marks) and marks[-1] <= self.machine.record("copy")

    @contextmanager
    def on_host(self, slowdown: float) -> Iterator[None]:
        """The compute timeline is charged with the FLOPs that the host does inside."""
        with sim.HostFlops() as counted:
            yield
        self.machine.charge(round(counted.flops * slowdown))

    def mark(self, stream: Stream) -> float:
        """The time at which what was issued to ``stream`` will be done."""
        return self.machine.record(stream)

    def wait(self, stream: Stream, mark: float) -> None:
        """``stream`` goes on no earlier than ``mark``."""
        self.machine.wait(stream, mark)

    def barrier(self) -> None:
        """Joins the timelines."""
        self.machine.synchronize()

    def seconds_at(self, mark: float) -> float:
        """A mark is its time."""
        return mark

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the storages that live, rounded as the machine counts them."""
        return self.machine.allocated_bytes

    @property
    def available_bytes(self) -> int:
        """The machine's capacity as it is now."""
        return self.machine.capacity_bytes if self.machine.capacity_bytes is not None else 1 << 62

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated since `reset_peak`."""
        return self.machine.peak_bytes

    def reset_peak(self) -> None:
        """The peak restarts at what is allocated now."""
        self.machine.reset_peak()

    def release_cached(self) -> None:
        """Nothing: the machine caches no memory."""

    def holders(self) -> tuple[str, ...]:
        """Size, dtype and shape of every storage that lives."""
        return tuple(f"{show_size(nbytes)} {dtype} {tuple(shape)}" for nbytes, shape, dtype in self.machine.live())

    def storage_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Key and bytes in the machine's books."""
        allocation: Any = getattr(tensor, "allocation")  # noqa: B009
        return allocation.key, allocation.nbytes

    def explain(self, error: BaseException) -> GraphrunError | None:
        """Refused allocations and failed copies, injected or not."""
        if isinstance(error, torch.OutOfMemoryError):
            return OutOfMemory(str(error))
        if isinstance(error, sim.SimulatedCopyError):
            return TransferFailed(str(error))
        return None
