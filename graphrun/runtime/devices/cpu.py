"""The CPU as a `Device`: one memory for weights, activations and the process itself.

    disk     |--read 3 (past the page cache)--|--read 4--|      threads (`DirectReads`), in order
    compute  |--block 2--|--block 3--|--block 4--|              the calling thread

Ops compute when they are called, so a mark of the compute stream has always passed. The copy stream
is the queue of reads; the host waits for its marks. Every allocation is a mapping of its own, in
huge pages if the kernel has them: freed memory returns to the system at once, and nothing is
fragmented. Peaks are the kernel's figures for the process, minus the planned bytes of the process
itself (`Hardware.context_bytes`).
"""

from __future__ import annotations

import functools
import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from graphrun.c_heap import HeapFragments, trim_freed_memory
from graphrun.errors import GraphrunError, InputError, OutOfMemory
from graphrun.host_ram import host_ram_bytes
from graphrun.kernel_memory import ProcessPeak, process_bytes
from graphrun.model.hardware import Hardware
from graphrun.runtime.devices.device import Arenas, Device, Mark, Queue, StreamName
from graphrun.runtime.direct_reads import DirectReads, MappedArena, Span, SpanRead
from graphrun.systems import refuse_forked
from graphrun.units import MIB, round_up, show_size

# Room for what libraries allocate in their first calls, and the step to which it is rounded up.
CONTEXT_STEP_BYTES = 16 * MIB
# Bytes that a dry run and the solver leave in a process, measured on x86-64 Linux: 40 to 60 MiB for
# the tiny graphs, 85 for SDXL.
PLANNING_BYTES = 80 * MIB
_ADDRESSES = set[int]()  # of weights and ring buffers of all devices in this process


@functools.cache
def _arenas() -> Arenas:
    """Counters of all devices in this process, which share one memory."""
    return Arenas()


if hasattr(os, "register_at_fork"):  # not on Windows; a forked process does not have the memory
    os.register_at_fork(after_in_child=_arenas.cache_clear)
    os.register_at_fork(after_in_child=_ADDRESSES.clear)


@dataclass(frozen=True, slots=True)
class _CopyMark:
    """The end of the reads queued so far."""

    queued_seconds: float
    last_read: SpanRead | None

    @property
    def seconds(self) -> float:
        """Time of the end, on `time.perf_counter`. Valid when the reads have ended."""
        read_seconds = 0.0 if self.last_read is None else self.last_read.ended_seconds
        return max(self.queued_seconds, read_seconds)


class CpuDevice(Device):
    """The CPU of this machine.

    ``context_bytes``: planned bytes of the process itself; may be set between sessions.
    """

    name = "cpu"
    torch_device = torch.device("cpu")
    unified = True

    def __init__(self, hardware: Hardware) -> None:
        super().__init__()
        self.arenas, self._process = _arenas(), os.getpid()
        self.context_bytes = hardware.context_bytes
        self._workspace_bytes = hardware.workspace_bytes  # of code that kernels generate
        self._cap_bytes: int | None = None  # of weights and activations together, in a session
        self._origin_seconds = time.perf_counter()
        self._reads: DirectReads | None = None
        self._peak: ProcessPeak | None = None
        self._last_read: SpanRead | None = None
        self._fragments = HeapFragments()
        self._has_failed = self._has_warned = False

    @property
    def other_bytes(self) -> int:
        """Bytes of the process now, without weights and ring buffers."""
        return process_bytes().nbytes - self.allocated_bytes

    def measured_context(self, *, to_plan: bool = False) -> int:
        """Return ``context_bytes`` for the process as it is now, or ``to_plan``: after planning.

        Rounded up, so that equal programs get equal plans, with room for what libraries allocate in
        their first calls. Raises InputError in a forked process.
        """
        self._refuse_forked()
        trim_freed_memory()
        spare_bytes = CONTEXT_STEP_BYTES + (PLANNING_BYTES if to_plan else 0)
        return round_up(self.other_bytes + spare_bytes, CONTEXT_STEP_BYTES)

    @contextmanager
    def capped(self, cap_bytes: int, limit_bytes: int = 0) -> Iterator[None]:
        """Start the threads that read, and the measurement of peaks.

        If the process already has more than its planned bytes, the cap is lower by the difference.
        Warns (RuntimeWarning) if a file system refuses direct reads. Raises InputError in a forked
        process.
        """
        self._refuse_forked()
        self._cap_bytes = cap_bytes - max(0, self.other_bytes - self.context_bytes)
        self._origin_seconds, self._has_failed = time.perf_counter(), False
        try:
            with DirectReads() as self._reads, ProcessPeak() as self._peak:
                yield
            self._warn_of_cached_reads(self._reads)
        finally:
            self._reads = self._peak = self._last_read = self._cap_bytes = None
            self._fragments.release()

    def _warn_of_cached_reads(self, reads: DirectReads) -> None:
        """Warn once if files were read through the page cache on a system with direct reads."""
        cached_files = [file for file, is_direct in reads.is_direct.items() if not is_direct]
        if cached_files and hasattr(os, "O_DIRECT") and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{cached_files[0]} is read through the page cache, because its file system "
                "refuses direct reads: reading takes several times the processor time; put "
                "weights on a local disk",
                RuntimeWarning,
                stacklevel=2,
            )

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory in pages of its own.

        Raises torch.OutOfMemoryError beyond the cap, or if the system refuses; InputError in a
        forked process.
        """
        self._refuse_forked()
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        if self._cap_bytes is not None and self.allocated_bytes + nbytes > self._cap_bytes:
            raise torch.OutOfMemoryError(
                f"cpu: {show_size(nbytes)} on top of {show_size(self.allocated_bytes)} exceed the "
                f"{show_size(self._cap_bytes)} left for weights and activations"
            )
        try:
            memory = MappedArena(nbytes).view(0, nbytes)
        except InputError as error:
            raise torch.OutOfMemoryError(str(error)) from error
        self.arenas.count("device", memory)
        storage = memory.untyped_storage()
        _ADDRESSES.add(storage.data_ptr())
        weakref.finalize(storage, _ADDRESSES.discard, storage.data_ptr()).atexit = False
        return memory

    def pin(self, arena: torch.Tensor) -> None:
        """Do nothing: no memory is page-locked."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy now."""
        target.copy_(source)

    def read_block(
        self,
        spans: Sequence[tuple[Span, torch.Tensor]],
        write: tuple[Callable[[], None], torch.Tensor] | None,
    ) -> None:
        """As `Device.read_block`: the reads of one session are done in order."""
        assert self._reads is not None, "files are read within a session"
        for span, target in spans:
            self._last_read = self._reads.submit(span, target)
        if write is not None:
            self._last_read = self._reads.submit_write(*write)

    def background(self, job: Callable[[], None], queue: Queue = "disk") -> Callable[[], None]:
        """Run the job now."""
        job()
        return lambda: None

    def mark(self, stream: StreamName) -> Mark:
        """Return the time; for the copy stream, the reads queued so far."""
        seconds = time.perf_counter()
        if stream == "copy":
            return _CopyMark(seconds, self._last_read)
        return seconds

    def wait(self, stream: StreamName, mark: Mark) -> None:
        """Wait on the host for the reads before compute. Raises the error of a read.

        Reads need not wait for compute, which has ended when the call returns.
        """
        if stream == "compute" and isinstance(mark, _CopyMark) and mark.last_read is not None:
            try:
                mark.last_read.wait()
            except BaseException:
                self._has_failed = True
                raise

    def barrier(self) -> None:
        """Wait for the reads. After an error or interrupt in a wait, end them instead."""
        if self._has_failed and self._reads is not None:
            self._reads.close()
        else:
            self.wait("compute", self.mark("copy"))

    def seconds_at(self, mark: Mark) -> float:
        """Return the seconds since the session began."""
        seconds: float = mark.seconds if isinstance(mark, _CopyMark) else mark
        return seconds - self._origin_seconds

    @property
    def allocated_bytes(self) -> int:
        """Bytes of weights and ring buffers."""
        return self.arenas.nbytes("device")

    @property
    def available_bytes(self) -> int:
        """Bytes for weights and activations, within the limits of system, cgroup and session."""
        system_bytes = host_ram_bytes() + process_bytes().nbytes - self.context_bytes
        return system_bytes if self._cap_bytes is None else min(system_bytes, self._cap_bytes)

    @property
    def peak_bytes(self) -> int:
        """Peak of the process since `reset_peak`, without the planned bytes of the process itself.

        At least the bytes of weights and ring buffers now.
        """
        process_peak = 0 if self._peak is None else self._peak.nbytes
        return max(self.allocated_bytes, process_peak - self.context_bytes - self._workspace_bytes)

    def reset_peak(self) -> None:
        """Return freed memory to the system, and restart the peak at the bytes in use then."""
        trim_freed_memory()
        if self._peak is not None:
            self._peak.reset()

    def release_cached(self) -> None:
        trim_freed_memory()

    def before_call(self, *, first: bool) -> None:
        """Let the call's tensors lie side by side. Raises InputError in a forked process.

        Also returns freed memory to the system: without this, a denoising loop grows by about 10 MB
        per step.
        """
        self._refuse_forked()
        self._fragments.take(first=first)

    def _refuse_forked(self) -> None:
        refuse_forked(self._process, "the CPU's memory", "open the device and load weights")

    def holders(self) -> tuple[str, ...]:
        """Return the bytes of weights and ring buffers."""
        return (show_size(self.allocated_bytes),) if self.allocated_bytes else ()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is a view of weights or of a ring buffer."""
        return (
            tensor.device.type == "cpu"
            and tensor.layout == torch.strided
            and tensor.untyped_storage().data_ptr() in _ADDRESSES
        )

    def explain(self, error: BaseException) -> GraphrunError | None:
        """Return OutOfMemory for an allocation that this device or the system refused."""
        text = str(error)
        is_refusal = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
            isinstance(error, RuntimeError) and "DefaultCPUAllocator" in text
        )
        return OutOfMemory(f"the CPU's memory: {text.splitlines()[0]}") if is_refusal else None


def open_cpu(hardware: Hardware, number: int, first_device: Device | None) -> CpuDevice:
    """Return this machine's CPU."""
    return CpuDevice(hardware)
