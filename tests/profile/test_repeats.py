"""Repeated calls inside a component are run once, and the record equals that of running each."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from graphrun.profile.fused_kernels import FusedKernels
from graphrun.profile.recorder import Recorder
from graphrun.profile.recording import Kernel
from graphrun.profile.repeats import Repeats


class Block(nn.Module):
    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = scale
        self.runs = torch.zeros(1)  # no attribute that is compared

    def forward(self, x: torch.Tensor, storage: list[torch.Tensor] | None = None) -> torch.Tensor:
        self.runs += 1
        if storage is not None:
            storage.append(x.clone())
        return x + self.linear(x * self.scale)


class Net(nn.Module):
    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(8, 8)
        self.blends = torch.zeros(1)

    def blend_v(self, a: torch.Tensor, b: torch.Tensor, extent: int) -> torch.Tensor:
        self.blends += 1
        for row in range(extent):
            b[row] = a[row] * 0.5 + b[row] * 0.5
        return b

    def forward(self, x: torch.Tensor, storage: list[torch.Tensor] | None = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, storage)
        tiles = [self.head(tile) for tile in x.split(4)]
        return torch.cat([self.blend_v(a, b, 2) for a, b in zip(tiles, tiles[1:], strict=False)])


def record(net: Net, *, repeats: bool, storage: list[torch.Tensor] | None = None) -> Recorder:
    recorder = Recorder(net, [f"blocks.{n}" for n in range(len(net.blocks))])
    x = torch.empty(16, 8, device="meta")
    recorder.ignore([x])
    context: Any = Repeats(net, recorder) if repeats else contextlib.nullcontext()
    with torch.no_grad(), context, FusedKernels(recorder), recorder:
        result = net(x, storage)
    del result
    recorder.close()
    return recorder


def contents(recorder: Recorder) -> Any:
    kernels: dict[str, list[Kernel]] = {}
    for path, numbers in recorder.record.work:
        if numbers:  # entries without kernels only keep the order
            kernels.setdefault(path, []).extend(
                recorder.record.kernels[number] for number in numbers
            )
    # hops: test_live_tensors.py
    return (
        replace(recorder.record, work=[], kernels=[], hops=[]),
        recorder.record.peak_bytes,
        kernels,
    )


@pytest.fixture
def net() -> Net:
    return Net([Block() for _ in range(6)]).to("meta")


def test_the_record_equals_that_of_running_every_call(net: Net) -> None:
    assert contents(record(net, repeats=True)) == contents(record(net, repeats=False))


def runs(net: Net) -> list[int]:
    return [int(block.runs) for block in net.blocks]


def test_one_of_several_equal_blocks_is_run(net: Net) -> None:
    record(net, repeats=True)
    assert runs(net) == [1, 0, 0, 0, 0, 0]
    assert int(net.blends) == 1


def test_a_block_with_another_attribute_is_not_equal() -> None:
    net = Net([Block(), Block(3.0), Block()]).to("meta")
    record(net, repeats=True)
    assert runs(net) == [1, 1, 0]


def test_a_block_with_a_side_effect_is_always_run(net: Net) -> None:
    storage: list[torch.Tensor] = []
    record(net, repeats=True, storage=storage)
    assert runs(net) == [1] * 6
    assert len(storage) == 6


def test_a_hook_of_generated_code_runs_in_every_call(net: Net) -> None:
    namespace: dict[str, Any] = {"__builtins__": {}}
    exec("def count(module, args, output): calls.append(1)", namespace)
    namespace["calls"] = hook_calls = list[int]()
    for block in net.blocks:
        block.register_forward_hook(namespace["count"])
    record(net, repeats=True)
    assert (namespace["count"].__module__, len(hook_calls)) == (None, 6)


def test_a_block_with_hooks_is_always_run(net: Net) -> None:
    hooked: list[int] = []
    for block in net.blocks:
        block.register_forward_hook(lambda *_: hooked.append(1))
    record(net, repeats=True)
    assert runs(net) == [1] * 6
    assert len(hooked) == 6


def test_classes_are_restored_afterwards(net: Net) -> None:
    record(net, repeats=True)
    assert [type(module) for module in (net, net.blocks[0], net.head)] == [Net, Block, nn.Linear]


class Swapping(nn.Module):
    """Replaces the tensor in its list argument by a view of its table, at the same address if
    possible."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = torch.zeros(1)
        self.table = nn.Parameter(torch.empty(8, 8, device="meta"))

    def forward(self, storage: list[torch.Tensor]) -> torch.Tensor:
        self.runs += 1
        address = id(storage.pop())
        views = [self.table.detach()]
        while id(views[-1]) != address and len(views) < 1000:
            views.append(self.table.detach())
        storage.append(views[-1])
        return torch.empty(8, 8, device="meta")


def test_a_block_that_replaces_an_element_of_a_list_argument_is_always_run() -> None:
    net = nn.Module()
    net.blocks = nn.ModuleList([Swapping() for _ in range(6)])
    recorder = Recorder(net, [])
    with torch.no_grad(), Repeats(net, recorder), recorder:
        for block in net.blocks:
            block([torch.empty(8, 8, device="meta")])
    recorder.close()
    assert [int(block.runs) for block in net.blocks] == [1] * 6
