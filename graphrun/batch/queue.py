"""Runs a list of requests by the schedule that is predicted fastest, and resumes where an earlier process was killed.

requests -> skip those that are done -> group by settings (equal sizes: one problem) -> fastest schedule
         -> groups of requests that fit RAM and disk -> segments -> runs; stage outputs are cached, shared, or wait
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graphrun.batch.cache.keys import Keys, choices_of, dependencies
from graphrun.batch.cache.reuse import Reuse
from graphrun.batch.journal import Journal, RequestJournal
from graphrun.batch.requests import Request
from graphrun.batch.schedule import Schedule, Segment, schedules, segment_of
from graphrun.batch.waiting import Values
from graphrun.batch.watch import Watcher
from graphrun.errors import BrokenPlan, GraphrunError, InputError, OutOfMemory, TransferFailed
from graphrun.graph.graph import Graph
from graphrun.graph.media import fingerprint
from graphrun.graph.settings import settings_of
from graphrun.model.precomputed import shortened
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.modules.build import resolve_class
from graphrun.ops.loops import why_not
from graphrun.runtime.devices.device import Device
from graphrun.runtime.devices.open import open_device
from graphrun.runtime.executor import Session, refuse_unfit, stages_for
from graphrun.runtime.host import Host
from graphrun.runtime.recovery import run_to_the_end
from graphrun.trace import Trace

Sink = Callable[[Request, Mapping[str, Any]], Iterable[Path]]
"""Receives the outputs of a finished request, and returns the files it wrote."""


@dataclass(slots=True)
class Batch:
    """The results of a list of requests.

    ``outputs`` and ``errors`` are by request number; outputs that a sink took are not among them. ``done_before``: requests that an
    earlier process finished.
    """

    outputs: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    done_before: tuple[int, ...] = ()
    schedules: list[Schedule] = field(default_factory=list)
    traces: list[tuple[tuple[str, ...], int, Trace]] = field(default_factory=list)  # stages, request number, trace
    shared: dict[str, int] = field(default_factory=dict)  # stage -> runs saved: outputs cached or equal to another request's

    @property
    def seconds(self) -> float:
        """Seconds of all runs, measured on the device's clock."""
        return sum(trace.seconds for _, _, trace in self.traces)

    @property
    def moved_bytes(self) -> int:
        """Bytes of weights copied to the device in all runs."""
        return sum(trace.moved_bytes for _, _, trace in self.traces)


@dataclass(frozen=True, slots=True)
class BatchContext:
    """What a batch runs with.

    ``estimate(values)`` returns the problem for input values, ``solve`` a plan for it. ``reuse(values)`` returns the output cache
    for them; None: no cache. ``device_name`` is part of the cache keys, since outputs may differ between devices. ``device``: None
    opens the one of the first problem.
    """

    estimate: Callable[[Mapping[str, Any]], Problem]
    solve: Callable[[Problem], Solution]
    device_name: str
    reuse: Callable[[Mapping[str, Any]], Reuse] | None = None
    modules: Mapping[str, Any] | None = None
    journal: Journal | None = None
    device: Device | None = None
    sink: Sink | None = None
    watcher: Watcher = field(default_factory=Watcher)
    strict: bool = False  # raise the error of the first request that fails


def run_requests(graph: Graph, requests: Sequence[Request], context: BatchContext) -> Batch:
    """Runs every request that has no error. Requests with equal settings share plans and loaded weights.

    A request whose run fails on the device gets an error and the others run, unless ``context.strict``. Raises what planning
    raises, and InputError where the journal is of another batch or cannot be written; outputs finished by then are with the sink.
    Closes the journal.
    """
    with contextlib.ExitStack() as closing:
        if context.journal is not None:
            closing.callback(context.journal.close)
        return _run_requests(graph, requests, context)


def _run_requests(graph: Graph, requests: Sequence[Request], context: BatchContext) -> Batch:
    batch = Batch()
    for request in requests:
        if request.error:
            batch.errors[request.number] = request.error
            context.watcher.left_out(request)
    good, device = [request for request in requests if not request.error], context.device
    if context.journal is not None:
        inputs = {f"inputs of request {request.number}": _fingerprint(request) for request in good}
        context.journal.require(dependencies(graph, context.device_name) | inputs)
        batch.done_before = tuple(request.number for request in good if context.journal.request(request.number).done)
        for number in batch.done_before:
            context.journal.request(number).tidy()
        for stage, why in restarting_loops(graph):
            context.watcher.restarts(stage, why)
    for same in _by_settings(graph, [request for request in good if request.number not in batch.done_before]):
        problem = context.estimate(same[0].inputs)
        device = device or open_device(problem)
        _Runner(graph, problem, same, context, device, batch).run()
    return batch


def restarting_loops(graph: Graph) -> list[tuple[str, str]]:
    """The stages whose loops cannot resume at a step but restart at their first, each with the reason."""
    why = why_not(resolve_class(graph.pipeline, graph.trust, graph.where, "pipeline"))
    return [(stage.name, why) for stage in graph.stages if why and stage.op == "denoise"]


def _by_settings(graph: Graph, requests: Sequence[Request]) -> list[list[Request]]:
    """Requests grouped by equal settings (the inputs that sizes and times depend on), in the order of their first ones."""
    found: dict[tuple[tuple[str, str], ...], list[Request]] = {}
    for request in requests:
        found.setdefault(settings_of(graph, request.inputs), []).append(request)
    return list(found.values())


def _fingerprint(request: Request) -> str:
    return str(sorted((name, fingerprint(value)) for name, value in request.inputs.items()))


class _Runner:
    """Runs requests with equal settings."""

    def __init__(
        self, graph: Graph, problem: Problem, requests: Sequence[Request], context: BatchContext, device: Device, batch: Batch
    ) -> None:
        self.graph, self.problem, self.requests = graph, problem, list(requests)
        self.context, self.device, self.batch = context, device, batch
        self.reuse = {request.number: context.reuse(request.inputs) for request in requests} if context.reuse is not None else {}
        self.keys = {request.number: self._keys_of(request) for request in requests}
        self.last = {reference.name for reference in graph.outputs.values()}
        self.ready: dict[int, dict[str, Any]] = {}  # outputs of the graph, until all of a request's are there

    def run(self) -> None:
        """Runs all requests."""
        with Values(self.problem.ram_bytes) as values:
            self.values = values
            found = {request.number: self._found(request) for request in self.requests}
            for request in list(self.requests):
                self._resume_loop(request, found[request.number])
            counts = {stage.name: len(self._distinct((stage.name,), self.requests)) for stage in self.graph.stages}
            for stage, number in counts.items():
                self.batch.shared[stage] = self.batch.shared.get(stage, 0) + len(self.requests) - number
            if not self.requests:
                return
            schedule = schedules(self.graph, self.problem, counts, len(self.requests), self.context.solve)[0]
            values.ram_bytes = schedule.room_bytes
            self._require_choices(schedule)
            self.batch.schedules.append(schedule)
            self.context.watcher.schedule(schedule, counts)
            requests = list(self.requests)
            for begin in range(0, len(requests), schedule.group):
                for segment in schedule.segments:
                    self._segment(segment, requests[begin : begin + schedule.group])

    def _found(self, request: Request) -> set[str]:
        """The stages of ``request`` whose outputs are known: in the journal or in the cache. Stores these in ``values``."""
        found = set[str]()
        if self.context.journal is not None:
            journal = self.context.journal.request(request.number)
            for stage in self.graph.stages:
                if stage.name not in self.last and (outputs := journal.values(stage.name)) is not None:
                    self._put(request, stage.name, outputs)
                    found.add(stage.name)
        if request.number in self.reuse:
            for name, value in self.reuse[request.number].find().items():
                if not self.values.has(request.number, name):
                    self.values.put(request.number, name, value)
                found.add(name.partition(".")[0])
        return found

    def _resume_loop(self, request: Request, found: set[str]) -> None:
        """Finishes a loop that was interrupted, from its last saved step. ``found``: stages whose outputs are known."""
        journal = self._journal(request)
        for stage in self.graph.stages:
            state = journal.state(stage.name) if journal is not None else None
            if journal is None or state is None:
                continue
            own, problem = segment_of(self.graph, self.problem, (stage.name,), 1)
            if not {reference.name for reference in own.precomputed} <= found:
                journal.forget(stage.name)
                continue
            try:
                problem = shortened(problem, {stage.name: (state.done, state.steps)})
            except InputError as error:
                self._restart(request, stage.name, error)
                continue
            segment = Segment((stage.name,), own, self.context.solve(problem))
            try:
                self._session(segment, [[request]], (OutOfMemory, TransferFailed))
            except BrokenPlan as error:  # the saved state does not fit the loop
                self._restart(request, stage.name, error)

    def _restart(self, request: Request, stage: str, why: GraphrunError) -> None:
        if (journal := self._journal(request)) is not None:
            journal.forget(stage)
        self.context.watcher.restarts(f"{stage} of request {request.number}", str(why))

    def _segment(self, segment: Segment, requests: Sequence[Request]) -> None:
        """Runs ``segment`` as a session over the distinct ones of ``requests``; equal requests share the outputs."""
        if todo := self._distinct(segment.stages, [request for request in requests if request in self.requests]):
            self._session(segment, todo, (BrokenPlan,))

    def _session(self, segment: Segment, todo: Sequence[Sequence[Request]], failures: tuple[type[GraphrunError], ...]) -> None:
        """One run for the first request of each list in ``todo``, whose outputs all of the list share.

        An error of a type in ``failures`` is recorded for all of the list; others are raised.
        """
        solution = segment.solution
        refuse_unfit(solution, segment.graph)
        self.context.watcher.segment(segment, len(todo))
        host = Host.of_graph(segment.graph, solution.chosen, self.device, self.context.modules)
        with Session(solution, host, self.device) as session:
            for first, *others in todo:
                if solution.problem.runs == 1:  # a plan for one run: the next starts with an empty device
                    session.close()
                arguments = self._arguments(segment.graph, first, solution)
                stages = stages_for(solution.plan, segment.graph, first.inputs, self.device, host, **arguments)
                progress, tell = self.context.watcher.run(segment, first), self.context.watcher.planned_again
                try:
                    trace = run_to_the_end(solution, stages, host, self.device, progress, tell=tell, session=session)
                except failures as error:  # the device is empty again
                    self._fail((first, *others), error)
                    continue
                self.batch.traces.append((segment.stages, first.number, trace))
                self._finish(segment.graph, first, trace, (first, *others))

    def _arguments(self, graph: Graph, request: Request, solution: Solution) -> dict[str, Any]:
        """Further arguments of `stages_for`: precomputed values, the journal, and the callback after each stage."""
        precomputed = {str(reference)[1:]: self.values.get(request.number, str(reference)[1:]) for reference in graph.precomputed}
        choices, journal = choices_of(solution), self._journal(request)

        def after_stage(stage: str, outputs: Mapping[str, Any]) -> None:
            if request.number in self.reuse:
                self.reuse[request.number].keep(stage, outputs, choices)
            if journal is not None and stage not in self.last:
                journal.keep(stage, outputs)

        return {"precomputed": precomputed, "journal": journal, "after_stage": after_stage}

    def _finish(self, graph: Graph, request: Request, trace: Trace, owners: Sequence[Request]) -> None:
        """Stores the outputs of a run for all ``owners``: values for later segments wait, outputs of the graph go to the sink."""
        outputs = trace.outputs
        for owner in owners:
            for name, value in outputs.items():
                if name not in self.graph.outputs:
                    self.values.put(owner.number, name, value)
                    if owner is not request and (journal := self._journal(owner)) is not None:
                        stage, _, output = name.partition(".")
                        journal.keep(stage, {output: value})
            ready = self.ready.setdefault(owner.number, {})
            ready |= {name: value for name, value in outputs.items() if name in self.graph.outputs}
            if ready.keys() == self.graph.outputs.keys():
                self._deliver(owner, self.ready.pop(owner.number))

    def _deliver(self, request: Request, outputs: Mapping[str, Any]) -> None:
        files = list(self.context.sink(request, outputs)) if self.context.sink is not None else []
        if self.context.sink is None:
            self.batch.outputs[request.number] = outputs
        if (journal := self._journal(request)) is not None:
            journal.finish(files)
        self.values.drop(request.number)
        self.requests.remove(request)
        self.context.watcher.done(request, files)

    def _fail(self, owners: Sequence[Request], error: GraphrunError) -> None:
        """Records ``error`` for ``owners``. Their journals stay, so that the same batch can run them again."""
        if self.context.strict:
            raise error
        for owner in owners:
            self.batch.errors[owner.number] = str(error)
            self.context.watcher.left_out(replace(owner, error=str(error)))
            self.values.drop(owner.number)
            self.requests.remove(owner)

    def _distinct(self, stages: Sequence[str], requests: Sequence[Request]) -> list[list[Request]]:
        """Requests whose outputs of ``stages`` are still missing, those with equal outputs in one list."""
        wanted = [str(reference)[1:] for reference in self.graph.part(stages).outputs.values()]
        found: dict[Any, list[Request]] = {}
        for request in requests:
            if any(not self.values.has(request.number, name) for name in wanted):
                keys = [self.keys[request.number].key(stage) for stage in stages]
                found.setdefault(tuple(keys) if all(keys) else request.number, []).append(request)
        return list(found.values())

    def _keys_of(self, request: Request) -> Keys:
        """Keys that tell which requests have equal outputs. Without a cache files are not read: they are equal for all."""
        if request.number in self.reuse:
            return self.reuse[request.number].keys
        return Keys(self.graph, request.inputs, self.context.device_name, str)

    def _require_choices(self, schedule: Schedule) -> None:
        """Saves the plans' choices in the journal, or compares them: another precision would give other outputs."""
        if self.context.journal is None or not self.problem.allow:
            return
        entries: dict[str, str] = {}
        for segment in schedule.segments:
            choices = choices_of(segment.solution)
            entries |= {f"variant of {name}": " on the ".join(variant) for name, variant in choices.variants.items()}
            entries |= {f"option of {name}": option for name, option in choices.options.items()}
        settings = " ".join(f"{name}={value}" for name, value in self.problem.settings)
        self.context.journal.require(entries, f"choices {settings}")

    def _put(self, request: Request, stage: str, outputs: Mapping[str, Any]) -> None:
        for name, value in outputs.items():
            self.values.put(request.number, f"{stage}.{name}", value)

    def _journal(self, request: Request) -> RequestJournal | None:
        return self.context.journal.request(request.number) if self.context.journal is not None else None
