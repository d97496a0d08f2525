"""Devices and budgets as they are typed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import graphrun as api
from graphrun.devices import (
    Budget,
    DeviceOptions,
    cards_for,
    limits_for,
    memory_budget,
    per_device,
    refuse_wrong_budgets,
    resolved_budgets,
    with_host_copies,
)
from graphrun.errors import InputError
from graphrun.profile.hardware import data_sheet_estimates
from graphrun.profile.processor import cpu_estimate
from graphrun.units import GIB, MIB


def test_each_device_has_its_budget_hardware_and_kind() -> None:
    expected = [DeviceOptions("24G", "rtx4090", "cuda"), DeviceOptions("12G", "rtx3060", "cuda")]
    assert per_device("24G,12G", "rtx4090,rtx3060", "cuda:0,cuda:1") == expected
    assert per_device(["24G", "12G"], ("rtx4090", "rtx3060"), ["cuda", "cuda"]) == expected
    assert per_device("8G, 8G,8G", "rtx4090", "sim") == [DeviceOptions("8G", "rtx4090", "sim")] * 3
    assert per_device("8G") == [DeviceOptions("8G")]
    assert per_device(None, None, "cuda:0") == [DeviceOptions(None, None, "cuda")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("7,5G",), "did you mean 7.5G"),
        (("24G,12G", "rtx4090,rtx3060,rtx3060"), "vram names 2 of 3 devices"),
        (("24G,12G,8G", "rtx4090,rtx3060"), "hardware names 2 of 3 devices"),
        (("24G,12G", None, "cuda:1,cuda:0"), "cuda:1 is number 0"),
        (("24G", None, "cuda:1"), "cuda:1 is number 0"),
        (("24G", None, "cpu,cpu"), "the CPU is one device"),
    ],
)
def test_what_does_not_fit_together_is_refused_with_what_was_meant(
    arguments: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        per_device(*arguments)


def test_devices_of_one_run_are_of_one_kind() -> None:
    with pytest.raises(InputError, match="rtx4090 is a cuda device, sim is a sim device"):
        api.estimate(api.load("flux-tiny"), vram="8G,8G", hardware="rtx4090,sim")


def test_a_comma_in_place_of_a_point_is_refused_on_the_command_line(graphrun: Any) -> None:
    code, _, errors = graphrun("plan", "flux-tiny", "--vram", "7,5G", "--device", "sim")
    assert code == 2
    assert "did you mean 7.5G?" in errors


CPU = cpu_estimate()
CARD = data_sheet_estimates()["rtx4090"]
SIZE_PAIRS = [("4G", 4 * GIB), (4 * GIB, 4 * GIB), ("50%", CPU.capacity_bytes // 2)]


@pytest.mark.parametrize(("size", "nbytes"), SIZE_PAIRS)
def test_a_cpu_has_one_budget(size: str | int, nbytes: int) -> None:
    limits = limits_for(Budget(memory=size), [CPU])
    assert (limits.budget_bytes, limits.ram_bytes) == (nbytes, nbytes)
    assert limits.pinned_bytes is None


def test_auto_is_what_the_process_takes_and_may_still_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphrun.profile.hardware.available_memory", lambda: 2 * GIB)
    assert memory_budget("auto", CPU) == memory_budget(None, CPU) == int(0.95 * 2 * GIB)
    assert limits_for(Budget(), [CPU]).budget_bytes == int(0.95 * 2 * GIB)
    monkeypatch.setattr("graphrun.profile.hardware.available_memory", lambda: 1 << 60)
    assert memory_budget("auto", CPU) == CPU.capacity_bytes


def test_auto_of_a_machine_that_is_not_this_one_is_its_memory_less_a_twentieth() -> None:
    chip = data_sheet_estimates()["m4max-64"]
    assert memory_budget("auto", chip) == int(0.95 * 64 * GIB)
    assert limits_for(Budget(memory="20G"), [chip]).ram_bytes == 20 * GIB


def test_available_memory_decides_on_a_chip_with_one_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA's own figure on a GB10 is without the page cache."""
    chip = data_sheet_estimates()["gb10"]
    monkeypatch.setattr("graphrun.profile.hardware.detect_card", lambda: chip)
    monkeypatch.setattr("graphrun.profile.hardware.available_memory", lambda: 100 * GIB)
    assert memory_budget(None, chip) == int(0.95 * 100 * GIB)
    assert [card.name for card in cards_for(None, "20G", None)] == ["gb10"]


def test_an_attached_pipeline_on_one_memory_has_copies_on_the_host() -> None:
    chip = data_sheet_estimates()["gb10"]
    with pytest.raises(InputError, match="gb10 gets copies of blocks: give vram for"):
        with_host_copies([chip], Budget(memory="20G"))
    assert not with_host_copies([chip], Budget("8G"))[0].unified
    assert with_host_copies([CPU], Budget(memory="8G"))[0].unified


def test_auto_becomes_bytes_once() -> None:
    cpu_budgets = resolved_budgets({"memory": "auto", "runs": 3}, limits_for(Budget(), [CPU]), CPU)
    assert cpu_budgets["memory"] > 0
    assert cpu_budgets["runs"] == 3
    limits = limits_for(Budget("8G"), [CARD])
    assert resolved_budgets({"vram": "8G"}, limits, CARD) == {
        "vram": "8G",
        "ram": limits.ram_bytes,
    }


def test_memory_alone_means_the_cpu() -> None:
    assert [card.device for card in cards_for(None, "8G", None)] == ["cpu"]
    assert [card.device for card in cards_for(None, "8G", "rtx4090")] == ["cuda"]
    assert [card.device for card in cards_for(None, "8G", None, "sim")] == ["sim"]


WRONG_BUDGETS = [
    ({"hardware": "cpu", "vram": "3G"}, "give --memory 3G"),
    ({"hardware": "cpu", "ram": "3G"}, "give --memory 3G"),
    ({"hardware": "cpu", "memory": "2G", "ram": "3G"}, "--ram: a CPU has one pool .* leave it out"),
    ({"memory": "2G", "pinned": "1G"}, "--pinned: a CPU has one pool"),
    ({"hardware": "gb10", "vram": "20G"}, "--vram: gb10 has one pool .* give --memory 20G"),
    ({"hardware": "m4max-64", "ram": "20G"}, "--ram: m4max-64 has one pool .* give --memory 20G"),
    ({"hardware": "rtx4090", "memory": "3G"}, "give --vram 3G and --ram .* add --device cpu"),
    ({"memory": "3G", "vram": "3G"}, "give --vram 3G and --ram"),
    ({"hardware": "arc-b580", "memory": "20G"}, "give --vram 12G and --ram"),
]


@pytest.mark.parametrize(("budgets", "message"), WRONG_BUDGETS)
@pytest.mark.parametrize(
    "call",
    [
        lambda graph, budgets: api.estimate(graph, **budgets),
        lambda graph, budgets: api.Session(graph, **budgets),
        lambda graph, budgets: api.run_many(graph, ["a boat"], **budgets),
    ],
    ids=["estimate", "Session", "run_many"],
)
def test_budgets_of_other_devices_are_refused_in_python(
    call: Any, budgets: dict[str, str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        call(api.load("flux-tiny"), budgets)


def test_a_suggested_vram_is_not_above_the_capacity() -> None:
    card = replace(CARD, capacity_bytes=24564 * MIB)  # 23.988 GiB, as a driver says it
    with pytest.raises(InputError, match="give --vram 23.98G and --ram"):
        refuse_wrong_budgets(card, Budget(memory="32G"))


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        ({"device": "cpu", "vram": "3G"}, "give --memory 3G"),
        ({"device": "cpu", "budget": Budget(ram="3G", memory="2G")}, "--ram: a CPU has one pool"),
        ({"device": "sim", "memory": "3G"}, "give --vram 8G and --ram"),
    ],
)
def test_budgets_of_other_devices_are_refused_by_attach(
    budgets: dict[str, Any], message: str
) -> None:
    import torch

    class Pipeline:
        def __init__(self) -> None:
            self.net, self.device = torch.nn.Linear(2, 2), "cpu"

        def __call__(self) -> Any:
            return self.net(torch.ones(2))

    pipe = Pipeline()
    with pytest.raises(InputError, match=message):
        api.attach(pipe, components={"net": pipe.net}, entries="__call__", **budgets)


COMMANDS = [
    ("plan", "flux-tiny"),
    ("explain", "flux-tiny"),
    ("run", "flux-tiny", "--random-weights"),
    ("run", "flux-tiny", "--random-weights", "--inputs", "inputs.jsonl"),
    ("run", "flux-tiny", "--random-weights", "--enforce"),
    ("serve", "flux-tiny"),
]
WRONG_OPTIONS = [
    (("--device", "cpu", "--vram", "3G"), "give --memory 3G"),
    (("--memory", "2G", "--ram", "3G"), "--ram: a CPU has one pool of memory"),
    (("--device", "sim", "--memory", "3G"), "add --device cpu"),
]


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_budgets_of_other_devices_are_refused_by_commands(
    graphrun: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    options: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("inputs.jsonl").write_text('{"prompt": "a boat"}\n', encoding="utf-8")
    code, text, err = graphrun(*command, *options)
    assert (code, text) == (2, "")
    assert message in " ".join(err.split())
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["inputs.jsonl"]
