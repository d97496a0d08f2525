"""The kernels of operators in a dry run: their FLOPs, bytes and shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from graphrun.profile.costs import output_tiles
from graphrun.profile.meta_ops import META
from graphrun.profile.operands import (
    convolution_shape,
    dtype_name,
    is_transposing,
    touched_bytes,
)
from graphrun.profile.recording import FLEX, Kernel
from graphrun.sim import flex

aten = torch.ops.aten

# Operators that copy; TRANSPOSING: `Kernel.operator` of copies that change the order of dimensions
# in memory.
_COPIES = frozenset({aten.clone, aten.copy_, aten._to_copy})
_JOINS = frozenset({aten.cat, aten.stack})
TRANSPOSING = "transpose"
STRIDED = "strided"  # reads every other number, or fewer, whatever it computes
APPROXIMATING = "gelu_tanh"  # by the formula with tanh, which takes a CPU longer

# operators that read as many elements of their first argument as they return
_GATHERS = frozenset({aten.embedding, aten.index, aten.index_select, aten.gather})


def operator_kernel(
    func: Any,
    args: Any,
    kwargs: Any,
    result: Any,
    arguments: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
) -> Kernel | None:
    """Return the kernel of ``func``; None on the host; one without work for a copy to the host.

    ``arguments``, ``results``: its tensors on the device.
    """
    if not results:
        return Kernel("elementwise", dtype_name(arguments[0].dtype), 0.0, 0) if arguments else None
    packet, output = func._overloadpacket, results[0]
    written_bytes = sum(map(touched_bytes, results))
    read_bytes = written_bytes if packet in _GATHERS else sum(map(touched_bytes, arguments))
    dtype, nbytes = dtype_name(output.dtype), read_bytes + written_bytes
    if (sent_bytes := _sent_bytes(func, args)) is not None:
        return Kernel("transfer", dtype, 0.0, sent_bytes)
    if (formula := flop_registry.get(packet)) is None:
        rows, elements = 0, 0
        if packet is aten.native_group_norm:
            rows, elements = args[3] * args[6], args[0].numel()  # batch, groups
        new_bytes = 0 if func._schema.is_mutable else written_bytes
        pattern = _access_pattern(packet, args, kwargs, arguments, output)
        return Kernel(
            "elementwise", dtype, 0.0, nbytes, rows, elements, operator=pattern, shape=(new_bytes,)
        )
    flops = float(formula(*args, **kwargs, out_val=result))
    if func is aten.convolution.default:
        channels = output.shape[1]
        tile_count = output_tiles(output.numel() // channels, channels)
        shape = convolution_shape(args[0], args[1], result, args[8])
        return Kernel("convolution", dtype, flops, nbytes, tile_count, shape=shape)
    *batch, rows, columns = output.shape
    count, inner = math.prod(batch), round(flops / (2 * output.numel() or 1))
    tile_count = count * output_tiles(rows, columns)
    return Kernel("matmul", dtype, flops, nbytes, tile_count, shape=(count, rows, inner, columns))


def _sent_bytes(func: Any, args: Any) -> int | None:
    """Return the bytes that a collective sends from this process; None for other operators."""
    name = func._schema.name
    if name == "_c10d_functional::all_to_all_single":
        tensor, _, parts, *_ = args  # one part stays
        return int(touched_bytes(tensor) * (len(parts) - 1) // len(parts))
    if name == "_c10d_functional::all_gather_into_tensor":
        tensor, processes, *_ = args
        return int(touched_bytes(tensor) * (processes - 1))
    return None


def _access_pattern(
    packet: Any,
    args: Any,
    kwargs: Any,
    arguments: Sequence[torch.Tensor],
    output: torch.Tensor,
) -> str:
    """Return the `Kernel.operator` of an operator without matrix products."""
    if packet in _COPIES and is_transposing(args, output):
        return TRANSPOSING
    if kwargs.get("approximate") == "tanh":
        return APPROXIMATING
    if packet not in _JOINS and any(tensor.dim() and tensor.stride(-1) > 1 for tensor in arguments):
        return STRIDED
    return str(packet.__name__)


def flex_results(args: Any, *, on_meta: bool) -> tuple[torch.Tensor, ...]:
    """Return the output, and per query the logarithm of the sum and the maximum of its scores.

    ``args``: of the operator. The output has the queries' order of dimensions in memory.
    """
    if not on_meta:
        return tuple(flex.dense(*args))
    query, _, value = args[:3]
    order = sorted(range(query.dim()), key=query.stride, reverse=True)
    shape = (*query.shape[:-1], value.shape[-1])
    output = torch.empty([shape[i] for i in order], dtype=query.dtype, device=META)
    output = output.permute([order.index(i) for i in range(query.dim())])
    return output, *(torch.empty(query.shape[:-1], device=META) for _ in range(2))


def flex_kernel(args: Any, output: torch.Tensor) -> Kernel:
    """Return the work of the operator: FLOPs of the blocks that its mask leaves."""
    query, key, value, _, mask = args[:5]
    rows = query.numel() // query.shape[-1]
    queries, keys = query.shape[-2], key.shape[-2]
    return Kernel(
        "attention",
        dtype_name(output.dtype),
        float(flex.flops(query, key, value, mask)),
        sum(map(touched_bytes, (query, key, value, output))),
        rows // queries * output_tiles(queries, 1),
        rows * keys,
        operator=FLEX,
        shape=(rows // queries, queries, keys, 0),
    )
