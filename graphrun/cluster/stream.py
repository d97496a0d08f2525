"""What a placement does with items: an event simulator of a stream of them, the rate that can be
sustained, and one item's latency.

Shares no code with the program that chooses placements.

    before stage 0    a/0 [encode]    before stage 1    b/0 [denoise decode]    done
    o o o o o o o ->  o >###> o o  ->       o o     ->       o >###>        ->  o o o
                      inbox   outbox                         inbox

An idle device takes the next item of its inbox. It fills that from the items that wait before its
first stage, the oldest first, until WAITING are in it or on their way; it starts nothing while
WAITING results wait behind it. Of a device with several parts each has these for itself; a run
takes an item through each part that is able to, and counts as one of all of them. Values take their
turn on the link between two hosts, one item after another in each direction.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count

import networkx

from graphrun.cluster.machines import Link
from graphrun.cluster.placement import WAITING, Assignment, Placement, bytes_before, parts_of

WARM_ITEMS = 500  # at least, after which a rate is measured over as many again


@dataclass(slots=True, eq=False)
class _Machine:
    """A device: its ``parts``, and those that it runs now."""

    warm: bool
    parts: list[_Worker] = field(default_factory=list)
    running: list[_Worker] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Worker:
    """A part of a device at work. ``inbox``: items whose values are there; ``coming``: those on
    their way; ``outbox``: results that wait."""

    assignment: Assignment
    begin: int
    end: int
    machine: _Machine
    inbox: int = 0
    coming: int = 0
    outbox: int = 0

    @property
    def queued(self) -> int:
        """Items that it has, in all."""
        return self.inbox + self.coming + (self in self.machine.running)


@dataclass(frozen=True, slots=True)
class _Item:
    """An item that waits since ``clock``; ``maker`` has its values, None for a new one."""

    clock: float
    maker: _Worker | None

    @property
    def host(self) -> str:
        """Where its values are."""
        return self.maker.assignment.device.host if self.maker is not None else ""


class _Stream:
    """Items on their way through a placement."""

    def __init__(self, placement: Placement, items: int, warm: bool) -> None:
        self.last, self.link = len(placement.stages), cache(placement.cluster.link)
        # by stage, then host
        self.waiting: dict[int, dict[str, deque[_Item]]] = defaultdict(lambda: defaultdict(deque))
        self.waiting[0][""].extend(_Item(0.0, None) for _ in range(items))
        self.workers: dict[int, list[_Worker]] = defaultdict(list)  # by first stage
        for of in placement.assignments:
            machine = _Machine(warm)
            for span in placement.spans(of):
                machine.parts.append(worker := _Worker(of, *span, machine))
                self.workers[worker.begin].append(worker)
        self.nbytes = bytes_before(placement.stages, placement.values)
        # when the link from a host to another is free
        self.free_seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.events: list[tuple[float, int, Callable[[_Worker], None], _Worker]] = []
        self.order, self.clock, self.done = count(), 0.0, list[float]()

    def run(self) -> list[float]:
        """When each item is done."""
        self._pull(0)
        while self.events:
            self.clock, _, happens, worker = heapq.heappop(self.events)
            happens(worker)
            self._start(worker)
        return self.done

    def _at(self, seconds: float, happens: Callable[[_Worker], None], worker: _Worker) -> None:
        heapq.heappush(self.events, (seconds, next(self.order), happens, worker))

    def _pull(self, begin: int) -> None:
        """Sends items that wait before stage ``begin`` to the devices with the fewest."""
        while found := self._next(begin):
            host, worker, link = found
            item = self.waiting[begin][host].popleft()
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
            self._at(arrives, self._arrived, worker)

    def _next(self, begin: int) -> tuple[str, _Worker, Link] | None:
        """Of the item that waits longest, and can be sent, the host, the device that gets it, and
        the link."""
        free = [of for of in self.workers[begin] if of.coming + of.inbox < WAITING]
        queues = (
            {host: queue[0].clock for host, queue in self.waiting[begin].items() if queue}
            if free
            else {}
        )
        for host in sorted(queues, key=queues.__getitem__):
            links = [
                (of, self.link(host or of.assignment.device.host, of.assignment.device.host))
                for of in free
            ]
            able = [(of, link) for of, link in links if link is not None]
            if able:
                return host, *min(
                    able,
                    key=lambda pair: (pair[0].queued, pair[0].assignment.column.steady_seconds),
                )
        return None

    def _arrived(self, worker: _Worker) -> None:
        worker.coming -= 1
        worker.inbox += 1

    def _start(self, worker: _Worker) -> None:
        machine, column = worker.machine, worker.assignment.column
        able = (
            []
            if machine.running
            else [of for of in machine.parts if of.inbox and of.outbox < WAITING]
        )
        if not able:
            return
        seconds = (
            column.steady_seconds if machine.warm else column.cold_seconds - column.ahead_seconds
        )
        start = self.clock if machine.warm else max(self.clock, column.ahead_seconds)
        machine.running, machine.warm = able, True
        for of in able:
            of.inbox -= 1
        self._at(start + seconds, self._finished, worker)
        for of in able:
            self._pull(of.begin)

    def _finished(self, worker: _Worker) -> None:
        ran, worker.machine.running = worker.machine.running, []
        for of in ran:
            if of.end == self.last:
                self.done.append(self.clock)
            else:
                of.outbox += 1
                self.waiting[of.end][of.assignment.device.host].append(_Item(self.clock, of))
        for of in ran:
            if of.end < self.last:
                self._pull(of.end)


def finish_seconds(placement: Placement, items: int, *, warm: bool = False) -> list[float]:
    """When each of ``items`` items is done, in order, all there at 0 and dispatched as above.
    ``warm``: with weights loaded."""
    return _Stream(placement, items, warm).run()


def steady_rate(placement: Placement) -> float:
    """Items per second of a long stream, measured after its first WARM_ITEMS, or ten per device."""
    first = max(WARM_ITEMS, 10 * len(placement.assignments))
    times = finish_seconds(placement, 3 * first, warm=True)[first : 2 * first]
    return (len(times) - 1) / (times[-1] - times[0])


def with_figures(placement: Placement) -> Placement:
    """``placement`` with its rate, latency, seconds and bottleneck."""
    rate, limiting = _rate(placement, by_host=False)
    hosts = [host.name for host in placement.cluster.hosts]
    links = [placement.cluster.link(a, b) for a in hosts for b in hosts]
    if rate * sum(bytes_before(placement.stages, placement.values)) > min(
        link.bytes_per_second if link is not None else 0.0 for link in links
    ):
        rate, limiting = _rate(placement, by_host=True)
    latency, chain = alone(placement)
    if placement.objective == "latency":
        limiting = max(chain, key=lambda of: taken_seconds(of, placement.items)).stages
    seconds = max(finish_seconds(placement, placement.items))
    return replace(
        placement,
        items_per_second=rate,
        latency_seconds=latency,
        seconds=seconds,
        bottleneck=limiting,
    )


def _rate(placement: Placement, *, by_host: bool) -> tuple[float, tuple[str, ...]]:
    """The largest flow of items, and the stages of the devices that limit it; none where links do.
    ``by_host``: links between hosts limit it too, each boundary by itself."""
    network, nbytes, last = (
        networkx.DiGraph(),
        bytes_before(placement.stages, placement.values),
        len(placement.stages),
    )
    hosts = sorted({of.device.host for of in placement.assignments}) if by_host else [""]
    for at, one, other in (
        (at, one, other) for at in range(1, last) for one in hosts for other in hosts
    ):
        link = placement.cluster.link(one, other)
        if link is not None:
            limit = (
                {}
                if one == other or not nbytes[at]
                else {"capacity": link.bytes_per_second / nbytes[at]}
            )
            network.add_edge((at, one, "made"), (at, other, "wanted"), **limit)
    for host in hosts:
        network.add_edge("new", (0, host, "wanted"))
        network.add_edge((last, host, "made"), "done")
    for of, (begin, end) in [
        (each, span) for each in placement.assignments for span in placement.spans(each)
    ]:
        host = of.device.host if by_host else ""
        ends = (begin, host, "wanted"), (end, host, "made")
        known = network.get_edge_data(*ends, {"capacity": 0.0})["capacity"]
        network.add_edge(*ends, capacity=known + 1 / of.column.steady_seconds)
    rate, (near, _) = networkx.minimum_cut(network, "new", "done")
    cut = {
        (a, b): of["capacity"]
        for a, b, of in network.edges(data=True)
        if a in near and b not in near
    }
    (begin, _, of_begin), (end, *_) = max(cut, key=lambda edge: cut[edge])
    return float(rate), placement.stages[begin:end] if of_begin == "wanted" else ()


def taken_seconds(of: Assignment, items: int, part: int = 0) -> float:
    """Of one item on a device, in part number ``part``: the first where there is only one, else a
    later one."""
    column = of.column
    if items == 1:
        return column.cold_seconds - column.ahead_seconds
    return column.part_seconds[part] if column.part_seconds else column.steady_seconds


def alone(placement: Placement) -> tuple[float, tuple[Assignment, ...]]:
    """Seconds of one item alone, and the devices that run it: of those that hold the same stages,
    the one that is done first. A device starts when the values have arrived and its weights are
    there."""
    cold, stages, nbytes = (
        placement.items == 1,
        placement.stages,
        bytes_before(placement.stages, placement.values),
    )
    spans = ((of, span) for of in placement.assignments for span in placement.spans(of))
    parts = [(of, parts_of(stages, of.stages).index(span), span) for of, span in spans]

    def rest(
        at: int, clock: float, chain: tuple[Assignment, ...]
    ) -> tuple[float, tuple[Assignment, ...]]:
        if at == len(stages):
            return clock, chain
        first: dict[int, tuple[float, Assignment]] = {}
        for of, number, (begin, end) in parts:
            link = placement.cluster.link(
                chain[-1].device.host if chain else of.device.host, of.device.host
            )
            if begin != at or link is None:
                continue
            arrived = clock + (link.seconds + nbytes[at] / link.bytes_per_second if chain else 0.0)
            ready = max(arrived, of.column.ahead_seconds) if cold else arrived
            finish = ready + taken_seconds(of, placement.items, number)
            if end not in first or finish < first[end][0]:
                first[end] = finish, of
        ways = [rest(end, finish, (*chain, of)) for end, (finish, of) in first.items()]
        return min(ways, key=lambda way: way[0], default=(float("inf"), chain))

    return rest(0, 0.0, ())
