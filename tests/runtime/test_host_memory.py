"""Host memory as a card sees it: the host waits for copies of pageable memory, and page-locking
takes seconds. Plans know both."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from mmap import PAGESIZE
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from small_component import (
    WIDE,
    Small,
    device_of,
    plain,
    plan_of,
    run,
    small_hardware,
    small_problem,
    use,
)
from stored_component import host_of, in_backing_store, saved

from graphrun.errors import GraphrunError, InputError
from graphrun.model.hardware import Hardware
from graphrun.runtime.host import Host
from graphrun.trace import Trace
from graphrun.units import round_up
from graphrun.verify.simulate import simulate

ON = replace(small_hardware(), disk_bytes_per_second=4e8, pageable_bytes_per_second=5e8)

# a streams all but two of its blocks.
STREAMED = """
    slot s0/0:a load
      read a
      load a unblocked[0] from {backing_store}
    slot s0/0:a first
      stream a keep unblocked[0] wide[1] thin[2] ring buffer {ring_buffer} B
      load a wide[1] thin[2] from {backing_store}
      run
    slot s0/0:a steady x3
      stream a keep unblocked[0] wide[1] thin[2] ring buffer {ring_buffer} B
      run
    slot end
      drop a
      evict a unblocked[0] wide[1] thin[2]
"""

# a computes with resident weights while b is copied.
BESIDE_RESIDENT = """
    slot s0/0:a load
      read a
      load a all from {backing_store}
    slot s0/0:a first
      read b
      run
    slot s0/0:a steady x3
      load b all from {backing_store}
      run
    slot s1/0:b load
      evict a all
    slot s1/0:b first
      run
    slot end
      drop a
      drop b
      evict b all
"""


class Case:
    """Components whose weights lie in files, and the plan ``text`` for them."""

    def __init__(
        self, folder: Path, text: str, backing_store: str, calls: list[str], hardware: Hardware
    ) -> None:
        names = sorted(set(calls))
        problem = small_problem(
            {}, [[use(name, calls.count(name), hardware)] for name in names], hardware
        )
        self.problem = replace(
            problem,
            components=tuple(in_backing_store(backing_store, name, hardware) for name in names),
        )
        self.plan = plan_of(
            self.problem, text.format(backing_store=backing_store, ring_buffer=2 * WIDE)
        )
        self.folders = {name: saved(folder / name, seed) for seed, name in enumerate(names)}
        self.calls, self.simulation = calls, simulate(self.problem, self.plan)

    def run(self, device: Any) -> Trace:
        trace = run(
            self.problem, self.plan, host_of(self.problem, self.folders, device), device, self.calls
        )
        expected = plain({name: Small(seed) for seed, name in enumerate(self.folders)}, self.calls)
        assert torch.equal(trace.outputs["x"], expected)
        return trace

    def as_planned(self, trace: Trace) -> None:
        for actual, expected in zip(trace.slots, self.simulation.slots, strict=True):
            assert actual.end_seconds - actual.start_seconds == pytest.approx(
                expected.seconds, rel=0.03
            )


@pytest.mark.parametrize("flops", [1e9, 5e9], ids=["compute-bound", "even"])
@pytest.mark.parametrize("blocks", [1, 2, 5, 0])
def test_the_host_waits_for_copies_from_pageable_memory_when_no_compute_is_left_to_queue(
    tmp_path: Path, blocks: int, flops: float
) -> None:
    """Otherwise it would queue no compute meanwhile, and the run would take the sum of both.
    ``blocks`` of the ring buffer, if any."""
    text = STREAMED.replace("{ring_buffer}", str(blocks * WIDE)) if blocks else BESIDE_RESIDENT
    calls = ["a"] * 4 + ["b"] * (not blocks)
    case = Case(tmp_path, text, "pageable", calls, replace(ON, flops_per_second=flops))
    case.as_planned(case.run(device_of(case.problem)))


def test_page_locking_goes_on_beside_reads_and_takes_the_planned_seconds(tmp_path: Path) -> None:
    """Of twice the seconds of all reads: the copies wait for it."""
    hardware = replace(ON, page_lock_seconds=2 / ON.disk_bytes_per_second, flops_per_second=1e9)
    case = Case(tmp_path, BESIDE_RESIDENT, "pinned", ["a"] * 4 + ["b"], hardware)
    case.as_planned(case.run(device_of(case.problem)))
    read_seconds = sum(
        case.problem.components[0].variants[0].read_seconds[k] * n for k, n in enumerate((1, 4, 6))
    )
    assert case.simulation.slots[0].seconds == pytest.approx(2 * read_seconds, rel=0.5)
    assert case.simulation.slots[0].seconds > 2 * read_seconds
    assert case.simulation.slots[1].seconds == pytest.approx(
        case.simulation.slots[1].compute_seconds
    ), "hidden behind compute"


@pytest.mark.parametrize("backing_store", ["pinned", "pageable"])
def test_the_weights_of_a_module_passed_in_are_page_locked_if_the_plan_says_so(
    backing_store: str,
) -> None:
    problem = small_problem({}, [[use("a", 1, ON)]], ON)
    component = in_backing_store(backing_store, "a", ON)
    device = device_of(problem := replace(problem, components=(component,)))
    host = Host({"a": Small()}, problem, device)
    arena_bytes = device.arenas.nbytes("arenas")
    assert arena_bytes == host.residencies["a"].backing_store.nbytes > 0
    assert device.arenas.nbytes("pinned") == (arena_bytes if backing_store == "pinned" else 0)


@pytest.mark.parametrize("nbytes", [1, PAGESIZE, PAGESIZE + 1])
def test_host_memory_that_can_be_page_locked_is_on_pages_of_its_own(nbytes: int) -> None:
    device = device_of(small_problem({}, []))
    arenas = [device.arena(nbytes) for _ in range(3)]
    assert device.arenas.nbytes("arenas") == 3 * nbytes
    for arena in arenas:
        assert (arena.numel(), arena.data_ptr() % PAGESIZE) == (nbytes, 0)
        end = arena.storage_offset() + round_up(nbytes, PAGESIZE)
        assert end <= arena.untyped_storage().nbytes()


def test_host_memory_counts_until_its_storage_is_freed_and_not_in_a_forked_process() -> None:
    arenas = device_of(small_problem({}, [])).arenas
    memory = torch.zeros(100, dtype=torch.float32)
    arenas.count("arenas", memory)
    part = memory[:10]

    def child() -> None:
        arenas.count("arenas", torch.zeros(10))
        os._exit(arenas.nbytes("arenas"))

    process = get_context("fork").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
    del memory
    assert arenas.nbytes("arenas") == 400, "a view keeps the storage"
    del part
    assert (arenas.nbytes("arenas"), arenas.peak_bytes("arenas")) == (0, 400)
    arenas.reset_peaks()
    assert arenas.peak_bytes("arenas") == 0


def test_memory_is_page_locked_by_a_thread_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, BESIDE_RESIDENT, "pinned", ["a"] * 4 + ["b"], ON)
    device, lockers = device_of(case.problem), list[str]()
    pin = device.pin
    with ThreadPoolExecutor(1, "disk") as disk, ThreadPoolExecutor(1, "lock") as lock:
        queues = {"disk": disk, "lock": lock}
        monkeypatch.setattr(
            device, "background", lambda job, queue="disk": queues[queue].submit(job).result
        )
        monkeypatch.setattr(
            device,
            "pin",
            lambda arena: (lockers.append(threading.current_thread().name), pin(arena)),
        )
        case.run(device)
    assert lockers == ["lock_0"] * 2


class Joined:
    """Page-locks memory no earlier than somebody waits for it; ``pending`` are the jobs that nobody
    waited for yet."""

    def __init__(self, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pending, self._background = list[Callable[[], None]](), device.background
        monkeypatch.setattr(device, "background", self.background)

    def background(self, job: Callable[[], None], queue: str = "disk") -> Callable[[], None]:
        if queue != "lock":
            return cast(Callable[[], None], self._background(job, queue))
        self.pending.append(job)

        def join() -> None:
            if job in self.pending:
                self.pending.remove(job)
                job()

        return join


@pytest.mark.parametrize("text", [STREAMED, BESIDE_RESIDENT], ids=["streamed", "resident"])
def test_copies_wait_for_page_locking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    case = Case(tmp_path, text, "pinned", ["a"] * 4 + ["b"] * (text is BESIDE_RESIDENT), ON)
    device = device_of(case.problem)
    locks = Joined(device, monkeypatch)
    case.run(device)
    assert not locks.pending


def test_memory_is_not_freed_while_it_is_page_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reads fail, so that nothing is copied."""
    case = Case(tmp_path, BESIDE_RESIDENT, "pinned", ["a"] * 4 + ["b"], ON)
    device = device_of(case.problem)
    locks = Joined(device, monkeypatch)
    host = host_of(case.problem, case.folders, device)
    for file in case.folders["a"].iterdir():
        file.unlink()
    with pytest.raises(GraphrunError):
        run(case.problem, case.plan, host, device, case.calls)
    assert not locks.pending


def test_a_host_is_restricted_to_components_that_it_has() -> None:
    modules = {"a": Small(), "b": Small(1)}
    problem = small_problem(modules, [[use(name, 1, ON)] for name in modules], ON)
    host = Host(modules, problem, device_of(problem))
    assert host.restricted_to(problem).residencies == host.residencies
    part = replace(problem, components=problem.components[:1])
    restricted_host = host.restricted_to(part)
    assert restricted_host.residencies == {"a": host.residencies["a"]}
    with pytest.raises(InputError, match="built for other blocks"):
        restricted_host.restricted_to(problem)
