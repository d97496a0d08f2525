"""An Apple GPU as a `Device`: PyTorch's backend ``mps``. Never run: written from its sources.

One queue runs everything in order, so copies and compute take turns. Memory is the host's
(`Hardware.unified`), but PyTorch copies through tensors of the CPU. The counters are Metal's:
`torch.mps.driver_allocated_memory` has tensors and the allocator's cache. The cache keeps a slot's
freed memory, so the counter at a slot's end is the slot's peak.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from graphrun.host_ram import host_ram_bytes
from graphrun.model.hardware import Hardware
from graphrun.runtime.devices.accelerator import AcceleratorDevice, noticed
from graphrun.runtime.devices.device import Device

# PyTorch's own limit: 1.7 times the recommended working set (default_high_watermark_ratio in
# aten/src/ATen/mps/MPSAllocator.h); no function of torch.mps returns it.
DEFAULT_FRACTION = 1.7


class MpsDevice(AcceleratorDevice):
    """The Apple GPU of this machine. Raises InputError if there is none."""

    def current(self) -> AbstractContextManager[Any]:
        """Return an empty context: there is one device."""
        return nullcontext()

    @contextmanager
    def _limited(self, process_bytes: int) -> Iterator[None]:
        """Limit Metal's memory of this process, as a share of the recommended working set."""
        share = process_bytes / self._total_bytes
        self._set_fraction(min(DEFAULT_FRACTION, max(share, 1e-6)))  # 0 would be no limit
        try:
            yield
        finally:
            self._set_fraction(DEFAULT_FRACTION)

    @property
    def _total_bytes(self) -> int:
        return int(self._backend.module.recommended_max_memory())

    def _memory_info(self) -> tuple[int, int]:
        total_bytes = self._total_bytes
        left_bytes = max(0, total_bytes - self._reserved_bytes)
        return min(left_bytes, host_ram_bytes()), total_bytes

    def _counts_memory(self) -> bool:
        return True

    @property
    def allocated_bytes(self) -> int:
        return int(self._backend.module.current_allocated_memory())

    @property
    def _reserved_bytes(self) -> int:
        return int(self._backend.module.driver_allocated_memory())

    @property
    def peak_bytes(self) -> int:
        """Bytes of tensors and cache now: the cache has all memory used since `release_cached`."""
        return self._reserved_bytes

    def reset_peak(self) -> None:
        """Empty the cache, so that `peak_bytes` restarts."""
        self._empty_cache()


def open_mps(hardware: Hardware, number: int, first_device: Device | None) -> AcceleratorDevice:
    """Return the Apple GPU, with a RuntimeWarning for each of its notices.

    Raises InputError if there is none.
    """
    return noticed(
        MpsDevice(hardware.kind, number, hardware.workspace_bytes, unified=hardware.unified)
    )
