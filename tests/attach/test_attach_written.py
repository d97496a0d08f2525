"""`attach` on programs whose modules write to their buffers in a call: caches, counts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import graphrun
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.sim import Machine

WIDTH, BLOCKS = 64, 6


class Counting(nn.Module):
    """A block that counts its calls, in place or with a new tensor."""

    def __init__(self, is_in_place: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.register_buffer("calls", torch.zeros(()))
        self.is_in_place = is_in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        return x + self.layers(x) / self.calls


class Program:
    def __init__(self, is_in_place: bool) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(*(Counting(is_in_place) for _ in range(BLOCKS)))
        self.device = torch.device("cpu")

    def generate(self, seed: int) -> torch.Tensor:
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed)).to(self.device)
        for _ in range(3):
            x = self.net(x)
        return x

    @property
    def counts(self) -> list[float]:
        return [block.calls.item() for block in self.net]


@torch.no_grad()
@pytest.mark.parametrize("share", [2.0, 0.6], ids=["resident", "streamed"])
@pytest.mark.parametrize("is_in_place", [True, False], ids=["in place", "new tensor"])
def test_what_a_module_writes_to_its_buffers_lasts(is_in_place: bool, share: float) -> None:
    program = Program(is_in_place)
    plain = copy.deepcopy(program)
    vram = int(share * sum(tensor.nbytes for tensor in program.net.parameters()))
    attachment: Any = graphrun.attach(
        program,
        components={"net": program.net},
        entries=["generate"],
        vram=vram,
        device=SimulatedDevice(Machine()),
    )
    for number in range(1, 4):
        assert torch.equal(program.generate(number).cpu(), plain.generate(number))
        assert program.counts == plain.counts == [3.0 * number] * BLOCKS
    for block in (*program.net, *plain.net):
        block.calls.zero_()  # between calls
    assert torch.equal(program.generate(9).cpu(), plain.generate(9))
    attachment.detach()
    assert program.counts == [3.0] * BLOCKS
