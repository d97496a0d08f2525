"""Measure the CPU: rates of kernels by class (`costs.cpu_work`), with PyTorch's number of threads.

Probes are operators of the sizes that models have. Each is recorded as in a dry run, and timed. Of
all non-negative rates, those count with which `costs` predicts the measured seconds with the least
sum of squared relative errors. So a class is measured by several probes, and a probe measures
several classes.

All calls are timed in turns, each once a round. A core may change its speed within seconds, above
all where a virtual machine shares it with others: products on one such machine reached 0.65 to 1.61
TFLOP/s within a minute. One probe after another, the fit would take that for a difference between
kernels.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy
import torch
from scipy.optimize import nnls
from scipy.stats import trim_mean
from torch import nn
from torch.func import functional_call

from graphrun.graph.precisions import GGUF_BLOCKS
from graphrun.kernel_memory import available_bytes
from graphrun.model.hardware import NEW_PAGES, Hardware, ProcessorRates
from graphrun.modules.quantize import convert, quantized
from graphrun.profile.costs import cpu_seconds, cpu_work
from graphrun.profile.fused_kernels import FusedKernels
from graphrun.profile.recorder import Recorder
from graphrun.profile.recording import Kernel
from graphrun.systems import anonymous_memory
from graphrun.units import GIB, MIB, PAGE_BYTES, round_up

# rate of a class that takes no measurable time
FASTEST = 1e14
# most times the rate of products that convolutions reach: 392 and 370 GFLOP/s were measured in fp32
FASTER_CONVOLUTION = 1.25
DTYPES = ("bfloat16", "float32", "float16")
# Tensors are read again after this many bytes of others, as in a model, or after a part of the
# memory that is available. A cache of 480 MiB still had some of 1 GiB: products that took 1.09 ms
# took 1.20 ms after 3 GiB.
POOL_BYTES, POOL_SHARE = 3 * GIB, 1 / 4
# A block counts as much as this many operators: in runs, too, operators are next to each other.
BLOCK_WEIGHT = 6.0
TOUCH_BYTES = 64 * MIB  # written at once to measure new memory
LAYER_SIZE, LAYER_ROWS = 3072, 256  # of quantized layers: FLUX's, and tokens of a small picture
LAUNCHED = 128  # operators in the chain that measures launches
SMALL_REPEATS = 8  # of small blocks, as blocks of a model repeat; the first one finds cold caches
# A longer probe, by the data sheet, is left out: some convolutions in bfloat16 take a minute.
LONGEST_SECONDS = 1.0
# Of at least so many rounds, this share of the shortest and of the longest calls does not count.
MIN_ROUNDS, TRIMMED_SHARE = 5, 0.2

functional = nn.functional
Measured = TypeVar("Measured")


@dataclass(frozen=True, slots=True)
class Probe:
    """An operator or a block, and the sizes of its tensors, all of ``dtype``."""

    operator: Callable[..., Any]
    dtype: str
    sizes: tuple[tuple[int, ...], ...]
    is_block: bool = False

    def tensors(self, device: str) -> list[torch.Tensor]:
        dtype = getattr(torch, self.dtype)
        return [torch.ones(size, dtype=dtype, device=device) for size in self.sizes]

    def kernels(self) -> list[Kernel]:
        """Return the kernels that a dry run records of the operator."""
        tensors, module = self.tensors("meta"), nn.Module()
        recorder = Recorder(module, ())
        recorder.ignore(tensors)
        with torch.no_grad(), FusedKernels(recorder), recorder:
            self.operator(*tensors)
        recorder.close()
        record = recorder.record
        return [record.kernels[number] for _, numbers in record.work for number in numbers]

    def timed(self, pool: ColdPool, repeats: int = 1) -> Callable[[], float]:
        """Return a function that calls the operator ``repeats`` times with tensors of ``pool``, and
        returns the seconds of a call."""
        templates = self.tensors("meta")

        def call() -> float:
            tensors = [[pool.take(template) for template in templates] for _ in range(repeats)]
            with torch.no_grad():
                start = time.perf_counter()
                for arguments in tensors:
                    self.operator(*arguments)  # memory of results is returned in this time, too
                return (time.perf_counter() - start) / repeats

        return call


class ColdPool:
    """Memory larger than caches, in pages as the runtime's, from which probes take tensors.

    In a model other weights and tensors pass through the caches between two uses. An operator that
    is called with the same tensors again and again takes half as long.
    """

    def __init__(self, nbytes: int) -> None:
        self._bytes = torch.frombuffer(anonymous_memory(nbytes), dtype=torch.uint8).fill_(0x3C)
        self._offset = 0

    def take(self, template: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the size and dtype of ``template``, behind the last one."""
        if self._offset + template.nbytes > self._bytes.numel():
            self._offset = 0
        start = self._offset
        self._offset += round_up(template.nbytes, PAGE_BYTES)
        return (
            self._bytes[start : start + template.nbytes].view(template.dtype).view(template.shape)
        )


def probes(base: Hardware) -> list[Probe]:
    """Return the probes that take at most `LONGEST_SECONDS` on ``base``, the data-sheet estimate.

    Blocks are in the 16-bit dtype of models, or in fp32 where it is faster.
    """
    assert isinstance(base.kernels, ProcessorRates)
    rates = base.kernels
    candidates = [
        probe
        for dtype in DTYPES
        for probe in (*_products(dtype), *_convolutions(dtype), *_elementwise(dtype))
    ]
    candidates += _blocks(max(DTYPES, key=lambda dtype: rates.rate("matmul", dtype)))
    return [
        probe
        for probe in candidates
        if sum(cpu_seconds(kernel, rates) for kernel in probe.kernels()) <= LONGEST_SECONDS
    ]


def _products(dtype: str) -> Iterator[Probe]:
    rows_and_weights = [
        *((1, 3072, 3072), (77, 1536, 1536), (256, 1536, 1536), (512, 1536, 3072)),
        *((1024, 64, 2048), (1024, 640, 640), (2048, 320, 1280)),
    ]
    for rows, inputs, outputs in rows_and_weights:
        yield Probe(functional.linear, dtype, ((rows, inputs), (outputs, inputs)))
    for heads, queries, keys, features in (
        (12, 512, 512, 128),
        (10, 1024, 1024, 64),
        (20, 256, 256, 64),
        (20, 256, 77, 64),
    ):
        sizes = [(1, tokens, heads, features) for tokens in (queries, keys, keys)]
        yield Probe(_attention, dtype, tuple(sizes))


def _attention(*tensors: torch.Tensor) -> torch.Tensor:
    query, key, value = (part.transpose(1, 2) for part in tensors)
    return functional.scaled_dot_product_attention(query, key, value)


def _convolutions(dtype: str) -> Iterator[Probe]:
    def convolution(source: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        convolve = torch.conv2d if source.dim() == 4 else torch.conv3d
        return convolve(source, weight, padding=weight.shape[-1] // 2)

    for inputs, outputs, pixels, taps in (
        (320, 320, (64, 64), 3),
        (640, 640, (32, 32), 3),
        (640, 640, (32, 32), 1),
        (1280, 1280, (8, 8), 3),
        (128, 128, (128, 128), 3),
        (128, 128, (128, 128), 1),
        (64, 64, (32, 32), 3),
        (128, 128, (256, 256), 3),
        (64, 64, (512, 512), 3),
        (256, 256, (256, 256), 3),
        (256, 128, (256, 256), 1),
        (96, 96, (4, 64, 64), 3),
    ):
        weight = (outputs, inputs, *[taps] * len(pixels))
        if dtype != "float16":  # PyTorch computes it by products
            yield Probe(convolution, dtype, ((1, inputs, *pixels), weight))


def _block_cases(
    device: str, width: int, channels: int, rows: int, batch: int
) -> Iterator[tuple[nn.Module, Callable[..., Any], tuple[tuple[int, ...], ...]]]:
    """Yield blocks of FLUX, of SDXL's UNet and of its residual convolutions on ``device``, each
    with how it is called and the sizes of its inputs."""
    from diffusers.models.attention import BasicTransformerBlock
    from diffusers.models.resnet import ResnetBlock2D
    from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock

    def rotated(block: Callable[..., Any]) -> Callable[..., Any]:
        def call(picture: torch.Tensor, text: torch.Tensor, modulation: torch.Tensor) -> Any:
            tokens = picture.shape[1] + text.shape[1]
            rotary = tuple(torch.ones(tokens, 128, device=picture.device) for _ in range(2))
            return block(picture, text, modulation, rotary)

        return call

    def attending(block: Callable[..., Any]) -> Callable[..., Any]:
        return lambda picture, text: block(picture, encoder_hidden_states=text)

    text_channels, pixels = channels * 16 // 5, math.isqrt(4 * rows)
    with torch.device(device):
        flux = FluxSingleTransformerBlock(width, width // 128, 128)
        sdxl = BasicTransformerBlock(
            channels, channels // 64, 64, cross_attention_dim=text_channels, activation_fn="geglu"
        )
        residual = ResnetBlock2D(
            in_channels=channels, out_channels=channels, temb_channels=2 * channels
        )
    yield flux.eval(), rotated, ((1, rows, width), (1, rows, width), (1, width))
    yield sdxl.eval(), attending, ((batch, 4 * rows, channels), (batch, 77, text_channels))
    sizes = ((batch, channels, pixels, pixels), (batch, 2 * channels))
    yield residual.eval(), lambda block: block, sizes


def _blocks(dtype: str) -> Iterator[Probe]:
    """Yield the blocks as probes: FLUX's half as wide, SDXL's at their size."""
    for module, wrapped, sizes in _block_cases("meta", 1536, 640, 256, 2):
        weights = dict(module.named_parameters())

        def call(
            *tensors: torch.Tensor,
            module: nn.Module = module,
            wrapped: Any = wrapped,
            names: tuple[str, ...] = tuple(weights),
        ) -> Any:
            inputs, values = tensors[: -len(names)], tensors[-len(names) :]

            def block(*arguments: Any, **options: Any) -> Any:
                values_by_name = dict(zip(names, values, strict=True))
                return functional_call(module, values_by_name, arguments, options)

            return wrapped(block)(*inputs)

        weight_sizes = (tuple(weight.shape) for weight in weights.values())
        yield Probe(call, dtype, (*sizes, *weight_sizes), is_block=True)


def _small_blocks(device: str) -> Iterator[Probe]:
    """Yield the blocks on ``device`` so small that they hardly compute, with weights of their
    own."""
    for module, wrapped, sizes in _block_cases(device, 128, 64, 4, 1):
        yield Probe(wrapped(module), "float32", sizes, is_block=True)


def _elementwise(dtype: str) -> Iterator[Probe]:
    other_dtype = torch.float32 if dtype != "float32" else torch.bfloat16
    rows = (2048, 1536)

    def normalized_groups(source: torch.Tensor) -> torch.Tensor:
        return functional.group_norm(source.view(1, 64, 32, -1), 32)

    unary: tuple[Callable[..., Any], ...] = (
        lambda source: source * 0.5,
        lambda source: source / 2,
        lambda source: source.pow(2),
        lambda source: source.mean(-1),
        lambda source: source.to(other_dtype),
        lambda source: source.t().contiguous(),
        lambda source: source.clone(),
        lambda source: -source.unflatten(-1, (-1, 2)).unbind(-1)[1],
        functional.silu,
        functional.gelu,
        lambda source: functional.gelu(source, approximate="tanh"),
        lambda source: functional.layer_norm(source, (1536,)),
        normalized_groups,
        lambda source: functional.pad(source, (1, 1)),
        lambda source: functional.interpolate(source.view(1, 48, -1, 64), scale_factor=1.5),
    )
    binary: tuple[Callable[..., Any], ...] = (
        torch.add,
        torch.mul,
        torch.sub,
        lambda source, other: torch.cat((source, other)),
        lambda source, other: torch.stack((source, other), -1),
    )
    if dtype == "float16":
        unary, binary = unary[:1], binary[:1]
    yield from (Probe(operator, dtype, (rows,)) for operator in unary)
    yield from (Probe(operator, dtype, (rows, rows)) for operator in binary)
    if dtype != "float16":  # more than glibc keeps, so in new memory
        large = (rows[0] * (6 if dtype == "bfloat16" else 3), rows[1])
        yield Probe(unary[0], dtype, (large,))
        yield Probe(torch.add, dtype, (large, large))


def first_touch_seconds(seconds: float) -> float:
    """Return the seconds to write one byte of memory that nothing used for a while.

    All threads write, as in a run, where several also read into new memory: two got it 1.4 times as
    fast as one. Writes for at most ``seconds``, and at most half of what is available. Call it
    before other memory is used: memory that a process has just freed takes a tenth of the time. So
    the slowest tenth of all chunks counts.
    """
    chunks, durations = list[torch.Tensor](), list[float]()
    most_chunks = available_bytes() // 2 // TOUCH_BYTES
    end = time.perf_counter() + seconds
    while len(chunks) < most_chunks and time.perf_counter() < end:
        start = time.perf_counter()
        chunk = torch.frombuffer(anonymous_memory(TOUCH_BYTES), dtype=torch.uint8)
        chunk.fill_(1)  # PyTorch divides it among its threads, unlike one byte of each page
        durations.append(time.perf_counter() - start)
        chunks.append(chunk)
    if not durations:
        return 0.0
    return sorted(durations)[len(durations) * 9 // 10] / TOUCH_BYTES


def typical_seconds(
    calls: Mapping[Measured, Callable[[], float]], allowed_seconds: float
) -> dict[Measured, float]:
    """Return the mean of what each of ``calls`` returns, without its extremes, in
    ``allowed_seconds`` if at least `MIN_ROUNDS` rounds are possible in them.

    A run of minutes sees the usual disturbances too, so the fastest call would promise too much.
    """
    for call in calls.values():
        call()
    rounds, end = list[list[float]](), time.perf_counter() + allowed_seconds
    while len(rounds) < MIN_ROUNDS or time.perf_counter() < end:
        rounds.append([call() for call in calls.values()])
    means = trim_mean(rounds, TRIMMED_SHARE)
    return dict(zip(calls, means.tolist(), strict=True))


def rate_of(nbytes: int, seconds: float) -> float:
    """Return bytes per second, at most `FASTEST`: a difference of two times may be negative."""
    return nbytes / max(seconds, nbytes / FASTEST)


def new_memory(*, huge_pages: bool) -> Callable[[], float]:
    """Return a function that returns how much longer writing `TOUCH_BYTES` takes in new memory.

    Every tensor of this size gets new pages, which the kernel supplies, and gets back. The threads
    that compute write them first. This is measured and not fitted, as few probes have tensors of
    this size.
    """
    reused_tensor = torch.ones(TOUCH_BYTES, dtype=torch.uint8)

    def call() -> float:
        start = time.perf_counter()
        memory = anonymous_memory(TOUCH_BYTES, huge_pages=huge_pages)
        torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
        del memory
        middle = time.perf_counter()
        reused_tensor.fill_(1)
        return 2 * middle - start - time.perf_counter()

    return call


def launch_chain() -> Probe:
    """Return `LAUNCHED` operators without work, with the code of their modules."""
    layers = (nn.Linear(16, 16), nn.LayerNorm(16)) * (LAUNCHED // 2)
    chain = nn.Sequential(*layers).to("cpu", torch.bfloat16).requires_grad_(False)
    return Probe(chain, "bfloat16", ((1, 16),))


def launch_seconds_in_blocks(block_seconds: Sequence[float], rates: ProcessorRates) -> float:
    """Return the median seconds of an operator in a block of a model, without its work by
    ``rates``: the block's own code, and operators that only make views, count too.

    ``block_seconds``: of `_small_blocks`.
    """
    launches = list[float]()
    for seconds, block in zip(block_seconds, _small_blocks("meta"), strict=True):
        kernels = block.kernels()
        work_seconds = sum(cpu_seconds(kernel, rates) for kernel in kernels)
        launches.append(max(0.0, seconds - work_seconds) / len(kernels))
    return statistics.median(launches)


def quantized_layers(dtype: str) -> dict[str, Probe]:
    """Return a layer with a weight in ``dtype``, under an empty name, and quantized ones, by
    precision."""
    weight = torch.ones(LAYER_SIZE, LAYER_SIZE, dtype=getattr(torch, dtype))
    layer = nn.Linear(LAYER_SIZE, LAYER_SIZE, bias=False, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layers = {"": layer} | {
        precision: filled_layer(weight, precision)
        for precision in ("nf4", "int8", "fp8", *GGUF_BLOCKS)
    }
    sizes = ((LAYER_ROWS, LAYER_SIZE),)
    return {precision: Probe(layer, dtype, sizes) for precision, layer in layers.items()}


def dequantization_rates(seconds: Mapping[str, float], dtype: str) -> dict[str, float]:
    """Return bytes per second of the weights in ``dtype`` that quantized layers make.

    ``seconds``: of `quantized_layers`. Those count that a layer takes longer than one with the
    weight itself: reading, dequantizing and, for int8, all that its product differs in.
    """
    nbytes = LAYER_SIZE * LAYER_SIZE * getattr(torch, dtype).itemsize
    rates = {
        f"dequantize {precision} {dtype}": rate_of(nbytes, duration - seconds[""])
        for precision, duration in seconds.items()
        if precision
    }
    rates[f"dequantize gguf {dtype}"] = rates[f"dequantize Q4_K {dtype}"]  # of several types
    return rates


def filled_layer(weight: torch.Tensor, precision: str) -> nn.Module:
    """Return a layer of ``precision`` that computes with ``weight``, or of GGUF with zeros."""
    outputs, inputs = weight.shape
    holder = nn.Module()
    holder.layer = nn.Linear(inputs, outputs, bias=False, device="meta", dtype=weight.dtype)
    if precision in GGUF_BLOCKS:
        elements, nbytes = GGUF_BLOCKS[precision]
        rows = {"layer.weight": (precision, inputs // elements * nbytes)}
        convert(holder, "gguf", weight.dtype, rows)
    else:
        convert(holder, precision, weight.dtype)
    layer: Any = holder.layer
    if precision in GGUF_BLOCKS:
        data = torch.zeros_like(layer.weight, device="cpu")
    elif precision == "fp8":
        data = weight.to(torch.float8_e4m3fn)
    else:
        fields = quantized(weight, precision)
        data = fields["data" if precision == "nf4" else "CB"]
    new_weight: Any = nn.Parameter(data, requires_grad=False)
    new_weight.__dict__ |= layer.weight.__dict__
    layer.weight = new_weight
    if precision == "nf4":
        new_weight.quant_state.absmax, new_weight.quant_state.code = (
            fields["absmax"],
            fields["code"],
        )
    elif precision == "int8":
        layer.state.CB, layer.state.SCB = new_weight, fields["SCB"]
    return holder.layer


def work_of(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Return the amounts of the work of ``kernels`` by class, as `ProcessorRates` names classes."""
    amounts = dict[str, float]()
    for kernel in kernels:
        for name, amount in cpu_work(kernel).items():
            key = name if name == "new memory" else f"{name} {kernel.dtype}"
            amounts[key] = amounts.get(key, 0.0) + amount
    return amounts


def fitted_rates(
    work: Sequence[Mapping[str, float]], seconds: Sequence[float], blocks: Sequence[bool] = ()
) -> tuple[dict[str, float], list[float]]:
    """Return the rate of each class, and the relative error of each probe.

    ``work``: the amounts of each probe by class. ``seconds``: of each probe. ``blocks``: which
    probes are blocks, and count `BLOCK_WEIGHT` times. Convolutions get at most `FASTER_CONVOLUTION`
    times the rate of products: else copies of weights may explain all their seconds.
    """
    names = sorted({name for amounts in work for name in amounts})
    weights = numpy.array(
        [BLOCK_WEIGHT if is_block else 1.0 for is_block in blocks or [False] * len(work)]
    )
    matrix = numpy.array(
        [
            [amounts.get(name, 0.0) / duration for name in names]
            for amounts, duration in zip(work, seconds, strict=True)
        ]
    )
    scales = matrix.max(axis=0)
    factors = numpy.sqrt(weights)
    columns = matrix / scales * factors[:, None]
    inverse_rates, _ = nnls(columns, factors)
    seconds_by_name = dict(zip(names, inverse_rates / scales, strict=True))
    minimum = numpy.array([_least_seconds(name, seconds_by_name) for name in names]) * scales
    inverse_rates = minimum + nnls(columns, factors - columns @ minimum)[0]
    errors = [float(share) - 1 for share in (matrix / scales) @ inverse_rates]
    rates = [
        min(FASTEST, scale / inverse if inverse else FASTEST)
        for scale, inverse in zip(scales.tolist(), inverse_rates.tolist(), strict=True)
    ]
    return dict(zip(names, rates, strict=True)), errors


def _least_seconds(name: str, seconds_by_name: Mapping[str, float]) -> float:
    """Return the least seconds of one unit of the class ``name``, by the rates of products."""
    _, convolution, dtype = name.partition("convolution")
    products = (f"{product}{dtype}" for product in ("matmul", "short matmul"))
    seconds = [seconds_by_name[product] for product in products if product in seconds_by_name]
    return min(seconds, default=0.0) / FASTER_CONVOLUTION if convolution else 0.0


def measured_cpu(
    base: Hardware, allowed_seconds: float, probe_list: Sequence[Probe] = ()
) -> tuple[Hardware, dict[str, float]]:
    """Return ``base`` with the measured rates of kernels, and figures.

    ``probe_list``: by default all `probes`. Classes that no probe measures keep the rates of
    ``base``, the data-sheet estimate.
    """
    base_rates = base.kernels
    assert isinstance(base_rates, ProcessorRates)
    probe_list = probe_list or probes(base)
    layer_dtype = max(DTYPES, key=lambda dtype: base_rates.rate("matmul", dtype))
    pool = ColdPool(min(POOL_BYTES, int(POOL_SHARE * available_bytes())))
    chain, small_blocks = launch_chain(), list(_small_blocks("cpu"))
    layers = quantized_layers(layer_dtype)
    timed_probes = (chain, *small_blocks, *layers.values(), *probe_list)
    calls: dict[Probe | str, Callable[[], float]] = {
        probe: probe.timed(pool, SMALL_REPEATS if probe in small_blocks else 1)
        for probe in timed_probes
    }
    calls |= {name: new_memory(huge_pages=bool(number)) for number, name in enumerate(NEW_PAGES)}
    seconds = typical_seconds(calls, allowed_seconds)
    launch = seconds[chain] / LAUNCHED
    page_rates = {name: rate_of(TOUCH_BYTES, seconds[name]) for name in NEW_PAGES}
    new_rate = page_rates[NEW_PAGES[base_rates.huge_pages]]
    work, durations = list[dict[str, float]](), list[float]()
    for probe in probe_list:
        kernels = probe.kernels()
        work.append(work_of(kernels))
        known_seconds = len(kernels) * launch + work[-1].pop("new memory", 0.0) / new_rate
        durations.append(max(0.1 * seconds[probe], seconds[probe] - known_seconds))
    # The rate of an operator that only blocks have, with few bytes, would absorb the errors of
    # others.
    measured_names = {
        name
        for probe, amounts in zip(probe_list, work, strict=True)
        for name in amounts
        if not (probe.is_block and name.startswith("elementwise"))
    }
    work = [
        {name: amount for name, amount in amounts.items() if name in measured_names}
        for amounts in work
    ]
    rates, errors = fitted_rates(work, durations, [probe.is_block for probe in probe_list])
    rates |= page_rates
    layer_seconds = {precision: seconds[layer] for precision, layer in layers.items()}
    rates |= dequantization_rates(layer_seconds, layer_dtype)
    for dtype in DTYPES:  # for operators that no probe has
        operator_rates = [
            rate
            for name, rate in rates.items()
            if name.startswith("elementwise ") and name.endswith(dtype)
        ]
        if operator_rates:
            rates[f"elementwise {dtype}"] = sorted(operator_rates)[len(operator_rates) // 2]
    kernels_rates = replace(
        base_rates,
        threads=torch.get_num_threads(),
        rates=tuple((dict(base_rates.rates) | rates).items()),
    )
    block_seconds = [seconds[block] for block in small_blocks]
    hardware = replace(
        base,
        launch_seconds=max(launch, launch_seconds_in_blocks(block_seconds, kernels_rates)),
        flops_per_second=kernels_rates.rate("matmul", "bfloat16"),
        memory_bytes_per_second=kernels_rates.rate("elementwise clone", "float32"),
        kernels=kernels_rates,
        basis="measured",
    )
    largest_error = max(map(abs, errors), default=0.0)
    figures = {
        "matmul_flops_per_second": hardware.flops_per_second,
        "attention_flops_per_second": kernels_rates.rate("attention", "bfloat16"),
        "largest_probe_error": largest_error,
    }
    return hardware, figures
