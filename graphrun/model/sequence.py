"""A run in which one process for each of several equal devices computes a part of the sequence."""

from __future__ import annotations

from dataclasses import dataclass

from graphrun.model.solution import Solution


@dataclass(frozen=True, slots=True)
class DividedRun:
    """The plan of each process, and its transfers in one run.

    ``transfer_bytes``: sent to the other processes. ``refusal``: why diffusers cannot divide the
    sequence, without a solution. Without both, no plan fits.
    """

    solution: Solution | None = None
    transfer_bytes: int = 0
    transfer_seconds: float = 0.0
    refusal: str = ""
