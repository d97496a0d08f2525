"""Runs operators on meta. What one makes of arguments of these shapes is found out once: torch's own code for it is Python for most
operators, and takes ten times as long as to remember.

Decides when a result may be remembered. Must not know what is recorded, or why.

It may be where it is new: the operator writes nowhere and returns no view by its schema, it was handed plain tensors on meta and
plain values, and what it returned turned out to lie in storages of its own, as large as needed.

`torch.autocast` in a dry run on meta, which it does not know: where code turns it off for the device of a tensor, or on in
fp32 (Mochi's positions), which turns it off on all devices, there is nothing to turn off.

Decides nothing else: where it is turned on, torch refuses as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


@contextmanager
def autocast_off_on_meta() -> Iterator[None]:
    """A context in which ``torch.autocast("meta", enabled=False)`` and ``torch.autocast("meta", torch.float32)`` do nothing."""
    kind: Any = torch.autocast
    own = kind.__init__

    def begin(autocast: Any, device_type: str, dtype: Any = None, enabled: bool = True, **more: Any) -> None:
        if device_type == "meta" and (not enabled or dtype == torch.float32):
            device_type, dtype, enabled = "cpu", None, False
        own(autocast, device_type, dtype, enabled, **more)

    kind.__init__ = begin
    try:
        yield
    finally:
        kind.__init__ = own


META = torch.device("meta")
# A few pictures' worth: the transformer of FLUX at one size has about 60.
REMEMBERED = 16384

_EXACT = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout})


class _Other(Exception):
    """An argument of which the shape does not say all."""


def on_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``func(*args, **kwargs)``: the same shapes, strides, dtypes and storages."""
    if _makes_new(func):
        try:
            told = tuple([_told(arg) for arg in args]), tuple([(key, _told(value)) for key, value in kwargs.items()])
        except _Other:
            return func(*args, **kwargs)
        if (found := _outcome(func, told, torch.get_default_dtype())) is not None:
            made = [_empty(*one) for one in found[1]]
            return made[0] if found[0] is None else found[0](made)
    return func(*args, **kwargs)


@cache
def _makes_new(func: Any) -> bool:
    """Whether ``func`` takes tensors, writes into none, and returns tensors that are no views by its schema."""
    schema = func._schema
    aliases = [one.alias_info for one in (*schema.arguments, *schema.returns)]
    takes = any("Tensor" in str(argument.type) for argument in schema.arguments)
    gives = bool(schema.returns) and all(str(one.type) in ("Tensor", "List[Tensor]") for one in schema.returns)
    return func.namespace == "aten" and takes and gives and not any(aliases)


def _told(value: Any) -> Any:
    """All that a result on meta may depend on."""
    kind = type(value)
    if kind is torch.Tensor or kind is nn.Parameter:
        if not value.is_meta:
            raise _Other
        return torch.Tensor, value.shape, value.stride(), value.dtype
    if kind in _EXACT:
        return kind, value
    if kind is list or kind is tuple:
        return kind, tuple([_told(one) for one in value])
    raise _Other


def _stand_in(told: Any) -> Any:
    kind, *rest = told
    if kind is torch.Tensor:
        return _empty(*rest)
    return kind(map(_stand_in, rest[0])) if kind is list or kind is tuple else rest[0]


@lru_cache(REMEMBERED)
def _outcome(func: Any, told: Any, default_dtype: torch.dtype) -> tuple[type | None, list[Any]] | None:
    """What ``func`` makes of arguments as they are ``told``: in what it returns tensors (None: it is one), and shape, stride and
    dtype of each. None where they are not all new. ``default_dtype``: what mixes with whole numbers gets it."""
    args, kwargs = [_stand_in(one) for one in told[0]], {key: _stand_in(one) for key, one in told[1]}
    out = func(*args, **kwargs)
    made = list(out) if isinstance(out, (list, tuple)) else [out]
    if type(out) not in (torch.Tensor, list, tuple) or any(type(one) is not torch.Tensor or not one.is_meta for one in made):
        return None
    kept = [_described(one) for one in made]
    own = all(_empty(*of).untyped_storage().nbytes() == one.untyped_storage().nbytes() for of, one in zip(kept, made, strict=True))
    handed = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
    places = [one.untyped_storage()._cdata for one in made]
    apart = len({*places}) == len(made) and not handed.intersection(places)
    return (None if isinstance(out, torch.Tensor) else type(out), kept) if own and apart else None


def _described(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _empty(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=META)
