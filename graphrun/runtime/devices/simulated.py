"""The simulated machine as a `Device`.

Copies happen at once; the virtual clock overlaps them with compute as a GPU does.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from graphrun import sim
from graphrun.errors import GraphrunError, OutOfMemory, TransferFailed
from graphrun.model.allocator import Caching
from graphrun.model.hardware import Hardware
from graphrun.runtime.devices.device import Device, Queue, StreamName
from graphrun.units import show_size


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which compiled code runs as written: ``sim`` has no compiler.

    Does nothing if this process has no compiled code.
    """
    return (
        torch.compiler.set_stance("force_eager")
        if "torch._dynamo.eval_frame" in sys.modules
        else contextlib.nullcontext()
    )


class SimulatedDevice(Device):
    """``machine`` as a device. Its marks are virtual times.

    ``serial_copies``: copies are charged to the compute timeline.
    """

    name = "sim"

    def __init__(self, machine: sim.Machine, *, serial_copies: bool = False) -> None:
        super().__init__()
        self.machine, self.torch_device = machine, machine.device
        self.serial_copies = serial_copies

    @property
    def memory(self) -> Any:
        return self.machine

    @contextmanager
    def capped(self, cap_bytes: int, limit_bytes: int = 0) -> Iterator[None]:
        """Activate the machine with a capacity of at most ``cap_bytes``.

        A secondary machine becomes active with the first machine. Ops run on the machine's compute
        timeline, whichever timeline was current. On exit, the capacity is restored unless it was
        changed meanwhile. Raises RaceError if races were found since the last barrier.
        """
        previous_bytes, ordering = self.machine.capacity_bytes, self.machine.ordering
        capped = cap_bytes if previous_bytes is None else min(previous_bytes, cap_bytes)
        first = self.machine is self.machine.machines[0]
        with contextlib.ExitStack() as stack:
            if first:
                stack.enter_context(self.machine)
                stack.enter_context(_uncompiled())
            if first and ordering is not None:
                stack.enter_context(ordering.watching())
            self.machine.capacity_bytes = capped
            try:
                with self.machine.clock.use_stream("compute", synchronous=True):
                    yield
                if first and ordering is not None:
                    ordering.raise_races()
            finally:
                if self.machine.capacity_bytes == capped:
                    self.machine.capacity_bytes = previous_bytes

    def pin(self, arena: torch.Tensor) -> None:
        """Page-lock ``arena``, and charge the timeline of page locking."""
        super().pin(arena)
        self.machine.page_lock(arena)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy now, and charge the copy timeline. The host waits if memory is not page-locked."""
        with nullcontext() if self.serial_copies else self.machine.on_copy_stream():
            target.copy_(source)

    def read(self, target: torch.Tensor, nbytes: int) -> None:
        """Charge the disk timeline."""
        self.machine.read(nbytes)
        if self.machine.ordering is not None:
            self.machine.ordering.host_wrote(target, "read from disk")

    def background(self, job: Callable[[], None], queue: Queue = "disk") -> Callable[[], None]:
        """Run the job now, in the time of its queue: a copy can thus be queued after every read."""
        if self.machine.ordering is not None:
            return self.machine.ordering.background(job)
        job()
        return lambda: None

    def reached(self, marks: Sequence[float]) -> bool:
        """Return whether the read ends before the current end of the copy timeline."""
        return bool(marks) and marks[-1] <= self.mark("copy")

    def annotate(self, *, slot: str | None = None, block: str | None = None) -> None:
        """Notify the ordering checker, if there is one."""
        if self.machine.ordering is not None:
            self.machine.ordering.annotate(slot, block)

    @contextmanager
    def on_host(self, slowdown: float) -> Iterator[None]:
        """Charge the compute timeline with the FLOPs of the CPU inside, times ``slowdown``."""
        with sim.HostFlops() as host_flops:
            yield
        self.machine.charge(round(host_flops.flops * slowdown))

    def mark(self, stream: StreamName) -> float:
        """Return the virtual time at which the work issued to ``stream`` is finished."""
        return self.machine.record(self._timeline(stream))

    def wait(self, stream: StreamName, mark: float) -> None:
        """Make ``stream`` continue at ``mark`` or later."""
        self.machine.wait(self._timeline(stream), mark)

    def _timeline(self, stream: StreamName) -> StreamName:
        return "compute" if self.serial_copies and stream == "copy" else stream

    def barrier(self) -> None:
        """Join the timelines."""
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
        return self.machine.peak_bytes

    def reset_peak(self) -> None:
        self.machine.reset_peak()

    def release_cached(self) -> None:
        """Return pages without tensors, if the machine counts in pages."""
        self.machine.trim()

    def holders(self) -> tuple[str, ...]:
        """Return size, dtype and shape of every live storage."""
        return tuple(
            f"{show_size(nbytes)} {dtype} {tuple(shape)}"
            for nbytes, shape, dtype in self.machine.live()
        )

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is on this machine: one process may have several machines."""
        allocation: Any = getattr(tensor, "allocation", None)
        return allocation is not None and allocation.machine is self.machine

    def storage_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return key and bytes in the machine's ledger."""
        allocation: Any = getattr(tensor, "allocation")  # noqa: B009
        return allocation.key, allocation.nbytes

    def explain(self, error: BaseException) -> GraphrunError | None:
        """Return OutOfMemory for a refused allocation, TransferFailed for a failed copy.

        Both may be injected.
        """
        kinds = ((torch.OutOfMemoryError, OutOfMemory), (sim.SimulatedCopyError, TransferFailed))
        return next(
            (error_class(str(error)) for kind, error_class in kinds if isinstance(error, kind)),
            None,
        )


def open_simulated(
    hardware: Hardware,
    number: int,
    first_device: Device | None,
    *,
    check_ordering: bool = False,
) -> SimulatedDevice:
    """Return a simulated device with the rates of ``hardware``.

    ``first_device``: the main device, whose clock a secondary device shares. Raises GraphrunError
    if this PyTorch does not support `sim`.
    """
    assert first_device is None or isinstance(first_device, SimulatedDevice)
    return SimulatedDevice(
        sim.Machine(
            capacity_bytes=hardware.capacity_bytes,
            h2d_bytes_per_second=hardware.h2d_bytes_per_second,
            d2h_bytes_per_second=hardware.d2h_bytes_per_second,
            flops_per_second=hardware.flops_per_second,
            pageable_bytes_per_second=hardware.pageable_bytes_per_second,
            disk_bytes_per_second=hardware.disk_bytes_per_second,
            launch_seconds=hardware.launch_seconds,
            copy_start_seconds=hardware.copy_start_seconds,
            page_lock_seconds=hardware.page_lock_seconds,
            check_ordering=check_ordering or None,
            pages=Caching(hardware.page_scale) if hardware.caching_allocator else None,
            sibling=None if first_device is None else first_device.machine,
        ),
        serial_copies=hardware.serial_copies,
    )
