"""Simulate a stream of items through a placement: sustainable rate and latency.

Shares no code with the program that chooses placements.

    before stage 0    a/0 [encode]    before stage 1    b/0 [denoise decode]    done
    o o o o o o o ->  o >###> o o  ->       o o     ->       o >###>        ->  o o o
                      inbox   outbox                         inbox

Items and devices follow the rules of `graphrun.cluster.flow`: the oldest items fill an inbox up to
WAITING, a device starts nothing while WAITING results wait behind it, and a run takes one item
through each part that has one. Here a run of any parts takes the time of a run of all parts. Values
take turns on the link between two hosts, item by item in each direction.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from math import ceil

import networkx

from graphrun.cluster.machines import Link
from graphrun.cluster.placement import WAITING, Assignment, Placement, bytes_before, parts_of

WARM_ITEMS = 500  # fewest items before a rate is measured, over as many items


@dataclass(slots=True, eq=False)
class _Machine:
    """A device with its ``parts``, and those in the current run, which ends at ``end_seconds``."""

    warm: bool
    name: str
    end_seconds: float = 0.0
    run_count: int = 0
    parts: list[_StreamWorker] = field(default_factory=list)
    active_parts: list[_StreamWorker] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _StreamWorker:
    """A part of a device. ``inbox``: items whose values have arrived. ``coming``: items on their
    way. ``outbox``: results that wait."""

    assignment: Assignment
    begin: int
    end: int
    machine: _Machine
    inbox: int = 0
    coming: int = 0
    outbox: int = 0

    @property
    def queued(self) -> int:
        """The number of its items: arriving, waiting and running."""
        return self.inbox + self.coming + (self in self.machine.active_parts)


@dataclass(frozen=True, slots=True)
class _StreamItem:
    """An item that has waited since ``clock``. ``maker``: who has its values; None: a new item."""

    clock: float
    maker: _StreamWorker | None

    @property
    def host(self) -> str:
        return self.maker.assignment.device.host if self.maker is not None else ""


class _Stream:
    def __init__(self, placement: Placement, items: int, warm: bool) -> None:
        self.last, self.link = len(placement.stages), cache(placement.cluster.link)
        # by stage, then host
        self.queues: dict[int, dict[str, deque[_StreamItem]]] = defaultdict(
            lambda: defaultdict(deque)
        )
        self.queues[0][""].extend(_StreamItem(0.0, None) for _ in range(items))
        self.workers: dict[int, list[_StreamWorker]] = defaultdict(list)  # by first stage
        self.machines: list[_Machine] = []
        for assignment in placement.assignments:
            machine = _Machine(warm, assignment.name)
            self.machines.append(machine)
            for span in placement.spans(assignment):
                machine.parts.append(worker := _StreamWorker(assignment, *span, machine))
                self.workers[worker.begin].append(worker)
        self.nbytes = bytes_before(placement.stages, placement.values)
        # when the link between two hosts is free
        self.free_seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.events: list[tuple[float, int, Callable[[_StreamWorker], None], _StreamWorker]] = []
        self.order, self.clock, self.finish_times = count(), 0.0, list[float]()
        # items not yet sent to a part, by its first stage
        self.unsent_items = dict.fromkeys(self.workers, items)

    def run(self) -> list[float]:
        """Return when each item is done."""
        self._pull(0)
        while self.events:
            self.clock, _, happens, worker = heapq.heappop(self.events)
            happens(worker)
            self._start(worker)
        return self.finish_times

    def _schedule_event(
        self, seconds: float, happens: Callable[[_StreamWorker], None], worker: _StreamWorker
    ) -> None:
        heapq.heappush(self.events, (seconds, next(self.order), happens, worker))

    def _pull(self, begin: int) -> None:
        """Send items that wait before stage ``begin`` to the least loaded devices."""
        while choice := self._next(begin):
            host, worker, link = choice
            self.unsent_items[begin] -= 1
            item = self.queues[begin][host].popleft()
            arrives = self.clock
            if item.maker is not None:
                way = host, worker.assignment.device.host
                self.free_seconds[way] = (
                    max(self.clock, self.free_seconds[way])
                    + self.nbytes[begin] / link.bytes_per_second
                )
                arrives = self.free_seconds[way] + link.seconds
                item.maker.outbox -= 1
                self._start(item.maker)
            worker.coming += 1
            self._schedule_event(arrives, self._receive, worker)

    def _next(self, begin: int) -> tuple[str, _StreamWorker, Link] | None:
        """Return the host of the next item to send, the item's next device, and the link."""
        queues = {host: queue[0].clock for host, queue in self.queues[begin].items() if queue}
        free = sorted(
            (worker for worker in self.workers[begin] if worker.coming + worker.inbox < WAITING)
            if queues
            else (),
            key=lambda worker: (worker.queued, worker.assignment.column.steady_seconds),
        )
        helps = cache(self._helps)  # takes long with many peers
        for host in sorted(queues, key=queues.__getitem__):
            for worker in free:
                own_host = worker.assignment.device.host
                link = self.link(host or own_host, own_host)
                if link is not None and helps(worker):
                    return host, worker, link
        return None

    def _helps(self, worker: _StreamWorker) -> bool:
        """Whether one more item on ``worker`` ends before its peers finish all the others."""
        finish = self._ready_seconds(worker) + worker.assignment.column.steady_seconds
        item_count = self.unsent_items[worker.begin]
        for peer in self.workers[worker.begin]:
            if peer is worker or peer.end != worker.end:
                continue
            runs = (finish - self._ready_seconds(peer)) / peer.assignment.column.steady_seconds
            item_count -= max(0, ceil(runs * (1 - 1e-9)) - 1)  # those that end earlier
            if item_count <= 0:
                return False
        return item_count > 0

    def _ready_seconds(self, worker: _StreamWorker) -> float:
        """Return when ``worker`` has finished its items. Before its first run: as if that run took
        a later run's seconds and started that much later."""
        machine, column = worker.machine, worker.assignment.column
        seconds = max(self.clock, machine.end_seconds)
        if not machine.warm:
            seconds = max(seconds, column.ahead_seconds)
            seconds += column.first_seconds - column.steady_seconds
        return seconds + (worker.inbox + worker.coming) * column.steady_seconds

    def _receive(self, worker: _StreamWorker) -> None:
        worker.coming -= 1
        worker.inbox += 1

    def _start(self, worker: _StreamWorker) -> None:
        machine, column = worker.machine, worker.assignment.column
        startable_parts = (
            []
            if machine.active_parts
            else [part for part in machine.parts if part.inbox and part.outbox < WAITING]
        )
        if not startable_parts:
            return
        seconds = column.steady_seconds if machine.warm else column.first_seconds
        start = self.clock if machine.warm else max(self.clock, column.ahead_seconds)
        machine.active_parts, machine.warm = startable_parts, True
        machine.end_seconds, machine.run_count = start + seconds, machine.run_count + 1
        for part in startable_parts:
            part.inbox -= 1
        self._schedule_event(start + seconds, self._finish, worker)
        for part in startable_parts:
            self._pull(part.begin)

    def _finish(self, worker: _StreamWorker) -> None:
        finished_parts, worker.machine.active_parts = worker.machine.active_parts, []
        for part in finished_parts:
            if part.end == self.last:
                self.finish_times.append(self.clock)
            else:
                part.outbox += 1
                self.queues[part.end][part.assignment.device.host].append(
                    _StreamItem(self.clock, part)
                )
        for part in finished_parts:
            if part.end < self.last:
                self._pull(part.end)


def finish_seconds(placement: Placement, items: int, *, warm: bool = False) -> list[float]:
    """Return when each of ``items`` items is done, in order, if all exist at time 0. ``warm``:
    weights are loaded."""
    return _Stream(placement, items, warm).run()


def idle_devices(placement: Placement) -> list[str]:
    """Return the names of assignments without items: the others finish all items earlier."""
    stream = _Stream(placement, placement.items, warm=False)
    stream.run()
    return [machine.name for machine in stream.machines if not machine.run_count]


def steady_rate(placement: Placement) -> float:
    """Return the items per second of a long stream, after WARM_ITEMS items or ten per device."""
    first = max(WARM_ITEMS, 10 * len(placement.assignments))
    times = finish_seconds(placement, 3 * first, warm=True)[first : 2 * first]
    return (len(times) - 1) / (times[-1] - times[0])


def with_figures(placement: Placement) -> Placement:
    """Return ``placement`` with its rate, latency, seconds and bottleneck."""
    rate, limiting = _rate(placement, by_host=False)
    hosts = [host.name for host in placement.cluster.hosts]
    links = [placement.cluster.link(a, b) for a in hosts for b in hosts]
    if rate * sum(bytes_before(placement.stages, placement.values)) > min(
        link.bytes_per_second if link is not None else 0.0 for link in links
    ):
        rate, limiting = _rate(placement, by_host=True)
    latency, chain = alone(placement)
    if placement.objective == "latency":
        limiting = max(
            chain, key=lambda assignment: taken_seconds(assignment, placement.items)
        ).stages
    seconds = max(finish_seconds(placement, placement.items))
    return replace(
        placement,
        items_per_second=rate,
        latency_seconds=latency,
        seconds=seconds,
        bottleneck=limiting,
    )


def _rate(placement: Placement, *, by_host: bool) -> tuple[float, tuple[str, ...]]:
    """Return the largest flow of items, and the stages of the devices that limit it, if any do.
    ``by_host``: include links between hosts, separately for each boundary."""
    network, nbytes, last = (
        networkx.DiGraph(),
        bytes_before(placement.stages, placement.values),
        len(placement.stages),
    )
    hosts = (
        sorted({assignment.device.host for assignment in placement.assignments})
        if by_host
        else [""]
    )
    for stage, sender, receiver in (
        (stage, sender, receiver)
        for stage in range(1, last)
        for sender in hosts
        for receiver in hosts
    ):
        link = placement.cluster.link(sender, receiver)
        if link is not None:
            limit = (
                {}
                if sender == receiver or not nbytes[stage]
                else {"capacity": link.bytes_per_second / nbytes[stage]}
            )
            network.add_edge((stage, sender, "made"), (stage, receiver, "wanted"), **limit)
    for host in hosts:
        network.add_edge("new", (0, host, "wanted"))
        network.add_edge((last, host, "made"), "done")
    for assignment, (begin, end) in [
        (member, span) for member in placement.assignments for span in placement.spans(member)
    ]:
        host = assignment.device.host if by_host else ""
        ends = (begin, host, "wanted"), (end, host, "made")
        capacity = network.get_edge_data(*ends, {"capacity": 0.0})["capacity"]
        network.add_edge(*ends, capacity=capacity + 1 / assignment.column.steady_seconds)
    rate, (source_side, _) = networkx.minimum_cut(network, "new", "done")
    cut = {
        (a, b): edge_data["capacity"]
        for a, b, edge_data in network.edges(data=True)
        if a in source_side and b not in source_side
    }
    (begin, _, of_begin), (end, *_) = max(cut, key=lambda edge: cut[edge])
    return float(rate), placement.stages[begin:end] if of_begin == "wanted" else ()


def taken_seconds(assignment: Assignment, items: int, part: int = 0) -> float:
    """Return the seconds of one item in part number ``part``: of a first item if ``items`` is 1."""
    column = assignment.column
    if items == 1:
        return column.first_seconds
    return column.part_seconds[part] if column.part_seconds else column.steady_seconds


def alone(placement: Placement) -> tuple[float, tuple[Assignment, ...]]:
    """Return the seconds of a single item, and the devices that run it.

    Of devices with the same stages, the first to finish runs it. A device starts when the values
    have arrived and its weights are loaded.
    """
    cold, stages, nbytes = (
        placement.items == 1,
        placement.stages,
        bytes_before(placement.stages, placement.values),
    )
    spans = (
        (assignment, span)
        for assignment in placement.assignments
        for span in placement.spans(assignment)
    )
    parts = [
        (assignment, parts_of(stages, assignment.stages).index(span), span)
        for assignment, span in spans
    ]

    def rest(
        stage: int, clock: float, chain: tuple[Assignment, ...]
    ) -> tuple[float, tuple[Assignment, ...]]:
        if stage == len(stages):
            return clock, chain
        first: dict[int, tuple[float, Assignment]] = {}
        for assignment, number, (begin, end) in parts:
            link = placement.cluster.link(
                chain[-1].device.host if chain else assignment.device.host, assignment.device.host
            )
            if begin != stage or link is None:
                continue
            arrived = clock + (
                link.seconds + nbytes[stage] / link.bytes_per_second if chain else 0.0
            )
            ready = max(arrived, assignment.column.ahead_seconds) if cold else arrived
            finish = ready + taken_seconds(assignment, placement.items, number)
            if end not in first or finish < first[end][0]:
                first[end] = finish, assignment
        ways = [
            rest(end, finish, (*chain, assignment)) for end, (finish, assignment) in first.items()
        ]
        return min(ways, key=lambda way: way[0], default=(float("inf"), chain))

    return rest(0, 0.0, ())
