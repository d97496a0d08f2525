"""A CUDA device as a `Device`.

Based on the documented semantics of PyTorch's streams and caching allocator.

Streams. Ops run on the stream that is current when a session begins ("compute"). Weights are copied
on a side stream ("copy"). All memory is allocated on compute. ``Tensor.record_stream`` is not used:
it defers a free until an event is polled, so peaks would depend on timing. Instead, the executor's
marks order every reuse (see the diagram in device.py). The host waits for a stream only at the
barrier of a slot, and never for the whole device.

Bytes. The GPU must hold the bytes that the allocator *reserves*. Peaks are therefore peaks of
reserved bytes, minus cuBLAS's workspace. PyTorch takes the workspace from the same allocator, and a
problem counts it separately. Expandable segments keep reserved bytes close to allocated bytes, and
plans assume them. They are enabled here, through the allocator's settings, for every segment
created from then on. The process's own settings (PYTORCH_ALLOC_CONF) are kept.

Workspace. Where the first matrix product allocates cuBLAS's workspace, it splits the free ranges
that the tensors after it could have used. On an H100, in the decoder of FLUX, that was 4 % of a
slot's peak. `before_call` therefore allocates it, at the point where plans expect it.

Pinned memory. ``torch.empty(pin_memory=True)`` rounds up to a power of two
(pytorch/pytorch#150517): 17 GiB would lock 32 GiB. An arena is therefore ordinary memory on its own
pages, registered with cudaHostRegister. Copies from it are as asynchronous as from memory that
torch pinned, because CUDA checks the pages, not who locked them.
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
from graphrun.runtime.devices.device import Device, Queue, StreamName
from graphrun.units import round_up, show_size

# cudaHostRegisterPortable: pinned for every CUDA context of the process (CUDA runtime API, memory
# management)
PORTABLE = 1
_OPEN_DEVICES = weakref.WeakSet["CudaDevice"]()


class CudaDevice(Device):
    """CUDA device number ``index``.

    ``workspace_bytes``: cuBLAS scratch, counted separately from tensors. Raises InputError if there
    is no such device.
    """

    name = "cuda"

    def __init__(self, index: int = 0, workspace_bytes: int = 0) -> None:
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise InputError(
                f"there is no cuda:{index}: torch sees {torch.cuda.device_count()} CUDA devices; "
                "use --device sim"
            )
        super().__init__()
        _request_expandable_segments()
        self._index, self.torch_device = index, torch.device("cuda", index)
        self._workspace_bytes = workspace_bytes
        self._workspace_seen_bytes = 0  # allocated by `before_call` since `release_cached`
        _OPEN_DEVICES.add(self)
        self._copy = torch.cuda.Stream(device=index)  # type: ignore[no-untyped-call]
        self._compute = torch.cuda.current_stream(index)
        self._origin: Any = self.mark("compute")
        self._begun_seconds = time.perf_counter()
        self._queues = {
            queue: ThreadPoolExecutor(1, f"graphrun-{queue}") for queue in get_args(Queue)
        }

    @contextmanager
    def session(self, cap_bytes: int, limit_bytes: int = 0) -> Iterator[None]:
        """Make the device current, and limit its allocator to ``cap_bytes`` plus the workspace.

        Both last until the context is left. The limit (torch.cuda.set_per_process_memory_fraction)
        counts the bytes that the caching allocator has reserved, also for other code of this
        process, but not the CUDA context.

        Before mapping pages, the allocator adds the bytes of the whole request to the reserved
        bytes, even if it maps fewer. The limit is therefore ``limit_bytes`` if that is larger. With
        a smaller limit, the allocator would trim or refuse allocations of the plan that are within
        the cap.
        """
        previous_fraction = torch.cuda.get_per_process_memory_fraction(self._index)
        # The allocator multiplies and truncates; 0.5 keeps it from losing a byte.
        process_bytes = max(cap_bytes, limit_bytes) + self._workspace_bytes + 0.5
        share = process_bytes / torch.cuda.get_device_properties(self._index).total_memory
        with torch.cuda.device(self._index):
            self._compute = torch.cuda.current_stream(self._index)
            torch.cuda.empty_cache()
            self._origin, self._begun_seconds = self.mark("compute"), time.perf_counter()
            torch.cuda.set_per_process_memory_fraction(min(1.0, share), self._index)
            try:
                yield
            finally:
                torch.cuda.set_per_process_memory_fraction(previous_fraction, self._index)

    def current(self) -> AbstractContextManager[Any]:
        """See `Device.current`: ``torch.cuda.device``."""
        return torch.cuda.device(self._index)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return a flat uint8 tensor, allocated on the compute stream."""
        with torch.cuda.stream(self._compute):
            return super().allocate(nbytes)

    def pin(self, arena: torch.Tensor) -> None:
        """Register the pages of ``arena``, and unregister them when its storage is freed.

        Raises InputError if the system refuses. The finalizer runs before the storage frees its
        memory, because weak references to a Python object are cleared first. ``arena.is_pinned()``
        cannot be used: once `sim` is registered, it asks that backend (at::getAccelerator prefers
        PrivateUse1).
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
        """Clear the last error of the CUDA runtime by launching a kernel.

        A failed runtime call stays the last error (cudaGetLastError). PyTorch checks it after every
        launch and would blame the next kernel. torch.cuda.cudart() has no cudaGetLastError.
        """
        with contextlib.suppress(RuntimeError), torch.cuda.stream(self._compute):
            torch.empty(1, device=self.torch_device).fill_(1)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue ``cudaMemcpyAsync`` on the copy stream.

        Copies from and to pageable memory block the host.
        """
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
        """Run the jobs of a queue on one thread.

        The thread releases the GIL while it reads files and locks pages.
        """
        return self._queues[queue].submit(job).result

    def mark(self, stream: StreamName) -> torch.cuda.Event | float:
        """Return a timing event recorded on ``stream``; for queues of the host, the time.

        The time is in seconds.
        """
        if stream in get_args(Queue):
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream(stream))
        return event

    def wait(self, stream: StreamName, mark: torch.cuda.Event | float) -> None:
        """Queue ``cudaStreamWaitEvent``; for queues of the host, the host waits.

        A host time needs no waiting: it has passed.
        """
        if isinstance(mark, float):
            return
        if stream in get_args(Queue):
            mark.synchronize()
        else:
            self._stream(stream).wait_event(mark)

    def barrier(self) -> None:
        """Synchronize both streams. Errors of asynchronous kernels and copies are raised here."""
        self._copy.synchronize()
        self._compute.synchronize()

    def seconds_at(self, mark: torch.cuda.Event | float) -> float:
        """Return the seconds since the session began.

        cudaEventElapsedTime returns milliseconds as a 32-bit float. Its resolution is half a
        microsecond in the first seconds, 4 microseconds after a minute, and a quarter of a
        millisecond after an hour.
        """
        if isinstance(mark, float):
            return mark - self._begun_seconds
        return float(self._origin.elapsed_time(mark)) / 1e3

    @property
    def allocated_bytes(self) -> int:
        """Bytes of live blocks of the caching allocator."""
        return torch.cuda.memory_allocated(self._index)

    @property
    def available_bytes(self) -> int:
        """Bytes reserved by the allocator plus free bytes (cudaMemGetInfo), minus the workspace."""
        free_bytes, _ = torch.cuda.mem_get_info(self._index)
        return torch.cuda.memory_reserved(self._index) + int(free_bytes) - self._workspace_bytes

    @property
    def peak_bytes(self) -> int:
        """Peak reserved bytes since `reset_peak`, minus the workspace that `before_call`
        allocated."""
        return torch.cuda.max_memory_reserved(self._index) - self._workspace_seen_bytes

    def reset_peak(self) -> None:
        """Restart the peak at the bytes reserved now."""
        torch.cuda.reset_peak_memory_stats(self._index)

    def before_call(self) -> None:
        """Allocate the workspaces of cuBLAS and cuBLASLt, if `release_cached` freed them.

        Those that exist are freed first, so that what is allocated then are their bytes. PyTorch
        frees those of all devices, so not if another device has allocated its own here.
        """
        if not self._workspace_seen_bytes:
            if not any(device._workspace_seen_bytes for device in _OPEN_DEVICES):
                torch._C._cuda_clearCublasWorkspaces()
            held_bytes = self.allocated_bytes
            self._allocate_workspaces()
            self._workspace_seen_bytes = self.allocated_bytes - held_bytes

    def _allocate_workspaces(self) -> None:
        """Run a product and a product with a bias: PyTorch allocates a workspace at the first of
        each."""
        with torch.no_grad(), torch.cuda.stream(self._compute):
            matrix = torch.zeros(16, 16, dtype=torch.float16, device=self.torch_device)
            torch.mm(matrix, matrix)
            torch.nn.functional.linear(matrix, matrix, matrix[0])

    def release_cached(self) -> None:
        """Unmap cached pages and free the workspaces of cuBLAS and cuBLASLt, on all devices.

        The executor calls it for all devices in a row.
        """
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        self._workspace_seen_bytes = 0

    def holders(self) -> tuple[str, ...]:
        """Return the sizes of the allocator's live blocks, largest first."""
        blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]  # type: ignore[no-untyped-call]
        sizes = sorted(
            (int(block["size"]) for block in blocks if block["state"] == "active_allocated"),
            reverse=True,
        )
        return tuple(show_size(size) for size in sizes)

    def explain(self, error: BaseException) -> GraphrunError | None:
        """Return OutOfMemory for errors of that type, and BrokenPlan for other CUDA errors.

        Other CUDA errors are sticky and asynchronous, so their origin is unknown.
        """
        if isinstance(error, torch.OutOfMemoryError):
            # c10/cuda/CUDACachingAllocator.cpp
            gpu_match = re.search(r"GPU ([0-9]+) has a total capacity", str(error))
            device = f"cuda:{gpu_match[1]}" if gpu_match else self.torch_device
            return OutOfMemory(f"{device} refused an allocation: {str(error).splitlines()[0]}")
        if isinstance(error, torch.AcceleratorError):
            return BrokenPlan(
                f"{self.torch_device} failed: {str(error).splitlines()[0]}; this process cannot "
                "use it again"
            )
        return None

    def _stream(self, stream: StreamName) -> torch.cuda.Stream:
        return self._copy if stream == "copy" else self._compute


def _request_expandable_segments() -> None:
    """Enable expandable segments, unless the settings mention them. Other settings are kept.

    Torch 2.11 has no function that returns its settings. They are therefore read from its
    environment variables (PyTorch's notes on CUDA, "Optimizing memory usage").
    """
    read_settings = getattr(torch._C, "_accelerator_getAllocatorSettings", _settings_of_environment)
    settings: str = read_settings()
    if "expandable_segments" not in settings:
        torch._C._accelerator_setAllocatorSettings(
            ",".join(filter(None, (settings, "expandable_segments:True")))
        )


def _settings_of_environment() -> str:
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
