"""Bytes of a component's weights in each precision that a graph may allow, layer by layer, without quantizing anything.

The formulas are those of bitsandbytes 0.50, checked byte for byte against its layers quantized on a CPU:

    int8   one byte per element; one fp32 scale per output feature
    nf4    half a byte per element; one fp32 maximum per 64 elements; the 16 values of the code
    nf4 with doubly quantized statistics: the maxima in one byte, with one fp32 maximum per 256 of them; both codes; an offset

    fp8    one byte per element, no statistics

For files that are quantized already (GGUF, fp8 with scales) there is no formula: the layers are created on meta, and their
bytes are summed.

Which layers are quantized is decided by `graphrun.modules.quantize`: linear layers only. Biases stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from graphrun.model.allocator import ROUND_BYTES
from graphrun.model.problem import BlockGroup
from graphrun.modules.blocks import ALIGNMENT, BlockLayout, lay_out
from graphrun.modules.precisions import QUANTIZED
from graphrun.modules.quantize import gguf_linear, quantizable_layers
from graphrun.profile.recorder import Recorder
from graphrun.units import round_up

PRECISIONS = ("float32", "bfloat16", "float16", "fp8", "int8", "nf4")
BLOCK, NESTED_BLOCK = 64, 256  # elements to a maximum, maxima to a maximum of maxima
CODE_BYTES, NESTED_CODE_BYTES, OFFSET_BYTES = 16 * 4, 256 * 4, 4


def layer_bytes(outputs: int, inputs: int, precision: str, *, nested: bool = False) -> int:
    """Bytes of one linear layer's weight [outputs inputs] in fp8, int8 or nf4, with statistics, without bias. ValueError for
    others."""
    return sum(layer_tensors(outputs, inputs, precision, nested=nested))


def layer_tensors(outputs: int, inputs: int, precision: str, *, nested: bool = False) -> tuple[int, ...]:
    """Bytes of each tensor that holds the weight [outputs inputs] in fp8, int8 or nf4. ValueError for other precisions."""
    count = outputs * inputs
    if precision == "fp8":
        return (count,)
    if precision == "int8":
        return count, 4 * outputs
    if precision != "nf4":
        raise ValueError(f"{precision} is not a precision of quantized layers")
    blocks = -(-count // BLOCK)
    packed = -(-count // 2)
    if not nested:
        return packed, 4 * blocks, CODE_BYTES
    return packed, blocks, CODE_BYTES, 4 * -(-blocks // NESTED_BLOCK), NESTED_CODE_BYTES, OFFSET_BYTES


def weights_by_precision(module: nn.Module, dtype: str, *, allocated: bool = False) -> dict[str, int]:
    """Bytes of ``module``'s distinct tensors in each of `PRECISIONS`; ``dtype`` is the one the module was created in.

    Tensors of another dtype stay as they are in every precision: T5's ``wo`` in fp32, integer buffers, position tables.
    ``allocated``: round each tensor up to the size of its allocation.
    """
    step = 512 if allocated else 1
    return {
        precision: sum(round_up(nbytes, step) for held in tensors.values() for nbytes in held)
        for precision, tensors in _tensor_bytes_in_each(module, dtype).items()
    }


def tensor_bytes_in(module: nn.Module, dtype: str, precision: str, *, nested: bool = False) -> dict[int, tuple[int, ...]]:
    """For each distinct tensor of ``module``, by its `id`, the bytes of each tensor that holds it in ``precision``.

    ``nested``: nf4's statistics are quantized too.
    """
    return _tensor_bytes_in_each(module, dtype, (precision,), nested=nested)[precision]


def _tensor_bytes_in_each(
    module: nn.Module, dtype: str, precisions: Sequence[str] = PRECISIONS, *, nested: bool = False
) -> dict[str, dict[int, tuple[int, ...]]]:
    """`tensor_bytes_in` for each of ``precisions``."""
    own: torch.dtype = getattr(torch, dtype)
    layers = {id(layer.weight): layer for layer in quantizable_layers(module, own).values()}
    tensors = (*module.parameters(), *module.buffers())
    found: dict[str, dict[int, tuple[int, ...]]] = {}
    for precision in precisions:
        wanted: torch.dtype = getattr(torch, precision, own) if precision in ("float32", "bfloat16", "float16") else own
        held = found[precision] = {}
        for tensor in tensors:
            layer = layers.get(id(tensor)) if precision in QUANTIZED else None
            if layer is not None:
                held[id(tensor)] = layer_tensors(layer.out_features, layer.in_features, precision, nested=nested)
            else:
                held[id(tensor)] = (tensor.numel() * (wanted if tensor.dtype == own else tensor.dtype).itemsize,)
    return found


def block_bytes(
    module: nn.Module, groups: Sequence[BlockGroup], dtype: str, precision: str, *, nested: bool = False
) -> tuple[int, ...]:
    """For each group, the bytes of its largest block in ``precision``, in the layout of `graphrun.modules.blocks`.

    Every tensor, including statistics, is at a multiple of `ALIGNMENT`; the block is rounded up to the size of its allocation.
    """
    layouts = lay_out(module, [path for group in groups for path in group.blocks])
    return _block_bytes(layouts, groups, tensor_bytes_in(module, dtype, precision, nested=nested))


def block_bytes_by_precision(
    module: nn.Module, groups: Sequence[BlockGroup], dtype: str, *, by_layer: bool = False
) -> dict[str, tuple[int, ...]]:
    """`block_bytes` in each of `PRECISIONS`."""
    layouts = lay_out(module, [path for group in groups for path in group.blocks], split_layers=by_layer)
    return {precision: _block_bytes(layouts, groups, held) for precision, held in _tensor_bytes_in_each(module, dtype).items()}


def _block_bytes(
    layouts: Mapping[str, BlockLayout], groups: Sequence[BlockGroup], held: Mapping[int, tuple[int, ...]]
) -> tuple[int, ...]:
    sizes = {
        path: sum(round_up(nbytes, ALIGNMENT) for entry in layout.entries for nbytes in held[id(entry.tensor)])
        for path, layout in layouts.items()
    }
    return tuple(max(round_up(sizes[path], ROUND_BYTES) for path in group.blocks) for group in groups)


def laid_out_bytes(module: nn.Module, groups: Sequence[BlockGroup], *, by_layer: bool = False) -> tuple[int, ...]:
    """For each group, the bytes of its largest block of ``module`` as it is."""
    layouts = lay_out(module, [path for group in groups for path in group.blocks], split_layers=by_layer)
    return tuple(max(round_up(layouts[path].nbytes, ROUND_BYTES) for path in group.blocks) for group in groups)


def widened(kinds: Mapping[str, tuple[str, int, tuple[int, int]]], dtype: str) -> dict[str, tuple[int, int]]:
    """By name, what dequantizing GGUF weights takes: (peak bytes before the weight exists in ``dtype``, bytes written, the
    result included).

    ``kinds``: (GGUF type, bytes of a row, (outputs, inputs)) of each weight. Traced on meta from diffusers' own functions,
    which make half a dozen tensors of the weight's size.
    """
    by_shape: dict[tuple[str, int, tuple[int, int]], tuple[int, int]] = {}
    own: torch.dtype = getattr(torch, dtype)
    for kind, row_bytes, (outputs, inputs) in set(kinds.values()):
        layer = gguf_linear(nn.Linear(inputs, outputs, bias=False, device="meta"), own, kind, row_bytes)
        recorder = Recorder(layer, ())
        with _disable_current_modes(), torch.no_grad(), recorder:
            layer(torch.empty(1, inputs, dtype=own, device="meta"))
        recorder.close()
        written = sum(event.nbytes for event in recorder.record.events if not event.scratch)
        by_shape[kind, row_bytes, (outputs, inputs)] = recorder.record.peak_bytes, written
    return {name: by_shape[of] for name, of in kinds.items()}


def quantized_shapes(module: nn.Module, dtype: str) -> dict[str, tuple[int, int]]:
    """The weights of ``module`` that int8, nf4 and fp8 quantize: name -> (outputs, inputs)."""
    layers = quantizable_layers(module, getattr(torch, dtype))
    return {f"{path}.weight": (layer.out_features, layer.in_features) for path, layer in layers.items()}
