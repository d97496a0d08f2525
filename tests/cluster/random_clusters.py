"""Random clusters and prices in pure numbers, and the best assignments of devices by trying all:
the judge of the master program.

The judge takes the rate of assignments as the least cut between the first and the last stage, over
every set of boundaries, and the latency of every chain of distinct devices as it is defined. A few
devices of a host may hold a column together, any of them as the main one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, permutations, product

import numpy as np

from graphrun.cluster.columns import SHARES, DeviceClass, Pricing, kinds_of
from graphrun.cluster.machines import Cluster, ClusterDevice, ClusterHost, Link
from graphrun.cluster.placement import Assignment, Column, Objective, Placement
from graphrun.model.problem import Secondary, ValueNumbers
from graphrun.profile.hardware import simulated

Unit = tuple[ClusterDevice, ...]  # devices that hold a column, the main one first


@dataclass(frozen=True)
class Case:
    """A cluster, and prices: seconds of each stage by hardware, weights in bytes, and seconds to
    stream all weights."""

    cluster: Cluster
    stages: tuple[str, ...]
    values: tuple[ValueNumbers, ...]
    compute: dict[tuple[str, str], float]
    weights: dict[str, int]
    stream: dict[str, float]
    max_team: int = 2  # devices in one column, at most

    def price(self, kind: DeviceClass, stages: tuple[str, ...], share: float) -> Column | None:
        """More seconds with less RAM, and none below a third of the weights. Of several devices one
        computes after the other, each stage on the fastest one, for a tenth of its seconds more
        than as the main one, and all hold weights."""
        weights, names = (
            sum(self.weights[stage] for stage in stages),
            [member.hardware.name for member in kind.members],
        )
        vram_bytes = sum(member.vram_bytes for member in kind.members)
        ram = min(weights, int(share * kind.ram_bytes))
        pinned = (
            ram // 2 if kind.pinned_bytes is None else min(ram // 2, int(share * kind.pinned_bytes))
        )
        if 3 * ram < weights or weights > 40 * vram_bytes:
            return None
        name = kind.hardware.name
        crowded = max(0.0, weights / vram_bytes - 1) * self.stream[name]
        extra_seconds = (2 - ram / weights - pinned / max(1, ram // 2)) * self.stream[name]
        computing = (
            min(
                self.compute[device_name, stage] * (1.1 if index else 1.0)
                for index, device_name in enumerate(names)
            )
            for stage in stages
        )
        steady = sum(computing) + crowded + extra_seconds
        ahead_seconds = weights / 100
        return Column(stages, ahead_seconds + steady * 1.25, ahead_seconds, steady, ram, pinned)

    def least(self, kind: DeviceClass, stage: str, share: float) -> float:
        """Seconds of compute, and of streaming the weights that exceed the share of RAM."""
        seconds = min(self.compute[member.hardware.name, stage] for member in kind.members)
        excess = max(0.0, self.weights[stage] - share * kind.ram_bytes)
        return seconds + excess / sum(self.weights.values()) * self.stream[kind.hardware.name]

    def pricing(self, *, cold: bool = False, has_gaps: bool = False) -> Pricing:
        return Pricing(
            self.stages,
            self.price,
            self.least,
            cold=cold,
            max_team=self.max_team,
            has_gaps=has_gaps,
            values=self.values,
        )

    def placement(
        self, objective: Objective, assignments: tuple[Assignment, ...], items: int = 100
    ) -> Placement:
        return Placement(objective, items, self.stages, self.values, self.cluster, assignments)

    def columns(self, kind: DeviceClass, *, has_gaps: bool = False) -> list[Column]:
        """Every column of ``kind``: consecutive stages, or with ``apart`` any that share no value
        but with the next one, on one device; shares of the host's memory."""
        stage_sets = (
            stage_set
            for count in range(len(self.stages))
            for stage_set in combinations(self.stages, count + 1)
        )
        able = [
            stage_set
            for stage_set in stage_sets
            if len(self.parts(stage_set)) == 1
            or (has_gaps and not kind.secondaries and self._separate(stage_set))
        ]
        priced = (self.price(kind, stage_set, share) for stage_set in able for share in SHARES)
        return list(dict.fromkeys(column for column in priced if column is not None))

    def parts(self, stage_set: tuple[str, ...]) -> list[tuple[int, int]]:
        """Where each stretch of consecutive stages of ``stage_set`` begins and ends."""
        numbers = [self.stages.index(stage) for stage in stage_set]
        cuts = [
            0,
            *(
                index
                for index in range(1, len(numbers))
                if numbers[index] != numbers[index - 1] + 1
            ),
            len(numbers),
        ]
        return [(numbers[a], numbers[b - 1] + 1) for a, b in pairwise(cuts)]

    def _separate(self, stage_set: tuple[str, ...]) -> bool:
        number = {
            stage: index
            for index, span in enumerate(self.parts(stage_set))
            for stage in self.stages[slice(*span)]
        }
        return all(
            len({number[stage] for stage in (value.producer, *value.consumers) if stage in number})
            < 2
            for value in self.values
        )


def random_case(number: int, most_devices: int = 4, most_stages: int = 4) -> Case:
    """The random case of this number."""
    draw = random.Random(number)
    stages = tuple(f"s{n}" for n in range(draw.randint(1, most_stages)))
    names = [f"k{n}" for n in range(draw.randint(1, 3))]
    kinds = {name: (replace(simulated(), name=name), draw.randint(20, 60)) for name in names}
    hosts, device_count = [], draw.randint(1, most_devices)
    while device_count:
        count = draw.randint(1, device_count)
        name, device_count = f"h{len(hosts)}", device_count - count
        devices = [
            ClusterDevice(name, n, *kinds[draw.choice(names)], f"sim:{n}") for n in range(count)
        ]
        ram = draw.choice((60, 100, 200, 1000))
        hosts.append(ClusterHost(name, ram, draw.choice((None, ram // 2)), tuple(devices)))
    links = (
        (
            Link(
                tuple(host.name for host in hosts),
                draw.choice((1e9, 40.0)),
                draw.choice((0.0, 0.3)),
            ),
        )
        if len(hosts) > 1
        else ()
    )
    compute = {
        (name, stage): draw.choice((0.3, 1.0, 2.0, 5.0)) * draw.uniform(0.7, 1.4)
        for name in names
        for stage in stages
    }
    values = tuple(
        ValueNumbers(
            f"{first}.x",
            draw.randint(1, 9),
            first,
            (other, *draw.sample(stages[-1:], draw.randint(0, 1))),
            0,
            0,
        )
        for first, other in pairwise(stages)
    )
    weights = {stage: draw.randint(10, 70) for stage in stages}
    return Case(
        Cluster(tuple(hosts), links),
        stages,
        values,
        compute,
        weights,
        {name: draw.uniform(1, 6) for name in names},
    )


def best_rate(case: Case) -> float:
    """The most items per second of any assignment, where links limit nothing; 0 where none runs
    every stage."""
    last = len(case.stages)
    cuts = [{0, *inner} for n in range(last) for inner in combinations(range(1, last), n)]
    per_host = [
        np.unique(
            np.concatenate(
                [
                    _flows(case, host, units, cuts)
                    for units in _put_together(host.devices, case.max_team)
                ]
            ),
            axis=0,
        )
        for host in case.cluster.hosts
    ]
    total = np.zeros((1, len(cuts)))
    for flows in per_host:
        total = np.unique((total[:, None] + flows[None]).reshape(-1, len(cuts)), axis=0)
    return float(total.min(axis=1).max())


def _put_together(devices: tuple[ClusterDevice, ...], max_size: int) -> Iterator[tuple[Unit, ...]]:
    """Every way to put ``devices`` of a host together, at most ``most``."""
    if not devices:
        yield ()
        return
    first, *rest = devices
    for count in range(max_size):
        for partners in combinations(rest, count):
            for units in _put_together(
                tuple(device for device in rest if device not in partners), max_size
            ):
                unit = (first, *partners)
                yield from (
                    ((main, *(device for device in unit if device != main)), *units)
                    for main in unit
                )


def _flows(
    case: Case, host: ClusterHost, units: tuple[Unit, ...], cuts: list[set[int]]
) -> np.ndarray:
    """The rates over ``cuts`` of every choice of columns for ``units`` of ``host`` that its memory
    allows."""
    columns_of = np.zeros((1, len(cuts))), np.zeros(1), np.zeros(1)
    for unit in units:
        columns = case.columns(kind_of(case, unit), has_gaps=True)
        crossed = [
            [sum(a in cut and b not in cut for a, b in case.parts(column.stages)) for cut in cuts]
            for column in columns
        ]
        rates = [
            [times / column.steady_seconds for times in stage_flow]
            for column, stage_flow in zip(columns, crossed, strict=True)
        ]
        additions = (
            np.array([[0.0] * len(cuts), *rates]),
            np.array([0, *(column.ram_bytes for column in columns)]),
            np.array([0, *(column.pinned_bytes for column in columns)]),
        )
        flows, ram, pinned = (
            (a[:, None] + b[None]).reshape(-1, *a.shape[1:])
            for a, b in zip(columns_of, additions, strict=True)
        )
        fits = (ram <= host.ram_bytes) & (
            pinned <= (host.pinned_bytes if host.pinned_bytes is not None else host.ram_bytes)
        )
        _, distinct = np.unique(
            np.column_stack([flows[fits], ram[fits], pinned[fits]]), axis=0, return_index=True
        )
        columns_of = flows[fits][distinct], ram[fits][distinct], pinned[fits][distinct]
    return np.unique(columns_of[0], axis=0)


def kind_of(case: Case, unit: Unit) -> DeviceClass:
    """The kind of ``unit``."""
    kinds = kinds_of(case.cluster)
    return kinds[unit[0].name]._replace(
        secondaries=tuple(Secondary(device.hardware, device.vram_bytes) for device in unit[1:])
    )


def best_latency(case: Case, *, cold: bool) -> float:
    """The shortest time of one item over every chain of devices; infinite where there is none."""
    return min(_latencies(case, cold), default=float("inf"))


def _latencies(case: Case, cold: bool) -> Iterator[float]:
    last, devices = len(case.stages), case.cluster.devices
    teams = [unit for count in range(1, case.max_team + 1) for unit in permutations(devices, count)]
    columns_of = {
        unit: case.columns(kind_of(case, unit))
        for unit in teams
        if len({device.host for device in unit}) == 1
    }
    for count in range(min(last, len(devices))):
        for inner in combinations(range(1, last), count):
            parts = [case.stages[a:b] for a, b in pairwise((0, *inner, last))]
            for units in permutations(columns_of, len(parts)):
                if len({device.name for unit in units for device in unit}) < sum(map(len, units)):
                    continue
                ways = [
                    [column for column in columns_of[unit] if column.stages == part]
                    for unit, part in zip(units, parts, strict=True)
                ]
                for columns in product(*ways):
                    mains = tuple(unit[0] for unit in units)
                    if _fit(case.cluster, mains, columns):
                        yield _latency(case, mains, columns, cold)


def _fit(cluster: Cluster, devices: tuple[ClusterDevice, ...], columns: tuple[Column, ...]) -> bool:
    for host in cluster.hosts:
        host_columns = [
            column
            for device, column in zip(devices, columns, strict=True)
            if device.host == host.name
        ]
        if sum(column.ram_bytes for column in host_columns) > host.ram_bytes:
            return False
        if (
            host.pinned_bytes is not None
            and sum(column.pinned_bytes for column in host_columns) > host.pinned_bytes
        ):
            return False
    return True


def _latency(
    case: Case, devices: tuple[ClusterDevice, ...], columns: tuple[Column, ...], cold: bool
) -> float:
    clock, previous = 0.0, devices[0]
    for device, column in zip(devices, columns, strict=True):
        position = case.stages.index(column.stages[0])
        if device.host != previous.host:
            link = case.cluster.links[0]
            place = {stage: number for number, stage in enumerate(case.stages)}
            nbytes = sum(
                value.nbytes
                for value in case.values
                if place[value.producer]
                < position
                <= max(place[stage] for stage in value.consumers)
            )
            clock += link.seconds + nbytes / link.bytes_per_second
        clock = (
            max(clock, column.ahead_seconds) + column.cold_seconds - column.ahead_seconds
            if cold
            else clock + column.steady_seconds
        )
        previous = device
    return clock
