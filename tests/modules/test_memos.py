"""Tensors that modules cache are freed by `forget`."""

from __future__ import annotations

import functools
import gc
import weakref

import torch
from torch import nn

from graphrun import sim
from graphrun.modules.memos import forget, memos


def test_cached_results_of_methods_are_freed_wrapped_or_not() -> None:
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
    references = [weakref.ref(module.rotary.plain()), weakref.ref(module.rotary.again())]
    assert all(reference() is not None for reference in references)
    forget({"": module})
    gc.collect()
    assert [reference() for reference in references] == [None, None]


class Tables:
    """Like the object in which diffusers' Z-Image keeps its rotary frequencies: neither a module
    nor a cached method."""

    __module__ = "diffusers.models.transformers.some"

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] | None = None
        self.first = [torch.arange(4.0)]

    def to(self, device: torch.device) -> None:
        self.buffers = [torch.arange(4.0).to(device), torch.arange(8.0).to(device)]
        self.first = [table.to(device) for table in self.first]


def test_tables_of_a_secondary_object_are_restored() -> None:
    module = nn.Module()
    module.rotary = Tables()
    with sim.Machine() as machine:
        caches = memos({"": module})
        for _ in range(2):
            module.rotary.to(sim.device)
            assert machine.allocated_bytes == 3 * 512
            for memo in caches:
                memo.cache_clear()
            assert machine.allocated_bytes == 0
        assert module.rotary.buffers is None
        assert [table.tolist() for table in module.rotary.first] == [[0.0, 1.0, 2.0, 3.0]]
        module.rotary.to(sim.device)
        forget({"": module})  # called after the tables were created: they move to the host
        assert machine.allocated_bytes == 0
        assert module.rotary.buffers[1].device.type == "cpu"
