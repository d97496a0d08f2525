"""Runs one graph many times. Planned for the steady state: weights that the plan keeps stay loaded
from run to run.

One run at a time on a device, in the order of submission. There is one plan per setting (image
size, steps), and one more for that setting without the stages whose outputs are cached. What stays
loaded between two runs is the plan's decision.

    session.submit(a)  submit(b)  submit(c, height=512)      any thread device             [first
    run: a][b] | [first run: c]    one worker thread; a change of plan starts with an empty device
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
from graphrun.errors import InputError
from graphrun.graph.graph import Graph
from graphrun.graph.settings import settings_of
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.ops.steps import Journal
from graphrun.runtime.devices.device import Device, device_lock
from graphrun.runtime.devices.open import open_device
from graphrun.runtime.executor import Session as Runs
from graphrun.runtime.executor import refuse_unfit, stages_for
from graphrun.runtime.host import Host
from graphrun.runtime.recovery import run_to_the_end
from graphrun.systems import refuse_forked
from graphrun.trace import Tier, Trace, warn_of

LOOKAHEAD = 32  # the most waiting runs that are examined before a change of plan
# of a session in memory; those used longest ago are planned, or read from ``cache``, again
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
        return simulation.again_seconds if simulation.again else simulation.seconds


class Session:
    """Runs ``graph`` repeatedly within ``budgets``, which are arguments of `graphrun.estimate`. A
    context manager; else `close` it.

    ``inputs``: defaults for the runs' inputs. Other sizes (height, steps) are planned when a run
    with them is first submitted; that run starts with an empty device. ``runs``: the expected
    number of runs; the plan weighs the first run, which reads and loads, once and the steady state
    ``runs - 1`` times. ``modules``, ``random_weights``, ``cache``, ``reuse`` and ``note`` are as
    for `graphrun.run`. A stage whose outputs are in ``cache`` is skipped once that pays for the
    change of plan. Raises what planning raises; weights are read when the first run begins.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        runs: int = api.RUNS,
        inputs: Mapping[str, Any] | None = None,
        modules: Mapping[str, Any] | None = None,
        random_weights: bool = False,
        cache: Path | None = None,
        reuse: What = "encoded",
        note: Callable[[str], None] | None = None,
        device: Device | None = None,
        **budgets: Any,
    ) -> None:
        if runs < 2:
            raise InputError(
                f"runs {runs}: a session has at least two runs; use graphrun.run for one"
            )
        graph.refuse_list()
        self._whole, self._inputs, self._modules = graph, dict(inputs or {}), modules
        self._budgets = {**budgets, "runs": runs, "cache": cache}
        self._cache_options = (
            None if cache is None or modules or reuse == "none" else (cache, reuse, note)
        )
        graph = graph.until(budgets.get("until"))
        self.graph = graph.without_sources() if random_weights else graph
        self._planned: dict[Any, PlannedGraph] = {}  # by settings and precomputed stages
        problem = api.estimate(self._whole, inputs=self._inputs, **self._budgets)
        self.solution: Solution = self._plan_for(
            self.graph.for_planning(self._inputs), (), problem
        ).solution
        self.device = device or open_device(self.solution.problem)
        self._before = self.device.tiers()
        self._host: Host | None = None
        self._runs: Runs | None = None
        self._current: PlannedGraph | None = None
        # by runs that computed cached outputs again, since the last change of plan
        self._recomputed_seconds = 0.0
        # of the device's clock, before runs: weights without a source are created, which no plan
        # has
        self.unplanned_seconds = 0.0
        self._state = threading.Lock()  # guards _waiting and _closed
        self._waiting: deque[Mapping[str, Any]] = deque()
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
        """The plan of the last run; None where the next one starts with an empty device."""
        return (
            self._current.solution
            if self._current is not None and self._runs is not None and self._runs.begun
            else None
        )

    def run(
        self,
        inputs: Mapping[str, Any] | None = None,
        *,
        progress: Callable[[int, int, int], None] | None = None,
        journal: Journal | None = None,
    ) -> Trace:
        """Runs once, after the runs submitted before. Returns the trace, with the outputs. May be
        called from any thread.

        Raises and warns as `graphrun.run`; after an error, the next run starts with an empty
        device.
        """
        return self.submit(inputs, progress=progress, journal=journal).result()

    def submit(
        self,
        inputs: Mapping[str, Any] | None = None,
        *,
        progress: Callable[[int, int, int], None] | None = None,
        journal: Journal | None = None,
    ) -> Future[Trace]:
        """Queues a run and returns its future.

        ``progress`` and ``journal`` are as for `graphrun.run`; a loop that the journal resumes must
        have two steps left, since a plan has a first call and further ones.

        Raises InputError for inputs that the graph refuses, and after `close`. What planning other
        sizes raises is in the future.
        """
        values = self.graph.resolve({**self._inputs, **(inputs or {})})
        refuse_forked(self._process, "the session", "create a session")
        with self._state:
            if self._closed:
                raise InputError("the session is closed; create a new one")
            self._waiting.append(values)
            return self._worker.submit(self._run, progress, journal)

    def map(self, inputs: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> list[Trace]:
        """Runs once for each of ``inputs``, or once for a single mapping, and returns the traces in
        their order."""
        every = [inputs] if isinstance(inputs, Mapping) else inputs
        return [future.result() for future in [self.submit(each) for each in every]]

    @contextlib.contextmanager
    def lend(self, inputs: Mapping[str, Any]) -> Iterator[Host]:
        """The host memory that runs with ``inputs`` have, for other runs meanwhile. The device is
        empty, and the next run starts with an empty device."""
        values = self.graph.resolve({**self._inputs, **inputs})
        with device_lock(self.device.name):
            host, runs = self._activate(self._plan_for(values, ()))
            runs.close()
            yield host

    def release(self) -> None:
        """Waits for the current run, and frees the device and the host: the next run starts as the
        first one did."""
        with device_lock(self.device.name):
            self._release()

    def close(self) -> tuple[Tier, ...]:
        """Waits for the current run, cancels the waiting ones, and frees everything. Returns bytes
        before and after, per tier.

        In a forked process it does nothing.
        """
        if os.getpid() != self._process:
            return ()
        with self._state:
            self._closed = True
        self._worker.shutdown(wait=True, cancel_futures=True)
        with device_lock(self.device.name):
            self._release()
        return tuple(
            Tier(name, self._before[name], after_bytes)
            for name, after_bytes in self.device.tiers().items()
        )

    def _run(
        self, progress: Callable[[int, int, int], None] | None, journal: Journal | None
    ) -> Trace:
        with self._state:
            values = self._waiting.popleft()
        with device_lock(self.device.name):
            reuse = self._reuse(values)
            found = reuse.find() if reuse is not None else {}
            chosen = self._choose(values, found)
            host, runs = self._activate(chosen)
            precomputed = {
                name: found[name]
                for name in (str(reference)[1:] for reference in chosen.graph.precomputed)
            }
            arguments: dict[str, Any] = {"precomputed": precomputed, "journal": journal}
            if reuse is not None:
                choices = choices_of(chosen.solution)
                arguments["after_stage"] = lambda stage, outputs: reuse.keep(
                    stage, outputs, choices
                )
            stages = stages_for(
                chosen.solution.plan, chosen.graph, values, self.device, host, **arguments
            )
            trace = run_to_the_end(
                chosen.solution, stages, host, self.device, progress, session=runs
            )
        warn_of(trace.overruns)
        return trace

    def _choose(self, values: Mapping[str, Any], found: Mapping[str, Any]) -> PlannedGraph:
        """The plan for a run whose outputs ``found`` are cached: for the whole graph, or without
        the stages of ``found``.

        The change to the shorter plan is made once the seconds spent on computing cached outputs
        again, by past runs and by those that wait, reach the cost of starting with an empty device
        (ski rental): at most twice the least possible.
        """
        whole = self._plan_for(values, ())
        if not found:
            return whole
        short = self._plan_for(values, tuple(sorted({name.partition(".")[0] for name in found})))
        saved = whole.further_seconds - short.further_seconds
        if short is self._current or self._current is not whole or saved <= 0:
            return whole if saved <= 0 else short
        self._recomputed_seconds += saved
        needed_runs = (
            short.solution.simulation.seconds - short.further_seconds - self._recomputed_seconds
        ) / saved
        if (
            self._similar_runs(values, found.keys(), min(LOOKAHEAD, math.ceil(needed_runs)))
            >= needed_runs
        ):
            return short
        return whole

    def _similar_runs(self, values: Mapping[str, Any], found: Iterable[str], most: int) -> int:
        """How many of the next waiting runs, at most ``most``, have the same sizes and find the
        same cached outputs."""
        with self._state:
            ahead = list(self._waiting)[: max(0, most)]
        count = 0
        for count, other in enumerate(ahead, 1):  # noqa: B007
            reuse = self._reuse(other)
            same_sizes = settings_of(self.graph, other) == settings_of(self.graph, values)
            if not same_sizes or reuse is None or reuse.find().keys() != set(found):
                return count - 1
        return count

    def _plan_for(
        self,
        values: Mapping[str, Any],
        precomputed: tuple[str, ...],
        problem: Problem | None = None,
    ) -> PlannedGraph:
        """The plan for the sizes in ``values``, without the stages ``precomputed``. Planned once
        and remembered."""
        settings = settings_of(self.graph, values)
        key = settings, precomputed
        if key not in self._planned:
            sizes = {name: values[name] for name, _ in settings}
            problem = problem or api.estimate(
                self._whole, inputs=sizes, precomputed=precomputed, **self._budgets
            )
            solution = api.plan(problem, cache=self._budgets["cache"])
            graph = self.graph.with_precomputed(problem.precomputed)
            refuse_unfit(solution, graph)
            self._planned[key] = PlannedGraph(graph, solution)
        # to the end: the first is the one used longest ago
        self._planned[key] = planned = self._planned.pop(key)
        if len(self._planned) > KEPT_PLANS:
            del self._planned[next(iter(self._planned))]
        return planned

    def _reuse(self, values: Mapping[str, Any]) -> Reuse | None:
        if self._cache_options is None:
            return None
        cache, what, note = self._cache_options
        allow = self.graph.allowed(self._budgets.get("allow", ()))
        return reuse_for(
            self.graph, values, self.solution.problem.hardware.label, cache, what, allow, note
        )

    def _activate(self, planned: PlannedGraph) -> tuple[Host, Runs]:
        """The host side and the executor session for ``planned``, which becomes the current plan.

        A change of plan frees the device, and the backing stores too unless the new plan holds its
        components in the same way.
        """
        applied = planned.solution.chosen
        if self._current is not planned or self._host is None or self._runs is None:
            kept = self._host if self._host is not None and self._host.fits(applied) else None
            self._release(kept)
            begin = self._idle_at()
            self._host = kept or Host.of_graph(planned.graph, applied, self.device, self._modules)
            self.unplanned_seconds += self._idle_at() - begin
            self._runs = Runs(planned.solution, self._host, self.device)
            self._current, self._recomputed_seconds = planned, 0.0
        return self._host, self._runs

    def _idle_at(self) -> float:
        """Seconds of the device's clock when all work is done."""
        self.device.barrier()
        mark = self.device.mark("compute")
        self.device.barrier()
        return self.device.seconds_at(mark)

    def _release(self, kept: Host | None = None) -> None:
        """Frees the device and the host side, except ``kept``."""
        if self._runs is not None:
            self._runs.close()
        if self._host is not None and self._host is not kept:
            self._host.close()
        self._runs = self._host = self._current = None
        gc.collect()  # modules and the objects that place their weights form reference cycles
