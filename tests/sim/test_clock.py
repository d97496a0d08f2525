"""Virtual time of the simulated accelerator: FLOPs and copies on two timelines, and waits between
them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from graphrun.sim import Machine, SimulatedCopyError


def machine() -> Machine:
    """1000 bytes a second in, 500 out, 100 FLOPs a second."""
    return Machine(h2d_bytes_per_second=1000, d2h_bytes_per_second=500, flops_per_second=100)


def test_synchronous_copies_take_their_bytes_over_the_bandwidth_and_are_counted():
    host = torch.zeros(500, dtype=torch.uint8)
    with machine() as sim:
        x = host.to("sim")
        assert sim.seconds() == 0.5
        x.copy_(host)
        assert sim.seconds() == 1.0
        host.copy_(x)
        x.cpu()
        assert sim.seconds() == 3.0
        assert x[0].item() == 0
        assert sim.seconds() == pytest.approx(3.002)
    assert (sim.copies_in, sim.bytes_in, sim.copies_out, sim.bytes_out) == (2, 1000, 3, 1001)
    assert sim.seconds("copy") == 0


def test_a_copy_that_converts_moves_the_bytes_of_its_destination():
    with machine() as sim:
        x = torch.zeros(10, dtype=torch.float32).to("sim", torch.bfloat16)
        assert sim.bytes_in == 20
        x.copy_(torch.zeros(1, dtype=torch.float32))
        assert sim.bytes_in == 40
        x.to("cpu", torch.float64)
        assert sim.bytes_out == 80
        assert len(x.tolist()) == 10
        assert sim.bytes_out == 100


def test_nothing_crosses_the_bus_within_the_device():
    with machine() as sim:
        x = torch.zeros(10, device="sim")
        x.clone().copy_(x.to(torch.float16))
        x.to("meta")
    assert (sim.copies_in, sim.copies_out, sim.seconds()) == (0, 0, 0)


def test_copies_overlap_compute_and_events_order_them():
    """
    compute |==mm 0.54==|....wait.....|==mm 0.54==|
    copy    |=====copy 1.0=====|
    """
    host = torch.zeros(1000, dtype=torch.uint8)
    with machine() as sim:
        sim.page_lock(host)
        x = torch.ones(3, 3, device="sim")
        buffer = torch.zeros(1000, dtype=torch.uint8, device="sim")
        with sim.on_copy_stream():
            buffer.copy_(host)
            event = sim.record("copy")
        assert (sim.seconds("compute"), sim.seconds("copy"), event) == (0, 1.0, 1.0)
        x @ x
        assert sim.seconds("compute") == 0.54
        sim.wait("compute", event)
        x @ x
        assert (sim.seconds("compute"), sim.seconds("copy")) == (1.54, 1.0)
        assert sim.charge_flops == 108
        sim.synchronize()
        assert sim.seconds("compute") == sim.seconds("copy") == 1.54


def test_the_copy_stream_waits_for_compute_when_told_to():
    with machine() as sim:
        x = torch.ones(3, 3, device="sim")
        x @ x
        sim.wait("copy", sim.record("compute"))
        with sim.on_copy_stream():
            x.copy_(torch.ones(3, 3))
        assert sim.seconds("copy") == pytest.approx(0.54 + 0.036)


def test_a_copy_is_not_issued_while_the_host_waits():
    with machine() as sim:
        x = torch.ones(3, 3, device="sim")
        (x @ x).cpu()  # the host waits for 0.54 s of compute and 0.072 s of copy
        with sim.on_copy_stream():
            x.copy_(torch.ones(3, 3))
        assert sim.seconds("copy") == pytest.approx(0.54 + 0.072 + 0.036)


def test_the_nth_copy_in_either_direction_fails_once_before_anything_changed():
    with Machine(fail_copy=2) as sim:
        x = torch.ones(4).to("sim")
        with pytest.raises(SimulatedCopyError, match="16 bytes. from sim:0"):
            x.cpu()
        assert (sim.copies_in, sim.copies_out, sim.fail_copy) == (1, 0, None)
        sim.fail_copy = 1
        allocated_bytes = sim.allocated_bytes
        with pytest.raises(SimulatedCopyError, match="to sim:0"):
            x.copy_(torch.zeros(4))
        assert x.tolist() == [1, 1, 1, 1]
        assert sim.allocated_bytes == allocated_bytes
        sim.fail_copy = 1
        with pytest.raises(SimulatedCopyError):
            torch.ones(4).to("sim")
        assert sim.allocated_bytes == allocated_bytes


def _operators(device: str) -> None:
    def make(*shape: int) -> torch.Tensor:
        return torch.ones(shape, device=device)

    make(2, 3) @ make(3, 5)
    torch.bmm(make(2, 3, 4), make(2, 4, 5))
    torch.addmm(make(5), make(2, 3), make(3, 5))
    torch.baddbmm(make(2, 3, 5), make(2, 3, 4), make(2, 4, 5))
    functional.linear(make(2, 7, 3), make(5, 3), make(5))
    functional.linear(make(7, 3), make(5, 3))
    torch.einsum("bij,kj->bik", make(2, 3, 4), make(5, 4))
    functional.conv2d(make(1, 4, 8, 8), make(6, 2, 3, 3), padding=1, groups=2)
    functional.conv_transpose2d(make(1, 4, 8, 8), make(4, 2, 3, 3), stride=2)
    functional.conv3d(make(1, 2, 4, 4, 4), make(3, 2, 3, 3, 3))
    functional.scaled_dot_product_attention(make(2, 3, 5, 8), make(2, 3, 7, 8), make(2, 3, 7, 8))


def test_flops_are_those_of_pytorchs_counter():
    # FlopCounterMode does not count the CPU's fused attention.
    with (
        FlopCounterMode(display=False) as counter,
        sdpa_kernel(SDPBackend.MATH),
    ):
        _operators("cpu")
    with Machine() as sim:
        _operators("sim")
    assert sim.charge_flops == counter.get_total_flops() > 0


def test_inference_mode_costs_the_same():
    """There composite operators arrive whole: unless taken apart, their products and copies would
    be free."""
    events = []
    for mode in (torch.no_grad(), torch.inference_mode()):
        with Machine() as sim, mode:
            _operators("sim")
            torch.ones(3).to("sim").cpu()
            events.append(
                (sim.charge_flops, sim.peak_bytes, sim.allocations, sim.bytes_in, sim.bytes_out)
            )
    assert events[0] == events[1]


def test_a_stream_of_the_device_module_is_asynchronous_where_a_copy_is_asked_to_be():
    with Machine(h2d_bytes_per_second=1e9, flops_per_second=1e9) as machine:
        backend = torch.get_device_module("sim")
        stream, host = backend.Stream(), torch.zeros(1_000_000, dtype=torch.uint8)
        machine.page_lock(host)
        with backend.stream(stream):
            assert backend.current_stream().timeline == "copy"
            copies = [host.to("sim", non_blocking=True)]
        machine.charge(1_000_000)
        assert (machine.seconds("compute"), machine.seconds("copy")) == pytest.approx((1e-3, 1e-3))
        stream.synchronize()
        with backend.stream(stream):
            copies.append(host.to("sim"))
        machine.charge(1_000_000)
        assert (machine.seconds("compute"), machine.seconds("copy")) == pytest.approx((3e-3, 2e-3))


def test_a_stream_waits_for_another():
    with Machine(flops_per_second=1e9) as machine:
        backend = torch.get_device_module("sim")
        stream = backend.Stream()
        machine.charge(1_000_000)
        stream.wait_stream(backend.current_stream())
        assert machine.seconds("copy") == pytest.approx(1e-3)


def test_launches_are_hidden_behind_longer_kernels():
    """
    host    |l|l|l|
    compute   |==mm 0.54==|==mm 0.54==|==mm 0.54==|     the first one waits for its launch
    """
    with Machine(flops_per_second=100, launch_seconds=0.1) as sim:
        x = torch.empty(3, 3, device="sim").fill_(1)
        sim.synchronize()
        start = sim.seconds()
        for _ in range(3):
            x.view(9).view(3, 3) @ x  # a view launches nothing
        assert sim.seconds() - start == pytest.approx(0.1 + 3 * 0.54)


def test_kernels_shorter_than_their_launches_wait_for_the_host():
    with Machine(flops_per_second=100, launch_seconds=0.1) as sim:
        x = torch.empty(1, 1, device="sim").fill_(1)
        for _ in range(10):
            (x + 1) @ x  # 0.02 s, behind two launches
        assert sim.seconds() == pytest.approx(0.1 + 10 * 2 * 0.1 + 0.02)


def test_a_host_that_waits_for_each_copy_pays_every_launch():
    host = torch.zeros(9, dtype=torch.uint8)
    with Machine(
        h2d_bytes_per_second=100, flops_per_second=100, launch_seconds=0.1, copy_start_seconds=0.2
    ) as sim:
        x = torch.empty(3, 3, device="sim").fill_(1)
        sim.synchronize()
        start = sim.seconds()
        for _ in range(3):
            host.to("sim")
            x @ x
        assert sim.seconds() - start == pytest.approx(0.1 + 3 * (0.2 + 0.09 + 0.1 + 0.54)), (
            "only copies are launched ahead"
        )


@pytest.mark.parametrize("is_locked", [True, False])
def test_the_host_waits_for_copies_of_memory_that_is_not_page_locked(is_locked):
    host = torch.zeros(1000, dtype=torch.uint8)
    with Machine(
        h2d_bytes_per_second=1000,
        flops_per_second=100,
        pageable_bytes_per_second=500,
        page_lock_seconds=1e-3,
    ) as sim:
        if is_locked:
            sim.page_lock(host)
            assert sim.seconds("lock") == pytest.approx(1.0)
        x = torch.ones(3, 3, device="sim")
        buffer = torch.zeros(1000, dtype=torch.uint8, device="sim")
        with sim.on_copy_stream():
            buffer.copy_(host)
        x @ x
        assert (sim.seconds("copy"), sim.seconds("compute")) == pytest.approx(
            (1.0, 0.54) if is_locked else (2.0, 2.54)
        )
