"""The variants of a component: precision x backing store x device, each with bytes and seconds.

Budgets do not matter here. The first variant is the graph's own: its first precision in page-locked
memory.

    precision          those in the graph's list; all but the first change the output and must be
                       allowed. SVDQuant only if it is allowed, on cards that multiply it: nothing
                       else suggests what graphrun does not run
    backing store      pinned, pageable (slower to copy from), disk if a file's tensors can be read
                       one by one; on unified memory only file: blocks are read from the component's
                       files, or from a file that the run writes
    secondary device   computes on a further device, at its rates
    cpu                computes on the CPU, for small or rarely used components; the last bits of
                       the output change
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

from graphrun.graph.parts import Component
from graphrun.graph.precisions import PLANNED_ONLY, QUANTIZED, is_gguf
from graphrun.model.hardware import Hardware, ProcessorRates
from graphrun.model.problem import (
    ALLOCATION_BYTES,
    BackingStoreKind,
    Granularity,
    Secondary,
    Variant,
)
from graphrun.profile.costs import extra_seconds, work_seconds
from graphrun.profile.four_bits import four_bit_format
from graphrun.profile.precision import (
    BLOCK_GRANULARITY_ONLY,
    ELEMENT_BYTES,
    dequantization_seconds,
    quantization_scratch_bytes,
    quantizing_bytes,
)
from graphrun.profile.quantizing import QUANTIZING_RATES
from graphrun.profile.recording import Call, ComponentProfile
from graphrun.units import PAGE_BYTES, round_up

BACKING_STORES: tuple[BackingStoreKind, ...] = ("pinned", "pageable", "disk")
ON_CPU = "cpu"
# A block that is read from files takes whole pages for up to two ranges of a file, each with a part
# of a page before and behind it (`graphrun.runtime.files`).
FILE_SLACK_BYTES = 4 * PAGE_BYTES
# The code that streams a block on a CPU (its place, its read, its tensors) takes as long as this
# many operators launch: 0.31 ms were measured between two layers of SDXL's UNet that follow each
# other, where an operator took 14 us.
STREAMING_LAUNCHES = 22


def variants_of(
    component: Component,
    profile: ComponentProfile,
    calls: Sequence[Call],
    hardware: Hardware,
    backing_stores: Collection[str],
    allow: Collection[str] = (),
    granularity: Granularity = "blocks",
    secondaries: Sequence[Secondary] = (),
    *,
    keeps_quantized: bool = False,
) -> tuple[Variant, ...]:
    """Return all variants of ``component``, the graph's own first.

    ``calls``: its distinct calls. ``backing_stores``: those to consider. ``allow``: only determines
    whether computing on the CPU and SVDQuant are offered. ``granularity``: of ``profile``.
    ``secondaries``: further devices that the component may compute on. ``keeps_quantized``: weights
    are quantized into a file before a run, which reads them from there; later runs find the file.
    """
    if hardware.unified:
        backing_stores = ("file",)
    elif component.backing_store:
        backing_stores = component.backing_store

    def variants_on(device: Hardware) -> list[Variant]:
        return [
            variant
            for precision in component.precision
            if precision not in PLANNED_ONLY
            or (precision in allow and four_bit_format(device) == precision)
            for variant in _in_backing_stores(
                component,
                precision,
                profile,
                calls,
                device,
                backing_stores,
                keeps_quantized=keeps_quantized,
            )
        ]

    variants = variants_on(hardware)
    if granularity == "layers":
        variants = [
            replace(variant, streamable=variant.precision not in BLOCK_GRANULARITY_ONLY)
            for variant in variants
        ]
    main_seconds = _seconds(calls, hardware) if secondaries else 0.0
    for number, secondary in enumerate(secondaries, 1):
        device = replace(secondary.hardware, disk_bytes_per_second=hardware.disk_bytes_per_second)
        slowdown = _seconds(calls, device) / main_seconds if main_seconds else 1.0
        variants += [
            replace(variant, device=f"device{number}", streamable=False, slowdown=slowdown)
            for variant in variants_on(device)
        ]
    if ON_CPU in allow and not hardware.unified and variants[0].precision not in QUANTIZED:
        variants.append(_on_cpu(variants[0], calls, hardware))
    return tuple(variants)


def _in_backing_stores(
    component: Component,
    precision: str,
    profile: ComponentProfile,
    calls: Sequence[Call],
    hardware: Hardware,
    backing_stores: Collection[str],
    *,
    keeps_quantized: bool,
) -> Iterator[Variant]:
    """Yield the variants in ``precision``: in a file, or in host memory and on disk."""
    dtype, is_quantized = component.dtype, precision in QUANTIZED
    block_bytes = profile.block_bytes if precision == dtype else profile.precisions[precision]
    source_block_bytes = profile.block_bytes
    weight_bytes = sum(
        len(group.blocks) * nbytes
        for group, nbytes in zip(profile.groups, block_bytes, strict=True)
    )
    leaves_tables = hardware.kind.is_host and precision in profile.without_tables
    if leaves_tables:
        block_bytes = profile.without_tables[precision]
        source_block_bytes = profile.without_tables.get(dtype, source_block_bytes)
    is_kept = (
        keeps_quantized
        and is_quantized
        and precision not in profile.as_stored
        and component.source is not None
    )
    is_stored = is_kept or precision in profile.as_stored
    # whether a file has tensors that can be read block by block
    is_readable = is_stored or (not is_quantized and component.source is not None)
    file_block_bytes = block_bytes if is_stored else source_block_bytes
    checkpoint = component.checkpoint(precision)
    if checkpoint is not None and checkpoint.nbytes and weight_bytes:
        # files may have tensors in another dtype than the device, such as T5's output projections
        file_block_bytes = tuple(
            nbytes * checkpoint.nbytes // weight_bytes for nbytes in block_bytes
        )
    has_other_bytes = component.source_in(precision) is not None and file_block_bytes != block_bytes
    variant = partial(
        Variant,
        precision=precision,
        device="device",
        block_seconds=_extra_block_seconds(profile, calls, precision, hardware),
        scratch_bytes=_scratch_bytes(profile, calls, precision, dtype, hardware),
        read_bytes=file_block_bytes if has_other_bytes else (),
        needs=component.permission(precision) or "",
    )
    if "file" in backing_stores:  # without a readable one, the weights are written to a file first
        read_bytes = file_block_bytes if is_readable else block_bytes
        yield variant(
            backing_store="file",
            block_bytes=tuple(
                round_up(nbytes, PAGE_BYTES) + FILE_SLACK_BYTES if nbytes else 0
                for nbytes in block_bytes
            ),
            load_seconds=tuple(
                hardware.copy_start_seconds + nbytes / hardware.disk_bytes_per_second
                if nbytes
                else 0.0
                for nbytes in read_bytes
            ),
            lost_seconds=_lost_seconds(read_bytes, hardware),
            tables=profile.tables if leaves_tables else (),
            host_bytes=0,
            stored_bytes=weight_bytes if is_kept or not is_readable else 0,
        )
    read_seconds = _read_seconds(component, precision, file_block_bytes, hardware, is_stored)
    for backing_store in BACKING_STORES:
        on_disk = backing_store == "disk"
        if backing_store not in backing_stores or (on_disk and not is_readable):
            continue
        bytes_per_second = (
            hardware.pageable_bytes_per_second
            if backing_store == "pageable"
            else hardware.h2d_bytes_per_second
        )
        yield variant(
            backing_store=backing_store,
            block_bytes=block_bytes,
            load_seconds=tuple(
                hardware.copy_start_seconds + nbytes / bytes_per_second if nbytes else 0.0
                for nbytes in block_bytes
            ),
            host_bytes=2 * max(block_bytes) if on_disk else weight_bytes,
            read_seconds=() if on_disk else read_seconds,
            disk_seconds=read_seconds if on_disk else (),
            transient_bytes=quantizing_bytes(
                profile.layers.values(), precision, ELEMENT_BYTES[dtype]
            )
            if is_quantized and not is_stored
            else 0,
            stored_bytes=weight_bytes if is_kept else 0,
        )


def _lost_seconds(read_bytes: Sequence[int], hardware: Hardware) -> tuple[float, ...]:
    """Return the seconds of compute that streaming one block takes: on a CPU, the cores that
    compute also read, and one of them runs the code around it."""
    rates = hardware.kernels
    if not isinstance(rates, ProcessorRates):
        return ()
    return tuple(
        nbytes * rates.read_cpu_seconds / rates.threads + streaming_code_seconds(hardware)
        if nbytes
        else 0.0
        for nbytes in read_bytes
    )


def streaming_code_seconds(hardware: Hardware) -> float:
    """Return the seconds that the code around one streamed block takes on a CPU."""
    return STREAMING_LAUNCHES * hardware.launch_seconds


def _extra_block_seconds(
    profile: ComponentProfile, calls: Sequence[Call], precision: str, hardware: Hardware
) -> tuple[float, ...]:
    """Return, for each group, the additional seconds of a block's products in ``precision``.

    From the call with the most FLOPs. () if ``precision`` is not quantized, and on `sim`, whose
    clock charges no memory bandwidth.
    """
    if precision not in QUANTIZED or hardware.kernels is None or not calls:
        return ()
    by_layer = extra_seconds(
        max(calls, key=lambda call: call.flops), profile.layers, precision, hardware
    )
    if precision in PLANNED_ONLY or (
        is_gguf(precision) and isinstance(hardware.kernels, ProcessorRates)
    ):
        quantized_names = profile.widened[precision]
        by_layer = {
            path: seconds
            for path, seconds in by_layer.items()
            if f"{path}.weight" in quantized_names
        }
    elif is_gguf(precision):
        bandwidth = hardware.memory_bytes_per_second
        by_layer = {
            name: dequantization_seconds(written_bytes, bandwidth)
            for name, (_, written_bytes) in profile.widened[precision].items()
        }
    groups = {path: number for number, group in enumerate(profile.groups) for path in group.blocks}
    group_seconds = [0.0] * len(profile.groups)
    for path, seconds in by_layer.items():
        while path and path not in groups:
            path = path.rpartition(".")[0]
        group_seconds[groups.get(path, 0)] += seconds
    return tuple(
        total / len(group.blocks)
        for total, group in zip(group_seconds, profile.groups, strict=True)
    )


def _scratch_bytes(
    profile: ComponentProfile,
    calls: Sequence[Call],
    precision: str,
    dtype: str,
    hardware: Hardware,
) -> int:
    """Return the largest increase of a call's peak with quantized layers, over all calls."""
    if precision not in QUANTIZED:
        return 0
    extra = (
        quantization_scratch_bytes(
            call,
            profile.layers,
            precision,
            dtype,
            profile.widened.get(precision, {}),
            on_cpu=hardware.kind.is_host,
        )
        for call in calls
    )
    return round_up(max((0, *extra)), ALLOCATION_BYTES)


def _read_seconds(
    component: Component,
    precision: str,
    file_block_bytes: tuple[int, ...],
    hardware: Hardware,
    is_stored: bool,
) -> tuple[float, ...]:
    """Return, for each group, the seconds to read one block into its backing store.

    () without a source: such weights are created before the run. Weights that the files do not have
    in that precision are then quantized, which takes no time on a virtual clock.
    """
    if component.source_in(precision) is None:
        return ()
    bytes_per_second = hardware.disk_bytes_per_second
    if precision in QUANTIZED and not is_stored and not hardware.kind.has_virtual_clock:
        bytes_per_second = 1 / (1 / bytes_per_second + 1 / QUANTIZING_RATES[precision])
    return tuple(nbytes / bytes_per_second for nbytes in file_block_bytes)


def _seconds(calls: Sequence[Call], hardware: Hardware) -> float:
    """Return the seconds of one call of each kind on ``hardware``, on `sim` without launches."""
    if hardware.kernels is None:
        return sum(call.flops for call in calls) / hardware.flops_per_second
    return sum(sum(work_seconds(call, hardware)) for call in calls)


def _on_cpu(variant: Variant, calls: Sequence[Call], hardware: Hardware) -> Variant:
    """Return ``variant`` computing on the CPU at the host's rate, from pageable memory."""
    flops, device_seconds = sum(call.flops for call in calls), _seconds(calls, hardware)
    cpu_seconds = flops / hardware.cpu_flops_per_second
    return replace(
        variant,
        backing_store="pageable",
        device="cpu",
        load_seconds=tuple(0.0 for _ in variant.load_seconds),
        streamable=False,
        slowdown=cpu_seconds / device_seconds if device_seconds else 1.0,
        needs=ON_CPU,
    )
