"""Measure how fast files are read as in a run on the CPU: alone, and while all cores compute."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from graphrun.errors import InputError
from graphrun.model.hardware import ReadRates
from graphrun.runtime.direct_reads import DirectReads, MappedArena, Span, SpanRead
from graphrun.systems import forget_cached
from graphrun.units import MIB, PAGE_BYTES

FILE_BYTES, SPAN_BYTES = 256 * MIB, 32 * MIB
RING_SPANS = 2  # spans in memory, as blocks in a ring buffer


def measure_reads(folder: Path, seconds: float, file_bytes: int = FILE_BYTES) -> ReadRates:
    """Return the rates of reading a temporary file in ``folder``, in about ``seconds`` each.

    ``file_bytes``: a multiple of `SPAN_BYTES`. Raises InputError if the file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".disk-") as file:
            block = os.urandom(SPAN_BYTES)
            for _ in range(file_bytes // SPAN_BYTES):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            forget_cached(file.fileno())
            with DirectReads() as reads:
                start_cpu_seconds = time.process_time()
                alone_rate, nbytes = _rate(reads, file.name, file_bytes, seconds)
                cpu_seconds = (time.process_time() - start_cpu_seconds) / nbytes
                # a product takes milliseconds at most, so that the next span is soon submitted
                matrix = torch.ones(256, 256, device="cpu")
                computing_rate, _ = _rate(
                    reads, file.name, file_bytes, seconds, lambda: torch.mm(matrix, matrix)
                )
                start_seconds = _start_seconds(
                    reads, file.name, seconds / 10, lambda: torch.mm(matrix, matrix)
                )
                return ReadRates(alone_rate, computing_rate, cpu_seconds, start_seconds)
    except OSError as error:
        raise InputError(f"{folder}: cannot measure the disk: {error.strerror}") from error


def _start_seconds(
    reads: DirectReads, file: str, seconds: float, compute: Callable[[], object]
) -> float:
    """Return the median seconds of reading a page; ``compute`` is called until the read is done."""
    memory, durations = MappedArena(PAGE_BYTES), list[float]()
    view, end = memory.view(0, PAGE_BYTES).zero_(), time.perf_counter() + seconds
    while len(durations) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        span_read = reads.submit(Span(file, 0, PAGE_BYTES, PAGE_BYTES), view)
        while not span_read.is_done:
            compute()
        span_read.wait()
        durations.append(time.perf_counter() - start)
    return statistics.median(durations)


def _rate(
    reads: DirectReads,
    file: str,
    file_bytes: int,
    seconds: float,
    compute: Callable[[], object] | None = None,
) -> tuple[float, int]:
    """Return bytes per second, and the bytes read; ``compute`` is called until a read is done."""
    memory = MappedArena(RING_SPANS * SPAN_BYTES)
    memory.view(0, memory.nbytes).zero_()  # touches every page
    unfinished, nbytes, start = list[SpanRead](), 0, time.perf_counter()
    while nbytes == 0 or (time.perf_counter() < start + seconds):
        offset = nbytes % file_bytes
        view = memory.view(nbytes // SPAN_BYTES % RING_SPANS * SPAN_BYTES, SPAN_BYTES)
        end = offset + SPAN_BYTES
        unfinished.append(reads.submit(Span(file, offset, end, end), view))
        nbytes += SPAN_BYTES
        if len(unfinished) == RING_SPANS:
            oldest = unfinished.pop(0)
            while compute is not None and not oldest.is_done:
                compute()
            oldest.wait()
    for span_read in unfinished:
        span_read.wait()
    return nbytes / (time.perf_counter() - start), nbytes
