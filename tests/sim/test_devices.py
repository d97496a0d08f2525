"""Several simulated devices of one host: memory and copy engines of their own, a shared host,
copies between them."""

from __future__ import annotations

import pytest
import torch

from graphrun.sim import Machine, SimulatedCopyError, SimulatedOutOfMemory
from graphrun.sim.ordering import RaceError

KIB = 1024


def test_tensors_count_on_their_own_device() -> None:
    main = Machine()
    other = Machine(capacity_bytes=8 * KIB, sibling=main)
    with main:
        first, second = torch.ones(1024, device="sim"), torch.ones(1024, device="sim:1")
        assert (str(first.device), str(second.device)) == ("sim:0", "sim:1")
        assert (main.allocated_bytes, other.allocated_bytes) == (4 * KIB, 4 * KIB)
        assert str((second + second).device) == "sim:1"
        with pytest.raises(SimulatedOutOfMemory, match="sim:1 has a capacity of 8.00 KiB"):
            torch.ones(4096, device="sim:1")
        with pytest.raises(RuntimeError, match="at least two devices, sim:0 and sim:1"):
            first + second
        with pytest.raises(RuntimeError, match="no device sim:2: the active machine has 2"):
            torch.ones(1, device="sim:2")


def test_a_copy_between_devices_takes_the_slower_rate_and_both_wait_for_it() -> None:
    main = Machine(d2h_bytes_per_second=4096.0, flops_per_second=2.0)
    other = Machine(
        h2d_bytes_per_second=1024.0, copy_start_seconds=0.5, flops_per_second=4.0, sibling=main
    )
    with main:
        x = torch.ones(1, 1, device="sim")
        y = x @ x  # two FLOPs: one second
        copy = torch.ones(1024, device="sim").to("sim:1")
        assert main.seconds() == other.seconds() == 1 + 4.0
        target = torch.zeros(1024, device="sim")
        target.copy_(copy)  # the source's engine starts it
        assert main.seconds() == other.seconds() > 5.5
        assert torch.equal(target.cpu(), torch.ones(1024))
        assert (main.bytes_across, other.bytes_across) == (4 * KIB, 4 * KIB)
        assert y.item() == 1


def test_host_and_disk_are_shared_and_copy_engines_are_not() -> None:
    main = Machine(h2d_bytes_per_second=1024.0, disk_bytes_per_second=1024.0)
    other = Machine(h2d_bytes_per_second=1024.0, disk_bytes_per_second=1024.0, sibling=main)
    with main:
        for machine in (main, other):
            machine.read(1024)
        assert main.seconds("disk") == other.seconds("disk") == 2.0
        source = torch.ones(256)
        main.page_lock(source)
        for machine in (main, other):
            with machine.on_copy_stream():
                torch.empty(256, device=machine.device).copy_(source)
        assert main.seconds("copy") == other.seconds("copy") == 1.0
        other.synchronize()
        assert main.record() == other.record() == 2.0


def test_a_copy_between_devices_fails_where_a_fault_was_injected() -> None:
    main = Machine()
    other = Machine(fail_copy=1, sibling=main)
    with main:
        x = torch.ones(4, device="sim")
        with pytest.raises(SimulatedCopyError, match="to sim:1"):
            x.to("sim:1")
        assert other.allocated_bytes == 0


def test_the_ordering_checker_knows_the_streams_of_every_device() -> None:
    main = Machine(check_ordering=True)
    other = Machine(sibling=main)
    assert other.ordering is main.ordering is not None
    with main:
        source = torch.ones(256)
        main.page_lock(source)
        target = torch.empty(256, device="sim:1")
        with other.on_copy_stream():
            target.copy_(source)
        (target + 1).to("sim")
        with pytest.raises(
            RaceError, match="by compute 1 .* is not ordered behind write .* by copy 1"
        ):
            other.synchronize()


def test_a_copy_between_devices_orders_both() -> None:
    main = Machine(check_ordering=True)
    Machine(sibling=main)
    with main:
        x = torch.ones(256, device="sim")
        y = x.to("sim:1")
        x.add_(1)
        z = (y + 1).to("sim")
        y.add_(1)
        (z + x).cpu()
        main.synchronize()
