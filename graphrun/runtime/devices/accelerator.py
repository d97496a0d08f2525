"""A device of any PyTorch backend with streams, as a `Device`.

Functions come from ``torch.get_device_module(kind)``. ``torch.accelerator`` is used only if the
kind is PyTorch's current accelerator: a process has one, and a registered backend takes precedence
over CUDA (at::getAccelerator).

Streams. Ops run on the stream that is current when a session begins ("compute"), weights are copied
on a side stream ("copy"), and all memory is allocated on compute. ``Tensor.record_stream`` is not
used: it delays a free until an event is polled, so peaks would depend on timing. Instead, the
executor's marks order every reuse (diagram in device.py). The host waits for a stream only at the
barrier of a slot, and never for the whole device.

    copy     |--c1--|--c2--| ... |--c64--|          `overlap_fault`: copies from pinned memory
    host      ^ returns early                       first, then a small kernel on compute
    compute            |-k-|                        ends before the copies: they overlap

Overlap is proved when the first device with a number is opened, because a backend may accept
streams and ignore them. If copies do not return early, or kernels wait for them, `serial_copies` is
true, and plans charge copies and compute one after another.

Memory. Peaks are of the bytes that the backend's allocator counts as reserved. Without such
counters, only weights and ring buffers count. Without a limit of the backend, graphrun checks its
own allocations. `notices` reports both.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from mmap import PAGESIZE
from typing import Any, get_args

import torch

from graphrun.device_kinds import DeviceKind, built_in, kind_called
from graphrun.errors import BrokenPlan, GraphrunError, InputError, OutOfMemory, TransferFailed
from graphrun.host_ram import host_ram_bytes
from graphrun.model.hardware import Hardware
from graphrun.runtime.devices.copy_thread import CopyThread, QueuedMark
from graphrun.runtime.devices.device import Arenas, Device, Queue, StreamName
from graphrun.runtime.direct_reads import Span
from graphrun.units import MIB, show_size

# Bytes of a copy in the proof of overlap, and how many are queued at once: the first number at
# which copies outlast a kernel is enough. On an H100, the host queues a copy in 37 us, 16 MiB take
# 300 us at 55 GB/s (benchmarks/results/card-rates.json), and a small kernel takes less than 0.1 ms.
PROOF_BYTES = 16 * MIB
PROOF_COPIES = (16, 64, 256)
SMALL_BYTES = 4096
# Shares of the time of all copies until which they must be queued, and the kernel must have ended.
EARLY_SHARE, OVERLAP_SHARE = 0.5, 0.75


@dataclass(frozen=True, slots=True)
class UntimedEvent:
    """An event of a backend whose events have no time, and the host's time when it was recorded."""

    event: Any
    host_seconds: float


def event_of(mark: Any) -> Any:
    """Return the event of ``mark``, a mark of a stream."""
    return mark.event if isinstance(mark, UntimedEvent) else mark


class Backend:
    """The functions of the PyTorch backend ``kind``. Raises InputError if PyTorch has none."""

    def __init__(self, kind: str) -> None:
        try:
            self.module: Any = torch.get_device_module(kind)
        except RuntimeError as error:
            raise InputError(
                f"this PyTorch {torch.__version__} has no device {kind!r}: install and import the "
                "package that adds it, or add --device cpu or --device sim"
            ) from error
        self._name = kind
        self._functions_by_name = dict[str, Any]()  # that work (`probe`); None: none does
        current = torch.accelerator.current_accelerator()
        self.is_current = current is not None and current.type == kind

    def function(self, name: str, name_in_accelerator: str = "") -> Any:
        """Return the module's function ``name``, else that of ``torch.accelerator``, else None.

        After `probe`, functions that do not work do not exist.
        """
        if name in self._functions_by_name:
            return self._functions_by_name[name]
        return next(iter(self._functions(name, name_in_accelerator)), None)

    def _functions(self, name: str, name_in_accelerator: str) -> list[Any]:
        functions = [getattr(self.module, name, None)]
        if self.is_current:
            functions.append(getattr(torch.accelerator, name_in_accelerator or name, None))
        return [function for function in functions if function is not None]

    def probe(self, index: int) -> None:
        """Call each function that graphrun can do without, once, for device ``index``.

        For a backend about which nothing is known: its functions may raise anything. Peaks of the
        process are not reset: only a run does that (`AcceleratorDevice.reset_peak`).
        """
        for name, (name_in_accelerator, call) in _OPTIONAL.items():
            functions = self._functions(name, name_in_accelerator)
            self._functions_by_name[name] = next(
                (function for function in functions if _works(call, function, index)), None
            )
        set_fraction = self.function("set_per_process_memory_fraction")
        get_fraction = self.function("get_per_process_memory_fraction")
        # A limit that cannot be read is left alone: the user's own could not be restored.
        if get_fraction is None or not _works(
            lambda function, index: function(get_fraction(index), index), set_fraction, index
        ):
            self._functions_by_name["set_per_process_memory_fraction"] = None

    @property
    def device_count(self) -> int:
        """Number of devices; 0 if the backend is not available. Raises InputError if it fails."""
        is_available, count = self.function("is_available"), self.function("device_count")
        try:
            if is_available is not None and not is_available():
                return 0
            return 1 if count is None else int(count() or 0)
        except Exception as error:  # noqa: BLE001  (another package's function)
            raise InputError(
                f"torch.{self._name} does not count its devices: {type(error).__name__}: {error}; "
                "use --device cpu or --device sim"
            ) from error


def _works(call: Callable[[Any, int], Any], function: Any, index: int) -> bool:
    """Return whether ``call`` of ``function`` for device ``index`` raises nothing."""
    try:
        call(function, index)
    except Exception:  # noqa: BLE001  (another package's function)
        return False
    return True


def _number(function: Any, index: int) -> int:
    return int(function(index))


def _context(function: Any, index: int) -> None:
    with function(index):
        pass


# Functions of backends that graphrun can do without: their names in ``torch.accelerator`` if they
# differ, and a call that fails if the function does not work.
_OPTIONAL: dict[str, tuple[str, Callable[[Any, int], Any]]] = {
    "memory_allocated": ("", _number),
    "memory_reserved": ("", _number),
    "max_memory_allocated": ("", _number),
    "max_memory_reserved": ("", _number),
    "mem_get_info": ("get_memory_info", lambda function, index: [int(n) for n in function(index)]),
    "get_device_properties": ("", lambda function, index: function(index)),
    "get_per_process_memory_fraction": ("", lambda function, index: float(function(index))),
    "empty_cache": ("", lambda function, index: function()),
    "memory_snapshot": (
        "",
        lambda function, index: [segment["blocks"] for segment in function()],
    ),
    "device": ("device_index", _context),
}


class AcceleratorDevice(Device):
    """Device number ``index`` of ``kind``. Raises InputError if there is none.

    ``workspace_bytes``: scratch of kernels that stays allocated, counted separately from tensors.
    ``unified``: whether its memory is the host's; a thread (`copy_thread`) then reads blocks from
    files, and does all work of the copy stream.
    """

    _is_asynchronous = _has_counters = _has_timing = True
    _cap_bytes: int | None = None  # checked by `allocate`; None: not checked
    _workspace_bytes = 0
    _copy_thread: CopyThread | None = None  # within a session, on unified memory

    def __init__(
        self,
        kind: DeviceKind | str,
        index: int = 0,
        workspace_bytes: int = 0,
        *,
        unified: bool = False,
    ) -> None:
        self.unified = unified
        self.kind = kind_called(kind) if isinstance(kind, str) else kind
        self.name = self.kind.name
        if index >= (count := self._backend.device_count):
            raise InputError(
                f"there is no {self.name}:{index}: torch sees {count} {self.kind.label}s; "
                "use --device sim"
            )
        super().__init__()
        if self.kind not in built_in():
            self._backend.probe(index)
        self._index, self.torch_device = index, torch.device(self.name, index)
        self._workspace_bytes = workspace_bytes
        self._own_bytes = Arenas()  # of allocations by `allocate`
        self._begun_seconds = time.perf_counter()
        self._queues = {
            queue: ThreadPoolExecutor(1, f"graphrun-{queue}") for queue in get_args(Queue)
        }
        self._is_asynchronous = self.kind.overlap != "never" and self._open_streams()
        self._has_counters = self._counts_memory()
        fault = self._overlap_fault() if self._is_asynchronous else "it has one queue"
        self.serial_copies = bool(fault)
        self.notices = tuple(self._notices(fault))

    def _overlap_fault(self) -> str:
        """Return `overlap_fault`, from the first device with this number in this process."""
        faults = _overlap_faults()
        if (fault := faults.get(str(self.torch_device))) is None:
            try:
                fault = faults[str(self.torch_device)] = overlap_fault(self)
            except Exception as error:  # noqa: BLE001  (of another package's backend)
                fault = (str(error).splitlines() or ["it fails"])[0]
            self.arenas.reset_peaks()
            self._empty_cache()
        return fault

    def _notices(self, overlap_fault: str) -> Iterator[str]:
        """Yield sentences on what this device does not promise."""
        if overlap_fault:
            yield (
                f"{self.torch_device}: copies do not overlap compute ({overlap_fault}): plans "
                "charge one after the other"
            )
        if not self._has_counters:
            yield (
                f"{self.torch_device}: this backend does not count its memory: peaks are of "
                "weights and ring buffers"
            )
        if self._set_fraction is None:
            yield (
                f"{self.torch_device}: this backend has no memory limit that can be read and set: "
                "graphrun checks its own allocations, and not those of operators"
            )

    @functools.cached_property
    def _backend(self) -> Backend:
        return Backend(self.name)

    # ---- Streams

    def _make_streams(self) -> None:
        self._copy: Any = self._new_stream()
        self._compute: Any = self._current_stream()
        self._origin: Any = self.mark("compute")
        self._copy.synchronize()
        self._compute.synchronize()

    def _open_streams(self) -> bool:
        """Make the streams, and return whether the device has streams and events."""
        try:
            self._make_streams()
        except Exception:  # noqa: BLE001  (of another package's backend)
            return False
        try:
            self._origin.elapsed_time(self._origin)
        except Exception:  # noqa: BLE001  (of another package's backend)
            self._has_timing = False
        return True

    def _new_stream(self) -> Any:
        return torch.Stream(device=self.torch_device)

    def _current_stream(self) -> Any:
        return self._backend.function("current_stream")(self._index)

    def _new_event(self) -> Any:
        return torch.Event(device=self.torch_device, enable_timing=self._has_timing)

    def _issuing_to(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context that issues work to ``stream``."""
        if self._backend.is_current:
            context: AbstractContextManager[Any] = stream
        else:
            context = self._backend.module.stream(stream)
        return context

    def _on(self, stream: StreamName) -> AbstractContextManager[Any]:
        return self._issuing_to(self._stream(stream)) if self._is_asynchronous else nullcontext()

    def _stream(self, stream: StreamName) -> Any:
        return self._copy if stream == "copy" else self._compute

    @contextmanager
    def capped(self, cap_bytes: int, limit_bytes: int = 0) -> Iterator[None]:
        """Make the device current, and limit its allocator to ``cap_bytes`` plus the workspace.

        The limit (set_per_process_memory_fraction) counts the bytes that the caching allocator has
        reserved, also for other code of this process, but not the driver's context. Without such a
        limit, `allocate` checks ``cap_bytes``.

        Before mapping pages, the allocator adds the bytes of the whole request to the reserved
        bytes, even if it maps fewer. ``limit_bytes``, if larger, is therefore the limit: otherwise
        the allocator would trim or refuse allocations of the plan that are within the cap.
        """
        process_bytes = max(cap_bytes, limit_bytes) + self._workspace_bytes
        with self.current():
            if self._is_asynchronous:
                self._compute = self._current_stream()
            self._empty_cache()
            self._origin, self._begun_seconds = self.mark("compute"), time.perf_counter()
            limit = self._limited(process_bytes) if self._set_fraction else self._checked(cap_bytes)
            with limit, self._reading():
                yield

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Start the thread that reads files, on unified memory."""
        if not self.unified:
            yield
            return
        self._copy_thread = CopyThread(self._read_buffer, self._copy_from_buffer, self.current)
        try:
            yield
        finally:
            self._copy_thread.close()
            self._copy_thread = None

    def _read_buffer(self, nbytes: int) -> torch.Tensor:
        buffer = self.arena(nbytes, pinned=True)
        self.pin(buffer)
        return buffer

    def _copy_from_buffer(self, target: torch.Tensor, buffer: torch.Tensor) -> Callable[[], None]:
        """Queue a copy, and return a function that waits for its end."""
        self._copy_now(target, buffer)
        if not self._is_asynchronous:
            return lambda: None
        end = self._recorded_event("copy")
        return lambda: event_of(end).synchronize()

    @contextmanager
    def _limited(self, process_bytes: int) -> Iterator[None]:
        get_fraction = self._backend.function("get_per_process_memory_fraction")
        previous_fraction = get_fraction(self._index) if get_fraction is not None else 1.0
        # The allocator multiplies and truncates; 0.5 keeps it from losing a byte.
        share = (process_bytes + 0.5) / self._total_bytes
        self._set_fraction(min(1.0, share), self._index)
        try:
            yield
        finally:
            self._set_fraction(previous_fraction, self._index)

    @contextmanager
    def _checked(self, cap_bytes: int) -> Iterator[None]:
        self._cap_bytes = cap_bytes
        try:
            yield
        finally:
            self._cap_bytes = None

    def current(self) -> AbstractContextManager[Any]:
        """See `Device.current`."""
        device_context = self._backend.function("device", "device_index")
        context: AbstractContextManager[Any] = (
            nullcontext() if device_context is None else device_context(self._index)
        )
        return context

    # ---- Memory

    @property
    def _set_fraction(self) -> Any:
        return self._backend.function("set_per_process_memory_fraction")

    @property
    def _total_bytes(self) -> int:
        properties = self._backend.function("get_device_properties")
        total_bytes = getattr(properties and properties(self._index), "total_memory", 0)
        return int(total_bytes) or self._memory_info()[1]

    def _memory_info(self) -> tuple[int, int]:
        """Return the free and total bytes of the device; without a function for it, of the host."""
        info = self._backend.function("mem_get_info", "get_memory_info")
        if info is not None:
            with suppress(RuntimeError):
                free_bytes, total_bytes = info(self._index)
                return int(free_bytes), int(total_bytes)
        free_bytes = host_ram_bytes()
        return free_bytes, free_bytes + self.allocated_bytes

    def _empty_cache(self) -> None:
        if (empty := self._backend.function("empty_cache")) is not None:
            empty()

    def _counts_memory(self) -> bool:
        """Return whether the backend's counters count a tensor."""
        if self._backend.function("memory_allocated") is None:
            return False
        try:
            probe = torch.empty(SMALL_BYTES, dtype=torch.uint8, device=self.torch_device)
            counted_bytes = self._counter("memory_allocated")
            del probe
        except RuntimeError:
            return False
        return counted_bytes >= SMALL_BYTES

    def _counter(self, name: str) -> int:
        return int(self._backend.function(name)(self._index))

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return a flat uint8 tensor, allocated on the compute stream.

        Raises torch.OutOfMemoryError beyond the cap if the backend has no limit of its own.
        """
        if self._cap_bytes is not None and self.allocated_bytes + nbytes > self._cap_bytes:
            raise torch.OutOfMemoryError(
                f"{self.torch_device}: {show_size(nbytes)} on top of "
                f"{show_size(self.allocated_bytes)} exceed the budget of "
                f"{show_size(self._cap_bytes)}"
            )
        with self._on("compute"):
            memory = super().allocate(nbytes)
        if nbytes and not self._has_counters:
            self._own_bytes.count("device", memory)
        return memory

    def arena(self, nbytes: int, *, pinned: bool = False) -> torch.Tensor:
        """Return a flat uint8 tensor on the host.

        It is page-locked if ``pinned`` and the kind locks memory when allocating it. PyTorch does
        so only for its current accelerator. A backend's allocator may round the memory up to a
        power of two (pytorch/pytorch#150517), which is not counted.
        """
        if pinned and nbytes and self.kind.pinning == "at allocation" and self._backend.is_current:
            with suppress(RuntimeError):
                memory = torch.empty(nbytes + PAGESIZE, dtype=torch.uint8, pin_memory=True)
                start = -memory.data_ptr() % PAGESIZE
                arena = memory[start : start + nbytes]
                self.arenas.count("arenas", arena)
                return arena
        return super().arena(nbytes)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue the copy. The host waits if memory is pageable, or the device has one queue."""
        if self._copy_thread is not None:
            self._copy_thread.submit(lambda: self._copy_now(target, source))
        else:
            self._copy_now(target, source)

    def read_block(
        self,
        spans: Sequence[tuple[Span, torch.Tensor]],
        write: tuple[Callable[[], None], torch.Tensor] | None,
    ) -> None:
        """As `Device.read_block`: a thread reads through page-locked buffers."""
        if self._copy_thread is None:
            super().read_block(spans, write)
            return
        self._copy_thread.read(spans)
        if write is not None:
            fill, _ = write
            self._copy_thread.submit(lambda: self._fill(fill))

    def _fill(self, fill: Callable[[], None]) -> None:
        with self._on("copy"):
            fill()

    def _copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        try:
            with self._on("copy"):
                target.copy_(source, non_blocking=self._is_asynchronous)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise TransferFailed(
                f"copying {show_size(source.nbytes)} to {target.device} failed: {error}"
            ) from None

    def background(self, job: Callable[[], None], queue: Queue = "disk") -> Callable[[], None]:
        """Run a queue's jobs on one thread, which releases the GIL in reads and page locking."""
        return self._queues[queue].submit(job).result

    # ---- Order and time

    def mark(self, stream: StreamName) -> Any:
        """Return a timing event recorded on ``stream``; for queues of the host, the seconds.

        A device with one queue, which runs everything in order, has only host times. For an event
        without a time, the host's time at its recording is kept too.
        """
        if stream in get_args(Queue):
            return time.perf_counter()
        if stream == "copy" and self._copy_thread is not None:
            return QueuedMark(self._copy_thread.submit(lambda: self._recorded_event("copy")))
        return self._recorded_event(stream)

    def _recorded_event(self, stream: StreamName) -> Any:
        if not self._is_asynchronous:
            return time.perf_counter()
        event = self._new_event()
        event.record(self._stream(stream))
        return event if self._has_timing else UntimedEvent(event, time.perf_counter())

    def wait(self, stream: StreamName, mark: Any) -> None:
        """Make ``stream`` wait for the event; for queues of the host, the host waits.

        A host time has passed already. On unified memory, the host waits until a read is queued as
        copies.
        """
        thread = self._copy_thread
        if isinstance(mark, QueuedMark):
            if stream == "copy":
                return  # the copy stream runs in order
            mark = mark.mark
        if isinstance(mark, float):
            return
        event = event_of(mark)
        if stream == "copy" and thread is not None:
            thread.submit(lambda: self._copy.wait_event(event))
            return
        if stream in get_args(Queue):
            event.synchronize()
        else:
            self._stream(stream).wait_event(event)

    def barrier(self) -> None:
        """Synchronize both streams. Raises the errors of asynchronous kernels and copies."""
        if self._copy_thread is not None:
            self._copy_thread.finish()
        if self._is_asynchronous:
            self._copy.synchronize()
            self._compute.synchronize()
        else:
            self._synchronize_device()

    def _synchronize_device(self) -> None:
        if (synchronize := self._backend.function("synchronize")) is not None:
            synchronize()

    def seconds_at(self, mark: Any) -> float:
        """Return the seconds since the session began.

        On CUDA, events have milliseconds as a 32-bit float (cudaEventElapsedTime): a resolution of
        half a microsecond in the first seconds, 4 microseconds after a minute, and a quarter of a
        millisecond after an hour.
        """
        if isinstance(mark, QueuedMark):
            mark = mark.mark
        if isinstance(mark, float):
            return mark - self._begun_seconds
        if isinstance(mark, UntimedEvent):
            return mark.host_seconds - self._begun_seconds
        return float(self._origin.elapsed_time(mark)) / 1e3

    # ---- Bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of live tensors by the allocator's counters, else of weights and ring buffers."""
        if self._has_counters:
            return self._counter("memory_allocated")
        return self._own_bytes.nbytes("device")

    @property
    def _reserved_bytes(self) -> int:
        """Bytes that the allocator has reserved, at least the bytes of live tensors."""
        has_counter = self._has_counters and self._backend.function("memory_reserved") is not None
        return (has_counter and self._counter("memory_reserved")) or self.allocated_bytes

    @property
    def available_bytes(self) -> int:
        """Bytes reserved by the allocator plus free bytes, minus the workspace.

        On unified memory, all memory that the system has available is free, page cache included.
        """
        free_bytes = host_ram_bytes() if self.unified else self._memory_info()[0]
        return self._reserved_bytes + free_bytes - self._workspace_bytes

    @property
    def peak_bytes(self) -> int:
        """Peak reserved bytes since `reset_peak`, or peak bytes of weights and ring buffers."""
        if not self._has_counters:
            return self._own_bytes.peak_bytes("device")
        peaks = (
            self._counter(name)
            for name in ("max_memory_reserved", "max_memory_allocated")
            if self._backend.function(name) is not None
        )
        return next(filter(None, peaks), self.allocated_bytes)

    def reset_peak(self) -> None:
        if not self._has_counters:
            self._own_bytes.reset_peaks()
        if (reset := self._backend.function("reset_peak_memory_stats")) is not None:
            with suppress(Exception):  # of another package's backend: opening does not try it
                reset(self._index)

    def release_cached(self) -> None:
        self._empty_cache()

    def holders(self) -> tuple[str, ...]:
        """Return the sizes of the allocator's live blocks, largest first, or only their sum."""
        snapshot = self._backend.function("memory_snapshot")
        if snapshot is None:
            return (show_size(self.allocated_bytes),) if self.allocated_bytes else ()
        blocks = [block for segment in snapshot() for block in segment["blocks"]]
        sizes = sorted(
            (int(block["size"]) for block in blocks if block["state"] == "active_allocated"),
            reverse=True,
        )
        return tuple(show_size(size) for size in sizes)

    def explain(self, error: BaseException) -> GraphrunError | None:
        """Return OutOfMemory for a refused allocation, BrokenPlan for other errors of the device.

        Other errors are asynchronous, so their origin is unknown.
        """
        first_line = (str(error).splitlines() or [""])[0]
        if isinstance(error, torch.OutOfMemoryError) or (
            isinstance(error, RuntimeError) and "out of memory" in first_line.lower()
        ):
            return OutOfMemory(f"{self.torch_device} refused an allocation: {first_line}")
        if isinstance(error, torch.AcceleratorError):
            return BrokenPlan(
                f"{self.torch_device} failed: {first_line}; this process cannot use it again"
            )
        return None


def overlap_fault(device: AcceleratorDevice) -> str:
    """Return why copies on ``device`` do not overlap compute; "" if they do.

    Queues copies from page-locked memory, then a small kernel. Copies overlap if the host continues
    long before they end, and the kernel ends long before they do. `PROOF_COPIES` are tried in
    order, because a busy host may be late in a short test.
    """
    source = device.arena(PROOF_BYTES, pinned=True)
    device.pin(source)
    target, small = device.allocate(PROOF_BYTES), device.allocate(SMALL_BYTES)
    # other code may still use the memory's earlier content
    device.wait("copy", device.mark("compute"))
    device.copy(target, source)  # the first call loads the kernel
    with device._on("compute"):
        small.fill_(1)
    device.barrier()
    fault = ""
    for copies in PROOF_COPIES:
        start_seconds = time.perf_counter()
        for _ in range(copies):
            device.copy(target, source)
        queued_seconds, copies_end = time.perf_counter(), event_of(device.mark("copy"))
        with device._on("compute"):
            small.fill_(2)
        event_of(device.mark("compute")).synchronize()
        computed_seconds, is_pending = time.perf_counter(), not copies_end.query()
        device.barrier()
        copy_seconds = time.perf_counter() - start_seconds
        if queued_seconds - start_seconds > EARLY_SHARE * copy_seconds:
            fault = "a copy from page-locked memory makes the host wait"
        elif not is_pending or computed_seconds - start_seconds > OVERLAP_SHARE * copy_seconds:
            fault = "a kernel waits for copies on another stream"
        else:
            return ""
    return fault


@functools.cache
def _overlap_faults() -> dict[str, str]:
    """Results of `overlap_fault` in this process, by torch device."""
    return {}


def open_accelerator(
    hardware: Hardware, number: int, first_device: Device | None
) -> AcceleratorDevice:
    """Return device ``number`` of the kind of ``hardware``, with a RuntimeWarning per notice.

    Raises InputError if there is no such device.
    """
    workspace_bytes = hardware.workspace_bytes
    return noticed(
        AcceleratorDevice(hardware.kind, number, workspace_bytes, unified=hardware.unified)
    )


def noticed(device: AcceleratorDevice) -> AcceleratorDevice:
    """Return ``device``, with a RuntimeWarning for each of its notices."""
    for notice in device.notices:
        warnings.warn(notice, RuntimeWarning, stacklevel=4)
    return device
