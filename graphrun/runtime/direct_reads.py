"""Read blocks from files straight into their place in memory, past the page cache.

    file     |header|--a--|gap|-----b-----|.......|--c--|    tensors of a block
    spans    |---------span 0-------------|     |-span 1-|   from page to page; small gaps are read
    memory   |---------span 0-------------|-span 1-|         tensors are views

On Linux reads are direct (O_DIRECT): the disk writes to the arena, and no core copies. Elsewhere,
and on file systems that refuse direct reads, a read copies through the page cache and removes its
pages from the cache.
"""

from __future__ import annotations

import copy
import errno
import io
import itertools
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphrun.errors import GraphrunError, InputError
from graphrun.modules.source_files import FileStamp, Stored, file_stamp
from graphrun.systems import anonymous_memory, forget_cached, open_direct, read_at, refuse_forked
from graphrun.units import MIB, PAGE_BYTES, round_up

# Direct reads need offsets, sizes and addresses that are multiples of the disk's logical block, 512
# or 4096 bytes: here, of a page. A gap below GAP_BYTES between two tensors is read too. Two spans
# round two more ends to pages, and may thereby read as many bytes.
GAP_BYTES = 2 * PAGE_BYTES


def _page_start(offset: int) -> int:
    return offset // PAGE_BYTES * PAGE_BYTES


class MappedArena:
    """Page-aligned memory of ``nbytes``, rounded up to pages of 4096 bytes.

    ``huge_pages``: in pages of 2 MiB if the kernel has them, which the disk fills with a third of
    the CPU time. Pages count as used from the first write on. Raises InputError if the system
    refuses the memory. A forked process does not have the memory.
    """

    def __init__(self, nbytes: int, *, huge_pages: bool = True) -> None:
        self.nbytes = max(PAGE_BYTES, round_up(nbytes, PAGE_BYTES))
        try:
            self._memory = anonymous_memory(self.nbytes, huge_pages=huge_pages)
        except (OSError, OverflowError) as error:
            raise InputError(
                f"the system refuses {self.nbytes:,} bytes of memory "
                f"({getattr(error, 'strerror', None) or error}): give a smaller memory budget"
            ) from error

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return bytes ``offset .. offset + nbytes`` as a flat uint8 tensor, without a copy.

        The tensor keeps the memory mapped. Raises ValueError outside of the arena, or if closed.
        """
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(
                f"bytes {offset} to {offset + nbytes} of an arena of {self.nbytes} bytes"
            )
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        # torch keeps the memoryview, and while there is one, mmap refuses to unmap
        return torch.frombuffer(
            memoryview(self._memory)[offset : offset + nbytes], dtype=torch.uint8
        )

    def close(self) -> None:
        """Unmap the memory; may be called again. Raises RuntimeError while a tensor uses it."""
        try:
            self._memory.close()
        except BufferError as error:
            raise RuntimeError(
                f"a tensor still uses the arena of {self.nbytes} bytes: delete all views of the "
                "arena, then close it"
            ) from error


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``start .. stop`` of ``file``, both multiples of 4096, which contain whole tensors.

    ``stop`` may exceed the file's end; tensors end at ``needed_stop``. ``stamp``: of the file for
    which the span was laid out, if known.
    """

    file: str
    start: int
    stop: int
    needed_stop: int
    stamp: FileStamp | None = None

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def contains(self, tensor: Stored) -> bool:
        """Return whether the span was laid out with ``tensor``, which is not empty."""
        return tensor.file == self.file and self.start <= tensor.begin < self.needed_stop


@dataclass(frozen=True, slots=True)
class SpanLayout:
    """Spans of a block's tensors, one behind another in the block's page-aligned memory.

    ``span_offsets``: multiples of 4096. ``tensor_offsets``: in the order of `span_layout`'s
    argument.
    """

    spans: tuple[Span, ...]
    span_offsets: tuple[int, ...]
    tensor_offsets: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(span.nbytes for span in self.spans)


def span_layout(tensors: Sequence[Stored]) -> SpanLayout:
    """Return the spans that contain ``tensors``, and each tensor's offset in the block's memory.

    Spans are ordered by file, in the order of the files' first tensors, then by offset. Two tensors
    less than `GAP_BYTES` apart share a span. Tensors may overlap, as tied weights do. A tensor
    keeps its alignment in the file, up to 4096 bytes.
    """
    by_file: dict[str, list[Stored]] = {}
    for tensor in tensors:
        if tensor.nbytes:
            by_file.setdefault(tensor.file, []).append(tensor)
    spans = list[Span]()
    for file, contents in by_file.items():
        start = stop = -1
        for tensor in sorted(contents, key=lambda tensor: tensor.begin):
            if start >= 0 and tensor.begin - stop >= GAP_BYTES:
                spans.append(Span(file, start, round_up(stop, PAGE_BYTES), stop))
                start = -1
            if start < 0:
                start = _page_start(tensor.begin)
            stop = max(stop, tensor.begin + tensor.nbytes)
        spans.append(Span(file, start, round_up(stop, PAGE_BYTES), stop))
    span_offsets = tuple(itertools.accumulate((span.nbytes for span in spans[:-1]), initial=0))
    tensor_offsets = tuple(
        next(
            (
                offset + tensor.begin - span.start
                for span, offset in zip(spans, span_offsets, strict=False)
                if tensor.nbytes and span.contains(tensor)
            ),
            0,
        )
        for tensor in tensors
    )
    return SpanLayout(tuple(spans), span_offsets[: len(spans)], tensor_offsets)


class SpanRead:
    """One submitted read or write; its times are of `time.perf_counter`, 0 before."""

    def __init__(self, reads: DirectReads) -> None:
        self.started_seconds = self.ended_seconds = 0.0
        self._reads, self._chunks_left = reads, 0

    @property
    def is_done(self) -> bool:
        """Whether this and everything submitted before is in memory."""
        return self.ended_seconds > 0

    def wait(self) -> None:
        """Wait until this and everything submitted before is in memory.

        Raises InputError if a file cannot be opened or read, is truncated, or changed since its
        span was laid out or it was opened; the error of a write; RuntimeError if the reads were
        closed. Nothing is read any more then.
        """
        self._reads._wait(self)


@dataclass(slots=True, eq=False)
class _Chunk:
    """Part of a read: from ``offset`` of the file of ``span`` into ``target``; or a ``write``.

    ``start``, ``stop``: addresses of the memory.
    """

    span_read: SpanRead
    start: int
    stop: int
    span: Span | None = None
    offset: int = 0
    target: memoryview = field(default_factory=lambda: memoryview(b""))
    write: Callable[[], None] | None = None

    def excludes(self, other: _Chunk) -> bool:
        """Return whether this chunk, behind ``other``, waits for the end of ``other``."""
        are_writes = self.write is not None and other.write is not None
        return are_writes or (self.start < other.stop and other.start < self.stop)


@dataclass(slots=True)
class _OpenFile:
    """A file that is open for reads, and its stamp when it was opened.

    ``refused_handle``: for direct reads that the file system refused; a thread may still use it.
    """

    handle: io.FileIO
    is_direct: bool
    stamp: FileStamp
    refused_handle: io.FileIO | None = field(default=None)


class DirectReads:
    """Threads that read spans of files into memory, in the order of submission.

    ``threads`` threads read chunks of at most ``chunk_bytes``, a multiple of 4096; they start at
    the first span. A chunk waits for earlier ones into the same memory, and a write for earlier
    writes. A read is done when all reads before it are. After an error, the read that failed and
    all later ones raise it, threads end and files are closed. Files stay open until then, or until
    `close`. A context manager closes too.

    ``bytes_read``: from all files, including gaps. ``wait_seconds``: time blocked in
    `SpanRead.wait`.
    """

    def __init__(self, threads: int = 2, chunk_bytes: int = 8 * MIB) -> None:
        if threads < 1 or chunk_bytes < PAGE_BYTES or chunk_bytes % PAGE_BYTES:
            raise ValueError(f"{threads} threads, chunks of {chunk_bytes} bytes")
        self.bytes_read, self.wait_seconds = 0, 0.0
        self._thread_count, self._chunk_bytes = threads, chunk_bytes
        self._process = os.getpid()
        self._threads: list[threading.Thread] = []
        self._changed_state, self._opening = threading.Condition(), threading.Lock()
        self._chunks: deque[_Chunk] = deque()  # not begun
        self._active_chunks: list[_Chunk] = []
        self._unfinished: deque[SpanRead] = deque()
        self._files: dict[str, _OpenFile] = {}
        self._is_direct: dict[str, bool] = {}
        self._error: BaseException | None = None  # the first
        self._is_closed = False
        self._active_threads = 0

    @property
    def is_direct(self) -> dict[str, bool]:
        """Whether each file that was opened is read past the page cache."""
        return dict(self._is_direct)

    def submit(self, span: Span, view: torch.Tensor) -> SpanRead:
        """Queue the read of ``span`` into ``view``, and return it.

        ``view``: flat, uint8, of the span's size, on the CPU at a page's start, unused until the
        read is done. Bytes behind the file's end are undefined. Raises ValueError for another view,
        the error of an earlier read, and RuntimeError after `close`.
        """
        if (
            view.dtype != torch.uint8
            or tuple(view.shape) != (span.nbytes,)
            or view.device.type != "cpu"
            or not view.is_contiguous()
            or view.data_ptr() % PAGE_BYTES
            or span.start % PAGE_BYTES
        ):
            raise ValueError(
                f"{span.nbytes} bytes from {span.start} of {span.file} cannot be read into "
                f"{tuple(view.shape)} {view.dtype}: it must be flat bytes at a page's start"
            )
        raw: Any = view.numpy()
        target, span_read = memoryview(raw), SpanRead(self)
        address_of_offset_0 = view.data_ptr() - span.start
        chunks, offset = list[_Chunk](), span.start
        while offset < span.stop:
            # Chunks end at multiples of the chunk size in the file, so that each page of the page
            # cache (up to 2 MiB) is in one chunk. `forget_cached` drops only whole pages: of a page
            # in two chunks, neither call would drop it.
            stop = min(span.stop, (offset // self._chunk_bytes + 1) * self._chunk_bytes)
            part = target[offset - span.start : stop - span.start]
            start, end = address_of_offset_0 + offset, address_of_offset_0 + stop
            chunks.append(_Chunk(span_read, start, end, span, offset, part))
            offset = stop
        self._queue(span_read, chunks)
        return span_read

    def submit_write(self, write: Callable[[], None], view: torch.Tensor) -> SpanRead:
        """Queue ``write``, which a thread calls to fill ``view``, and return it.

        Raises the error of an earlier read, and RuntimeError after `close`.
        """
        span_read, start = SpanRead(self), view.data_ptr()
        self._queue(span_read, [_Chunk(span_read, start, start + view.nbytes, write=write)])
        return span_read

    def _queue(self, span_read: SpanRead, chunks: Sequence[_Chunk]) -> None:
        refuse_forked(self._process, "this reader of files", "make a new one")
        span_read._chunks_left = len(chunks)
        with self._changed_state:
            self._refuse_ended()
            self._chunks.extend(chunks)
            self._unfinished.append(span_read)
            self._end_reads()
            if not self._threads:
                self._start_threads()
            self._changed_state.notify_all()

    def close(self) -> None:
        """End the threads and close the files; may be called again.

        Requests to the disk that are under way end before. Unfinished reads raise RuntimeError.
        """
        if self._process != os.getpid():
            return  # the threads are in the process that this one was forked from
        with self._changed_state:
            self._is_closed = True
            self._chunks.clear()
            self._changed_state.notify_all()
        for thread in self._threads:
            thread.join()
        self._close_files()

    def __enter__(self) -> DirectReads:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, span_read: SpanRead) -> None:
        refuse_forked(self._process, "this reader of files", "make a new one")
        if span_read.is_done:
            return
        start = time.perf_counter()
        with self._changed_state:
            try:
                while not span_read.is_done and not self._has_ended:
                    self._changed_state.wait()
            finally:
                self.wait_seconds += time.perf_counter() - start
        if not span_read.is_done:
            self.close()  # waits for other threads' requests, which write to memory
            if not span_read.is_done:
                self._refuse_ended()

    @property
    def _has_ended(self) -> bool:
        return self._is_closed or self._error is not None

    def _refuse_ended(self) -> None:
        if self._error is not None:
            # A copy: raising adds a traceback, whose frames would live as long as ``_error``.
            raise copy.copy(self._error)
        if self._is_closed:
            raise RuntimeError("the reader of files is closed: make a new one")

    def _start_threads(self) -> None:
        for number in range(self._thread_count):
            thread = threading.Thread(
                target=self._read_chunks, name=f"direct read {number}", daemon=True
            )
            thread.start()
            self._threads.append(thread)
            self._active_threads += 1

    def _read_chunks(self) -> None:
        """Read chunks until an error or `close`: the function of each thread."""
        try:
            while (chunk := self._next_chunk()) is not None:
                self._read_chunk(chunk)
        finally:
            with self._changed_state:
                self._active_threads -= 1
                is_last = self._active_threads == 0
            if is_last:
                self._close_files()

    def _next_chunk(self) -> _Chunk | None:
        with self._changed_state:
            while not self._has_ended and not self._may_begin():
                self._changed_state.wait()
            if self._has_ended:
                return None
            chunk = self._chunks.popleft()
            self._active_chunks.append(chunk)
            chunk.span_read.started_seconds = chunk.span_read.started_seconds or time.perf_counter()
            return chunk

    def _may_begin(self) -> bool:
        """Return whether there is a chunk whose memory no other thread writes."""
        return bool(self._chunks) and not any(
            self._chunks[0].excludes(chunk) for chunk in self._active_chunks
        )

    def _read_chunk(self, chunk: _Chunk) -> None:
        count, failure = 0, None
        try:
            if chunk.write is not None:
                chunk.write()
            else:
                count = self._fill(chunk)
        except BaseException as error:  # noqa: BLE001 (raised by whoever waits)
            failure = _without_frames(error)
        chunk.target.release()  # or else the thread keeps the memory mapped
        chunk.write = None
        with self._changed_state:
            self.bytes_read += count
            self._active_chunks.remove(chunk)
            if failure is None:
                chunk.span_read._chunks_left -= 1
                self._end_reads()
            else:
                self._error = self._error or failure
                self._chunks.clear()
            self._changed_state.notify_all()

    def _end_reads(self) -> None:
        """End the oldest reads whose chunks are all read.

        ``_chunks_left`` of a failed read stays above 0, so it and the reads after it never end.
        """
        while self._unfinished and not self._unfinished[0]._chunks_left:
            span_read, seconds = self._unfinished.popleft(), time.perf_counter()
            span_read.started_seconds = span_read.started_seconds or seconds
            span_read.ended_seconds = seconds

    def _fill(self, chunk: _Chunk) -> int:
        """Read ``chunk``, and return the bytes read. Raises InputError."""
        span, size, position = chunk.span, len(chunk.target), 0
        assert span is not None
        needed_bytes = min(size, span.needed_stop - chunk.offset)
        open_file = self._open(span.file)
        while position < needed_bytes:
            # A direct read must start at a page: if the previous read ended in the middle of a
            # page, that page is read again.
            start = _page_start(position)
            handle = open_file.handle
            try:
                count = read_at(handle, chunk.target[start:], chunk.offset + start)
            except OSError as error:
                if error.errno == errno.EINVAL and self._refuse_direct(
                    open_file, handle, span.file
                ):
                    continue
                raise InputError(
                    f"{span.file} cannot be read at byte {chunk.offset + start}: "
                    f"{error.strerror or error}; check the disk, then download the file again"
                ) from error
            if start + count <= position:
                raise InputError(
                    f"{span.file} is truncated: it has {file_stamp(handle.fileno())[0]} bytes, "
                    f"and its tensors end at byte {span.needed_stop}; download it again"
                )
            position = start + count
        handle = open_file.handle
        if file_stamp(handle.fileno()) != (span.stamp or open_file.stamp):
            raise InputError(f"{span.file} was changed while it was in use: plan again")
        if not open_file.is_direct:
            forget_cached(handle.fileno(), chunk.offset, size)
        return position

    def _open(self, file: str) -> _OpenFile:
        with self._opening:
            if file not in self._files:
                try:
                    direct = open_direct(file)
                    handle = io.FileIO(file) if direct is None else direct
                except (OSError, ValueError) as error:
                    raise InputError(
                        f"{file} can no longer be opened: "
                        f"{getattr(error, 'strerror', None) or error}; download it again"
                    ) from error
                self._files[file] = _OpenFile(
                    handle, direct is not None, file_stamp(handle.fileno())
                )
                self._is_direct[file] = direct is not None
            return self._files[file]

    def _refuse_direct(self, open_file: _OpenFile, handle: io.FileIO, file: str) -> bool:
        """Let ``open_file`` read through the page cache after ``handle`` refused a direct read.

        Return whether to try again. False: ``handle`` was not for direct reads, so the error is
        real. Another thread may have replaced ``handle`` before.
        """
        with self._opening:
            if not open_file.is_direct:
                return handle is open_file.refused_handle
            try:
                cached_handle = io.FileIO(file)
            except OSError as error:
                raise InputError(
                    f"{file} can no longer be opened: {error.strerror}; download it again"
                ) from error
            open_file.refused_handle, open_file.handle = handle, cached_handle
            open_file.is_direct = self._is_direct[file] = False
            return True

    def _close_files(self) -> None:
        with self._opening:
            while self._files:
                _, open_file = self._files.popitem()
                for handle in (open_file.handle, open_file.refused_handle):
                    if handle is not None:
                        handle.close()


def _without_frames(error: BaseException) -> BaseException:
    """Return ``error`` without frames and causes, whose locals would keep memory mapped."""
    if not isinstance(error, GraphrunError):
        error.add_note("".join(traceback.format_tb(error.__traceback__)).rstrip())
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error
