"""Types of `graphrun.cluster.flow`: the crew, items and their results, and the workers' posts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from graphrun.batch.queue import RequestWork
from graphrun.batch.schedule import StageSegment
from graphrun.cluster.placement import Assignment, StageSpan
from graphrun.cluster.worker import Report, Visit
from graphrun.trace import Event, SlotTrace, Trace

ValueHandle = Any  # of a result in the crew's store
Ticket = Any  # of a started run
TimedRecord = TypeVar("TimedRecord", Event, SlotTrace)


class Crew(Protocol):
    """The workers, one for each assignment of a placement, and the store of their values."""

    def load_ahead(self, worker: int) -> Ticket:
        """Start loading the blocks that worker number ``worker`` needs first."""

    def begin(self, worker: int, visits: Sequence[Visit]) -> Ticket:
        """Queue a run of worker number ``worker``, with a `Visit` of value handles per item."""

    def finished(self, tickets: Collection[Ticket], *, wait_for_all: bool) -> Collection[Ticket]:
        """Wait up to a second for one of ``tickets``, or for all. Return the finished ones."""

    def report(self, ticket: Ticket) -> Report:
        """Return the report of a finished run. Raises BrokenPlan if all attempts lost the
        worker."""

    def result(self, ticket: Ticket, visit: int) -> ValueHandle:
        """Return the handle of the result of visit number ``visit``."""

    def keep(self, values: Mapping[str, Any]) -> ValueHandle:
        """Store values that no worker made."""

    def fetch(self, handle: ValueHandle) -> dict[str, Any]:
        """Return the values of a handle. Raises LostValue."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class FlowResult:
    """The result of the stages ``span`` of the graph, for one or more items.

    ``handle``: of the values in the crew's store. None: the result does not exist yet, or only this
    process has it and no worker has needed it. ``followers``: other items that need the same
    result.
    """

    span: tuple[int, int]
    handle: ValueHandle = None
    is_done: bool = False
    followers: list[FlowItem] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class FlowItem:
    """A request on its way.

    ``stage``: number of the next stage. ``host``: where its values are. ``holder``: the `Post` that
    made its latest values, while they count in the post's ``outbox``. ``results``: by stage.
    ``is_solo``: run alone, because a run with other items failed.
    """

    work: RequestWork
    stage: int = 0
    host: str = ""
    holder: Post | None = None
    results: dict[str, FlowResult] = field(default_factory=dict)
    losses: int = 0
    is_solo: bool = False

    @property
    def number(self) -> int:
        return self.work.request.number


@dataclass(slots=True, eq=False)
class FlowWorker:
    """A worker with its ``posts``, one for each part.

    ``active_posts``: the parts in the current run. ``loaded_seconds``: the virtual time when the
    blocks of its first run are on the device. ``end_seconds``: planned end of the latest run; None
    before the first. ``process``: id of the process of the latest report; 0: before the first.
    """

    number: int
    assignment: Assignment
    segment: StageSegment
    posts: list[Post] = field(default_factory=list)
    active_posts: list[Post] = field(default_factory=list)
    loaded_seconds: float = 0.0
    end_seconds: float | None = None
    process: int = 0


@dataclass(slots=True, eq=False)
class Post:
    """A part of a worker and its items. ``coming``: number of items on their way. ``inbox``: items
    that have arrived. ``outbox``: number of results neither sent on nor delivered."""

    worker: FlowWorker
    span: StageSpan
    stages: tuple[str, ...]
    inbox: list[FlowItem] = field(default_factory=list)
    coming: int = 0
    outbox: int = 0

    @property
    def assignment(self) -> Assignment:
        return self.worker.assignment

    @property
    def queued(self) -> int:
        """The number of its items: arriving, waiting and running."""
        return len(self.inbox) + self.coming + (self in self.worker.active_posts)


class ItemRun(NamedTuple):
    """An item that a worker runs, and the result that this run makes."""

    post: Post
    item: FlowItem
    result: FlowResult


def trace_parts(
    trace: Trace, begin: float, end: float, runs: Sequence[ItemRun], stages: Mapping[str, str]
) -> list[tuple[Trace, float, float]]:
    """Return the part of ``trace`` that belongs to each of ``runs``, with its start and end.
    ``stages``: by phase."""
    if len(runs) == 1:
        return [(trace, begin, end)]
    parts = []
    for run in runs:
        slot_numbers = [
            index
            for index, slot in enumerate(trace.slots)
            if stages.get(slot.phase) in run.post.stages
        ]
        slots = [trace.slots[index] for index in slot_numbers]
        first, last = (slots[0].start_seconds, slots[-1].end_seconds) if slots else (0.0, 0.0)

        def moved(record: TimedRecord, offset: float = first) -> TimedRecord:
            return replace(
                record,
                start_seconds=record.start_seconds - offset,
                end_seconds=record.end_seconds - offset,
            )

        events = tuple(
            moved(replace(event, slot=slot_numbers.index(event.slot)))
            for event in trace.events
            if event.slot in slot_numbers
        )
        part = replace(trace, slots=tuple(map(moved, slots)), events=events, notes=())
        parts.append((part, begin + first, min(end, begin + last)))
    return parts
