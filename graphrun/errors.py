"""Errors that graphrun raises on purpose. A message says what is wrong, where, and what to do; each
class has an exit code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class GraphrunError(Exception):
    """Base class of graphrun's errors. ``exit_code`` is the exit status of the command line."""

    exit_code = 2


class InputError(GraphrunError):
    """Invalid input: a file, a size, a value, an option. ``where`` is ``file:line``, or empty."""

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.where = where


class GraphError(InputError):
    """A graph file is invalid."""


class StageError(GraphError):
    """The pipeline's own code failed in a stage: an input that it does not take, parts that do not
    fit each other."""


class PlanError(InputError):
    """A plan is refused before the run starts: its text is malformed, a digest differs, or it
    violates a rule."""


class BrokenPlan(GraphrunError):
    """A run deviated from its plan: memory cap exceeded, component called out of order, bytes not
    released."""

    exit_code = 4


class OutOfMemory(BrokenPlan):
    """The device refused an allocation although the plan respects the budget.

    ``phase`` and ``part`` name the slot in which it happened ("": outside of any slot).
    ``planned_bytes`` and ``peak_bytes`` are the planned and the measured peak of that slot,
    ``available_bytes`` what this process could allocate in total at that moment. ``secondary``:
    number of the secondary device that refused it; 0: the device itself.
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
    """The process of a cluster's device ended again and again under a run."""


class PlanningInterrupted(KeyboardInterrupt):
    """Planning was interrupted by Ctrl-C. ``best()`` returns the best `Solution` so far, with its
    bound; None where there is none.

    ``infeasible``: no plan fits, and what would help was searched.
    """

    def __init__(self, best: Callable[[], Any], *, infeasible: bool = False) -> None:
        super().__init__("interrupted while planning; best() is the best plan so far")
        self.best = best
        self.infeasible = infeasible


class Interrupted(GraphrunError):
    """A run was interrupted. The message says what is kept, and how to go on."""

    exit_code = 130  # as shells report SIGINT
