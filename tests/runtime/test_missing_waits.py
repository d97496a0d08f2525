"""The ordering checker reports a missing wait in every run, also on a device whose earlier runs had
one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from small_component import (
    WIDE,
    Small,
    device_of,
    plan_of,
    run,
    small_hardware,
    small_problem,
    untouched,
    use,
)

from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.runtime.host import Host
from graphrun.sim.ordering import RaceError

CALLS = ["a", "a"]
ON = small_hardware()
PLAN = f"""
    slot s0/0:a load
      load a unblocked[0] thin[0-5] from pinned
    slot s0/0:a first
      stream a keep unblocked[0] thin[0-5] ring buffer {2 * WIDE} B
      run
    slot s0/0:a steady x1
      stream a keep unblocked[0] thin[0-5] ring buffer {2 * WIDE} B
      run
    slot end
      evict a unblocked[0] thin[0-5]
"""
# numbers of waits: of the load slot's first copy for its allocation, of compute for a streamed
# block
FIRST, STREAMED = 0, 11


class Waits:
    """Counts a run's waits of a stream for a mark, and leaves out number ``left_out`` (-1:
    none)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.left_out = 0, -1
        wait = SimulatedDevice.wait

        def counted(device: SimulatedDevice, stream: str, mark: float) -> None:
            self.count += 1
            if self.count - 1 != self.left_out:
                wait(device, stream, mark)  # type: ignore[arg-type]

        monkeypatch.setattr(SimulatedDevice, "wait", counted)


class Runs:
    """Runs of one plan on one device. The plan loads some blocks of a component and streams the
    others, in two calls."""

    def __init__(self, waits: Waits) -> None:
        self.waits, self.modules = waits, {"a": Small()}
        self.problem = small_problem(self.modules, [[use("a", 2, ON)]], ON)
        self.device = device_of(self.problem)
        self.host = Host(self.modules, self.problem, self.device)

    def races(self, left_out: int = -1) -> bool:
        """Whether a run without wait number ``left_out`` raises RaceError."""
        self.waits.count, self.waits.left_out = 0, left_out
        try:
            self.run()
        except RaceError:
            return True
        return False

    def run(self) -> None:
        run(self.problem, plan_of(self.problem, PLAN), self.host, self.device, CALLS)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    return Waits(monkeypatch)


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
