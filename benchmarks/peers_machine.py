"""The instrument of the comparison: one capped device with memory counters and a clock.

It is the same for graphrun and other tools.

    sim    graphrun's simulated accelerator: every storage counted, an allocation above the cap
           refused, copies and FLOPs charged to a virtual clock with a compute and a copy timeline
    cuda   the caching allocator with its own cap, PyTorch's statistics, wall seconds after
           synchronizing

benchmarks/README.md describes the limits of each.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch


class Instrument(Protocol):
    """A capped device with memory counters. Sizes in bytes, times in seconds."""

    name: str
    device: torch.device

    def open(self) -> AbstractContextManager[None]:
        """Provide the capped device within the context."""

    def executor(self) -> Any:
        """Return the same device for graphrun's executor."""

    def seconds(self) -> float:
        """Return the clock, once all issued work is done."""

    def allocated_bytes(self) -> int:
        """Return the bytes of live tensors."""

    def peak_bytes(self) -> int:
        """Return the most allocated bytes since `reset_peak`."""

    def reserved_peak_bytes(self) -> int | None:
        """Return the most bytes of the caching allocator since `reset_peak`; None without one."""

    def reset_peak(self) -> None:
        """Restart the peak at the bytes allocated now."""

    def moved(self) -> dict[str, int]:
        """Return the countable bytes copied ``in`` and ``out``, and ``read`` from disk."""


class Sim:
    """The simulated accelerator ``hardware_name``, with ``cap_bytes`` and its plans' rates."""

    name = "sim"

    def __init__(self, cap_bytes: int | None, hardware_name: str = "sim") -> None:
        from graphrun.profile.hardware import hardware
        from graphrun.runtime.devices.open import open_hardware

        device: Any = open_hardware(hardware(hardware_name))
        self.machine = device.machine
        self.machine.capacity_bytes = cap_bytes
        self.device = torch.device("sim:0")
        self._highest_bytes = 0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Activate the machine; modules can be moved to it as to a card."""
        previous = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            with self.machine, data_moves(), pinning(self.machine), reading_files():
                yield
        finally:
            torch.__future__.set_swap_module_params_on_conversion(previous)

    def executor(self) -> Any:
        """Return the machine for the executor, which resets the peak in each slot: the highest is
        stored."""
        from graphrun.runtime.devices.simulated import SimulatedDevice

        noting = self

        class Noted(SimulatedDevice):
            def reset_peak(self) -> None:
                noting._highest_bytes = noting.peak_bytes()
                super().reset_peak()

        return Noted(self.machine)

    def seconds(self) -> float:
        self.machine.synchronize()
        return self.machine.seconds()

    def allocated_bytes(self) -> int:
        return self.machine.allocated_bytes

    def peak_bytes(self) -> int:
        return max(self._highest_bytes, self.machine.peak_bytes)

    def reserved_peak_bytes(self) -> int | None:
        """Return None: if memory counts in pages, `peak_bytes` does."""
        return None

    def reset_peak(self) -> None:
        self._highest_bytes = 0
        self.machine.reset_peak()

    def moved(self) -> dict[str, int]:
        """Return every copy between host and device, by anyone, and graphrun's reads from disk;
        reads of others are not seen."""
        return {
            "in": self.machine.bytes_in,
            "out": self.machine.bytes_out,
            "read": self.machine.bytes_read,
        }


class Cuda:
    """The first CUDA device, with a cap of ``cap_bytes`` on its caching allocator (None: no
    cap)."""

    name = "cuda"

    def __init__(self, cap_bytes: int | None) -> None:
        self.device = torch.device("cuda:0")
        self._cap_bytes = cap_bytes
        self._highest = (0, 0)

    @contextmanager
    def open(self) -> Iterator[None]:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(
            1.0 if self._cap_bytes is None else min(1.0, self._cap_bytes / total), 0
        )
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, 0)

    def executor(self) -> Any:
        """Return the device for the executor, which resets the peak in each slot: the highest is
        stored."""
        from graphrun.profile.hardware import detect_card
        from graphrun.runtime.devices.cuda import CudaDevice

        noting, card = self, detect_card()

        class Noted(CudaDevice):
            def reset_peak(self) -> None:
                noting._highest = noting._peaks()
                super().reset_peak()

        return Noted(workspace_bytes=0 if card is None else card.workspace_bytes)

    def seconds(self) -> float:
        torch.cuda.synchronize(0)
        return time.perf_counter()

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(0)

    def peak_bytes(self) -> int:
        return self._peaks()[0]

    def reserved_peak_bytes(self) -> int | None:
        """Return the most reserved bytes: the card's use without the context."""
        return self._peaks()[1]

    def _peaks(self) -> tuple[int, int]:
        allocated, reserved_bytes = self._highest
        return max(allocated, torch.cuda.max_memory_allocated(0)), max(
            reserved_bytes, torch.cuda.max_memory_reserved(0)
        )

    def reset_peak(self) -> None:
        """Restart the peak, with an empty cache."""
        self._highest = (0, 0)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(0)

    def moved(self) -> dict[str, int]:
        """Return nothing: PyTorch counts no copies, and a profiler would change the measurement."""
        return {}


@contextmanager
def data_moves() -> Iterator[None]:
    """Allow ``parameter.data = tensor_on_sim``, as between CPU and CUDA, for group offloading.

    PyTorch refuses it if one side is a tensor subclass, as sim's are. Here the two tensors are
    swapped instead, as PyTorch itself does for subclasses in ``Module.to``: the same objects, the
    same bytes, no further copy.
    """
    from graphrun.sim.tensor import SimTensor

    plain: Any = torch._C.TensorBase.data
    data_property: Any = SimTensor.__dict__["data"]

    def read(tensor: torch.Tensor) -> Any:
        return data_property.__get__(tensor) if type(tensor) is SimTensor else plain.__get__(tensor)

    def write(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if (type(tensor) is SimTensor) == (type(value) is SimTensor):
            (data_property if type(tensor) is SimTensor else plain).__set__(tensor, value)
            return
        twin = value.detach()
        if isinstance(tensor, torch.nn.Parameter):
            twin = torch.nn.Parameter(twin, requires_grad=tensor.requires_grad)
        torch.utils.swap_tensors(tensor, twin)  # type: ignore[no-untyped-call]

    moves = property(read, write)
    torch.Tensor.data, SimTensor.data = moves, moves  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch.Tensor.data
        SimTensor.data = data_property  # type: ignore[method-assign]


@contextmanager
def pinning(machine: Any) -> Iterator[None]:
    """Make ``tensor.pin_memory()`` a copy in host memory that ``machine`` counts as page-locked.
    Without a card PyTorch cannot pin."""
    from graphrun.sim.tensor import page_locked

    pin, pinned = torch.Tensor.pin_memory, torch.Tensor.is_pinned

    def pin_memory(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        if page_locked(tensor):
            return tensor
        copy = tensor.detach().clone()
        machine.page_lock(copy, in_background=False)
        return copy

    torch.Tensor.pin_memory, torch.Tensor.is_pinned = (
        pin_memory,
        lambda tensor, device=None: page_locked(tensor),
    )  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.pin_memory, torch.Tensor.is_pinned = pin, pinned  # type: ignore[method-assign]


@contextmanager
def reading_files() -> Iterator[None]:
    """Make ``safetensors.torch.load_file(path, device="sim")`` read to the host and copy:
    safetensors has its own list of devices."""
    import safetensors.torch

    files: Any = safetensors.torch
    plain = files.load_file

    def load_file(path: Any, device: Any = "cpu", **options: Any) -> dict[str, torch.Tensor]:
        if torch.device(device).type != "sim":
            return dict(plain(path, device=device, **options))
        return {
            name: tensor.to(device) for name, tensor in plain(path, device="cpu", **options).items()
        }

    files.load_file = load_file
    try:
        yield
    finally:
        files.load_file = plain


def instrument(name: str, cap_bytes: int | None, hardware: str | None) -> Instrument:
    """Return ``sim`` or ``cuda``, capped. ``hardware``: the name of the simulated accelerator."""
    return Sim(cap_bytes, hardware or name) if name == "sim" else Cuda(cap_bytes)
