"""The small FLUX at its smallest on three simulated devices of two hosts, and a crew in one
process."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import graphrun
from graphrun.batch.cache.pack import pack, unpack
from graphrun.batch.queue import Batch, BatchContext, run_requests
from graphrun.batch.requests import requests_from, resolved
from graphrun.batch.schedule import segment_of
from graphrun.batch.watch import Watcher
from graphrun.cluster.flow import Flow, segments_of
from graphrun.cluster.machines import Cluster, ClusterDevice, ClusterHost, Link
from graphrun.cluster.placement import Assignment, Placement, column_of
from graphrun.cluster.stream import with_figures
from graphrun.cluster.worker import LostValue, Report, StageWorker, Visit
from graphrun.model.hardware import Hardware
from graphrun.profile.hardware_profiles import hardware

GRAPH = Path(__file__).parent.parent.parent / "graphs" / "flux-tiny.yaml"
SMALL = {"height": 32, "width": 32, "steps": 3, "max_sequence_length": 16}
BUDGET = {"vram": "6M", "ram": "8G", "hardware": "sim"}
TOGETHER = "2M"  # of each device of a column with several
STAGES = (("encode",), ("denoise",), ("decode",))


def requests(count: int) -> list[dict[str, Any]]:
    """As many requests, all different."""
    return [{"prompt": f"prompt {number}", "seed": number} for number in range(count)]


def cluster_of(
    count: int = 3, rate: float = 1e9, card: Hardware | None = None, **options: Any
) -> Cluster:
    """``count`` simulated devices, the last on a host of its own, linked at ``rate`` bytes per
    second."""
    card = card or hardware("sim", None)
    devices = [
        ClusterDevice("a" if number < count - 1 else "b", number, card, 6 << 20, f"sim:{number}")
        for number in range(count)
    ]
    hosts = [
        ClusterHost(name, 8 << 30, None, tuple(device for device in devices if device.host == name))
        for name in "ab"
    ]
    return Cluster(tuple(hosts), (Link(("a", "b"), rate, 1e-4),), **options)


def placed(
    graph: Any,
    items: int,
    cache: Path,
    stage_sets: Sequence[tuple[str, ...]] = STAGES,
    cluster: Cluster | None = None,
    team_sizes: Sequence[int] = (),
) -> Placement:
    """The devices of ``cluster`` in turn with the stages of ``held``: one each, or as many as
    ``together`` says. Several have budgets that do not hold the transformer."""
    counts = team_sizes or [1] * len(stage_sets)
    cluster = cluster or cluster_of(sum(counts))
    stages, assignments, free = (
        tuple(stage.name for stage in graph.stages),
        [],
        iter(cluster.devices),
    )
    for count, stage_names in zip(counts, stage_sets, strict=True):
        devices = [next(free) for _ in range(count)]
        budget = {
            **BUDGET,
            "vram": [TOGETHER if count > 1 else BUDGET["vram"]] * count,
            "hardware": devices[0].hardware,
        }
        problem = graphrun.estimate(graph, inputs=SMALL, cache=cache, runs=items, **budget)
        solution = graphrun.plan(segment_of(graph, problem, stage_names, items)[1], cache=cache)
        assignments.append(
            Assignment(devices[0], column_of(stages, problem.values, solution), tuple(devices[1:]))
        )
    return with_figures(
        Placement("throughput", items, stages, problem.values, cluster, tuple(assignments))
    )


class Here:
    """A crew in this process. ``before(worker, run)`` is called before each run, and may lose
    values of `kept`."""

    def __init__(
        self,
        graph: Any,
        placement: Placement,
        before_run: Callable[[Here, int], None] | None = None,
    ) -> None:
        self.values: dict[int, bytes] = {}
        self.worker_of = defaultdict[int, int](int)  # ticket -> worker
        self.ran: list[int] = []
        self.ahead_loads: list[int] = []
        self._before_run, self._reports, self._results = (
            before_run,
            dict[int, Report](),
            dict[int, list[int]](),
        )
        pairs = zip(segments_of(graph, placement), placement.assignments, strict=True)
        self.workers = [StageWorker(segment, assignment.name) for segment, assignment in pairs]

    def load_ahead(self, worker: int) -> int:
        self.ahead_loads.append(worker)
        return self.answer(self.workers[worker].load_ahead())

    def answer(self, report: Report) -> int:
        """A ticket for ``report``."""
        self._reports[ticket := self._keep(b"")] = report
        return ticket

    def begin(self, worker: int, visits: Sequence[Visit]) -> int:
        self.ran.append(worker)
        if self._before_run is not None:
            self._before_run(self, len(self.ran))
        lazy_visits = [
            visit._replace(
                values=[lambda number=number: self._value(number) for number in visit.values]
            )
            for visit in visits
        ]
        outputs, report = self.workers[worker].run(lazy_visits)
        self._results[ticket := self.answer(report)] = [self._keep(output) for output in outputs]
        self.worker_of[ticket] = worker
        return ticket

    def finished(self, tickets: Collection[int], *, wait_for_all: bool) -> Collection[int]:
        return list(tickets)

    def report(self, ticket: int) -> Report:
        return self._reports.pop(ticket)

    def result(self, ticket: int, visit: int) -> int:
        return self._results[ticket][visit]

    def keep(self, values: Mapping[str, Any]) -> int:
        return self._keep(pack(dict(values)))

    def fetch(self, handle: int) -> dict[str, Any]:
        return dict(unpack(self._value(handle)))

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def _keep(self, data: bytes) -> int:
        self._number = getattr(self, "_number", 0) + 1
        self.values[self._number] = data
        return self._number

    def _value(self, number: int) -> bytes:
        if number not in self.values:
            raise LostValue(str(number))
        return self.values[number]


class Losing:
    """A crew that runs nothing: a run takes some seconds, and each value is lost with some chance
    whenever a run begins."""

    def __init__(self, seed: int, share: float) -> None:
        self._chance, self._share = random.Random(seed), share
        self._values, self._reports, self._number = set[int](), dict[int, Report](), 0
        self._results, self.max_visits = dict[int, list[int]](), 0  # visits of one run, at most

    def load_ahead(self, worker: int) -> int:
        self._reports[ticket := self.keep({})] = Report()
        return ticket

    def begin(self, worker: int, visits: Sequence[Visit]) -> int:
        lost_values = tuple(
            (index, number)
            for index, visit in enumerate(visits)
            for number, value in enumerate(visit.values)
            if value not in self._values
        )
        self._results[ticket := self.keep({})] = [self.keep({}) for _ in visits]
        self.max_visits = max(self.max_visits, len(visits))
        self._reports[ticket] = (
            Report(lost_values=lost_values)
            if lost_values
            else Report(self._chance.uniform(0.5, 2.0))
        )
        self._values = {value for value in self._values if self._chance.random() >= self._share}
        return ticket

    def finished(self, tickets: Collection[int], *, wait_for_all: bool) -> Collection[int]:
        return list(tickets)

    def report(self, ticket: int) -> Report:
        return self._reports.pop(ticket)

    def result(self, ticket: int, visit: int) -> int:
        return self._results[ticket][visit]

    def keep(self, values: Mapping[str, Any]) -> int:
        self._number += 1
        self._values.add(self._number)
        return self._number

    def fetch(self, handle: int) -> dict[str, Any]:
        if handle not in self._values:
            raise LostValue(str(handle))
        return defaultdict(int)


def ran_by(
    graph: Any, placement: Placement, crew: Any, requests: Sequence[Any], **options: Any
) -> Batch:
    """The batch of ``requests`` that ``crew`` ran by ``placement``; ``more``: fields of the
    context."""

    def elsewhere(*arguments: Any) -> None:
        Flow(*arguments, placement, crew).run()

    defaults = {
        "reuse": None,
        "journal": None,
        "sink": None,
        "watcher": Watcher(),
        "strict": False,
        **options,
    }
    nowhere: Any = None
    context = BatchContext(
        nowhere, nowhere, "sim sim", modules=None, device=None, dispatch=elsewhere, **defaults
    )
    return run_requests(graph, resolved(requests_from(requests), graph, SMALL), context)
