"""Several devices as they are typed."""

from __future__ import annotations

from typing import Any

import pytest

import graphrun as api
from graphrun.errors import InputError
from graphrun.profile.several import DeviceOptions, per_device


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
