"""Processes forked from one that runs on the CPU: they do not have its weights. Their use is an
error, they end without harm, and the first process goes on."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_component import Small, calls_to, plain, plan_of, small_problem, use
from stored_component import cpu_hardware, host_of, in_files, nothing_left, saved

from graphrun.errors import InputError
from graphrun.kernel_memory import ProcessPeak
from graphrun.runtime.devices.cpu import CpuDevice
from graphrun.runtime.direct_reads import DirectReads, MappedArena
from graphrun.runtime.executor import PlanSession
from graphrun.units import MIB
from graphrun.verify.solution import solution_of

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")

CALLS = ["a", "a"]
PLAN = """
    leaves a {resident_blocks}
    slot s0/0:a load
      load a {resident_blocks} from file
    slot s0/0:a first
      {stream}
      run
    slot s0/0:a steady x1
      {stream}
      run
    slot end
    again
    slot s0/0:a load
    slot s0/0:a first
      {stream}
      run
    slot s0/0:a steady x1
      {stream}
      run
    slot end
"""
SOME, ALL = "unblocked[0] wide[0,2]", "unblocked[0] wide[0-3] thin[0-5]"
REFUSAL = "this process was forked from it"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    with nothing_left():
        yield


class KeptRuns:
    """Runs of one session plan, which keeps the ``resident_blocks`` in memory from run to run, and
    streams the others."""

    def __init__(self, folder: Path, resident_blocks: str = SOME) -> None:
        hardware = cpu_hardware()
        modules = {"a": Small()}
        problem = in_files(
            small_problem(
                modules, [[use("a", 2, hardware)]], hardware, hardware.context_bytes + 64 * MIB
            )
        )
        self.problem = replace(problem, runs=3)
        ring_bytes = 2 * self.problem.component("a").variants[0].block_bytes[1]
        self.device = CpuDevice(hardware)
        self.host = host_of(self.problem, {"a": saved(folder / "a")}, self.device)
        stream = (
            f"stream a keep {resident_blocks} ring buffer {ring_bytes} B"
            if resident_blocks == SOME
            else ""
        )
        text = PLAN.format(resident_blocks=resident_blocks, stream=stream)
        self.solution = solution_of(self.problem, plan_of(self.problem, text))
        self.session = PlanSession(self.solution, self.host, self.device)
        self.expected = plain(modules, CALLS)

    def run(self) -> int:
        """Run once, and return the bytes of the blocks that were loaded and kept."""
        trace = self.session.run(
            lambda: calls_to(self.host.modules, CALLS, self.device.torch_device)
        )
        assert torch.equal(trace.outputs["x"], self.expected)
        return sum(event.nbytes for event in trace.events if event.kind == "load")

    def close(self) -> None:
        self.session.close()
        self.host.close()
        assert self.device.allocated_bytes == 0


@pytest.fixture(params=[SOME, ALL], ids=["some are kept", "all are kept"])
def runs(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[KeptRuns]:
    runs = KeptRuns(tmp_path, request.param)
    yield runs
    runs.close()


def in_fork(work: Callable[[], Any]) -> None:
    """Do ``work`` in a forked process, which has to end within ten minutes."""
    process = os.fork()
    if process == 0:
        signal.alarm(600)
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 (pytest would go on in the fork)
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def refused(work: Callable[[], object]) -> None:
    with pytest.raises(InputError, match=REFUSAL):
        work()


def test_a_fork_between_runs_is_refused_and_the_next_run_finds_what_was_kept(
    runs: KeptRuns,
) -> None:
    def child() -> None:
        refused(runs.run)
        refused(runs.session.load_ahead)
        refused(PlanSession(runs.solution, runs.host, runs.device).load_ahead)
        refused(lambda: runs.device.allocate(MIB))
        refused(runs.device.measured_context)
        runs.session.close()
        runs.host.close()

    assert runs.run() > 0
    in_fork(child)
    assert runs.run() == 0
    in_fork(child)
    assert runs.run() == 0


@pytest.mark.parametrize("place", ["before a call", "between calls"])
def test_a_fork_in_a_run_cannot_go_on_with_it(runs: KeptRuns, place: str) -> None:
    processes = list[int]()

    def fork() -> None:
        processes.append(os.fork())
        if processes[0] == 0:
            signal.alarm(600)

    def work() -> dict[str, torch.Tensor]:
        device, module = runs.device.torch_device, runs.host.modules["a"]
        if place == "before a call":
            fork()
            return calls_to({"a": module}, CALLS, device)
        x = calls_to({"a": module}, CALLS[:1], device)["x"]
        fork()
        return {"x": module(x)}

    runs.run()
    code = 1
    try:
        trace = runs.session.run(work)
    except InputError as error:
        code = 0 if REFUSAL in str(error) and not runs.device.allocated_bytes else 2
    finally:
        if processes and processes[0] == 0:
            os._exit(code)
    assert torch.equal(trace.outputs["x"], runs.expected)
    assert os.waitstatus_to_exitcode(os.waitpid(processes[0], 0)[1]) == 0
    assert runs.run() == 0


def test_a_fork_counts_its_own_memory_alone(runs: KeptRuns, tmp_path: Path) -> None:
    memory = [runs.device.allocate(MIB)]

    def child() -> None:
        device = CpuDevice(runs.problem.hardware)
        assert device.allocated_bytes == 0
        assert not device.holds(memory[0]), "the kernel may give its address to another tensor"
        own_memory = device.allocate(MIB)
        assert device.allocated_bytes == own_memory.nbytes
        assert device.holds(own_memory)
        del own_memory
        own_runs = KeptRuns(tmp_path / "fork")
        assert own_runs.run() > 0
        assert own_runs.run() == 0
        own_runs.close()

    runs.run()
    assert runs.device.holds(memory[0])
    assert runs.device.allocated_bytes > MIB
    in_fork(child)
    assert runs.run() == 0
    memory.clear()


def test_a_fork_keeps_its_own_memory_when_it_drops_memory_of_the_first_process() -> None:
    """The kernel gives out the addresses of memory that a fork does not have."""
    size = 4 * MIB
    arenas = [MappedArena(size) for _ in range(8)]
    views = [arena.view(0, size).fill_(1) for arena in arenas]

    def child() -> None:
        memory = [mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE) for _ in range(64)]
        for part in memory:
            part[::4096] = b"\x02" * (size // 4096)
        views.clear()
        arenas.clear()
        gc.collect()
        assert all(part[::4096] == b"\x02" * (size // 4096) for part in memory)

    in_fork(child)
    in_fork(lambda: in_fork(child))
    assert all(bool((view == 1).all()) for view in views)


def test_locks_that_threads_had_at_the_fork_stop_nothing(
    runs: KeptRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads that count memory and measure it are not in the fork, and cannot release them."""
    peak, reads, reached = ProcessPeak(sample_seconds=60), DirectReads(), threading.Event()
    finish = threading.Event()
    locks = [runs.device.arenas._lock, peak._lock, peak._stop._cond, reads._changed_state]

    def take() -> None:
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)  # type: ignore[arg-type]
            reached.set()
            finish.wait()

    def child() -> None:
        runs.session.close()
        runs.host.close()
        gc.collect()
        assert peak.nbytes >= 0
        peak.__exit__()
        reads.close()

    runs.run()
    with peak:
        thread = threading.Thread(target=take)
        thread.start()
        reached.wait()
        in_fork(child)
        finish.set()
        thread.join()
    reads.close()
