"""Run requests on the devices of a placement: dispatch items, and recover lost values and devices.

    before stage 0    a/0 [encode]    before stage 1    b/0 [denoise decode]    in order
    o o o o o o o ->  o >###> o o  ->       o o     ->       o >###>        ->  o o o

    o      an item: a request on its way through the stages
    >###>  the run of a device (a/0: device 0 of host a), between items before and behind it

An idle device takes the oldest item whose values have arrived. At most WAITING items wait before a
device, and at most WAITING results behind it. A device gets no item if the other devices with the
same stages finish all remaining items earlier: the last items go to fast devices. If a device (in
code: `FlowWorker`) has several parts (`graphrun.cluster.placement`; in code: `Post`), each part has
its own queues, and a run takes one item through each part that has one ready. So a full part does
not stop the later parts of its device, whose runs make room.

The crew (`Crew`: the workers, one for each device, and the store of their values) keeps the results
of a run until all items that read them are done. Requests with equal inputs of a stage share its
run, by the keys of the output cache. If values of an item are lost, the item returns to the stage
that makes them; the same inputs make the same bits. The next item to deliver, and its dependencies,
ignore queue limits.

Simulated devices share one virtual clock: a run starts when its device is free and its values have
arrived over the planned links, and takes the time that the device measured. Otherwise the clock is
the wall clock.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import math
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from graphrun.batch.cache.keys import choices_of
from graphrun.batch.queue import Batch, BatchContext, Works
from graphrun.batch.requests import Request
from graphrun.batch.schedule import Schedule, StageSegment
from graphrun.batch.watch import LeftOut
from graphrun.cluster.flow_items import (
    Crew,
    FlowItem,
    FlowResult,
    FlowWorker,
    ItemRun,
    Post,
    Ticket,
    ValueHandle,
    trace_parts,
)
from graphrun.cluster.machines import Link
from graphrun.cluster.placement import WAITING, Placement, bytes_before, parts_of
from graphrun.cluster.worker import LostValue, Report, Visit
from graphrun.errors import BrokenPlan, GraphrunError, OutOfMemory, PlanError, TransferFailed
from graphrun.graph.graph import Graph
from graphrun.trace import Lane

LOSSES = 8  # how often values of an item may be lost before it fails


class Flow(Works):
    """Runs ``requests`` with equal settings by ``placement`` with ``crew``."""

    def __init__(
        self,
        graph: Graph,
        requests: Sequence[Request],
        context: BatchContext,
        batch: Batch,
        placement: Placement,
        crew: Crew,
    ) -> None:
        # the devices use the RAM: results from earlier runs wait on disk
        super().__init__(graph, requests, context, batch, ram_bytes=0)
        self.placement, self.crew, self.names = placement, crew, placement.stages
        self.virtual = all(
            assignment.device.hardware.kind.has_virtual_clock
            for assignment in placement.assignments
        )
        self.segments = segments_of(graph, placement)
        workers = zip(itertools.count(), placement.assignments, self.segments, strict=False)
        self.workers = [
            FlowWorker(number, assignment, segment) for number, assignment, segment in workers
        ]
        for worker in self.workers:
            worker.posts += [
                Post(worker, span, self.names[slice(*span)])
                for span in placement.spans(worker.assignment)
            ]
        self.posts = [post for worker in self.workers for post in worker.posts]
        # bytes that an item carries before each stage
        self.nbytes = bytes_before(self.names, placement.values)
        self.output_names: dict[tuple[int, int], list[str]] = {}
        self.request_count = len(self.todo)
        self.queues: dict[int, list[FlowItem]] = defaultdict(list)  # by stage, in order
        self.order = deque[FlowItem]()  # items not yet delivered
        self.shared: weakref.WeakValueDictionary[Any, FlowResult] = weakref.WeakValueDictionary()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.active_runs: dict[Ticket, tuple[list[ItemRun], float]] = {}
        # when the link between two hosts is free
        self.free_seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.start_seconds, self.clock, self.count = time.monotonic(), 0.0, itertools.count()
        # seconds of earlier requests with other settings
        self.before_seconds = batch.seconds if batch.lanes else 0.0

    def run(self) -> None:
        with self.values:
            schedule = self._schedule()
            self._require_choices(schedule)
            self.batch.schedules.append(schedule)
            self.context.watcher.schedule(schedule, {name: len(self.todo) for name in self.names})
            for work in self.todo:
                self._load_values(work)
                self.order.append(item := FlowItem(work))
                self.queues[0].append(item)
            self._load_ahead()
            while self.order:
                while self._move():
                    pass
                if self.order:
                    self._advance()

    def _load_ahead(self) -> None:
        """Let devices load weights while they wait for values of other devices. Devices that no
        item will reach load nothing. On the virtual clock, wait for all loads."""
        loads, downstream_workers = (
            dict[Ticket, FlowWorker](),
            [worker for worker in self.workers if worker.posts and worker.posts[0].span[0]],
        )
        for span in sorted({worker.posts[0].span for worker in downstream_workers}):
            count = sum(not self._is_known(item, span) for item in self.order)
            workers = [worker for worker in downstream_workers if worker.posts[0].span == span]
            # the fastest first
            for worker in sorted(
                workers, key=lambda worker: worker.assignment.column.steady_seconds
            )[:count]:
                loads[self.crew.load_ahead(worker.number)] = worker
        while self.virtual and loads:
            for ticket in self.crew.finished(loads.keys(), wait_for_all=True):
                worker = loads.pop(ticket)
                worker.loaded_seconds = self._report(ticket, worker).seconds

    def _schedule(self) -> Schedule:
        waiting_bytes = WAITING * max(self.nbytes)
        # bytes of weights that one run of each segment copies to its device
        moved_bytes = sum(segment.total(1)[1] for segment in self.segments)
        return Schedule(
            self.segments,
            len(self.todo),
            len(self.todo),
            self.placement.seconds,
            moved_bytes,
            waiting_bytes,
            waiting_bytes,
        )

    # -- items between devices

    def _move(self) -> bool:
        """Deliver and send items, and start idle devices. Return whether anything changed."""
        has_moved = self._deliver()
        for begin in sorted(self.queues, reverse=True):
            has_moved |= begin < len(self.names) and self._pull(begin)
        for worker in self.workers:
            if not worker.active_posts and (runs := self._startable_runs(worker)):
                self._start(worker, runs)
                has_moved = True
        return has_moved

    def _startable_runs(self, worker: FlowWorker) -> list[ItemRun]:
        """Take the next runnable item from each part of ``worker``."""
        runs = list[ItemRun]()
        for post in worker.posts:
            item = next(
                (
                    candidate
                    for candidate in post.inbox
                    if post.outbox < WAITING or self._is_awaited(candidate)
                ),
                None,
            )
            if item is not None:
                runs.append(ItemRun(post, item, item.results[post.stages[0]]))
        runs = next(([run] for run in runs if run.item.is_solo), runs)
        for post, item, _ in runs:
            post.inbox.remove(item)
        return runs

    def _is_awaited(self, item: FlowItem) -> bool:
        """Whether the next item to deliver needs ``item``. Queue limits do not apply then: every
        other item may wait for this one behind full devices."""
        return bool(self.order) and (
            item is self.order[0]
            or any(
                self.order[0] in result.followers
                for result in item.results.values()
                if not result.is_done
            )
        )

    def _pull(self, begin: int) -> bool:
        """Send items that wait before stage ``begin`` to the least loaded devices; whether any
        moved."""
        has_moved, queue = False, self.queues[begin]
        for item in list(queue):
            if self._skips(item):
                has_moved = True
                continue
            helping_posts = self._helping_posts(begin)
            choices = [
                (post, link)
                for post in self.posts
                if post.span[0] == begin
                and (
                    post in helping_posts
                    and post.coming + len(post.inbox) < WAITING
                    or self._is_awaited(item)
                )
                and (
                    link := self.placement.cluster.link(
                        item.host or post.assignment.device.host, post.assignment.device.host
                    )
                )
            ]
            if not choices:
                break
            queue.remove(item)
            post, link = min(
                choices, key=lambda pair: (pair[0].queued, pair[0].assignment.column.steady_seconds)
            )
            post.coming += 1
            self._release(item)
            self._promise(item, post)
            self._schedule_event(
                self._arrival(item, post, link), functools.partial(self._receive, post, item)
            )
            has_moved = True
        return has_moved

    def _helping_posts(self, begin: int) -> list[Post]:
        """Return the parts from stage ``begin`` on that help with one more item. A part helps if it
        finishes the item before the other parts with these stages finish all that remain."""
        item_count = sum(item.stage <= begin for item in self.order) - sum(
            post.queued for post in self.posts if post.span[0] == begin
        )
        helping_posts = []
        for span in {post.span for post in self.posts if post.span[0] == begin}:
            posts = [post for post in self.posts if post.span == span]
            # when a part has finished its items, and the seconds of one more
            times = [(self._ready_seconds(p), p.assignment.column.steady_seconds) for p in posts]
            for number, (post, (ready, seconds)) in enumerate(zip(posts, times, strict=True)):
                # Items that the other parts finish earlier. The 1 is an item that would end at the
                # same time. 1e-9 corrects rounding: 3.0000000001 items are 3.
                earlier_count = sum(
                    max(
                        0, math.ceil((ready + seconds - peer_ready) / peer_seconds * (1 - 1e-9)) - 1
                    )
                    for index, (peer_ready, peer_seconds) in enumerate(times)
                    if index != number
                )
                if earlier_count < item_count:
                    helping_posts.append(post)
        return helping_posts

    def _ready_seconds(self, post: Post) -> float:
        """Return when ``post`` has finished its items, by plan.

        The first run takes longer. Before it, the extra seconds (first minus steady) count as a
        wait, and each item takes steady seconds.
        """
        column, end = post.assignment.column, post.worker.end_seconds
        ready = max(self.clock, end or 0.0)
        if end is None:
            ready = max(ready, post.worker.loaded_seconds, column.ahead_seconds)
            ready += column.first_seconds - column.steady_seconds
        return ready + (post.coming + len(post.inbox)) * column.steady_seconds

    def _skips(self, item: FlowItem) -> bool:
        """Whether ``item`` skips its next stages: their result exists or another item makes it."""
        previous = item.results.get(self.names[item.stage])
        if previous is not None and previous.is_done:
            self._advance_item(item, previous)
            return True
        for span in sorted(
            {post.span for post in self.posts if post.span[0] == item.stage}, reverse=True
        ):
            stages = self.names[slice(*span)]
            if self._is_known(item, span):
                self._advance_item(item, FlowResult(span, is_done=True))
                return True
            if (shared_result := self.shared.get(self._key(item, stages))) is not None:
                for name in stages:
                    self.batch.shared[name] = self.batch.shared.get(name, 0) + 1
                if shared_result.is_done:
                    self._advance_item(item, shared_result)
                else:
                    self.queues[item.stage].remove(item)
                    self._release(item)
                    shared_result.followers.append(item)
                return True
        return False

    def _is_known(self, item: FlowItem, span: tuple[int, int]) -> bool:
        """Whether an earlier run saved the result of the stages ``span`` for ``item``. Stages in
        ``last``, which make outputs of the graph, always run."""
        stages = self.names[slice(*span)]
        return not self.last & set(stages) and all(
            self.values.has(item.number, name) for name in self._outputs(span)
        )

    def _key(self, item: FlowItem, stages: Sequence[str]) -> Any:
        """Return a key that is equal for items with equal results of ``stages``; None if
        unknown."""
        keys = tuple(item.work.keys.key(name) for name in stages)
        return keys if all(keys) else None

    def _advance_item(self, item: FlowItem, result: FlowResult) -> None:
        if item in self.queues[item.stage]:
            self.queues[item.stage].remove(item)
        item.results |= dict.fromkeys(self.names[slice(*result.span)], result)
        item.stage = result.span[1]
        bisect.insort(self.queues[item.stage], item, key=lambda other: other.number)

    def _arrival(self, item: FlowItem, post: Post, link: Link) -> float:
        """Return when the values of ``item`` arrive at the host of ``post``; items take turns on a
        link. Values already there arrive now. On the wall clock, the crew moves values later."""
        if not self.virtual or not item.host:
            return self.clock
        way = item.host, post.assignment.device.host
        self.free_seconds[way] = (
            max(self.clock, self.free_seconds[way])
            + self.nbytes[item.stage] / link.bytes_per_second
        )
        return self.free_seconds[way] + link.seconds

    def _receive(self, post: Post, item: FlowItem) -> None:
        post.coming -= 1
        bisect.insort(post.inbox, item, key=lambda other: other.number)

    def _release(self, item: FlowItem) -> None:
        """Stop counting the values of ``item`` as waiting behind their device."""
        if item.holder is not None:
            item.holder.outbox -= 1
            item.holder = None

    # -- runs

    def _promise(self, item: FlowItem, post: Post) -> None:
        """Record that ``post`` will run its stages for ``item``, so that equal items wait."""
        result = FlowResult(post.span)
        item.results |= dict.fromkeys(post.stages, result)
        if (key := self._key(item, post.stages)) is not None:
            self.shared[key] = result

    def _start(self, worker: FlowWorker, runs: Sequence[ItemRun]) -> None:
        """Start one run of ``worker`` with ``runs``, except requests that the watcher stops."""
        started_runs, visits = list[ItemRun](), list[Visit]()
        for run in runs:
            try:
                self.context.watcher.begins_on(
                    worker.assignment.name, run.post.stages, run.item.work.request
                )
            except LeftOut as error:
                self._drop(run.item, error)
                self._send_back(run.result.followers, [run.result], counts_as_loss=False)
                continue
            values = [
                self._handle(run.item, result) for result in self._sources(run.item, run.post)
            ]
            started_runs.append(run)
            visits.append(Visit(run.post.stages, run.item.work.request.inputs, values))
        if started_runs:
            ticket = self.crew.begin(worker.number, visits)
            worker.active_posts = [active.post for active in started_runs]
            start, column = max(self.clock, worker.loaded_seconds), worker.assignment.column
            is_first = worker.end_seconds is None
            seconds = column.first_seconds if is_first else column.steady_seconds
            worker.end_seconds = start + seconds
            self.active_runs[ticket] = started_runs, start

    def _sources(self, item: FlowItem, post: Post) -> list[FlowResult]:
        """Return the results of other stages that the stages of ``post`` read."""
        references = (
            reference for name in post.stages for reference in self.graph.stage(name).references
        )
        return list(
            dict.fromkeys(
                item.results[reference.name]
                for reference in references
                if reference.kind == "stage" and reference.name not in post.stages
            )
        )

    def _handle(self, item: FlowItem, result: FlowResult) -> ValueHandle:
        if result.handle is None:
            result.handle = self.crew.keep(
                {name: self.values.get(item.number, name) for name in self._outputs(result.span)}
            )
        return result.handle

    def _outputs(self, span: tuple[int, int]) -> list[str]:
        """Return the names of the values that the stages ``span`` make for others."""
        if span not in self.output_names:
            outputs = self.graph.part(self.names[slice(*span)]).outputs.values()
            self.output_names[span] = [str(output)[1:] for output in outputs]
        return self.output_names[span]

    def _advance(self) -> None:
        """Go to the next event. The virtual clock needs the reports of all active runs for that."""
        while self.active_runs and (self.virtual or not self.events):
            self.context.watcher.waits()
            for ticket in self.crew.finished(self.active_runs.keys(), wait_for_all=self.virtual):
                runs, start = self.active_runs.pop(ticket)
                report = self._report(ticket, runs[0].post.worker)
                end = (
                    start + report.seconds
                    if self.virtual
                    else time.monotonic() - self.start_seconds
                )
                self._schedule_event(
                    end, functools.partial(self._end_run, runs, ticket, report, start)
                )
        self.clock, _, happens = heapq.heappop(self.events)
        happens()

    def _report(self, ticket: Ticket, worker: FlowWorker) -> Report:
        try:
            report = self.crew.report(ticket)
        except GraphrunError as error:  # the worker died too often
            return Report(error=(type(error).__name__, str(error)))
        if worker.process not in (0, report.process):
            name, restarts = worker.assignment.name, self.batch.restarts
            restarts[name] = restarts.get(name, 0) + 1
            self.context.watcher.restarts_on(name)
        worker.process = report.process
        return report

    def _schedule_event(self, seconds: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self.events, (seconds, next(self.count), happens))

    def _end_run(
        self, runs: Sequence[ItemRun], ticket: Ticket, report: Report, start: float
    ) -> None:
        worker = runs[0].post.worker
        worker.active_posts, worker.end_seconds = [], self.clock
        if report.lost_values:
            for index, (post, item, result) in enumerate(runs):
                values = self._sources(item, post)
                if lost_results := [
                    values[number] for visit, number in report.lost_values if visit == index
                ]:
                    self._send_back([item, *result.followers], lost_results, result)
                else:
                    self._requeue(post, item)
            return
        try:
            report.require()  # raises the run's error, if any
        except BrokenPlan as error:
            if self.context.strict or isinstance(error, (OutOfMemory, TransferFailed)):
                raise
            for post, item, result in runs:
                if len(runs) > 1:  # run each item alone, to see which one fails
                    item.is_solo = True
                    self._requeue(post, item)
                    continue
                for sharer in [item, *result.followers]:
                    self._drop(sharer, error)
            return
        if report.trace is not None:
            # the trace begins with ``ahead_seconds`` of loads that the worker did in advance
            begin, end = (
                self.before_seconds + max(0.0, start - report.ahead_seconds),
                self.before_seconds + self.clock,
            )
            stages = {phase.name: phase.stage for phase in worker.segment.solution.chosen.phases}
            for (post, item, _), (trace, *times) in zip(
                runs, trace_parts(report.trace, begin, end, runs, stages), strict=True
            ):
                self.batch.lanes.append(
                    Lane(
                        worker.assignment.name, item.number, post.stages, times[0], times[1], trace
                    )
                )
                self.batch.traces.append((post.stages, item.number, trace))
            for note in report.trace.notes:
                self.context.watcher.planned_again(f"{worker.assignment.name}: {note}")
        for index, (post, item, result) in enumerate(runs):
            sharers = [item, *result.followers]
            result.handle, result.is_done, result.followers = (
                self.crew.result(ticket, index),
                True,
                [],
            )
            item.holder, item.is_solo = post, False
            post.outbox += 1
            self._save(sharers, post, result)
            for sharer in sharers:
                sharer.host = post.assignment.device.host
                self._advance_item(sharer, result)
        pending_stages = sum(len(self.names) - other.stage for other in self.order)
        done_fraction = 1 - pending_stages / (len(self.names) * self.request_count)
        for post, item, _ in runs:
            self.context.watcher.ran_on(
                worker.assignment.name, post.stages, item.work.request, done_fraction
            )

    def _requeue(self, post: Post, item: FlowItem) -> None:
        """Put ``item``, whose values still exist, back into the inbox of ``post``."""
        bisect.insort(post.inbox, item, key=lambda other: other.number)

    def _save(self, sharers: Sequence[FlowItem], post: Post, result: FlowResult) -> None:
        """Save the outputs of stages in the journal and in the output cache.

        A saved stage needs all its outputs. Outputs that only the same device reads are not in the
        crew's store, so a stage with such an output is not saved.
        """
        names = [name for name in post.stages if name not in self.last]
        if not names or all(
            sharer.work.journal is None and sharer.work.reuse is None for sharer in sharers
        ):
            return
        try:
            values = self.crew.fetch(result.handle)
        except LostValue:
            return  # items that read it make it again
        for name in names:
            outputs = {
                output: values.get(f"{name}.{output}") for output in self.graph.stage(name).outputs
            }
            if any(value is None for value in outputs.values()):
                continue
            if (reuse := sharers[0].work.reuse) is not None:
                reuse.keep(name, outputs, choices_of(post.worker.segment.solution))
            for sharer in sharers:
                if sharer.work.journal is not None:
                    sharer.work.journal.keep(name, outputs)

    def _send_back(
        self,
        items: Sequence[FlowItem],
        lost_results: Sequence[FlowResult],
        failed: FlowResult | None = None,
        *,
        counts_as_loss: bool = True,
    ) -> None:
        """Send ``items`` back to the stages that make ``lost_results``.

        ``failed``: the result that could not be made without them. ``counts_as_loss``: whether this
        counts towards LOSSES.
        """
        invalid = [*lost_results, *([failed] if failed is not None else [])]
        for key in [key for key, result in self.shared.items() if result in invalid]:
            del self.shared[key]
        for item in items:
            self._release(item)
            item.losses += counts_as_loss
            if item.losses > LOSSES:
                self._drop(item, BrokenPlan(f"its values were lost {item.losses} times"))
                continue
            item.results = {
                name: result for name, result in item.results.items() if result not in invalid
            }
            item.stage, item.host = min(result.span[0] for result in invalid), ""
            bisect.insort(self.queues[item.stage], item, key=lambda other: other.number)

    # -- finished items

    def _deliver(self) -> bool:
        """Deliver, in order, the outputs of finished items. Return whether there was one."""
        finished_items, has_moved = self.queues[len(self.names)], False
        while self.order and self.order[0] in finished_items:
            item = self.order[0]
            finished_items.remove(item)
            results = {
                reference.name: item.results[reference.name]
                for reference in self.graph.outputs.values()
            }
            has_moved = True
            try:
                values = {id(result): self.crew.fetch(result.handle) for result in results.values()}
            except LostValue:
                self._send_back([item], list(results.values()))
                break
            self._release(item)
            self.order.popleft()
            self._finish(
                item.work,
                {
                    name: values[id(results[reference.name])][name]
                    for name, reference in self.graph.outputs.items()
                },
            )
        return has_moved

    def _drop(self, item: FlowItem, error: GraphrunError) -> None:
        self._release(item)
        self.order.remove(item)
        self._fail(item.work, error)


def segments_of(graph: Graph, placement: Placement) -> tuple[StageSegment, ...]:
    """Return the part of ``graph`` that each device runs, with its plan. Raises PlanError if two
    devices would make different bits."""
    segments, choice_of = list[StageSegment](), dict[str, Any]()
    for assignment in placement.assignments:
        assert assignment.column.solution is not None
        parts = [
            graph.part(placement.stages[slice(*span)])
            for span in parts_of(placement.stages, assignment.stages)
        ]
        outputs = {name: output for part in parts for name, output in part.outputs.items()}
        segments.append(
            StageSegment(
                assignment.stages,
                replace(graph.part(assignment.stages), outputs=outputs),
                assignment.column.solution,
            )
        )
        choices = choices_of(assignment.column.solution)
        for name, choice in [
            *choices.variants.items(),
            *((f"stage {stage}", option) for stage, option in choices.options.items()),
        ]:
            if choice_of.setdefault(name, choice) != choice:
                raise PlanError(
                    f"{assignment.name} runs {name} in another way than a device before it, "
                    "which changes the output"
                )
    return tuple(segments)
