"""Flex attention in a dry run: attention with functions that mask and change scores."""

from __future__ import annotations

from typing import Any

import torch

from graphrun.profile.costs import output_tiles
from graphrun.profile.meta_ops import META
from graphrun.profile.operands import dtype_name, touched_bytes
from graphrun.profile.recording import FLEX, Kernel
from graphrun.sim import flex


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
