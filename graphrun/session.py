"""Run one graph many times, planned for the steady state.

The plan decides what stays loaded between two runs. Runs on a device are sequential, in the order
of submission. There is one plan per setting (image size, steps), and another one without the stages
whose outputs are cached.

    session.submit(a)  submit(b)  submit(c, height=512)      any thread
    device             [first run: a][b] | [first run: c]    one worker thread; a change of plan
                                                             starts with an empty device
    close()                                       ->         every memory tier at its baseline
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from graphrun import api
from graphrun.batch.cache.keys import choices_of
from graphrun.batch.cache.reuse import Reuse, What, reuse_for
from graphrun.devices import as_opened, resolved_in_process
from graphrun.errors import InputError
from graphrun.graph.graph import Graph, require_graph
from graphrun.graph.settings import settings_of
from graphrun.graph.values import as_path
from graphrun.hook import ProgressCallback
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.ops.steps import StepJournal
from graphrun.runtime.devices.device import Device, device_lock
from graphrun.runtime.devices.open import open_device
from graphrun.runtime.executor import PlanSession as Runs
from graphrun.runtime.executor import refuse_unfit, stages_for
from graphrun.runtime.host import Host
from graphrun.runtime.recovery import run_to_the_end
from graphrun.runtime.spool import spool_in
from graphrun.systems import refuse_forked
from graphrun.trace import Tier, Trace, warn_of

LOOKAHEAD = 32  # maximum number of queued runs that are examined before a change of plan
# in memory; the least recently used ones are dropped, and planned or read from ``cache`` again
KEPT_PLANS = 64


@dataclass(frozen=True, slots=True)
class PlannedGraph:
    """The graph without its precomputed stages, and the plan for it."""

    graph: Graph
    solution: Solution

    @property
    def further_seconds(self) -> float:
        """Predicted seconds of a run after the first."""
        simulation = self.solution.simulation
        return simulation.further_seconds if simulation.further_slots else simulation.seconds


class Session:
    """Runs ``graph`` repeatedly within ``budgets``, which are arguments of `graphrun.estimate`.

    A context manager; otherwise call `close`. ``inputs``: defaults for the runs' inputs. Other
    sizes (height, steps) are planned when a run with them is first submitted; that run starts with
    an empty device. ``runs``: the expected number of runs; the plan weighs the first run, which
    reads and loads, once, and the steady state ``runs - 1`` times. ``device``: one that is open, in
    place of that of the ``hardware`` in ``budgets``. ``modules``, ``random_weights``, ``cache``,
    ``reuse`` and ``note`` are as for `graphrun.run`. A stage whose outputs are in ``cache`` is
    skipped once that pays for the change of plan. Raises the errors of planning; weights are read
    when the first run begins.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        runs: int = api.RUNS,
        inputs: Mapping[str, Any] | None = None,
        modules: Mapping[str, Any] | None = None,
        random_weights: bool = False,
        cache: str | Path | None = None,
        reuse: What = "encoded",
        note: Callable[[str], None] | None = None,
        device: Device | None = None,
        **budgets: Any,
    ) -> None:
        require_graph(graph, "Session")
        if runs < 2:
            raise InputError(
                f"runs {runs}: a session has at least two runs; use graphrun.run for one"
            )
        if isinstance(device, str):
            raise InputError(
                f"device {device!r}: a session's device is opened already; to name a kind, give "
                f"hardware={device!r}"
            )
        graph.refuse_list()
        self._whole, self._inputs, self._modules = graph, dict(inputs or {}), modules
        cache = as_path(cache)
        cards, budgets = resolved_in_process(budgets, (modules or {}).values(), cache)
        self._budgets = {**budgets, "hardware": cards, "runs": runs, "cache": cache}
        self._cache_options = (
            None if cache is None or modules or reuse == "none" else (cache, reuse, note)
        )
        graph = graph.until(budgets.get("until"))
        self.graph = graph.without_sources() if random_weights else graph
        self._plans: dict[Any, PlannedGraph] = {}  # by settings and precomputed stages
        self.solution = self._first_plan()
        self.device = device or open_device(self.solution.problem)
        if (opened_card := as_opened(cards[0], self.device)) != cards[0]:
            self._budgets["hardware"] = [opened_card, *cards[1:]]
            self._plans.clear()
            self.solution = self._first_plan()
        self._baseline = self.device.tiers()
        self._host: Host | None = None
        self._runs: Runs | None = None
        self._current: PlannedGraph | None = None
        # spent by runs on computing cached outputs again, since the last change of plan
        self._recomputed_seconds = 0.0
        # of the device's clock, before runs: creating weights without a source is in no plan
        self.unplanned_seconds = 0.0
        self._state = threading.Lock()  # guards _queue and _closed
        self._queue: deque[Mapping[str, Any]] = deque()
        self._closed, self._process = False, os.getpid()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="graphrun-session")

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def current(self) -> Solution | None:
        """The plan of the last run; None if the next run starts with an empty device."""
        return (
            self._current.solution
            if self._current is not None and self._runs is not None and self._runs.begun
            else None
        )

    @property
    def active(self) -> Solution | None:
        """The plan of the current run, or of the last one; None before the first."""
        return self._current.solution if self._current is not None else None

    @property
    def held_bytes(self) -> int:
        """Bytes of weights on the device now, secondary devices included."""
        return 0 if self._host is None else self._host.loaded_bytes

    def plan(self, inputs: Mapping[str, Any] | None = None) -> Solution:
        """Return the plan for runs with ``inputs``, made once for each set of sizes.

        Waits for the current run. Raises the errors of planning, and InputError in a forked
        process.
        """
        self._refuse_forked()
        values = self.graph.resolve({**self._inputs, **(inputs or {})})
        with device_lock(self.device.name):
            return self._plan_for(values, ()).solution

    def run(
        self,
        inputs: Mapping[str, Any] | None = None,
        *,
        progress: ProgressCallback | None = None,
        journal: StepJournal | None = None,
    ) -> Trace:
        """Run once, after the runs submitted before. Returns the trace, with the outputs.

        May be called from any thread. Raises and warns as `graphrun.run`; after an error, the next
        run starts with an empty device.
        """
        return self.submit(inputs, progress=progress, journal=journal).result()

    def submit(
        self,
        inputs: Mapping[str, Any] | None = None,
        *,
        progress: ProgressCallback | None = None,
        journal: StepJournal | None = None,
    ) -> Future[Trace]:
        """Queue a run and return its future.

        ``progress`` and ``journal`` are as for `graphrun.run`. A loop that the journal resumes must
        have two steps left, because a plan has a first call and further calls. Raises InputError
        for inputs that the graph refuses, and after `close`. Errors of planning other sizes are in
        the future.
        """
        values = self.graph.resolve({**self._inputs, **(inputs or {})})
        self._refuse_forked()
        with self._state:
            if self._closed:
                raise InputError("the session is closed; create a new one")
            self._queue.append(values)
            return self._worker.submit(self._run, progress, journal)

    def map(self, inputs: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> list[Trace]:
        """Run once for each of ``inputs``, or once for a single mapping. Returns the traces."""
        all_inputs = [inputs] if isinstance(inputs, Mapping) else inputs
        return [
            future.result() for future in [self.submit(run_inputs) for run_inputs in all_inputs]
        ]

    @contextlib.contextmanager
    def lend(self, inputs: Mapping[str, Any]) -> Iterator[Host]:
        """Lend the host memory of runs with ``inputs`` to other runs.

        The device is empty meanwhile, and the next run starts with an empty device. Raises
        InputError in a forked process.
        """
        self._refuse_forked()
        values = self.graph.resolve({**self._inputs, **inputs})
        with device_lock(self.device.name):
            host, runs = self._activate(self._plan_for(values, ()))
            runs.close()
            yield host

    def release(self) -> None:
        """Wait for the current run, then free the device and the host.

        The next run starts like the first one. Raises InputError in a forked process.
        """
        self._refuse_forked()
        with device_lock(self.device.name):
            self._release()

    def close(self) -> tuple[Tier, ...]:
        """Wait for the current run, cancel queued runs, and free everything.

        Returns bytes before and after, per tier. Does nothing in a forked process.
        """
        if os.getpid() != self._process:
            return ()
        with self._state:
            self._closed = True
        self._worker.shutdown(wait=True, cancel_futures=True)
        with device_lock(self.device.name):
            self._release()
        return tuple(
            Tier(name, self._baseline[name], after_bytes)
            for name, after_bytes in self.device.tiers().items()
        )

    def _refuse_forked(self) -> None:
        refuse_forked(self._process, "the session", "create a session")

    def _run(self, progress: ProgressCallback | None, journal: StepJournal | None) -> Trace:
        with self._state:
            values = self._queue.popleft()
        with device_lock(self.device.name):
            reuse = self._reuse(values)
            cached_values = reuse.find() if reuse is not None else {}
            choice = self._choose(values, cached_values)
            host, runs = self._activate(choice)
            precomputed = {
                name: cached_values[name]
                for name in (str(reference)[1:] for reference in choice.graph.precomputed)
            }
            arguments: dict[str, Any] = {"precomputed": precomputed, "journal": journal}
            if reuse is not None:
                choices = choices_of(choice.solution)
                arguments["after_stage"] = lambda stage, outputs: reuse.keep(
                    stage, outputs, choices
                )
            stages = stages_for(
                choice.solution.plan, choice.graph, values, self.device, host, **arguments
            )
            trace = run_to_the_end(
                choice.solution, stages, host, self.device, progress, session=runs
            )
        warn_of(trace.overruns)
        return trace

    def _choose(self, values: Mapping[str, Any], cached_values: Mapping[str, Any]) -> PlannedGraph:
        """Return the plan for the whole graph, or without the stages of ``cached_values``.

        The change to the shorter plan is made when the seconds spent on computing cached outputs
        again, by past and queued runs, reach the cost of starting with an empty device (ski
        rental). This costs at most twice the minimum.
        """
        whole = self._plan_for(values, ())
        if not cached_values:
            return whole
        short = self._plan_for(
            values, tuple(sorted({name.partition(".")[0] for name in cached_values}))
        )
        saved_seconds = whole.further_seconds - short.further_seconds
        if short is self._current or self._current is not whole or saved_seconds <= 0:
            return whole if saved_seconds <= 0 else short
        self._recomputed_seconds += saved_seconds
        needed_runs = (
            short.solution.simulation.seconds - short.further_seconds - self._recomputed_seconds
        ) / saved_seconds
        if (
            self._similar_runs(values, cached_values.keys(), min(LOOKAHEAD, math.ceil(needed_runs)))
            >= needed_runs
        ):
            return short
        return whole

    def _similar_runs(
        self, values: Mapping[str, Any], cached_names: Iterable[str], limit: int
    ) -> int:
        """Return how many of the next ``limit`` queued runs match ``values`` and ``cached_names``.

        They have the same sizes and find the same cached outputs. Stops at the first other run.
        """
        with self._state:
            next_runs = list(self._queue)[: max(0, limit)]
        count = 0
        for count, other in enumerate(next_runs, 1):  # noqa: B007
            reuse = self._reuse(other)
            same_sizes = settings_of(self.graph, other) == settings_of(self.graph, values)
            if not same_sizes or reuse is None or reuse.find().keys() != set(cached_names):
                return count - 1
        return count

    def _first_plan(self) -> Solution:
        """Return the plan for the inputs that the session begins with."""
        problem = api.estimate(self._whole, inputs=self._inputs, **self._budgets)
        return self._plan_for(self.graph.for_planning(self._inputs), (), problem).solution

    def _plan_for(
        self,
        values: Mapping[str, Any],
        precomputed: tuple[str, ...],
        problem: Problem | None = None,
    ) -> PlannedGraph:
        """Return the plan for the sizes in ``values`` without ``precomputed`` stages, made once."""
        settings = settings_of(self.graph, values)
        key = settings, precomputed
        if key not in self._plans:
            sizes = {name: values[name] for name, _ in settings}
            problem = problem or api.estimate(
                self._whole, inputs=sizes, precomputed=precomputed, **self._budgets
            )
            solution = api.plan(problem, cache=self._budgets["cache"])
            graph = self.graph.with_precomputed(problem.precomputed)
            refuse_unfit(solution, graph)
            self._plans[key] = PlannedGraph(graph, solution)
        # moved to the end: the first is the least recently used
        self._plans[key] = planned_graph = self._plans.pop(key)
        if len(self._plans) > KEPT_PLANS:
            del self._plans[next(iter(self._plans))]
        return planned_graph

    def _reuse(self, values: Mapping[str, Any]) -> Reuse | None:
        if self._cache_options is None:
            return None
        cache, reuse, note = self._cache_options
        allow = self.graph.allowed(self._budgets.get("allow", ()))
        return reuse_for(
            self.graph, values, self.solution.problem.hardware.label, cache, reuse, allow, note
        )

    def _activate(self, planned_graph: PlannedGraph) -> tuple[Host, Runs]:
        """Make ``planned_graph`` the current plan, and return its host side and executor session.

        A change of plan frees the device. It also frees the backing stores, unless the new plan
        stores its components in the same way.
        """
        applied = planned_graph.solution.chosen
        if self._current is not planned_graph or self._host is None or self._runs is None:
            host = self._host if self._host is not None and self._host.fits(applied) else None
            self._release(host)
            begin = self._idle_at()
            self._host = host or Host.of_graph(
                planned_graph.graph,
                applied,
                self.device,
                self._modules,
                spool_in(self._budgets["cache"]),
            )
            self.unplanned_seconds += self._idle_at() - begin
            self._runs = Runs(planned_graph.solution, self._host, self.device)
            self._current, self._recomputed_seconds = planned_graph, 0.0
        return self._host, self._runs

    def _idle_at(self) -> float:
        """Return the seconds of the device's clock when all work is done."""
        self.device.barrier()
        mark = self.device.mark("compute")
        self.device.barrier()
        return self.device.seconds_at(mark)

    def _release(self, host: Host | None = None) -> None:
        """Free the device, and the host side unless it is ``host``."""
        if self._runs is not None:
            self._runs.close()
        if self._host is not None and self._host is not host:
            self._host.close()
        self._runs = self._host = self._current = None
        gc.collect()  # modules and the objects that place their weights form reference cycles
