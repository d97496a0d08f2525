"""Constant values of meta tensors: which values a dry run may read.

Constant are small literal tensors and results computed from them, counts of masks, and the worst
case of a top-k selection. The rules see operators and tensors only, no components.

    torch.tensor([64, 64])             constant, as are results computed from it (an image's size in
                                       patches)
    mask.sum(dim=1).tolist()           the number of elements, since the mask may be all ones
    text[mask], text[~mask]            every row, and no row
    topk(scores, 2).indices.bincount() a selection that depends on data (experts); worst case: all
                                       tokens select the same two

Where code needs more, the integers and masks among a call's arguments are constant too (`note`):
Qwen-Image 2.1 repeats the tokens of its text by a mask of image slots.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from graphrun.profile.operands import tensors_of

# tensors with more elements are data, not sizes
MAX_ELEMENTS = 64
# the same where a call's arguments are constant: positions of the tokens of a picture
MAX_NOTED_ELEMENTS = 1 << 22

aten = torch.ops.aten
SUMS = frozenset({aten.sum.default, aten.sum.dim_IntList})
COMPLEMENTS = frozenset({aten.bitwise_not.default, aten.logical_not.default})
FILLED = frozenset({aten.scalar_tensor, aten.full, aten.zeros, aten.ones, aten.arange})
VALUE_DEPENDENT = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})


class Storages:
    """Notes about storages, for all views of a tensor; a note ends with its storage."""

    def __init__(self) -> None:
        self._notes: Any = WeakIdKeyDictionary(ref_type=weakref.ref)

    def __setitem__(self, tensor: torch.Tensor, value: Any) -> None:
        self._notes[tensor.untyped_storage()] = value

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage() in self._notes

    def get(self, tensor: torch.Tensor) -> Any:
        return self._notes.get(tensor.untyped_storage())


class ConstantValues:
    """Values on the CPU of meta tensors that have constant values; views stay views."""

    def __init__(self) -> None:
        self._values: Any = WeakTensorKeyDictionary()
        self._topk = Storages()  # indices -> (experts, selected experts per token)
        self._complements = Storages()  # complements of masks, which count as all ones
        self._max_elements = MAX_ELEMENTS

    def note(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Store ``value`` of the meta tensor ``tensor`` if it consists of integers or is a mask."""
        self._max_elements = MAX_NOTED_ELEMENTS
        if tensor.is_meta and _is_whole(value) and value.numel() <= self._max_elements:
            self._values[tensor] = value.to("cpu", copy=True)

    def from_literal(self, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Store the value of ``result``, a tensor from ``torch.tensor``, and return ``result``."""
        if result.is_meta and result.numel() <= self._max_elements:
            self._values[result] = torch.tensor(*args, **{**kwargs, "device": "cpu"})
        return result

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the value of ``tensor`` on the CPU; None if it is not constant."""
        value: torch.Tensor | None = self._values.get(tensor)
        return value

    def content(self, leaf: Any) -> tuple[Any, ...] | None:
        """Return a key that is equal for equal constant values; None if ``leaf`` has none."""
        value = self.value(leaf) if isinstance(leaf, torch.Tensor) else None
        return None if value is None else tuple(value.flatten().tolist())

    def computed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operator whose shape or number depends on constant values.

        NotImplemented for other operators, and where an argument is not constant.
        """
        if VALUE_DEPENDENT.isdisjoint(func.tags):
            return NotImplemented
        if not self._are_constant([*tensors_of((args, [*kwargs.values()]))]):
            return NotImplemented
        value = func(*self._on_cpu(tuple(args)), **self._on_cpu(dict(kwargs)))
        results = tree_map_only(
            torch.Tensor, lambda item: torch.empty_like(item, device="meta"), value
        )
        self._store(results, value)
        return results

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
        if not self._values:
            return
        tensors = [*tensors_of((args, [*kwargs.values()]))]
        is_constant = self._are_constant(tensors) or (
            self._max_elements > MAX_ELEMENTS
            and func._overloadpacket in FILLED
            and _is_whole(result)
            and not tensors
        )
        if is_constant and self._is_small(result):
            self._store(result, func(*self._on_cpu(tuple(args)), **self._on_cpu(dict(kwargs))))
        elif tensors and func._schema.is_mutable:
            self._forget(tensors[0])

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
        value = self.value(index)
        rows = (
            int(value.sum())
            if value is not None
            else 0
            if index in self._complements
            else index.numel()
        )
        positions = torch.empty(rows, index.dim(), dtype=torch.long, device="meta")
        on_new(positions)
        columns = positions.unbind(1)
        if value is not None:
            self._store(columns, value.nonzero(as_tuple=True))
        return columns

    def worst_bincount(self, indices: torch.Tensor) -> torch.Tensor | None:
        """Return the largest possible ``indices.bincount()`` on meta, for top-k indices.

        All tokens select the same experts, which makes the largest single call. The total work is
        the same for every selection. None for other indices.
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

    def _are_constant(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether ``tensors`` have values, at least one as a constant."""
        return any(tensor in self._values for tensor in tensors) and all(
            tensor in self._values or not tensor.is_meta for tensor in tensors
        )

    def _is_small(self, result: Any) -> bool:
        results = result if isinstance(result, (list, tuple)) else (result,)
        return all(
            isinstance(tensor, torch.Tensor)
            and tensor.is_meta
            and tensor.numel() <= self._max_elements
            for tensor in results
        )

    def _on_cpu(self, arguments: Any) -> Any:
        """Return the arguments of an operator with values in place of tensors."""
        values = tree_map_only(
            torch.Tensor, lambda tensor: self._values.get(tensor, tensor), arguments
        )
        return tree_map_only(torch.device, lambda _: torch.device("cpu"), values)

    def _store(self, results: Any, values: Any) -> None:
        for tensor, value in zip(tensors_of((results,)), tensors_of((values,)), strict=True):
            self._values[tensor] = value

    def _forget(self, tensor: torch.Tensor) -> None:
        """Drop the value of ``tensor``, which was overwritten, and of its views."""
        if (value := self.value(tensor)) is None:
            return
        address = value.untyped_storage()._cdata
        for other, other_value in list(self._values.items()):
            if other_value.untyped_storage()._cdata == address:
                del self._values[other]


def _is_whole(value: torch.Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex())
