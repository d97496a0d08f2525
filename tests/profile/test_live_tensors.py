"""What passes between the blocks of a call, and between them and other code, is read off a dry
run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphrun.model.problem import LiveTensor
from graphrun.profile.fused_kernels import FusedKernels
from graphrun.profile.recorder import Recorder
from graphrun.profile.repeats import Repeats
from graphrun.profile.uses import live_tensors_of

HIDDEN, TEXT, TABLE = 16 * 8 * 4, 4 * 8 * 4, 8 * 4  # bytes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, text: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x * table) + text.sum()


class Stage(nn.Module):
    """Blocks one after another, between other code."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.output_layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, text: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        hidden = self.output_layer(x)
        for block in self.blocks:
            hidden = block(hidden, text, table)
        return x + self.output_layer(hidden)


class Net(nn.Module):
    """Two equal stages, as a UNet's; ``loop``: other code instead that calls the blocks of the
    first."""

    def __init__(self, loop: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage(2) for _ in range(1 if loop else 2))
        self.loop = loop

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> Any:
        table = torch.ones(8, device=x.device)
        if self.loop is not None:
            return self.loop(self.stages[0].blocks, x, text, table)
        for stage in self.stages:
            x = stage(x, text, table)
        return x


def recorded(net: Net, *, repeats: bool = True) -> tuple[LiveTensor, ...]:
    paths = [f"stages.{n}.blocks.{i}" for n in range(len(net.stages)) for i in range(2)]
    recorder = Recorder(net.to("meta"), paths)
    arguments = torch.empty(16, 8, device="meta"), torch.empty(4, 8, device="meta")
    recorder.ignore(arguments)
    context: Any = Repeats(net, recorder) if repeats else contextlib.nullcontext()
    with torch.no_grad(), context, FusedKernels(recorder), recorder:
        result = net(*arguments)
        recorder.returns(result)
    del result
    recorder.close()
    return live_tensors_of(recorder.record, {path: n for n, path in enumerate(paths, 1)})


@pytest.mark.parametrize("repeats", [True, False])
def test_code_between_blocks_reads_what_they_make(repeats: bool) -> None:
    assert recorded(Net(), repeats=repeats) == (
        LiveTensor(HIDDEN, 0, (1,)),
        LiveTensor(TEXT, 0, (1, 2, 3, 4), is_input=True),
        LiveTensor(TABLE, 0, (1, 2, 3, 4)),
        LiveTensor(HIDDEN, 1, (2,)),
        LiveTensor(HIDDEN, 2, (0,)),
        LiveTensor(HIDDEN, 0, (3,)),
        LiveTensor(HIDDEN, 3, (4,)),
        LiveTensor(HIDDEN, 4, (0,)),
    )


def odd(loop: Callable[..., Any]) -> list[tuple[int, int, tuple[int, ...]]]:
    return [tensor[:3] for tensor in recorded(Net(loop)) if tensor.nbytes == HIDDEN]


def test_what_other_code_may_see_is_not_left_to_the_next_block() -> None:
    def kept(blocks: Any, x: torch.Tensor, text: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        first = blocks[0](x, text, table)
        return blocks[1](first, text, table) + first

    def moved(
        blocks: Any, x: torch.Tensor, text: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        first = blocks[0](x, text, table)
        return blocks[1](first, torch.zeros(1, device=first.device), table)

    assert odd(kept) == odd(moved) == [(HIDDEN, 0, (1,)), (HIDDEN, 1, (0, 2)), (HIDDEN, 2, (0,))]


def test_a_view_of_what_a_block_made_is_made_by_other_code() -> None:
    def viewed(
        blocks: Any, x: torch.Tensor, text: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        return blocks[1](blocks[0](x, text, table)[:], text, table)

    assert odd(viewed) == [
        (HIDDEN, 0, (1,)),
        (HIDDEN, 1, (0,)),
        (HIDDEN, 0, (2,)),
        (HIDDEN, 2, (0,)),
    ]


def written(blocks: Any, x: torch.Tensor, text: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    first = blocks[0](x, text, table)
    first += 1
    return blocks[1](first, text, table)


def returned(
    blocks: Any, x: torch.Tensor, text: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    first = blocks[0](x, text, table)
    return first, blocks[1](first, text, table)


def once(blocks: Any, x: torch.Tensor, text: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return blocks[0](x, text, table)


def again(blocks: Any, x: torch.Tensor, text: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return blocks[1](blocks[0](blocks[0](x, text, table), text, table), text, table)


@pytest.mark.parametrize("loop", [written, returned, once, again])
def test_calls_that_cannot_be_split(loop: Callable[..., Any]) -> None:
    assert recorded(Net(loop)) == ()
