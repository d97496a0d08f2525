"""Tensors that modules memoize go when they are told to forget."""

from __future__ import annotations

import functools
import gc
import weakref

import torch
from torch import nn

from graphrun.components.memos import forget


def test_what_a_method_memoized_is_gone_wrapped_or_not() -> None:
    def wrapped(function: object) -> object:
        cached = functools.lru_cache(function)  # type: ignore[arg-type]

        @functools.wraps(cached)
        def call(*args: object) -> object:
            return cached(*args)

        return call

    class Rotary(nn.Module):
        @functools.lru_cache  # noqa: B019  (what diffusers does)
        def plain(self) -> torch.Tensor:
            return torch.zeros(8)

        @wrapped
        def again(self) -> torch.Tensor:
            return torch.ones(8)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary = Rotary()

    module = Outer()
    kept = [weakref.ref(module.rotary.plain()), weakref.ref(module.rotary.again())]
    assert all(reference() is not None for reference in kept)
    forget([module])
    gc.collect()
    assert [reference() for reference in kept] == [None, None]
