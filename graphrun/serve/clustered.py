"""The worker process of a server on a cluster. The weights are in Ray actors.

A batch is a stream through the devices (`graphrun.cluster.flow`). A cancelled request stops when a
device finishes the request's current stages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrun import api
from graphrun.batch.watch import LeftOut, Watcher
from graphrun.serve.log import note
from graphrun.serve.settings import Settings
from graphrun.serve.worker import Cancelled, GraphShare, RequestWorker, SessionBudget, work_forever

if TYPE_CHECKING:
    from graphrun.batch.queue import Batch
    from graphrun.batch.requests import Request
    from graphrun.graph.graph import Graph
    from graphrun.serve.together import RunRequest


def work_on_a_cluster(connection: Connection, settings: Settings) -> None:
    """Run requests, like `graphrun.serve.worker.work_forever`."""
    work_forever(connection, settings, ClusterWorker)


class ClusterWorker(RequestWorker):
    """Runs requests on the devices of ``settings.cluster``; graphs take turns. Raises InputError
    without Ray."""

    def _open(self) -> None:
        from graphrun.cluster.actors import ClusterRunner

        cluster = self._settings.cluster
        assert cluster is not None
        self._runner = ClusterRunner(
            cluster, "throughput", self._settings.cache, self._settings.budgets, items=api.RUNS
        )
        self._runner.join()
        self._label, self._virtual = (
            cluster.label,
            all(device.hardware.kind.has_virtual_clock for device in cluster.devices),
        )
        self._batch: Batch | None = None  # the current batch
        self._past_seconds = 0.0  # seconds of earlier batches
        self._loaded_weights: tuple[object, ...] = ()  # of the variant that ran last
        self._warm = set[str]()  # devices that ran since the placement last changed

    def close(self) -> None:
        self._runner.close()

    @property
    def clock_seconds(self) -> float:
        """Seconds since the start. On simulated devices they are virtual and shared."""
        if not self._virtual:
            return time.monotonic() - self._began
        return self._past_seconds + (self._batch.seconds if self._batch is not None else 0.0)

    def _execute(self, run: RunRequest, budget: SessionBudget) -> dict[str, Any]:
        answer = dict[str, Any]()
        self._stream([run], budget, lambda _, entries: answer.update(entries), strict=True)
        if not answer:
            raise Cancelled("cancelled")
        return answer

    def _run_together(
        self,
        runs: Sequence[RunRequest],
        budget: SessionBudget,
        segments: tuple[tuple[str, ...], ...],
    ) -> None:
        def done(run: RunRequest, entries: Mapping[str, Any]) -> None:
            self._notify("done", id=run.id, number=run.number, **entries)

        self._stream(runs, budget, done, strict=False)

    def _stream(
        self,
        runs: Sequence[RunRequest],
        budget: SessionBudget,
        on_done: Callable[[RunRequest, Mapping[str, Any]], None],
        *,
        strict: bool,
    ) -> None:
        """Run ``runs``, all of one shape. ``on_done`` gets the message fields of each finished run.
        ``strict``: raise the error of the first run that fails, instead of sending ``apart``."""
        from graphrun.batch.cache.reuse import reuse_for
        from graphrun.batch.queue import BatchContext, run_requests
        from graphrun.batch.requests import Request
        from graphrun.serve.together import RunFigures, save_pictures

        graph = self._variants.graph_of(budget.variant)
        settings = budget.variant.settings_of(self._settings, graph)
        allow = graph.allowed(settings.budgets.get("allow", ()))
        if budget.variant.weights != self._loaded_weights:
            self._runner.reload(allow)
            self._loaded_weights = budget.variant.weights

        def elsewhere(
            graph: Graph, requests: Sequence[Request], context: BatchContext, batch: Batch
        ) -> None:
            previous = self._runner.placement
            if self._runner.place(graph, requests) is not previous:
                self._warm.clear()
            self._batch = batch
            self._runner(graph, requests, context, batch)

        def sink(request: Request, outputs: Mapping[str, Any]) -> list[Path]:
            run, figures = runs[request.number - 1], RunFigures()
            assert self._batch is not None
            assert self._runner.placement is not None
            solutions = {
                assignment.name: assignment.column.solution
                for assignment in self._runner.placement.assignments
            }
            for lane in self._batch.lanes:
                if lane.request == request.number and lane.trace is not None:
                    solution = solutions[lane.device]
                    assert solution is not None
                    figures.add(lane.trace, solution, lane.device in self._warm, 0)
                    self._warm.add(lane.device)
            on_done(
                run, save_pictures(run, outputs, graph, settings.version, figures, figures.plan)
            )
            return []

        def reuse(values: Mapping[str, Any]) -> Any:
            assert settings.reuse != "none"
            return reuse_for(
                graph, values, self._label, settings.cache, settings.reuse, allow, None
            )

        nowhere: Any = None  # unused: the cluster plans and runs
        context = BatchContext(
            estimate=nowhere,
            solve=nowhere,
            device_name=self._label,
            reuse=None if settings.reuse == "none" else reuse,
            modules=None,
            journal=None,
            device=None,
            sink=sink,
            watcher=_ClusterWatcher(runs, self._notify, self._is_cancelled, strict),
            strict=strict,
            dispatch=elsewhere,
        )
        try:
            run_requests(
                graph,
                [Request(number, picture_run.inputs) for number, picture_run in enumerate(runs, 1)],
                context,
            )
        finally:
            self._past_seconds, self._batch = self.clock_seconds, None

    def _end_run(self, group: GraphShare, ids: Collection[str]) -> None:
        self.cancelled.difference_update(ids)


class _ClusterWatcher(Watcher):
    """Reports the current stage of each request, and the requests that do not run."""

    def __init__(
        self,
        runs: Sequence[RunRequest],
        notify: Callable[..., None],
        is_cancelled: Callable[[str], bool],
        strict: bool,
    ) -> None:
        self._runs, self._notify, self._is_cancelled, self._strict = (
            runs,
            notify,
            is_cancelled,
            strict,
        )

    def begins_on(self, device: str, stages: Sequence[str], request: Request) -> None:
        run = self._runs[request.number - 1]
        if self._is_cancelled(run.id):
            raise LeftOut("cancelled")
        self._notify("step", id=run.id, stage=stages[0], done=0, steps=0)

    def restarts_on(self, device: str) -> None:
        note(f"{device}: its process ended and was started again")

    def left_out(self, request: Request) -> None:
        run = self._runs[request.number - 1]
        if not self._strict:
            self._notify(
                "cancelled" if self._is_cancelled(run.id) else "apart",
                id=run.id,
                number=run.number,
            )
