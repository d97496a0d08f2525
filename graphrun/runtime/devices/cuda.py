"""A CUDA device as a `Device`: an `AcceleratorDevice` with the three additions below.

ROCm is the same kind, with the same names (`torch.version.hip`).

Bytes. The GPU must have room for the bytes that the allocator *reserves*. Peaks are therefore peaks
of reserved bytes, minus cuBLAS's workspace, which PyTorch takes from the same allocator and a
problem counts separately. Plans assume expandable segments, which keep reserved bytes close to
allocated bytes. They are enabled here for every later segment; the process's own settings
(PYTORCH_ALLOC_CONF) are kept.

Workspace. If the first matrix product allocated cuBLAS's workspace, it would split the free ranges
that later tensors could have used: on an H100, in FLUX's decoder, 4 % of a slot's peak.
`before_call` therefore allocates it, at the point where plans expect it.

Pinned memory. ``torch.empty(pin_memory=True)`` rounds up to a power of two
(pytorch/pytorch#150517): 17 GiB would lock 32 GiB. An arena is therefore ordinary memory on its own
pages, registered with cudaHostRegister. Copies from it are as asynchronous as from memory that
torch pinned, because CUDA checks the pages, not who locked them. On ROCm, hipHostRegister may map
the pages at another address for kernels (hipHostGetDevicePointer); copies take the host's address,
and no kernel here reads the memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from contextlib import AbstractContextManager
from mmap import PAGESIZE
from typing import Any

import torch

from graphrun.device_kinds import kind_called
from graphrun.errors import BrokenPlan, GraphrunError, InputError, OutOfMemory
from graphrun.host_ram import host_ram_bytes
from graphrun.model.hardware import Hardware
from graphrun.runtime.devices.accelerator import AcceleratorDevice, noticed
from graphrun.runtime.devices.device import Device
from graphrun.units import round_up, show_size

# cudaHostRegisterPortable: pinned for every CUDA context of the process (CUDA runtime API, memory
# management)
PORTABLE = 1
_OPEN_DEVICES = weakref.WeakSet["CudaDevice"]()


class CudaDevice(AcceleratorDevice):
    """CUDA device number ``index``. Raises InputError if there is none.

    ``workspace_bytes``: cuBLAS scratch, counted separately from tensors.
    """

    name = "cuda"

    def __init__(self, index: int = 0, workspace_bytes: int = 0, *, unified: bool = False) -> None:
        self._workspace_seen_bytes = 0  # allocated by `before_call` since `release_cached`
        super().__init__(kind_called(self.name), index, workspace_bytes, unified=unified)
        _OPEN_DEVICES.add(self)

    def _open_streams(self) -> bool:
        """Make the streams. Later memory is in expandable segments."""
        _request_expandable_segments()
        self._make_streams()
        return True

    def _counts_memory(self) -> bool:
        return True

    def _new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(device=self._index)  # type: ignore[no-untyped-call]

    def _new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def _issuing_to(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def _memory_info(self) -> tuple[int, int]:
        """As `AcceleratorDevice._memory_info`; an integrated GPU has free what the system has.

        For such a GPU, cudaMemGetInfo reports MemFree, without the page cache.
        """
        free_bytes, total_bytes = super()._memory_info()
        properties = torch.cuda.get_device_properties(self._index)
        if getattr(properties, "is_integrated", False):
            free_bytes = host_ram_bytes()
        return free_bytes, total_bytes

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

    @property
    def peak_bytes(self) -> int:
        """Peak reserved bytes since `reset_peak`, without the workspaces of `before_call`."""
        return super().peak_bytes - self._workspace_seen_bytes

    def before_call(self, *, first: bool) -> None:
        """Allocate the workspaces of cuBLAS and cuBLASLt, if `release_cached` freed them.

        Existing ones are freed first, to measure the bytes of new ones. PyTorch frees them for all
        devices, so this is skipped once another device has allocated its own here.
        """
        if not self._workspace_seen_bytes:
            if not any(device._workspace_seen_bytes for device in _OPEN_DEVICES):
                torch._C._cuda_clearCublasWorkspaces()
            held_bytes = self.allocated_bytes
            self._allocate_workspaces()
            self._workspace_seen_bytes = self.allocated_bytes - held_bytes

    def _allocate_workspaces(self) -> None:
        """Run a product, and a product with a bias: the first of each allocates a workspace."""
        with torch.no_grad(), torch.cuda.stream(self._compute):
            matrix = torch.zeros(16, 16, dtype=torch.float16, device=self.torch_device)
            torch.mm(matrix, matrix)
            torch.nn.functional.linear(matrix, matrix, matrix[0])

    def release_cached(self) -> None:
        """Unmap cached pages and free the workspaces of cuBLAS and cuBLASLt, on all devices.

        The executor calls it for all devices in a row.
        """
        torch._C._cuda_clearCublasWorkspaces()
        super().release_cached()
        self._workspace_seen_bytes = 0

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


def open_cuda(hardware: Hardware, number: int, first_device: Device | None) -> AcceleratorDevice:
    """Return CUDA device ``number``, with a RuntimeWarning for each of its notices.

    Raises InputError if there is none.
    """
    return noticed(CudaDevice(number, hardware.workspace_bytes, unified=hardware.unified))


def _request_expandable_segments() -> None:
    """Enable expandable segments, unless the settings mention them. Other settings are kept.

    Torch 2.11 has no function that returns its settings, so they are read from its environment
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
