"""Measures this machine in seconds: the bandwidths to a device and to the disk, and the compute
rate. Independent of any graph.

    cuda   the card                              wall clock, with the card synchronized before and
    after sim    the simulated accelerator             its virtual clock, so the result equals what
    it declares cpu    this processor, treated like a card   copies within RAM

Every figure is the best of several repetitions within a share of the time allowed, since
disturbances only make a measurement worse. The compute rate weights operations as FLUX's
transformer does at 1024 x 1024: 59.5 TFLOP in matrix products of [4608 3072] with [3072 12288], and
14.9 TFLOP in attention over 4608 tokens.
"""

from __future__ import annotations

import ctypes
import functools
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from graphrun.errors import InputError
from graphrun.model.problem import Hardware
from graphrun.profile import hardware
from graphrun.profile import hardware_profiles as profiles
from graphrun.profile.costs import kernel_seconds, tiles
from graphrun.profile.host_ram import total_ram_bytes
from graphrun.profile.recording import Kernel
from graphrun.systems import forget_cached
from graphrun.units import MIB

Kind = Literal["cuda", "sim", "cpu"]

LINEAR_SHARE = 59.5 / (59.5 + 14.9)
CHUNK_BYTES = 4 * MIB
DISK_BYTES = 256 * MIB
LAUNCHED = 128  # operators of the chain with which launches are measured
SMALL_BYTES, SMALL_COPIES = 512, 256  # for the start-up time of a copy

# Plausible size of a CUDA context. Outside of this range another process started or ended
# meanwhile, or NVML read another card.
CONTEXT_BYTES = range(32 * MIB, 2048 * MIB)


def calibrate(
    kind: Kind,
    folder: Path,
    name: str = "",
    allowed_seconds: float = 20.0,
    *,
    compiled: bool = False,
) -> tuple[Hardware, dict[str, float]]:
    """Measures this machine. Returns a `Hardware` with basis ``measured``, and the single figures,
    by name, from which it was computed.

    Takes about ``allowed_seconds``, plus imports. ``folder``: a folder on the disk to be measured.
    ``compiled``: measures what compiling blocks gains too (`compiled_gain`), once the compiler is
    done. Raises InputError if there is no such device, or no compiler for it.
    """
    if compiled and kind == "sim":
        raise InputError(
            "there is no compiler for the simulated accelerator: leave out --compiled, or take --device cuda or cpu"
        )
    before = _cards_used_bytes() if kind == "cuda" else {}  # before torch initializes the driver
    base, target = _open(kind)
    share = allowed_seconds / 15

    def copied(kind: str) -> float:
        target.copy(kind)
        return SMALL_COPIES if kind == "small" else target.nbytes

    copies = ("h2d", "d2h", "pageable", "fresh pages", "both", "small")
    rates = {kind: _rate(target, copied, kind, share) for kind in copies}
    flops = {kind: _rate(target, target.compute, kind, share) for kind in ("matmul", "attention")}
    if kind == "cuda":
        base = _with_context(base, before, target)
    measured = replace(
        base,
        name=name or base.name,
        h2d_bytes_per_second=rates["h2d"],
        d2h_bytes_per_second=rates["d2h"],
        pageable_bytes_per_second=rates["pageable"],
        d2h_pageable_bytes_per_second=rates["fresh pages"],
        bidirectional=min(1.0, rates["both"] / rates["h2d"]),
        disk_bytes_per_second=disk_rate(folder, share),
        copy_start_seconds=max(0.0, 1 / rates.pop("small") - SMALL_BYTES / rates["h2d"]),
        flops_per_second=1
        / (LINEAR_SHARE / flops["matmul"] + (1 - LINEAR_SHARE) / flops["attention"]),
        basis="measured",
    )
    if base.kernels is not None:
        others = ("convolution", "fp32 matmul", "fp32 convolution", "elementwise", "launch")
        classes = flops | {kind: _rate(target, target.compute, kind, share) for kind in others}
        measured = with_kernels(
            replace(measured, flops_per_second=base.flops_per_second), target.kernels(), classes
        )
    if compiled:
        measured = replace(measured, compiled_gain=compiled_gain(target, share))
    figures = {f"{kind.replace(' ', '_')}_bytes_per_second": rate for kind, rate in rates.items()}
    figures |= {
        name: float(getattr(measured, name))
        for name in ("copy_start_seconds", "disk_bytes_per_second")
    }
    figures |= {f"{kind}_flops_per_second": rate for kind, rate in flops.items()}
    return measured, {**figures, "context_bytes": float(measured.context_bytes)}


def with_kernels(
    base: Hardware, kernels: Mapping[str, Kernel], measured: Mapping[str, float]
) -> Hardware:
    """``base`` with the rates of its classes of kernels changed so that ``kernels`` take what was
    ``measured``: FLOPs per second, of elementwise work bytes per second, and operators launched per
    second. Formats of 8 bits change as matrix products do."""
    rates = base.kernels
    assert rates is not None
    base = replace(
        base, memory_bytes_per_second=measured["elementwise"], launch_seconds=1 / measured["launch"]
    )
    faster = {
        kind: kernel_seconds(kernel, base) * measured[kind] / kernel.flops
        for kind, kernel in kernels.items()
    }
    return replace(
        base,
        flops_per_second=faster["matmul"] * base.flops_per_second,
        kernels=replace(
            rates,
            fp32_flops_per_second=faster["fp32 matmul"] * rates.fp32_flops_per_second,
            convolution_flops_per_second=faster["convolution"] * rates.convolution_flops_per_second,
            fp32_convolution_flops_per_second=faster["fp32 convolution"]
            * rates.fp32_convolution_flops_per_second,
            attention_flops_per_second=faster["attention"] * rates.attention_flops_per_second,
            exponentials_per_second=faster["attention"] * rates.exponentials_per_second,
            fp8_flops_per_second=faster["matmul"] * rates.fp8_flops_per_second,
            int8_flops_per_second=faster["matmul"] * rates.int8_flops_per_second,
        ),
    )


def compiled_gain(target: Processor, seconds: float) -> float:
    """Seconds of FLUX's single transformer block as it is written, over those of its code compiled
    by `torch.compile` with its default settings: how many times as fast compiled blocks are. Each
    is measured for ``seconds``. A block of another architecture gains more the more of its time
    goes to elementwise work, which the compiler fuses.

    Raises InputError where blocks cannot be compiled.
    """
    if torch._dynamo.config.disable:
        raise InputError(
            "torch.compile is switched off by TORCHDYNAMO_DISABLE=1: unset it, or leave out --compiled"
        )
    try:
        compiled = _rate(target, target.compute, "compiled block", seconds)
    except RuntimeError as error:  # of Dynamo, of Inductor, and of the compilers that this runs
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"blocks cannot be compiled here ({why}): install a C++ compiler, or leave out --compiled"
        ) from error
    return compiled / _rate(target, target.compute, "block", seconds)


def measure_and_keep(
    kind: Kind | None,
    cache: Path,
    name: str = "",
    allowed_seconds: float = 20.0,
    *,
    compiled: bool = False,
) -> dict[str, Any]:
    """Calibrates, writes the hardware profile to ``cache`` and returns the results, JSON-ready.
    ``kind`` None: the card, else the processor. ``compiled``: as for `calibrate`.

    Raises InputError if ``name`` is the name of a prior (`hardware.priors`), or if the device
    cannot be measured.
    """
    kind = kind or ("cuda" if any(Path(node).exists() for node in hardware.DEVICE_NODES) else "cpu")
    profiles.refuse_taken(name)
    start = time.perf_counter()
    measured, figures = calibrate(kind, cache, name, allowed_seconds, compiled=compiled)
    card = hardware.found() if kind == "cuda" else None
    assumed = card or (hardware.simulated() if kind == "sim" else None)
    record = {
        "figures": figures,
        "assumed": asdict(assumed) if assumed is not None else None,
        "versions": {"torch": version("torch")},
        "measured_in_seconds": time.perf_counter() - start,
    }
    path = profiles.keep(cache, measured, card.name if card is not None else kind, record)
    return {**record, "hardware": asdict(measured), "path": str(path)}


def _open(kind: Kind) -> tuple[Hardware, Processor]:
    if kind == "cuda":
        found = hardware.found()
        if found is None:
            raise InputError("no CUDA device here to calibrate; use --device cpu or --device sim")
        is_prior = found.name in hardware.priors()
        return (replace(found, name=f"{found.name}-measured") if is_prior else found), _Cuda()
    if kind == "sim":
        return replace(hardware.simulated(), name="sim-measured"), _Sim()
    capacity_bytes = total_ram_bytes()
    return replace(
        hardware.simulated(), name="cpu", device="cpu", capacity_bytes=capacity_bytes
    ), Processor()


def _rate(target: Processor, work: Callable[[str], float], kind: str, seconds: float) -> float:
    """The best amount per second of ``work(kind)``, which returns its amount: at least three
    repetitions after one to warm up."""
    work(kind)
    best, repetitions, end = 0.0, 0, time.perf_counter() + seconds
    while repetitions < 3 or (time.perf_counter() < end and repetitions < 50):
        begin = target.now()
        amount = work(kind)
        best = max(best, amount / max(target.now() - begin, 1e-9))
        repetitions += 1
    return best


def disk_rate(folder: Path, seconds: float) -> float:
    """Bytes per second of a sequential read of a file that is not in the page cache, from as many
    bytes as are read in ``seconds``.

    Where the file cannot be dropped from the page cache (`graphrun.systems.forget_cached`), the
    figure is too high.
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
            forget_cached(file.fileno())
            file.seek(0)
            nbytes, begin = 0, time.perf_counter()
            while (
                chunk := os.read(file.fileno(), CHUNK_BYTES)
            ) and time.perf_counter() < begin + seconds:
                nbytes += len(chunk)
            return max(nbytes, 1) / max(time.perf_counter() - begin, 1e-9)
    except OSError as error:
        raise InputError(f"{folder}: cannot measure the disk: {error.strerror}") from error


class Processor:
    """A device to be measured: this processor. Host and device are both RAM, so pinned and pageable
    memory are the same.

    ``nbytes``: bytes of one copy. Work may be queued; `now` waits until all of it is done.
    """

    nbytes = 64 * MIB

    def __init__(self) -> None:
        self._source, self._destination = (
            torch.empty(self.nbytes, dtype=torch.uint8, device="cpu").fill_(n) for n in range(2)
        )
        shapes = ((512, 512), (512, 2048), (1, 8, 512, 64))
        self._left, self._right, self._heads = (
            torch.randn(shape, dtype=torch.bfloat16, device="cpu") for shape in shapes
        )

    def now(self) -> float:
        """Seconds on the device's clock, after all queued work is done: wall-clock seconds."""
        return time.perf_counter()

    def copy(self, kind: str) -> None:
        """One copy of ``nbytes``: ``h2d``, ``d2h``, ``pageable``, ``fresh pages`` (to newly
        allocated pageable memory), or ``both`` (one in each direction at the same time; here one
        after the other). ``small``: instead ``SMALL_COPIES`` copies of ``SMALL_BYTES`` from pinned
        memory to the device."""
        if kind == "fresh pages":
            self._source.clone()
            return
        _transfer(self._destination, self._source, small=kind == "small")
        if kind == "both":
            _transfer(self._source, self._destination)

    def kernels(self) -> dict[str, Kernel]:
        """What `compute` runs, by kind; of a card alone."""
        return {}

    @functools.cached_property
    def blocks(self) -> dict[str, Callable[[], Any]]:
        """FLUX's single transformer block with random weights, as wide as the tensors of `compute`
        and with as many tokens, a ninth of them text as at 1024 x 1024. As it is written, and as
        `torch.compile` compiles it."""
        from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock

        heads, features, rows = self._heads.shape[1], self._heads.shape[3], self._left.shape[0]
        device, dtype, width = self._left.device, self._left.dtype, heads * features
        text, picture, modulation = (
            torch.randn(shape, dtype=dtype, device=device)
            for shape in ((1, rows // 9, width), (1, rows - rows // 9, width), (1, width))
        )
        rotary = tuple(torch.randn(rows, features, device=device) for _ in range(2))
        block: nn.Module = FluxSingleTransformerBlock(width, heads, features)
        block.to(device, dtype).requires_grad_(False)
        as_compiled = torch.compile(block)
        return {
            "block": lambda: block(picture, text, modulation, rotary),
            "compiled block": lambda: as_compiled(picture, text, modulation, rotary),
        }

    def compute(self, kind: str) -> float:
        """Runs one kernel and returns its FLOPs: a ``matmul`` [m k] [k n], 2 m k n; a fused
        ``attention`` [b h s d], 4 b h s s d; or a ``convolution`` of [b h s d] with 3 x 3 filters,
        h to h channels, 18 b h h s d. Tensors are smaller than a card's. ``block`` and ``compiled
        block`` run one of `blocks` and return 1."""
        if kind.endswith("block"):
            self.blocks[kind]()
            return 1.0
        heads, channels = self._heads, self._heads.shape[1]
        with torch.no_grad():
            if kind == "matmul":
                torch.mm(self._left, self._right)
                return float(2 * self._left.numel() * self._right.shape[1])
            if kind == "convolution":
                weight = self._left.flatten()[: 9 * channels**2].view(channels, channels, 3, 3)
                torch.nn.functional.conv2d(heads, weight, padding=1)
                return float(18 * channels * heads.numel())
            torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
            return float(4 * heads.numel() * heads.shape[-2])


class _Sim(Processor):
    """The simulated accelerator, on its own clock."""

    nbytes = MIB

    def __init__(self) -> None:
        from graphrun import sim

        super().__init__()
        self._machine = sim.Machine()
        with self._machine:
            tensors = (self._source, self._left, self._right, self._heads)
            self._on_sim, self._left, self._right, self._heads = (
                tensor.to(sim.device) for tensor in tensors
            )

    def now(self) -> float:
        """Seconds on the virtual clock."""
        self._machine.synchronize()
        return self._machine.seconds()

    def copy(self, kind: str) -> None:
        """Copies by the single copy engine of the simulated accelerator."""
        with self._machine, self._machine.on_copy_stream():
            if kind == "fresh pages":
                self._on_sim.cpu()
                return
            if kind != "d2h":
                _transfer(self._on_sim, self._source, small=kind == "small")
            if kind in ("d2h", "both"):
                _transfer(self._destination, self._on_sim)

    def compute(self, kind: str) -> float:
        """The kernels, timed by the virtual clock."""
        with self._machine:
            return super().compute(kind)


class _Cuda(Processor):
    """The first CUDA device. Copies on two side streams, so that both directions can run at
    once."""

    nbytes = 256 * MIB
    repeats = 10

    def __init__(self) -> None:
        device = torch.device("cuda", 0)
        self._pinned = [
            torch.empty(self.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).fill_(n)
            for n in range(2)
        ]
        self._pageable = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu").fill_(1)
        self._device = [
            torch.empty(self.nbytes, dtype=torch.uint8, device=device) for _ in range(2)
        ]
        self._streams = [torch.cuda.Stream(device=device) for _ in range(2)]  # type: ignore[no-untyped-call]
        half = (
            torch.bfloat16
            if torch.cuda.is_bf16_supported(including_emulation=False)
            else torch.float16
        )
        shapes = ((4608, 3072), (3072, 12288), (1, 24, 4608, 128))
        self._left, self._right, self._heads = (
            torch.randn(shape, dtype=half, device=device) for shape in shapes
        )
        self._picture = torch.randn(1, 256, 512, 512, dtype=half, device=device)
        self._filters = torch.randn(256, 256, 3, 3, dtype=half, device=device)
        self._floats = [
            tensor.float() for tensor in (self._left, self._right, self._picture, self._filters)
        ]
        layers = (nn.Linear(64, 64), nn.LayerNorm(64)) * (LAUNCHED // 2)
        self._small = nn.Sequential(*layers).to(device, half)
        torch.cuda.synchronize(device)

    def now(self) -> float:
        """Wall-clock seconds, after synchronizing the card."""
        torch.cuda.synchronize(0)
        return super().now()

    def copy(self, kind: str) -> None:
        """Copies between pinned memory and the card on side streams; from pageable memory on the
        current stream."""
        if kind == "pageable":
            _transfer(self._device[0], self._pageable)
        if kind == "fresh pages":
            self._device[0].cpu()
        if kind in ("h2d", "both", "small"):
            with torch.cuda.stream(self._streams[0]):
                _transfer(
                    self._device[0], self._pinned[0], small=kind == "small", non_blocking=True
                )
        if kind in ("d2h", "both"):
            with torch.cuda.stream(self._streams[1]):
                _transfer(self._pinned[1], self._device[1], non_blocking=True)

    def compute(self, kind: str) -> float:
        """The kernels, repeated until they take milliseconds, so that synchronization does not
        matter. ``elementwise``: the bytes of an addition. ``launch``: the number of operators in a
        chain of small layers."""
        return sum(self._compute(kind) for _ in range(self.repeats))

    @torch.no_grad()
    def _compute(self, kind: str) -> float:
        if kind == "launch":
            self._small(self._left[:1, :64])
            return LAUNCHED
        if kind == "elementwise":
            torch.add(self._picture, 1.0)
            return 2.0 * self._picture.nbytes
        if kind in ("matmul", "attention", "block", "compiled block"):
            return super().compute(kind)
        left, right, picture, filters = (
            self._floats
            if kind.startswith("fp32")
            else (self._left, self._right, self._picture, self._filters)
        )
        if kind.endswith("convolution"):
            torch.nn.functional.conv2d(picture, filters, padding=1)
        else:
            torch.mm(left, right)
        return self.kernels()[kind].flops

    def kernels(self) -> dict[str, Kernel]:
        """What `compute` runs, by kind."""
        rows, inner, columns = *self._left.shape, self._right.shape[1]
        heads, tokens, features = self._heads.shape[1:]
        channels, pixels = self._picture.shape[1], self._picture.shape[2] * self._picture.shape[3]
        found = {}
        for prefix, dtype, size in (("", "float16", 2), ("fp32 ", "float32", 4)):
            nbytes = size * (rows * inner + inner * columns + rows * columns)
            found[f"{prefix}matmul"] = Kernel(
                "matmul", dtype, 2.0 * rows * inner * columns, nbytes, tiles(rows, columns)
            )
            nbytes = size * (2 * channels * pixels + self._filters.numel())
            flops = 2.0 * pixels * self._filters.numel()
            found[f"{prefix}convolution"] = Kernel(
                "convolution", dtype, flops, nbytes, tiles(pixels, channels)
            )
        scores = heads * tokens * tokens
        size = 4 * self._heads.nbytes
        found["attention"] = Kernel(
            "attention", "float16", 4.0 * scores * features, size, heads * tiles(tokens, 1), scores
        )
        return found


def _transfer(
    destination: Any, source: Any, *, small: bool = False, non_blocking: bool = False
) -> None:
    """Copies ``source`` once; ``small``: its first `SMALL_BYTES`, `SMALL_COPIES` times."""
    end = SMALL_BYTES if small else None
    for _ in range(SMALL_COPIES if small else 1):
        destination[:end].copy_(source[:end], non_blocking=non_blocking)


def _with_context(base: Hardware, before: Mapping[str, int], target: Processor) -> Hardware:
    """``base`` with the measured size of the CUDA context: what the card's free memory lost since
    before the driver was initialized, without what torch reserved.

    Measured after matrix products, attention and a convolution, since kernels are loaded when they
    first run and stay loaded. At least the value in ``base``, since a run may load further kernels.
    """
    target.compute("convolution")
    target.now()
    measured = context_bytes_taken(
        before, _cards_used_bytes(), _uuid(), torch.cuda.memory_reserved(0)
    )
    return replace(base, context_bytes=max(base.context_bytes, measured or 0))


def context_bytes_taken(
    before: Mapping[str, int], after: Mapping[str, int], uuid: str, reserved_bytes: int
) -> int | None:
    """By how much the used memory of the card ``uuid`` grew from ``before`` to ``after``, without
    ``reserved_bytes``.

    Cards are identified by UUID, or taken to be the only one: NVML numbers cards differently than
    torch and ignores CUDA_VISIBLE_DEVICES. None if the card cannot be identified, or the figure is
    outside of `CONTEXT_BYTES`.
    """
    name = uuid if uuid in before else next(iter(before)) if len(before) == 1 else ""
    if name not in before or name not in after:
        return None
    context_bytes = after[name] - before[name] - reserved_bytes
    return context_bytes if context_bytes in CONTEXT_BYTES else None


def _uuid() -> str:
    """The first device's UUID in NVML's form; without the number itself where torch does not report
    it."""
    properties: Any = torch.cuda.get_device_properties(0)
    return f"GPU-{getattr(properties, 'uuid', '')}"


class _Memory(ctypes.Structure):
    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


def _cards_used_bytes() -> dict[str, int]:
    """UUID -> bytes in use on the card by all processes, from the driver's management library
    (NVML); {} without that library."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return {}
    found: dict[str, int] = {}
    count, handle, memory, name = (
        ctypes.c_uint(),
        ctypes.c_void_p(),
        _Memory(),
        ctypes.create_string_buffer(96),
    )
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
