"""Check the order of reads and computes on the CPU, in memory that both use.

    read      submitted |.....| begins |------| ends        threads, after submission, in any order
    compute   ----------------------------------|--uses--|  the thread that calls

Reported are: compute with memory that a read or writer has not filled yet, or that another block's
read was submitted to; reads into memory of a block that computes, or that another thread fills;
memory that is released while it is filled. The checker observes operators of torch, and
`DirectReads` where it queues and begins chunks. It does not use marks, which are what it checks.

With ``late``, results do not depend on luck: nothing is read before somebody waits for it, and the
latest chunk that may begin is read first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphrun.modules.trees import tensors_in
from graphrun.runtime.devices import cpu
from graphrun.runtime.devices.cpu import CpuDevice
from graphrun.runtime.direct_reads import DirectReads
from graphrun.runtime.residency import Residency

Key = tuple[str, str]  # component, block


class ReadOrdering:
    """Reports of runs while ``patch`` is in effect; a fault is in ``reports`` once.

    ``uses``: operators that used memory of blocks. ``block_reads``: reads of blocks.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, *, late: bool = False, operators: bool = True
    ) -> None:
        self.reports = list[str]()
        self.uses = self.block_reads = 0
        self._patch, self._late = patch, late
        self._readers = list[DirectReads]()
        self._waited: Any = None  # the read that somebody waits for
        self._numbers = itertools.count()
        self._latest = list[tuple[int, int, Key]]()  # memory, and the block last read into it
        self._bound = dict[Key, tuple[int, int]]()  # memory of blocks that modules have
        self._wrap_reads()
        self._wrap_residency()
        capped = CpuDevice.capped

        @contextmanager
        def checked(device: CpuDevice, *arguments: Any) -> Iterator[None]:
            observer = _Operators(self) if operators else nullcontext()
            with capped(device, *arguments), observer:
                assert device._reads is not None
                self._readers = [device._reads]
                yield
                self._readers = []

        patch.setattr(CpuDevice, "capped", checked)

    def report(self, text: str) -> None:
        if text not in self.reports:
            self.reports.append(text)

    def use(self, operator: str, tensors: Iterable[torch.Tensor]) -> None:
        """Note an operator that reads ``tensors``."""
        for tensor in tensors:
            if (
                tensor.device.type != "cpu"
                or tensor.layout != torch.strided
                or not tensor.numel()
                or tensor.untyped_storage().data_ptr() not in cpu._ADDRESSES
            ):
                continue
            self.uses += 1
            start = tensor.data_ptr()
            extent = sum(
                (size - 1) * stride
                for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            stop = start + (extent + 1) * tensor.element_size()
            key = next(
                (key for key, (first, end) in self._bound.items() if first <= start < end), None
            )
            if key is None:
                self.report(f"{operator} uses memory of no block that runs")
            elif any(
                other != key for first, end, other in self._latest if first < stop and start < end
            ):
                self.report(f"{operator} uses {key}, whose memory was read over")
            elif self._is_unread(start, stop):
                self.report(f"{operator} uses {key} before it is read")

    def _is_unread(self, start: int, stop: int) -> bool:
        """Whether a chunk into this memory has not ended."""
        for reads in self._readers:
            with reads._changed_state:
                if any(
                    chunk.start < stop and start < chunk.stop
                    for chunk in (*reads._chunks, *reads._active_chunks)
                ):
                    return True
        return False

    # -- reads

    def _wrap_reads(self) -> None:
        read_chunk, queue, wait = DirectReads._read_chunk, DirectReads._queue, DirectReads._wait

        def numbered(reads: DirectReads, span_read: Any, chunks: Any) -> None:
            span_read.number = next(self._numbers)
            queue(reads, span_read, chunks)

        def observed(reads: DirectReads, chunk: Any) -> None:
            with reads._changed_state:
                if any(
                    other is not chunk and other.start < chunk.stop and chunk.start < other.stop
                    for other in reads._active_chunks
                ):
                    self.report("two threads fill the same memory")
                while self._late and not self._may_pass(reads, chunk):
                    reads._changed_state.wait()
            read_chunk(reads, chunk)

        def waiting(reads: DirectReads, span_read: Any) -> None:
            with reads._changed_state:
                self._waited = span_read
                reads._changed_state.notify_all()
            try:
                wait(reads, span_read)
            finally:
                self._waited = None

        self._patch.setattr(DirectReads, "_queue", numbered)
        self._patch.setattr(DirectReads, "_read_chunk", observed)
        self._patch.setattr(DirectReads, "_wait", waiting)

    def _may_pass(self, reads: DirectReads, chunk: Any) -> bool:
        """Whether a thread may read ``chunk`` now: the latest of those that somebody waits for."""
        if reads._has_ended:
            return True
        if self._waited is None or self._waited.is_done:
            return False

        def place(other: Any) -> tuple[int, int]:
            return other.span_read.number, other.offset

        limit = self._waited.number
        if place(chunk)[0] > limit:
            return False
        behind_chunk = [
            other
            for other in reads._active_chunks
            if place(other) > place(chunk) and place(other)[0] <= limit
        ]
        startable = (
            len(reads._active_chunks) < reads._thread_count
            and reads._may_begin()
            and place(reads._chunks[0])[0] <= limit
        )
        return not behind_chunk and not startable

    # -- blocks

    def _wrap_residency(self) -> None:
        copy, bind, unbind, evict = (
            Residency.copy,
            Residency.bind,
            Residency.unbind,
            Residency.evict,
        )

        def observed_copy(residency: Residency, path: str, buffer: torch.Tensor) -> Any:
            start, key = buffer.data_ptr(), (residency.name, path)
            stop = start + buffer.nbytes
            self.block_reads += 1
            for other, (first, end) in self._bound.items():
                if first < stop and start < end:
                    self.report(f"{key} is read into the memory of {other}, which computes")
            self._latest = [
                (first, end, other)
                for first, end, other in self._latest
                if end <= start or stop <= first
            ]
            self._latest.append((start, stop, key))
            return copy(residency, path, buffer)

        def observed_bind(residency: Residency, path: str, buffer: torch.Tensor) -> None:
            bind(residency, path, buffer)
            if residency._blocks[path].bound:
                start = buffer.data_ptr()
                self._bound[residency.name, path] = start, start + buffer.nbytes

        def observed_unbind(residency: Residency, path: str) -> None:
            self._bound.pop((residency.name, path), None)
            unbind(residency, path)

        def observed_evict(residency: Residency, path: str) -> None:
            buffer = residency._blocks[path].buffer
            if buffer is not None and self._is_unread(
                buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
            ):
                self.report(f"{residency.name, path} is evicted while it is read")
            evict(residency, path)

        self._patch.setattr(Residency, "copy", observed_copy)
        self._patch.setattr(Residency, "bind", observed_bind)
        self._patch.setattr(Residency, "unbind", observed_unbind)
        self._patch.setattr(Residency, "evict", observed_evict)


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports operators that read tensors; views read none."""

    def __init__(self, ordering: ReadOrdering) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ordering = ordering

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(
            result.alias_info is not None and not result.alias_info.is_write
            for result in func._schema.returns
        )
        if not is_view:
            self._ordering.use(func._schema.name, tensors_in((args, kwargs or {})))
        return func(*args, **(kwargs or {}))
