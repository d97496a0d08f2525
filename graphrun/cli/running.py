"""What a single run and a batch of runs share: interrupts and output files.

The first interrupt (Ctrl-C) stops a run at the end of the current step, a second one immediately.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import graphrun
from graphrun.report.outputs import (
    FPS,
    VIDEOS,
    Files,
    made_of,
    output_files,
    require_rate,
    save_outputs,
)

if TYPE_CHECKING:
    from graphrun.graph.graph import Graph


class Stop:
    """Whether an interrupt was received."""

    def __init__(self) -> None:
        self.requested = False

    def watched(
        self, progress: Callable[[int, int, int], None] | None
    ) -> Callable[[int, int, int], None]:
        """``progress``, which raises KeyboardInterrupt at the start of a call (the end of a step)
        after an interrupt."""

        def called(slot: int, call: int, calls: int) -> None:
            if self.requested:
                raise KeyboardInterrupt
            if progress is not None:
                progress(slot, call, calls)

        return called


@contextlib.contextmanager
def stopping(tell: Callable[[str], None] | None) -> Iterator[Stop]:
    """A context in which the first SIGINT only sets a flag, and the second one raises
    KeyboardInterrupt."""
    stop = Stop()

    def interrupted(_: int, __: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True
        if tell is not None:
            tell("  stopping at the end of this step; interrupt again to stop now")

    try:
        before = signal.signal(signal.SIGINT, interrupted)
    except ValueError:  # not the main thread, which alone may set handlers
        yield stop
        return
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def files_for(
    graph: Graph,
    output: list[str] | None,
    inputs: Mapping[str, Any],
    *,
    overwrite: bool,
    of_list: bool = False,
    resume: bool = False,
) -> Files:
    """The files for the outputs of ``graph`` with ``inputs``, or of a list of requests
    (`output_files`). ``resume``: files whose `state_folder` exists may be overwritten.

    Raises InputError where files cannot be written, or were named by ``output``, exist and are not
    to be overwritten.
    """

    def resumes(files: Files) -> bool:
        return resume and state_folder(files).exists()

    default = Path("out") / graph.name
    files = output_files(
        output or (), graph.kinds(), default, overwrite=overwrite, of_list=of_list, resumes=resumes
    )
    refuse_rate(files, graph, inputs)
    return files


def state_folder(files: Files) -> Path:
    """The folder beside the first of ``files`` with the state that ``--resume`` saves."""
    first = next(iter(files.values()))
    return first.parent / f".{first.stem}.resume"


def refuse_rate(files: Files, graph: Graph, inputs: Mapping[str, Any]) -> None:
    """Raises InputError where ``files`` has a video, and no video file can have the frame rate that
    ``inputs`` give."""
    with contextlib.suppress(
        TypeError, ValueError
    ):  # an input that is no number is refused with the others
        require_rate(files, _rate(files, graph, inputs))


def saved(
    outputs: Mapping[str, Any], target: Files, graph: Graph, inputs: Mapping[str, Any], plan: str
) -> list[Path]:
    """Writes ``outputs`` and returns the files; videos with the frame rate of ``graph`` or of its
    pipeline.

    ``inputs``: all of them; with ``plan``, the plan's digest, they go into the metadata of the
    files.
    """
    return save_outputs(
        outputs,
        target,
        _rate(target, graph, inputs) or FPS,
        made_of(graph.name, inputs, plan, graphrun.__version__),
    )


def _rate(files: Files, graph: Graph, inputs: Mapping[str, Any]) -> float | None:
    """The frame rate of the videos among ``files``; None where there is no video, or the graph has
    no rate."""
    if not any(path.suffix.lower() in VIDEOS for path in files.values()):
        return None
    from graphrun.ops.pipeline import frames_per_second

    return frames_per_second(graph, inputs)
