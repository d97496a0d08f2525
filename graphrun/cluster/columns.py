"""Columns of the master program: stages on a kind of device, or consecutive ones on several devices
of one host, priced by the planner when a bound says that they may be chosen.

share of the host's memory    1      whole plan: RAM it takes, seconds
                              1/2    the largest of SHARES below what that took: less RAM, no faster
                              ...    until no plan fits
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, combinations_with_replacement
from typing import Any, NamedTuple

from graphrun import api
from graphrun.batch.schedule import segment_of
from graphrun.cluster.machines import Cluster
from graphrun.cluster.placement import Column, Span, column_of, parts_of, separable
from graphrun.files import Store
from graphrun.graph.graph import Graph
from graphrun.model.choices import use_with
from graphrun.model.problem import Hardware, Problem, Secondary, Use, ValueNumbers
from graphrun.store import fitting_for

# of a host's RAM and page-locked RAM that one column may take
SHARES = (
    1.0,
    3 / 4,
    1 / 2,
    1 / 3,
    1 / 4,
    1 / 8,
)
TOGETHER = 4  # devices of a host in one column, at most
MOST_APART = 5  # stages of a graph, above which those of a device are consecutive
# of a cluster, above which they are too: of many devices, some hold the first stages and some the
# last
MOST_DEVICES_APART = 32
MOST_KINDS = 40  # of columns of a host, above which fewer devices are taken together, but two


class Kind(NamedTuple):
    """Devices that are alike: hardware, VRAM budget, and what the host has of RAM and page-locked
    RAM (None: as RAM). ``secondaries``: of one with further devices of its host."""

    hardware: Hardware
    vram_bytes: int
    ram_bytes: int
    pinned_bytes: int | None
    secondaries: tuple[Secondary, ...] = ()

    @property
    def members(self) -> tuple[Kind, ...]:
        """The kind of each of its devices, the main one first."""
        others = (
            self._replace(hardware=of.hardware, vram_bytes=of.budget_bytes, secondaries=())
            for of in self.secondaries
        )
        return self._replace(secondaries=()), *others


def together(counts: Mapping[Kind, int], most: int) -> list[Kind]:
    """The kinds of columns that a host with as many devices of each kind has: of one device, and of
    up to ``most`` together."""
    found = list(counts)
    for size in range(2, most + 1):
        more = [kind for main in counts for kind in _teams(main, counts, size)]
        if size > 2 and len(found) + len(more) > MOST_KINDS:
            break
        found += more
    return found


def _teams(main: Kind, counts: Mapping[Kind, int], size: int) -> Iterator[Kind]:
    for others in combinations_with_replacement(counts, size - 1):
        able = all(of.hardware.device == main.hardware.device for of in others)
        if able and all(count <= counts[kind] for kind, count in Counter((main, *others)).items()):
            yield main._replace(
                secondaries=tuple(Secondary(of.hardware, of.vram_bytes) for of in others)
            )


def kinds_of(cluster: Cluster) -> dict[str, Kind]:
    """The kind of each device of ``cluster``, by the device's name."""
    return {
        device.name: Kind(device.hardware, device.vram_bytes, host.ram_bytes, host.pinned_bytes)
        for host in cluster.hosts
        for device in host.devices
    }


@dataclass(frozen=True, slots=True)
class Option:
    """The ``parts`` of a column on a kind of device, within a ``share`` of the host's memory. A run
    takes ``seconds`` once the values are there, and begins after ``ahead_seconds``. Without a
    ``column`` these are bounds, and so are no bytes."""

    parts: tuple[Span, ...]
    share: float
    seconds: float
    ahead_seconds: float = 0.0
    column: Column | None = None

    @property
    def ram_bytes(self) -> int:
        """At least."""
        return self.column.ram_bytes if self.column is not None else 0

    @property
    def pinned_bytes(self) -> int:
        """At least."""
        return self.column.pinned_bytes if self.column is not None else 0


class Pricing:
    """The options of each kind of device for ``stages``.

    ``price(kind, stages, share)``: the column of the best plan within a share of the host's memory,
    None where nothing fits. ``least(kind, stage)``: seconds that no plan can undercut. ``cold``:
    whether the seconds of an item are those of a first one. ``whole``: all stages together are the
    only column. ``together``: the most devices of a host in one column. ``apart``: whether a device
    may hold parts that are not consecutive, where ``values`` allow it
    (`graphrun.cluster.placement.separable`).
    """

    def __init__(
        self,
        stages: Sequence[str],
        price: Callable[[Kind, tuple[str, ...], float], Column | None],
        least: Callable[[Kind, str], float],
        *,
        cold: bool = False,
        whole: bool = False,
        together: int = TOGETHER,
        apart: bool = False,
        values: Sequence[ValueNumbers] = (),
    ) -> None:
        self.stages, self._price, self._least, self.cold, self.together = (
            tuple(stages),
            price,
            least,
            cold,
            together,
        )
        last = len(self.stages)
        spans = (
            [(0, last)]
            if whole
            else [(begin, end) for end in range(1, last + 1) for begin in range(end)]
        )
        self._parts: list[tuple[Span, ...]] = [(span,) for span in spans]
        self._apart = (
            [
                parts
                for count in range(2, last)
                for own in combinations(self.stages, count)
                if len(parts := parts_of(self.stages, own)) > 1
                and separable(self.stages, values, parts)
            ]
            if apart and last <= MOST_APART
            else []
        )
        self._options: dict[Kind, dict[tuple[Span, ...], list[Option]]] = {}

    def least_seconds(self, kind: Kind, stage: str) -> float:
        """Seconds of ``stage`` that no plan for ``kind`` undercuts."""
        return self._least(kind, stage)

    def options(self, kind: Kind) -> list[Option]:
        """Priced ones, and for each choice of stages one of which only bounds are known, where
        there may be a better one."""
        return [option for chain in self._chains(kind).values() for option in chain]

    def refine(self, kind: Kind, option: Option) -> None:
        """Prices ``option``, which has only bounds; where that is of a part of the host's memory,
        all smaller ones too."""
        chain = self._chains(kind)[option.parts]
        chain.remove(option)
        further = self._priced(kind, option, chain)
        while further is not None and option.share < SHARES[0]:
            further = self._priced(kind, further, chain)
        if further is not None:
            chain.append(further)

    def _priced(self, kind: Kind, option: Option, chain: list[Option]) -> Option | None:
        """Adds ``option`` with its plan to ``chain``, where one fits; returns bounds on the next
        smaller share."""
        column = self._price(
            kind, tuple(stage for a, b in option.parts for stage in self.stages[a:b]), option.share
        )
        if column is None:
            return None
        ahead = column.ahead_seconds if self.cold else 0.0
        least = max(
            option.seconds, column.cold_seconds - ahead if self.cold else column.steady_seconds
        )
        if not any(
            of.ram_bytes <= column.ram_bytes and of.pinned_bytes <= column.pinned_bytes
            for of in chain
        ):
            chain.append(replace(option, seconds=least, ahead_seconds=ahead, column=column))
        pinned = column.pinned_bytes / kind.pinned_bytes if kind.pinned_bytes else 0.0
        taken = min(option.share, max(column.ram_bytes / kind.ram_bytes, pinned))
        smaller = next((share for share in SHARES if share < taken), None)
        if smaller is None:
            return None
        if self.cold:  # its cold seconds are no fewer, but more of them may pass ahead
            return replace(
                option, share=smaller, ahead_seconds=max(0.0, least + ahead - option.seconds)
            )
        return replace(option, share=smaller, seconds=least)

    def _chains(self, kind: Kind) -> dict[tuple[Span, ...], list[Option]]:
        if kind not in self._options:
            least = [self._least(kind, stage) for stage in self.stages]
            every = [*self._parts, *([] if kind.secondaries else self._apart)]
            self._options[kind] = {
                of: [Option(of, SHARES[0], sum(sum(least[a:b]) for a, b in of))] for of in every
            }
        return self._options[kind]


class Planner:
    """Prices columns of ``graph`` by the planner, as sessions of ``items`` runs. ``arguments``: of
    `api.estimate`.

    ``store``: plans are read from it and kept there.
    """

    def __init__(self, graph: Graph, items: int, cache: Any, arguments: Mapping[str, Any]) -> None:
        self._graph, self._items, self._arguments, self._cache = graph, items, arguments, cache
        self._store = Store(cache) if cache is not None else None
        self._problems: dict[Kind, Problem] = {}
        self._ways: dict[tuple[Kind, str], list[list[float]]] = {}
        self._columns: dict[tuple[Kind, tuple[str, ...], float], Column | None] = {}

    def problem(self, kind: Kind) -> Problem:
        """The problem of all stages on ``kind``."""
        if kind not in self._problems:
            limits = {
                "ram": kind.ram_bytes,
                "pinned": kind.pinned_bytes,
                "runs": self._items,
                "cache": self._cache,
            }
            vram, hardware = (
                [of.vram_bytes for of in kind.members],
                [of.hardware for of in kind.members],
            )
            own = {**self._arguments, **limits, "vram": vram, "hardware": hardware}
            self._problems[kind] = api.estimate(self._graph, **own)
        return self._problems[kind]

    def price(self, kind: Kind, stages: tuple[str, ...], share: float) -> Column | None:
        """See `Pricing`. Priced once."""
        key = kind, stages, share
        if key not in self._columns:
            self._columns[key] = self._plan(kind, stages, share)
        return self._columns[key]

    @property
    def priced(self) -> int:
        """The number of columns that were asked for."""
        return len(self._columns)

    def _plan(self, kind: Kind, stages: tuple[str, ...], share: float) -> Column | None:
        whole = self.problem(kind)
        problem = segment_of(self._graph, whole, stages, self._items)[1]
        pinned = None if kind.pinned_bytes is None else int(share * kind.pinned_bytes)
        problem = replace(problem, ram_bytes=int(share * kind.ram_bytes), pinned_bytes=pinned)
        solution = fitting_for(problem, self._store)
        return (
            column_of([stage.name for stage in self._graph.stages], whole.values, solution)
            if solution is not None
            else None
        )

    def least(self, kind: Kind, stage: str) -> float:
        """Compute seconds of ``stage`` with the fastest variants and options that a plan may
        choose, each component on the fastest device. Of more than two devices these are known from
        the pairs."""
        pairs = [kind._replace(secondaries=(of,)) for of in dict.fromkeys(kind.secondaries)] or [
            kind
        ]
        each = [self._uses(pair, stage) for pair in pairs]
        ways = [[min(of) for of in zip(*way, strict=True)] for way in zip(*each, strict=True)]
        return min(map(sum, ways))

    def _uses(self, kind: Kind, stage: str) -> list[list[float]]:
        """Least seconds of each use of a component in ``stage``, for each way to run it."""
        if (kind, stage) in self._ways:
            return self._ways[kind, stage]
        problem = self.problem(kind)

        def seconds(use: Use) -> float:
            component = problem.component(use.component)
            variants = [component.variants[index] for index in problem.usable(component)]
            return min(
                (
                    _compute_seconds(use_with(use, component, of), component.groups)
                    for of in variants
                ),
                default=0.0,
            )

        ways = [[phase for phase in problem.phases if phase.stage == stage]]
        ways += [list(option.phases) for option in problem.options if option.stage == stage]
        found = [[seconds(use) for phase in way for use in phase.uses] for way in ways]
        return self._ways.setdefault((kind, stage), found)


def _compute_seconds(use: Use, groups: Sequence[Any]) -> float:
    """Compute of all calls of ``use``."""
    by_group = [len(of.blocks) * seconds for of, seconds in zip(groups, use.seconds, strict=True)]
    return sum(calls * seconds for calls, seconds in zip(use.group_calls, by_group, strict=True))
