"""Constant values of meta tensors: small tensors that the code writes out and what is computed from
them, the counts of masks, and the worst case of a top-k selection.

Decides which values a dry run may read. Sees operators and tensors only, no components.

    torch.tensor([64, 64])                 constant, and so is what is computed from it (an image's
    size in patches) mask.sum(dim=1).tolist()               number of ones: the number of elements,
    since the mask may be all ones text[mask], text[~mask]                likewise: every row, and
    none topk(scores, 2).indices.bincount()     a selection that depends on data (experts): worst
    case, all tokens select the same two
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

# Tensors with more elements hold data, not sizes.
MAX_ELEMENTS = 64

aten = torch.ops.aten
SUMS = frozenset({aten.sum.default, aten.sum.dim_IntList})
COMPLEMENTS = frozenset({aten.bitwise_not.default, aten.logical_not.default})


class Storages:
    """Notes about storages, so that they apply to all views of a tensor.

    A note disappears with its storage, since a new storage may have the same address.
    """

    def __init__(self) -> None:
        self._notes: Any = WeakIdKeyDictionary(ref_type=weakref.ref)

    def __setitem__(self, tensor: torch.Tensor, value: Any) -> None:
        self._notes[tensor.untyped_storage()] = value

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage() in self._notes

    def get(self, tensor: torch.Tensor) -> Any:
        """The note about ``tensor``'s storage, None if there is none."""
        return self._notes.get(tensor.untyped_storage())


class ConstantValues:
    """The values of those meta tensors that have a constant value, as CPU tensors."""

    def __init__(self) -> None:
        self._values: Any = WeakTensorKeyDictionary()
        self._topk = Storages()  # of indices: (number of experts, number selected per token)
        self._complements = Storages()  # complements of masks that are taken to be all ones

    def from_literal(self, out: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns ``out``, the result of ``torch.tensor(*args, **kwargs)``, and stores its
        value."""
        if out.is_meta and out.numel() <= MAX_ELEMENTS:
            self._values[out] = torch.tensor(*args, **{**kwargs, "device": "cpu"})
        return out

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of ``tensor`` on the CPU, None if it is not constant."""
        value: torch.Tensor | None = self._values.get(tensor)
        return value

    def propagate(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        """Update the constant values after ``func(*args, **kwargs)`` has returned ``out`` on
        meta."""
        if func is aten.topk.default:
            self._topk[out[1]] = args[0].shape[args[2] if len(args) > 2 else -1], args[1]
        if func in COMPLEMENTS and out.dtype == torch.bool and args[0] not in self._complements:
            self._complements[out] = True
        if (
            func in SUMS
            and args[0].is_meta
            and args[0] not in self._values
            and not args[0].is_floating_point()
        ):
            if 0 < out.numel() <= MAX_ELEMENTS:
                self._values[out] = torch.full(
                    out.shape, args[0].numel() // out.numel(), dtype=out.dtype, device="cpu"
                )
            return
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if not tensors or not self._values:
            return
        if all(tensor in self._values for tensor in tensors):
            self._compute(func, args, kwargs, out)
        elif tensors[0] in self._values and func._schema.is_mutable:
            del self._values[tensors[0]]

    def index_columns(
        self, index: torch.Tensor | None, on_new: Callable[[torch.Tensor], object]
    ) -> Sequence[torch.Tensor | None]:
        """``index`` as indexing kernels use it: a boolean mask becomes the positions of its ones,
        one column for each dimension.

        A mask is taken to be all ones, the complement of one to be all zeros. ``on_new`` is called
        with the tensor that holds the positions.
        """
        if index is None or index.dtype != torch.bool:
            return (index,)
        rows = 0 if index in self._complements else index.numel()
        positions = torch.empty(rows, index.dim(), dtype=torch.long, device="meta")
        on_new(positions)
        return positions.unbind(1)

    def worst_bincount(self, indices: torch.Tensor) -> torch.Tensor | None:
        """``indices.bincount()`` on meta with the largest memory; None unless ``indices`` come from
        a top-k selection.

        All tokens select the same experts, which makes the largest single call. The work in total
        is the same for every selection.
        """
        if (topk := self._topk.get(indices)) is None:
            return None
        experts, per_token = topk
        counts = torch.tensor(
            [indices.numel() // per_token] * per_token + [0] * (experts - per_token), device="cpu"
        )
        out = torch.empty_like(counts, device="meta")
        self._values[out] = counts
        return out

    def _compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        outs = out if isinstance(out, (list, tuple)) else (out,)
        if not all(
            isinstance(one, torch.Tensor) and one.is_meta and one.numel() <= MAX_ELEMENTS
            for one in outs
        ):
            return
        on_cpu = {
            key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()
        }
        value = func(
            *tree_map_only(torch.Tensor, lambda tensor: self._values[tensor], tuple(args)), **on_cpu
        )
        for one, found in zip(
            outs, value if isinstance(value, (list, tuple)) else (value,), strict=True
        ):
            self._values[one] = found
