"""Runs a graph for a list of inputs, by the course that is predicted fastest, and goes on where an earlier run was killed.

Decides what is left to do; how it is done says each leg's plan. Knows no terminal.

    items -> those that are done leave -> by settings (equal sizes, one problem) -> the fastest course -> groups -> legs -> runs
                                                                                          a value made is kept, shared, or waits
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graphrun.batch.cache.keys import Keys, facts, way_of
from graphrun.batch.cache.reuse import Reuse
from graphrun.batch.journal import Journal, RequestJournal
from graphrun.batch.requests import Request
from graphrun.batch.schedule import Schedule, Segment, schedules, segment_of
from graphrun.batch.waiting import Values
from graphrun.batch.watch import Watcher
from graphrun.errors import BrokenPlan, GraphrunError, InputError, OutOfMemory, TransferFailed
from graphrun.graph.graph import Graph
from graphrun.graph.media import named
from graphrun.graph.settings import settings_of
from graphrun.model.choices import apply_choices
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
from graphrun.verify.simulate import simulate

Sink = Callable[[Request, Mapping[str, Any]], Iterable[Path]]
"""Takes a finished item's outputs, and says in which files they are."""


@dataclass(slots=True)
class Batch:
    """What came of a list of inputs: by number of the item, its outputs (where no sink took them) or why there are none."""

    outputs: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    done_before: tuple[int, ...] = ()
    schedules: list[Schedule] = field(default_factory=list)
    traces: list[tuple[tuple[str, ...], int, Trace]] = field(default_factory=list)  # stages, item, what was measured
    shared: dict[str, int] = field(default_factory=dict)  # stage -> runs that were not needed: outputs kept or another item's

    @property
    def seconds(self) -> float:
        """Measured on the device's clock, all runs together."""
        return sum(trace.seconds for _, _, trace in self.traces)

    @property
    def moved_bytes(self) -> int:
        """Weights copied to the device."""
        return sum(trace.moved_bytes for _, _, trace in self.traces)


@dataclass(frozen=True, slots=True)
class Means:
    """What a batch is run with. ``estimate(values)`` makes the problem of one setting, ``solve`` its plans; ``reuse(values)`` knows
    outputs that are kept (None: none are); ``device_name`` tells devices apart whose bits may differ; ``device`` is opened for the
    first problem where it is None."""

    estimate: Callable[[Mapping[str, Any]], Problem]
    solve: Callable[[Problem], Solution]
    device_name: str
    reuse: Callable[[Mapping[str, Any]], Reuse] | None = None
    modules: Mapping[str, Any] | None = None
    journal: Journal | None = None
    device: Device | None = None
    sink: Sink | None = None
    watcher: Watcher = field(default_factory=Watcher)
    strict: bool = False  # the first item that fails ends all


def run_requests(graph: Graph, requests: Sequence[Request], means: Means) -> Batch:
    """Every item without an error, run; what came of each. Items of equal settings share plans and loaded weights.

    An item whose run fails on the device has an error, and the others run, unless they are ``strict``. Raises what planning raises,
    and InputError where the journal is of another batch or cannot be written; items that were finished by then are with the sink.
    The journal is closed in the end.
    """
    with contextlib.ExitStack() as closing:
        if means.journal is not None:
            closing.callback(means.journal.close)
        return _run_requests(graph, requests, means)


def _run_requests(graph: Graph, requests: Sequence[Request], means: Means) -> Batch:
    batch = Batch()
    for request in requests:
        if request.error:
            batch.errors[request.number] = request.error
            means.watcher.left_out(request)
    good, device = [request for request in requests if not request.error], means.device
    if means.journal is not None:
        named = {f"inputs of item {request.number}": _named(request) for request in good}
        means.journal.require(facts(graph, means.device_name) | named)
        batch.done_before = tuple(request.number for request in good if means.journal.request(request.number).done)
        for number in batch.done_before:
            means.journal.request(number).tidy()
        for stage, why in loops_begun_anew(graph):
            means.watcher.restarts(stage, why)
    for same in _by_settings(graph, [request for request in good if request.number not in batch.done_before]):
        problem = means.estimate(same[0].inputs)
        device = device or open_device(problem)
        _Runner(graph, problem, same, means, device, batch).run()
    return batch


def loops_begun_anew(graph: Graph) -> list[tuple[str, str]]:
    """The stages whose loops cannot go on where they were broken off, each with the reason."""
    why = why_not(resolve_class(graph.pipeline, graph.trust, graph.where, "pipeline"))
    return [(stage.name, why) for stage in graph.stages if why and stage.op == "denoise"]


def _by_settings(graph: Graph, requests: Sequence[Request]) -> list[list[Request]]:
    """Items with equal values of all that sizes and times depend on, in order of their first."""
    found: dict[tuple[tuple[str, str], ...], list[Request]] = {}
    for request in requests:
        found.setdefault(settings_of(graph, request.inputs), []).append(request)
    return list(found.values())


def _named(request: Request) -> str:
    return str(sorted((name, named(value)) for name, value in request.inputs.items()))


class _Runner:
    """Items of equal settings."""

    def __init__(
        self, graph: Graph, problem: Problem, requests: Sequence[Request], means: Means, device: Device, batch: Batch
    ) -> None:
        self.graph, self.problem, self.requests, self.means, self.device, self.batch = (
            graph,
            problem,
            list(requests),
            means,
            device,
            batch,
        )
        self.reuse = {request.number: means.reuse(request.inputs) for request in requests} if means.reuse is not None else {}
        self.keys = {request.number: self._keys_of(request) for request in requests}
        self.last = {reference.name for reference in graph.outputs.values()}
        self.ready: dict[int, dict[str, Any]] = {}  # outputs of the graph that wait for its others

    def run(self) -> None:
        """All of them."""
        with Values(self.problem.ram_bytes) as values:
            self.values = values
            found = {request.number: self._found(request) for request in self.requests}
            for request in list(self.requests):
                self._go_on(request, found[request.number])
            counts = {stage.name: len(self._distinct((stage.name,), self.requests)) for stage in self.graph.stages}
            for stage, number in counts.items():
                self.batch.shared[stage] = self.batch.shared.get(stage, 0) + len(self.requests) - number
            if not self.requests:
                return
            schedule = schedules(self.graph, self.problem, counts, len(self.requests), self.means.solve)[0]
            values.ram_bytes = schedule.room_bytes
            self._note_ways(schedule)
            self.batch.schedules.append(schedule)
            self.means.watcher.schedule(schedule, counts)
            requests = list(self.requests)
            for begin in range(0, len(requests), schedule.group):
                for segment in schedule.segments:
                    self._segment(segment, requests[begin : begin + schedule.group])

    def _found(self, request: Request) -> set[str]:
        """Stages whose outputs need not be made: this item's own from before, or those that are kept."""
        found = set[str]()
        if self.means.journal is not None:
            journal = self.means.journal.request(request.number)
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

    def _go_on(self, request: Request, found: set[str]) -> None:
        """A loop that was broken off ends first, from the step it had come to."""
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
                self._begin_anew(request, stage.name, error)
                continue
            solution = self.means.solve(problem)
            segment = Segment((stage.name,), own, solution, simulate(solution.problem, solution.plan))
            try:
                self._session(segment, [[request]], (OutOfMemory, TransferFailed))
            except BrokenPlan as error:  # the loop is not as it was
                self._begin_anew(request, stage.name, error)

    def _begin_anew(self, request: Request, stage: str, why: GraphrunError) -> None:
        if (journal := self._journal(request)) is not None:
            journal.forget(stage)
        self.means.watcher.restarts(f"{stage} of item {request.number}", str(why))

    def _segment(self, segment: Segment, requests: Sequence[Request]) -> None:
        """A session over those of ``requests`` that differ; the others get what theirs made."""
        if todo := self._distinct(segment.stages, [request for request in requests if request in self.requests]):
            self._session(segment, todo, (BrokenPlan,))

    def _session(self, segment: Segment, todo: Sequence[Sequence[Request]], failures: tuple[type[GraphrunError], ...]) -> None:
        """A run for the first of each of ``todo``, whose outputs are those of all of them; so is one of ``failures``."""
        problem, plan = segment.solution.problem, segment.solution.plan
        refuse_unfit(problem, plan, segment.graph)
        self.means.watcher.segment(segment, len(todo))
        host = Host.of_graph(segment.graph, apply_choices(problem, plan), self.device, self.means.modules)
        with Session(problem, plan, host, self.device) as session:
            for first, *others in todo:
                if problem.runs == 1:  # what stays is for the runs that were planned
                    session.close()
                more = self._arguments(segment.graph, first, segment.solution)
                stages = stages_for(plan, segment.graph, first.inputs, self.device, host, **more)
                hears, tell = self.means.watcher.run(segment, first), self.means.watcher.planned_again
                try:
                    trace = run_to_the_end(problem, plan, stages, host, self.device, hears, tell=tell, session=session)
                except failures as error:  # the device is empty again
                    self._fail((first, *others), error)
                    continue
                self.batch.traces.append((segment.stages, first.number, trace))
                self._finish(segment.graph, first, trace, (first, *others))

    def _arguments(self, graph: Graph, request: Request, solution: Solution) -> dict[str, Any]:
        """More arguments of the stages: what they are handed, and who hears of what they do."""
        precomputed = {str(reference)[1:]: self.values.get(request.number, str(reference)[1:]) for reference in graph.precomputed}
        way, journal = way_of(solution.problem, solution.plan), self._journal(request)

        def after_stage(stage: str, outputs: Mapping[str, Any]) -> None:
            if request.number in self.reuse:
                self.reuse[request.number].keep(stage, outputs, way)
            if journal is not None and stage not in self.last:
                journal.keep(stage, outputs)

        return {"precomputed": precomputed, "journal": journal, "after_stage": after_stage}

    def _finish(self, graph: Graph, request: Request, trace: Trace, owners: Sequence[Request]) -> None:
        """The outputs of a run are those of ``owners``: what others read waits, what the graph returns goes to the sink."""
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
        files = list(self.means.sink(request, outputs)) if self.means.sink is not None else []
        if self.means.sink is None:
            self.batch.outputs[request.number] = outputs
        if (journal := self._journal(request)) is not None:
            journal.finish(files)
        self.values.drop(request.number)
        self.requests.remove(request)
        self.means.watcher.done(request, files)

    def _fail(self, owners: Sequence[Request], error: GraphrunError) -> None:
        """The run that was to make outputs of ``owners`` failed: they are left out, and can be gone on with."""
        if self.means.strict:
            raise error
        for owner in owners:
            self.batch.errors[owner.number] = str(error)
            self.means.watcher.left_out(replace(owner, error=str(error)))
            self.values.drop(owner.number)
            self.requests.remove(owner)

    def _distinct(self, stages: Sequence[str], requests: Sequence[Request]) -> list[list[Request]]:
        """Items whose outputs of ``stages`` are still to be made, those together that get the same."""
        wanted = [str(reference)[1:] for reference in self.graph.part(stages).outputs.values()]
        found: dict[Any, list[Request]] = {}
        for request in requests:
            if any(not self.values.has(request.number, name) for name in wanted):
                keys = [self.keys[request.number].key(stage) for stage in stages]
                found.setdefault(tuple(keys) if all(keys) else request.number, []).append(request)
        return list(found.values())

    def _keys_of(self, request: Request) -> Keys:
        """To tell which items' outputs are the same. Files are not read: all items have the same."""
        if request.number in self.reuse:
            return self.reuse[request.number].keys
        return Keys(self.graph, request.inputs, self.means.device_name, str)

    def _note_ways(self, schedule: Schedule) -> None:
        """A batch that goes on with another precision would end with other bits."""
        if self.means.journal is None or not self.problem.allow:
            return
        named: dict[str, str] = {}
        for segment in schedule.segments:
            way = way_of(segment.solution.problem, segment.solution.plan)
            named |= {f"how {name} is held": " on the ".join(how) for name, how in way.held.items()}
            named |= {f"how {name} is run": option for name, option in way.options.items()}
        self.means.journal.require(named, "ways " + " ".join(f"{name}={value}" for name, value in self.problem.settings))

    def _put(self, request: Request, stage: str, outputs: Mapping[str, Any]) -> None:
        for name, value in outputs.items():
            self.values.put(request.number, f"{stage}.{name}", value)

    def _journal(self, request: Request) -> RequestJournal | None:
        return self.means.journal.request(request.number) if self.means.journal is not None else None
