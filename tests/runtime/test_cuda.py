"""Bitwise results, cleanup and the memory limit on a CUDA device; skipped without one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from mmap import PAGESIZE
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_component import (
    PREFETCH,
    WIDE,
    Small,
    calls_to,
    plan_of,
    small_hardware,
    small_problem,
    tensors,
    use,
)

from graphrun.errors import BrokenPlan, GraphrunError, InputError, OutOfMemory
from graphrun.runtime.devices.accelerator import AcceleratorDevice, Backend
from graphrun.runtime.devices.device import Arenas
from graphrun.runtime.executor import follow
from graphrun.runtime.host import Host
from graphrun.units import GIB, MIB
from graphrun.verify.solution import solution_of

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CALLS = ["a"] * 4 + ["b"]


@on_cuda
def test_streaming_on_cuda_gives_the_bits_of_resident_weights_and_leaves_nothing() -> None:
    from graphrun.runtime.devices.cuda import CudaDevice

    modules = {"a": Small(), "b": Small(1)}
    hardware = small_hardware(h2d=20e9, flops=1e13)
    problem = small_problem(modules, [[use("a", 4, hardware)], [use("b", 1, hardware)]], hardware)
    plan, device = (
        plan_of(problem, PREFETCH.format(ring_buffer=2 * WIDE)),
        CudaDevice(workspace_bytes=64 * MIB),
    )
    with torch.no_grad():
        expected = calls_to(
            {n: copy.deepcopy(m).cuda() for n, m in modules.items()}, CALLS, device.torch_device
        )["x"]
    torch._C._cuda_clearCublasWorkspaces()
    host = Host(modules, problem, device)
    for residency in host.residencies.values():  # what is registered is not registered again
        memory = residency.backing_store.memory
        assert int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), 1, 0)) != 0
        device._clear_last_error()
    for _ in range(5):
        trace = follow(
            solution_of(problem, plan),
            host,
            device,
            lambda: calls_to(host.modules, CALLS, device.torch_device),
        )
        assert torch.equal(trace.outputs["x"], expected)
        assert trace.left_bytes == 0
        assert all(t.device.type == "cpu" for module in modules.values() for t in tensors(module))
        assert all(0 <= e.start_seconds <= e.end_seconds for e in trace.events)


@on_cuda
def test_the_allocator_refuses_more_than_the_cap_and_recovers() -> None:
    from graphrun.runtime.devices.cuda import CudaDevice

    device = CudaDevice()
    with device.capped(64 * MIB), pytest.raises(torch.OutOfMemoryError) as error_info:
        device.allocate(GIB)
    assert isinstance(device.explain(error_info.value), OutOfMemory)
    with device.capped(2 * GIB):
        assert device.allocate(GIB).numel() == GIB


class Allocator:
    """PyTorch's caching allocator and cuBLAS's workspace, as `CudaDevice` sees them: bytes of
    tensors and of the workspace."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.tensors = self.workspace = self.cached = self.peak = 0
        patch.setattr(torch.cuda, "memory_allocated", lambda index: self.tensors + self.workspace)
        patch.setattr(torch.cuda, "max_memory_reserved", lambda index: self.peak)
        patch.setattr(
            torch.cuda, "reset_peak_memory_stats", lambda index: self.reserve(restart=True)
        )
        patch.setattr(torch.cuda, "empty_cache", self.empty)
        patch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.clear, raising=False)

    def reserve(self, *, restart: bool = False) -> None:
        self.peak = max(0 if restart else self.peak, self.tensors + self.workspace + self.cached)

    def product(self, nbytes: int) -> None:
        self.cached -= min(nbytes, self.cached) if not self.workspace else 0
        self.workspace = nbytes
        self.reserve()

    def clear(self) -> None:
        self.cached, self.workspace = self.cached + self.workspace, 0

    def empty(self) -> None:
        self.cached = 0


def test_the_peak_is_without_the_workspace_that_calls_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from graphrun.runtime.devices.cuda import CudaDevice

    allocator, device = Allocator(monkeypatch), CudaDevice.__new__(CudaDevice)
    device._index, device._workspace_bytes = 0, 8 * MIB
    monkeypatch.setattr(device, "_allocate_workspaces", lambda: allocator.product(8 * MIB))
    device.release_cached()
    peaks = []
    for calls in (0, 1, 1, 0):  # in a slot that loads weights, none
        if not calls:
            device.release_cached()
        device.reset_peak()
        allocator.tensors = 20 * MIB
        allocator.reserve()
        for _ in range(calls):
            device.before_call(first=True)
        peaks.append(device.peak_bytes)
    assert peaks == [20 * MIB] * 4


def test_a_second_card_leaves_the_first_ones_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """`_cuda_clearCublasWorkspaces` frees those of all cards."""
    from graphrun.runtime.devices import cuda

    workspaces = dict[int, int]()
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", workspaces.clear, raising=False)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: workspaces.get(index, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    cards = [cuda.CudaDevice.__new__(cuda.CudaDevice) for _ in range(2)]
    monkeypatch.setattr(cuda, "_OPEN_DEVICES", cards)
    for index, card in enumerate(cards):
        card._index, card._workspace_seen_bytes = index, 0
        allocate = partial(workspaces.__setitem__, index, 9 * MIB)
        monkeypatch.setattr(card, "_allocate_workspaces", allocate)
    for _ in range(2):  # a product of the pipeline's own code came first
        workspaces[0] = 8 * MIB
        for _ in range(2):
            for card in cards:
                card.before_call(first=True)
        assert workspaces == {0: 9 * MIB, 1: 9 * MIB}
        assert [card._workspace_seen_bytes for card in cards] == [9 * MIB] * 2
        for card in cards:
            card.release_cached()


def test_the_allocators_limit_is_that_of_the_cap_or_of_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the cap as its limit, the allocator would refuse requests that map fewer pages than they
    have bytes, though the plan stays within the cap."""
    from graphrun.runtime.devices.cuda import CudaDevice

    shares = [0.9]
    total = 24 * GIB
    for name, fake in {
        "get_per_process_memory_fraction": lambda index: shares[-1],
        "set_per_process_memory_fraction": lambda share, index: shares.append(share),
        "get_device_properties": lambda index: SimpleNamespace(total_memory=total),
        "device": lambda index: nullcontext(),
        "current_stream": lambda index: None,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(CudaDevice, "mark", lambda self, stream: None)
    device = CudaDevice.__new__(CudaDevice)
    device._index, device._workspace_bytes = 0, 8 * MIB
    for cap, limit, expected in (
        (8 * GIB, 0, 8 * GIB),
        (8 * GIB, 7 * GIB, 8 * GIB),
        (8 * GIB, 9 * GIB, 9 * GIB),
    ):
        with device.capped(cap, limit):
            assert int(shares[-1] * total) == expected + 8 * MIB
        assert shares[-1] == 0.9


def test_arenas_are_locked_until_they_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole pages, for every context of the process (cudaHostRegisterPortable)."""
    from graphrun.runtime.devices.cuda import CudaDevice

    codes, lock_arguments = [0, 2], dict[int, tuple[int, int]]()

    def lock(address: int, nbytes: int, flags: int) -> int:
        lock_arguments[address] = nbytes, flags
        return codes.pop(0)

    driver = SimpleNamespace(cudaHostRegister=lock, cudaHostUnregister=lock_arguments.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    device = CudaDevice.__new__(CudaDevice)
    device.arenas = Arenas()
    cleared = list[int]()
    monkeypatch.setattr(device, "_clear_last_error", lambda: cleared.append(1))
    arena = device.arena(PAGESIZE + 1)
    device.pin(device.arena(0))
    device.pin(arena)
    assert lock_arguments == {arena.data_ptr(): (2 * PAGESIZE, 1)}
    assert (device.arenas.nbytes("pinned"), cleared) == (PAGESIZE + 1, [])
    del arena
    assert not lock_arguments
    with pytest.raises(
        InputError, match=r"refused to pin 1.00 MiB \(cudaError 2\): raise the limit"
    ):
        device.pin(device.arena(MIB))
    assert (device.arenas.nbytes("pinned"), cleared) == (0, [1])


@pytest.mark.parametrize(
    ("error", "error_class", "message"),
    [
        (
            torch.OutOfMemoryError("no room. GPU 12 has a total capacity of\n8 GiB"),
            OutOfMemory,
            "cuda:12 refused an allocation: no room. GPU 12 has a total capacity of",
        ),
        (torch.OutOfMemoryError("no\nroom"), OutOfMemory, "cuda:3 refused an allocation: no"),
        (
            torch.AcceleratorError("misaligned\naddress"),
            BrokenPlan,
            "cuda:3 failed: misaligned; this process cannot use it again",
        ),
        (RuntimeError("out of memory"), None, None),
    ],
)
def test_errors_name_the_card_that_raised_them(
    error: Exception, error_class: type[GraphrunError] | None, message: str | None
) -> None:
    from graphrun.runtime.devices.cuda import CudaDevice

    device = CudaDevice.__new__(CudaDevice)
    device.torch_device = torch.device("cuda", 3)
    explained = device.explain(error)
    assert (explained and type(explained), explained and str(explained)) == (error_class, message)


@pytest.mark.parametrize(("is_integrated", "free"), [(True, 9 * GIB), (False, 2 * GIB)])
def test_an_integrated_card_has_free_what_the_system_has(
    is_integrated: bool, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page cache included, which CUDA's own figure leaves out."""
    from graphrun.runtime.devices import cuda

    properties = SimpleNamespace(is_integrated=is_integrated)
    monkeypatch.setattr(cuda, "host_ram_bytes", lambda: 9 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (2 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: GIB)
    device = cuda.CudaDevice.__new__(cuda.CudaDevice)
    device._index, device._workspace_bytes = 0, MIB
    assert device.available_bytes == free + GIB - MIB


def test_without_a_limit_of_the_backend_allocations_beyond_the_cap_are_refused() -> None:
    device: Any = AcceleratorDevice.__new__(AcceleratorDevice)
    device.torch_device, device._own_bytes = torch.device("cpu"), Arenas()
    device._is_asynchronous = device._has_counters = False
    with device._checked(3 * MIB):
        first = device.allocate(2 * MIB)
        second = device.allocate(MIB)
        with pytest.raises(torch.OutOfMemoryError, match="1 B on top of 3.00 MiB exceed"):
            device.allocate(1)
        assert (first.numel(), second.numel(), device.allocated_bytes) == (2 * MIB, MIB, 3 * MIB)
    assert device.allocate(MIB).numel() == MIB


def test_a_card_whose_properties_have_no_size_has_the_memory_that_it_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from graphrun.runtime.devices.cuda import CudaDevice

    device = CudaDevice.__new__(CudaDevice)
    device._index = 0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (2 * GIB, 24 * GIB))
    for properties in (SimpleNamespace(), SimpleNamespace(total_memory=0)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index, p=properties: p)
        assert device._total_bytes == 24 * GIB


@pytest.mark.parametrize(
    ("counter", "is_counting"),
    [(None, False), (lambda index: 0, False), (lambda index: MIB, True)],
    ids=["no counter", "always 0", "counts"],
)
def test_a_counter_that_counts_no_tensor_is_not_used(
    counter: Callable[[int], int] | None, is_counting: bool
) -> None:
    device: Any = AcceleratorDevice.__new__(AcceleratorDevice)
    device._index, device.torch_device = 0, torch.device("cpu")
    device._backend = SimpleNamespace(function=lambda name: counter)
    assert device._counts_memory() == is_counting


def test_holders_are_the_live_blocks_largest_first_or_their_sum() -> None:
    device: Any = AcceleratorDevice.__new__(AcceleratorDevice)
    device._own_bytes, device._has_counters = Arenas(), False
    blocks = [
        {"size": 1 * MIB, "state": "active_allocated"},
        {"size": 4 * MIB, "state": "inactive"},
        {"size": 2 * MIB, "state": "active_allocated"},
    ]
    device._backend = SimpleNamespace(function=lambda name: lambda: [{"blocks": blocks}])
    assert device.holders() == ("2.00 MiB", "1.00 MiB")
    device._backend = SimpleNamespace(function=lambda name: None)
    assert device.holders() == ()
    memory = torch.empty(3 * MIB, dtype=torch.uint8)
    device._own_bytes.count("device", memory)
    assert device.holders() == ("3.00 MiB",)


def test_a_device_whose_events_have_no_time_still_has_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def untimed(*events: object) -> float:
        raise ValueError("events have no time")

    for elapsed, has_timing in ((untimed, False), (lambda *events: 0.0, True)):
        device: Any = AcceleratorDevice.__new__(AcceleratorDevice)
        device._origin = SimpleNamespace(elapsed_time=elapsed)
        monkeypatch.setattr(device, "_make_streams", lambda: None)
        assert device._open_streams()
        assert device._has_timing == has_timing
    device._origin = None
    monkeypatch.setattr(device, "_make_streams", untimed)
    assert not device._open_streams()


def test_memory_that_is_locked_at_allocation_begins_at_a_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tensor is counted with the bytes asked for, and keeps its memory."""
    memory = torch.empty(4 * PAGESIZE, dtype=torch.uint8)
    locked_memory = memory[(1 - memory.data_ptr()) % PAGESIZE :]  # begins one byte behind a page
    sizes = list[int]()

    def empty(nbytes: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        sizes.append(nbytes)
        return locked_memory[:nbytes]

    device: Any = AcceleratorDevice.__new__(AcceleratorDevice)
    device.arenas = Arenas()
    device.kind = SimpleNamespace(pinning="at allocation")
    device._backend = SimpleNamespace(is_current=True)
    monkeypatch.setattr(torch, "empty", empty)
    arena = device.arena(PAGESIZE + 5, pinned=True)
    assert (arena.numel(), arena.data_ptr() % PAGESIZE) == (PAGESIZE + 5, 0)
    assert device.arenas.nbytes("arenas") == PAGESIZE + 5
    assert device._read_buffer(PAGESIZE).numel() == PAGESIZE
    assert sizes == [2 * PAGESIZE + 5, 2 * PAGESIZE]


def test_functions_are_tried_without_resetting_the_peaks_of_a_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried_indices = list[int]()
    monkeypatch.setattr(torch.cpu, "memory_allocated", tried_indices.append, raising=False)
    monkeypatch.setattr(torch.cpu, "reset_peak_memory_stats", tried_indices.append, raising=False)
    backend = Backend("cpu")
    backend.probe(7)
    assert tried_indices == [7], "only memory_allocated"
    assert backend.function("memory_allocated") is None, "it returned no number"
    assert backend.function("reset_peak_memory_stats") is not None


@pytest.mark.parametrize(
    ("is_readable", "is_settable"), [(True, True), (False, True), (True, False)]
)
def test_opening_a_backend_leaves_the_users_memory_limit(
    is_readable: bool, is_settable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a function that returns the limit, it could not be restored."""
    fractions = [0.5]

    def set_fraction(share: float, index: int) -> None:
        if not is_settable:
            raise ValueError("of the backend's own code")
        fractions.append(share)

    name = "per_process_memory_fraction"
    monkeypatch.setattr(torch.cpu, f"set_{name}", set_fraction, raising=False)
    if is_readable:
        monkeypatch.setattr(torch.cpu, f"get_{name}", lambda index: fractions[-1], raising=False)
    backend = Backend("cpu")
    backend.probe(0)
    assert set(fractions) == {0.5}
    assert (backend.function(f"set_{name}") is not None) == (is_readable and is_settable)
