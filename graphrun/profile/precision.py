"""What a precision means for a component: what can be done with it, and what its calls take.

    flags                        whether the component can move, be streamed, or be on disk, by
                                 backend and version, with the reason
    quantization_scratch_bytes   how much more a call takes with quantized layers
    quantizing_bytes             host bytes while layers are quantized

Plain values in and out; imports no quantization library.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from graphrun.graph.precisions import (
    ONLY_IN_FILES,
    PLANNED_ONLY,
    QUANTIZED,
    is_gguf,
    planned_only_reason,
)
from graphrun.profile.corrections import cpu_int8_scratch, int8_scratch
from graphrun.profile.recording import Call, Product
from graphrun.profile.svdquant import scratch_bytes as svdquant_scratch

# (package, first version) that a precision needs: to be available (NEEDS), and for its modules to
# move between devices (MOVES). Sources: bitsandbytes' release notes 0.43.2 (4-bit modules move
# between devices) and 0.48 (8-bit modules move), with accelerate 1.13 and transformers 4.58 for
# modules that these two dispatched; fp8 storage: PyTorch 2.1 has the dtype, diffusers 0.33 has
# `apply_layerwise_casting`; diffusers' GGUF quantizer requires gguf 0.10.
NEEDS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "fp8": (("torch", "2.1"), ("diffusers", "0.33")),
    "gguf": (("gguf", "0.10"), ("diffusers", "0.33")),
    "int8": (("bitsandbytes", "0.37"),),
    "nf4": (("bitsandbytes", "0.39"),),
}
MOVES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "int8": (("bitsandbytes", "0.48"), ("accelerate", "1.13"), ("transformers", "4.58")),
    "nf4": (("bitsandbytes", "0.43.2"),),
}

# Peak bytes per element on the CPU, result included, while bitsandbytes 0.50 quantizes a 16-bit
# weight, measured with PyTorch's profiler (nf4: fp32 copies of the weight and of its blocks, 32-bit
# indices).
QUANTIZING_BYTES: Mapping[str, float] = {"int8": 10 + 1 / 64, "nf4": 14 + 1 / 8, "fp8": 1}

# Streamed by blocks and never by layers. A 4-bit weight is a tensor with separate statistics, which
# code that moves single tensors leaves behind (accelerate's `cpu_offload`: "Cannot copy out of meta
# tensor"). Layers of SVDQuant share tensors with others of their block.
BLOCK_GRANULARITY_ONLY = frozenset({"nf4", *PLANNED_ONLY})

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# of a weight: (outputs, inputs)
MatrixShape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Flags:
    """What can be done with a component in a precision.

    ``available``: the required packages are installed. ``movable``: it can leave the device and
    come back. ``streamable``: block by block. ``disk_able``: its backing store can be on disk, to
    be read again for every copy. ``reason``: why something cannot be done, else empty.
    """

    available: bool = False
    movable: bool = False
    streamable: bool = False
    disk_able: bool = False
    reason: str = ""


def flags(precision: str, versions: Mapping[str, str | None]) -> Flags:
    """Return the flags of ``precision`` with these versions of packages; None: not installed.

    Components that are quantized while they are read cannot be on disk: they would be quantized
    again for every copy.
    """
    if precision in PLANNED_ONLY:
        return Flags(reason=planned_only_reason({"a component": precision}))
    needs = NEEDS.get("gguf" if is_gguf(precision) else precision, ())
    if unmet_needs := _missing(needs, versions):
        return Flags(reason=f"{precision} needs {unmet_needs}")
    if precision not in MOVES:
        return Flags(available=True, movable=True, streamable=True, disk_able=True)
    if unmet_needs := _missing(MOVES[precision], versions):
        return Flags(
            available=True,
            reason=(
                f"{precision} modules stay on the device where they are made; to move they need "
                f"{unmet_needs}"
            ),
        )
    suffix = ", and stream by whole blocks only" if precision in BLOCK_GRANULARITY_ONLY else ""
    reason = f"{precision} layers are not quantized again from disk{suffix}"
    return Flags(available=True, movable=True, streamable=True, reason=reason)


def _missing(needs: tuple[tuple[str, str], ...], versions: Mapping[str, str | None]) -> str:
    """Return, as text, the packages that are missing or too old, with their first version."""
    return ", ".join(
        f"{package} {first}"
        for package, first in needs
        if not new_enough(versions.get(package), first)
    )


def new_enough(installed: str | None, first: str) -> bool:
    """Return whether version ``installed`` is valid and at least ``first``."""
    try:
        return installed is not None and Version(installed) >= Version(first)
    except InvalidVersion:
        return False


def quantization_scratch_bytes(
    call: Call,
    shapes: Mapping[str, MatrixShape],
    precision: str,
    dtype: str = "bfloat16",
    widened: Mapping[str, tuple[int, int]] | None = None,
    *,
    on_cpu: bool = False,
) -> int:
    """Return by how much the scratch of quantized layers in ``precision`` raises ``call``'s peak.

    ``shapes``: [outputs inputs] of each quantized weight. ``dtype``: the compute dtype. ``on_cpu``:
    the layers compute on a CPU, with bitsandbytes' kernels for it. The scratch of a quantized layer
    is allocated at its matrix product:

        nf4     | weight in 16 bit ............. |
                         | product
        int8    | input in fp16, ... | input in int8, int32, fp16 |
                                     | product
        int8wo  | weight in 16 bit   | product, not scaled
                                     | product
        fp8wo   | weight in 32 bit, scaled weight in 32 bit | weight in 16 bit
                                                            | product, then without bias
        svdq    | input in 4 bit, its scales and low-rank products |
                                     | product

    For one token on a card, nf4 needs no weight in 16 bit (`gemm_4bit` has its own kernel). fp8 and
    gguf always do, and gguf needs the scratch in ``widened`` before that. Sizes of products come
    from the trace.
    """
    if is_gguf(precision) or precision in PLANNED_ONLY:
        shapes = {name: shape for name, shape in shapes.items() if name in (widened or {})}
    by_event = {product.event: product for product in call.products if product.name in shapes}
    if precision not in QUANTIZED or not by_event:
        return 0
    levels = call.levels()
    peaks = [max(levels)]
    for event, product in by_event.items():
        preparation_bytes, product_bytes = _scratch(
            product, shapes, precision, dtype, widened or {}, on_cpu
        )
        beside_bytes = max(levels[event], levels[event + 1])
        peaks += [levels[event] + preparation_bytes, beside_bytes + product_bytes]
    return max(peaks) - peaks[0]


def _scratch(
    product: Product,
    shapes: Mapping[str, MatrixShape],
    precision: str,
    dtype: str,
    widened: Mapping[str, tuple[int, int]],
    on_cpu: bool,
) -> tuple[int, int]:
    """Return (bytes freed before the result of ``product``, bytes next to the result)."""
    (outputs, inputs), half = shapes[product.name], dtype == "float16"
    if precision == "int8" and on_cpu:
        return cpu_int8_scratch(product.rows, inputs, outputs, ELEMENT_BYTES[dtype], half)
    if precision == "int8":
        return int8_scratch(product.rows, inputs, outputs, half)
    if precision in PLANNED_ONLY:
        return 0, svdquant_scratch(product.rows, inputs, precision)
    preparation_bytes = widened[product.name][0] if is_gguf(precision) else 0
    if precision in ONLY_IN_FILES:
        element_bytes = ELEMENT_BYTES[dtype]
        if precision == "fp8wo":
            preparation_bytes = 8 * outputs * inputs
        return preparation_bytes, element_bytes * outputs * max(inputs, product.rows)
    needs_weight = product.rows > 1 or precision != "nf4" or on_cpu
    return preparation_bytes, outputs * inputs * ELEMENT_BYTES[dtype] if needs_weight else 0


def dequantization_seconds(nbytes: int, bytes_per_second: float) -> float:
    """Return the seconds to dequantize weights to ``nbytes``: written once, read once."""
    return 2 * nbytes / bytes_per_second


def quantizing_bytes(shapes: Collection[MatrixShape], precision: str, source_bytes: int = 2) -> int:
    """Return the peak of host bytes while layers are quantized one after another on the CPU.

    The maximum over the layers of: the weight as read (``source_bytes`` per element), the copies
    that bitsandbytes makes, and the result.
    """
    return int(
        max(
            (
                outputs * inputs * (source_bytes + QUANTIZING_BYTES[precision])
                for outputs, inputs in shapes
            ),
            default=0,
        )
    )
