"""What it means to hold a component in a precision: what may be done with it, and what its calls take beyond their own.

    flags       may it move, be streamed, lie on disk: by backend and version, with the reason
    requantized a traced call with the allocations of quantized layers put where they happen
    dequantized bytes that a call writes to have its weights in 16 bit: seconds, once the device's bandwidth is known
    quantizing  host bytes while layers are quantized

Pure: plain values in and out, no library of quantization imported. Weights' bytes: `estimator.quantized`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from packaging.version import InvalidVersion, Version

from graphrun.modules.precisions import QUANTIZED
from graphrun.profile.corrections import int8_scratch, nf4_scratch
from graphrun.profile.recording import Call, Product

# (package, first version): what a precision needs to be had at all, and for its modules to move. Sources: bitsandbytes' release
# notes 0.43.2 (4-bit modules move between devices) and 0.48 (8-bit ones do), with accelerate 1.13 and transformers 4.58 for modules
# that these dispatched; fp8 storage: PyTorch 2.1 has the dtype, diffusers 0.33 `apply_layerwise_casting`; diffusers' GGUF quantizer
# asks for gguf 0.10.
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

# Bytes an element, its result included, that bitsandbytes 0.50 has on the CPU at most while it quantizes a weight in 16 bit: the
# most that PyTorch's profiler saw (nf4: fp32 copies of the weight and of its shares, 32-bit indices).
WORKING: Mapping[str, float] = {"int8": 10 + 1 / 64, "nf4": 14 + 1 / 8, "fp8": 1}

# Precisions that are streamed by blocks and never by layers. A 4-bit layer is no tensor but a tensor and the statistics beside it,
# which what moves layers by themselves leaves behind (accelerate's `cpu_offload`: "Cannot copy out of meta tensor").
BY_BLOCKS_ALONE = frozenset({"nf4"})

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# A weight: (outputs, inputs).
Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Flags:
    """What may be done with a component in a precision, and why not otherwise (empty: nothing stands in the way).

    ``movable``: it leaves the device and comes back. ``streamable``: block by block. ``leaf_streamable``: layer by layer.
    ``disk_able``: its backing store may be on disk, to be read again each time.
    """

    available: bool
    movable: bool
    streamable: bool
    leaf_streamable: bool
    disk_able: bool
    reason: str = ""


def flags(precision: str, versions: Mapping[str, str | None]) -> Flags:
    """The flags of ``precision`` with these versions of packages (None or absent: not installed).

    What was quantized when it was read would be quantized anew each time that it came from disk.
    """
    if lacking := _lacking(NEEDS.get(precision, ()), versions):
        return Flags(False, False, False, False, False, f"{precision} needs {lacking}")
    if precision not in MOVES:
        return Flags(True, True, True, True, True)
    if lacking := _lacking(MOVES[precision], versions):
        return Flags(
            True,
            False,
            False,
            False,
            False,
            f"{precision} modules stay on the device where they are made; to move they need {lacking}",
        )
    by_layer = precision not in BY_BLOCKS_ALONE
    reason = f"{precision} layers are not quantized again from disk" + ("" if by_layer else ", and move with their block alone")
    return Flags(True, True, True, by_layer, False, reason)


def _lacking(needs: tuple[tuple[str, str], ...], versions: Mapping[str, str | None]) -> str:
    """What of ``needs`` is not there, as text."""
    return ", ".join(f"{package} {first}" for package, first in needs if not _new_enough(versions.get(package), first))


def _new_enough(number: str | None, first: str) -> bool:
    try:
        return number is not None and Version(number) >= Version(first)
    except InvalidVersion:
        return False


def requantized(
    call: Call,
    shapes: Mapping[str, Shape],
    precision: str,
    dtype: str = "bfloat16",
    widened: Mapping[str, tuple[int, int]] | None = None,
) -> Call:
    """``call`` as it is with the weights that ``shapes`` names ([outputs inputs] each) in ``precision``, computing in ``dtype``.

    What a quantized layer takes is allocated where its product is made:

        nf4     | weight in 16 bit ............. |          int8   | input in fp16, ... | input in int8, int32, fp16 |
                         | product                                                      | product

    One token alone needs no weight in 16 bit (`gemm_4bit`'s own kernel); fp8 and gguf always do, and gguf takes what ``widened``
    says before that. Sizes of products come from the trace; the peak is counted anew.
    """
    if precision == "gguf":
        shapes = {name: shape for name, shape in shapes.items() if name in (widened or {})}
    made = {product.event: product for product in call.products if product.name in shapes}
    if precision not in QUANTIZED or not made:
        return call
    events: list[tuple[int, int]] = []
    key = max((key for key, _ in call.events), default=0)
    moved: dict[int, int] = {}  # number of an event in the new list
    for number, event in enumerate(call.events):
        if number not in made:
            moved[number] = len(events)
            events.append(event)
            continue
        before, beside = _scratch(made[number], shapes, precision, dtype, widened or {})
        if before:
            events += [(key + 1, before), (key + 1, 0)]
        if beside:
            events.append((key + 2, beside))
        moved[number] = len(events)
        events.append(event)
        if beside:
            events.append((key + 2, 0))
        key += 2
    products = tuple(replace(product, event=moved[product.event]) for product in call.products)
    return replace(call, events=tuple(events), peak_bytes=peak_of(events), products=products, spans=())


def _scratch(
    product: Product, shapes: Mapping[str, Shape], precision: str, dtype: str, widened: Mapping[str, tuple[int, int]]
) -> tuple[int, int]:
    """(bytes before the result of ``product`` is made, bytes beside it)."""
    outputs, inputs = shapes[product.name]
    if precision == "gguf":
        return widened[product.name][0], outputs * inputs * ELEMENT_BYTES[dtype]
    if precision == "fp8":  # the cast weight, whatever the rows
        return 0, nf4_scratch(outputs * inputs, ELEMENT_BYTES[dtype])
    if precision == "int8":
        return int8_scratch(product.rows, inputs, outputs, half=dtype == "float16")
    return 0, nf4_scratch(outputs * inputs, ELEMENT_BYTES[dtype]) if product.rows > 1 else 0


def peak_of(events: Collection[tuple[int, int]]) -> int:
    """The most that lives at once while ``events`` happen, scratch (negative) apart."""
    now = peak = 0
    live: dict[int, int] = {}
    for key, nbytes in events:
        if nbytes >= 0:
            now += nbytes or -live[key]
            live[key] = nbytes
            peak = max(peak, now)
    return peak


def dequantized_bytes(call: Call, shapes: Mapping[str, Shape], precision: str, dtype: str = "bfloat16") -> int:
    """Bytes that one such call writes to have weights in ``dtype`` again: fp8 all of them, nf4 those of products with more than one
    token, int8 none, since it multiplies as it is.

    Seconds: these, and as many again read by the product, by the bandwidth of the device's own memory.
    """
    if precision == "fp8":
        return sum(outputs * inputs * ELEMENT_BYTES[dtype] for outputs, inputs in shapes.values())
    if precision != "nf4":
        return 0
    products = (product for product in call.products if product.name in shapes and product.rows > 1)
    return sum(shapes[product.name][0] * shapes[product.name][1] * ELEMENT_BYTES[dtype] for product in products)


def dequantization_seconds(nbytes: int, bytes_per_second: float) -> float:
    """What `dequantized_bytes` cost where the device's memory takes ``bytes_per_second``: written, and read by the product."""
    return 2 * nbytes / bytes_per_second


def quantizing_bytes(shapes: Collection[Shape], precision: str, source_bytes: int = 2) -> int:
    """Host bytes that live at most while layers are quantized one after another on the CPU: a layer's weight as it was read
    (``source_bytes`` an element), the copies that bitsandbytes works on, and the layer's result."""
    return int(max((outputs * inputs * (source_bytes + WORKING[precision]) for outputs, inputs in shapes), default=0))
