"""Bytes of a component's weights in each precision, layer by layer, without quantizing anything.

The formulas are those of bitsandbytes 0.50, checked byte for byte against its layers quantized on a
CPU:

    int8   one byte per element; one fp32 scale per output feature
    nf4    half a byte per element; one fp32 maximum per 64 elements; the 16 values of the code
    fp8    one byte per element, no statistics

For files that are already quantized (GGUF, fp8 with scales) there is no formula: the layers are
created on meta, and their bytes are summed. Only linear layers are quantized
(`graphrun.modules.quantize`), without their biases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from graphrun.graph.precisions import QUANTIZED
from graphrun.model.allocator import ROUND_BYTES
from graphrun.model.problem import BlockGroup
from graphrun.modules.blocks import ALIGNMENT, BlockLayout, lay_out
from graphrun.modules.quantize import gguf_linear, quantizable_layers
from graphrun.modules.trees import weights_below
from graphrun.profile.recorder import Recorder
from graphrun.sim.dry import without_planned_device
from graphrun.units import round_up

PRECISIONS = ("float32", "bfloat16", "float16", "fp8", "int8", "nf4")
BLOCK = 64  # elements per maximum
CODE_BYTES = 16 * 4


def layer_tensors(outputs: int, inputs: int, precision: str) -> tuple[int, ...]:
    """Return the bytes of each tensor of a weight [outputs inputs] in fp8, int8 or nf4.

    Elements first, then statistics. Raises ValueError for other precisions.
    """
    count = outputs * inputs
    match precision:
        case "fp8":
            return (count,)
        case "int8":
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


def block_layouts(
    module: nn.Module, groups: Sequence[BlockGroup], *, by_layer: bool = False
) -> dict[str, BlockLayout]:
    """Return the layouts of all blocks by path; ``by_layer``: blocks are single layers."""
    paths = [path for group in groups for path in group.blocks]
    return lay_out(module, paths, split_layers=by_layer)


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
    """Return the weights that int8, nf4 and fp8 quantize: name -> (outputs, inputs)."""
    layers = quantizable_layers(module, getattr(torch, dtype))
    return {
        f"{path}.weight": (layer.out_features, layer.in_features) for path, layer in layers.items()
    }
