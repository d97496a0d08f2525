"""A CUDA device, by PyTorch's documented semantics of streams and of its caching allocator. Holds no decision of a plan.

Streams. Ops run on the stream that is current when a session begins ("compute"); weights arrive on a side stream ("copy"). All
memory is allocated on compute. ``Tensor.record_stream`` is not used: it defers a free until an event is polled, so that peaks would
depend on timing; the executor's marks order every reuse instead (the drawing in device.py). The host waits for a stream only at a
slot's barrier, and never for the whole device.

Bytes. A card must hold what the allocator *reserves*, so peaks are peaks of reserved bytes, less cuBLAS's workspace, which PyTorch
takes from the same allocator and a problem counts apart. Expandable segments keep reserved close to allocated, and plans assume
them; they are requested here, through the allocator's settings, and serve every segment that is made from then on. What the process
set itself (PYTORCH_ALLOC_CONF) stays.

Pinned memory. ``torch.empty(pin_memory=True)`` rounds up to a power of two (pytorch/pytorch#150517): 17 GiB would lock 32. An arena
is therefore ordinary memory, whole pages of its own, that is registered with cudaHostRegister once it is filled. Copies from it are
as asynchronous as from memory that torch pinned: CUDA looks at the pages, not at who locked them.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from mmap import PAGESIZE
from typing import Any

import torch

from graphrun.errors import BrokenPlan, GraphrunError, InputError, OutOfMemory, TransferFailed
from graphrun.runtime.devices.device import Arenas, Stream
from graphrun.units import round_up, show_size

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context of the process (CUDA runtime API, memory management)


class CudaDevice:
    """CUDA device number ``index``, with ``workspace_bytes`` of cuBLAS's scratch counted apart from tensors.

    Raises InputError when there is no such device.
    """

    def __init__(self, index: int = 0, workspace_bytes: int = 0) -> None:
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise InputError(f"cuda:{index} is not there: torch sees {torch.cuda.device_count()} CUDA devices; use --device sim")
        _request_expandable_segments()
        self._index = index
        self._workspace_bytes = workspace_bytes
        self.arenas = Arenas()
        self._copy = torch.cuda.Stream(device=index)  # type: ignore[no-untyped-call]
        self._compute = torch.cuda.current_stream(index)
        self._origin: Any = self.mark("compute")
        self._begun_seconds = time.perf_counter()
        self._reader = ThreadPoolExecutor(1, "graphrun-reader")

    @property
    def name(self) -> str:
        """``cuda``."""
        return "cuda"

    @property
    def torch_device(self) -> torch.device:
        """``cuda:index``."""
        return torch.device("cuda", self._index)

    @contextmanager
    def session(self, cap_bytes: int) -> Iterator[None]:
        """The device is current, and its allocator reserves at most ``cap_bytes`` and the workspace; leaving lifts the cap.

        The fraction counts what the caching allocator reserves and not the context (torch.cuda.set_per_process_memory_fraction), so
        that what other code of this process has reserved counts too.
        """
        before = torch.cuda.get_per_process_memory_fraction(self._index)
        wanted = cap_bytes + self._workspace_bytes + 0.5  # the allocator multiplies and cuts off: no byte less than the cap
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

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor, allocated on the compute stream."""
        with torch.cuda.stream(self._compute):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def arena(self, nbytes: int) -> torch.Tensor:
        """Host memory that begins at a page and shares its last page with nobody: a page can be registered once."""
        memory = torch.empty(round_up(nbytes, PAGESIZE) + PAGESIZE, dtype=torch.uint8, device="cpu")
        start = -memory.data_ptr() % PAGESIZE
        arena = memory[start : start + nbytes]
        self.arenas.count("arenas", arena)
        return arena

    def pin(self, arena: torch.Tensor) -> None:
        """Registers ``arena``'s pages, and unregisters them when its storage dies. Raises InputError when the system refuses.

        The finalizer runs before the storage frees its memory, as weak references to a Python object are cleared first. Asking
        ``arena.is_pinned()`` would not do: once `sim` is registered it asks that backend (at::getAccelerator prefers PrivateUse1).
        """
        if arena.numel() == 0:
            return
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(arena.data_ptr(), round_up(arena.numel(), PAGESIZE), PORTABLE))
        if code:
            self._take_last_error()
            raise InputError(
                f"the system refused to pin {show_size(arena.numel())} (cudaError {code}): "
                "raise the limit on locked memory (ulimit -l), or give a smaller --ram"
            )
        weakref.finalize(arena.untyped_storage(), runtime.cudaHostUnregister, arena.data_ptr())
        self.arenas.count("pinned", arena)

    def _take_last_error(self) -> None:
        """A refused call of the runtime's stays its last error (cudaGetLastError), and PyTorch, which asks for that behind every
        launch, would blame the next kernel: this is that kernel. torch.cuda.cudart() has no cudaGetLastError."""
        with contextlib.suppress(RuntimeError), torch.cuda.stream(self._compute):
            torch.empty(1, device=self.torch_device).fill_(1)

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, *, pageable: bool = False) -> None:
        """``cudaMemcpyAsync`` on the copy stream; from pageable memory the driver makes the host wait."""
        self._copy_async(target, source)

    def copy_out(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Likewise; to pageable memory, so that the host waits."""
        self._copy_async(target, source)

    def read(self, target: torch.Tensor, nbytes: int) -> None:
        """Nothing: the time has passed."""

    def background(self, job: Callable[[], None]) -> Callable[[], None]:
        """On one thread of its own, that holds no lock of Python's while it reads."""
        return self._reader.submit(job).result

    def reached(self, marks: Sequence[float]) -> bool:
        """Whether it was read."""
        return len(marks) == 2

    @contextmanager
    def on_host(self, slowdown: float) -> Iterator[None]:
        """Nothing: the time passes."""
        yield

    def _copy_async(self, target: torch.Tensor, source: torch.Tensor) -> None:
        try:
            with torch.cuda.stream(self._copy):
                target.copy_(source, non_blocking=True)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise TransferFailed(f"copying {show_size(source.nbytes)} to {target.device} failed: {error}") from None

    def mark(self, stream: Stream) -> torch.cuda.Event | float:
        """A timing event recorded on ``stream``; of the disk, the host's time."""
        if stream == "disk":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream(stream))
        return event

    def wait(self, stream: Stream, mark: torch.cuda.Event | float) -> None:
        """``cudaStreamWaitEvent``; the disk is the host's, which waits itself. A time of the host's has passed."""
        if isinstance(mark, float):
            return
        if stream == "disk":
            mark.synchronize()
        else:
            self._stream(stream).wait_event(mark)

    def barrier(self) -> None:
        """Both streams are drained. Errors of kernels and copies that ran asynchronously surface here."""
        self._copy.synchronize()
        self._compute.synchronize()

    def seconds_at(self, mark: torch.cuda.Event | float) -> float:
        """Seconds from the session's begin. cudaEventElapsedTime says milliseconds in 32 bits: to half a microsecond in the first
        seconds, to 4 after a minute, to a quarter of a millisecond after an hour."""
        if isinstance(mark, float):
            return mark - self._begun_seconds
        return float(self._origin.elapsed_time(mark)) / 1e3

    @property
    def allocated_bytes(self) -> int:
        """Bytes of live blocks of the caching allocator."""
        return torch.cuda.memory_allocated(self._index)

    @property
    def available_bytes(self) -> int:
        """What the allocator has reserved and what the driver calls free (cudaMemGetInfo), less the workspace."""
        free_bytes, _ = torch.cuda.mem_get_info(self._index)
        return torch.cuda.memory_reserved(self._index) + int(free_bytes) - self._workspace_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was reserved since `reset_peak`, less the workspace."""
        return max(0, torch.cuda.max_memory_reserved(self._index) - self._workspace_bytes)

    def reset_peak(self) -> None:
        """The peak restarts at what is reserved now."""
        torch.cuda.reset_peak_memory_stats(self._index)

    def release_cached(self) -> None:
        """Unmaps cached pages, and drops cuBLAS's workspaces, which are taken again at the next product."""
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def holders(self) -> tuple[str, ...]:
        """Live blocks of the allocator by size."""
        blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]  # type: ignore[no-untyped-call]
        sizes = sorted((int(block["size"]) for block in blocks if block["state"] == "active_allocated"), reverse=True)
        return tuple(show_size(size) for size in sizes)

    def storage_of(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Address and bytes."""
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()

    def explain(self, error: BaseException) -> GraphrunError | None:
        """Out of memory by its type. A CUDA error is sticky and asynchronous, so where it came from is not known."""
        if isinstance(error, torch.OutOfMemoryError):
            return OutOfMemory(f"{self.torch_device} refused an allocation: {str(error).splitlines()[0]}")
        if isinstance(error, torch.AcceleratorError):
            return BrokenPlan(f"{self.torch_device} failed: {str(error).splitlines()[0]}; this process cannot use it again")
        return None

    def _stream(self, stream: Stream) -> torch.cuda.Stream:
        return self._copy if stream == "copy" else self._compute


def _request_expandable_segments() -> None:
    """The settings so far, with expandable segments unless they say something about them. Other settings are kept as they are.

    Torch 2.11 cannot be asked for its settings: they are taken from the variables that it reads them from (PyTorch's notes on
    CUDA, "Optimizing memory usage").
    """
    asked = getattr(torch._C, "_accelerator_getAllocatorSettings", _settings_of_environment)
    settings: str = asked()
    if "expandable_segments" not in settings:
        torch._C._accelerator_setAllocatorSettings(",".join(filter(None, (settings, "expandable_segments:True"))))


def _settings_of_environment() -> str:
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
