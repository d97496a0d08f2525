"""Backing stores are read and dropped as planned, or stay on disk: same bits, planned bytes,
planned seconds."""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_component import (
    THIN,
    WIDE,
    WIDTH,
    Small,
    device_of,
    plain,
    plan_of,
    run,
    small_hardware,
    small_problem,
    use,
)
from stored_component import host_of, in_backing_store, open_files, saved

from graphrun.errors import InputError, PlanError
from graphrun.model.hardware import Hardware
from graphrun.model.plan import Plan
from graphrun.model.problem import Problem
from graphrun.modules.blocks import BlockLayout
from graphrun.runtime.backing import Disk, PacedReads
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.runtime.events import EventRecorder
from graphrun.runtime.host import Host
from graphrun.runtime.streamer import Streamer, Streaming
from graphrun.sim import Machine
from graphrun.trace import Trace
from graphrun.verify.simulate import simulate

ON = replace(small_hardware(), disk_bytes_per_second=4e8, pageable_bytes_per_second=5e8)

# ``a`` computes twice while ``b`` is read; then the backing store of a is dropped, and b is copied
# from its own.
BESIDE = """
    slot s0/0:a load
      read a
      load a unblocked[0] from {backing_store}
    slot s0/0:a first
      read b
      load a wide[0-3] thin[0-5] from {backing_store}
      run
    slot s0/0:a steady x1
      run
    slot s1/0:b load
      drop a
      evict a all
      load b unblocked[0] from {backing_store}
    slot s1/0:b first
      load b wide[0-3] thin[0-5] from {backing_store}
      run
    slot end
      drop b
      evict b all
"""

# a streams from disk, keeping one block of each group; b is loaded whole at the same time.
FROM_DISK = """
    slot s0/0:a load
      load a unblocked[0] from disk
    slot s0/0:a first
      stream a keep unblocked[0] wide[1] thin[2] ring buffer {ring_buffer} B
      load a wide[1] thin[2] from disk
      run
    slot s0/0:a steady x2
      stream a keep unblocked[0] wide[1] thin[2] ring buffer {ring_buffer} B
      load b all from disk
      run
    slot s1/0:b load
      drop a
      evict a unblocked[0] wide[1] thin[2]
    slot s1/0:b first
      run
    slot end
      evict b all
"""


class Case:
    """Two components whose weights lie in files, a plan, and what the plain modules compute."""

    def __init__(
        self,
        folder: Path,
        backing_store: str,
        text: str,
        calls: list[str],
        hardware: Hardware = ON,
    ) -> None:
        phases = [[use(name, calls.count(name), hardware)] for name in ("a", "b")]
        problem = small_problem({}, phases, hardware)
        self.problem: Problem = replace(
            problem,
            components=tuple(
                in_backing_store(backing_store, name, hardware) for name in ("a", "b")
            ),
        )
        self.plan: Plan = plan_of(
            self.problem, text.format(backing_store=backing_store, ring_buffer=2 * WIDE)
        )
        self.calls, self.backing_store = calls, backing_store
        self.folders = {"a": saved(folder / "a"), "b": saved(folder / "b", 1)}
        self.device: SimulatedDevice = device_of(self.problem)
        self.host: Host = host_of(self.problem, self.folders, self.device)
        self.expected = plain({"a": Small(), "b": Small(1)}, calls)

    def run(self) -> Trace:
        return run(self.problem, self.plan, self.host, self.device, self.calls)

    def planned(self) -> Any:
        return simulate(self.problem, self.plan)


Make = Callable[[str, str, list[str]], Case]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda backing_store, text, calls: Case(tmp_path, backing_store, text, calls)


@pytest.mark.parametrize("backing_store", ["pinned", "pageable"])
def test_backing_stores_are_read_and_dropped_as_planned_with_the_same_bits(
    make: Make, backing_store: str
) -> None:
    case = make(backing_store, BESIDE, ["a", "a", "b"])
    for _ in range(2):
        assert case.device.arenas.nbytes("arenas") == 0, "nothing is read before the run"
        trace = case.run()
        assert torch.equal(trace.outputs["x"], case.expected)
        assert [slot.host_bytes for slot in trace.slots] == [
            slot.host_bytes for slot in case.planned().slots
        ]
        assert [slot.locked_bytes for slot in trace.slots] == [
            slot.pinned_bytes for slot in case.planned().slots
        ]
        assert trace.host_bytes == 2 * case.problem.components[0].variants[0].host_bytes
        assert {e.component for e in trace.events if e.kind == "read"} == {"a", "b"}
        assert sum(e.nbytes for e in trace.events if e.kind == "drop") == trace.host_bytes
    assert case.device.allocated_bytes == case.device.arenas.nbytes("arenas") == 0


@pytest.mark.parametrize("backing_store", ["pinned", "pageable"])
def test_copies_wait_for_the_read_of_their_own_block_in_the_planned_seconds(
    make: Make, backing_store: str
) -> None:
    case = make(backing_store, BESIDE, ["a", "a", "b"])
    trace, simulation = case.run(), case.planned()
    assert trace.seconds == pytest.approx(simulation.seconds, rel=0.02)
    read_seconds = 2 * case.problem.components[0].weight_bytes() / ON.disk_bytes_per_second
    copies = trace.moved_bytes / (
        ON.h2d_bytes_per_second if backing_store == "pinned" else ON.pageable_bytes_per_second
    )
    assert read_seconds < trace.seconds < read_seconds + 0.75 * copies, (
        "copies and compute overlap with the reads"
    )
    loads = {
        e.detail: e.start_seconds for e in trace.events if e.kind == "load" and e.component == "a"
    }
    reads = {
        e.detail: e.end_seconds for e in trace.events if e.kind == "read" and e.component == "a"
    }
    assert all(loads[path] >= reads[path] - 1e-9 for path in reads)


def test_a_backing_store_on_disk_is_read_at_every_copy_through_two_blocks_of_memory(
    make: Make,
) -> None:
    case = make("disk", FROM_DISK, ["a", "a", "a", "b"])
    trace, simulation = case.run(), case.planned()
    assert torch.equal(trace.outputs["x"], case.expected)
    assert trace.seconds == pytest.approx(simulation.seconds, rel=0.02)
    copies = [e for e in trace.events if e.kind in ("load", "stream")]
    assert sorted(e.detail for e in trace.events if e.kind == "fetch") == sorted(
        e.detail for e in copies
    )
    assert trace.moved_bytes == sum(e.nbytes for e in copies)
    assert 0.99 * trace.moved_bytes < trace.disk_bytes_read <= trace.moved_bytes, (
        "files hold no alignment"
    )
    assert [slot.host_bytes for slot in trace.slots] == [
        slot.host_bytes for slot in simulation.slots
    ]
    assert trace.host_bytes == 2 * 2 * max(WIDE, THIN)
    assert torch.equal(case.run().outputs["x"], case.expected)


@pytest.mark.parametrize("backing_store", ["pinned", "pageable"])
def test_files_are_open_from_the_first_to_the_last_read_of_a_backing_store(
    make: Make, backing_store: str
) -> None:
    case = make(backing_store, BESIDE, ["a", "a", "b"])
    residency, file = case.host.residencies["a"], str(case.folders["a"] / "model.safetensors")
    residency.prepare_reads()
    store: Any = residency.backing_store
    is_open = [file in open_files()]
    while store.pending:
        store.begin_next()
        is_open.append(file in open_files())
    assert is_open == [False, *[True] * 10, False]


def test_a_read_that_has_not_begun_when_its_backing_store_is_dropped_reads_nothing(
    make: Make,
) -> None:
    case = make("disk", FROM_DISK, ["a", "a", "a", "b"])
    device, residency = with_late_reader(case), case.host.residencies["a"]
    residency.prepare_reads()
    assert not residency.backing_store.request("wide.0"), "its copy would make the host wait"
    residency.drop()
    assert not device.jobs
    assert not device.log


def test_modules_have_no_weights_on_the_host_after_their_backing_store_is_dropped(
    make: Make,
) -> None:
    case = make("pinned", BESIDE, ["a", "a", "b"])
    case.run()
    assert all(
        parameter.is_meta
        for module in case.host.modules.values()
        for parameter in module.parameters()
    )


@pytest.mark.parametrize("change", ["cut", "changed", "gone"])
def test_a_file_that_is_not_what_it_was_is_refused_by_name(make: Make, change: str) -> None:
    case = make("disk", FROM_DISK, ["a", "a", "a", "b"])
    file = case.folders["b"] / "model.safetensors"
    if change == "cut":
        os.truncate(file, file.stat().st_size - 1000)
    elif change == "changed":
        with file.open("r+b") as stream:
            stream.seek(-4, os.SEEK_END)
            stream.write(b"evil")
        os.utime(file, ns=(1, 1))
    else:
        file.unlink()
    with pytest.raises(
        InputError, match=r"b/model.safetensors (was changed|can no longer be opened)"
    ):
        case.run()
    assert case.device.allocated_bytes == 0
    saved(case.folders["b"], 1)
    case.host = host_of(case.problem, case.folders, case.device)
    assert torch.equal(case.run().outputs["x"], case.expected)


def test_reads_may_run_on_a_thread(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import ThreadPoolExecutor

    case = make("pageable", BESIDE, ["a", "a", "b"])
    with ThreadPoolExecutor(1) as reader:
        monkeypatch.setattr(
            case.device, "background", lambda job, queue="disk": reader.submit(job).result
        )
        assert torch.equal(case.run().outputs["x"], case.expected)
    assert case.device.arenas.nbytes("arenas") == 0


def test_a_module_passed_in_is_not_read_from_disk(make: Make) -> None:
    case = make("disk", FROM_DISK, ["a", "a", "a", "b"])
    with pytest.raises(
        InputError, match="a was passed in, but the plan reads it from disk: leave it out"
    ):
        Host({"a": Small(), "b": Small(1)}, case.problem, case.device)


def test_a_plan_that_drops_a_module_passed_in_is_refused(make: Make) -> None:
    case = make("pinned", BESIDE, ["a", "a", "b"])
    modules = {"a": Small(), "b": Small(1)}
    host = Host(modules, case.problem, case.device)
    with pytest.raises(PlanError, match="drops the backing store of a, which was passed in"):
        run(case.problem, case.plan, host, case.device, case.calls)
    assert torch.equal(plain(modules, case.calls), case.expected)
    del host
    gc.collect()


MIXED = """
    slot s0/0:a load
      load a unblocked[0] from disk
    slot s0/0:a first
      read b
      stream a keep unblocked[0] ring buffer {ring_buffer} B
      run
    slot s0/0:a steady x2
      stream a keep unblocked[0] ring buffer {ring_buffer} B
      run
    slot s1/0:b load
      drop a
      evict a unblocked[0]
      load b all from pinned
    slot s1/0:b first
      run
    slot end
      evict b all
"""


# The blocks of a and b are equal. So before some fetches, equal shares of both have been read.
EQUAL = """
    slot s0/0:a load
      read b
      load a all from disk
    slot s0/0:a first
      run
    slot s0/0:a steady x2
      run
    slot s1/0:b load
      drop a
      evict a all
      load b all from pinned
    slot s1/0:b first
      run
    slot end
      evict b all
"""


@pytest.mark.parametrize("text", [MIXED, EQUAL], ids=["streamed", "equal"])
def test_reads_keep_step_with_fetches_for_copies_as_simulated(tmp_path: Path, text: str) -> None:
    case = Case(tmp_path, "disk", text, ["a", "a", "a", "b"])
    a = case.problem.components[0]
    case.problem = replace(case.problem, components=(a, in_backing_store("pinned", "b", ON)))
    case.plan = plan_of(case.problem, text.format(ring_buffer=2 * WIDE))
    case.host = host_of(case.problem, case.folders, case.device)
    trace, simulation = case.run(), case.planned()
    assert torch.equal(trace.outputs["x"], case.expected)
    actual, expected = (
        sorted(
            (e.start_seconds, e.end_seconds, e.kind, e.component, e.detail)
            for e in events
            if e.kind in ("read", "fetch")
        )
        for events in (trace.events, simulation.events)
    )
    assert [order[2:] for order in actual] == [order[2:] for order in expected]
    for k in (0, 1):
        assert [order[k] for order in actual] == pytest.approx(
            [order[k] for order in expected], rel=0.02, abs=2e-5
        )
    assert trace.seconds == pytest.approx(simulation.seconds, rel=0.02)


@pytest.mark.parametrize("fetch_bytes", [5000, 10**7], ids=["fewer", "more"])
def test_before_a_fetch_that_overwrites_blocks_reads_catch_up_with_the_fetched_share(
    make: Make, fetch_bytes: int
) -> None:
    """``fetch_bytes``: fewer or more than the bytes to read."""
    residency = make("pageable", BESIDE, ["a", "a", "b"]).host.residencies["b"]
    residency.prepare_reads()
    store: Any = residency.backing_store
    pacer = PacedReads([store], fetch_bytes)
    for fetches in range(4):
        pacer.before_fetch(fetch_bytes // 5, full=True)
        begun_paths = [*residency._blocks][: 11 - len(store.pending)]
        begun_bytes = sum(map(store.size, begun_paths))
        fetched_share = fetches / 5
        assert begun_bytes > fetched_share * store.nbytes, "then the disk fetches again"
        assert begun_bytes - store.size(begun_paths[-1]) <= fetched_share * store.nbytes
    count = len(store.pending)
    pacer.before_fetch(fetch_bytes // 5, full=False)
    assert len(store.pending) == count > 0, "the bounce buffer has room"
    pacer.finish()
    assert not store.pending


def test_without_fetches_reads_begin_at_once(make: Make) -> None:
    residency = make("pageable", BESIDE, ["a", "a", "b"]).host.residencies["b"]
    residency.prepare_reads()
    store: Any = residency.backing_store
    PacedReads([store], fetch_bytes=0)
    assert not store.pending


BESIDE_STREAM = """
    slot s0/0:a load
      read a
      load a unblocked[0] from pinned
    slot s0/0:a first
      stream a keep unblocked[0] ring buffer {ring_buffer} B
      run
    slot s0/0:a steady x{steady}
      stream a keep unblocked[0] ring buffer {ring_buffer} B
      load b all from disk
      run
    slot s1/0:b load
      drop a
      evict a unblocked[0]
    slot s1/0:b first
      run
    slot end
      evict b all
"""


@pytest.mark.parametrize(
    ("flops", "steady"), [(1e11, 9), (1e9, 1)], ids=["copy-bound", "compute-bound"]
)
def test_streamed_blocks_overtake_a_prefetch_that_is_still_being_read_as_simulated(
    flops: float, steady: int, tmp_path: Path
) -> None:
    """Compute-bound, a prefetch is read before the next streamed block may be copied, and comes
    first."""
    hardware = replace(ON, flops_per_second=flops)
    text = BESIDE_STREAM.replace("{steady}", str(steady))
    case = Case(tmp_path, "disk", text, ["a"] * (1 + steady) + ["b"], hardware)
    a = in_backing_store("pinned", "a", hardware)
    case.problem = replace(case.problem, components=(a, case.problem.components[1]))
    case.plan = plan_of(case.problem, text.format(ring_buffer=2 * WIDE))
    case.host = host_of(case.problem, case.folders, case.device)
    trace, simulation = case.run(), case.planned()
    assert torch.equal(trace.outputs["x"], case.expected)
    kinds = ("fetch", "load", "stream")
    actual, expected = (
        sorted(
            (e.start_seconds, e.kind, e.component, e.detail)
            for e in events
            if e.kind in kinds and e.slot == 2
        )
        for events in (trace.events, simulation.events)
    )
    assert [order[1:] for order in actual] == [order[1:] for order in expected]
    assert [order[0] for order in actual] == pytest.approx(
        [order[0] for order in expected], rel=0.02, abs=2e-5
    )
    for event in (e for e in trace.events if e.kind == "load" and e.component == "b"):
        (read_event,) = (
            e
            for e in trace.events
            if (e.kind, e.component, e.detail) == ("fetch", "b", event.detail)
        )
        assert read_event.end_seconds <= event.start_seconds + 1e-9


class LateReader(SimulatedDevice):
    """A device whose disk is as slow as can be: jobs run in order, when the host waits for one.
    ``log``: what happened."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.log: list[str] = []
        self.jobs: deque[Callable[[], None]] = deque()

    def background(self, job: Callable[[], None]) -> Callable[[], None]:
        waits: list[Callable[[], None]] = []
        self.jobs.append(lambda: waits.append(SimulatedDevice.background(self, job)))

        def join() -> None:
            while not waits:
                self.jobs.popleft()()
            waits[0]()

        return join

    def read(self, target: torch.Tensor, nbytes: int) -> None:
        self.log.append("read")
        super().read(target, nbytes)


def with_late_reader(case: Case) -> LateReader:
    """``case`` on such a device, in whose log are also the blocks of a that compute has reached."""
    case.device = device = LateReader(case.device.machine)
    case.host = host_of(case.problem, case.folders, device)
    for path in case.host.residencies["a"]._blocks:
        if path:
            hook: Any = lambda _, __, path=path: device.log.append(path)  # noqa: E731
            case.host.modules["a"].get_submodule(path).register_forward_pre_hook(hook)
    return device


STREAMED = """
    slot s0/0:a load
      load a unblocked[0] from disk
    slot s0/0:a first
      stream a keep unblocked[0] wide[1] ring buffer {ring_buffer} B
      load a wide[1] from disk
      run
    slot s0/0:a steady x1
      stream a keep unblocked[0] wide[1] ring buffer {ring_buffer} B
      run
    slot s1/0:b load
      drop a
      evict a unblocked[0] wide[1]
      load b all from disk
    slot s1/0:b first
      run
    slot end
      evict b all
"""
LOADED = """
    slot s0/0:a load
      load a unblocked[0] from disk
    slot s0/0:a first
      load a wide[0-3] thin[0-5] from disk
      run
    slot s0/0:a steady x1
      run
    slot s1/0:b load
      drop a
      evict a all
      load b all from disk
    slot s1/0:b first
      run
    slot end
      evict b all
"""
BLOCKS = [*(f"wide.{i}" for i in range(4)), *(f"thin.{i}" for i in range(6))]


@pytest.mark.parametrize(
    ("text", "reread_blocks"),
    [(STREAMED, set(BLOCKS) - {"wide.1"}), (LOADED, set[str]())],
    ids=["streamed", "loaded"],
)
def test_the_host_waits_for_the_read_of_a_block_when_compute_has_reached_it(
    make: Make, text: str, reread_blocks: set[str]
) -> None:
    """``reread_blocks``: blocks that the second call copies too. The unblocked weights are read
    before the calls, all blocks of b after them."""
    case = make("disk", text, ["a", "a", "b"])
    device = with_late_reader(case)
    assert torch.equal(case.run().outputs["x"], case.expected)
    first = [item for path in BLOCKS for item in (path, "read")]
    second = [
        item for path in BLOCKS for item in ((path, "read") if path in reread_blocks else (path,))
    ]
    assert device.log == ["read", *first, *second, *["read"] * 11]


def test_a_block_is_ready_when_its_read_ends_before_the_copies_that_are_queued(make: Make) -> None:
    case = make("pageable", BESIDE, ["a", "b"])
    device, residency = with_late_reader(case), case.host.residencies["a"]
    residency.prepare_reads()
    store: Any = residency.backing_store
    assert not store.ready("wide.0"), "its read has not begun"
    while store.pending:
        store.begin_next()
    assert not store.ready("wide.0"), "its read has not ended"
    while device.jobs:
        device.jobs.popleft()()
    assert not store.ready("wide.0"), "a copy would wait for its read"
    device.wait("copy", device.mark("disk"))
    assert store.ready("wide.0")


IN_RAM = [(2, False)] * 3 + [(3, False)] * 2 + [(4, False)] * 3
PAGEABLE = [
    *[(0, False)] * 2,
    *[(1, False)] * 2,
    *[(2, False)] * 3,
    *[(3, False)] * 3,
    *[(4, False)] * 2,
]
FROM_LATE_DISK = [
    *[(0, True)] * 2,
    *[(1, True)] * 2,
    *[(2, True)] * 2,
    (2, False),
    *[(3, True)] * 2,
    (3, False),
    *[(4, False)] * 2,
]


@pytest.mark.parametrize(
    ("backing_store", "idle"),
    [("pinned", IN_RAM), ("pageable", PAGEABLE), ("disk", FROM_LATE_DISK)],
    ids=["RAM", "pageable", "disk"],
)
def test_other_copies_may_be_issued_before_each_copy_that_waits_for_compute(
    make: Make, backing_store: str, idle: list[tuple[int, bool]]
) -> None:
    """Through a ring buffer of two blocks. ``idle``: how many blocks were copied each time that
    other copies could be issued, and whether the next copy then waits for its read."""
    case, states = make(backing_store, BESIDE, ["a", "b"]), list[tuple[int, bool]]()
    device = with_late_reader(case) if backing_store == "disk" else case.device
    residency = case.host.residencies["a"]
    paths, recorder = BLOCKS[:4], EventRecorder(device)
    with device.capped(1 << 30):
        recorder.slot = recorder.moved_bytes = 0
        residency.prepare_reads()
        streamer = Streamer(
            residency,
            Streaming(paths, (), [(path, 1) for path in paths], 2 * WIDE),
            recorder,
            lambda: states.append((streamer.streamed_bytes // WIDE, streamer.is_waiting)),
        )
        device.wait("copy", device.mark("compute"))
        streamer.open()
        streamer.begin_call()
        x = torch.ones(2, WIDTH, device="cpu")
        result = residency.module.encode(x.to(device.torch_device))
        device.barrier()
        streamer.release()
        residency.drop()
        assert torch.equal(result.cpu(), Small().encode(x))
    assert states == idle
    assert streamer.streamed_bytes == 4 * WIDE


@pytest.mark.parametrize("skip", ["wide.2", "wide.0 wide.1 wide.2 wide.3", "wide.1 thin.0 thin.5"])
def test_reads_of_blocks_that_a_call_leaves_out_are_of_no_harm(make: Make, skip: str) -> None:
    case = make("disk", STREAMED, ["a", "a", "b"])
    device, module = with_late_reader(case), Small()
    module.skip = case.host.modules["a"].skip = frozenset(skip.split())
    assert torch.equal(case.run().outputs["x"], plain({"a": module, "b": Small(1)}, case.calls))
    assert not device.jobs


def test_a_block_whose_read_was_overwritten_before_its_copy_is_read_again(make: Make) -> None:
    """The second call ends before thin.0, whose read has begun. The third call overwrites thin.0 in
    the bounce buffer, and then needs it."""
    case = make("disk", FROM_DISK, ["a", "a", "a", "b"])
    case.calls = ["a", "a.encode", "a", "b"]
    with_late_reader(case)
    assert torch.equal(case.run().outputs["x"], plain({"a": Small(), "b": Small(1)}, case.calls))


def test_the_copy_of_an_empty_block_waits_for_no_read(make: Make) -> None:
    writer: Any = None
    device = make("disk", FROM_DISK, ["a", "b"]).device
    store = Disk({"empty": BlockLayout("empty", 0, ())}, device, writer, 0)
    assert store.request("empty")
    with device.capped(1 << 30):
        store.copy("empty", device.allocate(0), device)
    assert store.finish_reads() == []


def test_a_run_that_fails_waits_for_the_reads_under_way(make: Make) -> None:
    case = make("disk", STREAMED, ["a", "a", "b"])
    device = with_late_reader(case)

    def fail(x: torch.Tensor) -> None:
        raise ValueError("bad shape")

    case.host.modules["a"].callback = fail
    with pytest.raises(ValueError, match="bad shape"):
        case.run()
    assert not device.jobs, "a read would write to memory that is free"
    case.host.modules["a"].callback = None
    device.log.clear()
    assert torch.equal(case.run().outputs["x"], case.expected)


@pytest.mark.parametrize("backing_store", ["pinned", "disk"])
def test_a_weight_that_code_outside_reads_has_its_values_before_its_block_is_loaded(
    make: Make, backing_store: str
) -> None:
    text = FROM_DISK if backing_store == "disk" else BESIDE
    case = make(backing_store, text, ["a", "a", "b"])
    residency, plain_module = case.host.residencies["a"], Small()
    for has_backing_store in (False, True):
        if has_backing_store:
            residency.prepare_reads()
        for name, expected in plain_module.named_parameters():
            owner = residency.module.get_submodule(name.rpartition(".")[0])
            weight = owner._parameters[name.rpartition(".")[2]]
            assert weight is not None
            assert torch.equal(residency.read(name, weight), expected)
    assert case.device.allocated_bytes == 0
