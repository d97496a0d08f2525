"""A placement: which devices of a cluster hold which stages, with a plan for each of them. Its text
form, and its checker.

place throughput items 100 device a/0+a/1 stages denoise decode      devices of one host that hold
these stages together, the main one first
  plan 0a1b2c3d4e5f6071                  the session plan of these stages, as `graphrun.model.plan`
  writes it ...
device a/2 stages encode
  ...

The stages of a device are one or more *parts*, each of consecutive stages of the graph. A run of
the device takes one item through each part, not the same ones: of a device with encode and decode,
one item is encoded and an earlier one, which was denoised elsewhere, is decoded. Items pass from a
device to any device with a part that begins with the stage that comes next; an idle device takes
the next ones. Like a plan, the text has no times: `Column` has those of its plan, and
`graphrun.cluster.stream` computes those of items.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

from graphrun.cluster.machines import Cluster, Device
from graphrun.errors import PlanError
from graphrun.limits import require
from graphrun.model.choices import stages_of
from graphrun.model.plan import BlockLists, Plan, parse
from graphrun.model.problem import ValueNumbers
from graphrun.model.simulation import Simulation
from graphrun.model.solution import Solution
from graphrun.reading import quoted
from graphrun.verify.solution import broken_rules

Objective = Literal["throughput", "latency"]
Span = tuple[int, int]  # number of the first stage of a part, and of the one behind its last
WAITING = 2  # items whose values may wait in RAM, at most, before each device and behind it


@dataclass(frozen=True, slots=True)
class Column:
    """Stages on a device, or consecutive ones on several of a host together, and what they take
    there.

    ``cold_seconds``: of its first run, which loads weights; ``ahead_seconds`` of these may pass
    before its values are there. ``steady_seconds``: of each further run. Both have the copies of
    received and sent values between device and RAM. ``part_seconds``: of a further run of one of
    several parts alone. ``ram_bytes``: with those of values that wait; ``pinned_bytes`` of it
    page-locked. ``solution``: the session plan; None in columns of pure numbers.
    """

    stages: tuple[str, ...]
    cold_seconds: float
    ahead_seconds: float
    steady_seconds: float
    ram_bytes: int
    pinned_bytes: int
    solution: Solution | None = field(default=None, compare=False)
    part_seconds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Assignment:
    """A device and its column. ``secondaries``: further devices of its host that the column has, as
    `graphrun.model.problem.Secondary`."""

    device: Device
    column: Column
    secondaries: tuple[Device, ...] = ()

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device and its secondary devices."""
        return self.device, *self.secondaries

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


class Transfer(NamedTuple):
    """A value that crosses to devices with the stages ``to`` from those with the stages before
    them, and its seconds on the slowest link between two of them; 0 within a host. Values that only
    later stages read travel with the item."""

    value: str
    to: tuple[str, ...]
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Assignments of a cluster's devices for ``objective``. ``stages``: of the graph, in order;
    ``values``: that flow between them.

    ``items_per_second``: the most that can be sustained, however items are dispatched;
    ``latency_seconds``: of one item alone, with nothing loaded where ``items`` is 1, else as a
    later one; ``seconds``: of ``items`` items, simulated. ``bottleneck``: the stages of the column
    that limits them. `graphrun.cluster.stream.with_figures` computes these four.
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

    def spans(self, of: Assignment) -> tuple[Span, ...]:
        """The parts of ``of``, but those after which no device goes on: these get no items."""
        through = _through(self.stages, frozenset(each.stages for each in self.assignments))
        return tuple(span for span in parts_of(self.stages, of.stages) if span[1] in through)

    def transfers(self) -> tuple[Transfer, ...]:
        """The values that cross between devices."""
        found: dict[tuple[ValueNumbers, tuple[str, ...]], float] = {}
        ends = {(end, of.device.host) for of in self.assignments for _, end in self.spans(of)}
        for to, (begin, end) in ((of, span) for of in self.assignments for span in self.spans(of)):
            links = [
                link
                for at, host in ends
                if at == begin and (link := self.cluster.link(host, to.device.host)) is not None
            ]
            for value in transfer(self.stages, self.values, begin) if links else ():
                slowest, stages = (
                    max(link.seconds + value.nbytes / link.bytes_per_second for link in links),
                    self.stages[begin:end],
                )
                found[value, stages] = max(slowest, found.get((value, stages), 0.0))
        return tuple(
            Transfer(of.name, to, of.nbytes, seconds) for (of, to), seconds in found.items()
        )


def parts_of(stages: Sequence[str], own: Collection[str]) -> tuple[Span, ...]:
    """The longest runs of consecutive ``stages`` that are all in ``own``, in order."""
    held = [stage in own for stage in stages]
    begins = [at for at, of in enumerate(held) if of and not (at and held[at - 1])]
    ends = [
        at + 1 for at, of in enumerate(held) if of and not (at + 1 < len(held) and held[at + 1])
    ]
    return tuple(zip(begins, ends, strict=True))


@lru_cache
def _through(stages: tuple[str, ...], held: frozenset[tuple[str, ...]]) -> frozenset[int]:
    """Numbers of stages from which items get through to the end, by devices that hold ``held``."""
    found = {len(stages)}
    for begin, end in sorted(
        (span for own in held for span in parts_of(stages, own)), reverse=True
    ):
        if end in found:
            found.add(begin)
    return frozenset(found)


def separable(stages: Sequence[str], values: Iterable[ValueNumbers], parts: Sequence[Span]) -> bool:
    """Whether ``parts`` may be of one device: no value is made or read in two of them, whose items
    are not the same."""
    place = {stage: number for number, stage in enumerate(stages)}
    touched = ([place[name] for name in (of.producer, *of.consumers)] for of in values)
    return not any(
        sum(any(begin <= at < end for at in of) for begin, end in parts) > 1 for of in touched
    )


def transfer(stages: Sequence[str], values: Iterable[ValueNumbers], at: int) -> list[ValueNumbers]:
    """The values that are made before stage number ``at`` and read from there on."""
    place = {stage: number for number, stage in enumerate(stages)}
    return [
        of
        for of in values
        if place[of.producer] < at <= max(place[stage] for stage in of.consumers)
    ]


def bytes_before(stages: Sequence[str], values: Sequence[ValueNumbers]) -> list[int]:
    """Bytes of the values that cross before each stage."""
    return [sum(of.nbytes for of in transfer(stages, values, at)) for at in range(len(stages))]


def parse_placement(text: str) -> tuple[Objective, int, list[tuple[str, tuple[str, ...], Plan]]]:
    """Objective, items, and (name, stages, plan) of each section of a placement's text form. Raises
    PlanError with the line."""
    head: tuple[Objective, int] | None = None
    sections: list[tuple[str, tuple[str, ...], int, list[str]]] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        line, where = " ".join(raw.split("#", 1)[0].split()), f"placement:{number}"
        if head is None:
            if match := re.fullmatch(r"place (throughput|latency) items ([1-9][0-9]{0,8})", line):
                head = "throughput" if match[1] == "throughput" else "latency", int(match[2])
            elif line:
                raise PlanError(
                    f"expected 'place throughput|latency items COUNT', found {quoted(line)}", where
                )
        elif match := re.fullmatch(r"device (\S+) stages (.+)", line):
            sections.append((match[1], tuple(match[2].split()), number, []))
        elif sections:
            sections[-1][3].append(raw)
        elif line:
            raise PlanError(
                f"expected 'device HOST/ID stages STAGE ...', found {quoted(line)}", where
            )
    if head is None:
        raise PlanError(
            "expected 'place throughput|latency items COUNT' as the first line, found no text",
            "placement:1",
        )
    require(
        "devices",
        len(sections),
        f"it has {len(sections):,} sections of devices",
        "placement",
        PlanError,
    )
    lists = BlockLists()
    plans = [
        (device, stages, parse("\n".join(lines), f"section of {device}, placement:{number}", lists))
        for device, stages, number, lines in sections
    ]
    return *head, plans


def column_of(stages: Sequence[str], values: Sequence[ValueNumbers], solution: Solution) -> Column:
    """The column of ``solution``, a session plan for some of ``stages``
    (`graphrun.batch.schedule.segment_of`). ``values``: of all stages."""
    hardware, simulation, own = (
        solution.problem.hardware,
        solution.simulation,
        stages_of(solution.problem),
    )
    waiting, copies, parts = 0, list[float](), parts_of(stages, own)
    for begin, end in parts:
        got, sent, part = (
            transfer(stages, values, begin),
            transfer(stages, values, end),
            set(stages[begin:end]),
        )
        waiting += WAITING * sum(of.nbytes for of in (*got, *sent))
        taken = sum(
            of.copy_seconds(hardware, to_host=False) for of in got if set(of.consumers) & part
        )
        copies.append(
            taken
            + sum(of.copy_seconds(hardware, to_host=True) for of in sent if of.producer in part)
        )
    alone = (_part_seconds(simulation, stages[begin:end]) for begin, end in parts)
    first = simulation.slots[0]
    return Column(
        stages=own,
        cold_seconds=simulation.seconds + sum(copies),
        ahead_seconds=first.seconds if first.part == "load" else 0.0,
        steady_seconds=(simulation.again_seconds if simulation.again else simulation.seconds)
        + sum(copies),
        ram_bytes=simulation.host_peak_bytes + waiting,
        pinned_bytes=simulation.pinned_peak_bytes,
        solution=solution,
        part_seconds=tuple(a + b for a, b in zip(alone, copies, strict=True))
        if len(parts) > 1
        else (),
    )


def _part_seconds(simulation: Simulation, stages: Sequence[str]) -> float:
    """Of a further run that calls only ``stages``: the slots of others still load what they
    load."""
    problem, rate = simulation.problem, simulation.problem.hardware.h2d_bytes_per_second
    stage_of = {phase.name: phase.stage for phase in problem.phases}
    slots = simulation.again or simulation.slots
    own = sum(of.seconds for of in slots if of.part == "load" or stage_of.get(of.phase) in stages)
    return own + sum(
        of.loaded_bytes / rate
        for of in slots
        if of.part != "load" and stage_of.get(of.phase) not in stages
    )


def violations(placement: Placement) -> list[str]:
    """The rules that ``placement`` breaks, in words: devices, coverage of stages, memory of hosts,
    and each section's own plan."""
    found, hosts = list[str](), {host.name: host for host in placement.cluster.hosts}
    names = [device.name for of in placement.assignments for device in of.devices]
    found += [
        f"device {name} has two sections"
        for name in sorted({name for name in names if names.count(name) > 1})
    ]
    every = placement.stages
    for of in placement.assignments:
        if tuple(stage for stage in every if stage in of.stages) != of.stages:
            found.append(
                f"device {of.name}: {' '.join(of.stages)} are not stages of the graph, in its order"
            )
        elif not separable(every, placement.values, parts_of(every, of.stages)):
            found.append(
                f"device {of.name}: {' '.join(of.stages)} are not consecutive, and read the same value or one another's"
            )
    if not reached(
        len(every), [span for of in placement.assignments for span in placement.spans(of)]
    ):
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
        planned = [
            (problem.hardware, problem.budget_bytes),
            *((each.hardware, each.budget_bytes) for each in problem.secondaries),
        ]
        if len(planned) != len(of.devices) or len({device.host for device in of.devices}) > 1:
            found.append(f"device {of.name}: its plan is for {len(planned)} devices of one host")
        for device, (hardware, budget_bytes) in zip(of.devices, planned, strict=False):
            if hardware != device.hardware:
                found.append(f"device {device.name}: its plan is for another {hardware.name}")
            if budget_bytes > device.vram_bytes:
                found.append(
                    f"device {device.name}: its plan is for {budget_bytes} bytes of VRAM of {device.vram_bytes}"
                )
        found += [
            f"device {of.name}: {v.rule} in slot {v.slot}: {v.detail}"
            for v in broken_rules(problem, solution.plan)
        ]
    return found


def reached(last: int, held: Iterable[Span]) -> bool:
    """Whether parts ``held`` lead from the first of so many stages to the last."""
    ends = {0}
    for begin, end in sorted(held):
        if begin in ends:
            ends.add(end)
    return last in ends
