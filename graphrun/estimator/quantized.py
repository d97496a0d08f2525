"""What a component weighs in each precision that a graph may allow, layer by layer. No quantization is run, nothing is imported.

Formulas are those of bitsandbytes 0.50, checked byte for byte against its layers quantized on a CPU:

    int8   one byte an element; one fp32 scale for each output feature
    nf4    half a byte an element; one fp32 maximum for each 64 elements; the 16 values of the code
    nf4 with doubly quantized statistics: the maxima in one byte, for each 256 of them one fp32 maximum; both codes; an offset

Linear layers are quantized, and nothing else is: not what a component keeps in fp32, not an output layer tied to an embedding.
A bias stays as it is.
"""

from __future__ import annotations

import torch
from torch import nn

from graphrun.components.quantize import quantizable_layers
from graphrun.units import round_up

PRECISIONS = ("float32", "bfloat16", "float16", "int8", "nf4")
BLOCK, NESTED_BLOCK = 64, 256  # elements to a maximum, maxima to a maximum of maxima
CODE_BYTES, NESTED_CODE_BYTES, OFFSET_BYTES = 16 * 4, 256 * 4, 4


def layer_bytes(outputs: int, inputs: int, precision: str, *, nested: bool = False) -> int:
    """Bytes of one linear layer's weight [outputs inputs] in int8 or nf4, statistics included, its bias not."""
    return sum(layer_tensors(outputs, inputs, precision, nested=nested))


def layer_tensors(outputs: int, inputs: int, precision: str, *, nested: bool = False) -> tuple[int, ...]:
    """Bytes of each tensor that holds the weight [outputs inputs] in int8 or nf4."""
    count = outputs * inputs
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
    """Bytes of ``module``'s distinct tensors in each of `PRECISIONS`; ``dtype`` is the one it was made in.

    What is not of ``dtype`` stays as it is in every precision: T5's ``wo`` in fp32, integer buffers, position tables. ``allocated``
    rounds each tensor up to what an allocation takes.
    """
    own: torch.dtype = getattr(torch, dtype)
    step = 512 if allocated else 1
    layers = {id(layer.weight): layer for layer in quantizable_layers(module, own).values()}
    sizes = dict.fromkeys(PRECISIONS, 0)
    for tensor in {id(t): t for t in (*module.parameters(), *module.buffers())}.values():
        for precision in PRECISIONS:
            layer = layers.get(id(tensor))
            if precision in ("int8", "nf4") and layer is not None:
                tensors = layer_tensors(layer.out_features, layer.in_features, precision)
            else:
                wanted: torch.dtype = getattr(torch, precision, own)
                if precision in ("int8", "nf4") or tensor.dtype != own:
                    wanted = tensor.dtype
                tensors = (tensor.numel() * wanted.itemsize,)
            sizes[precision] += sum(round_up(nbytes, step) for nbytes in tensors)
    return sizes
