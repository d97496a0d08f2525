"""Runs requests on the devices of a placement: which item goes where, when, and what happens when a
value or a device is lost.

    before stage 0    a/0 [encode]    before stage 1    b/0 [denoise decode]    in order
    o o o o o o o ->  o >###> o o  ->       o o     ->       o >###>        ->  o o o

A device that is idle takes the oldest item of those whose values have arrived; at most WAITING wait
before it and behind it. Of a device with several parts (`graphrun.cluster.placement`) each has
these for itself, and a run takes an item through each part that is able to. So a full part never
holds back a later one, which makes room. What a run makes stays where the crew keeps it, until the
items that read it are done. Requests with equal inputs of a stage share its run, by the keys of the
output cache. An item whose values were lost goes back to the stage that makes them; the same inputs
make the same bits, and an item counts as done once, when its outputs are handed on. What that waits
for is held back by no limit.

On simulated devices there is one virtual clock: a run begins when its device is free and its values
have arrived over the planned links, and takes what the device measured. Elsewhere the clock is the
wall's.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

from graphrun.batch.cache.keys import choices_of
from graphrun.batch.queue import Batch, BatchContext, Unfinished, Works
from graphrun.batch.requests import Request
from graphrun.batch.schedule import Schedule, Segment
from graphrun.batch.watch import LeftOut
from graphrun.cluster.machines import Link
from graphrun.cluster.placement import WAITING, Assignment, Placement, Span, bytes_before, parts_of
from graphrun.cluster.worker import LostValue, Report, Visit
from graphrun.errors import BrokenPlan, GraphrunError, OutOfMemory, PlanError, TransferFailed
from graphrun.graph.graph import Graph
from graphrun.trace import Event, Lane, SlotTrace, Trace

LOSSES = 8  # of values of one item, after which it fails

Handle = Any  # of what a run makes
Ticket = Any  # of a run that was begun
Timed = TypeVar("Timed", Event, SlotTrace)


class Crew(Protocol):
    """Workers, one for each assignment of a placement, and what keeps their values."""

    def load_ahead(self, worker: int) -> Ticket:
        """Begins to load what the first run of worker number ``worker`` begins with."""

    def begin(self, worker: int, visits: Sequence[Visit]) -> Ticket:
        """Begins a run of worker number ``worker``, after those begun before. The values of
        ``visits`` are handles."""

    def done(self, tickets: Collection[Ticket], *, every: bool) -> Collection[Ticket]:
        """Those of ``tickets`` that are done, when one is, or with ``every`` all are; none after a
        second."""

    def report(self, ticket: Ticket) -> Report:
        """Of a run that is done. Raises BrokenPlan where its worker died each time."""

    def made(self, ticket: Ticket, visit: int) -> Handle:
        """The handle of what the run makes in visit number ``visit``."""

    def keep(self, values: Mapping[str, Any]) -> Handle:
        """Keeps values that no worker made."""

    def fetch(self, handle: Handle) -> dict[str, Any]:
        """The values of a handle. Raises LostValue."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Made:
    """What the stages ``span`` of the graph make for one or more items. ``handle``: None until
    then, and for values that wait in this process until a worker wants them."""

    span: tuple[int, int]
    handle: Handle = None
    done: bool = False
    followers: list[_Item] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Item:
    """A request on its way. ``at``: number of the stage that is next; ``host``: where its values
    are; ``holder``: the worker behind which its values wait; ``made``: by stage; ``alone``: runs
    without others, after a run with others failed."""

    work: Unfinished
    at: int = 0
    host: str = ""
    holder: _Post | None = None
    made: dict[str, _Made] = field(default_factory=dict)
    losses: int = 0
    alone: bool = False

    @property
    def number(self) -> int:
        """Of the request."""
        return self.work.request.number


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker with its ``posts``, one for each part. ``running``: those that it runs now. What it
    loads before its first run is there at ``loaded_seconds`` of the virtual clock."""

    number: int
    assignment: Assignment
    segment: Segment
    posts: list[_Post] = field(default_factory=list)
    running: list[_Post] = field(default_factory=list)
    loaded_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Post:
    """A part of a worker and its items: ``coming`` are on their way, those in ``inbox`` have
    arrived, ``outbox`` results wait."""

    worker: _Worker
    span: Span
    stages: tuple[str, ...]
    inbox: list[_Item] = field(default_factory=list)
    coming: int = 0
    outbox: int = 0

    @property
    def assignment(self) -> Assignment:
        """Of the worker."""
        return self.worker.assignment

    @property
    def queued(self) -> int:
        """Items that it has, in all."""
        return len(self.inbox) + self.coming + (self in self.worker.running)


class _Run(NamedTuple):
    """An item that a worker runs, and what it makes of it."""

    post: _Post
    item: _Item
    made: _Made


class Flow(Works):
    """Runs ``requests`` with equal settings by ``placement`` with ``crew``. ``virtual``: the
    devices are simulated."""

    def __init__(
        self,
        graph: Graph,
        requests: Sequence[Request],
        context: BatchContext,
        batch: Batch,
        placement: Placement,
        crew: Crew,
    ) -> None:
        # RAM is the devices': what is found waits on disk
        super().__init__(graph, requests, context, batch, ram_bytes=0)
        self.placement, self.crew, self.names = placement, crew, placement.stages
        self.virtual = all(of.device.hardware.device == "sim" for of in placement.assignments)
        self.segments = segments_of(graph, placement)
        workers = zip(itertools.count(), placement.assignments, self.segments, strict=False)
        self.workers = [_Worker(number, of, segment) for number, of, segment in workers]
        for worker in self.workers:
            worker.posts += [
                _Post(worker, span, self.names[slice(*span)])
                for span in placement.spans(worker.assignment)
            ]
        self.posts = [post for worker in self.workers for post in worker.posts]
        self.nbytes = bytes_before(self.names, placement.values)
        self.output_names: dict[tuple[int, int], list[str]] = {}
        self.requests = len(self.todo)
        self.waiting: dict[int, list[_Item]] = defaultdict(list)  # by stage, in order
        self.order = deque[_Item]()  # not handed on
        self.shared: weakref.WeakValueDictionary[Any, _Made] = weakref.WeakValueDictionary()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.running: dict[Ticket, tuple[list[_Run], float]] = {}
        # when the link from a host to another is free
        self.free_seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.start_seconds, self.clock, self.count = time.monotonic(), 0.0, itertools.count()
        # of requests with other settings
        self.before_seconds = batch.seconds if batch.lanes else 0.0

    def run(self) -> None:
        """Runs all requests."""
        with self.values:
            schedule = self._schedule()
            self._require_choices(schedule)
            self.batch.schedules.append(schedule)
            self.context.watcher.schedule(schedule, {name: len(self.todo) for name in self.names})
            for work in self.todo:
                self._found(work)
                self.order.append(item := _Item(work))
                self.waiting[0].append(item)
            self._load_ahead()
            while self.order:
                while self._move():
                    pass
                if self.order:
                    self._advance()

    def _load_ahead(self) -> None:
        """Lets devices load that have to wait for values of others, and will get some. On the
        virtual clock all are waited for."""
        loads, late = (
            dict[Ticket, _Worker](),
            [of for of in self.workers if of.posts and of.posts[0].span[0]],
        )
        for span in sorted({of.posts[0].span for of in late}):
            count = sum(not self._is_known(item, span) for item in self.order)
            own = [of for of in late if of.posts[0].span == span]
            for worker in sorted(own, key=lambda of: of.assignment.column.steady_seconds)[:count]:
                loads[self.crew.load_ahead(worker.number)] = worker
        while self.virtual and loads:
            for ticket in self.crew.done(loads.keys(), every=True):
                loads.pop(ticket).loaded_seconds = self._report(ticket).seconds

    def _schedule(self) -> Schedule:
        waiting = WAITING * max(self.nbytes)
        moved = sum(segment.total(1)[1] for segment in self.segments)
        return Schedule(
            self.segments,
            len(self.todo),
            len(self.todo),
            self.placement.seconds,
            moved,
            waiting,
            waiting,
        )

    # -- items between devices

    def _move(self) -> bool:
        """Hands on what is finished, sends items to devices and starts idle ones; whether anything
        moved."""
        moved = self._hand_on()
        for begin in sorted(self.waiting, reverse=True):
            moved |= begin < len(self.names) and self._pull(begin)
        for worker in self.workers:
            if not worker.running and (runs := self._able(worker)):
                self._start(worker, runs)
                moved = True
        return moved

    def _able(self, worker: _Worker) -> list[_Run]:
        """The next item of each part of ``worker`` that is able to run one; taken from the
        inbox."""
        runs = list[_Run]()
        for post in worker.posts:
            item = next(
                (of for of in post.inbox if post.outbox < WAITING or self._is_awaited(of)), None
            )
            if item is not None:
                runs.append(_Run(post, item, item.made[post.stages[0]]))
        runs = next(([run] for run in runs if run.item.alone), runs)
        for post, item, _ in runs:
            post.inbox.remove(item)
        return runs

    def _is_awaited(self, item: _Item) -> bool:
        """Whether ``item`` is what the next one to be handed on needs: no limit holds it back. All
        others may wait for that, behind devices that are full."""
        return bool(self.order) and (
            item is self.order[0]
            or any(self.order[0] in made.followers for made in item.made.values() if not made.done)
        )

    def _pull(self, begin: int) -> bool:
        """Sends items that wait before stage ``begin`` to the devices with the fewest; whether any
        moved."""
        moved, queue = False, self.waiting[begin]
        for item in list(queue):
            if self._skips(item):
                moved = True
                continue
            able = [
                (post, link)
                for post in self.posts
                if post.span[0] == begin
                and (post.coming + len(post.inbox) < WAITING or self._is_awaited(item))
                and (
                    link := self.placement.cluster.link(
                        item.host or post.assignment.device.host, post.assignment.device.host
                    )
                )
            ]
            if not able:
                break
            queue.remove(item)
            post, link = min(
                able, key=lambda pair: (pair[0].queued, pair[0].assignment.column.steady_seconds)
            )
            post.coming += 1
            self._release(item)
            self._expect(item, post)
            self._at(self._arrival(item, post, link), functools.partial(self._arrived, post, item))
            moved = True
        return moved

    def _skips(self, item: _Item) -> bool:
        """Whether ``item`` need not run the stages that are next: they are known, or another item
        runs the same."""
        before = item.made.get(self.names[item.at])
        if before is not None and before.done:
            self._pass(item, before)
            return True
        for span in sorted(
            {post.span for post in self.posts if post.span[0] == item.at}, reverse=True
        ):
            stages = self.names[slice(*span)]
            if self._is_known(item, span):
                self._pass(item, _Made(span, done=True))
                return True
            if (known := self.shared.get(self._key(item, stages))) is not None:
                for name in stages:
                    self.batch.shared[name] = self.batch.shared.get(name, 0) + 1
                if known.done:
                    self._pass(item, known)
                else:
                    self.waiting[item.at].remove(item)
                    self._release(item)
                    known.followers.append(item)
                return True
        return False

    def _is_known(self, item: _Item, span: tuple[int, int]) -> bool:
        """Whether what the stages ``span`` make of ``item`` is known from an earlier run."""
        stages = self.names[slice(*span)]
        return not self.last & set(stages) and all(
            self.values.has(item.number, name) for name in self._outputs(span)
        )

    def _key(self, item: _Item, stages: Sequence[str]) -> Any:
        """Equal for items that make the same of ``stages``; None where that is unknown."""
        keys = tuple(item.work.keys.key(name) for name in stages)
        return keys if all(keys) else None

    def _pass(self, item: _Item, made: _Made) -> None:
        """Takes ``item`` past the stages of ``made``."""
        if item in self.waiting[item.at]:
            self.waiting[item.at].remove(item)
        item.made |= dict.fromkeys(self.names[slice(*made.span)], made)
        item.at = made.span[1]
        bisect.insort(self.waiting[item.at], item, key=lambda of: of.number)

    def _arrival(self, item: _Item, post: _Post, link: Link) -> float:
        """When the values of ``item`` are at the host of ``post``: each takes its turn on the link.
        What is at hand is there now, and on the wall's clock what the crew has yet to move."""
        if not self.virtual or not item.host:
            return self.clock
        way = item.host, post.assignment.device.host
        self.free_seconds[way] = (
            max(self.clock, self.free_seconds[way]) + self.nbytes[item.at] / link.bytes_per_second
        )
        return self.free_seconds[way] + link.seconds

    def _arrived(self, post: _Post, item: _Item) -> None:
        post.coming -= 1
        bisect.insort(post.inbox, item, key=lambda of: of.number)

    def _release(self, item: _Item) -> None:
        """The values of ``item`` no longer wait behind the device that made them."""
        if item.holder is not None:
            item.holder.outbox -= 1
            item.holder = None

    # -- runs

    def _expect(self, item: _Item, post: _Post) -> None:
        """Notes that ``post`` will run its stages for ``item``, and so for others that are
        equal."""
        made = _Made(post.span)
        item.made |= dict.fromkeys(post.stages, made)
        if (key := self._key(item, post.stages)) is not None:
            self.shared[key] = made

    def _start(self, worker: _Worker, runs: Sequence[_Run]) -> None:
        """Begins a run of those ``runs`` whose requests the watcher does not leave out."""
        kept, visits = list[_Run](), list[Visit]()
        for run in runs:
            try:
                self.context.watcher.begins_on(
                    worker.assignment.name, run.post.stages, run.item.work.request
                )
            except LeftOut as error:
                self._drop(run.item, error)
                self._back(run.made.followers, [run.made])
                continue
            values = [self._handle(run.item, of) for of in self._read(run.item, run.post)]
            kept.append(run)
            visits.append(Visit(run.post.stages, run.item.work.request.inputs, values))
        if kept:
            ticket = self.crew.begin(worker.number, visits)
            worker.running = [of.post for of in kept]
            self.running[ticket] = kept, max(self.clock, worker.loaded_seconds)

    def _read(self, item: _Item, post: _Post) -> list[_Made]:
        """What the stages of ``post`` read of others."""
        read = (of for name in post.stages for of in self.graph.stage(name).references)
        return list(
            dict.fromkeys(
                item.made[of.name]
                for of in read
                if of.kind == "stage" and of.name not in post.stages
            )
        )

    def _handle(self, item: _Item, made: _Made) -> Handle:
        if made.handle is None:
            made.handle = self.crew.keep(
                {name: self.values.get(item.number, name) for name in self._outputs(made.span)}
            )
        return made.handle

    def _outputs(self, span: tuple[int, int]) -> list[str]:
        """Names of what the stages ``span`` make for others."""
        if span not in self.output_names:
            outputs = self.graph.part(self.names[slice(*span)]).outputs.values()
            self.output_names[span] = [str(of)[1:] for of in outputs]
        return self.output_names[span]

    def _advance(self) -> None:
        """Goes on to the next event. On the virtual clock that is known when all runs are."""
        while self.running and (self.virtual or not self.events):
            self.context.watcher.waits()
            for ticket in self.crew.done(self.running.keys(), every=self.virtual):
                runs, start = self.running.pop(ticket)
                report = self._report(ticket)
                end = (
                    start + report.seconds
                    if self.virtual
                    else time.monotonic() - self.start_seconds
                )
                self._at(end, functools.partial(self._ended, runs, ticket, report, start))
        self.clock, _, happens = heapq.heappop(self.events)
        happens()

    def _report(self, ticket: Ticket) -> Report:
        try:
            return self.crew.report(ticket)
        except GraphrunError as error:  # of a worker that died too often
            return Report(error=(type(error).__name__, str(error)))

    def _at(self, seconds: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self.events, (seconds, next(self.count), happens))

    def _ended(self, runs: Sequence[_Run], ticket: Ticket, report: Report, start: float) -> None:
        worker = runs[0].post.worker
        worker.running = []
        if report.lost:
            for at, (post, item, made) in enumerate(runs):
                values = self._read(item, post)
                if lost := [values[number] for visit, number in report.lost if visit == at]:
                    self._back([item, *made.followers], lost, made)
                else:
                    self._again(post, item)
            return
        try:
            report.require()
        except BrokenPlan as error:
            if self.context.strict or isinstance(error, (OutOfMemory, TransferFailed)):
                raise
            for post, item, made in runs:
                if len(runs) > 1:  # which of them fails is seen when each runs alone
                    item.alone = True
                    self._again(post, item)
                    continue
                for each in [item, *made.followers]:
                    self._drop(each, error)
            return
        if report.trace is not None:
            begin, end = (
                self.before_seconds + max(0.0, start - report.ahead_seconds),
                self.before_seconds + self.clock,
            )
            stages = {phase.name: phase.stage for phase in worker.segment.solution.chosen.phases}
            for (post, item, _), (trace, *times) in zip(
                runs, _split(report.trace, begin, end, runs, stages), strict=True
            ):
                self.batch.lanes.append(
                    Lane(
                        worker.assignment.name, item.number, post.stages, times[0], times[1], trace
                    )
                )
                self.batch.traces.append((post.stages, item.number, trace))
            for note in report.trace.notes:
                self.context.watcher.planned_again(f"{worker.assignment.name}: {note}")
        for at, (post, item, made) in enumerate(runs):
            sharing = [item, *made.followers]
            made.handle, made.done, made.followers = self.crew.made(ticket, at), True, []
            item.holder, item.alone = post, False
            post.outbox += 1
            self._save(sharing, post, made)
            for each in sharing:
                each.host = post.assignment.device.host
                self._pass(each, made)
        left = sum(len(self.names) - of.at for of in self.order)
        share = 1 - left / (len(self.names) * self.requests)
        for post, item, _ in runs:
            self.context.watcher.ran_on(
                worker.assignment.name, post.stages, item.work.request, share
            )

    def _again(self, post: _Post, item: _Item) -> None:
        """``item``, whose values are at hand, waits for ``post`` again."""
        bisect.insort(post.inbox, item, key=lambda of: of.number)

    def _save(self, sharing: Sequence[_Item], post: _Post, made: _Made) -> None:
        """Saves what is made in the journal and in the cache of outputs, of stages all of whose
        outputs leave the device."""
        names = [name for name in post.stages if name not in self.last]
        if not names or all(of.work.journal is None and of.work.reuse is None for of in sharing):
            return
        try:
            values = self.crew.fetch(made.handle)
        except LostValue:
            return  # whoever reads it has it made again
        for name in names:
            outputs = {
                output: values.get(f"{name}.{output}") for output in self.graph.stage(name).outputs
            }
            if any(value is None for value in outputs.values()):
                continue
            if (reuse := sharing[0].work.reuse) is not None:
                reuse.keep(name, outputs, choices_of(post.worker.segment.solution))
            for each in sharing:
                if each.work.journal is not None:
                    each.work.journal.keep(name, outputs)

    def _back(
        self, items: Sequence[_Item], lost: Sequence[_Made], failed: _Made | None = None
    ) -> None:
        """Sends ``items`` back to the stages that make what was ``lost``. ``failed``: what was not
        made for lack of it."""
        gone = [*lost, *([failed] if failed is not None else [])]
        for key in [key for key, made in self.shared.items() if made in gone]:
            del self.shared[key]
        for item in items:
            self._release(item)
            item.losses += 1
            if item.losses > LOSSES:
                self._drop(item, BrokenPlan(f"its values were lost {item.losses} times"))
                continue
            item.made = {name: made for name, made in item.made.items() if made not in gone}
            item.at, item.host = min(made.span[0] for made in gone), ""
            bisect.insort(self.waiting[item.at], item, key=lambda of: of.number)

    # -- finished items

    def _hand_on(self) -> bool:
        """Hands on, in order, the outputs of items that are through; whether there was one."""
        through, moved = self.waiting[len(self.names)], False
        while self.order and self.order[0] in through:
            item = self.order[0]
            through.remove(item)
            made = {of.name: item.made[of.name] for of in self.graph.outputs.values()}
            moved = True
            try:
                found = {id(each): self.crew.fetch(each.handle) for each in made.values()}
            except LostValue:
                self._back([item], list(made.values()))
                break
            self._release(item)
            self.order.popleft()
            self._finish(
                item.work,
                {name: found[id(made[of.name])][name] for name, of in self.graph.outputs.items()},
            )
        return moved

    def _drop(self, item: _Item, error: GraphrunError) -> None:
        self._release(item)
        self.order.remove(item)
        self._fail(item.work, error)


def _split(
    trace: Trace, begin: float, end: float, runs: Sequence[_Run], stages: Mapping[str, str]
) -> list[tuple[Trace, float, float]]:
    """The part of ``trace``, which is of all ``runs``, of each of them, and when that begins and
    ends. ``stages``: by phase."""
    if len(runs) == 1:
        return [(trace, begin, end)]
    found = []
    for run in runs:
        own = [
            at for at, slot in enumerate(trace.slots) if stages.get(slot.phase) in run.post.stages
        ]
        slots = [trace.slots[at] for at in own]
        first, last = (slots[0].start_seconds, slots[-1].end_seconds) if slots else (0.0, 0.0)

        def moved(of: Timed, back: float = first) -> Timed:
            return replace(
                of, start_seconds=of.start_seconds - back, end_seconds=of.end_seconds - back
            )

        events = tuple(
            moved(replace(of, slot=own.index(of.slot))) for of in trace.events if of.slot in own
        )
        part = replace(trace, slots=tuple(map(moved, slots)), events=events, notes=())
        found.append((part, begin + first, min(end, begin + last)))
    return found


def segments_of(graph: Graph, placement: Placement) -> tuple[Segment, ...]:
    """The part of ``graph`` that each device runs, with its plan. Raises PlanError where two
    devices would make different bits."""
    found, chosen = list[Segment](), dict[str, Any]()
    for of in placement.assignments:
        assert of.column.solution is not None
        parts = [
            graph.part(placement.stages[slice(*span)])
            for span in parts_of(placement.stages, of.stages)
        ]
        outputs = {name: output for part in parts for name, output in part.outputs.items()}
        found.append(
            Segment(of.stages, replace(graph.part(of.stages), outputs=outputs), of.column.solution)
        )
        choices = choices_of(of.column.solution)
        for name, choice in [
            *choices.variants.items(),
            *((f"stage {stage}", option) for stage, option in choices.options.items()),
        ]:
            if chosen.setdefault(name, choice) != choice:
                raise PlanError(
                    f"{of.name} runs {name} in another way than a device before it, which changes the output"
                )
    return tuple(found)
