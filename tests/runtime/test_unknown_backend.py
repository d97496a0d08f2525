"""A backend of PyTorch about which nothing is known: PyTorch's functions for the CPU (`torch.cpu`),
opened as such a backend. It has one queue and no counters. Some tests add streams that note the
order of work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphrun.device_kinds import DeviceKind
from graphrun.errors import BrokenPlan, GraphrunError, InputError, OutOfMemory, TransferFailed
from graphrun.runtime.devices import accelerator, copy_thread
from graphrun.runtime.devices.accelerator import AcceleratorDevice, Backend
from graphrun.runtime.devices.open import open_devices
from graphrun.runtime.direct_reads import Span
from graphrun.runtime.events import EventRecorder
from graphrun.trace import Event
from graphrun.units import GIB, MIB

KIND = DeviceKind("cpu", overlap="never", pinning="none")
NOTICES = (
    "copies do not overlap compute (it has one queue)",
    "this backend does not count its memory",
    "this backend has no memory limit that can be read and set",
)


def test_each_promise_that_the_device_cannot_keep_is_a_warning() -> None:
    hardware: Any = SimpleNamespace(kind=KIND, workspace_bytes=0, unified=False)
    with pytest.warns(RuntimeWarning) as records:
        device = KIND.open(hardware, 0, None)
    messages = [str(record.message) for record in records]
    assert [m.startswith(f"cpu:0: {n}") for m, n in zip(messages, NOTICES, strict=True)] == [
        True
    ] * 3
    assert device.serial_copies
    assert not device.unified


def test_the_devices_of_a_run_are_the_first_ones_of_the_machine() -> None:
    calls = list[tuple[int, Any]]()

    def opened(hardware: Any, number: int, first_device: Any) -> AcceleratorDevice:
        calls.append((number, first_device))
        return AcceleratorDevice(KIND)

    card: Any = SimpleNamespace(kind=SimpleNamespace(has_virtual_clock=False, open=opened))
    device = open_devices([card] * 3)
    assert calls == [(0, None), (1, device), (2, device)]
    for secondary, nbytes in zip(device.secondaries, (3, 2), strict=True):
        secondary.arena(nbytes)
        tensors = secondary.allocate(nbytes), secondary.arena(nbytes)
        assert device.tiers() == {
            "device": 0,
            "arenas": nbytes,
            "pinned": 0,
            "device1": nbytes if nbytes == 3 else 0,
            "device2": nbytes if nbytes == 2 else 0,
        }
        del tensors


def test_a_backend_without_streams_has_one_queue() -> None:
    device = AcceleratorDevice(DeviceKind("cpu"))
    assert device.serial_copies
    assert NOTICES[0] in device.notices[0]


@pytest.mark.parametrize("unified", [False, True])
def test_memory_is_that_of_the_host_less_the_workspace(
    unified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "host_ram_bytes", lambda: GIB)
    device = AcceleratorDevice(KIND, workspace_bytes=MIB, unified=unified)
    with device.capped(4 * MIB):
        first, second = device.allocate(3 * MIB), device.allocate(MIB)
        del first
        assert (device.allocated_bytes, device.peak_bytes) == (MIB, 4 * MIB)
        assert device.available_bytes == GIB
        assert device.holders() == ("1.00 MiB",)
        device.reset_peak()
        assert device.peak_bytes == second.numel()
        del second
        assert (device.allocated_bytes, device.peak_bytes) == (0, MIB)
    assert not device.allocate(0).numel()
    assert AcceleratorDevice(KIND, unified=unified).available_bytes == GIB


def test_seconds_are_the_hosts_since_the_session_began(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=lambda: 100.0)
    monkeypatch.setattr(accelerator, "time", clock)
    device = AcceleratorDevice(KIND)
    for clock.perf_counter in (lambda: 102.0, lambda: 107.0):
        with device.capped(MIB):
            begin_seconds = clock.perf_counter()
            clock.perf_counter = lambda: begin_seconds + 3  # noqa: B023
            for stream in ("compute", "copy", "disk", "lock"):
                mark = device.mark(stream)  # type: ignore[arg-type]
                assert device.seconds_at(mark) == 3
                device.wait("compute", mark)
                device.wait("disk", mark)


def test_events_have_the_seconds_of_the_clock_of_their_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(perf_counter=lambda: 100.0)
    monkeypatch.setattr(accelerator, "time", clock)
    device = AcceleratorDevice(KIND)
    clock.perf_counter = lambda: 102.0
    secondary, recorder = AcceleratorDevice(KIND), EventRecorder(device, device.mark("compute"))
    recorder.offset_seconds, recorder.slot, recorder.moved_bytes = 10.0, 4, 0
    clock.perf_counter = lambda: 105.0
    begin = device.mark("copy")
    clock.perf_counter = lambda: 106.0
    marks = begin, device.mark("copy")
    recorder.note("load", "a", "wide.0", 5, marks, secondary)
    recorder.note("stream", "a", "wide.1", 6, marks)
    recorder.note("block", "a", "wide.1", 7, marks)
    for _ in range(2):
        recorder.resolve_marks()
    assert recorder.events == [
        Event("load", "a", 4, "wide.0", 5, 11.0, 12.0),
        Event("stream", "a", 4, "wide.1", 6, 13.0, 14.0),
        Event("block", "a", 4, "wide.1", 7, 13.0, 14.0),
    ]
    assert recorder.moved_bytes == 11


def test_a_read_is_reached_when_it_has_ended() -> None:
    device = AcceleratorDevice(KIND)
    mark = device.mark("disk")
    for is_reached in (device.reached, device.queues_behind):
        assert not is_reached([])
        assert is_reached([mark])


def test_jobs_of_a_queue_run_in_order_and_their_errors_are_raised_by_the_wait() -> None:
    device, order = AcceleratorDevice(KIND), list[int]()

    def late() -> None:
        time.sleep(0.02)
        order.append(1)

    device.background(late)
    device.background(lambda: order.append(2))()
    assert order == [1, 2]
    failing = device.background(lambda: [].remove(0), "lock")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="not in list"):
        failing()


def test_blocks_are_read_from_files_in_the_order_of_copies(tmp_path: Path) -> None:
    """On unified memory, within a session."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(range(256)) * 16)
    device, span = AcceleratorDevice(KIND, unified=True), Span(str(file), 0, 4096, 4096)
    with device.capped(MIB):
        target, second_target = device.allocate(4096).zero_(), device.allocate(4096)
        device.read_block([(span, target)], (lambda: target[:2].fill_(7), target))  # type: ignore[arg-type, return-value]
        device.copy(second_target, target)
        device.wait("compute", device.mark("copy"))
        assert bytes(second_target.tolist()) == b"\7\7" + file.read_bytes()[2:]
        device.copy(second_target, torch.full_like(target, 3))
        device.barrier()
        assert set(second_target.tolist()) == {3}
        missing_span = Span(str(tmp_path / "missing"), 0, 4096, 4096)
        device.read_block([(missing_span, target)], None)
        with pytest.raises(InputError, match="missing can no longer be opened"):
            device.wait("compute", device.mark("copy"))
    with pytest.raises(NotImplementedError, match="cpu does not share its memory with the host"):
        device.read_block([(span, target)], None)


def test_a_refused_copy_is_an_error_of_the_transfer() -> None:
    device = AcceleratorDevice(KIND)
    with pytest.raises(TransferFailed, match="copying 12 B to cpu failed: .* size"):
        device.copy(torch.zeros(4), torch.zeros(3))

    def refuse(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    target: Any = SimpleNamespace(copy_=refuse, device="cpu")
    with pytest.raises(torch.OutOfMemoryError):
        device.copy(target, torch.zeros(3))


REFUSED, BROKEN = "cpu:0 refused an allocation: ", "cpu:0 failed: "
ERRORS = [
    (torch.OutOfMemoryError("no room\nfor this"), OutOfMemory, REFUSED + "no room"),
    (RuntimeError("Device Out of Memory"), OutOfMemory, REFUSED + "Device Out of Memory"),
    (RuntimeError("no kernel\nout of memory"), None, None),
    (ValueError("out of memory"), None, None),
    (RuntimeError(), None, None),
    (torch.AcceleratorError("a\nb"), BrokenPlan, BROKEN + "a; this process cannot use it again"),
]


@pytest.mark.parametrize(("error", "error_class", "message"), ERRORS)
def test_errors_of_the_device_are_said_by_their_first_line(
    error: Exception, error_class: type[GraphrunError] | None, message: str | None
) -> None:
    explained = AcceleratorDevice(KIND).explain(error)
    assert (explained and type(explained), explained and str(explained)) == (error_class, message)


@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        ("is_available", lambda: False, "there is no cpu:0: torch sees 0 cpu devices"),
        ("device_count", lambda: None, "there is no cpu:0: torch sees 0 cpu devices"),
        ("device_count", lambda: [].pop(), "torch.cpu does not count its devices: IndexError: pop"),
    ],
)
def test_a_backend_without_devices_is_refused(
    name: str, function: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, name, function)
    with pytest.raises(InputError, match=message):
        AcceleratorDevice(KIND)


def test_a_backend_that_pytorch_does_not_have_is_refused() -> None:
    with pytest.raises(InputError, match="has no device 'npu': install and import the package"):
        Backend("npu")


def test_tensors_of_the_device_are_those_in_memory_of_its_own() -> None:
    device: Any = AcceleratorDevice.__new__(AcceleratorDevice)
    for name, is_held in (("meta", True), ("cpu", False)):
        device.torch_device = torch.device(name)
        tensor = torch.empty(3, device=name)
        assert device.holds(tensor) == is_held
        assert device.storage_of(tensor[1:]) == (tensor.data_ptr(), 12)
        assert not device.holds(torch.empty(1, device="meta" if name == "cpu" else "cpu"))


def test_a_backend_that_cannot_count_has_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_available", "device_count"):
        monkeypatch.delattr(torch.cpu, name)
    assert AcceleratorDevice(KIND).torch_device == torch.device("cpu", 0)
    with pytest.raises(InputError, match="there is no cpu:1: torch sees 1 cpu devices"):
        AcceleratorDevice(KIND, 1)


def test_a_counter_that_fails_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "memory_allocated", lambda index: [].pop(), raising=False)
    assert "does not count its memory" in AcceleratorDevice(KIND).notices[1]


def test_functions_of_the_current_accelerator_are_used_where_the_backend_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Backend("cpu").function("empty_cache") is None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    backend = Backend("cpu")
    assert backend.function("empty_cache") is torch.accelerator.empty_cache
    assert backend.function("device", "device_index") is torch.accelerator.device_index
    assert backend.function("synchronize") is torch.cpu.synchronize
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    assert not Backend("cpu").is_current


def test_the_device_is_current_within_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    indices = list[int]()

    def device_context(index: int) -> Any:
        indices.append(index)
        return nullcontext()

    monkeypatch.setattr(torch.cpu, "device", device_context, raising=False)
    device = AcceleratorDevice(KIND)
    indices.clear()
    with device.capped(MIB):
        assert indices == [0]


def test_a_limit_is_a_share_of_the_hosts_memory_where_the_size_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = [0.75]
    monkeypatch.setattr(accelerator, "host_ram_bytes", lambda: GIB - MIB)
    for name, function in {
        "get_per_process_memory_fraction": lambda index: shares[-1],
        "set_per_process_memory_fraction": lambda share, index: shares.append(share),
    }.items():
        monkeypatch.setattr(torch.cpu, name, function, raising=False)
    device = AcceleratorDevice(KIND)
    assert len(device.notices) == 2
    memory = device.allocate(MIB)
    for cap_bytes, limit_bytes in ((GIB // 4, GIB // 4), (2 * GIB, GIB)):
        with device.capped(cap_bytes):
            assert round(shares[-1] * GIB - 0.1) == limit_bytes
            assert shares[-1] <= 1
        assert shares[-1] == 0.75
    del memory


Proof = Callable[[Callable[[Any], str]], None]


@pytest.fixture
def prove(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proof]:
    """Sets the function that proves overlap. No device was opened before."""
    accelerator._overlap_faults().clear()
    yield lambda function: monkeypatch.setattr(accelerator, "overlap_fault", function)
    accelerator._overlap_faults().clear()


class Streams:
    """Streams and events of a backend, which compute at once and note what waits for what."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log, self.stream_name, self.has_time = list[str](), "", True
        self.current = self.stream("compute")
        patch.setattr(torch, "Stream", lambda device: self.stream("copy"))
        patch.setattr(torch, "Event", lambda device, enable_timing: self.event())
        patch.setattr(torch.cpu, "current_stream", lambda index: self.current)
        patch.setattr(torch.cpu, "stream", self.issuing)

    def stream(self, name: str) -> Any:
        return SimpleNamespace(
            name=name,
            synchronize=lambda: self.log.append(f"host waits for {name}"),
            wait_event=lambda event: self.log.append(f"{name} waits for {event.stream}"),
        )

    def event(self) -> Any:
        def elapsed_time(end: Any) -> float:
            if not self.has_time:
                raise ValueError("events have no time")
            return 2000.0 if end is not event else 0.0

        event = SimpleNamespace(elapsed_time=elapsed_time, stream="")
        event.record = lambda stream: setattr(event, "stream", stream.name)
        event.synchronize = lambda: self.log.append(f"host waits for {event.stream}")
        return event

    @contextmanager
    def issuing(self, stream: Any) -> Iterator[None]:
        previous_name, self.stream_name = self.stream_name, stream.name
        yield
        self.stream_name = previous_name

    def target(self) -> Any:
        """Return memory that notes which stream writes it."""

        def copy_(source: torch.Tensor, *, non_blocking: bool) -> None:
            self.log.append(f"{self.stream_name} writes{' later' * non_blocking}")

        return SimpleNamespace(copy_=copy_)


@pytest.fixture
def streams(prove: Proof, monkeypatch: pytest.MonkeyPatch) -> Streams:
    prove(lambda device: "")
    return Streams(monkeypatch)


def test_overlap_is_proved_for_the_first_device_with_a_number(
    streams: Streams, prove: Proof
) -> None:
    devices = list[AcceleratorDevice]()

    def late(device: AcceleratorDevice) -> str:
        devices.append(device)
        device.arena(MIB)
        return "late"

    prove(late)
    for _ in range(2):
        device = AcceleratorDevice(DeviceKind("cpu"))
        assert device.serial_copies
        assert device.notices[0].startswith("cpu:0: copies do not overlap compute (late): ")
        assert device.arenas.peak_bytes("arenas") == 0
    assert len(devices) == 1


@pytest.mark.parametrize(("message", "fault"), [("first\nsecond", "first"), ("", "it fails")])
def test_a_backend_that_fails_in_the_proof_does_not_overlap(
    message: str, fault: str, streams: Streams, prove: Proof
) -> None:
    def fail(device: AcceleratorDevice) -> str:
        raise ValueError(message)

    prove(fail)
    assert f"({fault}): plans charge" in AcceleratorDevice(DeviceKind("cpu")).notices[0]


def test_streams_and_the_host_wait_for_marks(streams: Streams) -> None:
    device = AcceleratorDevice(DeviceKind("cpu", pinning="none"))
    assert not device.serial_copies
    streams.current = streams.stream("the caller's stream")
    with device.capped(MIB):
        streams.log.clear()
        device.copy(streams.target(), torch.empty(1))
        copy_mark, compute_mark = device.mark("copy"), device.mark("compute")
        device.wait("compute", copy_mark)
        device.wait("copy", compute_mark)
        device.wait("disk", compute_mark)
        device.barrier()
        assert streams.log == [
            "copy writes later",
            "the caller's stream waits for copy",
            "copy waits for the caller's stream",
            "host waits for the caller's stream",
            "host waits for copy",
            "host waits for the caller's stream",
        ]
        assert device.seconds_at(copy_mark) == 2


def test_marks_without_a_time_have_the_hosts(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams.has_time = False
    clock = SimpleNamespace(perf_counter=lambda: 7.0)
    monkeypatch.setattr(accelerator, "time", clock)
    device = AcceleratorDevice(DeviceKind("cpu"))
    with device.capped(MIB):
        clock.perf_counter = lambda: 9.0
        copy_mark = device.mark("copy")
        streams.log.clear()
        device.wait("compute", copy_mark)
        assert streams.log == ["compute waits for copy"]
        assert device.seconds_at(copy_mark) == 2


def test_into_unified_memory_a_thread_does_the_work_of_the_copy_stream(
    streams: Streams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_thread, "READ_BUFFER_BYTES", 4096)
    file = tmp_path / "weights"
    file.write_bytes(bytes(range(256)) * 48)
    device = AcceleratorDevice(DeviceKind("cpu", pinning="none"), unified=True)
    span = Span(str(file), 0, 3 * 4096, 3 * 4096)
    with device.capped(MIB):
        target = device.allocate(3 * 4096)
        streams.log.clear()
        device.wait("copy", device.mark("compute"))
        device.read_block(
            [(span, target)], (lambda: streams.log.append(f"{streams.stream_name} fills"), target)
        )
        device.copy(streams.target(), torch.empty(1))
        read_mark = device.mark("copy")
        device.wait("copy", read_mark)
        device.wait("compute", read_mark)
        assert streams.log == [
            "copy waits for compute",
            "host waits for copy",  # before the third read, which is into the first of two buffers
            "copy fills",
            "copy writes later",
            "compute waits for copy",
        ]
        assert device.seconds_at(read_mark) == 2
        device.barrier()
        assert bytes(target.tolist()) == file.read_bytes()
