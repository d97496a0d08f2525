"""A placement: which devices of a cluster run which stages, with a plan for each device.

Its text form, which has no times, and its checker:

    place throughput items 100
    device a/0+a/1 stages denoise decode     devices of one host that run these stages as a team,
                                             the main device first
      plan 0a1b2c3d4e5f6071                  the session plan of these stages, in the format of
      ...                                    `graphrun.model.plan`
    device a/2 stages encode
      ...

The stages of a device form one or more *parts* of consecutive stages of the graph. A run of the
device takes one item through each part, and these items differ. Example: a device with encode and
decode encodes one item and decodes an earlier item, which another device denoised. An item passes
to any idle device with a part that starts with the item's next stage. `Column` has the times of a
device's plan, and `graphrun.cluster.stream` computes the times of items.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from graphrun.cluster.machines import Cluster, ClusterDevice
from graphrun.errors import InputError, PlanError
from graphrun.limits import require
from graphrun.model.choices import stages_of
from graphrun.model.plan import BlockLists, Plan, parse
from graphrun.model.problem import ValueNumbers
from graphrun.model.simulation import Simulation
from graphrun.model.solution import Solution
from graphrun.reading import quoted
from graphrun.verify.solution import broken_rules

Objective = Literal["throughput", "latency"]


def refuse_objective(name: str) -> None:
    """Raise InputError if there is no objective called ``name``."""
    if name not in get_args(Objective):
        raise InputError(f"objective {name!r} is not known; use {' or '.join(get_args(Objective))}")


StageSpan = tuple[int, int]  # of a part: its first stage, and the stage after its last
WAITING = 2  # most items that wait in RAM before a device, and most results behind it


@dataclass(frozen=True, slots=True)
class Column:
    """A device assignment: stages on one device or a team of one host, with their costs.

    ``cold_seconds``: of the first run, which loads weights; its first ``ahead_seconds`` need no
    values. ``steady_seconds``: of each further run. Both include copies of received and sent values
    between device and RAM. ``part_seconds``: of a further run of only one of several parts.
    ``ram_bytes``: includes waiting values; ``pinned_bytes`` of it are page-locked. ``solution``:
    the session plan; None if the assignment has numbers only.
    """

    stages: tuple[str, ...]
    cold_seconds: float
    ahead_seconds: float
    steady_seconds: float
    ram_bytes: int
    pinned_bytes: int
    solution: Solution | None = field(default=None, compare=False)
    part_seconds: tuple[float, ...] = ()

    @property
    def first_seconds(self) -> float:
        """Seconds of the first run, from when its values are needed."""
        return self.cold_seconds - self.ahead_seconds


@dataclass(frozen=True, slots=True)
class Assignment:
    """A device and its assignment, ``column``. ``secondaries``: the further devices of its team."""

    device: ClusterDevice
    column: Column
    secondaries: tuple[ClusterDevice, ...] = ()

    @property
    def devices(self) -> tuple[ClusterDevice, ...]:
        return self.device, *self.secondaries

    @property
    def name(self) -> str:
        """``HOST/ID``; of a team, joined by ``+``."""
        return "+".join(device.name for device in self.devices)

    @property
    def stages(self) -> tuple[str, ...]:
        return self.column.stages

    @property
    def plan(self) -> Plan:
        """The session plan of the device's stages."""
        assert self.column.solution is not None
        return self.column.solution.plan


class StageTransfer(NamedTuple):
    """A value sent to devices with ``reader_stages``. ``seconds``: on the slowest link, 0 in a
    host. Values that only later stages read travel with the item."""

    value: str
    reader_stages: tuple[str, ...]
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Assignments of a cluster's devices for ``objective``.

    ``stages``: of the graph, in order. ``values``: between stages. ``items_per_second``: the
    highest sustainable rate, however items are dispatched. ``latency_seconds``: of a single item;
    cold if ``items`` is 1, else warm. ``seconds``: of ``items`` items, simulated. ``bottleneck``:
    the stages of the device assignment that limits them. `graphrun.cluster.stream.with_figures`
    computes these four.
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
        for assignment in self.assignments:
            lines.append(f"device {assignment.name} stages {' '.join(assignment.stages)}")
            lines += [f"  {line}" for line in str(assignment.plan).splitlines()]
        return "\n".join(lines)

    def spans(self, assignment: Assignment) -> tuple[StageSpan, ...]:
        """Return the parts of ``assignment`` that get items: those that lead to the graph's end."""
        passable = _through(self.stages, frozenset(other.stages for other in self.assignments))
        return tuple(
            span for span in parts_of(self.stages, assignment.stages) if span[1] in passable
        )

    def transfers(self) -> tuple[StageTransfer, ...]:
        seconds_of: dict[tuple[ValueNumbers, tuple[str, ...]], float] = {}
        ends = {
            (end, assignment.device.host)
            for assignment in self.assignments
            for _, end in self.spans(assignment)
        }
        for receiver, (begin, end) in (
            (assignment, span) for assignment in self.assignments for span in self.spans(assignment)
        ):
            links = [
                link
                for stage_end, host in ends
                if stage_end == begin
                and (link := self.cluster.link(host, receiver.device.host)) is not None
            ]
            for value in transfer(self.stages, self.values, begin) if links else ():
                slowest, stages = (
                    max(link.seconds + value.nbytes / link.bytes_per_second for link in links),
                    self.stages[begin:end],
                )
                seconds_of[value, stages] = max(slowest, seconds_of.get((value, stages), 0.0))
        return tuple(
            StageTransfer(value.name, reader_stages, value.nbytes, seconds)
            for (value, reader_stages), seconds in seconds_of.items()
        )


def parts_of(stages: Sequence[str], subset: Collection[str]) -> tuple[StageSpan, ...]:
    """Return the longest runs of consecutive ``stages`` that are all in ``subset``, in order."""
    is_own = [stage in subset for stage in stages]
    begins = [
        number
        for number, belongs in enumerate(is_own)
        if belongs and not (number and is_own[number - 1])
    ]
    ends = [
        number + 1
        for number, belongs in enumerate(is_own)
        if belongs and not (number + 1 < len(is_own) and is_own[number + 1])
    ]
    return tuple(zip(begins, ends, strict=True))


@lru_cache
def _through(stages: tuple[str, ...], stage_sets: frozenset[tuple[str, ...]]) -> frozenset[int]:
    """Return the stage numbers from which devices that run ``stage_sets`` can finish an item."""
    passable = {len(stages)}
    for begin, end in sorted(
        (span for stage_set in stage_sets for span in parts_of(stages, stage_set)), reverse=True
    ):
        if end in passable:
            passable.add(begin)
    return frozenset(passable)


def separable(
    stages: Sequence[str], values: Iterable[ValueNumbers], parts: Sequence[StageSpan]
) -> bool:
    """Whether one device may run ``parts``: no value is made or read in two of them. Parts of one
    run handle different items."""
    place = {stage: number for number, stage in enumerate(stages)}
    uses = ([place[name] for name in (value.producer, *value.consumers)] for value in values)
    return not any(
        sum(any(begin <= position < end for position in positions) for begin, end in parts) > 1
        for positions in uses
    )


def transfer(
    stages: Sequence[str], values: Iterable[ValueNumbers], boundary: int
) -> list[ValueNumbers]:
    """Return the values made before stage number ``boundary`` and read from there on."""
    place = {stage: number for number, stage in enumerate(stages)}
    return [
        value
        for value in values
        if place[value.producer] < boundary <= max(place[stage] for stage in value.consumers)
    ]


def bytes_before(stages: Sequence[str], values: Sequence[ValueNumbers]) -> list[int]:
    """Return the bytes of the values that are sent on before each stage."""
    return [
        sum(value.nbytes for value in transfer(stages, values, number))
        for number in range(len(stages))
    ]


def parse_placement(text: str) -> tuple[Objective, int, list[tuple[str, tuple[str, ...], Plan]]]:
    """Return the objective, the items, and (name, stages, plan) of each section of ``text``. Raises
    PlanError with the line."""
    head: tuple[Objective, int] | None = None
    sections: list[tuple[str, tuple[str, ...], int, list[str]]] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        line, location = " ".join(raw.split("#", 1)[0].split()), f"placement:{number}"
        if head is None:
            if match := re.fullmatch(r"place (throughput|latency) items ([1-9][0-9]{0,8})", line):
                head = "throughput" if match[1] == "throughput" else "latency", int(match[2])
            elif line:
                raise PlanError(
                    f"expected 'place throughput|latency items COUNT', found {quoted(line)}",
                    location,
                )
        elif match := re.fullmatch(r"device (\S+) stages (.+)", line):
            sections.append((match[1], tuple(match[2].split()), number, []))
        elif sections:
            sections[-1][3].append(raw)
        elif line:
            raise PlanError(
                f"expected 'device HOST/ID stages STAGE ...', found {quoted(line)}", location
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
    """Return the device assignment of ``solution``, a session plan for some of ``stages``.
    ``values``: of all stages."""
    hardware, simulation, own_stages = (
        solution.problem.hardware,
        solution.simulation,
        stages_of(solution.problem),
    )
    waiting_bytes, copies, parts = 0, list[float](), parts_of(stages, own_stages)
    for begin, end in parts:
        inputs, outputs, part = (
            transfer(stages, values, begin),
            transfer(stages, values, end),
            set(stages[begin:end]),
        )
        waiting_bytes += WAITING * sum(value.nbytes for value in (*inputs, *outputs))
        copy_seconds = sum(
            value.copy_seconds(hardware, to_host=False)
            for value in inputs
            if set(value.consumers) & part
        )
        copies.append(
            copy_seconds
            + sum(
                value.copy_seconds(hardware, to_host=True)
                for value in outputs
                if value.producer in part
            )
        )
    part_seconds = (_part_seconds(simulation, stages[begin:end]) for begin, end in parts)
    first = simulation.slots[0]
    return Column(
        stages=own_stages,
        cold_seconds=simulation.seconds + sum(copies),
        ahead_seconds=first.seconds if first.part == "load" else 0.0,
        steady_seconds=(
            simulation.further_seconds if simulation.further_slots else simulation.seconds
        )
        + sum(copies),
        ram_bytes=simulation.host_peak_bytes + waiting_bytes,
        pinned_bytes=simulation.pinned_peak_bytes,
        solution=solution,
        part_seconds=tuple(a + b for a, b in zip(part_seconds, copies, strict=True))
        if len(parts) > 1
        else (),
    )


def _part_seconds(simulation: Simulation, stages: Sequence[str]) -> float:
    """Return the seconds of a further run that calls only ``stages``. The slots of other stages
    still load their blocks."""
    problem, rate = simulation.problem, simulation.problem.hardware.h2d_bytes_per_second
    stage_of = {phase.name: phase.stage for phase in problem.phases}
    slots = simulation.further_slots or simulation.slots
    seconds = sum(
        slot.seconds for slot in slots if slot.part == "load" or stage_of.get(slot.phase) in stages
    )
    return seconds + sum(
        slot.loaded_bytes / rate
        for slot in slots
        if slot.part != "load" and stage_of.get(slot.phase) not in stages
    )


def violations(placement: Placement) -> list[str]:
    """Return the rules that ``placement`` breaks, as messages; also for each section's plan."""
    faults, hosts = list[str](), {host.name: host for host in placement.cluster.hosts}
    names = [device.name for assignment in placement.assignments for device in assignment.devices]
    faults += [
        f"device {name} has two sections"
        for name in sorted({name for name in names if names.count(name) > 1})
    ]
    stages = placement.stages
    for assignment in placement.assignments:
        if tuple(stage for stage in stages if stage in assignment.stages) != assignment.stages:
            faults.append(
                f"device {assignment.name}: {' '.join(assignment.stages)} "
                "are not stages of the graph, in its order"
            )
        elif not separable(stages, placement.values, parts_of(stages, assignment.stages)):
            faults.append(
                f"device {assignment.name}: {' '.join(assignment.stages)} "
                "are not consecutive, and read the same value or one another's"
            )
    if not reached(
        len(stages),
        [span for assignment in placement.assignments for span in placement.spans(assignment)],
    ):
        faults.append("no chain of devices runs every stage")
    for name, host in hosts.items():
        columns = [
            assignment.column
            for assignment in placement.assignments
            if assignment.device.host == name
        ]
        ram, pinned = (
            sum(column.ram_bytes for column in columns),
            sum(column.pinned_bytes for column in columns),
        )
        if ram > host.ram_bytes:
            faults.append(f"host {name}: {ram} bytes of RAM of {host.ram_bytes}")
        if host.pinned_bytes is not None and pinned > host.pinned_bytes:
            faults.append(f"host {name}: {pinned} bytes of page-locked RAM of {host.pinned_bytes}")
    for assignment in placement.assignments:
        solution = assignment.column.solution
        if solution is None:
            continue
        problem = solution.problem
        budgets = [
            (problem.hardware, problem.budget_bytes),
            *((secondary.hardware, secondary.budget_bytes) for secondary in problem.secondaries),
        ]
        if (
            len(budgets) != len(assignment.devices)
            or len({device.host for device in assignment.devices}) > 1
        ):
            faults.append(
                f"device {assignment.name}: its plan is for {len(budgets)} devices of one host"
            )
        for device, (hardware, budget_bytes) in zip(assignment.devices, budgets, strict=False):
            if hardware != device.hardware:
                faults.append(f"device {device.name}: its plan is for another {hardware.name}")
            if budget_bytes > device.vram_bytes:
                faults.append(
                    f"device {device.name}: its plan is for {budget_bytes} bytes of VRAM "
                    f"of {device.vram_bytes}"
                )
        faults += [
            f"device {assignment.name}: {v.rule} in slot {v.slot}: {v.detail}"
            for v in broken_rules(problem, solution.plan)
        ]
    return faults


def reached(last: int, spans: Iterable[StageSpan]) -> bool:
    """Whether the parts ``spans`` lead from stage 0 to stage ``last``."""
    ends = {0}
    for begin, end in sorted(spans):
        if begin in ends:
            ends.add(end)
    return last in ends
