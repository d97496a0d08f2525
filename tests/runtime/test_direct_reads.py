"""Blocks are read from files straight to their place: same bits, nothing in the page cache, in
order, and nothing is left after an error or the end."""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import mmap
import multiprocessing
import os
import random
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_component import nothing_left, open_files

from graphrun import systems
from graphrun.errors import InputError
from graphrun.modules.source_files import Stored, file_stamp
from graphrun.runtime import direct_reads
from graphrun.runtime.direct_reads import (
    GAP_BYTES,
    DirectReads,
    MappedArena,
    Span,
    span_layout,
)
from graphrun.units import PAGE_BYTES

linux = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="the system has no O_DIRECT")
SMALL = 4 * PAGE_BYTES  # a chunk


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    with nothing_left():
        yield


def file_of(path: Path, nbytes: int, seed: int = 0) -> Path:
    path.write_bytes(random.Random(seed).randbytes(nbytes))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        systems.forget_cached(file.fileno())
    return path


def whole(path: Path) -> Span:
    nbytes = path.stat().st_size
    return Span(str(path), 0, -(-nbytes // PAGE_BYTES) * PAGE_BYTES, nbytes)


def content(view: torch.Tensor, nbytes: int) -> bytes:
    return view[:nbytes].numpy().tobytes()


def read_whole(path: Path, **options: Any) -> dict[str, bool]:
    """Reads the file, compares it, and returns whether it was read directly."""
    span = whole(path)
    arena = MappedArena(span.nbytes)
    with DirectReads(chunk_bytes=SMALL, **options) as reads:
        reads.submit(span, arena.view(0, span.nbytes)).wait()
    assert content(arena.view(0, span.nbytes), span.needed_stop) == path.read_bytes()
    assert reads.bytes_read >= span.needed_stop
    arena.close()
    return reads.is_direct


def cached_pages(path: Path) -> int:
    """How many pages of the file are in the page cache."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        pages = -(-len(memory) // mmap.PAGESIZE)
        vector = (ctypes.c_ubyte * pages)()
        anchor = ctypes.c_char.from_buffer(memory)
        address = ctypes.c_void_p(ctypes.addressof(anchor))
        failed = ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(memory)), vector)
        del anchor
        assert not failed
        return sum(byte & 1 for byte in vector)


def reads_directly(path: Path) -> bool:
    if (file := systems.open_direct(str(path))) is None:
        return False
    with file:
        memory = systems.anonymous_memory(PAGE_BYTES)
        try:
            systems.read_at(file, memoryview(memory), 0)
        except OSError:
            return False
    return True


# -- layouts

stored_tensors = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.integers(0, 400_000),
        st.sampled_from(["uint8", "bfloat16", "float32", "float64", "float6_e2m3fn"]),
        st.lists(st.integers(0, 90), max_size=3),
    ),
    min_size=1,
    max_size=8,
)


def elements(dtype: str) -> int:
    return getattr(torch, dtype).itemsize if hasattr(torch, dtype) else 1


@settings(max_examples=60)
@given(stored_tensors)
def test_every_tensor_of_a_random_layout_has_the_bits_of_its_file(drawing: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tensors = [
            Stored(
                "",
                dtype,
                tuple(shape),
                elements(dtype) * torch.Size(shape).numel(),
                str(Path(folder, file)),
                begin,
            )
            for file, begin, dtype, shape in drawing
        ]
        data = dict[str, bytes]()
        for seed, file in enumerate(sorted({tensor.file for tensor in tensors})):
            stop = max(t.begin + t.nbytes for t in tensors if t.file == file)
            data[file] = file_of(Path(file), stop, seed).read_bytes()
        layout = span_layout(tensors)
        arena = MappedArena(layout.nbytes + PAGE_BYTES)
        memory = arena.view(PAGE_BYTES, layout.nbytes)
        with DirectReads(chunk_bytes=SMALL) as reads:
            handles = [
                reads.submit(span, memory[offset : offset + span.nbytes])
                for span, offset in zip(layout.spans, layout.span_offsets, strict=True)
            ]
            if handles:
                handles[-1].wait()
            assert all(handle.is_done for handle in handles)
        assert layout.nbytes == memory.nbytes
        for offset, tensor in zip(layout.tensor_offsets, tensors, strict=True):
            bits = data[tensor.file][tensor.begin : tensor.begin + tensor.nbytes]
            assert content(memory[offset:], tensor.nbytes) == bits
            assert not tensor.nbytes or (offset - tensor.begin) % PAGE_BYTES == 0


def test_spans_are_coalesced_over_small_gaps_and_start_at_pages() -> None:
    def tensor(file: str, begin: int, nbytes: int = 100) -> Stored:
        return Stored("", "uint8", (nbytes,), nbytes, file, begin)

    in_gap, behind_gap = 5000 + 100 + GAP_BYTES - 1, 5000 + 100 + GAP_BYTES
    layout = span_layout(
        [tensor("b", in_gap), tensor("a", 0, 0), tensor("b", 5000), tensor("c", 9)]
    )
    assert layout.spans == (Span("b", 4096, 16384, in_gap + 100), Span("c", 0, 4096, 109))
    assert layout.tensor_offsets == (in_gap - 4096, 0, 904, 12288 + 9)
    assert (layout.span_offsets, layout.nbytes) == ((0, 12288), 16384)
    layout = span_layout([tensor("b", behind_gap), tensor("b", 5000)])
    assert layout.spans == (Span("b", 4096, 8192, 5100), Span("b", 12288, 16384, behind_gap + 100))
    assert layout.tensor_offsets == (4096 + behind_gap - 12288, 904)


# -- the page cache


@linux
@pytest.mark.parametrize("cached", ["nothing", "the file"])
def test_a_direct_read_puts_no_page_into_the_cache(tmp_path: Path, cached: str) -> None:
    path = file_of(tmp_path / "file", 40 * PAGE_BYTES + 77)
    if not reads_directly(path):
        pytest.skip("the file system has no direct reads")
    cached_before = cached_pages(path)
    assert cached_before == 0
    span = whole(path)
    arena = MappedArena(span.nbytes)
    data = path.read_bytes() if cached == "the file" else b""
    cached_before = cached_pages(path)
    with DirectReads(chunk_bytes=SMALL) as reads:
        reads.submit(span, arena.view(0, span.nbytes)).wait()
        assert reads.is_direct == {str(path): True}
    assert cached_pages(path) == cached_before
    assert content(arena.view(0, span.nbytes), span.needed_stop) == (data or path.read_bytes())
    arena.close()


@linux
def test_a_read_through_the_cache_takes_its_pages_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(tmp_path / "file", 600 * PAGE_BYTES + 77)
    if not reads_directly(path):
        pytest.skip("the file system has no direct reads, and may have no page cache")
    monkeypatch.delattr(os, "O_DIRECT")
    span = whole(path)
    arena = MappedArena(span.nbytes)
    with DirectReads(threads=1, chunk_bytes=512 * PAGE_BYTES) as reads:
        reads.submit(span, arena.view(0, span.nbytes)).wait()
    assert reads.is_direct == {str(path): False}
    assert cached_pages(path) == 0
    arena.close()


@linux
def test_files_in_memory_are_not_read_directly() -> None:
    """The kernel takes O_DIRECT there from 6.6 on, and ignores it."""
    if not os.path.ismount("/dev/shm"):
        pytest.skip("the system has no /dev/shm")
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        if systems.file_system(file.fileno()) != "tmpfs":
            pytest.skip("/dev/shm is no tmpfs")
        path = file_of(Path(file.name), 9 * PAGE_BYTES + 5)
        assert read_whole(path) == {str(path): False}


@linux
def test_a_file_system_that_refuses_to_open_directly_is_read_through_the_cache() -> None:
    path = Path("/sys/kernel/btf/vmlinux")  # sysfs refuses with EINVAL
    if not path.exists():
        pytest.skip("the kernel has no type information in sysfs")
    assert read_whole(path) == {str(path): False}


@linux
def test_a_file_system_that_refuses_the_first_read_is_read_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    arrivals, second_arrival, cached = itertools.count(), threading.Event(), threading.Event()

    def refusing(file: Any, view: memoryview, offset: int) -> int:
        if not fcntl.fcntl(file.fileno(), fcntl.F_GETFL) & os.O_DIRECT:
            cached.set()
            return systems.read_at(file, view, offset)
        if next(arrivals) == 0:
            assert second_arrival.wait(60)
        else:  # while this thread reads, the other one opens the file again
            second_arrival.set()
            assert cached.wait(60)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    path = file_of(tmp_path / "file", 50 * PAGE_BYTES)
    monkeypatch.setattr(direct_reads, "read_at", refusing)
    assert read_whole(path, threads=2) == {str(path): False}


@pytest.mark.parametrize("lacks", ["O_DIRECT", "O_DIRECT preadv posix_fadvise"])
def test_systems_without_direct_reads_read_the_same(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in lacks.split():
        monkeypatch.delattr(os, name, raising=False)
    for name in ("MAP_PRIVATE", "MADV_HUGEPAGE", "MADV_DONTFORK"):
        monkeypatch.delattr(mmap, name, raising=False)
    path = file_of(tmp_path / "file", 9 * PAGE_BYTES + 5)
    assert read_whole(path) == {str(path): False}


def test_an_unknown_file_system_has_no_name(tmp_path: Path) -> None:
    path = file_of(tmp_path / "file", 1)
    with path.open("rb") as file:
        assert systems.file_system(file.fileno(), tmp_path / "none") == ""
        assert systems.file_system(file.fileno(), path) == ""


# -- order


def in_steps(monkeypatch: pytest.MonkeyPatch, error_at: int = -1) -> Callable[[int], None]:
    """Makes each read of a chunk wait until it is let through, by its offset in the file."""
    gates = {number * SMALL: threading.Event() for number in range(64)}

    def read_at(file: Any, view: memoryview, offset: int) -> int:
        assert gates[offset].wait(60)
        if offset == error_at * SMALL:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return systems.read_at(file, view, offset)

    monkeypatch.setattr(direct_reads, "read_at", read_at)
    return lambda number: gates[number * SMALL].set()


def chunk_spans(path: Path, count: int) -> list[Span]:
    return [
        Span(str(path), n * SMALL, (n + 1) * SMALL, (n + 1) * SMALL - 100) for n in range(count)
    ]


def test_reads_begin_and_end_in_the_order_of_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, let = file_of(tmp_path / "file", 4 * SMALL), in_steps(monkeypatch)
    arena = MappedArena(4 * SMALL)
    with DirectReads(threads=2, chunk_bytes=SMALL) as reads:
        handles = [
            reads.submit(span, arena.view(span.start, span.nbytes)) for span in chunk_spans(path, 4)
        ]
        let(1)
        let(2)  # both in memory now or soon; read 0 is not
        waiter = threading.Timer(0.05, let, (0,))
        waiter.start()
        assert not any(handle.is_done for handle in handles)
        handles[2].wait()
        assert [handle.is_done for handle in handles] == [True, True, True, False]
        assert reads.wait_seconds > 0
        let(3)
        handles[3].wait()
        waiter.join()
    for first, second in itertools.pairwise(handles):
        assert first.started_seconds <= second.started_seconds
        assert first.started_seconds < first.ended_seconds <= second.ended_seconds
    assert reads.bytes_read == 4 * SMALL
    assert content(arena.view(0, 4 * SMALL), 4 * SMALL) == path.read_bytes()
    arena.close()


def test_a_read_into_memory_of_an_unfinished_read_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamed blocks that a call skips are overwritten by the next ones while they are read."""
    path, let = file_of(tmp_path / "file", 4 * SMALL), in_steps(monkeypatch)
    arena = MappedArena(3 * SMALL)
    first, second, third, fourth = chunk_spans(path, 4)
    with DirectReads(threads=2, chunk_bytes=SMALL) as reads:
        reads.submit(first, arena.view(PAGE_BYTES, SMALL))
        overwriting = reads.submit(second, arena.view(SMALL, SMALL))
        other = reads.submit(third, arena.view(2 * SMALL, SMALL))
        let(1)
        let(2)
        timer = threading.Timer(0.1, let, (0,))
        timer.start()
        other.wait()
        assert overwriting.is_done
        timer.join()
        assert content(arena.view(SMALL, SMALL), SMALL) == path.read_bytes()[SMALL : 2 * SMALL]
        let(3)
        reads.submit(fourth, arena.view(0, SMALL)).wait()
    assert content(arena.view(0, SMALL), SMALL) == path.read_bytes()[3 * SMALL :]
    arena.close()


def test_no_byte_of_a_span_is_read_twice(tmp_path: Path) -> None:
    path, arena = file_of(tmp_path / "file", 5 * SMALL), MappedArena(4 * SMALL)
    with DirectReads(threads=2, chunk_bytes=SMALL) as reads:
        span = Span(str(path), SMALL, 5 * SMALL, 5 * SMALL)
        reads.submit(span, arena.view(0, 4 * SMALL)).wait()
    assert reads.bytes_read == 4 * SMALL
    assert content(arena.view(0, 4 * SMALL), 4 * SMALL) == path.read_bytes()[SMALL:]
    arena.close()


def test_a_read_into_other_memory_begins_during_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, were_together = threading.Event(), list[bool]()

    def read_at(file: Any, view: memoryview, offset: int) -> int:
        has_begun.set()
        return systems.read_at(file, view, offset)

    monkeypatch.setattr(direct_reads, "read_at", read_at)
    path, arena = file_of(tmp_path / "file", SMALL), MappedArena(2 * SMALL)
    with DirectReads(threads=2) as reads:
        reads.submit_write(
            lambda: were_together.append(has_begun.wait(10)), arena.view(SMALL, SMALL)
        )
        reads.submit(Span(str(path), 0, SMALL, SMALL), arena.view(0, SMALL)).wait()
    assert were_together == [True]
    arena.close()


def test_writes_are_in_the_order_of_reads_and_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, let = file_of(tmp_path / "file", 2 * SMALL), in_steps(monkeypatch)
    arena, order = MappedArena(3 * SMALL), list[str]()
    first, second = chunk_spans(path, 2)
    resume = threading.Event()

    def write(name: str, value: int, place: torch.Tensor) -> Callable[[], None]:
        def act() -> None:
            order.append(f"{name} begins")
            assert resume.wait(60)
            place.fill_(value)
            order.append(f"{name} ends")

        return act

    with DirectReads(threads=2, chunk_bytes=SMALL) as reads:
        reads.submit(first, arena.view(0, SMALL))
        tail = arena.view(0, PAGE_BYTES)
        overlapping_read = reads.submit_write(
            write("over", 7, tail), tail
        )  # waits for the first read
        separate_read = reads.submit_write(
            write("apart", 8, arena.view(SMALL, 4)), arena.view(SMALL, 4)
        )
        last = reads.submit(second, arena.view(2 * SMALL, SMALL))
        let(1)
        for act in (lambda: let(0), resume.set):
            threading.Timer(0.05, act).start()
        last.wait()
        assert overlapping_read.is_done
        assert separate_read.is_done
    assert order == ["over begins", "over ends", "apart begins", "apart ends"]
    assert arena.view(0, PAGE_BYTES).eq(7).all()
    assert (
        content(arena.view(PAGE_BYTES, SMALL), SMALL - PAGE_BYTES)
        == (path.read_bytes()[PAGE_BYTES:SMALL])
    )
    assert arena.view(SMALL, 4).eq(8).all()
    del tail
    arena.close()


def test_a_read_that_is_done_does_not_block(tmp_path: Path) -> None:
    path = file_of(tmp_path / "file", SMALL)
    arena = MappedArena(SMALL)
    with DirectReads() as reads:
        handle = reads.submit(whole(path), arena.view(0, SMALL))
        handle.wait()
        blocked = reads.wait_seconds
        handle.wait()
        assert reads.wait_seconds == blocked
    handle.wait()
    with pytest.raises(RuntimeError, match="is closed: make a new one"):
        reads.submit(whole(path), arena.view(0, SMALL))
    reads.close()


def test_memory_may_be_unmapped_as_soon_as_its_reads_are_done(tmp_path: Path) -> None:
    path = file_of(tmp_path / "file", SMALL)
    with DirectReads() as reads:
        for _ in range(20):
            arena = MappedArena(SMALL)
            reads.submit(whole(path), arena.view(0, SMALL)).wait()
            arena.close()


def test_reads_that_are_closed_before_their_end_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, let = file_of(tmp_path / "file", 8 * SMALL), in_steps(monkeypatch)
    arena = MappedArena(8 * SMALL)
    reads = DirectReads(chunk_bytes=SMALL)
    handle = reads.submit(whole(path), arena.view(0, 8 * SMALL))
    timer = threading.Timer(0.05, lambda: (let(0), let(1)))
    timer.start()
    reads.close()
    timer.join()
    with pytest.raises(RuntimeError, match="is closed"):
        handle.wait()
    assert reads.bytes_read <= 2 * SMALL
    arena.close()


# -- errors


@pytest.mark.parametrize("shrinks", ["before it is opened", "while it is open"])
@pytest.mark.parametrize("nbytes", [6 * SMALL, 6 * SMALL + 4096, 6 * SMALL + 5000, 7 * SMALL + 3])
def test_a_truncated_file_is_an_error_with_the_place(
    tmp_path: Path, nbytes: int, shrinks: str
) -> None:
    path = file_of(tmp_path / "file", 7 * SMALL + 4)
    span, arena = whole(path), MappedArena(9 * SMALL)
    reads = DirectReads(chunk_bytes=SMALL)
    if shrinks == "while it is open":
        reads.submit(chunk_spans(path, 1)[0], arena.view(0, SMALL)).wait()
    os.truncate(path, nbytes)
    handle = reads.submit(span, arena.view(0, span.nbytes))
    message = f"{path} is truncated: it has {nbytes} bytes, and its tensors end at byte "
    if shrinks == "while it is open":
        message = f"{path} (is truncated|was changed)"
    with pytest.raises(InputError, match=message):
        handle.wait()
    assert not any(thread.name.startswith("direct") for thread in threading.enumerate())
    with pytest.raises(InputError, match=f"{path} (is truncated|was changed)"):
        reads.submit(span, arena.view(0, span.nbytes))
    arena.close()  # no thread, and no traceback, uses the memory


def test_bytes_behind_the_tensors_may_be_missing(tmp_path: Path) -> None:
    path = file_of(tmp_path / "file", SMALL + 4)
    arena = MappedArena(2 * SMALL)
    with DirectReads(chunk_bytes=SMALL) as reads:
        span = Span(str(path), 0, 2 * SMALL, SMALL + 4)
        reads.submit(span, arena.view(0, span.nbytes)).wait()
    assert content(arena.view(0, span.nbytes), SMALL + 4) == path.read_bytes()
    arena.close()


def test_a_file_that_was_written_again_is_an_error(tmp_path: Path) -> None:
    path, arena = file_of(tmp_path / "file", SMALL), MappedArena(SMALL)
    reads = DirectReads()
    reads.submit(whole(path), arena.view(0, SMALL)).wait()
    os.utime(path, ns=(1, 1))
    with pytest.raises(InputError, match="file was changed while it was in use: plan again"):
        reads.submit(whole(path), arena.view(0, SMALL)).wait()
    arena.close()


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_file_that_changed_since_its_span_was_laid_out_is_an_error(
    tmp_path: Path, is_changed: bool
) -> None:
    path, arena = file_of(tmp_path / "file", SMALL), MappedArena(SMALL)
    span = replace(whole(path), stamp=file_stamp(path))
    if is_changed:
        os.utime(path, ns=(1, 1))
    with DirectReads() as reads:
        handle = reads.submit(span, arena.view(0, SMALL))
        if is_changed:
            with pytest.raises(InputError, match="file was changed while it was in use"):
                handle.wait()
        else:
            handle.wait()
    arena.close()


def test_a_removed_file_is_an_error_and_other_reads_end(tmp_path: Path) -> None:
    path, arena = file_of(tmp_path / "file", SMALL), MappedArena(2 * SMALL)
    absent = Span(str(tmp_path / "gone"), 0, SMALL, SMALL)
    reads = DirectReads()
    first = reads.submit(whole(path), arena.view(0, SMALL))
    first.wait()
    for _ in range(2):
        with pytest.raises(InputError, match=r"gone can no longer be opened: No such file.*; down"):
            reads.submit(absent, arena.view(SMALL, SMALL)).wait()
    first.wait()
    arena.close()


def test_an_error_ends_threads_and_closes_files_though_nobody_waits(tmp_path: Path) -> None:
    path, arena = file_of(tmp_path / "file", SMALL), MappedArena(2 * SMALL)
    threads = set(threading.enumerate())
    reads = DirectReads()
    reads.submit(whole(path), arena.view(0, SMALL)).wait()
    assert str(path) in open_files() or not Path("/proc/self/fd").exists()
    handle = reads.submit(Span(str(path), 0, 2 * SMALL, 2 * SMALL), arena.view(0, 2 * SMALL))
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)
    assert set(threading.enumerate()) == threads
    assert str(path) not in open_files()
    with pytest.raises(InputError, match="file is truncated"):
        handle.wait()


def test_an_error_of_the_disk_ends_all_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, let = file_of(tmp_path / "file", 12 * SMALL), in_steps(monkeypatch, error_at=2)
    arena = MappedArena(12 * SMALL)
    reads = DirectReads(chunk_bytes=SMALL)
    handles = [
        reads.submit(span, arena.view(span.start, span.nbytes)) for span in chunk_spans(path, 12)
    ]
    for number in range(12):
        let(number)
    for handle in handles[:2]:
        handle.wait()
    for handle in handles[2:]:
        with pytest.raises(
            InputError, match=rf"{path} cannot be read at byte {2 * SMALL}: .*; check the disk"
        ):
            handle.wait()
    assert 2 * SMALL <= reads.bytes_read <= 3 * SMALL  # one more is of the second thread
    assert content(arena.view(0, 2 * SMALL), 2 * SMALL) == path.read_bytes()[: 2 * SMALL]
    arena.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first", "failing"])
def test_an_error_waits_for_the_requests_of_other_threads(
    order: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is not written any more when the error arrives, and earlier reads are done."""
    path, arena = file_of(tmp_path / "file", 2 * SMALL), MappedArena(2 * SMALL)
    started, resume = threading.Event(), threading.Event()

    def read_at(file: Any, view: memoryview, offset: int) -> int:
        if offset == SMALL:
            assert started.wait(60)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        started.set()
        assert resume.wait(60)
        return systems.read_at(file, view, offset)

    monkeypatch.setattr(direct_reads, "read_at", read_at)
    reads = DirectReads(threads=2, chunk_bytes=SMALL)
    handles = [
        reads.submit(span, arena.view(span.start, span.nbytes)) for span in chunk_spans(path, 2)
    ]
    timer = threading.Timer(0.1, resume.set)
    timer.start()
    for number in order:
        if number == 0:
            handles[0].wait()
        else:
            with pytest.raises(InputError, match=f"cannot be read at byte {SMALL}"):
                handles[1].wait()
        assert reads.bytes_read == SMALL
    assert content(arena.view(0, SMALL), SMALL) == path.read_bytes()[:SMALL]
    arena.close()
    timer.join()


def test_a_short_read_goes_on_at_the_page_that_it_ended_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, arena = file_of(tmp_path / "file", SMALL), MappedArena(SMALL)
    offsets = []

    def read_at(file: Any, view: memoryview, offset: int) -> int:
        offsets.append(offset)
        return min(5000, systems.read_at(file, view, offset))

    monkeypatch.setattr(direct_reads, "read_at", read_at)
    with DirectReads() as reads:
        reads.submit(whole(path), arena.view(0, SMALL)).wait()
        assert reads.bytes_read == SMALL
    assert offsets == [0, PAGE_BYTES, 2 * PAGE_BYTES, 3 * PAGE_BYTES]
    assert content(arena.view(0, SMALL), SMALL) == path.read_bytes()
    arena.close()


def test_an_error_of_a_write_is_raised_by_it_and_by_all_later_reads(tmp_path: Path) -> None:
    path, arena = file_of(tmp_path / "file", SMALL), MappedArena(2 * SMALL)
    calls, submission_end = list[str](), threading.Event()

    def fail() -> None:
        submission_end.wait()
        view = arena.view(SMALL, SMALL)  # of the frame that the error's traceback would keep
        try:
            raise KeyError(view.nbytes)
        except KeyError:
            raise InputError("the weights cannot be written") from None

    reads = DirectReads()
    first = reads.submit(whole(path), arena.view(0, SMALL))
    failing = reads.submit_write(fail, arena.view(SMALL, SMALL))
    later_read = reads.submit_write(lambda: calls.append("later"), arena.view(SMALL, SMALL))
    submission_end.set()
    for handle in (later_read, failing, later_read):
        with pytest.raises(InputError, match="the weights cannot be written"):
            handle.wait()
    first.wait()
    assert not calls
    arena.close()


def test_an_error_that_is_not_of_the_file_is_raised_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_at(file: Any, view: memoryview, offset: int) -> int:
        raise MemoryError("of read_at")

    path, arena = file_of(tmp_path / "file", SMALL), MappedArena(SMALL)
    monkeypatch.setattr(direct_reads, "read_at", read_at)
    handle = DirectReads(threads=1).submit(whole(path), arena.view(0, SMALL))
    for _ in range(2):
        with pytest.raises(MemoryError, match="of read_at") as error_info:
            handle.wait()
        assert "in read_at" in error_info.value.__notes__[0]
        del error_info
    arena.close()


@pytest.mark.parametrize(
    ("view", "start"),
    [
        (MappedArena(SMALL + PAGE_BYTES).view(1, SMALL), 0),
        (MappedArena(SMALL).view(0, SMALL).view(torch.int8), 0),
        (MappedArena(SMALL + PAGE_BYTES).view(0, SMALL + PAGE_BYTES), 0),
        (MappedArena(SMALL).view(0, SMALL).view(2, -1), 0),
        (MappedArena(2 * SMALL).view(0, 2 * SMALL)[::2], 0),
        (torch.empty(SMALL, dtype=torch.uint8, device="meta"), 0),
        (MappedArena(SMALL).view(0, SMALL), 512),
    ],
    ids=["misaligned", "dtype", "size", "shape", "gaps", "device", "misaligned in the file"],
)
def test_a_view_that_cannot_be_read_into_is_refused(view: torch.Tensor, start: int) -> None:
    with pytest.raises(ValueError, match="it must be flat bytes at a page's start"):
        DirectReads().submit(Span("file", start, start + SMALL, SMALL), view)


@pytest.mark.parametrize(
    ("threads", "chunk_bytes"), [(0, SMALL), (1, 0), (1, 2048), (1, PAGE_BYTES + 512)]
)
def test_reads_need_a_thread_and_chunks_of_whole_pages(threads: int, chunk_bytes: int) -> None:
    DirectReads(1, PAGE_BYTES).close()
    with pytest.raises(ValueError, match=f"{threads} threads, chunks of {chunk_bytes} bytes"):
        DirectReads(threads, chunk_bytes)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_process_is_refused(tmp_path: Path) -> None:
    path, arena = file_of(tmp_path / "file", SMALL), MappedArena(SMALL)
    with DirectReads() as reads:
        handle = reads.submit(whole(path), arena.view(0, SMALL))
        handle.wait()

        def use() -> None:
            reads.close()
            with pytest.raises(InputError, match="this process was forked from it"):
                handle.wait()

        process = multiprocessing.get_context("fork").Process(target=use)
        process.start()
        process.join()
        process.close() if process.exitcode == 0 else pytest.fail(f"{process.exitcode}")
        reads.submit(whole(path), arena.view(0, SMALL)).wait()
    arena.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_process_ends_though_its_reader_is_not_closed(tmp_path: Path) -> None:
    span = whole(file_of(tmp_path / "file", SMALL))

    def use() -> None:
        DirectReads().submit(span, MappedArena(SMALL).view(0, SMALL)).wait()

    process = multiprocessing.get_context("fork").Process(target=use)
    process.start()
    process.join(20)
    process.kill()
    process.join()
    assert process.exitcode == 0


# -- the arena


def test_views_share_the_memory_of_the_arena_and_keep_it() -> None:
    arena = MappedArena(5000)
    assert arena.nbytes == 2 * PAGE_BYTES
    view = arena.view(100, 50)
    view.fill_(7)
    memory = arena.view(0, arena.nbytes)
    assert memory.data_ptr() % PAGE_BYTES == 0
    assert memory.sum() == 350
    assert memory[100] == memory[149] == 7
    part = view[10:20].view(torch.int16)
    del view, memory
    with pytest.raises(RuntimeError, match="a tensor still uses the arena of 8192 bytes"):
        arena.close()
    assert part[0] == 0x707
    del part
    arena.close()
    arena.close()
    with pytest.raises(ValueError, match="closed"):
        arena.view(0, 1)


def test_a_view_outlives_an_arena_that_nobody_refers_to() -> None:
    view = MappedArena(5000).view(0, 5000)
    gc.collect()
    assert view.fill_(3).sum() == 15000


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, PAGE_BYTES + 1), (5, -1)])
def test_views_outside_of_the_arena_are_refused(offset: int, nbytes: int) -> None:
    arena = MappedArena(PAGE_BYTES)
    with pytest.raises(ValueError, match="of an arena of 4096 bytes"):
        arena.view(offset, nbytes)
    assert arena.view(PAGE_BYTES, 0).nbytes == 0
    arena.close()


def test_memory_that_the_system_refuses_is_an_error() -> None:
    with pytest.raises(InputError, match="give a smaller memory budget"):
        MappedArena(2**60)


@linux
@pytest.mark.parametrize("huge_pages", [True, False])
def test_memory_is_in_huge_pages_where_the_kernel_has_them(huge_pages: bool) -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("the kernel has no transparent huge pages")
    arena = MappedArena(8 * 2**20, huge_pages=huge_pages)
    view = arena.view(0, arena.nbytes)
    start = f"{view.data_ptr():x}-"
    lines = Path("/proc/self/smaps").read_text().splitlines()
    index = next(number for number, line in enumerate(lines) if line.startswith(start))
    flags = next(line for line in lines[index:] if line.startswith("VmFlags:")).split()
    assert ("hg" in flags, "nh" in flags, "dc" in flags) == (huge_pages, not huge_pages, True)
    del view
    arena.close()


# -- many rounds


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
def test_rounds_leave_no_memory(tmp_path: Path) -> None:
    path = file_of(tmp_path / "file", 2**20 + 5)
    span = whole(path)

    def one_round() -> None:
        arena = MappedArena(2**22)
        with DirectReads(chunk_bytes=2**18) as reads:
            for number in range(3):
                reads.submit(span, arena.view(number * 2**20, span.nbytes)).wait()
            with pytest.raises(InputError):
                reads.submit(Span(str(path), 0, 2**22, 2**22), arena.view(0, 2**22)).wait()
        arena.close()

    for _ in range(5):
        one_round()
    first_bytes = anonymous_bytes()
    for _ in range(50):
        one_round()
    assert anonymous_bytes() < first_bytes + 2**22  # 50 arenas would be 200 MiB


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon:")).split()[1])
