"""Callbacks for the progress of a batch. Imports nothing heavy: the command line starts fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphrun.errors import GraphrunError

if TYPE_CHECKING:
    from graphrun.batch.requests import Request
    from graphrun.batch.schedule import Schedule, StageSegment
    from graphrun.hook import ProgressCallback
    from graphrun.trace import Trace


class LeftOut(GraphrunError):
    """Raised by `Watcher.run`, or the callback that it returned: skip this request, run the
    others."""


class Watcher:
    """Receives the progress of a batch. These methods do nothing; override the ones you need."""

    def schedule(self, schedule: Schedule, counts: Mapping[str, int]) -> None:
        """Requests with equal settings are about to run, ``counts[stage]`` times a stage."""

    def segment(self, segment: StageSegment, runs: int) -> None:
        """A session of ``runs`` runs of ``segment`` begins."""

    def run(self, segment: StageSegment, request: Request) -> ProgressCallback | None:
        """A run of ``segment`` for ``request`` begins. Return its ``progress`` callback, or
        None."""

    def ran(self, segment: StageSegment, requests: Sequence[Request], trace: Trace) -> None:
        """A run of ``segment`` has ended; all of ``requests`` share its outputs."""

    def planned_again(self, line: str) -> None:
        """The rest of the current run was planned again; ``line`` is the message about it."""

    def done(self, request: Request, files: Sequence[Path]) -> None:
        """All outputs of ``request`` are written, to ``files``."""

    def left_out(self, request: Request) -> None:
        """``request`` cannot be run, or its run failed; ``request.error`` is the reason."""

    def restarts(self, stage: str, reason: str) -> None:
        """The loop of ``stage`` restarts, or would, at its first step after an interruption."""

    def waits(self) -> None:
        """Called at least every second while cluster devices work; may raise KeyboardInterrupt."""

    def begins_on(self, device: str, stages: Sequence[str], request: Request) -> None:
        """A ``device`` of a cluster is about to run ``stages`` for ``request``. May raise
        LeftOut."""

    def restarts_on(self, device: str) -> None:
        """The process of a ``device`` of a cluster ended, and another one goes on."""

    def ran_on(self, device: str, stages: Sequence[str], request: Request, share: float) -> None:
        """A ``device`` of a cluster ran ``stages`` for ``request``. ``share``: finished part of the
        batch."""
