"""Runs operators on the meta device and caches results by the arguments' shapes.

For most operators, torch's meta implementation is Python and takes ten times as long as a cache
lookup. A result may be cached if it is new: the operator's schema writes to no argument and returns
no view, the arguments are plain meta tensors and plain values, and the returned tensors have
storages of their own, exactly as large as needed. Independent of what is recorded.
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
    """Raised for an argument whose effect on the result is not determined by its shape."""


def on_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``func(*args, **kwargs)``: a result with the same shapes, strides, dtypes and storage
    sizes."""
    if _returns_new_tensors(func):
        try:
            key = (
                tuple([_cache_key(arg) for arg in args]),
                tuple([(name, _cache_key(value)) for name, value in kwargs.items()]),
            )
        except _Uncacheable:
            return func(*args, **kwargs)
        if (found := _cached_result(func, key, torch.get_default_dtype())) is not None:
            results = [_empty(*one) for one in found[1]]
            return results[0] if found[0] is None else found[0](results)
    return func(*args, **kwargs)


@cache
def _returns_new_tensors(func: Any) -> bool:
    """Whether ``func``, by its schema, takes tensors, writes to none, and returns tensors that are
    no views."""
    schema = func._schema
    aliases = [one.alias_info for one in (*schema.arguments, *schema.returns)]
    takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    returns_tensors = bool(schema.returns) and all(
        str(one.type) in ("Tensor", "List[Tensor]") for one in schema.returns
    )
    return func.namespace == "aten" and takes_tensors and returns_tensors and not any(aliases)


def _cache_key(value: Any) -> Any:
    """Everything about an argument that a result on meta may depend on. Raises _Uncacheable if that
    is not known."""
    kind = type(value)
    if kind is torch.Tensor or kind is nn.Parameter:
        if not value.is_meta:
            raise _Uncacheable
        return torch.Tensor, value.shape, value.stride(), value.dtype
    if kind in _KEYABLE:
        return kind, value
    if kind is list or kind is tuple:
        return kind, tuple([_cache_key(one) for one in value])
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
    """What ``func`` returns for arguments with this ``key``: the container type (None for a single
    tensor), and the layout of each tensor.

    None unless all tensors are new. ``default_dtype`` is part of the cache key: results of mixing
    with integers depend on it.
    """
    args, kwargs = (
        [_empty_argument(one) for one in key[0]],
        {name: _empty_argument(one) for name, one in key[1]},
    )
    out = func(*args, **kwargs)
    results = list(out) if isinstance(out, (list, tuple)) else [out]
    if type(out) not in (torch.Tensor, list, tuple) or any(
        type(one) is not torch.Tensor or not one.is_meta for one in results
    ):
        return None
    layouts = [_layout(one) for one in results]
    own = all(
        _empty(*of).untyped_storage().nbytes() == one.untyped_storage().nbytes()
        for of, one in zip(layouts, results, strict=True)
    )
    argument_storages = {
        one.untyped_storage()._cdata
        for one in tree_leaves((args, kwargs))
        if isinstance(one, torch.Tensor)
    }
    result_storages = [one.untyped_storage()._cdata for one in results]
    separate = len({*result_storages}) == len(results) and not argument_storages.intersection(
        result_storages
    )
    return (
        (None if isinstance(out, torch.Tensor) else type(out), layouts)
        if own and separate
        else None
    )


def _layout(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    """Shape, stride and dtype."""
    return tensor.shape, tensor.stride(), tensor.dtype


def _empty(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=META)
