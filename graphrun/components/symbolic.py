"""Conversions of checkpoints, done once without data: which bytes of which file each converted tensor is, or how it is made of
them.

Decides nothing about names: a library's own function runs on tensors on meta, and what it does to them is written down. Must not
know modules.

    file    | qkv.weight [3n n] ..................... |          meta
              q = rows 0..n    k = rows n..2n   v = ...          chunk: each is a range of the file's bytes (`Stored`)
              shift, scale -> cat([scale, shift])                anything else is done again when it is read (`Recipe`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from graphrun.components.weights import Stored

# Copies of a whole tensor: of what is read anew, the tensor itself.
_COPIES = frozenset({"clone", "contiguous", "detach"})


@dataclass(frozen=True, slots=True)
class Recipe:
    """A tensor that is made of others: ``leaves`` as they lie in files, in the order in which ``make`` takes their values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    leaves: tuple[Stored, ...]
    make: Callable[[Sequence[torch.Tensor]], torch.Tensor] = field(compare=False)

    @property
    def nbytes(self) -> int:
        """What is read for it."""
        return sum(leaf.nbytes for leaf in self.leaves)


Piece = Stored | Recipe


class Symbols(TorchFunctionMode):
    """Tensors on meta that stand for ``stored`` ones, by name in ``tensors``. What is done to them while this is entered can be
    told by `piece`."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        super().__init__()
        self.tensors = {
            name: torch.empty(leaf.shape, dtype=getattr(torch, leaf.dtype), device="meta") for name, leaf in stored.items()
        }
        self._kept: list[Any] = []  # what identities below are of
        self._leaves = {id(tensor): stored[name] for name, tensor in self.tensors.items()}
        self._by_storage = {tensor.untyped_storage()._cdata: stored[name] for name, tensor in self.tensors.items()}
        self._made: dict[int, tuple[Callable[..., Any], Any, Any, int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _COPIES and args[0].is_contiguous():
            return args[0]
        if func is torch.cat and len(args[0]) == 1:  # as FLUX's conversion puts a query together
            return args[0][0]
        out = func(*args, **kwargs)
        for index, one in enumerate(out if isinstance(out, (list, tuple)) else (out,)):
            if isinstance(one, torch.Tensor) and id(one) not in self._leaves:
                self._made[id(one)] = (func, args, kwargs, index if isinstance(out, (list, tuple)) else -1)
                self._kept.append(one)
        return out

    def piece(self, name: str, tensor: torch.Tensor) -> Piece:
        """Where the values of ``tensor``, which came out of the conversion as ``name``, come from."""
        leaf = self._by_storage.get(tensor.untyped_storage()._cdata)
        if leaf is not None and tensor.is_contiguous() and str(tensor.dtype).removeprefix("torch.") == leaf.dtype:
            begin = leaf.begin + int(tensor.storage_offset()) * tensor.element_size()
            return replace(leaf, shape=tuple(tensor.shape), nbytes=tensor.numel() * tensor.element_size(), begin=begin)
        leaves: dict[int, Stored] = {}
        self._gather(tensor, leaves)
        keys = list(leaves)

        def make(values: Sequence[torch.Tensor]) -> torch.Tensor:
            return self._value(tensor, dict(zip(keys, values, strict=True)))

        dtype = str(tensor.dtype).removeprefix("torch.")
        return Recipe(name, dtype, tuple(tensor.shape), tuple(leaves.values()), make)

    def _gather(self, tensor: torch.Tensor, found: dict[int, Stored]) -> None:
        if id(tensor) in self._leaves:
            found[id(tensor)] = self._leaves[id(tensor)]
        elif id(tensor) in self._made:
            _, args, kwargs, _ = self._made[id(tensor)]
            tree_map_only(torch.Tensor, lambda one: self._gather(one, found), (args, kwargs))

    def _value(self, tensor: torch.Tensor, values: dict[int, torch.Tensor]) -> torch.Tensor:
        """``tensor`` for real; what is not made of leaves (a constant) is itself."""
        key = id(tensor)
        if key not in values:
            if key not in self._made or not tensor.is_meta:
                return tensor
            func, args, kwargs, index = self._made[key]
            args, kwargs = tree_map_only(torch.Tensor, lambda one: self._value(one, values), (args, kwargs))
            out = func(*args, **kwargs)
            values[key] = out[index] if index >= 0 else out
        return values[key]
