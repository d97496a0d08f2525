"""Memory of the simulated accelerator: what is counted, when an allocation is refused, what is
freed."""

from __future__ import annotations

import copy
import gc
import random
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from linked_blocks import LinkedBlocks

from graphrun.errors import InputError
from graphrun.model.allocator import Caching
from graphrun.sim import Machine, SimulatedOutOfMemory

KIB = 1024


@pytest.fixture(autouse=True)
def without_collector():
    """Nothing here may rely on the cycle collector."""
    gc.disable()
    yield
    gc.enable()


def zeros(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device="sim")


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, int, int]] = []

    def allocated(self, key: int, nbytes: int) -> None:
        self.events.append(("+", key, nbytes))

    def freed(self, key: int) -> None:
        self.events.append(("-", key, 0))


def test_sizes_are_rounded_up_to_512_and_freed_without_the_collector():
    with Machine() as machine:
        x = zeros(1)
        assert machine.allocated_bytes == 512
        y = zeros(513)
        assert machine.allocated_bytes == 512 + 1024
        del x
        assert machine.allocated_bytes == 1024
        del y
    assert (machine.allocated_bytes, machine.peak_bytes, machine.allocations) == (0, 1536, 2)


def test_empty_tensors_cost_nothing():
    with Machine(512) as machine:
        x = [zeros(0), torch.empty(0, 7, device="sim")]
        assert (machine.allocated_bytes, machine.allocations, len(x)) == (0, 0, 2)


def test_views_share_one_storage_that_lives_as_long_as_the_last_of_them():
    with Machine() as machine:
        base = torch.zeros(256, 4, device="sim")
        views = [
            base.view(4, 256),
            base[3:],
            base.t(),
            base.detach(),
            *base.split(64),
            base.view(torch.uint8),
        ]
        assert (machine.allocated_bytes, machine.allocations) == (4 * KIB, 1)
        del base, views[1:]
        gc.collect()  # the storage's Python object is not what keeps the count
        view = views[0].reshape(16, 64)
        assert (machine.allocated_bytes, machine.allocations) == (4 * KIB, 1)
        del views, view
        assert machine.allocated_bytes == 0


def test_parameters_can_be_views_of_one_flat_buffer():
    layer = torch.nn.Linear(8, 8, bias=False).to(torch.bfloat16)
    expected = layer(torch.ones(2, 8, dtype=torch.bfloat16)).detach()
    with Machine() as machine, torch.no_grad():
        buffer = zeros(1024)
        view = buffer[256 : 256 + 128].view(torch.bfloat16).view(8, 8)
        view.copy_(layer.weight)
        layer._parameters["weight"] = torch.nn.Parameter(view, requires_grad=False)
        assert isinstance(layer.weight, torch.nn.Parameter)
        assert layer.weight.device == torch.device("sim:0")
        assert machine.allocated_bytes == 1024
        y = layer(torch.ones(2, 8, dtype=torch.bfloat16, device="sim"))
        assert torch.equal(y.cpu(), expected)
        buffer[256 : 256 + 128] = 0  # the parameter sees what is written into the buffer
        assert not layer.weight.any()
        del view, buffer, layer, y
        assert machine.allocated_bytes == 0


def test_an_operator_is_charged_for_its_results_only():
    with Machine() as machine:
        x = torch.ones(64, 64, device="sim")
        machine.reset_peak()
        y = torch.nn.functional.softmax(x, dim=-1)
        assert machine.peak_bytes == 2 * 16 * KIB
        y.add_(1).mul_(x)
        values, indices = y.max(dim=1)
        assert machine.allocated_bytes == 2 * 16 * KIB + 512 + 512
        assert machine.peak_bytes == machine.allocated_bytes
        del values, indices


def test_attention_holds_no_scores():
    with Machine() as machine:
        q = torch.ones(1, 2, 128, 8, device="sim")
        machine.reset_peak()
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
        assert machine.peak_bytes == 2 * 8 * KIB


def test_capacity_is_hard_and_a_refusal_changes_nothing():
    with Machine(4 * KIB) as machine:
        x = zeros(3 * KIB)
        counters = machine.allocated_bytes, machine.allocations, machine.peak_bytes
        host = torch.ones(2048, dtype=torch.uint8)
        for attempt in (
            lambda: zeros(KIB + 1),
            x.clone,
            x.exp,
            lambda: host.to("sim"),
            partial(torch.cat, [x, x]),
        ):
            with pytest.raises(
                torch.OutOfMemoryError,
                match="capacity of 4.00 KiB, of which 1.00 KiB .1024 bytes. is free",
            ):
                attempt()
            assert (machine.allocated_bytes, machine.allocations, machine.peak_bytes) == counters
        del attempt
        z = zeros(KIB)  # exactly full is fine
        assert machine.allocated_bytes == 4 * KIB
        del x, z
        assert machine.allocated_bytes == 0


def test_results_of_one_operator_are_refused_together():
    with Machine(4 * KIB) as machine:
        x = torch.zeros(1, 256, device="sim")
        torch.topk(x, 256)  # values 1 KiB, indices 2 KiB
        machine.capacity_bytes = 4 * KIB - 1
        allocations = machine.allocations
        with pytest.raises(SimulatedOutOfMemory, match="allocate 3.00 KiB"):
            torch.topk(x, 256)
        assert (machine.allocated_bytes, machine.allocations) == (KIB, allocations)


def test_absurd_sizes_are_refused_before_the_host_is_asked():
    with Machine(KIB) as machine:
        for attempt in (
            lambda: zeros(1 << 50),
            lambda: torch.empty_strided((1 << 20, 1 << 20), (1 << 20, 1), device="sim"),
            lambda: zeros(0).resize_(1 << 50),
            lambda: torch.zeros(1).expand(1 << 50).to("sim"),
        ):
            with pytest.raises(SimulatedOutOfMemory):
                attempt()
        assert machine.allocated_bytes == 0


def test_resizing_in_place_is_counted_as_new_beside_old():
    with Machine(3 * KIB) as machine:
        x = zeros(KIB)
        view = x[:4]
        x.resize_(2 * KIB)
        assert x.shape == (2 * KIB,)
        assert machine.allocated_bytes == 2 * KIB
        assert machine.peak_bytes == 3 * KIB
        with pytest.raises(SimulatedOutOfMemory):
            x.resize_(3 * KIB)
        assert x.shape == (2 * KIB,)
        assert machine.allocated_bytes == 2 * KIB
        x.resize_(4)  # a smaller shape keeps its storage
        assert machine.allocated_bytes == 2 * KIB
        del x
        assert machine.allocated_bytes == 2 * KIB
        del view
        assert machine.allocated_bytes == 0


def test_results_written_into_an_argument_may_grow_it():
    with Machine(4 * KIB) as machine:
        result = torch.empty(0, device="sim")
        torch.add(torch.ones(256, device="sim"), 1, out=result)
        assert result.shape == (256,)
        assert machine.allocated_bytes == KIB
        assert result.tolist() == [2.0] * 256
        big, out_2 = torch.ones(512, device="sim"), torch.empty(0, device="sim")
        with pytest.raises(SimulatedOutOfMemory):
            torch.add(big, 1, out=out_2)
        assert out_2.shape == (0,)
        assert machine.allocated_bytes == 3 * KIB
        out_2.resize_(2)
        assert out_2.shape == (2,)
        assert machine.allocated_bytes == 3 * KIB + 512
        del result, big, out_2
        assert machine.allocated_bytes == 0


def test_set_and_data_make_a_tensor_stand_for_another_storage():
    with Machine() as machine:
        x, y, z = zeros(KIB), zeros(2 * KIB), zeros(3 * KIB)
        x.set_(y)
        assert x.shape == (2 * KIB,)
        assert machine.allocated_bytes == 5 * KIB
        x.data = z
        assert x.shape == (3 * KIB,)
        assert machine.allocated_bytes == 5 * KIB
        z.fill_(7)
        assert x[0].item() == 7
        del y, z
        assert machine.allocated_bytes == 3 * KIB
        with pytest.raises(RuntimeError, match="data"):
            x.data = torch.zeros(3)
        del x
        assert machine.allocated_bytes == 0


def test_peak_can_be_reset():
    with Machine() as machine:
        zeros(4 * KIB)
        x = zeros(KIB)
        assert machine.peak_bytes == 4 * KIB
        machine.reset_peak()
        assert machine.peak_bytes == machine.allocated_bytes == KIB
        del x


def test_the_listener_hears_every_allocation_and_free_in_order():
    with Machine() as machine:
        machine.listener = recorder = Recorder()
        x = torch.zeros(100, device="sim")
        y = x + 1
        x.view(10, 10)
        del x
        y.resize_(300)
        del y
        machine.listener = None
        zeros(1)
    assert recorder.events == [
        ("+", 1, 512),
        ("+", 2, 512),
        ("-", 1, 0),
        ("+", 3, 1536),
        ("-", 2, 0),
        ("-", 3, 0),
    ]


def test_live_storages_are_listed_largest_first():
    with Machine() as machine:
        tensors = [zeros(10), torch.zeros(300, 2, dtype=torch.float16, device="sim")]
        assert machine.live() == [(1536, (300, 2), torch.float16), (512, (10,), torch.uint8)]
        del tensors
        assert machine.live() == []


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_nth_allocation_fails_once(number):
    with Machine(fail_allocation=number) as machine:
        tensors = [zeros(1) for _ in range(number - 1)]
        with pytest.raises(SimulatedOutOfMemory, match="injected"):
            zeros(1)
        assert machine.allocated_bytes == 512 * (number - 1)
        assert machine.fail_allocation is None
        zeros(1)
        machine.fail_allocation = 2  # counts from now
        zeros(1)
        with pytest.raises(SimulatedOutOfMemory, match="injected"):
            tensors[0].add(1) if tensors else zeros(1)
        del tensors
    assert machine.allocated_bytes == 0


def test_a_fault_within_results_of_one_operator_counts_none_of_them():
    with Machine() as machine:
        x = torch.zeros(4, device="sim")
        machine.fail_allocation = 2
        with pytest.raises(SimulatedOutOfMemory):
            x.topk(2)
        assert (machine.allocated_bytes, machine.allocations) == (512, 1)
        x.topk(2)


def test_a_machine_serves_several_contexts_and_owns_its_tensors_beyond_them():
    first, second = Machine(), Machine()
    with first:
        x = zeros(1)
    with second:
        y = zeros(1)
        z = x + 1  # counts where its input is
        assert (first.allocated_bytes, second.allocated_bytes) == (1024, 512)
        del x
        assert (first.allocated_bytes, second.allocated_bytes) == (512, 512)
        with pytest.raises(RuntimeError, match="two machines"):
            y + z
    del y, z
    with first:
        zeros(1)
    assert (first.allocated_bytes, second.allocated_bytes) == (0, 0)
    assert (first.allocations, second.allocations) == (3, 1)


def test_entering_twice_and_making_tensors_outside_are_errors():
    machine = Machine()
    with machine:
        with pytest.raises(RuntimeError, match="already active"), machine:
            pass
        tensor = zeros(1)  # the failed entry left the first one active
    with pytest.raises(RuntimeError, match="no simulated machine is active"):
        zeros(1)
    assert tensor.cpu().tolist() == [0]


@pytest.mark.parametrize(
    "options",
    [
        {"capacity_bytes": 0},
        {"h2d_bytes_per_second": 0.0},
        {"d2h_bytes_per_second": -1.0},
        {"flops_per_second": 0.0},
        {"fail_allocation": 0},
        {"fail_copy": -1},
    ],
)
def test_senseless_machines_are_refused(options):
    with pytest.raises(InputError, match=next(iter(options))):
        Machine(**options)


@pytest.mark.parametrize("seed", range(20))
def test_in_pages_asking_whether_storages_fit_changes_nothing(seed: int) -> None:
    """The machine reserves what an allocator reserves that is not asked first: of its pages alone,
    and where a refusal, and a trim before it, are due."""
    rng = random.Random(seed)
    scale = 2**-10  # large pages of 20 KiB
    pages, live = LinkedBlocks(expandable=True, page_scale=scale), dict[int, int]()
    machine = Machine(rng.choice((2000 * KIB, 800 * KIB)), pages=Caching(scale))
    for _ in range(80):
        action = rng.random()
        if action < 0.1:
            machine.trim()
            pages.trim()
        elif action < 0.4 and live:
            key = rng.choice(list(live))
            machine.release(key, live.pop(key))
            pages.release(key)
        else:
            sizes = [512 * rng.randrange(1, 200) for _ in range(rng.choice((1, 1, 2, 3)))]
            if not (fits := room_for(sizes, pages, machine)):
                pages.trim()
                fits = room_for(sizes, pages, machine)
            with nullcontext() if fits else pytest.raises(SimulatedOutOfMemory):
                machine.admit(sizes)
                for size in sizes:
                    key = machine.enter(size, (size,), torch.uint8)
                    live[key] = size
                    pages.allocate(key, size)
        assert machine.used_bytes == pages.used_bytes


def room_for(sizes: list[int], pages: LinkedBlocks, machine: Machine) -> bool:
    trial = copy.deepcopy(pages)
    for number, size in enumerate(sizes):
        trial.allocate(-1 - number, size)
    return trial.used_bytes <= machine.capacity_bytes
