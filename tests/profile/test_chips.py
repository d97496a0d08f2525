"""Chips with one memory for processor and GPU, and how a device finds its data sheet."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from graphrun.device_kinds import built_in, kind_called
from graphrun.errors import InputError
from graphrun.profile import chips, hardware, hardware_profiles
from graphrun.units import GIB


@pytest.mark.parametrize(("name", "chip", "gib"), list(chips.names()))
def test_estimates_are_within_the_data_sheet(name: str, chip: chips.Chip, gib: int) -> None:
    card = hardware.hardware(name)
    assert card.unified
    assert card.capacity_bytes == gib * GIB
    assert 0.3 * chip.tensor * 1e12 < card.flops_per_second <= chip.tensor * 1e12
    assert card.memory_bytes_per_second <= chip.memory * 1e9
    assert card.h2d_bytes_per_second <= chip.memory / 2 * 1e9
    assert card.context_bytes > hardware.PROCESS_BYTES
    assert card.serial_copies == (chip.device == "mps")


def test_an_unknown_size_is_refused_with_those_that_exist() -> None:
    with pytest.raises(InputError, match=r"did you mean 'm4max-64'\? .*m4max-48/64/128, "):
        hardware.hardware("m4max-63")


@pytest.mark.parametrize(
    ("reported", "kind", "name"),
    [
        ("NVIDIA GeForce RTX 4090", "cuda", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 D", "cuda", "rtx4090d"),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", "cuda", "rtx5090laptop"),
        ("NVIDIA RTX 6000 Ada Generation", "cuda", "6000ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "cuda", "pro6000"),
        ("NVIDIA L20", "cuda", "l20"),
        ("NVIDIA A100-SXM4-40GB", "cuda", "a100"),
        ("NVIDIA GB10", "cuda", "gb10"),
        ("NVIDIA Thor", "cuda", "thor-128"),
        ("AMD Radeon RX 7900 XTX gfx1100", "cuda", "rx7900xtx"),
        ("AMD Radeon Graphics gfx1151:sramecc+", "cuda", "strixhalo-128"),
        ("Intel(R) Arc(TM) B580 Graphics", "xpu", "arc-b580"),
        ("M4 Max", "mps", "m4max-128"),
        ("M4", "mps", "m4-16"),
    ],
)
def test_a_device_has_the_rates_of_its_data_sheet(reported: str, kind: str, name: str) -> None:
    estimate = hardware.hardware(name)
    card, _ = hardware._sheet_of(reported, kind_called(kind))
    assert card.flops_per_second == estimate.flops_per_second
    assert card.device == kind


@pytest.mark.parametrize("is_integrated", [False, True])
def test_a_gpu_in_the_processors_chip_shares_its_memory(
    is_integrated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(
        name="NVIDIA GB10", total_memory=100 * GIB, major=12, is_integrated=is_integrated
    )
    monkeypatch.setattr(hardware, "has_signs", lambda kind: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    card = hardware.detect_card()
    assert card is not None
    assert card.unified == is_integrated
    assert (card.capacity_bytes == 100 * GIB) != is_integrated


def test_signs_of_devices_decide_whether_torch_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mps = next(kind for kind in built_in() if kind.platforms)
    assert hardware.has_signs(mps) == (sys.platform == "darwin")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert hardware.has_signs(mps)
    monkeypatch.setattr(sys, "platform", "linux")
    assert not hardware.has_signs(mps)


def test_a_stored_profile_says_that_memory_is_shared(tmp_path: Path) -> None:
    card = replace(hardware.hardware("gb10"), name="desk", basis="measured")
    path = hardware_profiles.keep(tmp_path, card, "gb10", {})
    assert json.loads(path.read_text(encoding="utf-8"))["hardware"]["unified"] is True
    assert hardware_profiles.hardware("desk", tmp_path) == card
