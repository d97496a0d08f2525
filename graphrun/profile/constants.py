"""Constant values of meta tensors: which values a dry run may read.

Constant are small literal tensors and results computed from them, counts of masks, and the worst
case of a top-k selection. The rules see operators and tensors only, no components.

    torch.tensor([64, 64])             constant, as are results computed from it (an image's size in
                                       patches)
    mask.sum(dim=1).tolist()           the number of elements, since the mask may be all ones
    text[mask], text[~mask]            every row, and no row
    topk(scores, 2).indices.bincount() a selection that depends on data (experts); worst case: all
                                       tokens select the same two
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
        """Return the note about ``tensor``'s storage, None if there is none."""
        return self._notes.get(tensor.untyped_storage())


class ConstantValues:
    """The values of meta tensors with a constant value, as CPU tensors."""

    def __init__(self) -> None:
        self._values: Any = WeakTensorKeyDictionary()
        self._topk = Storages()  # indices -> (experts, selected experts per token)
        self._complements = Storages()  # complements of masks, which count as all ones

    def from_literal(self, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Store the value of ``result``, a tensor from ``torch.tensor``, and return ``result``."""
        if result.is_meta and result.numel() <= MAX_ELEMENTS:
            self._values[result] = torch.tensor(*args, **{**kwargs, "device": "cpu"})
        return result

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the value of ``tensor`` on the CPU, None if it is not constant."""
        value: torch.Tensor | None = self._values.get(tensor)
        return value

    def propagate(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Update the constant values after an operator has returned ``result`` on meta."""
        if func is aten.topk.default:
            self._topk[result[1]] = args[0].shape[args[2] if len(args) > 2 else -1], args[1]
        if func in COMPLEMENTS and result.dtype == torch.bool and args[0] not in self._complements:
            self._complements[result] = True
        if (
            func in SUMS
            and args[0].is_meta
            and args[0] not in self._values
            and not args[0].is_floating_point()
        ):
            if 0 < result.numel() <= MAX_ELEMENTS:
                self._values[result] = torch.full(
                    result.shape,
                    args[0].numel() // result.numel(),
                    dtype=result.dtype,
                    device="cpu",
                )
            return
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if not tensors or not self._values:
            return
        if all(tensor in self._values for tensor in tensors):
            self._compute(func, args, kwargs, result)
        elif tensors[0] in self._values and func._schema.is_mutable:
            del self._values[tensors[0]]

    def index_columns(
        self, index: torch.Tensor | None, on_new: Callable[[torch.Tensor], object]
    ) -> Sequence[torch.Tensor | None]:
        """Return ``index`` as indexing kernels use it.

        A boolean mask becomes the positions of its ones, one column per dimension. A mask counts as
        all ones, the complement of a mask as all zeros. ``on_new`` is called with the tensor of
        positions.
        """
        if index is None or index.dtype != torch.bool:
            return (index,)
        rows = 0 if index in self._complements else index.numel()
        positions = torch.empty(rows, index.dim(), dtype=torch.long, device="meta")
        on_new(positions)
        return positions.unbind(1)

    def worst_bincount(self, indices: torch.Tensor) -> torch.Tensor | None:
        """Return ``indices.bincount()`` on meta with the largest memory.

        None unless ``indices`` come from a top-k selection. All tokens select the same experts,
        which makes the largest single call. The total work is the same for every selection.
        """
        if (topk := self._topk.get(indices)) is None:
            return None
        experts, per_token = topk
        counts = torch.tensor(
            [indices.numel() // per_token] * per_token + [0] * (experts - per_token), device="cpu"
        )
        result = torch.empty_like(counts, device="meta")
        self._values[result] = counts
        return result

    def _compute(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        results = result if isinstance(result, (list, tuple)) else (result,)
        if not all(
            isinstance(tensor, torch.Tensor) and tensor.is_meta and tensor.numel() <= MAX_ELEMENTS
            for tensor in results
        ):
            return
        on_cpu = {
            key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()
        }
        value = func(
            *tree_map_only(torch.Tensor, lambda tensor: self._values[tensor], tuple(args)), **on_cpu
        )
        for tensor, constant in zip(
            results, value if isinstance(value, (list, tuple)) else (value,), strict=True
        ):
            self._values[tensor] = constant
