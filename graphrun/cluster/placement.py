"""A placement: which devices of a cluster hold which stages, with a plan for each of them. Its text form, and its checker.

place throughput items 100
device a/0+a/1 stages denoise decode      devices of one host that hold these stages together, the main one first
  plan 0a1b2c3d4e5f6071                  the session plan of these stages, as `graphrun.model.plan` writes it
  ...
device a/2 stages encode
  ...

Every device runs consecutive stages of the graph, all of them for each item that it takes. Items pass from a device to any device
that holds the stages that come next; a device takes the next item when it is idle. Like a plan, the text has no times: `Column`
has those of its plan, and `graphrun.cluster.stream` computes those of items.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from graphrun.cluster.machines import Cluster, Device
from graphrun.errors import PlanError
from graphrun.model.choices import stages_of
from graphrun.model.plan import Plan, parse
from graphrun.model.problem import ValueNumbers
from graphrun.model.solution import Solution
from graphrun.verify.check import check

Objective = Literal["throughput", "latency"]
WAITING = 2  # items whose values may wait in RAM, at most, before each device and behind it


@dataclass(frozen=True, slots=True)
class Column:
    """Consecutive stages on a device, or on several of a host together, and what they take there.

    ``cold_seconds``: of its first item, which loads weights; ``ahead_seconds`` of these may pass before its values are there.
    ``steady_seconds``: of each further item. Both have the copies of received and sent values between device and RAM.
    ``ram_bytes``: with those of values that wait; ``pinned_bytes`` of it page-locked. ``solution``: the session plan; None in
    columns of pure numbers.
    """

    stages: tuple[str, ...]
    cold_seconds: float
    ahead_seconds: float
    steady_seconds: float
    ram_bytes: int
    pinned_bytes: int
    solution: Solution | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A device and its column. ``helpers``: further devices of its host that the column has, as `graphrun.model.problem.Helper`."""

    device: Device
    column: Column
    helpers: tuple[Device, ...] = ()

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device and its helpers."""
        return self.device, *self.helpers

    @property
    def name(self) -> str:
        """``HOST/ID``, joined by ``+`` where the column has several devices."""
        return "+".join(of.name for of in self.devices)

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that the device runs."""
        return self.column.stages

    @property
    def plan(self) -> Plan:
        """The plan of the device: a session of these stages."""
        assert self.column.solution is not None
        return self.column.solution.plan


class Crossing(NamedTuple):
    """A value that crosses to devices with the stages ``to`` from those with the stages before them, and its seconds on the slowest
    link between two of them; 0 within a host. Values that only later stages read travel with the item."""

    value: str
    to: tuple[str, ...]
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Assignments of a cluster's devices for ``objective``. ``stages``: of the graph, in order; ``values``: that flow between them.

    ``items_per_second``: the most that can be sustained, however items are dispatched; ``latency_seconds``: of one item alone, with
    nothing loaded where ``items`` is 1, else as a later one; ``seconds``: of ``items`` items, simulated. ``bottleneck``: the stages
    of the column that limits them. `graphrun.cluster.stream.with_figures` computes these four.
    """

    objective: Objective
    items: int
    stages: tuple[str, ...]
    values: tuple[ValueNumbers, ...]
    cluster: Cluster
    assignments: tuple[Assignment, ...]
    items_per_second: float = 0.0
    latency_seconds: float = 0.0
    seconds: float = 0.0
    bottleneck: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"place {self.objective} items {self.items}"]
        for of in self.assignments:
            lines.append(f"device {of.name} stages {' '.join(of.stages)}")
            lines += [f"  {line}" for line in str(of.plan).splitlines()]
        return "\n".join(lines)

    def span(self, of: Assignment) -> tuple[int, int]:
        """Indices of the first stage of ``of`` and of the one behind its last."""
        begin = self.stages.index(of.stages[0])
        return begin, begin + len(of.stages)

    def crossings(self) -> tuple[Crossing, ...]:
        """The values that cross between devices."""
        found: dict[tuple[ValueNumbers, tuple[str, ...]], float] = {}
        for to in self.assignments:
            begin = self.span(to)[0]
            hosts = {of.device.host for of in self.assignments if self.span(of)[1] == begin}
            links = [link for host in hosts if (link := self.cluster.link(host, to.device.host)) is not None]
            for value in crossing(self.stages, self.values, begin) if links else ():
                slowest = max(link.seconds + value.nbytes / link.bytes_per_second for link in links)
                found[value, to.stages] = max(slowest, found.get((value, to.stages), 0.0))
        return tuple(Crossing(of.name, to, of.nbytes, seconds) for (of, to), seconds in found.items())


def crossing(stages: Sequence[str], values: Iterable[ValueNumbers], at: int) -> list[ValueNumbers]:
    """The values that are made before stage number ``at`` and read from there on."""
    place = {stage: number for number, stage in enumerate(stages)}
    return [of for of in values if place[of.producer] < at <= max(place[stage] for stage in of.consumers)]


def bytes_before(stages: Sequence[str], values: Sequence[ValueNumbers]) -> list[int]:
    """Bytes of the values that cross before each stage."""
    return [sum(of.nbytes for of in crossing(stages, values, at)) for at in range(len(stages))]


def parse_placement(text: str) -> tuple[Objective, int, list[tuple[str, tuple[str, ...], Plan]]]:
    """Objective, items, and (name, stages, plan) of each section of a placement's text form. Raises PlanError with the line."""
    head: tuple[Objective, int] | None = None
    sections: list[tuple[str, tuple[str, ...], int, list[str]]] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        line, where = " ".join(raw.split("#", 1)[0].split()), f"placement:{number}"
        if head is None:
            if match := re.fullmatch(r"place (throughput|latency) items ([1-9][0-9]{0,8})", line):
                head = "throughput" if match[1] == "throughput" else "latency", int(match[2])
            elif line:
                raise PlanError(f"expected 'place throughput|latency items COUNT', found {line!r}", where)
        elif match := re.fullmatch(r"device (\S+) stages (.+)", line):
            sections.append((match[1], tuple(match[2].split()), number, []))
        elif sections:
            sections[-1][3].append(raw)
        elif line:
            raise PlanError(f"expected 'device HOST/ID stages STAGE ...', found {line!r}", where)
    if head is None:
        raise PlanError("expected 'place throughput|latency items COUNT' as the first line, found no text", "placement:1")
    plans = [
        (device, stages, parse("\n".join(lines), f"section of {device}, placement:{number}"))
        for device, stages, number, lines in sections
    ]
    return *head, plans


def column_of(stages: Sequence[str], values: Sequence[ValueNumbers], solution: Solution) -> Column:
    """The column of ``solution``, a session plan for some of ``stages`` (`graphrun.batch.schedule.segment_of`). ``values``: of all
    stages."""
    hardware, simulation, own = solution.problem.hardware, solution.simulation, stages_of(solution.problem)
    begin = stages.index(own[0])
    got, sent = crossing(stages, values, begin), crossing(stages, values, begin + len(own))
    copies = sum(of.copy_seconds(hardware, to_host=False) for of in got if set(of.consumers) & set(own))
    copies += sum(of.copy_seconds(hardware, to_host=True) for of in sent if of.producer in own)
    first = simulation.slots[0]
    return Column(
        stages=own,
        cold_seconds=simulation.seconds + copies,
        ahead_seconds=first.seconds if first.part == "load" else 0.0,
        steady_seconds=(simulation.again_seconds if simulation.again else simulation.seconds) + copies,
        ram_bytes=simulation.host_peak_bytes + WAITING * sum(of.nbytes for of in (*got, *sent)),
        pinned_bytes=simulation.pinned_peak_bytes,
        solution=solution,
    )


def violations(placement: Placement) -> list[str]:
    """The rules that ``placement`` breaks, in words: devices, coverage of stages, memory of hosts, and each section's own plan."""
    found, hosts = list[str](), {host.name: host for host in placement.cluster.hosts}
    names = [device.name for of in placement.assignments for device in of.devices]
    found += [f"device {name} has two sections" for name in sorted({name for name in names if names.count(name) > 1})]
    every = placement.stages
    for of in placement.assignments:
        at = every.index(of.stages[0]) if of.stages[0] in every else len(every)
        if every[at : at + len(of.stages)] != of.stages:
            found.append(f"device {of.name}: {' '.join(of.stages)} are not consecutive stages of the graph")
    if not reached(every, [of.stages for of in placement.assignments]):
        found.append("no chain of devices runs every stage")
    for name, host in hosts.items():
        own = [of.column for of in placement.assignments if of.device.host == name]
        ram, pinned = sum(of.ram_bytes for of in own), sum(of.pinned_bytes for of in own)
        if ram > host.ram_bytes:
            found.append(f"host {name}: {ram} bytes of RAM of {host.ram_bytes}")
        if host.pinned_bytes is not None and pinned > host.pinned_bytes:
            found.append(f"host {name}: {pinned} bytes of page-locked RAM of {host.pinned_bytes}")
    for of in placement.assignments:
        solution = of.column.solution
        if solution is None:
            continue
        problem = solution.problem
        planned = [(problem.hardware, problem.budget_bytes), *((each.hardware, each.budget_bytes) for each in problem.helpers)]
        if len(planned) != len(of.devices) or len({device.host for device in of.devices}) > 1:
            found.append(f"device {of.name}: its plan is for {len(planned)} devices of one host")
        for device, (hardware, budget_bytes) in zip(of.devices, planned, strict=False):
            if hardware != device.hardware:
                found.append(f"device {device.name}: its plan is for another {hardware.name}")
            if budget_bytes > device.vram_bytes:
                found.append(f"device {device.name}: its plan is for {budget_bytes} bytes of VRAM of {device.vram_bytes}")
        found += [f"device {of.name}: {v.rule} in slot {v.slot}: {v.detail}" for v in check(problem, solution.plan)]
    return found


def reached(stages: Sequence[str], held: Iterable[Sequence[str]]) -> bool:
    """Whether intervals ``held`` lead from the first of ``stages`` to the last."""
    ends = {0}
    for at in range(len(stages)):
        if at in ends:
            ends |= {at + len(of) for of in held if tuple(stages[at : at + len(of)]) == tuple(of)}
    return len(stages) in ends
