"""The simulated machine as a device: its capacity, its clock, and its tensors."""

from __future__ import annotations

import pytest
import torch

from graphrun.errors import OutOfMemory, TransferFailed
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.sim import Machine, SimulatedCopyError


@pytest.mark.parametrize(
    ("capacity_bytes", "available_bytes"), [(None, 4096), (1024, 1024), (8192, 4096)]
)
def test_a_session_lowers_the_capacity_until_it_ends(
    capacity_bytes: int | None, available_bytes: int
) -> None:
    device = SimulatedDevice(Machine(capacity_bytes=capacity_bytes))
    outside_bytes = capacity_bytes or 2**62
    assert device.available_bytes == outside_bytes
    with device.capped(4096):
        assert device.available_bytes == available_bytes
        memory = device.allocate(available_bytes)
        with pytest.raises(torch.OutOfMemoryError) as error_info:
            device.allocate(1)
        assert isinstance(device.explain(error_info.value), OutOfMemory)
        assert device.refused(error_info.value)
        del memory
    assert device.available_bytes == outside_bytes
    with device.capped(4096):
        device.machine.capacity_bytes = 7 * 512
    assert device.available_bytes == 7 * 512, "set meanwhile"


def test_a_read_is_reached_when_it_ends_before_the_copies() -> None:
    device = SimulatedDevice(Machine(disk_bytes_per_second=1e6, h2d_bytes_per_second=1e6))
    with device.capped(1 << 20):
        begin = device.mark("disk")
        device.read(torch.empty(1000), 1000)
        end = device.mark("disk")
        assert device.seconds_at(end) - device.seconds_at(begin) == pytest.approx(1e-3)
        assert [device.reached(marks) for marks in ([], [begin], [begin, end])] == [
            False,
            True,
            False,
        ]
        device.wait("copy", end)
        assert device.reached([begin, end])


def test_tensors_are_those_of_one_machine() -> None:
    device, other = SimulatedDevice(Machine()), SimulatedDevice(Machine())
    assert device.memory is not other.memory
    with device.capped(1 << 20):
        tensor = torch.ones(3, 100, device=device.torch_device)
        assert device.holds(tensor)
        assert not other.holds(tensor)
        assert not device.holds(torch.ones(3))
        assert device.holders() == ("1.50 KiB torch.float32 (3, 100)",)
        assert device.storage_of(tensor) == device.storage_of(tensor[1:])
        assert device.storage_of(tensor)[1] == device.allocated_bytes


def test_errors_of_copies_and_memory_are_explained() -> None:
    device = SimulatedDevice(Machine())
    explained = device.explain(SimulatedCopyError("the link is down"))
    assert (type(explained), str(explained)) == (TransferFailed, "the link is down")
    assert device.explain(RuntimeError("out of memory")) is None


@pytest.mark.parametrize("slowdown", [1.0, 2.5])
def test_compute_on_the_host_takes_time_by_its_flops(slowdown: float) -> None:
    device = SimulatedDevice(Machine(flops_per_second=1e6))
    with device.capped(1 << 20):
        begin = device.mark("compute")
        with device.on_host(slowdown):
            torch.mm(torch.ones(10, 20, device="cpu"), torch.ones(20, 30, device="cpu"))
        seconds = device.seconds_at(device.mark("compute")) - device.seconds_at(begin)
    assert seconds == pytest.approx(slowdown * 2 * 10 * 20 * 30 / 1e6)
