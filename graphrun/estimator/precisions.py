"""What a component's blocks are in another precision than the one that was traced: bytes as the executor lays them out, and what
computing with them takes more.

Decides numbers only; nothing is quantized and no weight is read. Which layers become quantized ones says `components.quantize`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from graphrun.components.blocks import ALIGNMENT, BlockLayout, lay_out
from graphrun.components.quantize import QUANTIZED, quantizable_layers
from graphrun.estimator.corrections import int8_scratch, nf4_scratch
from graphrun.estimator.events import Call, Held
from graphrun.estimator.quantized import layer_tensors
from graphrun.planner.problem import ALLOCATION_BYTES, BlockClass
from graphrun.units import round_up

# While a weight is quantized on the host there are, beside what comes out: the weight as it was read and a copy in fp32.
QUANTIZING_BYTES = 2 + 4


def held_in(
    precision: str,
    module: nn.Module,
    own: torch.dtype,
    classes: Sequence[BlockClass],
    calls: Iterable[Call],
    other: Callable[[str], nn.Module],
) -> Held:
    """How ``module``, traced in dtype ``own``, is held in ``precision``.

    ``calls``: the distinct ones of the dry run, which say how many rows a layer sees. ``other`` makes the module in another dtype.
    """
    paths = [path for k in classes for path in k.blocks]
    if precision not in QUANTIZED:
        layouts = lay_out(module if getattr(torch, precision) == own else other(precision), paths)
        return Held(_largest(classes, {path: layout.nbytes for path, layout in layouts.items()}))
    layers = quantizable_layers(module, own)
    weights = {id(layer.weight): layer for layer in layers.values()}
    layouts = lay_out(module, paths)
    sizes = {path: _quantized_bytes(layout, weights, precision) for path, layout in layouts.items()}
    widened = {
        path: sum(entry.nbytes for entry in layout.entries if id(entry.tensor) in weights) if precision == "nf4" else 0
        for path, layout in layouts.items()
    }
    most = max((layer.weight.numel() for layer in layers.values()), default=0)
    return Held(
        block_bytes=_largest(classes, sizes),
        widened_bytes=tuple(max(widened[path] for path in k.blocks) for k in classes),
        scratch_bytes=round_up(_scratch(precision, layers, list(calls), own), ALLOCATION_BYTES),
        transient_bytes=QUANTIZING_BYTES * most,
    )


def _largest(classes: Sequence[BlockClass], sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(max(round_up(sizes[path], ALLOCATION_BYTES) for path in k.blocks) for k in classes)


def _quantized_bytes(layout: BlockLayout, weights: dict[int, nn.Linear], precision: str) -> int:
    total = 0
    for entry in layout.entries:
        layer = weights.get(id(entry.tensor))
        parts = (entry.nbytes,) if layer is None else layer_tensors(layer.out_features, layer.in_features, precision)
        total += sum(round_up(nbytes, ALIGNMENT) for nbytes in parts)
    return total


def _scratch(precision: str, layers: dict[str, nn.Linear], calls: list[Call], own: torch.dtype) -> int:
    """The most that one quantized layer takes while it computes; layers run one after another."""
    if precision == "nf4":
        return max((nf4_scratch(layer.weight.numel(), own.itemsize) for layer in layers.values()), default=0)
    rows = _rows(layers, calls)
    return max((int8_scratch(rows, layer.in_features, layer.out_features) for layer in layers.values()), default=0)


def _rows(layers: dict[str, nn.Linear], calls: list[Call]) -> int:
    """Rows that a layer sees at most in a call: the FLOPs of the module it lies in over twice its weights there.

    Attention counts as if it were linear layers: never too few where every layer of the module sees the same rows.
    """
    most = 0.0
    for call in calls:
        for path, flops in call.flops:
            inside = [layer.weight.numel() for name, layer in layers.items() if not path or name.startswith(f"{path}.")]
            if inside:
                most = max(most, flops / (2 * sum(inside)))
    return int(most)
