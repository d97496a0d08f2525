"""FLOPs of an operator on a simulated machine, and which operators launch a kernel.

Matrix products, convolutions and attention have FLOPs; all other operators cost 0. The formulas are
those of ``torch.utils.flop_counter`` (a test compares them with its registry), computed from shapes
without its tree maps, because they run for every operator. bitsandbytes' quantized layers count as
the matrix products that they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from math import prod
from typing import Any

from torch.utils.flop_counter import conv_flop_count, sdpa_flop_count

Formula = Callable[[list[Any], Any], int]
"""FLOPs from the operator's positional arguments (raw tensors) and its output."""


_NO_KERNEL = frozenset(
    f"aten::{name}"
    for name in (
        "_unsafe_view",
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    )
) | {"_c10d_functional::wait_tensor"}


@cache
def launches_kernel(func: Any) -> bool:
    """Return whether ``func`` launches a kernel; making a view or allocating memory does not."""
    schema = func._schema
    views = any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in schema.returns
    )
    return not views and schema.name not in _NO_KERNEL


def _mm(args: list[Any], output: Any) -> int:
    rows_by_inner, columns = prod(args[0].shape), args[1].shape[-1]
    return int(2 * rows_by_inner * columns)


def _addmm(args: list[Any], output: Any) -> int:
    return _mm(args[1:], output)


def _linear(args: list[Any], output: Any) -> int:
    return int(2 * prod(args[0].shape) * prod(args[1].shape[:-1]))


def _convolution(args: list[Any], output: Any) -> int:
    return int(
        conv_flop_count(
            list(args[0].shape), list(args[1].shape), list(output.shape), transposed=args[6]
        )
    )


def _attention(args: list[Any], output: Any) -> int:
    """Two batched matrix products: query [... q d], key [... k d], value [... k v]."""
    query, key, value = (args[i].shape for i in range(3))
    batch = prod(query[:-2])
    shapes = [(1, batch, *shape[-2:]) for shape in (query, key, value)]
    return int(sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call]


def _four_bit(args: list[Any], output: Any) -> int:
    """bitsandbytes' gemm_4bit(A, B, shape of the weight, ...)."""
    return int(2 * prod(args[0].shape) * args[2][0])


def _eight_bit(args: list[Any], output: Any) -> int:
    """bitsandbytes' int8_mixed_scaled_mm(A, CA, CB, ...): the int8 product, without outlier
    columns."""
    return int(2 * prod(args[1].shape) * args[2].shape[0])


FORMULAS: Mapping[str, Formula] = {
    "aten::mm": _mm,
    "aten::bmm": _mm,
    "aten::addmm": _addmm,
    "aten::baddbmm": _addmm,
    "aten::linear": _linear,
    "aten::convolution": _convolution,
    "aten::scaled_dot_product_attention": _attention,
    "bitsandbytes::gemm_4bit": _four_bit,
    "bitsandbytes::int8_mixed_scaled_mm": _eight_bit,
}
