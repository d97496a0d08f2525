"""Errors that graphrun raises on purpose: what is wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class GraphrunError(Exception):
    """Base class of graphrun's errors. ``exit_code`` is the exit status of the command line."""

    exit_code = 2


class InputError(GraphrunError):
    """Invalid input: a file, size, value or option. ``location`` is ``file:line``, or empty."""

    def __init__(self, message: str, location: str = "") -> None:
        super().__init__(f"{location}: {message}" if location else message)
        self.location = location


class GraphError(InputError):
    """A graph file is invalid."""


class StageError(GraphError):
    """The pipeline's own code failed in a stage, for example on an unsupported input."""


class PlanError(InputError):
    """A plan is refused before the run: malformed text, another digest, or a broken rule."""


class BrokenPlan(GraphrunError):
    """A run deviated from its plan: memory cap exceeded, call out of order, bytes not released."""

    exit_code = 4


class OutOfMemory(BrokenPlan):
    """The device refused an allocation although the plan respects the budget.

    ``phase``, ``part``: the open slot ("": none). ``planned_bytes``, ``peak_bytes``: its planned
    and measured peak. ``available_bytes``: what this process could allocate in total at that
    moment. ``secondary``: number of the secondary device that refused; 0: the main device.
    """

    secondary = 0
    phase = part = ""
    planned_bytes = 0
    peak_bytes = 0
    available_bytes = 0
    partial: Any = None  # Trace of the stages that finished before


class TransferFailed(BrokenPlan):
    """A copy between host and device failed."""


class DeviceLost(BrokenPlan):
    """The process of a device of a cluster died repeatedly during a run."""


class PlanningInterrupted(KeyboardInterrupt):
    """Planning was interrupted by Ctrl-C. ``best()`` returns the best `Solution` so far, or None.

    The solution has its bound. ``infeasible``: no plan fits, and suggestions were being searched.
    """

    def __init__(self, best: Callable[[], Any], *, infeasible: bool = False) -> None:
        super().__init__("interrupted while planning; best() is the best plan so far")
        self.best = best
        self.infeasible = infeasible


class Interrupted(GraphrunError):
    """A run was interrupted. The message says what is kept, and how to continue."""

    exit_code = 130  # as shells report SIGINT
