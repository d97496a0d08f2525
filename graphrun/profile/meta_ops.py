"""Run operators on the meta device, and cache results by the shapes of the arguments.

For most operators, torch's meta implementation is Python and takes ten times as long as a cache
lookup. A result may be cached if it is new: the operator's schema writes to no argument and returns
no view, the arguments are plain meta tensors and plain values, and the returned tensors have
storages of their own, exactly as large as needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

META = torch.device("meta")
# Enough for many models and sizes: FLUX's transformer at one size has about 60 entries.
CACHE_SIZE = 16384

_KEYABLE = frozenset(
    {
        bool,
        int,
        float,
        str,
        type(None),
        torch.dtype,
        torch.device,
        torch.memory_format,
        torch.layout,
    }
)


class _Uncacheable(Exception):
    """An argument whose effect on the result does not follow from its shape."""


def on_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run on meta, or return a cached result with equal shapes, strides, dtypes and storages."""
    if _returns_new_tensors(func):
        try:
            key = (
                tuple([_cache_key(arg) for arg in args]),
                tuple([(name, _cache_key(value)) for name, value in kwargs.items()]),
            )
        except _Uncacheable:
            return func(*args, **kwargs)
        if (cached := _cached_result(func, key, torch.get_default_dtype())) is not None:
            results = [_empty(*layout) for layout in cached[1]]
            return results[0] if cached[0] is None else cached[0](results)
    return func(*args, **kwargs)


@cache
def _returns_new_tensors(func: Any) -> bool:
    """Return whether ``func`` takes tensors, writes to none, and returns no views."""
    schema = func._schema
    aliases = [value.alias_info for value in (*schema.arguments, *schema.returns)]
    takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    returns_tensors = bool(schema.returns) and all(
        str(value.type) in ("Tensor", "List[Tensor]") for value in schema.returns
    )
    return func.namespace == "aten" and takes_tensors and returns_tensors and not any(aliases)


def _cache_key(value: Any) -> Any:
    """Return all that a result on meta depends on. Raises _Uncacheable if unknown."""
    kind = type(value)
    if kind is torch.Tensor or kind is nn.Parameter:
        if not value.is_meta:
            raise _Uncacheable
        return torch.Tensor, value.shape, value.stride(), value.dtype
    if kind in _KEYABLE:
        return kind, value
    if kind is list or kind is tuple:
        return kind, tuple([_cache_key(item) for item in value])
    raise _Uncacheable


def _empty_argument(key: Any) -> Any:
    kind, *rest = key
    if kind is torch.Tensor:
        return _empty(*rest)
    return kind(map(_empty_argument, rest[0])) if kind is list or kind is tuple else rest[0]


@lru_cache(CACHE_SIZE)
def _cached_result(
    func: Any, key: Any, default_dtype: torch.dtype
) -> tuple[type | None, list[Any]] | None:
    """Return the result's container type (None: one tensor) and tensor layouts.

    None unless all tensors are new. ``default_dtype`` is part of the cache key, since mixing with
    integers depends on it.
    """
    args, kwargs = (
        [_empty_argument(argument) for argument in key[0]],
        {name: _empty_argument(argument) for name, argument in key[1]},
    )
    output = func(*args, **kwargs)
    results = list(output) if isinstance(output, (list, tuple)) else [output]
    if type(output) not in (torch.Tensor, list, tuple) or any(
        type(tensor) is not torch.Tensor or not tensor.is_meta for tensor in results
    ):
        return None
    layouts = [_layout(tensor) for tensor in results]
    has_exact_storage = all(
        _empty(*layout).untyped_storage().nbytes() == result.untyped_storage().nbytes()
        for layout, result in zip(layouts, results, strict=True)
    )
    argument_storages = {
        leaf.untyped_storage()._cdata
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, torch.Tensor)
    }
    result_storages = [tensor.untyped_storage()._cdata for tensor in results]
    has_separate_storages = len({*result_storages}) == len(
        results
    ) and not argument_storages.intersection(result_storages)
    return (
        (None if isinstance(output, torch.Tensor) else type(output), layouts)
        if has_exact_storage and has_separate_storages
        else None
    )


def _layout(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _empty(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=META)
