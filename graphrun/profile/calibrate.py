"""Measures this machine in seconds: the roads to a device and what it computes. Says nothing of what is to be run.

    cuda   the card itself                       the clock on the wall, the card synchronized before and after
    sim    the simulated accelerator             its own virtual clock, so what it declares comes out
    cpu    this processor, as if it were a card  copies within RAM

Every figure is the best of repetitions within a share of the time allowed: what disturbs a measurement only makes it worse.
Compute counts as FLUX's transformer does it at 1024 x 1024: 59.5 TFLOP in matrix products of [4608 3072] with [3072 12288], and
14.9 in attention over 4608 tokens.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Protocol

from graphrun.errors import InputError
from graphrun.model.problem import Hardware
from graphrun.profile import hardware
from graphrun.profile import hardware_profiles as profiles
from graphrun.profile.machine import whole_ram_bytes
from graphrun.units import MIB

Kind = Literal["cuda", "sim", "cpu"]

LINEAR_SHARE = 59.5 / (59.5 + 14.9)
CHUNK_BYTES = 4 * MIB
DISK_BYTES = 256 * MIB
SMALL_BYTES, SMALL_COPIES = 512, 256  # what shows how long a copy takes to start

# What a CUDA context may take. Outside of this another process came or went meanwhile, or the library looked at another card.
CONTEXT_BYTES = range(32 * MIB, 2048 * MIB)


class Place(Protocol):
    """A device to be measured. ``bytes`` are those of one copy; work is queued, and `now` waits for all of it."""

    nbytes: int

    def now(self) -> float:
        """Seconds on the device's clock, everything queued being done."""

    def copy(self, kind: str) -> None:
        """One copy of ``nbytes``: ``h2d``, ``d2h``, ``pageable``, or ``both`` (one each way at once); or ``SMALL_COPIES`` of
        ``SMALL_BYTES``, ``small``, to the device from pinned memory."""

    def compute(self, kind: str) -> float:
        """``matmul``, ``attention`` or ``convolution`` once; the FLOPs it took."""


def calibrate(kind: Kind, folder: Path, name: str = "", allowed_seconds: float = 20.0) -> tuple[Hardware, dict[str, float]]:
    """This machine as a `Hardware` with basis ``measured``, and the single figures, by name, that it was made from.

    Takes about ``allowed_seconds`` besides imports. ``folder`` is on the disk to be measured. Raises InputError where there is no
    such device.
    """
    before = _cards_used_bytes() if kind == "cuda" else {}  # before torch wakes the driver
    base, place = _open(kind)
    share = allowed_seconds / 9
    figures = {
        f"{copy}_bytes_per_second": _rate(place, lambda copy=copy: _copied(place, copy), share)  # type: ignore[misc]
        for copy in ("h2d", "d2h", "pageable")
    }
    figures["both_bytes_per_second"] = _rate(place, lambda: _copied(place, "both"), share)
    small = _rate(place, lambda: _copied(place, "small") and SMALL_COPIES, share)
    figures["copy_start_seconds"] = max(0.0, 1 / small - SMALL_BYTES / figures["h2d_bytes_per_second"])
    figures["disk_bytes_per_second"] = disk_rate(folder, share)
    for work in ("matmul", "attention"):
        figures[f"{work}_flops_per_second"] = _rate(place, lambda work=work: place.compute(work), share)  # type: ignore[misc]
    if kind == "cuda":
        base = _with_context(base, before, place)
    figures["context_bytes"] = float(base.context_bytes)
    matmul, attention = figures["matmul_flops_per_second"], figures["attention_flops_per_second"]
    measured = replace(
        base,
        name=name or base.name,
        h2d_bytes_per_second=figures["h2d_bytes_per_second"],
        d2h_bytes_per_second=figures["d2h_bytes_per_second"],
        pageable_bytes_per_second=figures["pageable_bytes_per_second"],
        bidirectional=min(1.0, figures["both_bytes_per_second"] / figures["h2d_bytes_per_second"]),
        disk_bytes_per_second=figures["disk_bytes_per_second"],
        copy_start_seconds=figures["copy_start_seconds"],
        flops_per_second=1 / (LINEAR_SHARE / matmul + (1 - LINEAR_SHARE) / attention),
        basis="measured",
    )
    return measured, figures


def measure_and_keep(kind: Kind | None, cache: Path, name: str = "", allowed_seconds: float = 20.0) -> dict[str, Any]:
    """Calibrates, keeps the profile in ``cache`` and returns what was found, JSON-ready. None: the card, else the processor."""
    kind = kind or ("cuda" if any(Path(node).exists() for node in hardware.DEVICE_NODES) else "cpu")
    if name in hardware.priors():
        raise InputError(f"{name} is the name of a prior: give the profile another one with --name")
    start = time.perf_counter()
    measured, figures = calibrate(kind, cache, name, allowed_seconds)
    card = hardware.found() if kind == "cuda" else None
    assumed = card or (hardware.simulated() if kind == "sim" else None)
    facts = {
        "figures": figures,
        "assumed": asdict(assumed) if assumed is not None else None,
        "versions": {"torch": version("torch")},
        "measured_in_seconds": time.perf_counter() - start,
    }
    path = profiles.keep(cache, measured, card.name if card is not None else kind, facts)
    return {**facts, "hardware": asdict(measured), "path": str(path)}


def _open(kind: Kind) -> tuple[Hardware, Place]:
    if kind == "cuda":
        found = hardware.found()
        if found is None:
            raise InputError("there is no CUDA device here to calibrate; --device cpu or --device sim measure what is here")
        taken = found.name in hardware.priors()
        return (replace(found, name=f"{found.name}-measured") if taken else found), _Cuda()
    if kind == "sim":
        return replace(hardware.simulated(), name="sim-measured"), _Sim()
    capacity_bytes = whole_ram_bytes()
    return replace(hardware.simulated(), name="cpu", device="cpu", capacity_bytes=capacity_bytes), _Cpu()


def _copied(place: Place, kind: str) -> float:
    place.copy(kind)
    return float(place.nbytes)


def _rate(place: Place, work: Callable[[], float], seconds: float) -> float:
    """The best amount per second of ``work``, which returns its amount; at least three goes after one that warms up."""
    work()
    best, goes, end = 0.0, 0, time.perf_counter() + seconds
    while goes < 3 or (time.perf_counter() < end and goes < 50):
        begin = place.now()
        amount = work()
        best = max(best, amount / max(place.now() - begin, 1e-9))
        goes += 1
    return best


def disk_rate(folder: Path, seconds: float) -> float:
    """Bytes per second of reading, in order, a file that is not in the page cache; what was read in ``seconds`` counts.

    Where the system cannot be told to forget the file (no posix_fadvise) it is read from the cache, and the figure is too high.
    """
    folder.mkdir(parents=True, exist_ok=True)
    block = os.urandom(CHUNK_BYTES)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".disk-") as file:
            end = time.perf_counter() + seconds
            written = 0
            while written < DISK_BYTES and (written == 0 or time.perf_counter() < end):
                written += file.write(block)
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            nbytes, begin = 0, time.perf_counter()
            while (got := os.read(file.fileno(), CHUNK_BYTES)) and time.perf_counter() < begin + seconds:
                nbytes += len(got)
            return max(nbytes, 1) / max(time.perf_counter() - begin, 1e-9)
    except OSError as error:
        raise InputError(f"{folder}: the disk cannot be measured: {error.strerror}") from error


class _Cpu:
    """This processor. Host and device are both RAM, so pinned and pageable are the same."""

    nbytes = 64 * MIB

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._here, self._there = (torch.empty(self.nbytes, dtype=torch.uint8, device="cpu").fill_(n) for n in range(2))
        shapes = ((512, 512), (512, 2048), (1, 8, 512, 64))
        self._left, self._right, self._heads = (torch.randn(shape, dtype=torch.bfloat16, device="cpu") for shape in shapes)

    def now(self) -> float:
        """Seconds on the wall."""
        return time.perf_counter()

    def copy(self, kind: str) -> None:
        """One copy within RAM, or two, one after the other, or small ones."""
        for _ in range(SMALL_COPIES if kind == "small" else 0):
            self._there[:SMALL_BYTES].copy_(self._here[:SMALL_BYTES])
        if kind == "small":
            return
        self._there.copy_(self._here)
        if kind == "both":
            self._here.copy_(self._there)

    def compute(self, kind: str) -> float:
        """The products, smaller than on a card."""
        return _compute(self._torch, kind, self._left, self._right, self._heads)


class _Sim(_Cpu):
    """The simulated accelerator, on its own clock."""

    nbytes = MIB

    def __init__(self) -> None:
        from graphrun import sim

        super().__init__()
        self._machine = sim.Machine()
        with self._machine:
            tensors = (self._here, self._left, self._right, self._heads)
            self._on_sim, self._left, self._right, self._heads = (tensor.to(sim.device) for tensor in tensors)

    def now(self) -> float:
        """Seconds on the virtual clock."""
        self._machine.synchronize()
        return self._machine.seconds()

    def copy(self, kind: str) -> None:
        """Copies by the one engine that the simulated accelerator has."""
        with self._machine, self._machine.on_copy_stream():
            for _ in range(SMALL_COPIES if kind == "small" else 0):
                self._on_sim[:SMALL_BYTES].copy_(self._here[:SMALL_BYTES])
            if kind not in ("d2h", "small"):
                self._on_sim.copy_(self._here)
            if kind in ("d2h", "both"):
                self._there.copy_(self._on_sim)

    def compute(self, kind: str) -> float:
        """The products, charged to the virtual clock."""
        with self._machine:
            return super().compute(kind)


class _Cuda:
    """The first CUDA device. Copies on two side streams, so that both directions can run at once."""

    nbytes = 256 * MIB
    repeats = 10

    def __init__(self) -> None:
        import torch

        self._torch, device = torch, torch.device("cuda", 0)
        self._pinned = [torch.empty(self.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).fill_(n) for n in range(2)]
        self._pageable = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu").fill_(1)
        self._device = [torch.empty(self.nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._streams = [torch.cuda.Stream(device=device) for _ in range(2)]  # type: ignore[no-untyped-call]
        half = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
        shapes = ((4608, 3072), (3072, 12288), (1, 24, 4608, 128))
        self._left, self._right, self._heads = (torch.randn(shape, dtype=half, device=device) for shape in shapes)
        torch.cuda.synchronize(device)

    def now(self) -> float:
        """Seconds on the wall, the card being idle."""
        self._torch.cuda.synchronize(0)
        return time.perf_counter()

    def copy(self, kind: str) -> None:
        """From and to pinned memory on side streams; pageable memory on the current one."""
        if kind == "pageable":
            self._device[0].copy_(self._pageable)
        with self._torch.cuda.stream(self._streams[0]):
            for _ in range(SMALL_COPIES if kind == "small" else 0):
                self._device[0][:SMALL_BYTES].copy_(self._pinned[0][:SMALL_BYTES], non_blocking=True)
        if kind in ("h2d", "both"):
            with self._torch.cuda.stream(self._streams[0]):
                self._device[0].copy_(self._pinned[0], non_blocking=True)
        if kind in ("d2h", "both"):
            with self._torch.cuda.stream(self._streams[1]):
                self._pinned[1].copy_(self._device[1], non_blocking=True)

    def compute(self, kind: str) -> float:
        """The products in 16 bits, often enough (milliseconds) that waiting for the card does not count."""
        return sum(_compute(self._torch, kind, self._left, self._right, self._heads) for _ in range(self.repeats))


def _compute(torch: Any, kind: str, left: Any, right: Any, heads: Any) -> float:
    """One matrix product [m k] [k n], fused attention [b h s d], or a convolution of [b h s d] with 3 x 3 kernels, h to h channels;
    its FLOPs: 2 m k n, 4 b h s s d, 18 b h h s d."""
    with torch.no_grad():
        if kind == "matmul":
            torch.mm(left, right)
            return float(2 * left.shape[0] * left.shape[1] * right.shape[1])
        if kind == "convolution":
            channels = heads.shape[1]
            torch.nn.functional.conv2d(heads, left.flatten()[: 9 * channels**2].view(channels, channels, 3, 3), padding=1)
            return float(18 * channels * heads.numel())
        torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return float(4 * heads.numel() * heads.shape[-2])


def _with_context(base: Hardware, before: Mapping[str, int], place: Place) -> Hardware:
    """``base`` with what the driver took since it was woken: what its card lost beyond what torch reserved. Behind products and
    attention, and a convolution: kernels are loaded when they first run, and stay. No less than ``base`` assumes, since a run may
    need kernels that were not loaded here.
    """
    import torch

    place.compute("convolution")
    place.now()
    measured = taken(before, _cards_used_bytes(), _uuid(), torch.cuda.memory_reserved(0))
    return replace(base, context_bytes=max(base.context_bytes, measured or 0))


def taken(before: Mapping[str, int], after: Mapping[str, int], uuid: str, reserved_bytes: int) -> int | None:
    """Bytes of the card ``uuid`` that went from ``before`` to ``after`` beyond ``reserved_bytes``. The management library numbers
    cards otherwise than torch does, and knows nothing of those that are hidden from it: hence by UUID, or the only card there is.
    None where that cannot be told, or is no context.
    """
    name = uuid if uuid in before else next(iter(before)) if len(before) == 1 else ""
    if name not in before or name not in after:
        return None
    context_bytes = after[name] - before[name] - reserved_bytes
    return context_bytes if context_bytes in CONTEXT_BYTES else None


def _uuid() -> str:
    """The first device's UUID as the management library writes it; empty where torch does not say."""
    import torch

    properties: Any = torch.cuda.get_device_properties(0)
    return f"GPU-{getattr(properties, 'uuid', '')}"


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def _cards_used_bytes() -> dict[str, int]:
    """Bytes in use on each card, by all processes, by UUID, as the driver's management library (NVML) says; empty without it."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return {}
    found: dict[str, int] = {}
    count, handle, memory, name = ctypes.c_uint(), ctypes.c_void_p(), _Memory(), ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() != 0:
        return {}
    try:
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return {}
        for index in range(count.value):
            known = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0
            named = known and nvml.nvmlDeviceGetUUID(handle, name, len(name)) == 0
            if named and nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0:
                found[name.value.decode()] = int(memory.used)
    finally:
        nvml.nvmlShutdown()
    return found
