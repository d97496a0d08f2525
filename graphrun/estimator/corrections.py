"""What a card takes beyond what the dispatcher sees: one small named rule for each, with its source. Pure arithmetic, no torch.

Bytes unless said otherwise. Rules that are properties of a component's tensors, not corrections, live where tensors are made:
T5's ``wo`` in fp32, persistent buffers and tied weights in `components.build` and `components.blocks`. An fp32 VAE is one
that the graph declares as float32.
"""

from __future__ import annotations

from dataclasses import dataclass

# Tensors from here on are beyond 32-bit offsets in bytes.
LARGE_BYTES = 1 << 31


@dataclass(frozen=True, slots=True)
class Correction:
    """A rule by name: what it adds, and where it is from."""

    name: str
    adds: str
    source: str


CORRECTIONS = (
    Correction(
        "convolution scratch, 16 bit",
        "bytes(input) + bytes(output) + bytes(weight) during the kernel: copies to channels-last and back",
        "ten VAE decodes on an RTX 4090, InvokeAI's VAE benchmark report: -20 % without, 0.2 % with",
    ),
    Correction(
        "convolution scratch, 32 bit",
        "bytes(input) + bytes(weight): the output is written in place",
        "the same report, SDXL decode in fp32 at 1024 x 1024; its other sizes and FLUX in fp32 judge it",
    ),
    Correction(
        "convolution scratch, compute capability 9.0",
        "bytes(input) + bytes(weight) where input or output has 2 GiB or more, in 16 bit too",
        "FLUX.1-dev on an H100 with 16 images, diffusers-torchao; its rows with 4 and 8 images judge it",
    ),
    Correction(
        "fused attention",
        "the fp32 logsumexp [b h s] beside the output; no S x S",
        "the outputs of PyTorch's flash, memory-efficient and cuDNN attention",
    ),
    Correction(
        "math attention",
        "scores and probabilities, 2 b h s_q s_k in the inputs' dtype, and scaled copies of query and key",
        "PyTorch's _scaled_dot_product_attention_math",
    ),
    Correction(
        "nf4 dequantization",
        "the largest quantized layer's weight in the compute dtype, during its matrix product",
        "bitsandbytes.autograd.MatMul4Bit dequantizes the whole weight for more than one token",
    ),
    Correction(
        "int8 forward",
        "the input in int8 with one fp32 scale a row, and the product in int32 before it is scaled",
        "bitsandbytes.autograd.MatMul8bitLt: int8_vectorwise_quant, int8_linear_matmul, int8_mm_dequant",
    ),
    Correction(
        "cuBLAS workspace",
        "8.125 MiB a handle and stream, 32 MiB on compute capability 9.0; taken through the allocator, so it counts as allocated",
        "PyTorch's CUDABlas default workspace (:4096:2:16:8, :4096:8 on 9.0)",
    ),
    Correction("context", "0.62 GiB, outside of the allocator; nvidia-smi shows it", "measured 287 MB (lazy) to 667 MB (eager)"),
)


def convolution_scratch(input_bytes: int, output_bytes: int, weight_bytes: int, element_bytes: int) -> tuple[int, int]:
    """(scratch of a convolution, the part of it that a card does without that makes no large copies of outputs)."""
    if element_bytes > 2:
        return input_bytes + weight_bytes, 0
    large = max(input_bytes, output_bytes) >= LARGE_BYTES
    return input_bytes + output_bytes + weight_bytes, output_bytes if large else 0


def attention_scratch(rows: int, keys: int, width: int, element_bytes: int, *, fused: bool) -> int:
    """Scratch of one attention with ``rows`` = b h s_q query rows of ``width`` and ``keys`` = s_k keys each."""
    if fused:
        return 4 * rows
    return element_bytes * (2 * rows * keys + 2 * rows * width)


def nf4_scratch(weights: int, compute_bytes: int) -> int:
    """Scratch of one nf4 layer of ``weights`` elements computing in a dtype of ``compute_bytes``."""
    return weights * compute_bytes


def int8_scratch(rows: int, inputs: int, outputs: int) -> int:
    """Scratch of one int8 layer for ``rows`` tokens of ``inputs`` features to ``outputs``."""
    return rows * (inputs + 4) + 4 * rows * outputs
