"""Cached results of operators on meta equal the operators' own: shapes, strides, dtypes,
storages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphrun.modules.build import default_dtype
from graphrun.profile.meta_ops import _cached_result, on_meta

aten = torch.ops.aten


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def described_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device.type


def described(result: Any, arguments: list[torch.Tensor]) -> list[Any]:
    """Everything that a record depends on in an operator's results, with the argument or result
    whose storage each one has."""
    outs = [result] if isinstance(result, torch.Tensor) else list(result)
    storages = [tensor.untyped_storage() for tensor in (*arguments, *outs)]
    addresses = [storage._cdata for storage in storages]
    return [type(result)] + [
        (
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.device.type,
            storage.nbytes(),
            addresses.index(storage._cdata),
        )
        for tensor, storage in zip(outs, storages[len(arguments) :], strict=True)
    ]


CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "product": lambda: (aten.addmm.default, empty(6), empty(2, 4), empty(4, 6)),
    "channels last": lambda: (
        aten.relu.default,
        empty(1, 4, 8, 8).to(memory_format=torch.channels_last),
    ),
    "channels first": lambda: (aten.relu.default, empty(1, 4, 8, 8)),
    "whole number": lambda: (aten.add.Tensor, empty(3, dtype=torch.long), 1),
    "number": lambda: (aten.add.Tensor, empty(3, dtype=torch.long), 1.0),
    "truth": lambda: (aten.add.Tensor, empty(3, dtype=torch.bool), True),
    "truth and number": lambda: (aten.add.Tensor, empty(3, dtype=torch.bool), 1),
    "three results": lambda: (
        aten.native_group_norm.default,
        empty(1, 4, 8),
        empty(4),
        empty(4),
        1,
        4,
        8,
        2,
        1e-5,
    ),
    "a list": lambda: (aten.cat.default, [empty(1, 3), empty(2, 3)]),
    "spread": lambda: (aten.mul.Tensor, empty(4, 1).expand(4, 5), empty(5)),
    "written": lambda: (aten.add_.Tensor, empty(3), 1.0),
    "a view": lambda: (aten.transpose.int, empty(3, 4), 0, 1),
    "a view that says it is none": lambda: (aten._unsafe_view.default, empty(3, 4), [12]),
    "parts of one": lambda: (aten.split.Tensor, empty(6, 2), 2),
}


@pytest.mark.parametrize("make_call", CALLS.values(), ids=CALLS)
def test_a_cached_result_equals_the_operator_s(make_call: Callable[[], tuple[Any, ...]]) -> None:
    for _ in range(3):
        func, *args = make_call()
        arguments = [
            tensor
            for arg in args
            for tensor in (arg if isinstance(arg, list) else [arg])
            if isinstance(tensor, torch.Tensor)
        ]
        assert described(on_meta(func, args, {}), arguments) == described(func(*args), arguments)


def test_equal_numbers_of_different_types_are_distinct() -> None:
    count = empty(3, dtype=torch.long)
    assert [on_meta(aten.mul.Tensor, (count, factor), {}).dtype for factor in (1, 1.0, True)] == [
        torch.long,
        torch.float32,
        torch.long,
    ]


def test_results_of_integers_depend_on_the_default_dtype() -> None:
    count = empty(3, dtype=torch.long)
    assert on_meta(aten.div.Tensor, (count, 2), {}).dtype == torch.float32
    with default_dtype(torch.bfloat16):
        assert on_meta(aten.div.Tensor, (count, 2), {}).dtype == torch.bfloat16


def test_results_are_new_tensors_and_real_values_are_computed() -> None:
    x = empty(3)
    first, second = (on_meta(aten.mul.Tensor, (x, 2.0), {}) for _ in range(2))
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    assert on_meta(aten.mul.Tensor, (torch.ones(2), 3.0), {}).tolist() == [3.0, 3.0]
    with pytest.raises(RuntimeError, match="broadcast"):
        on_meta(aten.mul.Tensor, (empty(3), empty(4)), {})


def test_the_second_call_is_a_cache_hit() -> None:
    for is_cached in (False, True):
        hits = _cached_result.cache_info().hits
        on_meta(
            aten.native_group_norm.default,
            (empty(1, 6, 11), empty(6), empty(6), 1, 6, 11, 3, 1e-5),
            {},
        )
        assert _cached_result.cache_info().hits == hits + is_cached
