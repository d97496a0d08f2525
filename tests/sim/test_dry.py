"""The planned device of dry runs: simulated tensors without a registered backend."""

from __future__ import annotations

import torch

from graphrun.sim import PLANNED, DryMachine


def test_a_hollow_dry_run_creates_large_tensors_without_computing_them() -> None:
    """Random numbers show it: they are taken from PyTorch's generator, which then changes."""

    def is_computed(elements: int) -> bool:
        state = torch.get_rng_state()
        tensor = torch.randn(elements, device=PLANNED)
        assert (tensor.shape, tensor.device) == ((elements,), PLANNED)
        return not torch.equal(torch.get_rng_state(), state)

    with DryMachine() as machine:
        assert is_computed(1 << 16)
        machine.hollow_bytes = 1 << 16
        assert not is_computed(1 << 16)
        assert is_computed(1 << 14)
        small = torch.zeros(4, device=PLANNED)
        large = small.new_zeros(1 << 16)
        assert (large.device, machine.allocated_bytes) == (PLANNED, 512 + (1 << 18))
        assert small.new_ones(1 << 16, device="cpu").sum() == 1 << 16
