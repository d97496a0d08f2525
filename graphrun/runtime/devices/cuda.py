"""A CUDA device as a `Device`, based on the documented semantics of PyTorch's streams and caching
allocator.

Streams. Ops run on the stream that is current when a session begins ("compute"); weights are copied
on a side stream ("copy"). All memory is allocated on compute. ``Tensor.record_stream`` is not used:
it defers a free until an event is polled, so peaks would depend on timing. Instead, the executor's
marks order every reuse (see the diagram in device.py). The host waits for a stream only at the
barrier of a slot, and never for the whole device.

Bytes. The GPU must hold what the allocator *reserves*. Peaks are therefore peaks of reserved bytes,
minus cuBLAS's workspace, which PyTorch takes from the same allocator and a problem counts
separately. Expandable segments keep reserved close to allocated, and plans assume them. They are
enabled here, through the allocator's settings, for every segment created from then on. Settings of
the process itself (PYTORCH_ALLOC_CONF) are kept.

Pinned memory. ``torch.empty(pin_memory=True)`` rounds up to a power of two
(pytorch/pytorch#150517): 17 GiB would lock 32 GiB. An arena is therefore ordinary memory on pages
of its own, registered with cudaHostRegister. Copies from it are as asynchronous as from memory that
torch pinned, because CUDA checks the pages and not who locked them.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from mmap import PAGESIZE
from typing import Any, get_args

import torch

from graphrun.errors import BrokenPlan, GraphrunError, InputError, OutOfMemory, TransferFailed
from graphrun.runtime.devices.device import Device, Queue, Stream
from graphrun.units import round_up, show_size

# cudaHostRegisterPortable: pinned for every CUDA context of the process (CUDA runtime API, memory
# management)
PORTABLE = 1


class CudaDevice(Device):
    """CUDA device number ``index``, with ``workspace_bytes`` of cuBLAS scratch counted separately
    from tensors.

    Raises InputError if there is no such device.
    """

    name = "cuda"

    def __init__(self, index: int = 0, workspace_bytes: int = 0) -> None:
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise InputError(
                f"there is no cuda:{index}: torch sees {torch.cuda.device_count()} CUDA devices; use --device sim"
            )
        super().__init__()
        _request_expandable_segments()
        self._index, self.torch_device = index, torch.device("cuda", index)
        self._workspace_bytes = workspace_bytes
        # allocated by a matrix product since the last `release_cached`
        self._workspace_seen_bytes = 0
        self._copy = torch.cuda.Stream(device=index)  # type: ignore[no-untyped-call]
        self._compute = torch.cuda.current_stream(index)
        self._origin: Any = self.mark("compute")
        self._begun_seconds = time.perf_counter()
        self._queues = {
            queue: ThreadPoolExecutor(1, f"graphrun-{queue}") for queue in get_args(Queue)
        }

    @contextmanager
    def session(self, cap_bytes: int, limit_bytes: int = 0) -> Iterator[None]:
        """Makes the device current, and limits its allocator to ``cap_bytes`` plus the workspace,
        until the context is left.

        The limit (torch.cuda.set_per_process_memory_fraction) counts what the caching allocator has
        reserved, also for other code of this process, and not the CUDA context. Before the
        allocator maps pages, it adds the bytes of the whole request to those reserved, also where
        fewer are mapped. So the limit is ``limit_bytes``, if that is more: with less, the allocator
        would trim, or refuse, what the plan allocates within the cap.
        """
        before = torch.cuda.get_per_process_memory_fraction(self._index)
        # The allocator multiplies and truncates; 0.5 keeps it from losing a byte.
        wanted = max(cap_bytes, limit_bytes) + self._workspace_bytes + 0.5
        share = wanted / torch.cuda.get_device_properties(self._index).total_memory
        with torch.cuda.device(self._index):
            self._compute = torch.cuda.current_stream(self._index)
            torch.cuda.empty_cache()
            self._origin, self._begun_seconds = self.mark("compute"), time.perf_counter()
            torch.cuda.set_per_process_memory_fraction(min(1.0, share), self._index)
            try:
                yield
            finally:
                torch.cuda.set_per_process_memory_fraction(before, self._index)

    def current(self) -> AbstractContextManager[Any]:
        """``torch.cuda.device``."""
        return torch.cuda.device(self._index)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor, allocated on the compute stream."""
        with torch.cuda.stream(self._compute):
            return super().allocate(nbytes)

    def arena(self, nbytes: int) -> torch.Tensor:
        """Host memory on pages of its own, because a page can be registered only once."""
        memory = torch.empty(round_up(nbytes, PAGESIZE) + PAGESIZE, dtype=torch.uint8, device="cpu")
        start = -memory.data_ptr() % PAGESIZE
        arena = memory[start : start + nbytes]
        self.arenas.count("arenas", arena)
        return arena

    def pin(self, arena: torch.Tensor) -> None:
        """Registers the pages of ``arena``, and unregisters them when its storage is freed. Raises
        InputError if the system refuses.

        The finalizer runs before the storage frees its memory, because weak references to a Python
        object are cleared first. ``arena.is_pinned()`` cannot be used: once `sim` is registered, it
        asks that backend (at::getAccelerator prefers PrivateUse1).
        """
        if arena.numel() == 0:
            return
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(
            runtime.cudaHostRegister(arena.data_ptr(), round_up(arena.numel(), PAGESIZE), PORTABLE)
        )
        if code:
            self._clear_last_error()
            raise InputError(
                f"the system refused to pin {show_size(arena.numel())} (cudaError {code}): "
                "raise the limit on locked memory (ulimit -l), or give a smaller --ram"
            )
        weakref.finalize(arena.untyped_storage(), runtime.cudaHostUnregister, arena.data_ptr())
        super().pin(arena)

    def _clear_last_error(self) -> None:
        """Clears the last error of the CUDA runtime by launching a kernel.

        A failed runtime call stays the last error (cudaGetLastError). PyTorch checks it after every
        launch and would blame the next kernel. torch.cuda.cudart() has no cudaGetLastError.
        """
        with contextlib.suppress(RuntimeError), torch.cuda.stream(self._compute):
            torch.empty(1, device=self.torch_device).fill_(1)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """``cudaMemcpyAsync`` on the copy stream. From and to pageable memory it blocks the
        host."""
        try:
            with torch.cuda.stream(self._copy):
                target.copy_(source, non_blocking=True)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise TransferFailed(
                f"copying {show_size(source.nbytes)} to {target.device} failed: {error}"
            ) from None

    def background(self, job: Callable[[], None], queue: Queue = "disk") -> Callable[[], None]:
        """Runs the jobs of a queue on one thread, which releases the GIL while it reads files and
        locks pages."""
        return self._queues[queue].submit(job).result

    def mark(self, stream: Stream) -> torch.cuda.Event | float:
        """A timing event recorded on ``stream``; for queues of the host, its time in seconds."""
        if stream in get_args(Queue):
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream(stream))
        return event

    def wait(self, stream: Stream, mark: torch.cuda.Event | float) -> None:
        """``cudaStreamWaitEvent``; for queues of the host, the host waits. A host time needs no
        waiting: it has passed."""
        if isinstance(mark, float):
            return
        if stream in get_args(Queue):
            mark.synchronize()
        else:
            self._stream(stream).wait_event(mark)

    def barrier(self) -> None:
        """Synchronizes both streams. Errors of asynchronous kernels and copies are raised here."""
        self._copy.synchronize()
        self._compute.synchronize()

    def seconds_at(self, mark: torch.cuda.Event | float) -> float:
        """Seconds since the session began. cudaEventElapsedTime returns milliseconds as a 32-bit
        float: its resolution is half a microsecond in the first seconds, 4 microseconds after a
        minute, a quarter of a millisecond after an hour."""
        if isinstance(mark, float):
            return mark - self._begun_seconds
        return float(self._origin.elapsed_time(mark)) / 1e3

    @property
    def allocated_bytes(self) -> int:
        """Bytes of live blocks of the caching allocator."""
        return torch.cuda.memory_allocated(self._index)

    @property
    def available_bytes(self) -> int:
        """Bytes reserved by the allocator plus bytes free on the device (cudaMemGetInfo), minus the
        workspace."""
        free_bytes, _ = torch.cuda.mem_get_info(self._index)
        return torch.cuda.memory_reserved(self._index) + int(free_bytes) - self._workspace_bytes

    @property
    def peak_bytes(self) -> int:
        """Peak reserved bytes since `reset_peak`, minus cuBLAS's workspace where a matrix product
        has allocated it.

        PyTorch does not tell whether it has. So it is freed to see what it took; the next product
        gets it from the cache. Once seen, it is part of the reserved bytes until `release_cached`.
        """
        if not self._workspace_seen_bytes:
            held_bytes = self.allocated_bytes
            torch._C._cuda_clearCublasWorkspaces()
            self._workspace_seen_bytes = held_bytes - self.allocated_bytes
        return torch.cuda.max_memory_reserved(self._index) - self._workspace_seen_bytes

    def reset_peak(self) -> None:
        """Restarts the peak at the bytes reserved now."""
        torch.cuda.reset_peak_memory_stats(self._index)

    def release_cached(self) -> None:
        """Unmaps cached pages, and frees cuBLAS's workspaces, which are allocated again at the next
        matrix product."""
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        self._workspace_seen_bytes = 0

    def holders(self) -> tuple[str, ...]:
        """Sizes of the allocator's live blocks, largest first."""
        blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]  # type: ignore[no-untyped-call]
        sizes = sorted(
            (int(block["size"]) for block in blocks if block["state"] == "active_allocated"),
            reverse=True,
        )
        return tuple(show_size(size) for size in sizes)

    def explain(self, error: BaseException) -> GraphrunError | None:
        """OutOfMemory by its type; BrokenPlan for other CUDA errors, which are sticky and
        asynchronous, so their origin is unknown."""
        if isinstance(error, torch.OutOfMemoryError):
            # c10/cuda/CUDACachingAllocator.cpp
            which = re.search(r"GPU ([0-9]+) has a total capacity", str(error))
            device = f"cuda:{which[1]}" if which else self.torch_device
            return OutOfMemory(f"{device} refused an allocation: {str(error).splitlines()[0]}")
        if isinstance(error, torch.AcceleratorError):
            return BrokenPlan(
                f"{self.torch_device} failed: {str(error).splitlines()[0]}; this process cannot use it again"
            )
        return None

    def _stream(self, stream: Stream) -> torch.cuda.Stream:
        return self._copy if stream == "copy" else self._compute


def _request_expandable_segments() -> None:
    """Enables expandable segments, unless the settings mention them. Other settings are kept.

    Torch 2.11 has no function that returns its settings: they are taken from its environment
    variables (PyTorch's notes on CUDA, "Optimizing memory usage").
    """
    read_settings = getattr(torch._C, "_accelerator_getAllocatorSettings", _settings_of_environment)
    settings: str = read_settings()
    if "expandable_segments" not in settings:
        torch._C._accelerator_setAllocatorSettings(
            ",".join(filter(None, (settings, "expandable_segments:True")))
        )


def _settings_of_environment() -> str:
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
