"""Run a list of requests by the fastest schedule; resume after a kill.

    requests -> skip finished ones -> group by settings (equal sizes: one problem)
             -> fastest schedule -> groups of requests that fit RAM and disk -> segments -> runs

Stage outputs are cached, shared between requests, or wait for later segments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graphrun.batch.cache.keys import StageKeys, choices_of, dependencies
from graphrun.batch.cache.reuse import Reuse
from graphrun.batch.journal import Journal, RequestJournal
from graphrun.batch.requests import Request
from graphrun.batch.running import Running
from graphrun.batch.schedule import Schedule, StageSegment, schedules, segment_of
from graphrun.batch.waiting import WaitingValues
from graphrun.batch.watch import LeftOut, Watcher
from graphrun.devices import as_opened
from graphrun.errors import BrokenPlan, GraphrunError, InputError, OutOfMemory, TransferFailed
from graphrun.graph.graph import Graph
from graphrun.graph.media import fingerprint
from graphrun.graph.settings import settings_of
from graphrun.model.precomputed import with_fewer_steps
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.modules.build import resolve_class
from graphrun.ops.loops import resume_obstacle
from graphrun.runtime.devices.device import Device
from graphrun.runtime.devices.open import open_device
from graphrun.runtime.host import Host
from graphrun.runtime.spool import Spool
from graphrun.trace import Lane, Overrun, Trace, verdict

Sink = Callable[[Request, Mapping[str, Any]], Iterable[Path]]
"""Receives the outputs of a finished request, and returns the files that it wrote."""


@dataclass(slots=True)
class Batch:
    """The results of a list of requests.

    ``outputs`` and ``errors`` are by request number; outputs that went to a sink are not included.
    ``done_before``: requests that an earlier process finished. ``lanes``: the runs on the devices
    of a cluster; empty on one device. ``restarts``: how often the process of a device ended and was
    started again.
    """

    outputs: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    done_before: tuple[int, ...] = ()
    schedules: list[Schedule] = field(default_factory=list)
    # (stages, request number, trace)
    traces: list[tuple[tuple[str, ...], int, Trace]] = field(default_factory=list)
    # by stage: runs saved, because outputs are cached or equal to another request's
    shared: dict[str, int] = field(default_factory=dict)
    lanes: list[Lane] = field(default_factory=list)
    restarts: dict[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds of all runs, measured on the device's clock. On several devices: until the last
        run ends."""
        if self.lanes:
            return max(lane.end_seconds for lane in self.lanes)
        return sum(trace.seconds for _, _, trace in self.traces)

    @property
    def overruns(self) -> tuple[Overrun, ...]:
        """The slots of all runs that took more than planned."""
        return tuple(overrun for _, _, trace in self.traces for overrun in trace.overruns)

    @property
    def verdict(self) -> str:
        """Whether all runs matched their plans (`graphrun.trace.verdict`)."""
        return verdict(self.overruns, sum(len(trace.notes) for _, _, trace in self.traces))

    @property
    def moved_bytes(self) -> int:
        """Bytes of weights copied to the device in all runs."""
        return sum(trace.moved_bytes for _, _, trace in self.traces)


@dataclass(frozen=True, slots=True)
class BatchContext:
    """Everything that a batch runs with.

    ``estimate(values)`` returns the problem for input values, and ``solve`` a plan for it.
    ``reuse(values)`` returns the output cache for them; None: no cache. ``device_name``: part of
    the cache keys, since outputs may differ between devices. ``device``: None opens the device of
    the first problem. ``strict``: raise the error of the first request that fails. ``segments``: as
    for `schedules`. ``host``: backing stores of the whole graph, used instead of ``modules``; each
    segment uses its part. ``spool``: as for `Running`.
    ``dispatch(graph, requests, context, batch)`` runs requests of equal settings instead of this
    process.
    """

    estimate: Callable[[Mapping[str, Any]], Problem]
    solve: Callable[[Problem], Solution]
    device_name: str
    reuse: Callable[[Mapping[str, Any]], Reuse] | None
    modules: Mapping[str, Any] | None
    journal: Journal | None
    device: Device | None
    sink: Sink | None
    watcher: Watcher
    strict: bool
    segments: tuple[tuple[str, ...], ...] | None = None
    host: Host | None = None
    spool: Spool | None = None
    dispatch: Callable[[Graph, Sequence[Request], BatchContext, Batch], None] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RequestWork:
    """An unfinished request, with its journal and cache. ``ready``: the graph's outputs so far."""

    request: Request
    keys: StageKeys
    reuse: Reuse | None
    journal: RequestJournal | None
    ready: dict[str, Any] = field(default_factory=dict)


def run_requests(graph: Graph, requests: Sequence[Request], context: BatchContext) -> Batch:
    """Run every request that has no error.

    Requests with equal settings share plans and loaded weights. A request whose run fails on the
    device gets an error, and the others run, unless ``context.strict``. Raises planning errors, and
    InputError if the journal belongs to another batch or cannot be written; finished outputs have
    reached the sink by then. Closes the journal.
    """
    batch, device = Batch(), context.device
    with (
        contextlib.nullcontext() if context.journal is None else contextlib.closing(context.journal)
    ):
        for request in requests:
            if request.error:
                batch.errors[request.number] = request.error
                context.watcher.left_out(request)
        good = [request for request in requests if not request.error]
        if context.journal is not None:
            inputs = {
                f"inputs of request {request.number}": _fingerprint(request) for request in good
            }
            context.journal.require(dependencies(graph, context.device_name) | inputs)
            finished = {
                request.number: journal
                for request in good
                if (journal := context.journal.request(request.number)).done
            }
            for journal in finished.values():
                journal.tidy()
            batch.done_before = tuple(finished)
            for stage, reason in restarting_loops(graph):
                context.watcher.restarts(stage, reason)
        by_settings: dict[Any, list[Request]] = {}  # by the inputs that sizes and times depend on
        for request in good:
            if request.number not in batch.done_before:
                by_settings.setdefault(settings_of(graph, request.inputs), []).append(request)
        for group in by_settings.values():
            if context.dispatch is not None:
                context.dispatch(graph, group, context, batch)
                continue
            problem = context.estimate(group[0].inputs)
            device = device or open_device(problem)
            problem = replace(problem, hardware=as_opened(problem.hardware, device))
            _Runner(graph, problem, group, context, device, batch).run()
    return batch


def restarting_loops(graph: Graph) -> list[tuple[str, str]]:
    """Return the stages whose loops cannot resume, only restart, each with the reason."""
    loops = []
    for stage in graph.stages:
        if stage.op == "denoise":
            pipeline = graph.pipeline_called(stage.pipeline)
            if reason := resume_obstacle(
                resolve_class(pipeline.class_path, graph.trust, pipeline.file_line, "pipeline")
            ):
                loops.append((stage.name, reason))
    return loops


def _fingerprint(request: Request) -> str:
    return str(sorted((name, fingerprint(value)) for name, value in request.inputs.items()))


class Works:
    """Requests with equal settings: known values, and how they end. ``ram_bytes``: for waiting
    values."""

    def __init__(
        self,
        graph: Graph,
        requests: Sequence[Request],
        context: BatchContext,
        batch: Batch,
        ram_bytes: int,
    ) -> None:
        self.graph, self.context, self.batch = graph, context, batch
        self.last = {reference.name for reference in graph.outputs.values()}
        self.values, self.todo = (
            WaitingValues(ram_bytes),
            [self._work(request) for request in requests],
        )

    def _work(self, request: Request) -> RequestWork:
        """Return ``request`` with its keys; requests with equal keys have equal outputs. Without a
        cache, files are not read: they are equal for all requests."""
        context = self.context
        reuse = context.reuse(request.inputs) if context.reuse is not None else None
        keys = (
            StageKeys(self.graph, request.inputs, context.device_name, str)
            if reuse is None
            else reuse.keys
        )
        return RequestWork(
            request,
            keys,
            reuse,
            context.journal.request(request.number) if context.journal is not None else None,
        )

    def _load_values(self, work: RequestWork) -> set[str]:
        """Load the outputs of ``work`` from journal and cache into ``values``. Return their
        stages."""
        values: dict[str, Any] = {}
        for stage in self.graph.stages:
            if work.journal is not None and stage.name not in self.last:
                outputs = work.journal.values(stage.name) or {}
                values |= {f"{stage.name}.{name}": value for name, value in outputs.items()}
        if work.reuse is not None:
            values = work.reuse.find() | values
        for name, value in values.items():
            self.values.put(work.request.number, name, value)
        return {name.partition(".")[0] for name in values}

    def _finish(self, work: RequestWork, outputs: Mapping[str, Any]) -> None:
        """Store the ``outputs`` of a run. Values for later segments wait; the sink gets all outputs
        of the graph together."""
        number = work.request.number
        for name, value in outputs.items():
            if name in self.graph.outputs:
                work.ready[name] = value
            else:
                self.values.put(number, name, value)
        if work.ready.keys() != self.graph.outputs.keys():
            return
        files = list[Path]()
        if self.context.sink is not None:
            files += self.context.sink(work.request, work.ready)
        else:
            self.batch.outputs[number] = work.ready
        if work.journal is not None:
            work.journal.finish(files)
        self.values.drop(number)
        self.todo.remove(work)
        self.context.watcher.done(work.request, files)

    def _fail(self, work: RequestWork, error: GraphrunError) -> None:
        """Record ``error``. The journal stays, so that the batch can run the request again."""
        self.batch.errors[work.request.number] = str(error)
        self.context.watcher.left_out(replace(work.request, error=str(error)))
        self.values.drop(work.request.number)
        self.todo.remove(work)

    def _require_choices(self, schedule: Schedule) -> None:
        """Save the plans' choices in the journal, or compare: other precisions give other
        outputs."""
        problem = schedule.segments[0].solution.problem
        if self.context.journal is None or not problem.allow:
            return
        entries: dict[str, str] = {}
        for segment in schedule.segments:
            choices = choices_of(segment.solution)
            entries |= {
                f"variant of {name}": " on the ".join(variant)
                for name, variant in choices.variants.items()
            }
            entries |= {f"option of {name}": option for name, option in choices.options.items()}
            entries |= {"blocks": "compiled"} if choices.compiled else {}
        settings = " ".join(f"{name}={value}" for name, value in problem.settings)
        self.context.journal.require(entries, f"choices {settings}")


class _Runner(Works):
    """Runs requests with equal settings on one device."""

    def __init__(
        self,
        graph: Graph,
        problem: Problem,
        requests: Sequence[Request],
        context: BatchContext,
        device: Device,
        batch: Batch,
    ) -> None:
        super().__init__(graph, requests, context, batch, problem.ram_bytes)
        self.problem, self.device = problem, device

    def run(self) -> None:
        with self.values:
            for work, stage_names in [(work, self._load_values(work)) for work in self.todo]:
                self._resume_loop(work, stage_names)
            counts = {
                stage.name: len(self._group_equal((stage.name,), self.todo))
                for stage in self.graph.stages
            }
            for stage, number in counts.items():
                self.batch.shared[stage] = self.batch.shared.get(stage, 0) + len(self.todo) - number
            if not self.todo:
                return
            schedule = schedules(
                self.graph,
                self.problem,
                counts,
                len(self.todo),
                self.context.solve,
                self.context.segments,
            )[0]
            self.values.ram_bytes = schedule.room_bytes
            self._require_choices(schedule)
            self.batch.schedules.append(schedule)
            self.context.watcher.schedule(schedule, counts)
            works = list(self.todo)
            for begin in range(0, len(works), schedule.group):
                for segment in schedule.segments:
                    group = [
                        work for work in works[begin : begin + schedule.group] if work in self.todo
                    ]
                    if distinct := self._group_equal(segment.stages, group):
                        self._session(segment, distinct, (BrokenPlan, LeftOut))

    def _resume_loop(self, work: RequestWork, stage_names: set[str]) -> None:
        """Finish an interrupted loop from its last saved step. ``stage_names``: stages with known
        outputs."""
        for stage in self.graph.stages:
            if work.journal is None or (state := work.journal.state(stage.name)) is None:
                continue
            stage_graph, problem = segment_of(self.graph, self.problem, (stage.name,), 1)
            if not {reference.name for reference in stage_graph.precomputed} <= stage_names:
                work.journal.forget(stage.name)
                continue
            try:
                problem = with_fewer_steps(
                    problem, {stage.name: (state.finished_steps, state.steps)}
                )
            except InputError as error:
                self._restart(work, stage.name, error)
                continue
            segment = StageSegment((stage.name,), stage_graph, self.context.solve(problem))
            try:
                self._session(segment, [[work]], (OutOfMemory, TransferFailed, LeftOut))
            except BrokenPlan as error:  # the saved state does not fit the loop
                self._restart(work, stage.name, error)

    def _restart(self, work: RequestWork, stage: str, reason: GraphrunError) -> None:
        if work.journal is not None:
            work.journal.forget(stage)
        self.context.watcher.restarts(f"{stage} of request {work.request.number}", str(reason))

    def _session(
        self,
        segment: StageSegment,
        todo: Sequence[Sequence[RequestWork]],
        failures: tuple[type[GraphrunError], ...],
    ) -> None:
        """Run ``segment`` as a session, once for each list of requests in ``todo``.

        The requests of a list share the outputs. An error of a type in ``failures`` is recorded for
        the whole list; others are raised.
        """
        watcher = self.context.watcher
        watcher.segment(segment, len(todo))
        context = self.context
        with Running(
            segment, self.device, context.modules, context.host, context.spool
        ) as segment_run:
            for works in todo:
                request = works[0].request
                arguments = self._arguments(segment.graph, works, segment.solution)
                try:
                    progress, tell = watcher.run(segment, request), watcher.planned_again
                    trace = segment_run.run(request.inputs, progress, tell, **arguments)
                except failures as error:  # the device is empty again
                    if self.context.strict:
                        raise
                    for work in works:
                        self._fail(work, error)
                else:
                    self.batch.traces.append((segment.stages, request.number, trace))
                    watcher.ran(segment, [work.request for work in works], trace)
                    for work in works:
                        self._finish(work, trace.outputs)

    def _arguments(
        self, graph: Graph, works: Sequence[RequestWork], solution: Solution
    ) -> dict[str, Any]:
        """Return further arguments of `stages_for`: precomputed values, journal, callback after a
        stage."""
        first, names = works[0], [str(reference)[1:] for reference in graph.precomputed]
        choices = choices_of(solution)

        def after_stage(stage: str, outputs: Mapping[str, Any]) -> None:
            if first.reuse is not None:
                first.reuse.keep(stage, outputs, choices)
            for work in works:
                if work.journal is not None and stage not in self.last:
                    work.journal.keep(stage, outputs)

        precomputed = {name: self.values.get(first.request.number, name) for name in names}
        return {"precomputed": precomputed, "journal": first.journal, "after_stage": after_stage}

    def _group_equal(
        self, stages: Sequence[str], works: Sequence[RequestWork]
    ) -> list[list[RequestWork]]:
        """Return the requests without outputs of ``stages``, equal ones in one list."""
        names = [str(reference)[1:] for reference in self.graph.part(stages).outputs.values()]
        groups: dict[Any, list[RequestWork]] = {}
        for work in works:
            if not all(self.values.has(work.request.number, name) for name in names):
                keys = tuple(work.keys.key(stage) for stage in stages)
                groups.setdefault(keys if all(keys) else work, []).append(work)
        return list(groups.values())
