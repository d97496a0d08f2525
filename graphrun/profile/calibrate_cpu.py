"""Measure the CPU: rates of kernels by class (`costs.cpu_work`), with PyTorch's number of threads.

Probes are operators of the sizes that models have. Each is recorded as in a dry run, and timed. The
rates are those with which `costs` gives the probes their measured seconds: of all non-negative
rates, the ones with the least sum of squared relative errors. So a class is measured by several
probes, and a probe measures several classes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from scipy.optimize import nnls
from torch import nn

from graphrun.model.problem import Hardware, ProcessorRates
from graphrun.profile.costs import cpu_work
from graphrun.profile.recorder import FusedAttention, Recorder
from graphrun.profile.recording import Kernel
from graphrun.units import MIB

# A class that takes no measurable time has this rate.
FASTEST = 1e16
DTYPES = ("bfloat16", "float32", "float16")
# Weights of one product are read again after this many bytes of other weights, as in a model.
WEIGHTS_BYTES = 64 * MIB
LAUNCHED = 128  # operators in the chain that measures launches

functional = nn.functional


@dataclass(frozen=True, slots=True)
class Probe:
    """An operator and the sizes of its tensors, all of ``dtype``."""

    operator: Callable[..., Any]
    dtype: str
    sizes: tuple[tuple[int, ...], ...]

    def tensors(self, device: str) -> list[torch.Tensor]:
        """Return new tensors on ``device``."""
        dtype = getattr(torch, self.dtype)
        return [torch.ones(size, dtype=dtype, device=device) for size in self.sizes]

    def kernels(self) -> list[Kernel]:
        """Return the kernels that a dry run records of the operator."""
        tensors, module = self.tensors("meta"), nn.Module()
        recorder = Recorder(module, ())
        recorder.ignore(tensors)
        with torch.no_grad(), FusedAttention(recorder), recorder:
            self.operator(*tensors)
        recorder.close()
        record = recorder.record
        return [record.kernels[number] for _, numbers in record.work for number in numbers]


def probes() -> Iterator[Probe]:
    """Yield the probes."""
    for dtype in DTYPES:
        yield from _products(dtype)
        yield from _convolutions(dtype)
        yield from _elementwise(dtype)


def _products(dtype: str) -> Iterator[Probe]:
    rows_and_weights = [
        *((1, 3072, 3072), (77, 1536, 1536), (256, 1536, 1536), (512, 1536, 3072)),
        *((1024, 64, 2048), (1024, 640, 640), (2048, 320, 1280)),
    ]
    for rows, inputs, outputs in rows_and_weights:
        yield Probe(functional.linear, dtype, ((rows, inputs), (outputs, inputs)))
    for size in ((1, 12, 512, 128), (1, 10, 1024, 64)):
        yield Probe(functional.scaled_dot_product_attention, dtype, (size,) * 3)


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
        (256, 256, (128, 128), 3),
        (128, 128, (128, 128), 1),
        (96, 96, (4, 64, 64), 3),
    ):
        weight = (outputs, inputs, *[taps] * len(pixels))
        if dtype != "float16":  # PyTorch computes it by products
            yield Probe(convolution, dtype, ((1, inputs, *pixels), weight))


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
        functional.silu,
        functional.gelu,
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


def best_seconds(probe: Probe, seconds: float) -> float:
    """Return the seconds of the fastest of at least three calls, within ``seconds`` if possible.

    Calls take turns with copies of the last tensor, the weights of a product.
    """
    *sources, last = probe.tensors("cpu")
    is_product = probe.operator is functional.linear
    count = max(1, min(16, WEIGHTS_BYTES // last.nbytes)) if is_product else 1
    lasts = itertools.cycle([last, *(last.clone() for _ in range(count - 1))])
    durations = list[float]()
    with torch.no_grad():
        probe.operator(*sources, next(lasts))
        end = time.perf_counter() + seconds
        while len(durations) < 3 or (time.perf_counter() < end and len(durations) < 400):
            current, start = next(lasts), time.perf_counter()
            result = probe.operator(*sources, current)
            durations.append(time.perf_counter() - start)
            del result
    return min(durations)


def launch_seconds(seconds: float) -> float:
    """Return the seconds of an operator without work, with the code of its module."""
    layers = (nn.Linear(16, 16), nn.LayerNorm(16)) * (LAUNCHED // 2)
    chain = nn.Sequential(*layers).to("cpu", torch.bfloat16).requires_grad_(False)
    return best_seconds(Probe(chain, "bfloat16", ((1, 16),)), seconds) / LAUNCHED


def fitted_rates(
    work: Sequence[Mapping[str, float]], seconds: Sequence[float]
) -> tuple[dict[str, float], list[float]]:
    """Return the rate of each class, and the relative error of each probe.

    ``work``: the amounts of each probe by class. ``seconds``: what each probe took.
    """
    names = sorted({name for amounts in work for name in amounts})
    matrix = numpy.array(
        [
            [amounts.get(name, 0.0) / duration for name in names]
            for amounts, duration in zip(work, seconds, strict=True)
        ]
    )
    scales = matrix.max(axis=0)
    inverse_rates, _ = nnls(matrix / scales, numpy.ones(len(seconds)))
    errors = [float(share) - 1 for share in (matrix / scales) @ inverse_rates]
    rates = [
        min(FASTEST, scale / inverse if inverse else FASTEST)
        for scale, inverse in zip(scales.tolist(), inverse_rates.tolist(), strict=True)
    ]
    return dict(zip(names, rates, strict=True)), errors


def measured_cpu(
    base: Hardware, allowed_seconds: float, probe_list: Sequence[Probe] = ()
) -> tuple[Hardware, dict[str, float]]:
    """Return ``base`` with the measured rates of kernels, and figures.

    ``probe_list``: by default all `probes`. Classes that no probe measures keep the rates of
    ``base``, the data-sheet estimate.
    """
    assert isinstance(base.kernels, ProcessorRates)
    probe_list = probe_list or tuple(probes())
    share = allowed_seconds / (len(probe_list) + 4)
    launch = launch_seconds(share)
    work, durations = list[dict[str, float]](), list[float]()
    for probe in probe_list:
        kernels, amounts = probe.kernels(), dict[str, float]()
        for kernel in kernels:
            for name, amount in cpu_work(kernel).items():
                key = name if name == "new memory" else f"{name} {kernel.dtype}"
                amounts[key] = amounts.get(key, 0.0) + amount
        work.append(amounts)
        duration = best_seconds(probe, share)
        durations.append(max(0.1 * duration, duration - len(kernels) * launch))
    rates, errors = fitted_rates(work, durations)
    for dtype in DTYPES:  # operators that no probe has
        operator_rates = [
            rate
            for name, rate in rates.items()
            if name.startswith("elementwise ") and name.endswith(dtype)
        ]
        if operator_rates:
            rates[f"elementwise {dtype}"] = sorted(operator_rates)[len(operator_rates) // 2]
    kernels_rates = replace(
        base.kernels,
        threads=torch.get_num_threads(),
        rates=tuple((dict(base.kernels.rates) | rates).items()),
    )
    hardware = replace(
        base,
        launch_seconds=launch,
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
