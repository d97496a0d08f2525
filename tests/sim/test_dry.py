"""The planned device of dry runs: simulated tensors without a registered backend."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tqdm.auto import tqdm

from graphrun.diffusers_.call_arguments import copy_for_dry_run
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


def test_unified_memory_is_the_hosts_too() -> None:
    def product() -> torch.Tensor:
        return torch.nn.functional.linear(torch.ones(1, 3, device=PLANNED), torch.ones(2, 3))

    with DryMachine() as machine:
        with pytest.raises(RuntimeError, match="found at least two devices"):
            product()
        with pytest.raises(TypeError, match="numpy"):
            torch.ones(3, device=PLANNED).numpy()
        machine.unified = True
        assert (product().device, product().tolist()) == (PLANNED, [[3.0, 3.0]])
        assert torch.cat([torch.ones(1), torch.zeros(1, device=PLANNED)]).tolist() == [1.0, 0.0]
        tensor = torch.ones(3, device=PLANNED)
        assert tensor.numpy().tolist() == np.asarray(tensor).tolist() == [1.0] * 3


def test_progress_bars_show_outside_dry_runs_only(capsys: pytest.CaptureFixture[str]) -> None:
    """Also those that a pipeline's code makes without asking its settings."""
    with DryMachine(), ThreadPoolExecutor() as pool:
        list(tqdm(range(2), desc="dry"))
        pool.submit(lambda: list(tqdm(range(2), desc="elsewhere"))).result()
    list(tqdm(range(2), desc="plain"))
    text = capsys.readouterr().err
    assert [word in text for word in ("dry", "elsewhere", "plain")] == [False, True, True]


class GeneratorOnCard(torch.Generator):
    """A generator that reports a card's device, as one made on a card does."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


def test_a_generator_of_a_card_draws_on_the_planned_device() -> None:
    """HeliosModularPipeline draws on the device itself: with a generator of the host it fails on a
    card, with one of the card it runs."""
    copies = copy_for_dry_run([GeneratorOnCard("cpu"), torch.Generator()], PLANNED, {})
    card_generator, host_generator = copies
    assert (card_generator.device, host_generator.device.type) == (PLANNED, "cpu")
    with DryMachine() as machine:
        tensors = [
            torch.rand(1, device=PLANNED, generator=card_generator),
            torch.ones(3, device=PLANNED).normal_(generator=card_generator),
        ]
        machine.hollow_bytes = 1 << 16
        tensors.append(torch.randn(1 << 16, device=PLANNED, generator=card_generator))
        assert {tensor.device for tensor in tensors} == {PLANNED}
        with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
            torch.rand(1, device=PLANNED, generator=host_generator)
