"""The simulated machine as a `Device`. Copies happen at once; the virtual clock overlaps them with
compute as a GPU does."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graphrun import sim
from graphrun.errors import GraphrunError, OutOfMemory, TransferFailed
from graphrun.runtime.devices.device import Device, Queue, Stream
from graphrun.units import show_size


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """A context in which what `torch.compile` compiled runs as it was written: there is no compiler
    for ``sim``. Without compiled code in this process, nothing to do."""
    return (
        torch.compiler.set_stance("force_eager")
        if "torch._dynamo.eval_frame" in sys.modules
        else contextlib.nullcontext()
    )


class SimulatedDevice(Device):
    """``machine`` as a device. Its marks are virtual times."""

    name = "sim"

    def __init__(self, machine: sim.Machine) -> None:
        super().__init__()
        self.machine, self.torch_device = machine, machine.device

    @property
    def memory(self) -> Any:
        """The machine."""
        return self.machine

    @contextmanager
    def session(self, cap_bytes: int, limit_bytes: int = 0) -> Iterator[None]:
        """Activates the machine with a capacity of at most ``cap_bytes``; one beside another
        becomes active with that one. Ops run on its compute timeline, whichever was current.

        Leaving restores its capacity, unless it was changed meanwhile, and raises RaceError if
        races were found since the last barrier.
        """
        before, ordering = self.machine.capacity_bytes, self.machine.ordering
        capped = cap_bytes if before is None else min(before, cap_bytes)
        first = self.machine is self.machine.machines[0]
        with contextlib.ExitStack() as stack:
            if first:
                stack.enter_context(self.machine)
                stack.enter_context(_uncompiled())
            if first and ordering is not None:
                stack.enter_context(ordering.watching())
            self.machine.capacity_bytes = capped
            try:
                with self.machine.clock.on("compute", synchronous=True):
                    yield
                if first and ordering is not None:
                    ordering.raise_races()
            finally:
                if self.machine.capacity_bytes == capped:
                    self.machine.capacity_bytes = before

    def pin(self, arena: torch.Tensor) -> None:
        """Page-locks, and charges the timeline of that."""
        super().pin(arena)
        self.machine.page_lock(arena)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies now, and charges the copy timeline. The host waits where memory is not
        page-locked."""
        with self.machine.on_copy_stream():
            target.copy_(source)

    def read(self, target: torch.Tensor, nbytes: int) -> None:
        """Charges the disk timeline."""
        self.machine.read(nbytes)
        if self.machine.ordering is not None:
            self.machine.ordering.host_wrote(target, "read from disk")

    def background(self, job: Callable[[], None], queue: Queue = "disk") -> Callable[[], None]:
        """Runs the job now; its time passes on the timeline of its queue. So a copy can be queued
        behind every read."""
        if self.machine.ordering is not None:
            return self.machine.ordering.background(job)
        job()
        return lambda: None

    def reached(self, marks: Sequence[float]) -> bool:
        """Whether the read ends before the current end of the copy timeline."""
        return bool(marks) and marks[-1] <= self.machine.record("copy")

    def annotate(self, *, slot: str | None = None, block: str | None = None) -> None:
        """Tells the ordering checker, where there is one."""
        if self.machine.ordering is not None:
            self.machine.ordering.annotate(slot, block)

    @contextmanager
    def on_host(self, slowdown: float) -> Iterator[None]:
        """Charges the compute timeline with the FLOPs computed on the CPU inside, times
        ``slowdown``."""
        with sim.HostFlops() as counted:
            yield
        self.machine.charge(round(counted.flops * slowdown))

    def mark(self, stream: Stream) -> float:
        """The virtual time at which the work issued to ``stream`` is finished."""
        return self.machine.record(stream)

    def wait(self, stream: Stream, mark: float) -> None:
        """``stream`` continues no earlier than ``mark``."""
        self.machine.wait(stream, mark)

    def barrier(self) -> None:
        """Joins the timelines."""
        self.machine.synchronize()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of live storages, each rounded up to 512."""
        return self.machine.allocated_bytes

    @property
    def available_bytes(self) -> int:
        """The current capacity of the machine; 2**62 without a limit."""
        return self.machine.capacity_bytes if self.machine.capacity_bytes is not None else 1 << 62

    @property
    def peak_bytes(self) -> int:
        """Peak bytes allocated since `reset_peak`."""
        return self.machine.peak_bytes

    def reset_peak(self) -> None:
        """Restarts the peak at the bytes allocated now."""
        self.machine.reset_peak()

    def release_cached(self) -> None:
        """Returns pages without tensors, where the machine counts in pages."""
        self.machine.trim()

    def holders(self) -> tuple[str, ...]:
        """Size, dtype and shape of every live storage."""
        return tuple(
            f"{show_size(nbytes)} {dtype} {tuple(shape)}"
            for nbytes, shape, dtype in self.machine.live()
        )

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it is on this machine: one process may have several."""
        allocation: Any = getattr(tensor, "allocation", None)
        return allocation is not None and allocation.machine is self.machine

    def storage_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Key and bytes in the machine's ledger."""
        allocation: Any = getattr(tensor, "allocation")  # noqa: B009
        return allocation.key, allocation.nbytes

    def explain(self, error: BaseException) -> GraphrunError | None:
        """OutOfMemory for a refused allocation, TransferFailed for a failed copy; injected or
        not."""
        kinds = ((torch.OutOfMemoryError, OutOfMemory), (sim.SimulatedCopyError, TransferFailed))
        return next((ours(str(error)) for kind, ours in kinds if isinstance(error, kind)), None)
