"""Work of a node in a thread of its own, with ComfyUI's progress bar, previews and cancelling.

    ComfyUI's thread   submit | report? | report? | ... | result     shows reports, notices Cancel
    node's thread             | plan, run ....................|

ComfyUI calls nodes in inference mode, where tensors have no version counters; dry runs and runs
need them. The mode is a thread's own. Progress must be shown by ComfyUI's thread, whose context has
the node's id.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from graphrun.errors import GraphrunError

POLL_SECONDS = 0.2  # between looks at whether the prompt was cancelled
PREVIEW_PIXELS = 512  # of the longer side

T = TypeVar("T")


class Stopped(GraphrunError):
    """The prompt was cancelled."""


@dataclass(frozen=True, slots=True)
class NodeProgress:
    """How far a node is: ``value`` of ``total``. ``preview``: a PIL picture, or None."""

    value: int
    total: int
    preview: Any = None


ReportProgress = Callable[[NodeProgress], None]


def follow(work: Callable[[ReportProgress], T], stop: Callable[[], None]) -> T:
    """Call ``work`` with a function that reports its progress, and return its result.

    ``stop`` is called when the user cancels the prompt. ComfyUI's exception is then raised, after
    ``work`` has ended.
    """
    from comfy.model_management import throw_exception_if_processing_interrupted
    from comfy.utils import ProgressBar

    reports: queue.SimpleQueue[NodeProgress | None] = queue.SimpleQueue()
    with ThreadPoolExecutor(1, "graphrun-node") as pool:
        future = pool.submit(work, reports.put)
        future.add_done_callback(lambda _: reports.put(None))
        bar, is_over = ProgressBar(100), False
        try:
            while not is_over:
                throw_exception_if_processing_interrupted()
                with suppress(queue.Empty):
                    report = reports.get(timeout=POLL_SECONDS)
                    is_over = report is None
                    if report is not None:
                        bar.update_absolute(report.value, report.total, _preview(report))
        except BaseException:
            stop()
            raise  # leaving the pool waits for ``work``
        return future.result()


def _preview(report: NodeProgress) -> tuple[str, Any, int] | None:
    """Return the preview as ComfyUI's bar takes it: format, picture, longest side."""
    return None if report.preview is None else ("JPEG", report.preview, PREVIEW_PIXELS)
