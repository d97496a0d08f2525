"""Who hears how far a batch is. Decides nothing, and imports nothing that takes time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphrun.batch.requests import Request
    from graphrun.batch.schedule import Schedule, Segment


class Watcher:
    """Hears how far a batch is. Does nothing; whoever shows it does more."""

    def schedule(self, schedule: Schedule, counts: Mapping[str, int]) -> None:
        """Items of equal settings are about to run in this way, ``counts[stage]`` runs of each stage."""

    def segment(self, segment: Segment, runs: int) -> None:
        """A session of ``runs`` runs begins."""

    def run(self, segment: Segment, request: Request) -> Callable[[int, int, int], None] | None:
        """A run of it, for ``request``; what is returned hears of each call, as a run's ``progress``."""

    def planned_again(self, line: str) -> None:
        """What is left of the item that runs was planned again, as ``line`` says."""

    def done(self, request: Request, files: Sequence[Path]) -> None:
        """An item's outputs are where they belong."""

    def left_out(self, request: Request) -> None:
        """An item cannot be run, or its run failed: ``request.error`` says why."""

    def restarts(self, stage: str, why: str) -> None:
        """The loop of ``stage`` begins anew where it was broken off, or would."""
