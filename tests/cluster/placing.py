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
from graphrun.cluster.machines import Cluster, Device, Host, Link
from graphrun.cluster.placement import Assignment, Placement, column_of
from graphrun.cluster.stream import with_figures
from graphrun.cluster.worker import LostValue, Report, Visit, Worker
from graphrun.model.problem import Hardware
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
    count: int = 3, rate: float = 1e9, card: Hardware | None = None, **more: Any
) -> Cluster:
    """``count`` simulated devices, the last on a host of its own, linked at ``rate`` bytes per
    second."""
    card = card or hardware("sim", None)
    devices = [
        Device("a" if number < count - 1 else "b", number, card, 6 << 20, f"sim:{number}")
        for number in range(count)
    ]
    hosts = [
        Host(name, 8 << 30, None, tuple(of for of in devices if of.host == name)) for name in "ab"
    ]
    return Cluster(tuple(hosts), (Link(("a", "b"), rate, 1e-4),), **more)


def placed(
    graph: Any,
    items: int,
    cache: Path,
    held: Sequence[tuple[str, ...]] = STAGES,
    cluster: Cluster | None = None,
    together: Sequence[int] = (),
) -> Placement:
    """The devices of ``cluster`` in turn with the stages of ``held``: one each, or as many as
    ``together`` says. Several have budgets that do not hold the transformer."""
    counts = together or [1] * len(held)
    cluster = cluster or cluster_of(sum(counts))
    stages, assignments, free = (
        tuple(stage.name for stage in graph.stages),
        [],
        iter(cluster.devices),
    )
    for count, own in zip(counts, held, strict=True):
        devices = [next(free) for _ in range(count)]
        budget = {
            **BUDGET,
            "vram": [TOGETHER if count > 1 else BUDGET["vram"]] * count,
            "hardware": devices[0].hardware,
        }
        problem = graphrun.estimate(graph, inputs=SMALL, cache=cache, runs=items, **budget)
        solution = graphrun.plan(segment_of(graph, problem, own, items)[1], cache=cache)
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
        self, graph: Any, placement: Placement, before: Callable[[Here, int], None] | None = None
    ) -> None:
        self.kept: dict[int, bytes] = {}
        self.of = defaultdict[int, int](int)  # ticket -> worker
        self.ran: list[int] = []
        self.ahead: list[int] = []
        self._before, self._done, self._made = before, dict[int, Report](), dict[int, list[int]]()
        pairs = zip(segments_of(graph, placement), placement.assignments, strict=True)
        self.workers = [Worker(segment, of.name) for segment, of in pairs]

    def load_ahead(self, worker: int) -> int:
        self.ahead.append(worker)
        return self.answer(self.workers[worker].load_ahead())

    def answer(self, report: Report) -> int:
        """A ticket for ``report``."""
        self._done[ticket := self._keep(b"")] = report
        return ticket

    def begin(self, worker: int, visits: Sequence[Visit]) -> int:
        self.ran.append(worker)
        if self._before is not None:
            self._before(self, len(self.ran))
        own = [
            of._replace(values=[lambda number=number: self._value(number) for number in of.values])
            for of in visits
        ]
        made, report = self.workers[worker].run(own)
        self._made[ticket := self.answer(report)] = [self._keep(of) for of in made]
        self.of[ticket] = worker
        return ticket

    def done(self, tickets: Collection[int], *, every: bool) -> Collection[int]:
        return list(tickets)

    def report(self, ticket: int) -> Report:
        return self._done.pop(ticket)

    def made(self, ticket: int, visit: int) -> int:
        return self._made[ticket][visit]

    def keep(self, values: Mapping[str, Any]) -> int:
        return self._keep(pack(dict(values)))

    def fetch(self, handle: int) -> dict[str, Any]:
        return dict(unpack(self._value(handle)))

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def _keep(self, data: bytes) -> int:
        self._number = getattr(self, "_number", 0) + 1
        self.kept[self._number] = data
        return self._number

    def _value(self, number: int) -> bytes:
        if number not in self.kept:
            raise LostValue(str(number))
        return self.kept[number]


class Losing:
    """A crew that runs nothing: a run takes some seconds, and each value is lost with some chance
    whenever a run begins."""

    def __init__(self, seed: int, share: float) -> None:
        self._chance, self._share = random.Random(seed), share
        self._kept, self._reports, self._number = set[int](), dict[int, Report](), 0
        self._made, self.most = dict[int, list[int]](), 0  # visits of one run, at most

    def load_ahead(self, worker: int) -> int:
        self._reports[ticket := self.keep({})] = Report()
        return ticket

    def begin(self, worker: int, visits: Sequence[Visit]) -> int:
        lost = tuple(
            (at, number)
            for at, of in enumerate(visits)
            for number, value in enumerate(of.values)
            if value not in self._kept
        )
        self._made[ticket := self.keep({})] = [self.keep({}) for _ in visits]
        self.most = max(self.most, len(visits))
        self._reports[ticket] = (
            Report(lost=lost) if lost else Report(self._chance.uniform(0.5, 2.0))
        )
        self._kept = {value for value in self._kept if self._chance.random() >= self._share}
        return ticket

    def done(self, tickets: Collection[int], *, every: bool) -> Collection[int]:
        return list(tickets)

    def report(self, ticket: int) -> Report:
        return self._reports.pop(ticket)

    def made(self, ticket: int, visit: int) -> int:
        return self._made[ticket][visit]

    def keep(self, values: Mapping[str, Any]) -> int:
        self._number += 1
        self._kept.add(self._number)
        return self._number

    def fetch(self, handle: int) -> dict[str, Any]:
        if handle not in self._kept:
            raise LostValue(str(handle))
        return defaultdict(int)


def ran_by(
    graph: Any, placement: Placement, crew: Any, requests: Sequence[Any], **more: Any
) -> Batch:
    """The batch of ``requests`` that ``crew`` ran by ``placement``; ``more``: fields of the
    context."""

    def elsewhere(*of: Any) -> None:
        Flow(*of, placement, crew).run()

    given = {
        "reuse": None,
        "journal": None,
        "sink": None,
        "watcher": Watcher(),
        "strict": False,
        **more,
    }
    nowhere: Any = None
    context = BatchContext(
        nowhere, nowhere, "sim sim", modules=None, device=None, elsewhere=elsewhere, **given
    )
    return run_requests(graph, resolved(requests_from(requests), graph, SMALL), context)
