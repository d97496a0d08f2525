"""Pages of 2 MiB for large CPU tensors: who asks for them and gets them, and what plans assume."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from graphrun import systems
from graphrun.model.hardware import NEW_PAGES, ProcessorRates
from graphrun.profile import calibrate_cpu, doctor, processor
from graphrun.profile import hardware_profiles as profiles

VARIABLE = systems.HUGE_PAGES_VARIABLE
NBYTES = 64 << 20

FAULTS = f"""
import os, resource
from graphrun import systems
if {{asks}}:
    systems.request_huge_pages(os.environ)
import torch
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones({NBYTES}, dtype=torch.uint8)
before = faults()
torch.ones({NBYTES}, dtype=torch.uint8)
print(systems.tensors_get_huge_pages(), faults() - before)
"""

COMMAND = """
import os, sys
{first}
from graphrun.cli.main import main
sys.argv = ["graphrun", "--help"]
try:
    main()
except SystemExit:
    print("variable:", os.environ.get("THP_MEM_ALLOC_ENABLE"))
"""


def printed(code: str, **environment: str) -> str:
    environment_without = {name: value for name, value in os.environ.items() if name != VARIABLE}
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environment_without | environment,
        cwd=Path(__file__).parent.parent,
    )
    return result.stdout.splitlines()[-1]


@pytest.mark.skipif(systems.huge_pages_mode() != "madvise", reason="needs a kernel that asks")
def test_large_tensors_get_huge_pages_where_they_are_requested() -> None:
    has_pages, faults = printed(FAULTS.format(asks=False)).split()
    assert (has_pages, int(faults) > 0.9 * NBYTES / 4096) == ("False", True)
    has_pages, faults = printed(FAULTS.format(asks=True)).split()
    assert (has_pages, int(faults) < 0.1 * NBYTES / 4096) == ("True", True)


def test_the_command_asks_for_them_unless_the_user_decided_or_torch_is_loaded() -> None:
    assert printed(COMMAND.format(first="")) == "variable: 1"
    assert printed(COMMAND.format(first=""), **{VARIABLE: "0"}) == "variable: 0"
    assert printed(COMMAND.format(first="import torch")) == "variable: None"


@pytest.mark.parametrize(
    ("mode", "variable", "expected"),
    [
        ("always [madvise] never", "1", True),
        ("always [madvise] never", "0", False),
        ("[always] madvise never", "0", True),
        ("always madvise [never]", "1", False),
        (None, "1", False),
    ],
)
def test_seconds_are_of_the_pages_that_tensors_get(
    mode: str | None,
    variable: str,
    expected: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "enabled"
    if mode is not None:
        file.write_text(mode)
    monkeypatch.setattr(systems.huge_pages_mode, "__defaults__", (file,))
    monkeypatch.setenv(VARIABLE, variable)
    assert systems.tensors_get_huge_pages() == expected

    def assert_rate(cache: Path, rates: dict[str, float]) -> None:
        kernels = profiles.detect_cpu(cache).kernels
        assert isinstance(kernels, ProcessorRates)
        assert kernels.huge_pages == expected
        assert kernels.rate("new memory", "") == rates[NEW_PAGES[expected]]

    estimate = processor.cpu_estimate()
    assert isinstance(estimate.kernels, ProcessorRates)
    rates = dict(estimate.kernels.rates)
    assert rates["huge pages"] > 2 * rates["small pages"]
    assert_rate(tmp_path, rates)
    # of a profile that was measured in a process with the other pages
    rates |= {"small pages": 3.0, "huge pages": 5.0}
    kernels = ProcessorRates(2, tuple(rates.items()), huge_pages=not expected)
    profile = replace(estimate, name="cpu-measured", kernels=kernels, basis="measured")
    profiles.keep(tmp_path, profile, processor.cpu_key(), {})
    assert_rate(tmp_path, rates)


def test_doctor_says_that_huge_pages_are_off() -> None:
    row = doctor._processor(None) | {"huge_pages": "never"}
    checks = {check.name: check for check in doctor.processor_checks(row)}
    assert checks["huge pages"].verdict == "note"
    assert "madvise" in checks["huge pages"].fix
    checks_on = doctor.processor_checks(row | {"huge_pages": "madvise"})
    assert "huge pages" not in {check.name for check in checks_on}


def test_new_memory_is_measured_in_both_kinds_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    page_kinds, allocate = set[bool](), calibrate_cpu.anonymous_memory

    def noted(nbytes: int, *, huge_pages: bool = True) -> object:
        page_kinds.add(huge_pages)
        return allocate(nbytes, huge_pages=huge_pages)

    monkeypatch.setattr(calibrate_cpu, "anonymous_memory", noted)
    for huge_pages in (False, True):
        seconds = calibrate_cpu.new_memory(huge_pages=huge_pages)()
        rate = calibrate_cpu.rate_of(calibrate_cpu.TOUCH_BYTES, seconds)
        assert 0 < rate <= calibrate_cpu.FASTEST
    assert page_kinds == {False, True}
