"""The bytes of an Apple GPU, by counters like Metal's; no GPU computes here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from graphrun.runtime.devices.mps import MpsDevice
from graphrun.units import GIB, MIB


class Metal:
    """Functions of `torch.mps`: counters and the limit of a GPU that should use at most 10 GiB.

    Without a limit of graphrun, PyTorch allows 1.7 times as much.
    """

    def __init__(self) -> None:
        self.tensors = self.cached = 0
        self.limit_bytes = 17 * GIB

    def recommended_max_memory(self) -> int:
        return 10 * GIB

    def current_allocated_memory(self) -> int:
        return self.tensors

    def driver_allocated_memory(self) -> int:
        return self.tensors + self.cached

    def set_per_process_memory_fraction(self, share: float) -> None:
        self.limit_bytes = round(share * 10 * GIB)

    def empty_cache(self) -> None:
        self.cached = 0


@pytest.fixture
def metal() -> Metal:
    return Metal()


@pytest.fixture
def device(metal: Metal) -> Any:
    device: Any = MpsDevice.__new__(MpsDevice)
    device._backend = SimpleNamespace(
        module=metal, function=lambda name, _="": getattr(metal, name, None)
    )
    device._is_asynchronous, device.unified = False, False
    return device


def test_the_limit_is_a_share_of_the_recommended_memory_until_the_run_ends(
    metal: Metal, device: Any
) -> None:
    default_bytes = metal.limit_bytes
    for cap, limit, expected in (
        (4 * GIB, 0, 4 * GIB),
        (4 * GIB, 5 * GIB, 5 * GIB),
        (90 * GIB, 0, default_bytes),
    ):
        with device.capped(cap, limit):
            assert metal.limit_bytes == expected
        assert metal.limit_bytes == default_bytes
    with device.capped(0):
        assert 0 < metal.limit_bytes < MIB, "0 would be no limit"


def test_peaks_are_bytes_of_tensors_and_cache_since_the_cache_was_emptied(
    metal: Metal, device: Any
) -> None:
    metal.tensors, metal.cached = 2 * GIB, GIB
    assert (device.allocated_bytes, device.peak_bytes) == (2 * GIB, 3 * GIB)
    device.reset_peak()
    assert (device.allocated_bytes, device.peak_bytes) == (2 * GIB, 2 * GIB)


@pytest.mark.parametrize(("host_gib", "available_gib"), [(64, 10), (3, 6)])
def test_no_more_is_available_than_recommended_or_than_the_host_has_left(
    host_gib: int, available_gib: int, metal: Metal, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "graphrun.runtime.devices.mps.host_ram_bytes"
    monkeypatch.setattr(name, lambda: host_gib * GIB)
    metal.tensors, metal.cached = 2 * GIB, GIB
    assert device.available_bytes == available_gib * GIB
    metal.tensors = 20 * GIB
    assert device.available_bytes == 21 * GIB, "the process has more than is recommended"
