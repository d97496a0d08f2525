"""Device memory that a card takes beyond what the dispatcher sees, as named rules with sources.

Pure arithmetic, in bytes, no torch. Rules about a component's own tensors are applied where the
tensors are created: T5's ``wo`` in fp32, persistent buffers and tied weights in
`graphrun.modules.build` and `graphrun.modules.blocks`.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphrun.model.hardware import Hardware, ProcessorRates
from graphrun.profile.recording import FLEX, RMS_NORM, Call, ConvolutionShape, Kernel, MemoryEvent
from graphrun.units import GIB, MIB, round_up

# tensors of this size or more exceed 32-bit signed byte offsets
LARGE_BYTES = 1 << 31

# Tensor cores take channels in multiples of 8 (16 bit). For fewer, as in a network's first layer,
# cuDNN has separate kernels.
FEW_CHANNELS = 8
MANY_CHANNELS = 512
PART_BYTES = GIB

# Compute capability 9.0: cuDNN's kernels read this many bytes at a time, and take at most so much
# scratch besides copies.
ALIGNED_BYTES = 16
CHOSEN_BYTES = 33 * MIB // 2
CHOOSING_CHANNELS = 192
CHOOSING_CHANNELS_FP32 = 128


@dataclass(frozen=True, slots=True)
class Correction:
    """A named rule: the memory that it adds, and its source."""

    name: str
    adds: str
    source: str


CORRECTIONS = (
    Correction(
        "convolution scratch, 16 bit",
        (
            "bytes(input) + bytes(output) + bytes(weight) during the kernel: copies to "
            "channels-last and back"
        ),
        (
            "ten VAE decodes on an RTX 4090, InvokeAI's VAE benchmark report: -20 % without, 0.2 "
            "% with"
        ),
    ),
    Correction(
        "convolution scratch, 32 bit",
        (
            "bytes(input) + bytes(weight): the output is written in place; nothing where the "
            "stride is more than 1"
        ),
        (
            "the same report, SDXL in fp32: decode at 1024 (allocated), encode at 512 (reserved); "
            "validated on other sizes and FLUX"
        ),
    ),
    Correction(
        "convolution scratch, 32 bit, 512 channels or more in and out",
        (
            "2 bytes(input) + 2 bytes(output) + bytes(weight) + 1 MiB; the second copies in parts "
            "where a tensor has more than 1 GiB"
        ),
        (
            "that report, FLUX encode in fp32 at 512 (allocated), decode at 1536 and 2048 "
            "(reserved); validated on its other fp32 rows"
        ),
    ),
    Correction(
        "convolution scratch, compute capability 9.0",
        (
            "bytes(input) + bytes(output) + bytes(weight) in 16 and 32 bits, with output channels "
            "in multiples of 16 bytes; the weight alone with channels last; nothing with one tap "
            "and adjacent pixels in multiples of 16 bytes, or with one channel in each group; a "
            "copy of an input whose elements are not adjacent"
        ),
        "570 convolutions of 14 pipelines on an H100 (benchmarks/card_kernels.py), PyTorch 2.11",
    ),
    Correction(
        "convolution scratch, compute capability 9.0, of cuDNN's choice",
        (
            "16.5 MiB with 192 input channels or more, in 32 bits 128; none of two dimensions in "
            "bfloat16"
        ),
        "the same measurement: 0 to 16.5 MiB, by shape",
    ),
    Correction(
        "convolution scratch, compute capability 9.0, 2 GiB",
        "in 16 bits bytes(input) + bytes(weight) where input or output has 2 GiB or more",
        (
            "FLUX.1-dev on an H100 with 16 images, diffusers-torchao; validated on its rows with "
            "4 and 8 images"
        ),
    ),
    Correction(
        "convolution of a picture",
        (
            "no scratch with fewer than 8 input channels: kernels for first layers read the "
            "tensors in their own layout"
        ),
        (
            "the same report, reserved bytes of SDXL's encoder in fp16 at 512 x 512; validated on "
            "its other sizes and FLUX's encoder"
        ),
    ),
    Correction(
        "fused attention",
        (
            "the fp32 logsumexp [b h s] next to the output (on compute capability 9.0 none); no "
            "S x S tensor. The output has the order of the query in memory, with a mask or more "
            "than 256 features [b s h d]"
        ),
        "PyTorch's flash, memory-efficient and cuDNN attention; 70 calls on an H100",
    ),
    Correction(
        "attention with a mask",
        "a boolean mask in the query's dtype",
        "PyTorch's convert_boolean_attn_mask; 8 calls on an H100",
    ),
    Correction(
        "attention with more than 256 features in 16 bits",
        "the output in fp32",
        "PyTorch's memory-efficient attention; 16 calls on an H100",
    ),
    Correction(
        "RMS norm",
        (
            "one fp32 figure for each row next to the result, and a contiguous copy of an input "
            "that is not; no fp32 copies"
        ),
        (
            "PyTorch's _fused_rms_norm_cuda (layer_norm_kernel.cu), 608 of its kernels in a run of "
            "FLUX.1-dev on an H100"
        ),
    ),
    Correction(
        "math attention",
        (
            "scores and probabilities, 2 b h s_q s_k in the inputs' dtype, and scaled copies of "
            "query and key"
        ),
        "PyTorch's _scaled_dot_product_attention_math",
    ),
    Correction(
        "nf4 dequantization",
        "the largest quantized layer's weight in the compute dtype, during its matrix product",
        "bitsandbytes.autograd.MatMul4Bit dequantizes the whole weight for more than one token",
    ),
    Correction(
        "int8 forward",
        (
            "the input in int8 with one fp32 scale a row, the product in int32 before it is "
            "scaled, and in fp16 before it is cast"
        ),
        (
            "bitsandbytes.autograd.MatMul8bitLt: int8_vectorwise_quant, int8_linear_matmul, "
            "int8_mm_dequant of its CUDA backend"
        ),
    ),
    Correction(
        "cuBLAS workspace",
        (
            "8.125 MiB per handle and stream, 32 MiB on compute capability 9.0; it comes from the "
            "allocator, so it counts as allocated"
        ),
        "PyTorch's CUDABlas default workspace (:4096:2:16:8, :4096:8 on 9.0)",
    ),
    Correction(
        "convolution on a CPU",
        (
            "bytes(input) + bytes(weight), as copies with channels in blocks of 16; of the output, "
            "only the padding of channels, or bytes(output) where that is more: the blocked output "
            "next to the result. With channels last, bytes(weight)"
        ),
        (
            "the kernel's watermark (VmHWM), PyTorch 2.13 with oneDNN 3.12, AMD EPYC with AVX-512 "
            "and bfloat16; checked on VAEs, SDXL's UNet and Wan"
        ),
    ),
    Correction(
        "convolution with one tap in bfloat16 on a CPU without AMX",
        (
            "at most 4 bytes per output element too, for up to as many pictures as threads: "
            "oneDNN adds up input channels in parts where the cache is too small for them"
        ),
        "oneDNN's jit_avx512_core_bf16_1x1_conv_kernel (store_wsp, reduce_blocking); measured too",
    ),
    Correction(
        "convolution in bfloat16 on a CPU with AMX",
        "at least twice bytes(output), padded: two copies in other layouts next to the result",
        "the kernel's watermark, PyTorch 2.13, Xeon with amx_bf16: 17 shapes, within 1.3 MB",
    ),
    Correction(
        "first product or convolution of its sizes in bfloat16 on a CPU with AMX",
        "1 MiB more in the phase's first call: what oneDNN generates parts the C library's heap",
        "0.7 to 1.6 MB measured per kernel: SDXL's UNet and decoder, PyTorch 2.13, Xeon",
    ),
    Correction(
        "small convolution on a CPU",
        (
            "the picture with one column per output pixel, in fp32 up to 20480 inputs (of videos: "
            "without the width), in fp16 always"
        ),
        "PyTorch's use_mkldnn and slow_conv2d; measured in fp32",
    ),
    Correction(
        "attention on a CPU",
        (
            "the fp32 logsumexp, and per thread the scores of up to 256 queries and 512 keys in "
            "fp32 and 16 bits; with AMX also at most bytes(key) + bytes(value), packed for it"
        ),
        (
            "PyTorch's FlashAttentionKernel.cpp; measured, 0.5 to 2.5 MB on two threads; 11.6 MB "
            "on a Xeon with AMX, 11.7 by the rule"
        ),
    ),
    Correction(
        "matrix product, normalization, softmax, upsampling on a CPU",
        "nothing: oneDNN and MKL read weights in their own layout",
        "measured with PyTorch 2.13: at most 0.13 MB; products with AMX 2.4 MB per thread",
    ),
    Correction(
        "RMS norm on a CPU",
        (
            "of a 16-bit input its fp32 copy and the scaled input, and the product with a weight "
            "before it is cast; of an fp32 input with a weight, the scaled input"
        ),
        "PyTorch's rms_norm_composite (layer_norm.cpp)",
    ),
    Correction(
        "int8 forward on a CPU",
        (
            "per input element 11 bytes before the product: the input in fp16, its outliers, and "
            "two fp32 tensors; then the input in int8 and 16 bytes per output element: the product "
            "in int32 and in fp32, the scales of rows and columns, and their product"
        ),
        (
            "bitsandbytes 0.50, backends/default/ops.py (int8_vectorwise_quant, int8_mm_dequant); "
            "the kernel's watermark with AVX-512, whose product of int8 needs no fp32 copies"
        ),
    ),
    Correction(
        "nf4 dequantization on a CPU",
        "the weight in the compute dtype, for one token too",
        "bitsandbytes 0.50, _gemm_4bit_default_impl; the kernel's watermark",
    ),
    Correction(
        "context",
        "0.62 GiB outside of the allocator, as nvidia-smi shows",
        "measured 287 MB (lazy) to 667 MB (eager)",
    ),
)


@dataclass(frozen=True, slots=True)
class Convolution:
    """One convolution: bytes of its tensors and of one element, its channels, taps and stride.

    ``taps``: weights per filter and channel. ``strided``: stride above 1. ``pixels``: of one
    channel of the result. ``channels_last``: order of the input's strides. ``sparse``: the input's
    elements are not adjacent in memory. ``chooses``: cuDNN may choose a kernel with scratch of its
    own.
    """

    input_bytes: int
    output_bytes: int
    weight_bytes: int
    element_bytes: int
    inputs: int
    outputs: int
    taps: int = 9
    strided: bool = False
    groups: int = 1
    pixels: int = 0
    channels_last: bool = False
    sparse: bool = False
    transposed: bool = False
    chooses: bool = False


def convolution_scratch(convolution: Convolution) -> int:
    """Return the scratch of a convolution on cards other than of compute capability 9.0."""
    if convolution.inputs < FEW_CHANNELS:
        return 0
    if convolution.element_bytes > 2:
        if convolution.strided:
            return 0
        if convolution.taps > 1 and min(convolution.inputs, convolution.outputs) >= MANY_CHANNELS:
            whole = (
                convolution.input_bytes + convolution.output_bytes + convolution.weight_bytes + MIB
            )
            return whole + _part(convolution.input_bytes) + _part(convolution.output_bytes)
        return convolution.input_bytes + convolution.weight_bytes
    return convolution.input_bytes + convolution.output_bytes + convolution.weight_bytes


def hopper_convolution_scratch(convolution: Convolution) -> int:
    """Return the scratch of a convolution on compute capability 9.0."""
    copied_bytes = convolution.input_bytes if convolution.sparse else 0
    if 1 < convolution.groups == convolution.inputs:
        return copied_bytes
    if convolution.taps == 1 and not convolution.strided:
        if convolution.groups > 1:
            return copied_bytes + convolution.input_bytes
        is_aligned = convolution.pixels * convolution.element_bytes % ALIGNED_BYTES == 0
        if is_aligned or convolution.channels_last:
            return copied_bytes
        return copied_bytes + convolution.input_bytes + convolution.output_bytes
    if convolution.channels_last and not convolution.transposed:
        return copied_bytes + convolution.weight_bytes
    is_large = max(convolution.input_bytes, convolution.output_bytes) >= LARGE_BYTES
    if is_large and convolution.element_bytes <= 2:
        return copied_bytes + convolution.input_bytes + convolution.weight_bytes
    channels = round_up(convolution.outputs, ALIGNED_BYTES // convolution.element_bytes)
    results_bytes = convolution.output_bytes + convolution.weight_bytes
    padding_bytes = results_bytes * (channels - convolution.outputs) // convolution.outputs
    whole_bytes = convolution.input_bytes + results_bytes + padding_bytes
    return copied_bytes + whole_bytes + (CHOSEN_BYTES if convolution.chooses else 0)


def _part(nbytes: int) -> int:
    """Return the bytes of a tensor that are processed at a time.

    All up to 1 GiB; otherwise as many quarters as fit into 1 GiB, at least 1 GiB.
    """
    if nbytes <= PART_BYTES:
        return nbytes
    return PART_BYTES * 4 // nbytes * nbytes // 4 or PART_BYTES


def attention_scratch(
    rows: int, keys: int, width: int, element_bytes: int, *, fused: bool, wide: bool = False
) -> int:
    """Return the scratch of one attention.

    ``rows``: query rows, b h s_q, of ``width`` elements. ``keys``: keys per row, s_k. ``wide``:
    more features than FlashAttention and cuDNN take.
    """
    if fused:
        return 4 * rows + (4 * rows * width if wide and element_bytes < 4 else 0)
    return element_bytes * (2 * rows * keys + 2 * rows * width)


def flex_scratch(kernel: Kernel) -> int:
    """Return the scratch of flex attention that is not compiled.

    Per score it has three numbers in fp32 at once: before and after the mask, and their softmax.
    The same operators took 12.1 bytes per score on the simulated accelerator.
    """
    return 12 * kernel.scores


def int8_scratch(rows: int, inputs: int, outputs: int, half: bool = False) -> tuple[int, int]:
    """Return scratch of one int8 layer: (bytes before its result, bytes next to the result).

    ``rows``: tokens of ``inputs`` features. ``half``: the layer computes in fp16. Before: the input
    in fp16 (unless it is already), its absolute values, which determine the outliers, and the input
    in int8. Next to: the input in int8, the product in int32 and, unless that is the result, in
    fp16.
    """
    int8_bytes = rows * (inputs + 4)
    first_bytes = int8_bytes + rows * inputs * (3 if half else 5)
    return first_bytes, int8_bytes + rows * outputs * (4 if half else 6)


def cpu_int8_scratch(
    rows: int, inputs: int, outputs: int, element_bytes: int, half: bool = False
) -> tuple[int, int]:
    """Return scratch of one int8 layer on a CPU, as `int8_scratch` does for a card.

    ``element_bytes``: of the result, which is cast last and is part of the 16 bytes per element.
    """
    first_bytes = rows * inputs * (9 if half else 11)
    return first_bytes, rows * (inputs + 4) + rows * outputs * (16 - element_bytes)


# oneDNN stores the channels of convolutions in blocks of this many
CHANNEL_BLOCK = 16
# PyTorch computes a convolution in fp32 of one picture with at most this many inputs by itself
SMALL_CONVOLUTION = 20480
# attention on a CPU: most keys that a thread processes at a time
KEYS_AT_ONCE = 512
# of a kernel with AMX, in its first call
GENERATED_BYTES = MIB


def scratch_on(hardware: Hardware, call: Call, event: MemoryEvent) -> int:
    """Return the bytes that a kernel's scratch ``event`` of ``call`` takes on ``hardware``."""
    if isinstance(hardware.kernels, ProcessorRates):
        kernel = call.kernels[event.key]
        return event.nbytes if kernel.operator == FLEX else cpu_scratch(kernel, hardware.kernels)
    if not hardware.convolution_scratch:
        return 0
    return event.hopper_bytes if hardware.is_hopper else event.nbytes


def cpu_scratch(kernel: Kernel, processor: ProcessorRates) -> int:
    """Return the bytes that ``kernel`` takes on a CPU besides its tensors."""
    element_bytes = 4 if kernel.dtype in ("float32", "float64") else 2
    if kernel.kind == "convolution":
        shape = ConvolutionShape(*kernel.shape)
        if kernel.dtype == "float16" or (kernel.dtype == "bfloat16" and processor.unfolds_bfloat16):
            return _unfolded_bytes(shape, element_bytes)
        return cpu_convolution_scratch(shape, element_bytes, processor)
    if kernel.kind in ("attention", "wide attention"):
        groups, queries, keys, features = kernel.shape
        if not features:
            width = kernel.flops / (4 * kernel.scores or 1)
            return attention_scratch(groups * queries, keys, int(width), element_bytes, fused=False)
        return cpu_attention_scratch(
            groups * queries, queries, keys, features, element_bytes, processor
        )
    if kernel.operator == RMS_NORM:
        return cpu_rms_norm_scratch(*kernel.shape)
    return 0


def generated_by(kernel: Kernel, processor: ProcessorRates) -> int:
    """Return the bytes that the first call of ``kernel`` takes besides its scratch."""
    generates = kernel.kind in ("matmul", "convolution") and kernel.dtype == "bfloat16"
    return GENERATED_BYTES if generates and processor.amx else 0


def cpu_rms_norm_scratch(rows: int, elements: int, element_bytes: int, has_weight: int) -> int:
    """Return the scratch of an RMS norm on a CPU, next to the result and one figure per row.

    PyTorch's ``rms_norm_composite`` has an fp32 copy of an input of 16 bits, the scaled input, and
    with a weight also its fp32 copy and the product before it is cast; without one, a second figure
    per row.
    """
    if element_bytes >= 4:
        return element_bytes * elements if has_weight else 4 * rows
    if has_weight:
        return (12 - element_bytes) * elements + 4 * elements // (rows or 1)
    return (8 - element_bytes) * elements + 4 * rows


def cpu_convolution_scratch(
    shape: ConvolutionShape, element_bytes: int, processor: ProcessorRates
) -> int:
    """Return the scratch of a convolution that oneDNN computes on a CPU."""
    # PyTorch's condition multiplies the first four sizes, so without the last of three dimensions
    pixels = shape.input_pixels if shape.dimensions < 3 else shape.input_rows
    is_single = shape.batch == shape.groups == 1
    if element_bytes == 4 and is_single and shape.inputs * pixels <= SMALL_CONVOLUTION:
        return _unfolded_bytes(shape, element_bytes)
    inputs, outputs = (
        channels if shape.groups > 1 else round_up(channels, CHANNEL_BLOCK)
        for channels in (shape.inputs, shape.outputs)
    )
    weight_bytes = element_bytes * inputs * outputs * shape.taps // shape.groups
    if shape.channels_last:
        return weight_bytes
    input_bytes = element_bytes * shape.batch * inputs * shape.input_pixels
    output_bytes = element_bytes * shape.batch * outputs * shape.output_pixels
    result_bytes = element_bytes * shape.batch * shape.outputs * shape.output_pixels
    computing_bytes = input_bytes + weight_bytes + output_bytes
    converting_bytes = output_bytes + result_bytes
    if element_bytes == 2 and processor.amx:
        converting_bytes += output_bytes
    elif element_bytes == 2 and shape.taps == 1:
        computing_bytes += 4 * min(shape.batch, processor.threads) * outputs * shape.output_pixels
    return max(computing_bytes, converting_bytes) - result_bytes


def _unfolded_bytes(shape: ConvolutionShape, element_bytes: int) -> int:
    """Return the bytes of the input with a column for each output pixel, for a product."""
    if shape.taps == 1:
        return 0
    columns = shape.batch * shape.output_pixels
    return element_bytes * shape.inputs // shape.groups * shape.taps * columns


def cpu_attention_scratch(
    rows: int, queries: int, keys: int, features: int, element_bytes: int, processor: ProcessorRates
) -> int:
    """Return the scratch of PyTorch's flash attention on a CPU.

    ``rows``: ``queries`` of all heads and pictures, of ``features`` elements.
    """
    queries_at_once = min(queries, 256 if queries >= 768 else 64 if queries >= 192 else 32)
    keys_at_once = min(keys, KEYS_AT_ONCE)
    scores = queries_at_once * keys_at_once
    thread_bytes = 4 * (scores + 2 * queries_at_once + queries_at_once * features)
    if element_bytes == 2:
        thread_bytes += 2 * scores
    packed_bytes = 0
    if element_bytes == 2 and processor.amx:
        packed_bytes = 2 * element_bytes * rows // queries * keys * features
    return 4 * rows + processor.threads * thread_bytes + packed_bytes
