"""Flex attention in a dry run: one operator, whose memory depends on whether it is compiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as library

from graphrun import sim
from graphrun.errors import GraphrunError
from graphrun.profile.dry_run import Prober
from graphrun.profile.hardware import hardware
from graphrun.profile.phase_memory import phase_memories_of
from graphrun.profile.recording import Call, Recording, StageEnd

TOKENS, HEADS, WIDTH = 512, 2, 16


class Windowed(nn.Module):
    """Like the blocks of LTX-2.5's decoder: each token attends to the 64 tokens before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(HEADS * WIDTH, HEADS * WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = library.create_block_mask(
            lambda b, h, i, j: (i >= j) & (i - j < 64),
            None,
            None,
            len(x),
            len(x),
            device=x.device,
        )
        query = self.layer(x).view(1, len(x), HEADS, WIDTH).transpose(1, 2)
        return library.flex_attention(query, query, query, block_mask=mask)  # type: ignore[return-value]


def traced(module: nn.Module) -> tuple[torch.Tensor, Call]:
    prober = Prober({"windowed": module.to("meta")})
    with sim.DryMachine(), prober.interceptor:
        result = prober.interceptor.modules["windowed"](
            torch.zeros(TOKENS, HEADS * WIDTH, device=sim.PLANNED)
        )
    call = prober.recording.items[-1]
    assert isinstance(call, Call)
    return result, call


def test_a_dry_run_takes_the_bytes_and_strides_of_the_run() -> None:
    result, call = traced(Windowed())
    with sim.Machine() as machine:
        module, x = Windowed().to("sim"), torch.zeros(TOKENS, HEADS * WIDTH).to("sim")
        baseline = machine.allocated_bytes
        machine.reset_peak()
        expected = module(x)
        assert call.peak_bytes == machine.peak_bytes - baseline
    assert (result.shape, result.stride()) == (expected.shape, expected.stride())


def test_flops_are_those_of_the_blocks_that_the_mask_leaves() -> None:
    _, call = traced(Windowed())
    (kernel,) = (kernel for kernel in call.kernels if kernel.kind == "attention")
    # of 16 blocks of 128 queries and 128 keys, the 4 on the diagonal and the 3 before it
    assert kernel.flops == 2 * HEADS * TOKENS**2 * 2 * WIDTH * 7 / 16


def test_scores_are_scratch_unless_a_module_is_compiled() -> None:
    def scratch(module: nn.Module) -> int:
        return max(event.nbytes for event in traced(module)[1].events if event.scratch)

    assert scratch(Windowed()) == 12 * HEADS * TOKENS**2
    module = nn.Sequential(Windowed())
    module[0]._compiled_call_impl = module[0]._call_impl
    assert scratch(module) == 0


def test_a_graph_that_may_compile_the_blocks_has_no_scores() -> None:
    recording = Recording([traced(Windowed())[1], StageEnd("attend")])

    def first_bytes(recording: Recording) -> int:
        return phase_memories_of(recording, [(0, 1)], hardware("rtx4090"))[0].first_bytes

    assert first_bytes(recording) > 12 * HEADS * TOKENS**2
    assert first_bytes(recording.as_compiled({"windowed"})) < 12 * HEADS * TOKENS**2


def test_other_operators_that_take_functions_are_refused_by_name_and_line() -> None:
    class Chosen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))  # type: ignore[no-any-return]

    with pytest.raises(
        GraphrunError, match=r"^Chosen calls .*\.cond \(test_flex_attention\.py:\d+\)"
    ):
        traced(Chosen())
