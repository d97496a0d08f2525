"""The worker process of a server whose pipelines run on the devices of a cluster. It holds no
weights: actors of Ray do.

Requests that go together are a stream through the devices (`graphrun.cluster.flow`). A request is
cancelled when a device has ended the stages that it is at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrun import api
from graphrun.batch.watch import LeftOut, Watcher
from graphrun.serve.settings import Settings
from graphrun.serve.worker import Cancelled, Group, Worker, work_forever

if TYPE_CHECKING:
    from graphrun.batch.queue import Batch
    from graphrun.batch.requests import Request
    from graphrun.graph.graph import Graph
    from graphrun.serve.together import Asked


def work_on_a_cluster(connection: Connection, settings: Settings) -> None:
    """As `graphrun.serve.worker.work_forever`."""
    work_forever(connection, settings, ClusterWorker)


class ClusterWorker(Worker):
    """Runs requests on the devices of ``settings.cluster``. Graphs have them in turn. Raises
    InputError where Ray is not there."""

    def _open(self) -> None:
        from graphrun.cluster.actors import OnCluster

        cluster = self._settings.cluster
        assert cluster is not None
        self._on = OnCluster(
            cluster, "throughput", self._settings.cache, self._settings.budgets, items=api.RUNS
        )
        self._on.join()
        self._label, self._virtual = (
            cluster.label,
            all(of.hardware.device == "sim" for of in cluster.devices),
        )
        self._batch: Batch | None = None  # under way
        self._past_seconds = 0.0  # of those before
        self._warm = set[str]()  # devices that have run since the placement changed

    def close(self) -> None:
        """Ends the actors."""
        self._on.close()

    @property
    def clock_seconds(self) -> float:
        """Seconds since the start; of virtual time, which all devices share, on simulated ones."""
        if not self._virtual:
            return time.monotonic() - self._began
        return self._past_seconds + (self._batch.seconds if self._batch is not None else 0.0)

    def _made(
        self,
        asked: Asked,
        group: Group,
        graph: Graph,
        budgets: Mapping[str, int],
        beside: Collection[Group],
    ) -> dict[str, Any]:
        told = dict[str, Any]()
        self._stream([asked], graph, lambda _, made: told.update(made), strict=True)
        if not told:
            raise Cancelled("cancelled")
        return told

    def _run_together(
        self,
        every: Sequence[Asked],
        group: Group,
        graph: Graph,
        segments: tuple[tuple[str, ...], ...],
        budgets: Mapping[str, int],
        beside: Collection[Group],
    ) -> None:
        def done(asked: Asked, made: Mapping[str, Any]) -> None:
            self._tell("done", id=asked.id, number=asked.number, **made)

        self._stream(every, graph, done, strict=False)

    def _stream(
        self,
        every: Sequence[Asked],
        graph: Graph,
        done: Callable[[Asked, Mapping[str, Any]], None],
        *,
        strict: bool,
    ) -> None:
        """Runs ``every`` of one shape. ``done`` is called with what each has made. ``strict``:
        raises the error of the first that fails, in place of ``apart``."""
        from graphrun.batch.cache.reuse import reuse_for
        from graphrun.batch.queue import BatchContext, run_requests
        from graphrun.batch.requests import Request
        from graphrun.serve.together import Measured, saved

        settings, allow = self._settings, graph.allowed(self._settings.budgets.get("allow", ()))

        def elsewhere(
            graph: Graph, requests: Sequence[Request], context: BatchContext, batch: Batch
        ) -> None:
            before = self._on.placement
            if self._on.place(graph, requests) is not before:
                self._warm.clear()
            self._batch = batch
            self._on(graph, requests, context, batch)

        def sink(request: Request, outputs: Mapping[str, Any]) -> list[Path]:
            asked, measured = every[request.number - 1], Measured()
            assert self._batch is not None
            assert self._on.placement is not None
            solutions = {of.name: of.column.solution for of in self._on.placement.assignments}
            for lane in self._batch.lanes:
                if lane.request == request.number and lane.trace is not None:
                    solution = solutions[lane.device]
                    assert solution is not None
                    measured.add(lane.trace, solution, lane.device in self._warm, 0)
                    self._warm.add(lane.device)
            done(asked, saved(asked, outputs, graph, settings.version, measured, measured.plan))
            return []

        def reuse(values: Mapping[str, Any]) -> Any:
            assert settings.reuse != "none"
            return reuse_for(
                graph, values, self._label, settings.cache, settings.reuse, allow, None
            )

        nowhere: Any = None  # to plan and to run is the cluster's
        context = BatchContext(
            estimate=nowhere,
            solve=nowhere,
            device_name=self._label,
            reuse=None if settings.reuse == "none" else reuse,
            modules=None,
            journal=None,
            device=None,
            sink=sink,
            watcher=_Watching(every, self._tell, self._is_cancelled, strict),
            strict=strict,
            elsewhere=elsewhere,
        )
        try:
            run_requests(
                graph,
                [Request(number, asked.inputs) for number, asked in enumerate(every, 1)],
                context,
            )
        finally:
            self._past_seconds, self._batch = self.clock_seconds, None

    def _ended(self, group: Group, ids: Collection[str]) -> None:
        self.cancelled.difference_update(ids)


class _Watching(Watcher):
    """Tells the stage that each request is at, and which are left out."""

    def __init__(
        self,
        every: Sequence[Asked],
        tell: Callable[..., None],
        is_cancelled: Callable[[str], bool],
        alone: bool,
    ) -> None:
        self._every, self._tell, self._is_cancelled, self._alone = every, tell, is_cancelled, alone

    def begins_on(self, device: str, stages: Sequence[str], request: Request) -> None:
        asked = self._every[request.number - 1]
        if self._is_cancelled(asked.id):
            raise LeftOut("cancelled")
        self._tell("step", id=asked.id, stage=stages[0], done=0, steps=0)

    def left_out(self, request: Request) -> None:
        asked = self._every[request.number - 1]
        if not self._alone:
            self._tell(
                "cancelled" if self._is_cancelled(asked.id) else "apart",
                id=asked.id,
                number=asked.number,
            )
