"""The ways a component may be held: precision x backing store x where it computes, each with its bytes and seconds.

Decides which of them there are, and what must be allowed for one. The first is what the graph says plainly: its first precision in
page-locked memory. Must not know budgets.

    precision   the graph's list; all but the first change the output and need to be allowed
    backing store        pinned, pageable (slower to copy from), disk where there is a file whose tensors can be read one by one
    cpu         computed where the weights lie: for what is small or hardly used; the output changes in its last bits
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from graphrun.graph.graph import Component
from graphrun.model.problem import ALLOCATION_BYTES, BackingStore, Granularity, Hardware, Variant
from graphrun.modules.precisions import QUANTIZED
from graphrun.profile.precision import (
    BY_BLOCKS_ALONE,
    ELEMENT_BYTES,
    dequantization_seconds,
    peak_of,
    quantizing_bytes,
    requantized,
)
from graphrun.profile.recording import Call, ComponentProfile
from graphrun.units import round_up

BACKING_STORES: tuple[BackingStore, ...] = ("pinned", "pageable", "disk")
ON_CPU = "cpu"

# int8 layers multiply in int8 and add what outliers contribute in 16 bits: 15 to 23 % slower than 16 bits throughout (Hugging Face,
# "A Gentle Introduction to 8-bit Matrix Multiplication", of Dettmers et al. 2022).
SLOWDOWNS = {"int8": 1.2}

# bitsandbytes 0.50 quantizes a weight on a CPU core at about this rate of 16-bit bytes (2.10 GHz Xeon core, idle).
# A cast to fp8 runs at the speed of memory.
QUANTIZED_PER_SECOND = {"int8": 0.2e9, "nf4": 0.07e9, "fp8": 5e9}


def variants_of(
    component: Component,
    profiles: ComponentProfile,
    calls: Sequence[Call],
    hardware: Hardware,
    *,
    backing_stores: Collection[str],
    allow: Collection[str],
    granularity: Granularity = "blocks",
) -> tuple[Variant, ...]:
    """Every variant of ``component``, the plain one first. ``calls``: its distinct ones; ``backing_stores``: those that make a difference
    here; ``allow`` decides only whether computing on the CPU is offered; ``granularity``: how the component is cut."""
    found = [
        variant
        for precision in component.precision
        for variant in _in_backing_stores(
            component, precision, profiles, calls, hardware, component.backing_store or backing_stores
        )
    ]
    if granularity == "layers":
        found = [replace(variant, streamable=variant.precision not in BY_BLOCKS_ALONE) for variant in found]
    if ON_CPU in allow and found[0].precision not in QUANTIZED:
        found.append(_on_cpu(found[0], hardware))
    return tuple(found)


def _in_backing_stores(
    component: Component,
    precision: str,
    profiles: ComponentProfile,
    calls: Sequence[Call],
    hardware: Hardware,
    backing_stores: Collection[str],
) -> Iterator[Variant]:
    dtype, quantized = component.dtype, precision in QUANTIZED
    block_bytes = profiles.block_bytes if precision == dtype else profiles.precisions[precision]
    whole = sum(len(k.blocks) * nbytes for k, nbytes in zip(profiles.groups, block_bytes, strict=True))
    stored = precision in profiles.as_stored
    widened = _widened_bytes(profiles, precision, ELEMENT_BYTES[dtype]) if quantized else ()
    in_files = block_bytes if stored else profiles.block_bytes
    read = _read_seconds(component, precision, in_files, hardware, stored)
    counted = hardware.device != "sim"  # whose clock charges floating point operations and copies, and no memory's bandwidth
    for backing_store in (backing_store for backing_store in BACKING_STORES if backing_store in backing_stores):
        if backing_store == "disk" and not (stored or (not quantized and component.source is not None)):
            continue  # nothing there can be read block by block
        rate = hardware.pageable_bytes_per_second if backing_store == "pageable" else hardware.h2d_bytes_per_second
        start = hardware.copy_start_seconds
        yield Variant(
            precision=precision,
            backing_store=backing_store,
            device="device",
            block_bytes=block_bytes,
            load_seconds=tuple(start + nbytes / rate if nbytes else 0.0 for nbytes in block_bytes),
            host_bytes=2 * max(block_bytes) if backing_store == "disk" else whole,
            read_seconds=() if backing_store == "disk" else read,
            disk_seconds=read if backing_store == "disk" else (),
            block_seconds=tuple(dequantization_seconds(nbytes, hardware.memory_bytes_per_second) for nbytes in widened if counted),
            slowdown=SLOWDOWNS.get(precision, 1.0) if counted else 1.0,
            scratch_bytes=_scratch_bytes(profiles, calls, precision, dtype),
            transient_bytes=quantizing_bytes(profiles.layers.values(), precision, ELEMENT_BYTES[dtype])
            if quantized and not stored
            else 0,
            read_bytes=() if component.source_in(precision) is None or in_files == block_bytes else in_files,
            needs="" if precision == component.precision[0] else precision,
        )


def _widened_bytes(profiles: ComponentProfile, precision: str, element_bytes: int) -> tuple[int, ...]:
    """Per class, what a block's weights take when they are cast to compute with them; int8 multiplies as it is."""
    found = [0] * len(profiles.groups)
    if precision == "int8":
        return tuple(found)
    cast = {name: element_bytes * outputs * inputs for name, (outputs, inputs) in profiles.layers.items()}
    if precision == "gguf":
        cast = {name: written for name, (_, written) in profiles.widened.items()}
    for number, k in enumerate(profiles.groups):
        for path in k.blocks:
            inside = (nbytes for name, nbytes in cast.items() if path and name.startswith(f"{path}."))
            found[number] = max(found[number], sum(inside))
    rest = sum(cast.values())
    rest -= sum(len(k.blocks) * nbytes for k, nbytes in zip(profiles.groups, found, strict=True))
    return tuple(max(0, rest) if "" in k.blocks else nbytes for k, nbytes in zip(profiles.groups, found, strict=True))


def _scratch_bytes(profiles: ComponentProfile, calls: Sequence[Call], precision: str, dtype: str) -> int:
    """By how much the peak of a call rises with quantized layers, the most of all calls."""
    if precision not in QUANTIZED:
        return 0
    held = (requantized(call, profiles.layers, precision, dtype, profiles.widened) for call in calls)
    more = (anew.peak_bytes - peak_of(call.events) for anew, call in zip(held, calls, strict=True))
    return round_up(max((0, *more)), ALLOCATION_BYTES)


def _read_seconds(
    component: Component, precision: str, in_files: tuple[int, ...], hardware: Hardware, stored: bool
) -> tuple[float, ...]:
    """Per class, to read one block into its backing store: what the files hold is read, which for quantized weights is what was traced, and
    these are then quantized (on `sim` in no time: its clock is not the host's), unless files hold them so (``stored``). () without
    a source: weights are made before the run."""
    if component.source_in(precision) is None:
        return ()
    rate = hardware.disk_bytes_per_second
    if precision in QUANTIZED and not stored and hardware.device != "sim":
        rate = 1 / (1 / rate + 1 / QUANTIZED_PER_SECOND[precision])
    return tuple(nbytes / rate for nbytes in in_files)


def _on_cpu(variant: Variant, hardware: Hardware) -> Variant:
    """``variant`` computing where its weights lie, at the host's rate; nothing is copied, so its backing store is pageable."""
    return replace(
        variant,
        backing_store="pageable",
        device="cpu",
        load_seconds=tuple(0.0 for _ in variant.load_seconds),
        streamable=False,
        slowdown=hardware.flops_per_second / hardware.cpu_flops_per_second,
        needs=ON_CPU,
    )
