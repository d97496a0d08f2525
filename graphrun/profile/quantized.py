"""Bytes of a component's weights in each precision, layer by layer, without quantizing anything.

The formulas are those of bitsandbytes 0.50, checked byte for byte against its layers quantized on a
CPU:

    int8   one byte per element; one fp32 scale per output feature (also int8wo, fp8wo)
    nf4    half a byte per element; one fp32 maximum per 64 elements; the 16 values of the code
    fp8    one byte per element, no statistics

For quantized files that are here (GGUF, fp8 with scales) there is no formula: layers are created
on meta, and their bytes are summed. A published GGUF file that is not here has the rows of its mix.
The formulas of SVDQuant are in `graphrun.profile.svdquant`. Only linear layers are quantized
(`graphrun.modules.quantize`), without their biases.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from graphrun.graph.graph import Graph
from graphrun.graph.parts import Component
from graphrun.graph.precisions import (
    GGUF_BLOCKS,
    GGUF_MIXES,
    ONLY_IN_FILES,
    PLANNED_ONLY,
    QUANTIZED,
    is_gguf,
)
from graphrun.model.allocator import ROUND_BYTES
from graphrun.model.problem import BlockGroup
from graphrun.modules.blocks import ALIGNMENT, BlockLayout, lay_out
from graphrun.modules.build import held_meta_module, meta_module
from graphrun.modules.contents import as_stored
from graphrun.modules.quantize import gguf_linear, quantizable_layers
from graphrun.modules.stored import local_weights
from graphrun.modules.trees import weights_below
from graphrun.profile import svdquant
from graphrun.profile.recorder import Recorder
from graphrun.profile.recording import ComponentProfile
from graphrun.profile.tables import files_have_rows
from graphrun.sim.dry import without_planned_device
from graphrun.units import round_up

PRECISIONS = ("float32", "bfloat16", "float16", "fp8", "int8", "nf4", *ONLY_IN_FILES)
BLOCK = 64  # elements per maximum
CODE_BYTES = 16 * 4


def layer_tensors(outputs: int, inputs: int, precision: str) -> tuple[int, ...]:
    """Return the bytes of each tensor of a weight [outputs inputs] in a quantized precision.

    Elements first, then statistics. Raises ValueError for a precision without a formula.
    """
    count = outputs * inputs
    match precision:
        case "fp8":
            return (count,)
        case "int8" | "int8wo" | "fp8wo":
            return count, 4 * outputs
        case "nf4":
            return -(-count // 2), 4 * -(-count // BLOCK), CODE_BYTES
    raise ValueError(f"{precision} is not a precision of quantized layers")


def weights_by_precision(
    module: nn.Module, dtype: str, *, allocated: bool = False
) -> dict[str, int]:
    """Return the bytes of ``module``'s distinct tensors in each of `PRECISIONS`.

    ``dtype``: in which the module was created. Tensors of another dtype are the same in every
    precision: T5's ``wo`` in fp32, integer buffers, position tables. ``allocated``: round each
    tensor up to the size of its allocation.
    """
    step = ROUND_BYTES if allocated else 1
    return {
        precision: sum(
            round_up(nbytes, step) for tensor_sizes in tensors.values() for nbytes in tensor_sizes
        )
        for precision, tensors in tensor_bytes(module, dtype).items()
    }


def tensor_bytes(module: nn.Module, dtype: str) -> dict[str, dict[int, tuple[int, ...]]]:
    """Return per precision the bytes of the tensors for each tensor (`id`) of ``module``."""
    module_dtype: torch.dtype = getattr(torch, dtype)
    layers = {
        id(layer.weight): layer for layer in quantizable_layers(module, module_dtype).values()
    }
    # (id, elements, whether the dtype is the module's, bytes of an element) of each tensor
    tensors = [
        (id(tensor), tensor.numel(), tensor.dtype == module_dtype, tensor.itemsize)
        for tensor in weights_below(module)
    ]
    bytes_by_precision: dict[str, dict[int, tuple[int, ...]]] = {}
    for precision in PRECISIONS:
        quantized = precision in QUANTIZED
        target_dtype: torch.dtype = module_dtype if quantized else getattr(torch, precision)
        target_itemsize = target_dtype.itemsize
        bytes_by_precision[precision] = {
            key: layer_tensors(layer.out_features, layer.in_features, precision)
            if quantized and (layer := layers.get(key)) is not None
            else (count * (target_itemsize if has_module_dtype else itemsize),)
            for key, count, has_module_dtype, itemsize in tensors
        }
    return bytes_by_precision


def svdquant_bytes(
    module: nn.Module, dtype: str, precision: str, plain: Collection[str] = ()
) -> dict[int, tuple[int, ...]]:
    """Return `tensor_bytes` of ``module`` in an SVDQuant ``precision``.

    ``plain``: modules that stay in 16 bits.
    """
    layers = {
        id(layer.weight): svdquant.layer_tensors(
            layer.out_features, layer.in_features, precision, kind
        )
        for path, layer in quantizable_layers(module, getattr(torch, dtype)).items()
        if (kind := svdquant.layer_kind(path, plain))
    }
    return {
        id(tensor): layers.get(id(tensor), (tensor.nbytes,)) for tensor in weights_below(module)
    }


def gguf_bytes(
    module: nn.Module, rows: Mapping[str, tuple[str, int]]
) -> dict[int, tuple[int, ...]]:
    """Return `tensor_bytes` of ``module`` in a GGUF file; ``rows``: as of `convert`."""
    weights = {name: module.get_parameter(name) for name in rows}
    sizes = {
        id(weight): (weight.shape[0] * row_bytes,)
        for weight, (_, row_bytes) in zip(weights.values(), rows.values(), strict=True)
    }
    return {id(tensor): sizes.get(id(tensor), (tensor.nbytes,)) for tensor in weights_below(module)}


def kept_elements(module: nn.Module) -> int:
    """Return the elements of the linear layers that a transformers model keeps in fp32.

    Of other models 0: diffusers' modules are in fp32 already.
    """
    if hasattr(module, "load_config"):
        return 0
    names = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    weights = {
        id(layer.weight): layer.weight
        for path, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
        and layer.weight.dtype != torch.float32
        and not names.isdisjoint(path.split("."))
    }
    return sum(weight.numel() for weight in weights.values())


def layerwise_bytes(module: nn.Module, dtype: str) -> int:
    """Return the allocated bytes of ``module`` with diffusers' layerwise casting to fp8.

    diffusers' own function casts a copy, so its classes decide what stays in ``dtype``: their
    `_skip_layerwise_casting_patterns`, norms, and layers of other kinds.
    """
    from diffusers.hooks import apply_layerwise_casting

    cast: Any = copy.deepcopy(module)
    dtypes = torch.float8_e4m3fn, getattr(torch, dtype)
    if hasattr(cast, "enable_layerwise_casting"):
        cast.enable_layerwise_casting(*dtypes)
    else:
        apply_layerwise_casting(cast, *dtypes)
    return sum(round_up(tensor.nbytes, ROUND_BYTES) for tensor in weights_below(cast))


def block_layouts(
    module: nn.Module, groups: Sequence[BlockGroup], *, by_layer: bool = False
) -> dict[str, BlockLayout]:
    """Return the layouts of all blocks by path; ``by_layer``: blocks are single layers."""
    paths = [path for group in groups for path in group.blocks]
    return lay_out(module, paths, split_layers=by_layer)


def without(tables: Collection[str], layouts: Mapping[str, BlockLayout]) -> dict[str, BlockLayout]:
    """Return ``layouts`` without the tensors called ``tables``."""
    return {path: layout.without(tables) for path, layout in layouts.items()}


def block_bytes_by_precision(
    groups: Sequence[BlockGroup],
    layouts: Mapping[str, BlockLayout],
    sizes: Mapping[str, Mapping[int, tuple[int, ...]]],
) -> dict[str, tuple[int, ...]]:
    """Return, in each of `PRECISIONS`, the bytes of each group's largest block.

    ``layouts``: the `block_layouts` of ``groups``. ``sizes``: the `tensor_bytes` of the module.
    Every tensor, including statistics, is at a multiple of `ALIGNMENT`, and the block is rounded up
    to the size of its allocation.
    """
    keys = {
        path: [id(entry.tensor) for entry in layouts[path].entries]
        for group in groups
        for path in group.blocks
    }
    block_bytes: dict[str, tuple[int, ...]] = {}
    for precision, tensor_sizes in sizes.items():
        aligned = {
            key: sum([round_up(nbytes, ALIGNMENT) for nbytes in parts])
            for key, parts in tensor_sizes.items()
        }
        block_bytes[precision] = tuple(
            round_up(
                max(sum([aligned[key] for key in keys[path]]) for path in group.blocks), ROUND_BYTES
            )
            for group in groups
        )
    return block_bytes


def laid_out_bytes(
    groups: Sequence[BlockGroup], layouts: Mapping[str, BlockLayout]
) -> tuple[int, ...]:
    """Return the bytes of each group's largest block in ``layouts``, its `block_layouts`."""
    return tuple(
        max(round_up(layouts[path].nbytes, ROUND_BYTES) for path in group.blocks)
        for group in groups
    )


def dequantization_bytes(
    kinds: Mapping[str, tuple[str, int, tuple[int, int]]], dtype: str
) -> dict[str, tuple[int, int]]:
    """Return, by name, the memory to dequantize GGUF weights: (peak before, bytes written).

    ``kinds``: (GGUF type, bytes of a row, (outputs, inputs)) of each weight. ``dtype``: of the
    dequantized weight, which is included in the bytes written. Traced on meta from diffusers' own
    functions, which make half a dozen tensors of the weight's size.
    """
    by_shape: dict[tuple[str, int, tuple[int, int]], tuple[int, int]] = {}
    compute_dtype: torch.dtype = getattr(torch, dtype)
    for kind, row_bytes, (outputs, inputs) in set(kinds.values()):
        layer = gguf_linear(
            nn.Linear(inputs, outputs, bias=False, device="meta"), compute_dtype, kind, row_bytes
        )
        recorder = Recorder(layer, ())
        with without_planned_device(), torch.no_grad(), recorder:
            layer(torch.empty(1, inputs, dtype=compute_dtype, device="meta"))
        recorder.close()
        written_bytes = sum(event.nbytes for event in recorder.record.events if not event.scratch)
        by_shape[kind, row_bytes, (outputs, inputs)] = recorder.record.peak_bytes, written_bytes
    return {name: by_shape[kind] for name, kind in kinds.items()}


def quantized_shapes(module: nn.Module, dtype: str) -> dict[str, tuple[int, int]]:
    """Return the weights that quantized precisions replace: name -> (outputs, inputs)."""
    layers = quantizable_layers(module, getattr(torch, dtype))
    return {
        f"{path}.weight": (layer.out_features, layer.in_features) for path, layer in layers.items()
    }


class _PrecisionWeights(NamedTuple):
    """A component's weights in a precision.

    ``module``: a meta module with them; None if formulas give their bytes. ``is_stored``: a file
    has them in this precision. ``rows``: type and bytes of a row of each GGUF weight; None for
    other files. ``stated_bytes``: of a published GGUF file that is not here; its ``rows`` give the
    bytes of each weight.
    """

    module: nn.Module | None = None
    is_stored: bool = False
    rows: Mapping[str, tuple[str, int]] | None = None
    stated_bytes: int | None = None


def in_every_precision(
    block_profile: ComponentProfile,
    layouts: Sequence[Mapping[str, BlockLayout]],
    graph: Graph,
    component: Component,
    module: nn.Module,
) -> ComponentProfile:
    """Return ``block_profile`` with block bytes in every precision of ``graph``.

    ``layouts``: the `block_layouts` of its groups and, if it can be split into layers, of those.
    Which tensors stay in fp32 depends on the dtype in which the module is created. Where the files
    are quantized, the bytes come from the files.
    """
    profiles = [block_profile, *filter(None, [block_profile.layer_split])]
    layers = quantized_shapes(module, component.dtype)
    weights_by_name = {
        precision: _weights_in(precision, component, graph, layers)
        for precision in dict.fromkeys(component.precision)
    }
    published_bytes = {
        precision: gguf_bytes(module, weights.rows)
        for precision, weights in weights_by_name.items()
        if weights.rows is not None and weights.stated_bytes is not None
    }
    sizes = (
        tensor_bytes(module, component.dtype)
        | _planned_only_bytes(component, module)
        | published_bytes
    )

    def block_bytes(tables: Sequence[str]) -> list[dict[str, tuple[int, ...]]]:
        """Return, for each of ``profiles``, the block bytes by precision, without ``tables``."""
        bytes_by_precision = [
            block_bytes_by_precision(profile.groups, without(tables, profile_layouts), sizes)
            for profile, profile_layouts in zip(profiles, layouts, strict=True)
        ]
        for precision, weights in weights_by_name.items():
            for profile, row in zip(profiles, bytes_by_precision, strict=True):
                if weights.module is not None:
                    by_layer = profile is not block_profile
                    weight_layouts = block_layouts(
                        weights.module, profile.groups, by_layer=by_layer
                    )
                    row[precision] = laid_out_bytes(profile.groups, without(tables, weight_layouts))
                if weights.stated_bytes is not None:
                    row[precision] = _at_least(row[precision], profile.groups, weights.stated_bytes)
        return bytes_by_precision

    tables, all_bytes = block_profile.tables, block_bytes(())
    with_rows = [
        precision
        for precision in dict.fromkeys((component.dtype, *component.precision))
        if tables
        and precision not in PLANNED_ONLY
        and files_have_rows(component, module, precision, tables)
    ]
    dequantized = {
        precision: dequantization_bytes(
            {name: (*row, layers[name]) for name, row in weights.rows.items()}, component.dtype
        )
        for precision, weights in weights_by_name.items()
        if weights.rows is not None
    }
    for precision in set(PLANNED_ONLY).intersection(component.precision):
        plain = _plain(component, precision)
        dequantized[precision] = {
            name: (0, 0)
            for name in layers
            if svdquant.layer_kind(name.removesuffix(".weight"), plain)
        }
    stored_precisions = tuple(
        name for name, weights in weights_by_name.items() if weights.is_stored
    )
    blocks, *split = (
        replace(
            profile,
            precisions=bytes_by_precision,
            layers=layers,
            widened=dequantized,
            as_stored=stored_precisions,
            without_tables={precision: bytes_without[precision] for precision in with_rows},
        )
        for profile, bytes_by_precision, bytes_without in zip(
            profiles, all_bytes, block_bytes(tables) if with_rows else all_bytes, strict=True
        )
    )
    return replace(blocks, layer_split=split[0] if split else None)


def _weights_in(
    precision: str,
    component: Component,
    graph: Graph,
    layers: Mapping[str, tuple[int, int]],
) -> _PrecisionWeights:
    """Return ``component``'s weights in ``precision``; ``layers``: its `quantized_shapes`."""
    if precision not in QUANTIZED:
        if precision == component.dtype:
            return _PrecisionWeights()
        return _PrecisionWeights(meta_module(replace(component, dtype=precision), graph.trust))
    checkpoint = component.checkpoint(precision)
    if precision in PLANNED_ONLY:
        return _PrecisionWeights(is_stored=True)
    if local_weights(component, precision) is not None:
        module, content = held_meta_module(component, graph.trust, precision)
        rows = {
            name: (content.kind(name), module.get_parameter(name).shape[1])
            for name in layers
            if is_gguf(precision) and content.kind(name)
        }
        is_stored = precision in as_stored(content, layers)
        return _PrecisionWeights(
            module if is_stored else None, is_stored, rows if is_gguf(precision) else None
        )
    if checkpoint is None or not is_gguf(precision):  # as quantized by a formula
        return _PrecisionWeights(is_stored=checkpoint is not None or precision in ONLY_IN_FILES)
    rows = expected_rows(component, precision, layers)
    return _PrecisionWeights(None, True, rows, checkpoint.nbytes)


def _planned_only_bytes(
    component: Component, module: nn.Module
) -> dict[str, dict[int, tuple[int, ...]]]:
    """Return `tensor_bytes` in the SVDQuant precisions of ``component``."""
    return {
        name: svdquant_bytes(module, component.dtype, name, _plain(component, name))
        for name in component.precision
        if name in PLANNED_ONLY
    }


def _plain(component: Component, precision: str) -> tuple[str, ...]:
    checkpoint = component.checkpoint(precision)
    return checkpoint.plain if checkpoint is not None else ()


def expected_rows(
    component: Component, precision: str, layers: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[str, int]]:
    """Return the expected contents of a published GGUF file: weight -> its type, bytes of a row.

    For a file that is not here: each of ``layers`` ((outputs, inputs) by name) has the type of most
    weights of its mix, except plain ones by the graph and those whose rows are not whole blocks.
    """
    checkpoint, kind = component.checkpoint(precision), GGUF_MIXES[precision]
    assert checkpoint is not None
    elements, nbytes = GGUF_BLOCKS[kind]
    return {
        name: (kind, inputs // elements * nbytes)
        for name, (_, inputs) in layers.items()
        if inputs % elements == 0
        and not any(f"{name}.".startswith(f"{path}.") for path in checkpoint.plain)
    }


def _at_least(
    block_bytes: tuple[int, ...], groups: Sequence[BlockGroup], total_bytes: int
) -> tuple[int, ...]:
    """Return ``block_bytes`` scaled up to at least ``total_bytes`` in all.

    A published file that is larger than expected has more of its weights in larger types.
    """
    expected_bytes = sum(
        len(group.blocks) * nbytes for group, nbytes in zip(groups, block_bytes, strict=True)
    )
    if total_bytes <= expected_bytes:
        return block_bytes
    return tuple(
        round_up(nbytes * total_bytes // expected_bytes, ROUND_BYTES) for nbytes in block_bytes
    )
