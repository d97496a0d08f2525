"""Who hears how far a batch is. Decides nothing, and imports nothing that takes time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphrun.repeat.course import Course, Leg
    from graphrun.repeat.items import Item


class Watcher:
    """Hears how far a batch is. Does nothing; whoever shows it does more."""

    def course(self, course: Course, counts: Mapping[str, int]) -> None:
        """Items of equal settings are about to run in this way, ``counts[stage]`` runs of each stage."""

    def leg(self, leg: Leg, runs: int) -> None:
        """A session of ``runs`` runs begins."""

    def run(self, leg: Leg, item: Item) -> Callable[[int, int, int], None] | None:
        """A run of it, for ``item``; what is returned hears of each call, as a run's ``progress``."""

    def planned_again(self, line: str) -> None:
        """What is left of the item that runs was planned again, as ``line`` says."""

    def done(self, item: Item, files: Sequence[Path]) -> None:
        """An item's outputs are where they belong."""

    def left_out(self, item: Item) -> None:
        """An item cannot be run, or its run failed: ``item.error`` says why."""

    def restarts(self, stage: str, why: str) -> None:
        """The loop of ``stage`` begins anew where it was broken off, or would."""
