"""Seconds of kernels on a device, by class. Pure arithmetic, no torch.

    matrix product   FLOPs at the rate of the dtype, in full waves: each multiprocessor takes one
                     tile of 128 x 128 outputs, and the last wave takes as long as a full one. Each
                     wave adds `KernelRates.wave_seconds` (filling the pipeline and writing the
                     tile). If moving the bytes takes longer, that time counts.
    convolution      the same
    attention        FLOPs with features padded to `HEAD_FEATURES`, and one exponential per query
                     and key, which the multiprocessors' special function units compute
    wide attention   heads of more than 256 features (the middle of VAEs), which the
                     memory-efficient kernel computes, at `EFFICIENT_ATTENTION`
    elementwise      bytes read and written; group norm also the pass that computes means, with one
                     thread block per group (`NORM_SECONDS`); RMS norm at least one thread block per
                     row (`ROW_SECONDS`)
    transfer         bytes sent to an equal device, which sends as many (`transfer_seconds`)

On a CPU (`ProcessorRates`) times add up, since the same cores multiply and move bytes:

    matrix product   FLOPs, at a rate for long and short sums (`LONG_SUMS`), bytes of the operands,
                     and bytes of the result
    convolution      FLOPs, and bytes of the copies with channels in blocks and of the result, at
                     rates for weights, and for small, large and huge channels
                     (`SMALL_PLANE_BYTES`); FLOPs at two rates, as the rows of huge channels that a
                     core adds up are more than its cache
    attention        FLOPs, and elements of the queries
    elementwise      bytes read and written, at the rate of the operator; an RMS norm as the
                     operators of which it consists there
    all              the time to launch them; and where a tensor has at least `MAPPED_BYTES`, the
                     time to get new memory from the kernel, page by page

On a card, a call takes as long as its kernels, or as the host takes to launch them, if that is
longer. On `sim` (no `KernelRates`) FLOPs take their time at one rate, and the device waits for
launches that the host has not issued yet.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence

from graphrun.c_heap import MAPPED_BYTES
from graphrun.graph.precisions import GGUF_MIXES, ONLY_IN_FILES
from graphrun.model.hardware import Hardware, ProcessorRates
from graphrun.profile.corrections import CHANNEL_BLOCK, scratch_on
from graphrun.profile.precision import ELEMENT_BYTES, dequantization_seconds
from graphrun.profile.recording import KEY_MASKED, MASKED, RMS_NORM, Call, ConvolutionShape, Kernel
from graphrun.profile.svdquant import FOUR_BIT_FACTOR, RANK
from graphrun.units import KIB, round_up

TILE = 128

# Products that add up fewer numbers per output compute faster: their weights stay in the cache.
LONG_SUMS = 1024
# Sizes of channels up to which they are copied to blocks of 16 channels at one rate: fewer lines of
# 16 larger channels stay in a cache.
SMALL_PLANE_BYTES, LARGE_PLANE_BYTES = 16 * KIB, 64 * KIB

# Features per head of flash attention's kernels (flash_fwd_hdim*.cu): heads are padded to the next.
# 132 features ran at 219 TFLOP/s where 128 ran at 370 (Dao-AILab/flash-attention, issue 1141).
HEAD_FEATURES = (32, 64, 96, 128, 160, 192, 256)
# Rate of the memory-efficient attention kernel over the rate of flash attention, which is twice as
# fast (arXiv:2307.08691): of wide heads, and of all heads on cards before compute capability 8.0.
EFFICIENT_ATTENTION = 0.5
# Rate of attention with a mask that differs by query, over the rate without: 176 of 649 TFLOP/s on
# an H100 (HunyuanVideo 1.5: 16 heads of 128 features, 50,345 tokens); with the same mask for all
# queries, which flash attention does not take either. The second is fitted (`hardware`).
MASKED_ATTENTION = 0.27
KEY_MASKED_ATTENTION = 0.82

# Seconds per element of a group, of PyTorch's kernel for the means of group norm
# (RowwiseMomentsCUDAKernel). Its 512 threads wait for one element each at a time, so bandwidth does
# not matter, and a picture of 32 groups uses 32 multiprocessors. On an H100, the 30 norms of FLUX's
# decoder took half of its time (benchmarks/results/card-flux.json: 46 ms for 57 million elements
# per group).
NORM_SECONDS = 0.8e-9
NORM_BLOCKS = 4  # blocks of 512 threads that a multiprocessor runs at once

# Seconds that a multiprocessor takes for one row of an RMS norm (vectorized_layer_norm_kernel), one
# block per row. On an H100, 608 norms of FLUX.1-dev, with 50.4 million rows of 128 features, took
# 35.8 ms (benchmarks/results/card-flux.json), 4.6 times what their bytes take.
ROW_SECONDS = 94e-9

# bitsandbytes' int8 layers (LLM.int8): bytes that MatMul8bitLt's kernels move per element of input
# (cast to fp16, search for outliers, quantization) and of output (int32 sums scaled to fp16, cast).
INT8_INPUT_BYTES, INT8_OUTPUT_BYTES = 10, 14
# Seconds that the device waits in each int8 layer while the host checks for outliers: about twenty
# launches, and a copy to the host. Assumed.
INT8_WAIT_SECONDS = 0.5e-3

# torchao's and quanto's weight-only layers: bytes moved per element of output in formats that scale
# the product (int8: read and written to scale it, to add the bias, and to cast), and per weight in
# formats that scale the weight (fp8: cast to 32 bits, scaled, cast to 16 bits).
SCALED_OUTPUT_BYTES = 12
SCALED_WEIGHT_BYTES = 16
# Casting a weight of one byte to 16 bits: read and written.
CAST_BYTES = 3
# Dynamic quantization of activations: read for the maximum, read and written in one byte.
DYNAMIC_INPUT_BYTES = 5
# SVDQuant: an input in 16 bits is read, and written and read in 4 bits; the products of the
# low-rank branch are in 16 bits, fused with the products in 4 bits (arXiv:2411.05007).
SVDQUANT_INPUT_BYTES = 3

# Seconds after which the kernel of a virtual machine offers free memory to its host
# (PAGE_REPORTING_DELAY in mm/page_reporting.c of Linux).
HOST_TAKES_SECONDS = 2.0


def work_seconds(call: Call, hardware: Hardware) -> list[float]:
    """Return the seconds of each entry of ``call.work``.

    If launching takes longer than computing, the launch time is divided in proportion to the
    compute time.
    """
    kernel_durations = [kernel_seconds(kernel, hardware) for kernel in call.kernels]
    durations = [
        sum((kernel_durations[number] for number in numbers), 0.0) for _, numbers in call.work
    ]
    if isinstance(hardware.kernels, ProcessorRates):
        return _with_touching(durations, call, hardware)
    if hardware.kernels is None:
        return _simulated_seconds(durations, [len(numbers) for _, numbers in call.work], hardware)
    total, launching = (
        sum(durations),
        hardware.launch_seconds * sum(len(numbers) for _, numbers in call.work),
    )
    return (
        [seconds * launching / total for seconds in durations]
        if 0 < total < launching
        else durations
    )


def kernel_seconds(kernel: Kernel, hardware: Hardware) -> float:
    """Return the seconds of one kernel on the device."""
    rates = hardware.kernels
    if kernel.kind == "transfer":
        return transfer_seconds(kernel.nbytes, hardware)
    if rates is None:
        return kernel.flops / hardware.flops_per_second
    if isinstance(rates, ProcessorRates):
        return hardware.launch_seconds + cpu_seconds(kernel, rates)
    moving = kernel.nbytes / hardware.memory_bytes_per_second
    if kernel.operator == RMS_NORM:
        return max(moving, kernel.shape[0] * ROW_SECONDS / rates.multiprocessors)
    if not kernel.tiles:
        return moving
    if kernel.kind == "elementwise":  # group norm
        blocks_per_place = max(1.0, kernel.tiles / (NORM_BLOCKS * rates.multiprocessors))
        return moving + kernel.scores / kernel.tiles * blocks_per_place * NORM_SECONDS
    half = kernel.dtype == "float16" or (kernel.dtype == "bfloat16" and rates.bfloat16)
    waves = -(-kernel.tiles // rates.multiprocessors)
    # FLOPs of full waves over FLOPs of the kernel
    full = waves * rates.multiprocessors / kernel.tiles
    if kernel.kind == "matmul":
        rate = hardware.flops_per_second if half else rates.fp32_flops_per_second
        return max(full * kernel.flops / rate + waves * rates.wave_seconds, moving)
    if kernel.kind == "convolution":
        rate = (
            rates.convolution_flops_per_second if half else rates.fp32_convolution_flops_per_second
        )
        return max(full * kernel.flops / rate + waves * rates.wave_seconds, moving)
    rate = rates.attention_flops_per_second if half else rates.fp32_flops_per_second
    if kernel.kind == "wide attention":
        rate *= EFFICIENT_ATTENTION
    else:
        shares = {MASKED: MASKED_ATTENTION, KEY_MASKED: KEY_MASKED_ATTENTION}
        rate *= shares.get(kernel.operator, 1.0) / _padding(kernel)
    return full * max(kernel.flops / rate + kernel.scores / rates.exponentials_per_second, moving)


def transfer_seconds(nbytes: int, hardware: Hardware) -> float:
    """Return the seconds to send ``nbytes`` to an equal device, and to receive as many.

    Without direct access between cards both pass through the host: a copy there and a copy back run
    at once. On a CPU, processes exchange bytes in memory.
    """
    if hardware.kind.is_host:
        return nbytes / hardware.memory_bytes_per_second
    back_rate = hardware.h2d_bytes_per_second * hardware.bidirectional
    rate = min(hardware.d2h_bytes_per_second, back_rate)
    return hardware.copy_start_seconds + nbytes / rate


def _padding(kernel: Kernel) -> float:
    """Return the features per head that attention computes, over those that it has."""
    features = kernel.shape[-1] if kernel.shape else 0
    padded = next((width for width in HEAD_FEATURES if width >= features), features)
    return padded / features if features else 1.0


def cpu_seconds(kernel: Kernel, rates: ProcessorRates) -> float:
    """Return the seconds of one kernel on a CPU, without its launch."""
    return sum(
        (amount / rates.rate(name, kernel.dtype) for name, amount in cpu_work(kernel).items()), 0.0
    )


def cpu_work(kernel: Kernel) -> dict[str, float]:
    """Return the amounts of ``kernel``'s work on a CPU, by class of `ProcessorRates`."""
    if kernel.operator == RMS_NORM:
        return _rms_norm_work(*kernel.shape[1:])
    if kernel.kind == "elementwise":
        name = f"elementwise {kernel.operator}".strip()
        return {name: float(kernel.nbytes)} | _new_bytes(*kernel.shape)
    element_bytes = ELEMENT_BYTES.get(kernel.dtype, 8)
    if kernel.kind == "matmul":
        count, rows, inner, columns = kernel.shape
        result_bytes = element_bytes * count * rows * columns
        return {
            "short matmul" if inner < LONG_SUMS else "matmul": kernel.flops,
            "reads": kernel.nbytes - result_bytes,
            "results": result_bytes,
        } | _new_bytes(result_bytes)
    if kernel.kind == "convolution":
        shape = ConvolutionShape(*kernel.shape)
        outputs = round_up(shape.outputs, CHANNEL_BLOCK) if shape.groups == 1 else shape.outputs
        weight_bytes = element_bytes * shape.inputs * shape.outputs * shape.taps // shape.groups
        pixel_bytes = element_bytes * shape.batch * shape.output_pixels
        plane_bytes = element_bytes * max(shape.input_pixels, shape.output_pixels)
        sizes = {"small": SMALL_PLANE_BYTES, "large": LARGE_PLANE_BYTES}
        kind = next((name for name, nbytes in sizes.items() if plane_bytes <= nbytes), "huge")
        class_name = "huge convolution" if kind == "huge" else "convolution"
        # the input in blocks, the output in blocks twice (`corrections`), the result
        copies = (
            kernel.nbytes - weight_bytes - shape.outputs * pixel_bytes,
            *[outputs * pixel_bytes] * 2,
            shape.outputs * pixel_bytes,
        )
        return {
            class_name: kernel.flops * outputs / shape.outputs,
            "weight copies": weight_bytes,
            f"{kind} copies": sum(copies),
        } | _new_bytes(*map(int, copies), weight_bytes)
    return {"attention": kernel.flops, "queries": float(_query_elements(kernel))}


def _query_elements(kernel: Kernel) -> float:
    """Return the elements of attention's queries: each is packed, scaled and written once."""
    heads, queries, _, features = kernel.shape
    return heads * queries * (features or kernel.flops / (4 * kernel.scores or 1))


def _rms_norm_work(elements: int, element_bytes: int, has_weight: int) -> dict[str, float]:
    """Return the work of PyTorch's ``rms_norm_composite``, by its operators."""
    cast_bytes = 2 * elements * (element_bytes + 4) if element_bytes < 4 else 0
    wide_bytes = max(element_bytes, 4) * elements
    work = {
        "elementwise _to_copy": float(cast_bytes),
        "elementwise pow": 2.0 * wide_bytes,
        "elementwise mean": float(wide_bytes),
        "elementwise mul": 2.0 * wide_bytes * (1 + has_weight),
    }
    return work | _new_bytes(*[wide_bytes] * (3 + has_weight))


def _new_bytes(*sizes: int) -> dict[str, float]:
    """Return the bytes of tensors of ``sizes`` that get new memory from the system each time."""
    total_bytes = sum(nbytes for nbytes in sizes if nbytes >= MAPPED_BYTES)
    return {"new memory": float(total_bytes)} if total_bytes else {}


def extra_seconds(
    call: Call, shapes: Mapping[str, tuple[int, int]], precision: str, hardware: Hardware
) -> dict[str, float]:
    """Return path -> further seconds in ``precision``; ``shapes``: (outputs, inputs) of weights."""
    seconds_by_path: dict[str, float] = defaultdict(float)

    @functools.cache  # equal layers share kernels
    def seconds_of(number: int, shape: tuple[int, int]) -> float:
        return quantized_seconds(call.kernels[number], shape, precision, hardware)

    for path, numbers in call.work:
        if (shape := shapes.get(f"{path}.weight")) is not None:
            products = (number for number in numbers if call.kernels[number].kind == "matmul")
            seconds_by_path[path] += sum(seconds_of(number, shape) for number in products)
    return seconds_by_path


def quantized_seconds(
    kernel: Kernel, shape: tuple[int, int], precision: str, hardware: Hardware
) -> float:
    """Return a product's additional seconds; 0 on `sim`, which charges FLOPs and copies only."""
    rates, bandwidth = hardware.kernels, hardware.memory_bytes_per_second
    if rates is None:
        return 0.0
    outputs, inputs = shape
    if isinstance(rates, ProcessorRates):
        written_bytes = ELEMENT_BYTES[kernel.dtype] * outputs * inputs
        # torchao's weight-only formats cast and scale, as fp8 does
        name = "fp8" if precision in ONLY_IN_FILES else GGUF_MIXES.get(precision, precision)
        return written_bytes / rates.rate(f"dequantize {name}", kernel.dtype)
    weights, rows = outputs * inputs, kernel.flops / (2 * outputs * inputs)
    match precision:
        case "nf4" | "fp8" | "layerwise":
            return dequantization_seconds(ELEMENT_BYTES[kernel.dtype] * weights, bandwidth)
        case "int8":
            moved_bytes = rows * (INT8_INPUT_BYTES * inputs + INT8_OUTPUT_BYTES * outputs)
            return (
                INT8_WAIT_SECONDS
                + moved_bytes / bandwidth
                - _saved_seconds(kernel, rates.int8_flops_per_second, hardware)
            )
        case "int8wo" | "quanto":
            return (CAST_BYTES * weights + SCALED_OUTPUT_BYTES * rows * outputs) / bandwidth
        case "fp8wo":
            return SCALED_WEIGHT_BYTES * weights / bandwidth
        case "svdq-int4" | "svdq-fp4" if rows > 1:
            low_rank_flops = 2 * rows * RANK * (inputs + outputs)
            return (
                low_rank_flops / hardware.flops_per_second
                + SVDQUANT_INPUT_BYTES * rows * inputs / bandwidth
                - _saved_seconds(kernel, FOUR_BIT_FACTOR * rates.int8_flops_per_second, hardware)
            )
        case "fp8dq":
            return DYNAMIC_INPUT_BYTES * rows * inputs / bandwidth - _saved_seconds(
                kernel, rates.fp8_flops_per_second, hardware
            )
    return 0.0


def _with_touching(durations: list[float], call: Call, hardware: Hardware) -> list[float]:
    """Return the seconds of each entry with those of getting the memory of the call's tensors from
    the host of a virtual machine, in proportion.

    A run returns freed memory between calls. In a long call it is free for long enough for the host
    to take it back.
    """
    total = sum(durations)
    if total < HOST_TAKES_SECONDS or not hardware.first_touch_seconds:
        return durations
    levels = call.levels()
    most_bytes = max(
        level + (scratch_on(hardware, call, event) if event.scratch else 0)
        for level, event in zip(levels[1:], call.events, strict=True)
    )
    touching = most_bytes * hardware.first_touch_seconds
    return [seconds * (1 + touching / total) for seconds in durations]


def _simulated_seconds(
    computing: Sequence[float], launches: Sequence[int], hardware: Hardware
) -> list[float]:
    """Return the seconds of each entry on `sim`, whose clock charges every launch.

    The host launches ahead. The device waits where kernels take less time than their launches.
    """
    durations = []
    host_seconds = device_seconds = 0.0
    for seconds, launched in zip(computing, launches, strict=True):
        host_seconds += launched * hardware.launch_seconds
        durations.append(seconds + max(0.0, host_seconds - (device_seconds + seconds)))
        device_seconds += durations[-1]
    return durations


def output_tiles(rows: int, columns: int) -> int:
    """Return the 128 x 128 tiles that cover the outputs; cuBLAS mostly computes one at a time."""
    return -(-rows // TILE) * -(-columns // TILE)


def _saved_seconds(kernel: Kernel, rate: float, hardware: Hardware) -> float:
    """Return the seconds that ``kernel`` saves at ``rate``; 0 if ``rate`` is no faster."""
    return max(0.0, kernel.flops / hardware.flops_per_second - kernel.flops / rate) if rate else 0.0
