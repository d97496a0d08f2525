"""What is known of values on meta: small tensors that the code writes out, what is made of them, how much a mask lets through, and
the worst case of a choice.

Decides which values a dry run may read. Must not know components: it sees operators and tensors alone.

    torch.tensor([64, 64])                 known: the code says it; so is what is computed from it (a picture's size in patches)
    mask.sum(dim=1).tolist()               a count of ones: every element, since the mask may be full
    text[mask], text[~mask]                likewise: every row, and none
    topk(scores, 2).indices.bincount()     a choice that data makes (experts): at worst all tokens take the same two
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

# Larger tensors are data, not sizes.
LARGEST = 64

aten = torch.ops.aten
SUMS = frozenset({aten.sum.default, aten.sum.dim_IntList})
COMPLEMENTS = frozenset({aten.bitwise_not.default, aten.logical_not.default})


class Storages:
    """What is noted of tensors' storages, so that a view has it too. It goes with the storage: another may get its address."""

    def __init__(self) -> None:
        self._noted: Any = WeakIdKeyDictionary(ref_type=weakref.ref)

    def __setitem__(self, tensor: torch.Tensor, value: Any) -> None:
        self._noted[tensor.untyped_storage()] = value

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage() in self._noted

    def get(self, tensor: torch.Tensor) -> Any:
        """What is noted of ``tensor``'s storage, None where nothing is."""
        return self._noted.get(tensor.untyped_storage())


class ConstantValues:
    """The values of those meta tensors that have one, kept beside them as CPU tensors."""

    def __init__(self) -> None:
        self._values: Any = WeakTensorKeyDictionary()
        self._choices = Storages()  # of indices: (how many to choose from, how many are chosen)
        self._complements = Storages()  # of what full masks leave out

    def written(self, out: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """``out`` of ``torch.tensor(*args, **kwargs)``: what it says is known."""
        if out.is_meta and out.numel() <= LARGEST:
            self._values[out] = torch.tensor(*args, **{**kwargs, "device": "cpu"})
        return out

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of ``tensor`` on the CPU, None where nobody can know it."""
        value: torch.Tensor | None = self._values.get(tensor)
        return value

    def follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Note what ``func(*args, **kwargs)``, which made ``out`` on meta, means for what is known."""
        if func is aten.topk.default:
            self._choices[out[1]] = args[0].shape[args[2] if len(args) > 2 else -1], args[1]
        if func in COMPLEMENTS and out.dtype == torch.bool and args[0] not in self._complements:
            self._complements[out] = True
        if func in SUMS and args[0].is_meta and args[0] not in self._values and not args[0].is_floating_point():
            if 0 < out.numel() <= LARGEST:
                self._values[out] = torch.full(out.shape, args[0].numel() // out.numel(), dtype=out.dtype, device="cpu")
            return
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if not tensors or not self._values:
            return
        if all(tensor in self._values for tensor in tensors):
            self._compute(func, args, kwargs, out)
        elif tensors[0] in self._values and func._schema.is_mutable:
            del self._values[tensors[0]]

    def columns(self, index: torch.Tensor | None, made: Callable[[torch.Tensor], object]) -> Sequence[torch.Tensor | None]:
        """``index`` as kernels take it: of a mask the places that it picks, a column for each dimension. That is all of them, or
        none where it is the complement of one that picks all. ``made`` is told of the tensor that holds them."""
        if index is None or index.dtype != torch.bool:
            return (index,)
        rows = 0 if index in self._complements else index.numel()
        places = torch.empty(rows, index.dim(), dtype=torch.long, device="meta")
        made(places)
        return places.unbind(1)

    def counted(self, indices: torch.Tensor) -> torch.Tensor | None:
        """``indices.bincount()`` at its worst for memory, on meta; None where ``indices`` are no known choice.

        As many calls take the first as can, which makes the largest single call; together they do the same work as any other.
        """
        if (choice := self._choices.get(indices)) is None:
            return None
        options, chosen = choice
        counts = torch.tensor([indices.numel() // chosen] * chosen + [0] * (options - chosen), device="cpu")
        out = torch.empty_like(counts, device="meta")
        self._values[out] = counts
        return out

    def _compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        outs = out if isinstance(out, (list, tuple)) else (out,)
        if not all(isinstance(one, torch.Tensor) and one.is_meta and one.numel() <= LARGEST for one in outs):
            return
        on_cpu = {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}
        value = func(*tree_map_only(torch.Tensor, lambda tensor: self._values[tensor], tuple(args)), **on_cpu)
        for one, found in zip(outs, value if isinstance(value, (list, tuple)) else (value,), strict=True):
            self._values[one] = found
