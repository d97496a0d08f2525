"""The ordering checker reports a missing wait in every run, also on a device whose earlier runs had
one, and every wait whose absence changes results on the backend from outside."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from campaign import sampled
from left_out_waits import PLANS, Runs, Waits
from small_component import untouched

from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.sim.ordering import RaceError

sys.path.insert(0, str(Path(__file__).parent.parent / "outside"))

import brook

# numbers of waits: of the load slot's first copy for its allocation, of compute for a streamed
# block, of the copy of a streamed block for compute with the block that it overwrites
FIRST, STREAMED, OVERWRITTEN = 0, 11, 12
# a plan, and the numbers of waits to leave out; no number: all
SAMPLE = ("loaded and streamed", (FIRST, STREAMED, OVERWRITTEN))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    return Waits(monkeypatch, SimulatedDevice)


@pytest.mark.long
def test_every_wait_left_out_is_reported_on_one_device_as_on_a_fresh_one(waits: Waits) -> None:
    reused = Runs(waits)
    assert not reused.races()
    count = waits.count
    fresh = {number for number in range(count) if Runs(waits).races(number)}
    assert len(fresh) > count / 2, "most waits of this plan order something"
    assert {FIRST, STREAMED} <= fresh
    assert {number for number in range(count) if reused.races(number)} == fresh
    assert not reused.races(), "no race is left over for a correct run"


def test_a_missing_wait_is_reported_in_every_run(waits: Waits) -> None:
    runs = Runs(waits)
    assert [runs.races(FIRST) for _ in range(3)] == [True] * 3
    assert all(map(untouched, runs.modules.values()))
    assert runs.device.allocated_bytes == 0


def test_a_race_beside_an_error_of_the_components_code_leaves_nothing_behind(waits: Waits) -> None:
    runs = Runs(waits)

    def fails(x: torch.Tensor) -> None:
        raise ValueError("of the component's own code")

    runs.modules["a"].callback = fails
    waits.left_out = STREAMED
    with pytest.raises(RaceError) as error_info:
        runs.run()
    assert isinstance(error_info.value.__context__, ValueError)
    runs.modules["a"].callback = None
    assert all(map(untouched, runs.modules.values()))
    assert runs.device.allocated_bytes == 0


@pytest.mark.skipif(not brook.can_build(), reason="no compiler for C++, or no ninja")
@pytest.mark.parametrize(
    "case", sampled([SAMPLE, *((name, ()) for name in PLANS)], [SAMPLE], "outside")
)
def test_a_wait_that_changes_bits_on_another_backend_is_reported(
    case: tuple[str, tuple[int, ...]], waits: Waits
) -> None:
    """The backend runs late copies and late kernels as late as their order allows, and allocates
    memory on no stream: so only waits of copies for an allocation are reported alone."""
    name, numbers = case
    command = [sys.executable, str(Path(__file__).with_name("left_out_waits.py")), name]
    process = subprocess.run(
        [*command, *map(str, numbers)], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr[-4000:]
    results = json.loads(process.stdout.splitlines()[-1])
    runs = Runs(waits, name)
    assert not runs.races()
    streams = list(waits.streams)
    assert results["streams"] == streams, "the same waits"
    reported = {number for number in numbers or range(len(streams)) if runs.races(number)}
    numbers_with_changes = {*results["copies"], *results["kernels"]}
    assert numbers_with_changes <= reported
    assert {streams[number] for number in reported - numbers_with_changes} == {"copy"}
    assert {streams[number] for number in results["copies"]} == {"compute"}
    assert {streams[number] for number in results["kernels"]} == {"copy"}
