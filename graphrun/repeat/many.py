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

from graphrun.components.build import resolve_class
from graphrun.errors import BrokenPlan, GraphrunError, InputError, OutOfMemory, TransferFailed
from graphrun.executor.device import Device
from graphrun.executor.executor import Session, refuse_unfit, stages_for
from graphrun.executor.host import Host
from graphrun.executor.open import open_device
from graphrun.executor.recover import run_to_the_end
from graphrun.graph.graph import Graph
from graphrun.graph.media import named
from graphrun.graph.settings import settings_of
from graphrun.ops.loops import why_not
from graphrun.outputs.keys import Keys, facts, way_of
from graphrun.outputs.reuse import Reuse
from graphrun.planner.given import shortened
from graphrun.planner.problem import Problem
from graphrun.planner.settle import settle
from graphrun.planner.simulate import simulate
from graphrun.planner.solution import Solution
from graphrun.repeat.course import Course, Leg, courses, leg_of
from graphrun.repeat.items import Item
from graphrun.repeat.journal import ItemJournal, Journal
from graphrun.repeat.values import Values
from graphrun.repeat.watch import Watcher
from graphrun.trace import Trace

Sink = Callable[[Item, Mapping[str, Any]], Iterable[Path]]
"""Takes a finished item's outputs, and says in which files they are."""


@dataclass(slots=True)
class Batch:
    """What came of a list of inputs: by number of the item, its outputs (where no sink took them) or why there are none."""

    outputs: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    done_before: tuple[int, ...] = ()
    courses: list[Course] = field(default_factory=list)
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


def run_items(graph: Graph, items: Sequence[Item], means: Means) -> Batch:
    """Every item without an error, run; what came of each. Items of equal settings share plans and loaded weights.

    An item whose run fails on the device has an error, and the others run, unless they are ``strict``. Raises what planning raises,
    and InputError where the journal is of another batch or cannot be written; items that were finished by then are with the sink.
    The journal is closed in the end.
    """
    with contextlib.ExitStack() as closing:
        if means.journal is not None:
            closing.callback(means.journal.close)
        return _run_items(graph, items, means)


def _run_items(graph: Graph, items: Sequence[Item], means: Means) -> Batch:
    batch = Batch()
    for item in items:
        if item.error:
            batch.errors[item.number] = item.error
            means.watcher.left_out(item)
    good, device = [item for item in items if not item.error], means.device
    if means.journal is not None:
        named = {f"inputs of item {item.number}": _named(item) for item in good}
        means.journal.require(facts(graph, means.device_name) | named)
        batch.done_before = tuple(item.number for item in good if means.journal.item(item.number).done)
        for number in batch.done_before:
            means.journal.item(number).tidy()
        for stage, why in loops_begun_anew(graph):
            means.watcher.restarts(stage, why)
    for same in _by_settings(graph, [item for item in good if item.number not in batch.done_before]):
        problem = means.estimate(same[0].inputs)
        device = device or open_device(problem)
        _Runner(graph, problem, same, means, device, batch).run()
    return batch


def loops_begun_anew(graph: Graph) -> list[tuple[str, str]]:
    """The stages whose loops cannot go on where they were broken off, each with the reason."""
    why = why_not(resolve_class(graph.pipeline, graph.trust, graph.where, "pipeline"))
    return [(stage.name, why) for stage in graph.stages if why and stage.op == "denoise"]


def _by_settings(graph: Graph, items: Sequence[Item]) -> list[list[Item]]:
    """Items with equal values of all that sizes and times depend on, in order of their first."""
    found: dict[tuple[tuple[str, str], ...], list[Item]] = {}
    for item in items:
        found.setdefault(settings_of(graph, item.inputs), []).append(item)
    return list(found.values())


def _named(item: Item) -> str:
    return str(sorted((name, named(value)) for name, value in item.inputs.items()))


class _Runner:
    """Items of equal settings."""

    def __init__(self, graph: Graph, problem: Problem, items: Sequence[Item], means: Means, device: Device, batch: Batch) -> None:
        self.graph, self.problem, self.items, self.means, self.device, self.batch = (
            graph,
            problem,
            list(items),
            means,
            device,
            batch,
        )
        self.reuse = {item.number: means.reuse(item.inputs) for item in items} if means.reuse is not None else {}
        self.keys = {item.number: self._keys_of(item) for item in items}
        self.last = {reference.name for reference in graph.outputs.values()}
        self.ready: dict[int, dict[str, Any]] = {}  # outputs of the graph that wait for its others

    def run(self) -> None:
        """All of them."""
        with Values(self.problem.ram_bytes) as values:
            self.values = values
            found = {item.number: self._found(item) for item in self.items}
            for item in list(self.items):
                self._go_on(item, found[item.number])
            counts = {stage.name: len(self._distinct((stage.name,), self.items)) for stage in self.graph.stages}
            for stage, number in counts.items():
                self.batch.shared[stage] = self.batch.shared.get(stage, 0) + len(self.items) - number
            if not self.items:
                return
            course = courses(self.graph, self.problem, counts, len(self.items), self.means.solve)[0]
            values.ram_bytes = course.room_bytes
            self._note_ways(course)
            self.batch.courses.append(course)
            self.means.watcher.course(course, counts)
            items = list(self.items)
            for begin in range(0, len(items), course.group):
                for leg in course.legs:
                    self._leg(leg, items[begin : begin + course.group])

    def _found(self, item: Item) -> set[str]:
        """Stages whose outputs need not be made: this item's own from before, or those that are kept."""
        found = set[str]()
        if self.means.journal is not None:
            journal = self.means.journal.item(item.number)
            for stage in self.graph.stages:
                if stage.name not in self.last and (outputs := journal.values(stage.name)) is not None:
                    self._put(item, stage.name, outputs)
                    found.add(stage.name)
        if item.number in self.reuse:
            for name, value in self.reuse[item.number].find().items():
                if not self.values.has(item.number, name):
                    self.values.put(item.number, name, value)
                found.add(name.partition(".")[0])
        return found

    def _go_on(self, item: Item, found: set[str]) -> None:
        """A loop that was broken off ends first, from the step it had come to."""
        journal = self._journal(item)
        for stage in self.graph.stages:
            state = journal.state(stage.name) if journal is not None else None
            if journal is None or state is None:
                continue
            own, problem = leg_of(self.graph, self.problem, (stage.name,), 1)
            if not {reference.name for reference in own.given} <= found:
                journal.forget(stage.name)
                continue
            try:
                problem = shortened(problem, {stage.name: (state.done, state.steps)})
            except InputError as error:
                self._begin_anew(item, stage.name, error)
                continue
            solution = self.means.solve(problem)
            leg = Leg((stage.name,), own, solution, simulate(solution.problem, solution.plan))
            try:
                self._session(leg, [[item]], (OutOfMemory, TransferFailed))
            except BrokenPlan as error:  # the loop is not as it was
                self._begin_anew(item, stage.name, error)

    def _begin_anew(self, item: Item, stage: str, why: GraphrunError) -> None:
        if (journal := self._journal(item)) is not None:
            journal.forget(stage)
        self.means.watcher.restarts(f"{stage} of item {item.number}", str(why))

    def _leg(self, leg: Leg, items: Sequence[Item]) -> None:
        """A session over those of ``items`` that differ; the others get what theirs made."""
        if todo := self._distinct(leg.stages, [item for item in items if item in self.items]):
            self._session(leg, todo, (BrokenPlan,))

    def _session(self, leg: Leg, todo: Sequence[Sequence[Item]], failures: tuple[type[GraphrunError], ...]) -> None:
        """A run for the first of each of ``todo``, whose outputs are those of all of them; so is one of ``failures``."""
        problem, plan = leg.solution.problem, leg.solution.plan
        refuse_unfit(problem, plan, leg.graph)
        self.means.watcher.leg(leg, len(todo))
        host = Host.of_graph(leg.graph, settle(problem, plan), self.device, self.means.modules)
        with Session(problem, plan, host, self.device) as session:
            for first, *others in todo:
                if problem.runs == 1:  # what stays is for the runs that were planned
                    session.close()
                more = self._arguments(leg.graph, first, leg.solution)
                stages = stages_for(plan, leg.graph, first.inputs, self.device, host, **more)
                hears, tell = self.means.watcher.run(leg, first), self.means.watcher.planned_again
                try:
                    trace = run_to_the_end(problem, plan, stages, host, self.device, hears, tell=tell, session=session)
                except failures as error:  # the device is empty again
                    self._fail((first, *others), error)
                    continue
                self.batch.traces.append((leg.stages, first.number, trace))
                self._finish(leg.graph, first, trace, (first, *others))

    def _arguments(self, graph: Graph, item: Item, solution: Solution) -> dict[str, Any]:
        """More arguments of the stages: what they are handed, and who hears of what they do."""
        given = {str(reference)[1:]: self.values.get(item.number, str(reference)[1:]) for reference in graph.given}
        way, journal = way_of(solution.problem, solution.plan), self._journal(item)

        def after_stage(stage: str, outputs: Mapping[str, Any]) -> None:
            if item.number in self.reuse:
                self.reuse[item.number].keep(stage, outputs, way)
            if journal is not None and stage not in self.last:
                journal.keep(stage, outputs)

        return {"given": given, "journal": journal, "after_stage": after_stage}

    def _finish(self, graph: Graph, item: Item, trace: Trace, owners: Sequence[Item]) -> None:
        """The outputs of a run are those of ``owners``: what others read waits, what the graph returns goes to the sink."""
        outputs = trace.outputs
        for owner in owners:
            for name, value in outputs.items():
                if name not in self.graph.outputs:
                    self.values.put(owner.number, name, value)
                    if owner is not item and (journal := self._journal(owner)) is not None:
                        stage, _, output = name.partition(".")
                        journal.keep(stage, {output: value})
            ready = self.ready.setdefault(owner.number, {})
            ready |= {name: value for name, value in outputs.items() if name in self.graph.outputs}
            if ready.keys() == self.graph.outputs.keys():
                self._deliver(owner, self.ready.pop(owner.number))

    def _deliver(self, item: Item, outputs: Mapping[str, Any]) -> None:
        files = list(self.means.sink(item, outputs)) if self.means.sink is not None else []
        if self.means.sink is None:
            self.batch.outputs[item.number] = outputs
        if (journal := self._journal(item)) is not None:
            journal.finish(files)
        self.values.drop(item.number)
        self.items.remove(item)
        self.means.watcher.done(item, files)

    def _fail(self, owners: Sequence[Item], error: GraphrunError) -> None:
        """The run that was to make outputs of ``owners`` failed: they are left out, and can be gone on with."""
        if self.means.strict:
            raise error
        for owner in owners:
            self.batch.errors[owner.number] = str(error)
            self.means.watcher.left_out(replace(owner, error=str(error)))
            self.values.drop(owner.number)
            self.items.remove(owner)

    def _distinct(self, stages: Sequence[str], items: Sequence[Item]) -> list[list[Item]]:
        """Items whose outputs of ``stages`` are still to be made, those together that get the same."""
        wanted = [str(reference)[1:] for reference in self.graph.part(stages).outputs.values()]
        found: dict[Any, list[Item]] = {}
        for item in items:
            if any(not self.values.has(item.number, name) for name in wanted):
                keys = [self.keys[item.number].key(stage) for stage in stages]
                found.setdefault(tuple(keys) if all(keys) else item.number, []).append(item)
        return list(found.values())

    def _keys_of(self, item: Item) -> Keys:
        """To tell which items' outputs are the same. Files are not read: all items have the same."""
        if item.number in self.reuse:
            return self.reuse[item.number].keys
        return Keys(self.graph, item.inputs, self.means.device_name, str)

    def _note_ways(self, course: Course) -> None:
        """A batch that goes on with another precision would end with other bits."""
        if self.means.journal is None or not self.problem.allow:
            return
        named: dict[str, str] = {}
        for leg in course.legs:
            way = way_of(leg.solution.problem, leg.solution.plan)
            named |= {f"how {name} is held": " on the ".join(how) for name, how in way.held.items()}
            named |= {f"how {name} is run": option for name, option in way.options.items()}
        self.means.journal.require(named, "ways " + " ".join(f"{name}={value}" for name, value in self.problem.settings))

    def _put(self, item: Item, stage: str, outputs: Mapping[str, Any]) -> None:
        for name, value in outputs.items():
            self.values.put(item.number, f"{stage}.{name}", value)

    def _journal(self, item: Item) -> ItemJournal | None:
        return self.means.journal.item(item.number) if self.means.journal is not None else None
