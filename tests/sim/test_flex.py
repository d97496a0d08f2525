"""Flex attention on the simulated accelerator: the CPU's bits, and memory for its results alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as library

from graphrun import sim
from graphrun.sim import flex

QUERIES, WIDTH = 512, 16


def attended(x: torch.Tensor, spans: torch.Tensor) -> torch.Tensor:
    """Causal attention within spans, whose mask and scores read a tensor of the device."""
    mask = library.create_block_mask(
        lambda b, h, i, j: (i >= j) & (spans[i] == spans[j]),
        None,
        None,
        QUERIES,
        QUERIES,
        device=x.device,
    )
    return library.flex_attention(
        x, x, x, score_mod=lambda score, b, h, i, j: score + spans[i], block_mask=mask
    )


def test_flex_attention_is_the_cpus() -> None:
    x, spans = torch.randn(2, 3, QUERIES, WIDTH), torch.arange(QUERIES) // 200
    want = attended(x, spans)
    with sim.Machine():
        assert torch.equal(attended(x.to("sim"), spans.to("sim")).cpu(), want)


def causal() -> Any:
    return library.create_block_mask(
        lambda b, h, i, j: i >= j, None, None, QUERIES, QUERIES, device="cpu"
    )


def test_flex_attention_takes_its_results_and_the_flops_of_visible_blocks() -> None:
    with sim.Machine() as machine:
        x, mask = torch.randn(1, 2, QUERIES, WIDTH).to("sim"), causal().to("sim")
        baseline, charged = machine.allocated_bytes, machine.charge_flops
        machine.reset_peak()
        result = library.flex_attention(x, x, x, block_mask=mask)
        assert machine.peak_bytes - baseline == result.nbytes + 2 * 4 * 2 * QUERIES
        assert machine.allocated_bytes - baseline == result.nbytes
        # 10 of 16 blocks of 128 queries and 128 keys
        flops = 2 * 2 * QUERIES**2 * 2 * WIDTH
        assert machine.charge_flops - charged == flops * 10 // 16


def test_without_a_machine_flex_attention_is_pytorchs() -> None:
    with sim.Machine():
        pass
    x = torch.empty(1, 2, QUERIES, WIDTH, device="meta")
    with pytest.raises(ValueError, match="only supported on"):
        library.flex_attention(x, x, x)


def test_pytorch_has_its_own_functions_back_when_the_last_machine_leaves() -> None:
    names = ("_validate_device", "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG")
    originals = [getattr(library, name) for name in names]
    ready, end = threading.Event(), threading.Event()

    def other() -> None:
        with sim.Machine():
            ready.set()
            end.wait()

    thread = threading.Thread(target=other)
    thread.start()
    ready.wait()
    with sim.Machine():
        assert library._validate_device is not originals[0]
    assert library._validate_device is not originals[0]
    end.set()
    thread.join()
    assert [getattr(library, name) for name in names] == originals


def test_a_mask_larger_than_the_sample_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "SAMPLE_ELEMENTS", 1 << 10)

    def causal(b: Any, h: Any, query: Any, key: Any) -> Any:
        return query >= key

    assert 0 < flex.visible_share((None, 128, 128, causal), 512, 512) < 1
