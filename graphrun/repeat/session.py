"""A graph that is run again and again: planned once for the steady state, with what the plan keeps staying from run to run.

Decides who runs when: one run at a time on a device, in the order in which they were asked for. What stays is the plan's decision.

    session.submit(a)  submit(b)  submit(c)          any thread
    device             [first run: a][b][c] ...      one thread
    close()                                  ->      every tier at its baseline
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import graphrun
from graphrun.errors import InputError
from graphrun.executor.device import Device
from graphrun.executor.executor import Session as Runs
from graphrun.executor.executor import refuse_unfit, stages_for
from graphrun.executor.host import Host
from graphrun.executor.open import open_device
from graphrun.graph.graph import Graph
from graphrun.planner.settle import settle
from graphrun.planner.solution import Solution
from graphrun.trace import Tier, Trace

RUNS = 100  # so many that the first, which loads, weighs little


class Session:
    """Runs of ``graph`` within budgets, which are `graphrun.estimate`'s arguments. A context manager; else `close` it.

    ``inputs``: those that sizes and times depend on (height, steps); a run may give texts and seeds. ``runs`` are expected:
    the first, which fills and loads, counts once, the further ones all the others. ``modules``, ``random_weights`` and
    ``cache`` are as for `graphrun.run`. Raises what planning raises; weights are read when the first run begins.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        runs: int = RUNS,
        inputs: Mapping[str, Any] | None = None,
        modules: Mapping[str, Any] | None = None,
        random_weights: bool = False,
        cache: Path | None = None,
        device: Device | None = None,
        **budgets: Any,
    ) -> None:
        if runs < 2:
            raise InputError(f"runs {runs}: a session has two runs at least; graphrun.run is for one")
        problem = graphrun.estimate(graph, runs=runs, inputs=inputs, cache=cache, **budgets)
        self.solution: Solution = graphrun.plan(problem, cache=cache)
        graph = graph.until(problem.until) if problem.until else graph
        refuse_unfit(problem, self.solution.plan, graph)
        self.graph = graph.without_sources() if random_weights else graph
        self.device = device or open_device(problem)
        self._modules = modules
        self._before = _tiers(self.device)
        self._host: Host | None = None
        self._runs: Runs | None = None
        self._state = threading.Lock()  # of what follows
        self._closed = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="graphrun-session")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def run(self, inputs: Mapping[str, Any] | None = None, *, progress: Callable[[int, int, int], None] | None = None) -> Trace:
        """One run, behind those that were asked for before: its trace, with the outputs. May be called from any thread.

        Errors as for `graphrun.run`; the next run then begins anew, as a first one.
        """
        return self.submit(inputs, progress=progress).result()

    def submit(
        self, inputs: Mapping[str, Any] | None = None, *, progress: Callable[[int, int, int], None] | None = None
    ) -> Future[Trace]:
        """Asks for a run and returns at once. PlanError where ``inputs`` are not what was planned, InputError after `close`."""
        values = graphrun.planned_inputs(self.solution.problem, self.graph, inputs or {})
        with self._state:
            if self._closed:
                raise InputError("the session is closed; make another one")
            return self._worker.submit(self._run, values, progress)

    def map(self, inputs: Iterable[Mapping[str, Any]]) -> list[Trace]:
        """A run for each of ``inputs``, in their order."""
        return [future.result() for future in [self.submit(each) for each in inputs]]

    def close(self) -> tuple[Tier, ...]:
        """Waits for the run under way, drops those that wait, and returns every tier to its baseline: bytes before and after."""
        with self._state:
            self._closed = True
        self._worker.shutdown(wait=True, cancel_futures=True)
        if self._runs is not None:
            with _turn(self.device.name):
                self._runs.close()
        self._runs = self._host = None
        gc.collect()  # modules and what places their weights refer to each other
        return tuple(Tier(name, self._before[name], after_bytes) for name, after_bytes in _tiers(self.device).items())

    def _run(self, values: Mapping[str, Any], progress: Callable[[int, int, int], None] | None) -> Trace:
        problem, plan = self.solution.problem, self.solution.plan
        with _turn(self.device.name):
            if self._host is None or self._runs is None:
                self._host = Host.of_graph(self.graph, settle(problem, plan), self.device, self._modules)
                self._runs = Runs(problem, plan, self._host, self.device)
            return self._runs.run(stages_for(plan, self.graph, values, self.device, self._host), progress)


@functools.cache
def _turn(device: str) -> threading.Lock:
    """Who holds this runs on ``device``: sessions of one process take turns."""
    return threading.Lock()


def _tiers(device: Device) -> dict[str, int]:
    return {"device": device.allocated_bytes, **{name: device.arenas.nbytes(name) for name in ("arenas", "pinned")}}
