"""Runs on the CPU whose reads fail, are interrupted or late: typed errors, nothing is left, and the
next run has the right bits."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from read_ordering import ReadOrdering
from safetensors.torch import load_file, save_file
from small_component import PREFETCH, Small, calls_to, plain, plan_of, small_problem, use
from stored_component import cpu_hardware, host_of, in_files, nothing_left, saved, slow_reads

from graphrun.errors import InputError, OutOfMemory
from graphrun.modules import sources
from graphrun.runtime import direct_reads
from graphrun.runtime.devices.cpu import CpuDevice
from graphrun.runtime.direct_reads import SpanRead
from graphrun.runtime.executor import follow
from graphrun.trace import Trace
from graphrun.units import MIB
from graphrun.verify.solution import solution_of

CALLS = ["a"] * 4 + ["b"]
HALF = "thin"  # blocks that the file has in bfloat16, so that they are cast


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    with nothing_left():
        yield


@pytest.fixture(autouse=True)
def is_in_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ordering = ReadOrdering(monkeypatch)
    yield
    assert not ordering.reports


class Runs:
    """Runs of one plan, ``text``: ``a`` streams its blocks while ``b`` is loaded. Some blocks are
    read directly, others are cast."""

    def __init__(self, folder: Path, text: str = PREFETCH) -> None:
        hardware = cpu_hardware()
        self.modules = {"a": Small(), "b": Small(1)}
        uses = [[use("a", 4, hardware)], [use("b", 1, hardware)]]
        budget_bytes = hardware.context_bytes + 64 * MIB
        self.problem = in_files(small_problem(self.modules, uses, hardware, budget_bytes))
        self.folders = {name: saved(folder / name, int(name == "b")) for name in self.modules}
        for name, module in self.modules.items():
            with_half(self.folders[name], module)
        self.expected = plain(self.modules, CALLS)
        ring_bytes = 2 * self.problem.component("a").variants[0].block_bytes[1]
        text = text.format(ring_buffer=ring_bytes).replace("from pinned", "from file")
        self.solution = solution_of(self.problem, plan_of(self.problem, text))
        self.device = CpuDevice(hardware)
        self.reads = list[tuple[str, str, int]]()
        self.host = host_of(self.problem, self.folders, self.device)

    def run(self) -> Trace:
        cpu = torch.device("cpu")
        return follow(
            self.solution, self.host, self.device, lambda: calls_to(self.host.modules, CALLS, cpu)
        )

    def succeeds(self) -> None:
        trace = self.run()
        assert torch.equal(trace.outputs["x"], self.expected)
        assert trace.left_bytes == 0
        reads = [(e.component, e.detail, e.nbytes) for e in trace.events if e.kind == "fetch"]
        self.reads = self.reads or reads
        assert reads == self.reads, "reads of a failed run do not count"
        self.is_empty()

    def fails(self, error: type[BaseException], match: str | None) -> None:
        with pytest.raises(error, match=match):
            self.run()
        self.is_empty()

    def is_empty(self) -> None:
        assert self.device.allocated_bytes == 0
        for module in self.host.modules.values():
            assert not any(m._forward_pre_hooks or m._forward_hooks for m in module.modules())
            assert all(parameter.device.type == "meta" for parameter in module.parameters())


def with_half(folder: Path, module: Small) -> None:
    """Stores some blocks in bfloat16, in the file and in the module's values."""
    path = folder / "model.safetensors"
    tensors = {
        name: tensor.bfloat16() if name.startswith(HALF) else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path)
    state = module.state_dict()
    module.load_state_dict({name: tensors.get(name, state[name]) for name in state})


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    runs = Runs(tmp_path)
    yield runs
    runs.host.close()


class Requests:
    """Requests to the disk in a run; number ``failing`` of them fails."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count, self.failing = 0, -1
        self._lock = threading.Lock()
        for module in (direct_reads, sources):
            patch.setattr(module, "read_at", self._around(module.read_at))  # type: ignore[attr-defined]

    def _around(self, read_at: Callable[..., int]) -> Callable[..., int]:
        def counted(*arguments: Any) -> int:
            with self._lock:
                number = self.count
                self.count += 1
            if number == self.failing:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read_at(*arguments)

        return counted


def test_blocks_are_read_directly_and_cast_with_the_bits_of_the_plain_module(runs: Runs) -> None:
    for _ in range(3):
        runs.succeeds()


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize("number", range(0, 120, 7))
def test_an_error_of_any_request_ends_the_run_and_the_next_one_works(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    requests = Requests(monkeypatch)
    runs.succeeds()
    count = requests.count
    assert count > 120
    requests.count, requests.failing = 0, number
    runs.fails(InputError, r"model.safetensors cannot be read(: Input| at byte \d+: Input)/output")
    requests.failing = -1
    runs.succeeds()


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize("number", range(0, 50, 5))
def test_an_interrupt_in_a_wait_ends_queued_reads(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    waits, wait = itertools.count(), SpanRead.wait

    def interrupted(span_read: SpanRead) -> None:
        if next(waits) == number:
            raise KeyboardInterrupt
        wait(span_read)

    with monkeypatch.context() as patch:
        slow_reads(patch)
        patch.setattr(SpanRead, "wait", interrupted)
        runs.fails(KeyboardInterrupt, None)
    assert next(waits) == number + 1, "the barrier waits for no queued read"
    runs.succeeds()


@pytest.mark.parametrize("change", ["truncated", "replaced", "removed"])
def test_a_file_that_changes_during_a_run_is_an_error(runs: Runs, change: str) -> None:
    path = runs.folders["a"] / "model.safetensors"
    data, status = path.read_bytes(), path.stat()

    def act(_: object) -> None:
        if change == "truncated":
            os.truncate(path, len(data) // 2)
        elif change == "replaced":
            path.with_suffix(".new").write_bytes(data)
            path.with_suffix(".new").replace(path)
        else:
            path.unlink(missing_ok=True)

    runs.succeeds()  # files from which blocks are cast stay open between runs
    runs.host.modules["a"].callback = act  # type: ignore[assignment]
    if change == "truncated":
        runs.fails(InputError, "model.safetensors (was changed while it was|is truncated)")
    else:  # the file that is open stays as it is
        runs.run()
    runs.host.modules["a"].callback = None  # type: ignore[assignment]
    if change == "replaced":
        runs.fails(InputError, "model.safetensors was changed while it was in use: plan again")
    elif change == "removed":
        runs.fails(InputError, "model.safetensors can no longer be opened")
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    runs.succeeds()


@pytest.mark.parametrize("refusal", ["to open", "the first read"])
def test_a_file_system_without_direct_reads_is_said_once(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    read_at = direct_reads.read_at

    def refuse(file: Any, view: memoryview, offset: int) -> int:
        if fcntl.fcntl(file.fileno(), fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return read_at(file, view, offset)

    if refusal == "to open":
        monkeypatch.setattr(direct_reads, "open_direct", lambda _: None)
    else:
        monkeypatch.setattr(direct_reads, "read_at", refuse)
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        runs.succeeds()
        runs.succeeds()
    assert [record.category for record in records] == [RuntimeWarning]
    assert "model.safetensors is read through the page cache" in str(records[0].message)


def test_memory_that_the_system_refuses_is_out_of_memory(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patch:
        patch.setattr(direct_reads, "anonymous_memory", refuse)
        runs.fails(OutOfMemory, "slot s0/0:a load: the CPU's memory: the system refuses ")
    runs.succeeds()


def test_a_process_that_grew_before_the_run_has_less_for_weights(runs: Runs) -> None:
    ballast = torch.ones(96 * MIB, dtype=torch.uint8)
    runs.fails(OutOfMemory, "exceed the .* left for weights and activations")
    del ballast
    runs.succeeds()


def test_a_forked_process_can_run_while_the_first_one_goes_on(runs: Runs, tmp_path: Path) -> None:
    runs.succeeds()
    process = os.fork()
    if process == 0:
        code = 1
        with contextlib.suppress(BaseException):
            Runs(tmp_path / "fork").succeeds()
            code = 0
        os._exit(code)
    assert os.waitpid(process, 0)[1] == 0
    runs.succeeds()
