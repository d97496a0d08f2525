"""The copy stream of unified memory: a thread that reads files through two buffers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from graphrun.errors import InputError
from graphrun.runtime.devices import copy_thread
from graphrun.runtime.devices.copy_thread import CopyThread
from graphrun.runtime.direct_reads import MappedArena, Span
from graphrun.units import PAGE_BYTES

Copies = list[Callable[[], None]]


@pytest.fixture
def unfinished_copies() -> Copies:
    return []


@pytest.fixture
def thread(unfinished_copies: Copies, monkeypatch: pytest.MonkeyPatch) -> Iterator[CopyThread]:
    """Each buffer is a page. A copy is made when the host waits for it, as late as a device may."""
    monkeypatch.setattr(copy_thread, "READ_BUFFER_BYTES", PAGE_BYTES)

    def copy(target: torch.Tensor, buffer: torch.Tensor) -> Callable[[], None]:
        def wait() -> None:
            if wait in unfinished_copies:
                unfinished_copies.remove(wait)
                target.copy_(buffer)

        unfinished_copies.append(wait)
        return wait

    thread = CopyThread(lambda nbytes: MappedArena(nbytes).view(0, nbytes), copy, nullcontext)
    yield thread
    thread.close()


def test_a_buffer_is_read_into_after_the_copy_from_it(
    thread: CopyThread, unfinished_copies: Copies, tmp_path: Path
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(torch.arange(6 * PAGE_BYTES // 4, dtype=torch.int32).numpy().tobytes())
    target = torch.zeros(4 * PAGE_BYTES + 100, dtype=torch.uint8)
    start, stop = PAGE_BYTES, PAGE_BYTES + target.numel()
    thread.read([(Span(str(file), start, stop, stop), target)])
    thread.finish()
    assert len(unfinished_copies) == 2, "one from each buffer"
    for wait in list(unfinished_copies):
        wait()
    assert bytes(target.numpy()) == file.read_bytes()[start:stop]


def test_jobs_run_without_gradients_in_the_context_of_the_device() -> None:
    thread_ids = list[int]()

    @contextmanager
    def context() -> Iterator[None]:
        thread_ids.append(threading.get_ident())
        yield

    thread = CopyThread(torch.empty, lambda target, buffer: lambda: None, context)
    assert thread.submit(lambda: (threading.get_ident(), torch.is_grad_enabled())).result() == (
        thread_ids[0],
        False,
    )
    thread.close()


def test_a_file_may_end_within_its_last_page(
    thread: CopyThread, unfinished_copies: Copies, tmp_path: Path
) -> None:
    file, needed_bytes = tmp_path / "weights", PAGE_BYTES + 100
    file.write_bytes(bytes([7]) * needed_bytes)
    target = torch.zeros(2 * PAGE_BYTES, dtype=torch.uint8)
    thread.read([(Span(str(file), 0, target.numel(), needed_bytes), target)])
    thread.finish()
    for wait in list(unfinished_copies):
        wait()
    assert target[:needed_bytes].eq(7).all()


def test_after_an_error_no_later_job_runs_and_each_raises_it(
    thread: CopyThread, tmp_path: Path
) -> None:
    jobs_run = list[int]()
    span = Span(str(tmp_path / "missing"), 0, PAGE_BYTES, PAGE_BYTES)
    thread.read([(span, torch.zeros(PAGE_BYTES, dtype=torch.uint8))])
    later_job = thread.submit(lambda: jobs_run.append(1))
    with pytest.raises(InputError, match="missing can no longer be opened"):
        later_job.result()
    assert not jobs_run
    thread.finish()  # raises nothing more


def test_closing_waits_for_the_job_that_runs_and_cancels_the_others(thread: CopyThread) -> None:
    has_begun, resume, jobs_run = threading.Event(), threading.Event(), list[int]()

    def job() -> None:
        has_begun.set()
        assert resume.wait(60)
        jobs_run.append(1)

    thread.submit(job)
    later_job = thread.submit(lambda: jobs_run.append(2))
    assert has_begun.wait(60)
    timer = threading.Timer(0.1, resume.set)
    timer.start()
    thread.close()
    assert jobs_run == [1]
    timer.join()
    assert later_job.cancelled()
