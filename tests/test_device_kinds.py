"""The table of kinds of devices, and kinds that other packages add."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from graphrun import device_kinds
from graphrun.device_kinds import DeviceKind
from graphrun.devices import hardware_for
from graphrun.errors import InputError
from graphrun.profile import hardware
from graphrun.profile.calibrate import calibrate, measure_and_keep
from graphrun.profile.hardware import data_sheet_estimates
from graphrun.profile.processor import cpu_estimate


def test_a_name_that_neither_the_table_nor_pytorch_has_is_refused() -> None:
    with pytest.raises(InputError, match="device 'tpu' is not known; use cuda, xpu, mps, cpu"):
        hardware_for(None, "tpu")


@pytest.mark.parametrize("kind", ["xpu", "mps", "npu"])
def test_a_kind_that_cannot_be_calibrated_is_refused(kind: str, tmp_path: Path) -> None:
    refusal = f"device '{kind}' cannot be calibrated; use cuda, cpu, sim. Plans for others use data"
    with pytest.raises(InputError, match=refusal):
        calibrate(kind, tmp_path)
    with pytest.raises(InputError, match=refusal):
        measure_and_keep(kind, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_kind_without_a_device_is_refused_to_run_and_planned_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hardware, "detect", lambda kind=None: None)
    with pytest.raises(
        InputError, match="no XPU device found to run on: graphrun doctor shows why; or"
    ):
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


FAULTS = [
    ("json:nothing", "fails: AttributeError: module 'json' has no attribute 'nothing'"),
    ("no_such_module:f", "fails: ModuleNotFoundError: No module named 'no_such_module'"),
    ("json:loads", "fails: TypeError: the JSON object must be"),
    ("builtins:print", "returned None, and no Device"),
]


@pytest.mark.parametrize(("function", "message"), FAULTS)
def test_functions_of_another_packages_kind_that_fail_are_named(
    function: str, message: str
) -> None:
    with pytest.raises(InputError, match=f"npu: the opener {function} {message}"):
        DeviceKind("npu", opener=function).open(object())
    kind = DeviceKind("npu", detector=function)
    if function == "builtins:print":
        assert kind.detect() is None
        return
    with pytest.raises(InputError, match=f"npu: the detector {function} {message}"):
        kind.detect()


def test_a_detector_returns_hardware_of_its_kind() -> None:
    with pytest.raises(InputError, match="npu: the detector builtins:repr returned .* 'npu'"):
        DeviceKind("npu", detector="builtins:repr").detect()


def test_the_table_is_read_without_torch() -> None:
    code = (
        "import sys, graphrun.device_kinds as kinds; kinds.names(); kinds.kind_called('npu');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
