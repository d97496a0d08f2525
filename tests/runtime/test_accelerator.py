"""`AcceleratorDevice` on the backend from outside (tests/outside/brook.cpp). Run by
`test_outside`, in processes of its own."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from whole_pipelines import TinyPipeline, pixels, planned, streamed

import graphrun
from graphrun.device_kinds import DeviceKind
from graphrun.devices import hardware_for
from graphrun.errors import InputError, OutOfMemory
from graphrun.model.hardware import Hardware
from graphrun.profile.hardware import simulated
from graphrun.report.plan_files import read_solution
from graphrun.report.screen import Units
from graphrun.runtime.devices import accelerator
from graphrun.runtime.devices.accelerator import AcceleratorDevice, Backend
from graphrun.runtime.devices.open import open_hardware
from graphrun.runtime.direct_reads import Span
from graphrun.solve.infeasible import smallest_budget
from graphrun.solve.solve import solve
from graphrun.units import MIB, show_seconds
from graphrun.verify.simulate import simulate

sys.path.insert(0, str(Path(__file__).parent.parent / "attach"))
from test_attach_pipelines import equal, weight_bytes  # noqa: E402
from tiny_pipelines import cases  # noqa: E402

NAMES = ("flux-tiny", "sdxl-tiny", "wan-tiny")


@pytest.fixture(params=["outside"], autouse=True)
def backend(outside_backend: Any) -> Iterator[Any]:
    if outside_backend is None:
        pytest.skip("the backend from outside has a process of its own: test_outside")
    outside_backend.set_copy_microseconds(0)
    outside_backend.set_synchronous(False)
    accelerator._overlap_faults().clear()
    yield outside_backend
    outside_backend.set_synchronous(False)
    accelerator._overlap_faults().clear()


def hardware(**changes: Any) -> Hardware:
    """The rates of the simulated accelerator, and tensors counted in bytes: the backend has no
    pages."""
    return replace(simulated(), name="brook", device="brook", **changes)


def test_overlap_is_proved() -> None:
    device = AcceleratorDevice("brook")
    assert not device.serial_copies
    assert not any("overlap" in notice for notice in device.notices)


def test_a_backend_whose_copies_make_the_host_wait_is_planned_without_overlap(backend: Any) -> None:
    backend.set_synchronous(True)
    device = AcceleratorDevice("brook")
    assert device.serial_copies
    assert "copies do not overlap compute (a copy from page-locked memory" in device.notices[0]


def test_the_host_goes_on_but_a_kernel_waits_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AcceleratorDevice, "_new_stream", AcceleratorDevice._current_stream)
    device = AcceleratorDevice("brook")
    assert "(a kernel waits for copies on another stream)" in device.notices[0]


def test_a_kind_with_one_queue_does_everything_in_order() -> None:
    device = AcceleratorDevice(DeviceKind("brook", overlap="never", pinning="none"))
    assert device.serial_copies
    source = device.arena(MIB, pinned=True)
    assert not source.is_pinned()
    with device.capped(4 * MIB):
        target = device.allocate(MIB)
        device.copy(target, source.fill_(7))
        device.wait("compute", device.mark("copy"))
        assert torch.equal(target.cpu(), source)
        device.barrier()
        assert device.seconds_at(device.mark("compute")) > 0


def test_host_memory_is_pinned_when_it_is_allocated() -> None:
    device = AcceleratorDevice("brook")
    pinned, pageable = device.arena(MIB, pinned=True), device.arena(MIB)
    assert pinned.is_pinned()
    assert not pageable.is_pinned()
    assert pinned.numel() == pageable.numel() == MIB
    assert device.arenas.peak_bytes("arenas") == 2 * MIB


@pytest.mark.parametrize("has_counters", [True, False])
def test_without_a_limit_of_the_backend_own_allocations_are_checked(
    has_counters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AcceleratorDevice, "_counts_memory", lambda device: has_counters)
    device = AcceleratorDevice("brook")
    texts = " ".join(device.notices)
    assert "this backend has no memory limit" in texts
    assert ("does not count its memory" in texts) != has_counters
    with device.capped(3 * MIB):
        device.reset_peak()
        first = device.allocate(2 * MIB)
        with pytest.raises(torch.OutOfMemoryError) as error_info:
            device.allocate(2 * MIB)
        explained = device.explain(error_info.value)
        assert isinstance(explained, OutOfMemory)
        assert "brook:0" in str(explained)
        assert device.refused(error_info.value)
        assert device.allocated_bytes == 2 * MIB
        assert len(device.holders()) == 1
        del first
        assert (device.allocated_bytes, device.peak_bytes) == (0, 2 * MIB)
    assert device.allocate(4 * MIB).numel() == 4 * MIB


def test_a_missing_device_is_refused() -> None:
    with pytest.raises(InputError, match="no brook:1: torch sees 1 brook devices"):
        AcceleratorDevice("brook", 1)
    with pytest.raises(InputError, match="has no device 'npu'"):
        Backend("npu")


def test_the_device_is_detected_by_its_name() -> None:
    card = hardware_for(None, "brook", to_run=True)
    assert (card.name, card.device) == ("brook", "brook")
    with pytest.warns(RuntimeWarning, match="graphrun checks its own allocations"):
        assert isinstance(open_hardware(card), AcceleratorDevice)


@pytest.mark.filterwarnings("ignore:brook:RuntimeWarning")
@pytest.mark.parametrize("name", NAMES)
def test_the_output_is_the_plain_pipelines_within_the_planned_bytes(name: str) -> None:
    whole = TinyPipeline(name, {"steps": 2}, hardware(), "brook")
    problem = whole.smallest()
    plan = planned(problem)
    assert streamed(plan)
    for _ in range(2):
        trace = whole.run(problem, plan)
        assert np.array_equal(pixels(trace.outputs["image"]), whole.image)
        assert all(
            actual.peak_bytes <= slot.peak_bytes
            for actual, slot in zip(trace.slots, simulate(problem, plan).slots, strict=True)
        )
        assert trace.left_bytes == 0


@pytest.mark.filterwarnings("ignore:brook:RuntimeWarning")
@pytest.mark.parametrize("queues", [1, 2])
def test_unified_memory_is_filled_from_files(queues: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a thread for the copy stream, and on a device with one queue."""
    if queues == 1:
        monkeypatch.setattr(AcceleratorDevice, "_open_streams", lambda device: False)
    whole = TinyPipeline("flux-tiny", {"steps": 2}, hardware(), "brook")
    card = hardware(unified=True, context_bytes=MIB, serial_copies=queues == 1)
    limits = {"hardware": card, "inputs": whole.inputs}
    roomy = graphrun.estimate(whole.graph, memory="1G", **limits)
    problem = graphrun.estimate(whole.graph, memory=smallest_budget(roomy), **limits)
    solution = solve(problem)
    variants = {c.variants[0].backing_store for c in solution.simulation.problem.components}
    assert variants == {"file"}
    assert streamed(solution.plan)
    trace = graphrun.run(solution, whole.graph, whole.inputs, random_weights=True)
    assert np.array_equal(pixels(trace.outputs["image"]), whole.image)
    assert trace.unified
    assert all(
        actual.peak_bytes <= slot.peak_bytes
        for actual, slot in zip(trace.slots, solution.simulation.slots, strict=True)
    )


def test_reads_of_files_wait_for_compute(backend: Any, tmp_path: Path) -> None:
    """Copies of this backend take 50 ms: one on the compute stream, then one of what is read."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(range(256)) * 16)
    device = AcceleratorDevice("brook", unified=True)
    source, span = device.arena(4096, pinned=True), Span(str(file), 0, 4096, 4096)
    with device.capped(MIB):
        target = device.allocate(4096)
        backend.set_copy_microseconds(50_000)
        with device._on("compute"):
            target.copy_(source, non_blocking=True)
        compute_mark = device.mark("compute")
        device.wait("copy", compute_mark)
        device.read_block([(span, target)], None)
        read_mark = device.mark("copy")
        device.wait("compute", read_mark)
        device.barrier()
        assert device.seconds_at(read_mark) - device.seconds_at(compute_mark) > 0.04
        assert bytes(target.tolist()) == file.read_bytes()


def test_an_error_of_a_read_is_raised_by_the_wait_for_it(tmp_path: Path) -> None:
    device = AcceleratorDevice("brook", unified=True)
    span = Span(str(tmp_path / "missing"), 0, 4096, 4096)
    with device.capped(MIB):
        target = device.allocate(4096)
        device.read_block([(span, target)], None)
        with pytest.raises(InputError, match="missing"):
            device.wait("compute", device.mark("copy"))
        device.barrier()  # raises nothing more


@pytest.mark.filterwarnings("ignore:brook:RuntimeWarning")
@pytest.mark.parametrize("copies", ["overlapped", "serial"])
def test_a_pipeline_is_attached_by_the_backends_name(copies: str, backend: Any) -> None:
    """Within less than its weights, whether copies overlap compute or not."""
    backend.set_synchronous(copies == "serial")
    case = cases()["FluxPipeline"]
    pipe = case.build()
    expected = case.call(copy.deepcopy(pipe).to("brook"))
    gc.collect()
    vram = int(0.9 * weight_bytes(pipe))
    with graphrun.attach(
        pipe, vram=vram, ram="8G", hardware=hardware(), device="brook"
    ) as attachment:
        for _ in range(2):
            assert equal(case.call(pipe), expected)
            assert attachment.trace.peak_bytes <= vram
        assert attachment._hardware.serial_copies == (copies == "serial")


def test_an_attached_pipeline_shares_the_one_memory_with_copies_of_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The budgets of device and host together are the memory that the machine has left."""
    case, pool = cases()["FluxPipeline"], hardware(unified=True)
    pipe = case.build()
    with pytest.raises(InputError, match=r"brook gets copies .* vram='4G', in place of memory"):
        graphrun.attach(pipe, memory="8G", hardware=pool)
    taken_bytes, free_bytes = weight_bytes(pipe), 4 << 30
    monkeypatch.setattr("graphrun.kernel_memory.available_bytes", lambda path: free_bytes)
    with pytest.warns(RuntimeWarning, match="brook:0"):
        attachment = graphrun.attach(pipe, hardware=pool)
    with attachment:
        limits = attachment._limits
        assert limits.budget_bytes + limits.ram_bytes <= free_bytes + 2 * taken_bytes
        assert limits.ram_bytes >= taken_bytes
        expected = case.call(case.build().to("brook"))
        assert equal(case.call(pipe), expected)


SERIAL = "copies do not overlap compute on brook: planned again, "


@pytest.mark.filterwarnings("ignore:brook:RuntimeWarning")
def test_a_run_is_planned_again_without_overlap_and_says_so(backend: Any, graphrun: Any) -> None:
    """On the screen before the plan; the numbers compared afterwards are those of the new plan."""
    backend.set_synchronous(True)
    command = ["run", "flux-tiny", "--device", "brook", "--vram", "662M", "--random-weights"]
    code, screen, errors = graphrun(*command, "--plan", "plan.json", "-o", "picture.png")
    assert code in (0, 4), errors  # rates are those of another device
    assert errors.count(SERIAL) == 1
    assert "brook:0: copies do not overlap compute (a copy from page-locked memory" in errors
    assert "brook:0: this backend has no memory limit" in errors
    solution = read_solution(Path("plan.json"))[0]
    assert solution.problem.hardware.serial_copies
    assert show_seconds(solution.simulation.seconds) in errors
    seconds = Units(solution.simulation.peak_bytes, solution.simulation.seconds)
    assert seconds.row("", 0, 0, 0, 0, solution.simulation.seconds, 0)[-2] in screen


@pytest.mark.filterwarnings("ignore:brook:RuntimeWarning")
def test_runs_and_sessions_in_python_are_planned_again_without_overlap(backend: Any) -> None:
    backend.set_synchronous(True)
    graph, lines = graphrun.load("flux-tiny"), list[str]()
    solution = graphrun.plan(graphrun.estimate(graph, vram="4M", hardware=hardware()))
    assert not solution.problem.hardware.serial_copies
    trace = graphrun.run(solution, graph, random_weights=True, tell=lines.append)
    assert [line.startswith(SERIAL) for line in lines] == [True]
    assert trace.notes == tuple(lines)
    assert trace.plan_digest != solution.plan.digest
    with graphrun.Session(
        graph, vram="4M", hardware=hardware(), random_weights=True, runs=2
    ) as session:
        assert session.solution.problem.hardware.serial_copies
        assert session.plan().problem.hardware.serial_copies
    batch = graphrun.run_many(graph, ["a cat"], vram="4M", hardware=hardware(), random_weights=True)
    solutions = [segment.solution for plan in batch.schedules for segment in plan.segments]
    assert all(solution.problem.hardware.serial_copies for solution in solutions)


@pytest.mark.filterwarnings("ignore:brook:RuntimeWarning")
def test_a_run_whose_copies_overlap_follows_its_plan() -> None:
    graph, lines = graphrun.load("flux-tiny"), list[str]()
    solution = graphrun.plan(graphrun.estimate(graph, vram="4M", hardware=hardware()))
    trace = graphrun.run(solution, graph, random_weights=True, tell=lines.append)
    assert not lines
    assert not trace.notes


def _fails(*arguments: Any) -> None:
    raise ValueError("of the backend's own code")


FUNCTIONS = (
    *accelerator._OPTIONAL,
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
    "current_stream",
)


@pytest.mark.parametrize("replacement", [_fails, lambda *arguments: None], ids=["fails", "None"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_does_not_work_is_replaced_as_one_that_is_missing(
    name: str, replacement: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.get_device_module("brook"), name, replacement, raising=False)
    assert hardware_for(None, "brook", to_run=True).device == "brook"
    device = AcceleratorDevice("brook")
    assert device.serial_copies == (name == "current_stream")
    with device.capped(4 * MIB):
        device.reset_peak()
        memory = device.allocate(MIB)
        device.copy(memory, device.arena(MIB, pinned=True).fill_(3))
        device.wait("compute", device.mark("copy"))
        assert int(memory[-1].cpu()) == 3
        device.barrier()
        assert device.peak_bytes >= MIB
        assert device.available_bytes > 0
        assert device.holders()
        device.release_cached()


@pytest.mark.parametrize("count", [_fails, lambda: 0, lambda: None], ids=["fails", "0", "None"])
def test_a_backend_without_devices_is_refused(count: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.get_device_module("brook"), "device_count", count)
    with pytest.raises(InputError, match="no brook device found to run on: .*; or run on the CPU"):
        hardware_for(None, "brook", to_run=True)
    with pytest.raises(InputError, match=r"does not count its devices|torch sees 0 brook devices"):
        AcceleratorDevice("brook")
