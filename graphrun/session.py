"""A graph that is run again and again: planned for the steady state, with what the plan keeps staying from run to run.

Decides who runs when: one run at a time on a device, in the order in which they were asked for; and by which plan: one for each
setting (other sizes), and of that one without the stages whose outputs are kept. What stays is the plan's decision.

    session.submit(a)  submit(b)  submit(c, height=512)     any thread
    device             [first run: a][b] | [first run: c]    one thread; another plan begins with an empty device
    close()                                       ->         every tier at its baseline
"""

from __future__ import annotations

import functools
import gc
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from graphrun import api
from graphrun.batch.cache.keys import way_of
from graphrun.batch.cache.reuse import Reuse, What, reuse_for
from graphrun.errors import InputError
from graphrun.graph.graph import Graph
from graphrun.graph.settings import settings_of
from graphrun.model.choices import apply_choices
from graphrun.model.problem import Problem
from graphrun.model.solution import Solution
from graphrun.runtime.devices.device import Device
from graphrun.runtime.devices.open import open_device
from graphrun.runtime.executor import Session as Runs
from graphrun.runtime.executor import refuse_unfit, stages_for
from graphrun.runtime.host import Host
from graphrun.trace import Tier, Trace
from graphrun.verify.simulate import Simulation, simulate

RUNS = 100  # so many that the first, which loads, weighs little
AHEAD = 32  # runs that wait and are looked at before another plan is taken up


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run: the graph with what it is handed, and its plan."""

    graph: Graph
    solution: Solution
    simulation: Simulation

    @property
    def further_seconds(self) -> float:
        """Predicted for a run behind the first."""
        return self.simulation.again_seconds if self.simulation.again else self.simulation.seconds


class Session:
    """Runs of ``graph`` within budgets, which are `graphrun.estimate`'s arguments. A context manager; else `close` it.

    ``inputs`` are those of runs that give no others. A run of other sizes (height, steps) is planned when it is asked for first,
    and begins with an empty device. ``runs`` are expected: the first, which fills and loads, counts once, the further ones all the
    others. ``modules``, ``random_weights``, ``cache``, ``reuse`` and ``note`` are as for `graphrun.run`; a stage whose outputs are
    kept in ``cache`` is not run again, where it is worth another plan. Raises what planning raises; weights are read when the first
    run begins.
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
        reuse: What = "encoded",
        note: Callable[[str], None] | None = None,
        device: Device | None = None,
        **budgets: Any,
    ) -> None:
        if runs < 2:
            raise InputError(f"runs {runs}: a session has two runs at least; graphrun.run is for one")
        self._whole, self._inputs, self._modules = graph, dict(inputs or {}), modules
        self._budgets = {**budgets, "runs": runs, "cache": cache}
        self._keeps = None if cache is None or modules or reuse == "none" else (cache, reuse, note)
        until = budgets.get("until")
        graph = graph if until is None else graph.until(until)
        self.graph = graph.without_sources() if random_weights else graph
        self._ways: dict[Any, Way] = {}
        problem = api.estimate(self._whole, inputs=self._inputs, **self._budgets)
        self.solution: Solution = self._way(self.graph.for_planning(self._inputs), (), problem).solution
        self.device = device or open_device(self.solution.problem)
        self._before = _tiers(self.device)
        self._host: Host | None = None
        self._runs: Runs | None = None
        self._current: Way | None = None
        self._spent_seconds = 0.0  # by runs that made again what is kept, since the last change of plan
        self._state = threading.Lock()  # of what follows
        self._waiting: deque[Mapping[str, Any]] = deque()
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
        """Asks for a run and returns at once. InputError where ``inputs`` are none of the graph's, and after `close`; what planning
        other sizes raises comes with the run."""
        values = self.graph.resolve({**self._inputs, **(inputs or {})})
        with self._state:
            if self._closed:
                raise InputError("the session is closed; make another one")
            self._waiting.append(values)
            return self._worker.submit(self._run, progress)

    def map(self, inputs: Iterable[Mapping[str, Any]]) -> list[Trace]:
        """A run for each of ``inputs``, in their order."""
        return [future.result() for future in [self.submit(each) for each in inputs]]

    def close(self) -> tuple[Tier, ...]:
        """Waits for the run under way, drops those that wait, and returns every tier to its baseline: bytes before and after."""
        with self._state:
            self._closed = True
        self._worker.shutdown(wait=True, cancel_futures=True)
        with _turn(self.device.name):
            self._leave()
        return tuple(Tier(name, self._before[name], after_bytes) for name, after_bytes in _tiers(self.device).items())

    def _run(self, progress: Callable[[int, int, int], None] | None) -> Trace:
        with self._state:
            values = self._waiting.popleft()
        with _turn(self.device.name):
            reuse = self._reuse(values)
            found = reuse.find() if reuse is not None else {}
            way = self._chosen(values, found)
            host, runs = self._at(way)
            problem, plan = way.solution.problem, way.solution.plan
            more: dict[str, Any] = {"precomputed": {name: found[name] for name in (str(of)[1:] for of in way.graph.precomputed)}}
            if reuse is not None:
                held = way_of(problem, plan)
                more["after_stage"] = lambda stage, outputs: reuse.keep(stage, outputs, held)
            return runs.run(stages_for(plan, way.graph, values, self.device, host, **more), progress)

    def _chosen(self, values: Mapping[str, Any], found: Mapping[str, Any]) -> Way:
        """By which plan it is run. Where the outputs ``found`` are there, the one without their stages is taken up once runs that
        made them again, and those that wait and would, cost as much as beginning anew: never twice the least that was possible."""
        whole = self._way(values, ())
        if not found:
            return whole
        short = self._way(values, tuple(sorted({name.partition(".")[0] for name in found})))
        saved = whole.further_seconds - short.further_seconds
        if short is self._current or self._current is not whole or saved <= 0:
            return whole if saved <= 0 else short
        self._spent_seconds += saved
        need = (short.simulation.seconds - short.further_seconds - self._spent_seconds) / saved
        if self._alike(values, found.keys(), min(AHEAD, math.ceil(need))) >= need:
            return short
        return whole

    def _alike(self, values: Mapping[str, Any], found: Iterable[str], most: int) -> int:
        """How many of the next runs, ``most`` at most, are of the same sizes and find the same stages' outputs."""
        with self._state:
            ahead = list(self._waiting)[: max(0, most)]
        count = 0
        for count, other in enumerate(ahead, 1):  # noqa: B007
            reuse = self._reuse(other)
            alike = settings_of(self.graph, other) == settings_of(self.graph, values)
            if not alike or reuse is None or reuse.find().keys() != set(found):
                return count - 1
        return count

    def _way(self, values: Mapping[str, Any], precomputed: tuple[str, ...], problem: Problem | None = None) -> Way:
        """The plan for the sizes in ``values`` without the stages ``precomputed``; made once."""
        settings = settings_of(self.graph, values)
        key = settings, precomputed
        if key not in self._ways:
            sizes = {name: values[name] for name, _ in settings}
            problem = problem or api.estimate(self._whole, inputs=sizes, precomputed=precomputed, **self._budgets)
            solution = api.plan(problem, cache=self._budgets["cache"])
            graph = self.graph.with_precomputed(problem.precomputed)
            refuse_unfit(solution.problem, solution.plan, graph)
            self._ways[key] = Way(graph, solution, simulate(solution.problem, solution.plan))
        return self._ways[key]

    def _reuse(self, values: Mapping[str, Any]) -> Reuse | None:
        if self._keeps is None:
            return None
        cache, what, note = self._keeps
        allow = self.graph.allowed(self._budgets.get("allow", ()))
        return reuse_for(self.graph, values, self.solution.problem.hardware, cache, what, allow, note)

    def _at(self, way: Way) -> tuple[Host, Runs]:
        """What runs by this plan; another's leaves the device, and the host too unless its components are held alike."""
        problem, plan = way.solution.problem, way.solution.plan
        applied = apply_choices(problem, plan)
        if self._current is not way or self._host is None or self._runs is None:
            kept = self._host if self._host is not None and self._host.fits(applied) else None
            self._leave(kept)
            self._host = kept or Host.of_graph(way.graph, applied, self.device, self._modules)
            self._runs = Runs(problem, plan, self._host, self.device)
            self._current, self._spent_seconds = way, 0.0
        return self._host, self._runs

    def _leave(self, kept: Host | None = None) -> None:
        if self._runs is not None:
            self._runs.close()
        if self._host is not None and self._host is not kept:
            self._host.close()
        self._runs = self._host = self._current = None
        gc.collect()  # modules and what places their weights refer to each other


@functools.cache
def _turn(device: str) -> threading.Lock:
    """Who holds this runs on ``device``: sessions of one process take turns."""
    return threading.Lock()


def _tiers(device: Device) -> dict[str, int]:
    return {"device": device.allocated_bytes, **{name: device.arenas.nbytes(name) for name in ("arenas", "pinned")}}
