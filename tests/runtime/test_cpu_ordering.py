"""Every wait and mark on the way of a block from its file to its compute on the CPU is needed: each
run without it is reported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from read_ordering import ReadOrdering
from small_component import PREFETCH
from stored_component import nothing_left
from test_cpu_device import Runs

from graphrun.errors import BrokenPlan
from graphrun.runtime import direct_reads
from graphrun.runtime.devices.cpu import CpuDevice
from graphrun.runtime.direct_reads import DirectReads, SpanRead
from graphrun.runtime.files import FileStore
from graphrun.runtime.residency import Residency
from graphrun.runtime.slot import OpenSlot
from graphrun.runtime.streamer import Streamer
from graphrun.units import PAGE_BYTES

# ``a`` keeps one block of each group, which are loaded in its first call.
KEPT = """
    slot s0/0:a load
      load a unblocked[0] from pinned
    slot s0/0:a first
      stream a keep unblocked[0] wide[1] thin[2] ring buffer {ring_buffer} B
      load a wide[1] thin[2] from pinned
      run
    slot s0/0:a steady x3
      stream a keep unblocked[0] wide[1] thin[2] ring buffer {ring_buffer} B
      load b all from pinned
      run
    slot s1/0:b load
      evict a unblocked[0] wide[1] thin[2]
    slot s1/0:b first
      run
    slot end
      evict b all
"""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    with nothing_left():
        yield


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    runs = Runs(tmp_path, KEPT)
    yield runs
    runs.host.close()


class Waits:
    """Counts the waits of compute for reads that have not ended, and leaves out some."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.left_out = set[int]()
        self.at_close = set[int]()  # waits behind the last call of a slot; a barrier follows
        self._closes = False
        wait, close = CpuDevice.wait, OpenSlot.close

        def counted(device: CpuDevice, stream: Any, mark: Any) -> None:
            span_read = getattr(mark, "last_read", None)
            if stream == "compute" and span_read is not None and not span_read.is_done:
                number = self.count
                self.count += 1
                if self._closes:
                    self.at_close.add(number)
                if number in self.left_out:
                    return
            wait(device, stream, mark)

        def closing(slot: OpenSlot) -> Any:
            self._closes = True
            try:
                return close(slot)
            finally:
                self._closes = False

        patch.setattr(CpuDevice, "wait", counted)
        patch.setattr(OpenSlot, "close", closing)


def reports(runs: Runs, ordering: ReadOrdering) -> list[str]:
    """What the checker reports of a run, whatever comes of it."""
    ordering.reports.clear()
    try:
        runs.run()
    except (BrokenPlan, RuntimeError):
        assert ordering.reports
    return list(ordering.reports)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("text", [PREFETCH, KEPT], ids=["streamed", "kept"])
def test_a_run_is_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, late: bool
) -> None:
    runs = Runs(tmp_path, text)
    ordering = ReadOrdering(monkeypatch, late=late)
    for _ in range(2):
        runs.succeeds()
    assert ordering.reports == []
    assert ordering.block_reads > 2 * 40
    assert ordering.uses > 2 * 200
    runs.host.close()


@pytest.mark.sweep("more")
@pytest.mark.long
def test_every_wait_that_is_left_out_is_reported(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, ordering = Waits(monkeypatch), ReadOrdering(monkeypatch, late=True)
    assert reports(runs, ordering) == []
    count, at_close = waits.count, set(waits.at_close)
    assert count > 30
    for number in range(count):
        waits.count, waits.left_out = 0, {number}
        assert bool(reports(runs, ordering)) == (number not in at_close), number
    waits.count, waits.left_out = 0, set()
    assert reports(runs, ordering) == []


def without_waits_at_the_end_of_a_slot(patch: pytest.MonkeyPatch) -> None:
    close, wait, ends = OpenSlot.close, CpuDevice.wait, list[bool]()

    def closing(slot: OpenSlot) -> Any:
        ends.append(True)
        try:
            return close(slot)
        finally:
            ends.pop()

    def waiting(device: CpuDevice, stream: Any, mark: Any) -> None:
        if not ends:
            wait(device, stream, mark)

    patch.setattr(OpenSlot, "close", closing)
    patch.setattr(CpuDevice, "wait", waiting)


def with_waits_that_return_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SpanRead, "wait", lambda _: None)


def with_marks_before_the_read(patch: pytest.MonkeyPatch) -> None:
    copy = FileStore.copy

    def early(store: FileStore, *arguments: Any) -> Any:
        start, _ = copy(store, *arguments)
        return start, start

    patch.setattr(FileStore, "copy", early)


def with_marks_before_the_write(patch: pytest.MonkeyPatch) -> None:
    read_block = CpuDevice.read_block

    def forgetful(device: CpuDevice, spans: Any, write: Any) -> None:
        read_block(device, spans, None)
        last_read = device._last_read
        if write is not None:
            read_block(device, (), write)
            device._last_read = last_read

    patch.setattr(CpuDevice, "read_block", forgetful)


def with_the_mark_of_the_write_alone(patch: pytest.MonkeyPatch) -> None:
    read_block = CpuDevice.read_block

    def forgetful(device: CpuDevice, spans: Any, write: Any) -> None:
        last_read = device._last_read
        read_block(device, spans, write)
        if write is None:
            device._last_read = last_read

    patch.setattr(CpuDevice, "read_block", forgetful)


def with_reads_that_end_out_of_order(patch: pytest.MonkeyPatch) -> None:
    def end(reads: DirectReads) -> None:
        for span_read in [r for r in reads._unfinished if not r._chunks_left]:
            reads._unfinished.remove(span_read)
            span_read.started_seconds = span_read.started_seconds or 1.0
            span_read.ended_seconds = 1.0

    patch.setattr(DirectReads, "_end_reads", end)


def with_reads_that_end_with_their_first_chunk(patch: pytest.MonkeyPatch) -> None:
    queue = DirectReads._queue

    def one(reads: DirectReads, span_read: SpanRead, chunks: Any) -> None:
        queue(reads, span_read, chunks)
        with reads._changed_state:
            span_read._chunks_left = min(span_read._chunks_left, 1)

    patch.setattr(DirectReads.__init__, "__defaults__", (2, PAGE_BYTES))
    patch.setattr(DirectReads, "_queue", one)


def with_chunks_that_exclude_no_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(direct_reads._Chunk, "excludes", lambda *_: False)


def with_a_ring_buffer_that_is_always_free(patch: pytest.MonkeyPatch) -> None:
    place = Streamer._place

    def free(streamer: Streamer) -> bool:
        place(streamer)
        reserved_place = streamer._reserved_place
        assert reserved_place is not None
        for number in reserved_place.released_numbers:
            streamer._compute_ends.setdefault(number, None)
        return True

    patch.setattr(Streamer, "_place", free)


def with_blocks_that_end_before_they_run(patch: pytest.MonkeyPatch) -> None:
    """Their memory is free as soon as they are bound, and copies go on then."""
    begin = Streamer._before

    def early(streamer: Streamer, path: str) -> None:
        begin(streamer, path)
        streamer._compute_ends[streamer._issued[0].number] = None
        streamer.issue_ahead()

    patch.setattr(Streamer, "_before", early)


def with_evictions_before_the_reads_end(patch: pytest.MonkeyPatch) -> None:
    load = Residency.load

    def hasty(residency: Residency, path: str) -> Any:
        marks = load(residency, path)
        if residency.name == "b":
            residency.evict(path)
        return marks

    patch.setattr(Residency, "load", hasty)


MUTANTS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    without_waits_at_the_end_of_a_slot: "before it is read",
    with_waits_that_return_at_once: "before it is read",
    with_marks_before_the_read: "before it is read",
    with_marks_before_the_write: "before it is read",
    with_the_mark_of_the_write_alone: "before it is read",
    with_reads_that_end_out_of_order: "before it is read",
    with_reads_that_end_with_their_first_chunk: "before it is read",
    with_chunks_that_exclude_no_others: "two threads fill the same memory",
    with_a_ring_buffer_that_is_always_free: "whose memory was read over",
    with_blocks_that_end_before_they_run: "is read into the memory of .*, which computes",
    with_evictions_before_the_reads_end: "is evicted while it is read",
}


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_reported_in_every_run(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    ordering = ReadOrdering(monkeypatch, late=True)
    # reads of blocks that a call leaves out have not ended when others go to the same memory
    runs.host.modules["a"].skip = frozenset({"wide.2", "wide.3"})  # type: ignore[assignment]
    for _ in range(3):
        with monkeypatch.context() as patch:
            mutant(patch)
            faults = reports(runs, ordering)
        assert any(re.search(MUTANTS[mutant], fault) for fault in faults), faults
        assert reports(runs, ordering) == []
