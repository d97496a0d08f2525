"""The memory of the CPU device: what it allocates, counts as the process's own, and recognizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from stored_component import slow_reads

from graphrun.errors import OutOfMemory
from graphrun.host_ram import host_ram_bytes
from graphrun.kernel_memory import process_bytes
from graphrun.profile.processor import cpu_estimate
from graphrun.runtime.devices.cpu import CpuDevice
from graphrun.runtime.direct_reads import Span
from graphrun.units import GIB, MIB, PAGE_BYTES


@pytest.fixture
def device() -> CpuDevice:
    """With 16 GiB for the process itself."""
    device = CpuDevice(cpu_estimate())
    device.context_bytes = 16 * GIB
    return device


def test_weights_are_capped_in_a_session(device: CpuDevice) -> None:
    allocated_bytes = device.allocated_bytes
    with device.capped(allocated_bytes + 10 * MIB):
        pieces = [device.allocate(6 * MIB), device.allocate(4 * MIB)]
        assert device.allocated_bytes == allocated_bytes + 10 * MIB
        assert all(piece.data_ptr() % PAGE_BYTES == 0 for piece in pieces)
        assert device.allocate(0).numel() == 0
        with pytest.raises(torch.OutOfMemoryError, match=r"1 B on top of .* exceed the .* left"):
            device.allocate(1)
    with pytest.raises(torch.OutOfMemoryError, match="the system refuses"):
        device.allocate(1 << 60)
    pieces.append(device.allocate(PAGE_BYTES))
    assert device.allocated_bytes == allocated_bytes + 10 * MIB + PAGE_BYTES
    pieces.clear()
    assert device.allocated_bytes == allocated_bytes


def test_a_process_of_more_than_its_planned_bytes_lowers_the_cap(device: CpuDevice) -> None:
    with device.capped(64 * MIB):
        assert device.available_bytes == 64 * MIB
    device.context_bytes = device.other_bytes - 32 * MIB
    with device.capped(64 * MIB):
        assert device.available_bytes == pytest.approx(32 * MIB, abs=8 * MIB)


def test_the_memory_of_the_machine_is_a_limit_too(device: CpuDevice) -> None:
    with device.capped(1 << 60):
        for context_bytes in (0, 16 * GIB):
            device.context_bytes = context_bytes
            expected_bytes = host_ram_bytes() + process_bytes().nbytes - context_bytes
            assert device.available_bytes == pytest.approx(expected_bytes, abs=256 * MIB)
    assert device.available_bytes == pytest.approx(expected_bytes, abs=256 * MIB)


def test_the_context_is_the_process_without_weights_with_room_for_libraries(
    device: CpuDevice,
) -> None:
    before_bytes = device.other_bytes
    weights = device.allocate(128 * MIB).fill_(1)
    assert device.other_bytes == pytest.approx(before_bytes, abs=16 * MIB)
    context_bytes = device.measured_context()
    assert context_bytes % (16 * MIB) == 0
    assert 8 * MIB <= context_bytes - device.other_bytes <= 40 * MIB
    planning_bytes = device.measured_context(to_plan=True) - context_bytes
    assert planning_bytes == pytest.approx(80 * MIB, abs=16 * MIB)
    del weights


@pytest.mark.parametrize("workspace_bytes", [0, 64 * MIB])
def test_the_peak_is_above_the_planned_bytes_of_the_process(
    device: CpuDevice, workspace_bytes: int
) -> None:
    device._workspace_bytes = workspace_bytes
    device.context_bytes = device.other_bytes
    assert device.peak_bytes == device.allocated_bytes
    with device.capped(GIB):
        device.reset_peak()
        activations = torch.ones(192 * MIB, dtype=torch.uint8)
        del activations
        assert device.peak_bytes == pytest.approx(192 * MIB - workspace_bytes, abs=24 * MIB)
        device.reset_peak()
        weights = device.allocate(64 * MIB)  # not touched yet
        assert device.peak_bytes == pytest.approx(64 * MIB, abs=24 * MIB)
        del weights


def test_weights_are_recognized_by_their_memory(device: CpuDevice) -> None:
    assert device.holders() == ()
    weights = device.allocate(MIB)
    assert device.holds(weights)
    assert device.holds(weights[4:].view(3, -1))
    assert device.holders() == ("1.00 MiB",)
    for tensor in (
        torch.ones(4),
        torch.ones(4, device="meta"),
        torch.eye(3).to_sparse(),
        device.allocate(0),
    ):
        assert not device.holds(tensor)


def test_errors_of_refused_memory_are_explained(device: CpuDevice) -> None:
    with pytest.raises(RuntimeError) as error_info:
        torch.empty(1 << 60, dtype=torch.uint8)
    for error in (error_info.value, MemoryError("no room"), torch.OutOfMemoryError("no\nroom")):
        explanation = device.explain(error)
        assert isinstance(explanation, OutOfMemory)
        assert str(explanation).startswith("the CPU's memory: ")
        assert "\n" not in str(explanation)
    for error in (RuntimeError("shapes differ"), ValueError("DefaultCPUAllocator")):
        assert device.explain(error) is None


def test_the_mark_of_a_copy_is_the_end_of_its_read(
    device: CpuDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights").write_bytes(bytes(range(256)) * (PAGE_BYTES // 256))
    slow_reads(monkeypatch, 0.2)
    with device.capped(GIB):
        assert 0 <= device.seconds_at(device.mark("compute")) < 0.1
        assert 0 <= device.seconds_at(device.mark("copy")) < 0.1
        target = device.allocate(PAGE_BYTES)
        span = Span(str(tmp_path / "weights"), 0, PAGE_BYTES, PAGE_BYTES)
        device.read_block([(span, target)], None)
        mark, compute_mark = device.mark("copy"), device.mark("compute")
        device.wait("disk", mark)
        assert not target.any(), "only compute waits"
        device.wait("compute", mark)
        assert target[-1] == 255
        assert 0.2 <= device.seconds_at(mark) < 1
        assert device.seconds_at(compute_mark) < device.seconds_at(mark)
        late_mark = device.mark("copy")
        assert device.seconds_at(mark) < device.seconds_at(late_mark)
        device.read_block([], (lambda: target.fill_(7), target))  # type: ignore[arg-type, return-value]
        device.barrier()
        assert target.eq(7).all()
