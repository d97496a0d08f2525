"""The ordering checker: what it takes for a race, what it takes for an order, and what its message
says."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from graphrun import sim
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.sim import Machine
from graphrun.sim.ordering import RaceError, spans_of


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    device = SimulatedDevice(Machine(check_ordering=True))
    with device.capped(1 << 30):
        yield device


def host(nbytes: int = 64) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def on_device(device: SimulatedDevice, nbytes: int = 64) -> torch.Tensor:
    """Allocated and written on the compute stream, and known to the host."""
    arena = device.allocate(nbytes)
    arena.fill_(1)
    device.barrier()
    return arena


def test_a_copy_over_bytes_that_compute_reads_is_a_race_unless_it_waits(
    device: SimulatedDevice,
) -> None:
    source = host()
    weights = on_device(device)
    result = weights + 1
    device.annotate(slot="slot denoise/0:unet steady", block="unet down.0")
    device.copy(weights, source)
    with pytest.raises(RaceError) as error:
        device.barrier()
    text = str(error.value)
    assert (
        "write of bytes 0..64 by copy (copy of unet down.0 in slot denoise/0:unet steady, " in text
    )
    assert "read of bytes 0..64 by compute (aten::add" in text
    assert text.count("test_ordering.py:") == 2, "the code of both accesses"
    assert result.numel()
    product = weights + 1
    device.wait("copy", device.mark("compute"))
    device.copy(weights, source)
    device.barrier()
    assert product.numel()


def test_a_race_that_comes_again_is_reported_again(device: SimulatedDevice) -> None:
    source, weights = host(), on_device(device)
    for _ in range(3):
        assert (weights + 1).numel()
        device.copy(weights, source)
        with pytest.raises(RaceError) as error:
            device.barrier()
        assert str(error.value).count("race in") == 1
    device.barrier()


def test_a_report_has_each_pair_of_code_lines_once(device: SimulatedDevice) -> None:
    source, weights = host(), on_device(device)
    for _ in range(3):
        assert (weights + 1).numel()
        device.copy(weights, source)
        device.wait("compute", device.mark("copy"))
    with pytest.raises(RaceError) as error:
        device.barrier()
    assert str(error.value).count("race in") == 1


def test_a_race_behind_the_last_barrier_is_reported_at_the_end_of_the_session() -> None:
    device, source = SimulatedDevice(Machine(check_ordering=True)), host()

    def session() -> None:
        with device.capped(1 << 30):
            weights = on_device(device)
            assert (weights + 1).numel()
            device.copy(weights, source)

    with pytest.raises(RaceError, match="write of bytes 0..64 by copy"):
        session()


def test_compute_waits_for_a_copy_by_its_mark(device: SimulatedDevice) -> None:
    source = host()
    weights = on_device(device)
    device.copy(weights, source)
    mark = device.mark("copy")
    device.wait("compute", mark)
    assert (weights + 1).numel()
    device.barrier()
    device.copy(weights, source)
    assert (weights + 1).numel()
    with pytest.raises(
        RaceError,
        match="read of bytes 0..64 by compute .* is not ordered behind write of bytes 0..64 "
        "by copy",
    ):
        device.barrier()


def test_other_bytes_of_the_storage_are_no_race(device: SimulatedDevice) -> None:
    source = host()
    ring_buffer = on_device(device, 128)
    assert (ring_buffer[:64] + 1).numel()
    device.copy(ring_buffer[64:], source)
    device.barrier()
    assert (ring_buffer[:65] + 1).numel()
    device.copy(ring_buffer[64:], source)
    with pytest.raises(RaceError, match=r"bytes 64..128 by copy .* bytes 0..65 by compute"):
        device.barrier()


def test_columns_of_a_table_are_apart(device: SimulatedDevice) -> None:
    table, source = on_device(device, 64).view(8, 8), host(32).view(8, 4)
    assert (table[:, :4] + 1).numel()
    device.copy(table[:, 4:], source)
    device.barrier()
    assert (table[:, :5] + 1).numel()
    device.copy(table[:, 4:], source)
    with pytest.raises(RaceError):
        device.barrier()


@pytest.mark.parametrize(
    ("view", "spans"),
    [
        (torch.zeros(4, 3), ((0, 48),)),
        (torch.zeros(4, 3).t(), ((0, 48),)),
        (torch.zeros(4, 3)[1:3], ((12, 36),)),
        (torch.zeros(3, 4)[:, 1:3], ((4, 12), (20, 28), (36, 44))),
        (torch.zeros(6)[::2], ((0, 4), (8, 12), (16, 20))),
        (torch.zeros(2, 3, 4)[:, 1], ((16, 32), (64, 80))),
        (torch.zeros(1).expand(5), ((0, 4),)),
        (torch.zeros(0, 3), ()),
    ],
)
def test_spans_are_the_bytes_of_a_view(
    view: torch.Tensor, spans: tuple[tuple[int, int], ...]
) -> None:
    assert spans_of(view) == spans


def test_memory_is_written_by_its_allocation_and_its_free(device: SimulatedDevice) -> None:
    source = host()
    fresh = device.allocate(64)
    device.copy(fresh, source)
    with pytest.raises(
        RaceError,
        match=r"write of bytes 0..64 by copy .* is not ordered behind write .* by compute "
        r"\(allocation",
    ):
        device.barrier()
    device.copy(fresh, source)
    del fresh
    with pytest.raises(
        RaceError, match=r"by compute \(free.* is not ordered behind write of bytes 0..64 by copy"
    ):
        device.barrier()


def test_host_memory_is_not_freed_while_it_is_copied(device: SimulatedDevice) -> None:
    target, source = on_device(device), host()
    device.copy(target, source)
    del source
    gc.collect()
    with pytest.raises(
        RaceError,
        match=r"race in host memory: write .* by host \(free.* behind read of bytes 0..64 by copy",
    ):
        device.barrier()


def test_the_host_reads_a_spilled_value_behind_its_copy_only(device: SimulatedDevice) -> None:
    value, host_copy = on_device(device), host()
    device.copy(host_copy, value)
    device.barrier()
    assert (host_copy + 1).numel()
    device.copy(host_copy, value)
    assert (host_copy + 1).numel()
    with pytest.raises(
        RaceError,
        match="read of bytes 0..64 by host .* is not ordered behind write of bytes 0..64 by copy",
    ):
        device.barrier()


def test_a_mark_of_the_disk_orders_nothing_and_joining_the_job_does(
    device: SimulatedDevice,
) -> None:
    arena, target = host(), on_device(device)
    job = device.background(lambda: device.read(arena, 64))
    device.wait("copy", device.mark("disk"))
    device.copy(target, arena)
    with pytest.raises(
        RaceError,
        match=r"read of bytes 0..64 by copy .* behind write of bytes 0..64 by disk \(read "
        r"from disk",
    ):
        device.barrier()
    job()
    device.copy(target, arena)
    device.barrier()


def test_a_read_waits_for_the_copy_out_of_its_place(device: SimulatedDevice) -> None:
    arena, target = host(), on_device(device)
    device.copy(target, arena)
    mark = device.mark("copy")

    def waiting() -> None:
        device.wait("disk", mark)
        device.read(arena, 64)

    device.background(waiting)()
    device.barrier()
    device.copy(target, arena)
    device.background(lambda: device.read(arena, 64))()
    with pytest.raises(
        RaceError,
        match=r"write of bytes 0..64 by disk .* is not ordered behind read of bytes 0..64 by copy",
    ):
        device.barrier()


def test_blocking_copies_and_items_order_what_follows(device: SimulatedDevice) -> None:
    source = host()
    copy = source.to(sim.device)
    del source
    assert int(copy.sum()) == 0
    arena = host()
    arena.copy_(copy)
    assert (arena + 1).numel()
    device.barrier()


def test_what_is_not_checked_costs_no_marks() -> None:
    device = SimulatedDevice(Machine())
    assert device.machine.ordering is None
    assert type(device.mark("compute")) is float
