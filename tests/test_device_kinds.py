"""The table of kinds of devices, and kinds that other packages add."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphrun import device_kinds
from graphrun.device_kinds import DeviceKind, kind_called
from graphrun.devices import hardware_for
from graphrun.errors import InputError
from graphrun.profile import hardware
from graphrun.profile.hardware import data_sheet_estimates
from graphrun.profile.processor import cpu_estimate

KIND = """
from graphrun.device_kinds import DeviceKind
from graphrun.profile.hardware import data_sheet_estimates
from dataclasses import replace

KIND = DeviceKind("stranger", opener="stranger:opened", detector="stranger:detected")
OTHER = "not a kind"

def detected(kind):
    return replace(data_sheet_estimates()["rtx3060"], name="stranger-1", device=kind.name)

def opened(hardware, number=0, first_device=None):
    return f"{hardware.name} number {number}"
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Installs a package whose entry point has this value."""

    def install(value: str) -> None:
        (tmp_path / "stranger.py").write_text(KIND, encoding="utf-8")
        folder = tmp_path / "graphrun_stranger-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Name: graphrun-stranger\nVersion: 1\n", encoding="utf-8")
        (folder / "entry_points.txt").write_text(
            f"[{device_kinds.ENTRY_POINTS}]\nstranger = {value}\ncuda = {value}\n", encoding="utf-8"
        )
        monkeypatch.syspath_prepend(tmp_path)
        for cached in (device_kinds._added, kind_called):
            cached.cache_clear()

    yield install
    monkeypatch.undo()
    for cached in (device_kinds._added, kind_called):
        cached.cache_clear()


def test_another_package_adds_a_kind_by_an_entry_point(installed: Any) -> None:
    installed("stranger:KIND")
    assert device_kinds.names()[-1] == "stranger"
    card = hardware_for(None, "stranger", to_run=True)
    assert (card.name, card.device) == ("stranger-1", "stranger")
    from graphrun.runtime.devices.open import open_hardware

    assert open_hardware(card, 1) == "stranger-1 number 1"


def test_a_kind_of_graphrun_is_not_replaced(installed: Any) -> None:
    installed("stranger:KIND")
    assert kind_called("cuda") is device_kinds.built_in()[0]
    assert list(device_kinds.names()).count("cuda") == 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("stranger:OTHER", "has to be a DeviceKind with the name 'stranger'"),
        ("stranger:MISSING", "does not load"),
        ("no_such_module:KIND", "does not load"),
    ],
)
def test_an_entry_point_that_is_no_kind_is_refused(
    installed: Any, value: str, message: str
) -> None:
    installed(value)
    with pytest.raises(InputError, match=message):
        hardware_for(None, "stranger")


def test_a_name_that_neither_the_table_nor_pytorch_has_is_refused() -> None:
    with pytest.raises(InputError, match="device 'tpu' is not known; use cuda, xpu, mps, cpu"):
        hardware_for(None, "tpu")


def test_a_kind_without_a_device_is_refused_to_run_and_planned_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hardware, "detect", lambda kind=None: None)
    with pytest.raises(InputError, match="no XPU device found to run on"):
        hardware_for(None, "xpu", to_run=True)
    assert hardware_for(None, "xpu").device == "xpu"


def test_the_table_alone_says_which_kinds_share_memory() -> None:
    card = data_sheet_estimates()["rtx4090"]
    assert cpu_estimate().unified
    assert not card.unified
    assert replace(card, unified=True).unified
    assert data_sheet_estimates()["m4max-64"].unified
    assert [kind.name for kind in device_kinds.built_in() if kind.unified] == ["mps", "cpu"]


def test_a_kind_of_which_nothing_is_known_promises_little() -> None:
    kind = DeviceKind("npu")
    assert (kind.label, kind.in_clusters, kind.overlap) == ("npu device", False, "proved")


def test_the_table_is_read_without_torch() -> None:
    code = (
        "import sys, graphrun.device_kinds as kinds; kinds.names(); kinds.kind_called('npu');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
