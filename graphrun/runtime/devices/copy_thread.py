"""The copy stream of an accelerator with unified memory: a thread that reads files and copies.

    disk     |--read b0--|--read b1--|--read b0--|       two buffers of `READ_BUFFER_BYTES`
    copy                 |-b0-|      |-b1-|      |-b0-|   into the block's memory

Files cannot be read directly into device memory, whose addresses are the driver's. Jobs run in the
order in which they were queued, so a mark or a wait of the copy stream is a job too. After an
error, no later job runs: each raises the error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphrun.model.hardware import READ_BUFFER_BYTES, READ_BUFFERS
from graphrun.runtime.direct_reads import DirectReads, Span


@dataclass(frozen=True, slots=True)
class QueuedMark:
    """A mark of the copy stream that the thread has not recorded yet."""

    future: Future[Any]

    @property
    def mark(self) -> Any:
        """The recorded mark. Raises the error of an earlier job."""
        return self.future.result()


class CopyThread:
    """The thread of a copy stream.

    ``arena``: returns page-locked host memory of a given size. ``copy``: queues a copy, and returns
    a function that waits on the host for its end. ``context``: returns a context for jobs.
    """

    def __init__(
        self,
        arena: Callable[[int], torch.Tensor],
        copy: Callable[[torch.Tensor, torch.Tensor], Callable[[], None]],
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._arena, self._copy, self._context = arena, copy, context
        self._executor = ThreadPoolExecutor(1, "graphrun-copy")
        self._error: BaseException | None = None
        self._reads = DirectReads()
        self._buffers: list[torch.Tensor] = []
        self._ends: list[Callable[[], None]] = [lambda: None] * READ_BUFFERS
        self._turn = 0

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Queue ``job``, and return its future."""
        return self._executor.submit(self._run, job)

    def read(self, spans: Sequence[tuple[Span, torch.Tensor]]) -> None:
        """Queue the reads of file ranges into device memory."""

        def job() -> None:
            for span, target in spans:
                self._read_span(span, target)

        self.submit(job)

    def finish(self) -> None:
        """Wait until all jobs are done. Return at once after an error, which a wait has raised."""
        if self._error is None:
            self.submit(lambda: None).result()

    def close(self) -> None:
        """End the thread, and close files."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._reads.close()

    def _run(self, job: Callable[[], Any]) -> Any:
        if self._error is not None:
            raise self._error
        try:
            with torch.no_grad(), self._context():
                return job()
        except BaseException as error:
            self._error = error
            raise

    def _read_span(self, span: Span, target: torch.Tensor) -> None:
        for start in range(span.start, span.stop, READ_BUFFER_BYTES):
            stop = min(span.stop, start + READ_BUFFER_BYTES)
            turn = self._turn = (self._turn + 1) % READ_BUFFERS
            while len(self._buffers) <= turn:
                self._buffers.append(self._arena(READ_BUFFER_BYTES))
            self._ends[turn]()  # the earlier copy from this buffer
            buffer = self._buffers[turn][: stop - start]
            part = replace(span, start=start, stop=stop, needed_stop=min(span.needed_stop, stop))
            self._reads.submit(part, buffer).wait()
            self._ends[turn] = self._copy(target[start - span.start : stop - span.start], buffer)
