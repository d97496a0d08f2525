"""Measure this machine: bandwidths to a device and to the disk, and the compute rate.

    cuda   the card                              wall clock, with the card synchronized before and
                                                 after
    sim    the simulated accelerator             virtual clock, so the result equals its settings
    cpu    this processor                        wall clock (`calibrate_cpu`)

Every figure is the best of several repetitions within a share of the allowed time, since
disturbances only make a measurement worse. The compute rate weights operations as FLUX's
transformer does at 1024 x 1024: 59.5 TFLOP in matrix products of [4608 3072] with [3072 12288], and
14.9 TFLOP in attention over 4608 tokens. No figure depends on a graph.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphrun.device_kinds import DeviceKind, built_in, kind_called
from graphrun.errors import InputError
from graphrun.model.hardware import Hardware, KernelRates, ProcessorRates, ReadRates
from graphrun.profile import hardware
from graphrun.profile import hardware_profiles as profiles
from graphrun.profile.calibrate_cpu import first_touch_seconds, measured_cpu
from graphrun.profile.costs import kernel_seconds, output_tiles
from graphrun.profile.nvml import cards_used_bytes
from graphrun.profile.processor import cpu_estimate, cpu_key
from graphrun.profile.recording import Kernel
from graphrun.systems import forget_cached
from graphrun.units import MIB

CalibrationDevice = str  # name of a kind whose `DeviceKind.calibration` is true
MeasureReads = Callable[[Path, float], ReadRates]

LINEAR_SHARE = 59.5 / (59.5 + 14.9)
ALLOWED_SECONDS, CPU_SECONDS = 20.0, 60.0
MEASURED_CPU = "cpu-measured"
CHUNK_BYTES = 4 * MIB
DISK_BYTES = 256 * MIB
LAUNCHED = 128  # operators in the chain that measures launches
SMALL_BYTES, SMALL_COPIES = 512, 256  # measure the start-up time of a copy

# Plausible size of a CUDA context. Outside of this range, another process started or ended
# meanwhile, or NVML read another card.
CONTEXT_BYTES = range(32 * MIB, 2048 * MIB)


def calibrate(
    kind: CalibrationDevice,
    folder: Path,
    name: str = "",
    allowed_seconds: float = ALLOWED_SECONDS,
    *,
    measure_reads: MeasureReads | None = None,
    compiled: bool = False,
) -> tuple[Hardware, dict[str, float]]:
    """Measure this machine, and return a `Hardware` with basis ``measured`` and single figures.

    Takes about ``allowed_seconds``, plus imports. ``folder``: on the disk to measure.
    ``measure_reads``: measures direct reads for a CPU in a folder, within seconds (None: not
    measured). ``compiled``: also measure `compiled_gain`, after the compiler is done. Raises
    InputError if there is no such device, or no compiler for it.
    """
    device_kind = kind_called(kind)
    refuse_uncalibrated(kind)
    if compiled and device_kind.has_virtual_clock:
        raise InputError(
            "there is no compiler for the simulated accelerator: leave out --compiled, or "
            "take --device cuda or cpu"
        )
    if device_kind.is_host:
        read_rates = functools.partial(measure_reads, folder) if measure_reads else None
        return _calibrate_processor(name, allowed_seconds, read_rates, compiled=compiled)
    # read before torch initializes the driver
    has_card = not device_kind.has_virtual_clock
    initial_used_bytes = cards_used_bytes() if has_card else {}
    base, target = _open(kind)
    share = allowed_seconds / 15

    def run_copies(kind: str) -> float:
        target.copy(kind)
        return SMALL_COPIES if kind == "small" else target.nbytes

    copies = ("h2d", "d2h", "pageable", "fresh pages", "both", "small")
    rates = {kind: _rate(target, run_copies, kind, share) for kind in copies}
    flops = {kind: _rate(target, target.compute, kind, share) for kind in ("matmul", "attention")}
    if has_card:
        base = _with_context(base, initial_used_bytes, target)
    measured_hardware = replace(
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
        kernel_kinds = ("convolution", "fp32 matmul", "fp32 convolution", "elementwise", "launch")
        kernel_rates = flops | {
            kind: _rate(target, target.compute, kind, share) for kind in kernel_kinds
        }
        measured_hardware = with_kernels(
            replace(measured_hardware, flops_per_second=base.flops_per_second),
            target.kernels(),
            kernel_rates,
        )
    if compiled:
        measured_hardware = replace(measured_hardware, compiled_gain=compiled_gain(target, share))
    figures = {f"{kind.replace(' ', '_')}_bytes_per_second": rate for kind, rate in rates.items()}
    figures |= {
        name: float(getattr(measured_hardware, name))
        for name in ("copy_start_seconds", "disk_bytes_per_second")
    }
    figures |= {f"{kind}_flops_per_second": rate for kind, rate in flops.items()}
    return measured_hardware, {**figures, "context_bytes": float(measured_hardware.context_bytes)}


def refuse_uncalibrated(kind: str) -> None:
    """Raise InputError if devices of ``kind`` cannot be measured."""
    names = [device_kind.name for device_kind in built_in() if device_kind.calibration]
    if kind not in names:
        raise InputError(
            f"device {kind!r} cannot be calibrated; use {', '.join(names)}. Plans for others "
            "use data sheets: name one with --hardware"
        )


def _calibrate_processor(
    name: str,
    allowed_seconds: float,
    measure_reads: Callable[[float], ReadRates] | None,
    *,
    compiled: bool,
) -> tuple[Hardware, dict[str, float]]:
    """Return the CPU of this machine, measured, and single figures.

    Reads are measured before and after the rest, as the speed of a shared disk changes in a minute.
    """
    base = replace(
        cpu_estimate(),
        name=name or MEASURED_CPU,
        first_touch_seconds=first_touch_seconds(allowed_seconds / 10),
    )
    read_seconds = allowed_seconds / 30
    first_reads = measure_reads(read_seconds) if measure_reads else None
    processor, figures = measured_cpu(base, allowed_seconds)
    if measure_reads and first_reads:
        reads = first_reads.mean(measure_reads(read_seconds))
        assert isinstance(processor.kernels, ProcessorRates)
        processor = replace(
            processor,
            copy_start_seconds=reads.start_seconds,
            disk_bytes_per_second=reads.computing_rate,
            kernels=replace(processor.kernels, read_cpu_seconds=reads.cpu_seconds),
        )
        figures |= {
            "disk_alone_bytes_per_second": reads.alone_rate,
            "disk_bytes_per_second": reads.computing_rate,
            "cpu_seconds_per_gb_read": 1e9 * reads.cpu_seconds,
        }
    if compiled:
        processor = replace(
            processor, compiled_gain=compiled_gain(Processor(), allowed_seconds / 15)
        )
    return processor, figures


def with_kernels(
    base: Hardware, kernels: Mapping[str, Kernel], measured_rates: Mapping[str, float]
) -> Hardware:
    """Return ``base`` with kernel rates changed so that ``kernels`` run at ``measured_rates``.

    ``measured_rates``: FLOPs per second; bytes per second for elementwise work; launches per
    second. Rates of 8-bit formats change in proportion to matrix products.
    """
    base = replace(
        base,
        memory_bytes_per_second=measured_rates["elementwise"],
        launch_seconds=1 / measured_rates["launch"],
    )
    rates = base.kernels
    assert isinstance(rates, KernelRates)
    speedups = {
        kind: kernel_seconds(kernel, base) * measured_rates[kind] / kernel.flops
        for kind, kernel in kernels.items()
    }
    rates = replace(
        rates,
        attention_flops_per_second=speedups["attention"] * rates.attention_flops_per_second,
        exponentials_per_second=speedups["attention"] * rates.exponentials_per_second,
        fp8_flops_per_second=speedups["matmul"] * rates.fp8_flops_per_second,
        int8_flops_per_second=speedups["matmul"] * rates.int8_flops_per_second,
        wave_seconds=rates.wave_seconds / speedups["matmul"],
    )
    card = replace(base, flops_per_second=speedups["matmul"] * base.flops_per_second, kernels=rates)
    for kind, field in _RATES.items():
        seconds = kernels[kind].flops / measured_rates[kind]
        card = _with_rate(card, kernels[kind], seconds, field)
    return card


_RATES = {
    "fp32 matmul": "fp32_flops_per_second",
    "convolution": "convolution_flops_per_second",
    "fp32 convolution": "fp32_convolution_flops_per_second",
}


def _with_rate(hardware: Hardware, kernel: Kernel, seconds: float, field: str) -> Hardware:
    """Return ``hardware`` whose rate ``field`` makes ``kernel`` take ``seconds``.

    A kernel takes x + y / rate. A measured time close to x would give any rate, so the rate changes
    by a factor of 4 at most.
    """
    rates = hardware.kernels
    assert isinstance(rates, KernelRates)

    def at(factor: float) -> Hardware:
        changes = {field: factor * getattr(rates, field)}
        return replace(hardware, kernels=replace(rates, **changes))

    estimate = kernel_seconds(kernel, hardware)
    by_rate = 2 * (estimate - kernel_seconds(kernel, at(2)))
    remaining_seconds = seconds - (estimate - by_rate)
    return at(min(4.0, max(0.25, by_rate / max(remaining_seconds, by_rate / 4))))


def compiled_gain(target: Processor, seconds: float) -> float:
    """Return how many times faster compiled blocks are than uncompiled ones.

    Measured with FLUX's single transformer block, plain and compiled by `torch.compile` with
    default settings, ``seconds`` each. The compiler fuses elementwise work, so blocks with more
    elementwise work gain more. Raises InputError if blocks cannot be compiled.
    """
    if torch._dynamo.config.disable:
        raise InputError(
            "torch.compile is switched off by TORCHDYNAMO_DISABLE=1: unset it, or leave out "
            "--compiled"
        )
    try:
        compiled_rate = _rate(target, target.compute, "compiled block", seconds)
    except RuntimeError as error:  # from Dynamo, Inductor, or their compilers
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"blocks cannot be compiled here ({reason}): install a C++ compiler, or leave out "
            "--compiled"
        ) from error
    return compiled_rate / _rate(target, target.compute, "block", seconds)


def measure_and_keep(
    kind: CalibrationDevice | None,
    cache: Path,
    name: str = "",
    allowed_seconds: float | None = None,
    *,
    measure_reads: MeasureReads | None = None,
    compiled: bool = False,
) -> dict[str, Any]:
    """Calibrate, write the hardware profile to ``cache``, and return the results, JSON-ready.

    ``kind`` None: the card, else the processor. ``allowed_seconds`` None: `ALLOWED_SECONDS`, on a
    CPU `CPU_SECONDS`. ``measure_reads``, ``compiled``: as for `calibrate`. Raises InputError if
    ``name`` is the name of a data-sheet estimate, or if the device cannot be measured.
    """
    device_kind = kind_called(kind) if kind else _kind_here()
    kind, is_host = device_kind.name, device_kind.is_host
    allowed_seconds = allowed_seconds or (CPU_SECONDS if is_host else ALLOWED_SECONDS)
    profiles.refuse_taken(name)
    start = time.perf_counter()
    measured_hardware, figures = calibrate(
        kind, cache, name, allowed_seconds, measure_reads=measure_reads, compiled=compiled
    )
    assumed = hardware.detect(device_kind)
    record = {
        "figures": figures,
        "assumed": asdict(assumed) if assumed is not None else None,
        "versions": {"torch": version("torch")},
        "measured_in_seconds": time.perf_counter() - start,
    }
    device = cpu_key() if is_host else assumed.name if assumed is not None else kind
    path = profiles.keep(cache, measured_hardware, device, record)
    return {**record, "hardware": asdict(measured_hardware), "path": str(path)}


def _kind_here() -> DeviceKind:
    """Return the first kind of which there may be a card here, else the CPU."""
    kinds = [kind for kind in built_in() if kind.calibration and not kind.has_virtual_clock]
    return next(kind for kind in kinds if kind.is_host or hardware.has_signs(kind))


def _open(kind: CalibrationDevice) -> tuple[Hardware, Processor]:
    device_kind = kind_called(kind)
    card = hardware.detect(device_kind)
    if card is None:
        raise InputError(
            f"no {device_kind.label} here to calibrate; use --device cpu or --device sim"
        )
    if device_kind.has_virtual_clock:
        return replace(card, name=f"{card.name}-measured"), _Sim()
    has_data_sheet = card.name in hardware.data_sheet_estimates()
    return (replace(card, name=f"{card.name}-measured") if has_data_sheet else card), _Cuda()


def _rate(target: Processor, work: Callable[[str], float], kind: str, seconds: float) -> float:
    """Return the best amount per second of ``work(kind)``, after one warm-up."""
    work(kind)
    best, repetitions, end = 0.0, 0, time.perf_counter() + seconds
    while repetitions < 3 or (time.perf_counter() < end and repetitions < 50):
        begin = target.now()
        amount = work(kind)
        best = max(best, amount / max(target.now() - begin, 1e-9))
        repetitions += 1
    return best


def disk_rate(folder: Path, seconds: float) -> float:
    """Return bytes per second of a sequential read of a file that is not in the page cache.

    The read takes at most ``seconds``. The figure is too high if the file cannot be dropped from
    the page cache (`graphrun.systems.forget_cached`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    block = os.urandom(CHUNK_BYTES)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".disk-") as file:
            end = time.perf_counter() + seconds
            written_bytes = 0
            while written_bytes < DISK_BYTES and (written_bytes == 0 or time.perf_counter() < end):
                written_bytes += file.write(block)
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
    """A device to measure: this processor, where host and device are both RAM.

    ``nbytes``: bytes of one copy. Work may be queued; `now` waits until it is done.
    """

    nbytes = 64 * MIB

    def __init__(self) -> None:
        self._source, self._destination = (
            torch.empty(self.nbytes, dtype=torch.uint8, device="cpu").fill_(n) for n in range(2)
        )
        shapes = ((512, 512), (512, 2048), (1, 8, 512, 64))
        self._left_matrix, self._right_matrix, self._heads = (
            torch.randn(shape, dtype=torch.bfloat16, device="cpu") for shape in shapes
        )

    def now(self) -> float:
        """Return seconds on the device's clock (here wall-clock) after all queued work is done."""
        return time.perf_counter()

    def copy(self, kind: str) -> None:
        """Run one copy of ``nbytes``.

        ``kind``: ``h2d``, ``d2h``, ``pageable``, ``fresh pages`` (to newly allocated pageable
        memory), or ``both`` (one in each direction at the same time; here one after the other).
        ``small``: `SMALL_COPIES` copies of `SMALL_BYTES` from pinned memory to the device.
        """
        if kind == "fresh pages":
            self._source.clone()
            return
        _transfer(self._destination, self._source, small=kind == "small")
        if kind == "both":
            _transfer(self._source, self._destination)

    def kernels(self) -> dict[str, Kernel]:
        """Return the kernels that `compute` runs on a card, by kind; {} here."""
        return {}

    def load_kernels(self) -> None:
        """Run one kernel of each kind that pipelines run and `compute` does not; here none."""

    @functools.cached_property
    def blocks(self) -> dict[str, Callable[[], Any]]:
        """FLUX's single transformer block with random weights, plain and compiled.

        It has the width and the token count of the tensors of `compute`. A ninth of the tokens are
        text, as at 1024 x 1024.
        """
        from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock

        heads, features, rows = (
            self._heads.shape[1],
            self._heads.shape[3],
            self._left_matrix.shape[0],
        )
        device, dtype, width = self._left_matrix.device, self._left_matrix.dtype, heads * features
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
        """Run one kernel and return its FLOPs. Tensors are smaller than a card's.

        matmul                   [m k] [k n], 2 m k n
        attention                fused, [b h s d], 4 b h s s d
        convolution              [b h s d] with 3 x 3 filters, h to h channels, 18 b h h s d
        block, compiled block    one of `blocks`; returns 1
        """
        if kind.endswith("block"):
            self.blocks[kind]()
            return 1.0
        heads, channels = self._heads, self._heads.shape[1]
        with torch.no_grad():
            if kind == "matmul":
                torch.mm(self._left_matrix, self._right_matrix)
                return float(2 * self._left_matrix.numel() * self._right_matrix.shape[1])
            if kind == "convolution":
                weight = self._left_matrix.flatten()[: 9 * channels**2].view(
                    channels, channels, 3, 3
                )
                torch.nn.functional.conv2d(heads, weight, padding=1)
                return float(18 * channels * heads.numel())
            torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
            return float(4 * heads.numel() * heads.shape[-2])


class _Sim(Processor):
    """The simulated accelerator, on its own clock and with a single copy engine."""

    nbytes = MIB

    def __init__(self) -> None:
        from graphrun import sim

        super().__init__()
        self._machine = sim.Machine()
        with self._machine:
            tensors = (self._source, self._left_matrix, self._right_matrix, self._heads)
            self._on_sim, self._left_matrix, self._right_matrix, self._heads = (
                tensor.to(sim.device) for tensor in tensors
            )

    def now(self) -> float:
        self._machine.synchronize()
        return self._machine.seconds()

    def copy(self, kind: str) -> None:
        with self._machine, self._machine.on_copy_stream():
            if kind == "fresh pages":
                self._on_sim.cpu()
                return
            if kind != "d2h":
                _transfer(self._on_sim, self._source, small=kind == "small")
            if kind in ("d2h", "both"):
                _transfer(self._destination, self._on_sim)

    def compute(self, kind: str) -> float:
        with self._machine:
            return super().compute(kind)


class _Cuda(Processor):
    """The first CUDA device. Copies run on two side streams, so both directions can run at once."""

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
        self._left_matrix, self._right_matrix, self._heads = (
            torch.randn(shape, dtype=half, device=device) for shape in shapes
        )
        self._picture = torch.randn(1, 256, 512, 512, dtype=half, device=device)
        self._filters = torch.randn(256, 256, 3, 3, dtype=half, device=device)
        self._floats = [
            tensor.float()
            for tensor in (self._left_matrix, self._right_matrix, self._picture, self._filters)
        ]
        layers = (nn.Linear(64, 64), nn.LayerNorm(64)) * (LAUNCHED // 2)
        self._small = nn.Sequential(*layers).to(device, half)
        torch.cuda.synchronize(device)

    def now(self) -> float:
        """Return wall-clock seconds, after synchronizing the card."""
        torch.cuda.synchronize(0)
        return super().now()

    def copy(self, kind: str) -> None:
        """Copy between pinned memory and the card on side streams, else on the current one."""
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
        """Run kernels until they take milliseconds, so that synchronization does not matter.

        Return FLOPs; for ``elementwise`` the bytes of an addition, for ``launch`` the number of
        operators in a chain of small layers.
        """
        return sum(self._compute(kind) for _ in range(self.repeats))

    @torch.no_grad()
    def _compute(self, kind: str) -> float:
        if kind == "launch":
            self._small(self._left_matrix[:1, :64])
            return LAUNCHED
        if kind == "elementwise":
            torch.add(self._picture, 1.0)
            return 2.0 * self._picture.nbytes
        if kind in ("matmul", "attention", "block", "compiled block"):
            return super().compute(kind)
        left_matrix, right_matrix, picture, filters = (
            self._floats
            if kind.startswith("fp32")
            else (self._left_matrix, self._right_matrix, self._picture, self._filters)
        )
        if kind.endswith("convolution"):
            torch.nn.functional.conv2d(picture, filters, padding=1)
        else:
            torch.mm(left_matrix, right_matrix)
        return self.kernels()[kind].flops

    @torch.no_grad()
    def load_kernels(self) -> None:
        """As `Processor.load_kernels`: a card loads a kernel's code when it first runs."""
        functional = torch.nn.functional
        for picture, filters, matrix in (
            (self._picture, self._filters, self._left_matrix),
            (self._floats[2], self._floats[3], self._floats[0]),
        ):
            for side in (64, 128, 512):
                functional.conv2d(picture[..., :side, :side], filters, padding=1)
            functional.conv2d(picture, filters[..., :1, :1])
            functional.conv2d(picture[..., :64, :64], filters, padding=1, stride=2)
            functional.conv3d(picture[:, :64, None, :64, :64], filters[:64, :64, None], padding=1)
            functional.interpolate(picture[..., :64, :64], scale_factor=2.0, mode="nearest")
            functional.silu(functional.group_norm(picture[..., :64, :64], 32))
            functional.gelu(functional.layer_norm(matrix, matrix.shape[1:]), approximate="tanh")
            matrix.float().pow(2).mean(-1, keepdim=True).rsqrt().mul(matrix).to(matrix.dtype)
            for width in (64, 128, 512):
                heads = matrix[:1024, : 2 * width].reshape(1, 1024, 2, width).transpose(1, 2)
                mask = heads.new_zeros(1, 1, 1024, 1024)
                functional.scaled_dot_product_attention(heads, heads, heads)
                functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
                functional.linear(matrix[:512, :width], matrix[:width, :width], matrix[0, :width])
            torch.cat((matrix[:8].softmax(-1), torch.randn_like(matrix[:8]).sin().exp()))
            functional.embedding(torch.arange(8, device=matrix.device), matrix)

    def kernels(self) -> dict[str, Kernel]:
        rows, inner, columns = *self._left_matrix.shape, self._right_matrix.shape[1]
        heads, tokens, features = self._heads.shape[1:]
        channels, pixels = self._picture.shape[1], self._picture.shape[2] * self._picture.shape[3]
        kernels = {}
        for prefix, dtype, size in (("", "float16", 2), ("fp32 ", "float32", 4)):
            nbytes = size * (rows * inner + inner * columns + rows * columns)
            kernels[f"{prefix}matmul"] = Kernel(
                "matmul", dtype, 2.0 * rows * inner * columns, nbytes, output_tiles(rows, columns)
            )
            nbytes = size * (2 * channels * pixels + self._filters.numel())
            flops = 2.0 * pixels * self._filters.numel()
            kernels[f"{prefix}convolution"] = Kernel(
                "convolution", dtype, flops, nbytes, output_tiles(pixels, channels)
            )
        scores = heads * tokens * tokens
        size = 4 * self._heads.nbytes
        kernels["attention"] = Kernel(
            "attention",
            "float16",
            4.0 * scores * features,
            size,
            heads * output_tiles(tokens, 1),
            scores,
        )
        return kernels


def _transfer(
    destination: Any, source: Any, *, small: bool = False, non_blocking: bool = False
) -> None:
    """Copy ``source`` once; with ``small``, copy its first `SMALL_BYTES` `SMALL_COPIES` times."""
    end = SMALL_BYTES if small else None
    for _ in range(SMALL_COPIES if small else 1):
        destination[:end].copy_(source[:end], non_blocking=non_blocking)


def _with_context(
    base: Hardware, initial_used_bytes: Mapping[str, int], target: Processor
) -> Hardware:
    """Return ``base`` with the measured size of the CUDA context, at least the size in ``base``.

    The size is the growth of the card's used memory since ``initial_used_bytes``, before the driver
    was initialized, without what torch reserved. It is measured after kernels of many kinds, since
    kernels are loaded at their first run and stay loaded. A run may load further kernels.
    """
    target.compute("convolution")
    target.load_kernels()
    target.now()
    context_bytes = context_bytes_taken(
        initial_used_bytes, cards_used_bytes(), _uuid(), torch.cuda.memory_reserved(0)
    )
    return replace(base, context_bytes=max(base.context_bytes, context_bytes or 0))


def context_bytes_taken(
    initial_used_bytes: Mapping[str, int],
    final_used_bytes: Mapping[str, int],
    uuid: str,
    reserved_bytes: int,
) -> int | None:
    """Return the growth of the used memory of the card ``uuid``, without ``reserved_bytes``.

    A card is identified by its UUID, or is the only one: NVML numbers cards differently than torch
    and ignores CUDA_VISIBLE_DEVICES. None if the card cannot be identified, or if the figure is
    outside of `CONTEXT_BYTES`.
    """
    name = (
        uuid
        if uuid in initial_used_bytes
        else next(iter(initial_used_bytes))
        if len(initial_used_bytes) == 1
        else ""
    )
    if name not in initial_used_bytes or name not in final_used_bytes:
        return None
    context_bytes = final_used_bytes[name] - initial_used_bytes[name] - reserved_bytes
    return context_bytes if context_bytes in CONTEXT_BYTES else None


def _uuid() -> str:
    """Return the first device's UUID in NVML's form; only ``GPU-`` if torch does not report it."""
    properties: Any = torch.cuda.get_device_properties(0)
    return f"GPU-{getattr(properties, 'uuid', '')}"
