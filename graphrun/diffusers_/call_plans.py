"""Plans of an attached pipeline's calls: their keys, and where they are stored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.trace import Trace


class CallRecords(Protocol):
    """Dry runs and plans on disk (`graphrun.store.CallStore`)."""

    def solve(self, problem: Problem) -> Solution:
        """Return the plan for ``problem``, from the store or the solver."""

    def find(self, packages: Iterable[str], content: Any) -> Any:
        """Return the data stored for equal ``content``; None if there is none."""

    def keep(self, packages: Iterable[str], content: Any, data: Any) -> None:
        """Store ``data`` for a call described by ``content``. ``packages``: the packages that
        define the pipeline's classes."""


class CallKey(NamedTuple):
    """Key of a plan: calls of the pipeline with equal keys share a plan.

    ``name``: the called method. ``arguments``: the autocast dtype, the signature of the arguments
    (`signature_of`) without the content of texts, and the tensors that earlier calls left for this
    one (`kept_signatures`). ``texts``: the signature with the content of texts, for calls whose
    shapes depend on them; otherwise empty. ``reserve_bytes``: the caller's own bytes on the device.
    """

    name: str
    arguments: Any
    texts: Any
    reserve_bytes: int

    @property
    def without_texts(self) -> tuple[Any, ...]:
        return self.name, self.arguments

    @property
    def without_reserve(self) -> tuple[Any, ...]:
        """The key of a dry run, which does not depend on the caller's bytes."""
        return self.name, self.arguments, self.texts


@dataclass(slots=True)
class PlannedCall:
    """The plan for calls with one `CallKey`.

    ``call_signatures``: of the calls into components in the dry run. ``traced_calls``: how many
    calls into components were traced when the plan was made; a later trace may change the numbers
    of a component, so the plan is then made again.
    """

    call_signatures: frozenset[str]
    solution: Solution
    traced_calls: int


def without_caller_bytes(trace: Trace, held_bytes: int, output_bytes: int) -> Trace:
    """Return ``trace`` without outputs, and without the caller's bytes in its peaks.

    ``held_bytes``: the caller's bytes on the device before the call. In the end slot the outputs
    belong to the caller too.
    """
    caller_bytes = {"end": held_bytes + output_bytes}
    slots = tuple(
        replace(
            slot,
            peak_bytes=max(0, slot.peak_bytes - caller_bytes.get(slot.part, held_bytes)),
            planned_peaks=(max(0, slot.planned_peaks[0] - held_bytes), *slot.planned_peaks[1:]),
        )
        for slot in trace.slots
    )
    return replace(trace, slots=slots, outputs={})
