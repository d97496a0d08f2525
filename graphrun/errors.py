"""Every error a user can meet. Each says what was wrong, where, and what to do; each carries its exit code."""

from __future__ import annotations

from typing import Any


class GraphrunError(Exception):
    """Base of all errors that graphrun raises on purpose; ``exit_code`` is what the command line returns."""

    exit_code = 2


class InputError(GraphrunError):
    """Something that was handed in is wrong: a file, a size, an input, an option. ``where`` is ``file:line`` or empty."""

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.where = where


class GraphError(InputError):
    """A graph file is wrong."""


class PlanError(InputError):
    """A plan is refused before anything ran: its text is malformed, its digest differs, or a rule is violated."""


class BrokenPlan(GraphrunError):
    """Reality left the plan: a cap was broken, a component was entered out of turn, bytes were left behind."""

    exit_code = 4


class OutOfMemory(BrokenPlan):
    """The device refused an allocation within the planned budget: in the slot ``part`` of ``phase`` ("": in none), when it had held
    at most ``peak_bytes`` in it, for which ``planned_bytes`` were planned, and this process might have ``available_bytes``."""

    phase = part = ""
    planned_bytes = 0
    peak_bytes = 0
    available_bytes = 0
    partial: Any = None  # the trace of what was finished before


class TransferFailed(BrokenPlan):
    """A copy between host and device failed."""
