"""The master program: which devices run which stages. Exact, for throughput or for latency.

Throughput, in items per second. Items flow from stage 0 to the last stage through the parts of
device assignments. A device assignment passes 1 / seconds items in each of its parts:

    0 --[encode]--> 1 --[denoise]--> 2 --[decode]--> 3
    0 --[encode denoise]-----------> 2
    0 --[encode denoise decode]----------------------> 3
    0 --[encode]--> 1                2 --[decode]--> 3      two parts of one device assignment

    The rate of an interval is the sum over its device assignments. The flow into a boundary equals
    the flow out of it. Maximise the flow out of 0, by the number of hosts with each configuration
    (device assignments within the host's RAM and page-locked RAM).

If a host's memory suffices for any assignments of its devices, it has no memory row: its device
assignments are counted one by one, within the ways to combine its devices into teams. Equal hosts
are counted, not named, unless a link between hosts could limit the rate. A host with very many
configurations has one row for its memory and one for its devices of each class.

Latency, of one item. A search over chains of device assignments with consecutive stages. It cuts a
chain if the time so far plus the lower bound of the remaining stages is no better than the best
known chain.

Both start with lower bounds instead of plans (`Pricing`). Chosen options are priced and the program
is solved again, until all chosen options have plans. No unpriced option can be better then.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain as chained
from itertools import combinations_with_replacement, product
from math import comb, prod
from typing import NamedTuple

from graphrun.cluster.columns import DeviceClass, Option, Pricing, kinds_of, kinds_with_teams
from graphrun.cluster.machines import Cluster, ClusterDevice, ClusterHost
from graphrun.cluster.placement import Assignment, bytes_before
from graphrun.errors import GraphrunError
from graphrun.model.problem import ValueNumbers
from graphrun.solve.linear import Linear, MilpModel, total

GAP = 1e-6
MOST_CONFIGURATIONS = 3000  # of one host
MOST_WAYS = 200  # to combine the devices of a host into teams
SAME = 1e-5  # relative difference below which rates, or seconds, count as equal


class PlacedOption(NamedTuple):
    """An option on devices of one host, the main one first. ``kind``: their device class."""

    devices: tuple[ClusterDevice, ...]
    kind: DeviceClass
    option: Option


Chosen = list[PlacedOption]
Configuration = tuple[tuple[DeviceClass, Option], ...]  # of a host


class Unplaceable(GraphrunError):
    """No set of devices of the cluster can run all stages of the graph."""

    exit_code = 3  # as when nothing fits a single device


def assignments_for(
    objective: str, cluster: Cluster, pricing: Pricing, values: Sequence[ValueNumbers]
) -> tuple[Assignment, ...]:
    """Return the best assignments. Raises Unplaceable if no devices can run all stages."""
    search: Callable[[Cluster, Pricing, Sequence[int]], Chosen | None] = (
        _fastest_chain if objective == "latency" else _most_items
    )
    nbytes = bytes_before(pricing.stages, values)
    while True:
        selection = search(cluster, pricing, nbytes)
        if selection is None:
            raise Unplaceable(
                _why_none(
                    pricing, {kind for host in cluster.hosts for kind in _kinds(host, pricing)}
                )
            )
        unpriced = {(item.kind, item.option) for item in selection if item.option.column is None}
        for kind, option in sorted(unpriced, key=_order):
            pricing.refine(kind, option)
        if not unpriced:
            return tuple(
                Assignment(d[0], choice.column, d[1:])
                for d, _, choice in selection
                if choice.column is not None
            )


def _order(choice: tuple[DeviceClass, Option]) -> tuple[object, ...]:
    cards = [(member.hardware.name, member.vram_bytes) for member in choice[0].members]
    return choice[1].parts, cards


def _counts(host: ClusterHost) -> Counter[DeviceClass]:
    return Counter(kinds_of(Cluster((host,))).values())


def _kinds(host: ClusterHost, pricing: Pricing) -> list[DeviceClass]:
    return kinds_with_teams(_counts(host), pricing.max_team)


def _why_none(pricing: Pricing, kinds: Iterable[DeviceClass]) -> str:
    spans = {span for kind in kinds for option in pricing.options(kind) for span in option.parts}
    uncovered = [
        stage
        for number, stage in enumerate(pricing.stages)
        if not any(begin <= number < end for begin, end in spans)
    ]
    if uncovered:
        return (
            f"{', '.join(uncovered)}: fits no device of the cluster, "
            "within its VRAM and all of its host's RAM"
        )
    return (
        "each stage fits some device, but not all of them on devices that are linked, "
        "within the RAM of their hosts"
    )


@dataclass(frozen=True, slots=True)
class _Group:
    """Equal ``hosts``, or a single one. ``kinds``: their device classes, with their options.

    ``configurations``: of a host, within its memory. None: device assignments are counted one by
    one, and each host's devices are combined in one of ``ways`` (device classes for all devices).
    Without ``ways`` the group is one host, with rows for its devices and its memory.
    """

    hosts: tuple[ClusterHost, ...]
    kinds: Mapping[DeviceClass, Sequence[Option]]
    configurations: tuple[Configuration, ...] | None = None
    ways: tuple[Mapping[DeviceClass, int], ...] = ()


def _most_items(cluster: Cluster, pricing: Pricing, nbytes: Sequence[int]) -> Chosen | None:
    result = _Throughput(cluster, pricing, nbytes, by_host=False).solve()
    if result is None:
        return None
    rate, selection = result
    pairs = [cluster.link(a.name, b.name) for a in cluster.hosts for b in cluster.hosts]
    slowest = min(
        (link.bytes_per_second if link is not None else 0.0 for link in pairs), default=0.0
    )
    if rate * sum(nbytes) <= slowest:  # true even if all items used one link
        return selection
    result = _Throughput(cluster, pricing, nbytes, by_host=True).solve()
    return result[1] if result is not None else None


class _Throughput:
    """The mixed-integer program. ``by_host``: with every host by name, and the links between
    them."""

    def __init__(
        self, cluster: Cluster, pricing: Pricing, nbytes: Sequence[int], *, by_host: bool
    ) -> None:
        self.model, self.last, self.devices = MilpModel(GAP), len(pricing.stages), cluster.devices
        self.groups = _groups(cluster, pricing, by_host=by_host)
        all_options = [
            option
            for group in self.groups
            for options in group.kinds.values()
            for option in options
        ]
        # the unit of rates: items in this many seconds
        self.unit = max((option.seconds for option in all_options), default=1.0)
        self.capacity: dict[tuple[str, int, int], list[Linear]] = defaultdict(list)
        self.bounds, self.device_counts = list[Linear](), list[Linear]()
        self.counts = [
            self._group(group, group.hosts[0].name if by_host else "") for group in self.groups
        ]
        self.flows = {}
        for key, parts in self.capacity.items():
            self.flows[key] = flow = self.model.column()
            self.model.add(flow <= total(parts))
        self._conserve(cluster, nbytes, by_host=by_host)

    def _group(
        self, group: _Group, host: str
    ) -> tuple[list[tuple[Configuration, Linear]], list[Linear]]:
        """Return the numbers of hosts with each configuration, and in each way, as variables."""
        host_count = len(group.hosts)
        if group.configurations is not None:
            choices = [
                (config, self.model.column(0.0, host_count, integer=True))
                for config in group.configurations
            ]
            self.model.add(total(x for _, x in choices) <= host_count)
        else:
            single_options = [
                (kind, option) for kind, options in group.kinds.items() for option in options
            ]
            choices = [((choice,), self.model.column(integer=True)) for choice in single_options]
        for config, x in choices:
            for kind, option in config:
                # at equal rates, prefer consecutive stages
                gap_cost = (len(option.parts) - 1) / (len(self.devices) + 1)
                self.device_counts.append((len(kind.members) + gap_cost) * x)
                self.bounds.append(float(option.column is None) * x)
                for span in option.parts:
                    self.capacity[host, *span].append(self.unit / max(option.seconds, 1e-9) * x)
        if group.configurations is not None:
            return choices, []
        ways = [self.model.column(0.0, host_count, integer=True) for _ in group.ways]
        self.model.add(total(ways) <= host_count)
        for kind in group.kinds if ways else ():
            kind_count = total(x for (choice,), x in choices if choice[0] == kind)
            self.model.add(
                kind_count
                <= total(
                    float(way[kind]) * y
                    for way, y in zip(group.ways, ways, strict=True)
                    if kind in way
                )
            )
        if not ways:
            (of_host,) = group.hosts
            for kind, count in _counts(of_host).items():
                self.model.add(
                    total(float(choice[0].members.count(kind)) * x for (choice,), x in choices)
                    <= count
                )
            for field in ("ram_bytes", "pinned_bytes"):
                if (limit := getattr(of_host, field)) is not None:
                    self.model.add(
                        total(
                            getattr(choice[1], field) / max(1, limit) * x
                            for (choice,), x in choices
                        )
                        <= 1.0
                    )
        return choices, ways

    def _flow(
        self, *, host: str | None = None, begin: int | None = None, end: int | None = None
    ) -> Linear:
        return total(
            flow
            for (flow_host, a, b), flow in self.flows.items()
            if host in (None, flow_host) and begin in (None, a) and end in (None, b)
        )

    def _conserve(self, cluster: Cluster, nbytes: Sequence[int], *, by_host: bool) -> None:
        """Make the flow into each boundary equal the flow out of it; by host, over the links."""
        loads: dict[tuple[str, str], list[Linear]] = defaultdict(list)
        names = [host.name for host in cluster.hosts] if by_host else []
        for stage in range(1, self.last):
            if not by_host:
                self.model.add(self._flow(end=stage).equals(self._flow(begin=stage)))
                continue
            moves = {
                (a, b): self.model.column()
                for a, b in product(names, names)
                if cluster.link(a, b) is not None
            }
            for name in names:
                leaving, coming = (
                    total(flow for way, flow in moves.items() if way[end] == name) for end in (0, 1)
                )
                self.model.add(
                    self._flow(host=name, end=stage).equals(leaving),
                    coming.equals(self._flow(host=name, begin=stage)),
                )
            for way, flow in moves.items():
                if way[0] != way[1]:
                    loads[way].append(nbytes[stage] * flow)
        for (a, b), parts in loads.items():
            link = cluster.link(a, b)
            assert link is not None
            self.model.add(total(parts) / (link.bytes_per_second * self.unit) <= 1.0)

    def solve(self) -> tuple[float, Chosen] | None:
        """Return the items per second and the options of devices; None if no item can pass. Among
        the best solutions, choose one with the fewest unpriced options, on the fewest devices."""
        throughput = self._flow(begin=0)
        if not throughput.terms:
            return None
        bound = self.model.minimise(-1.0 * throughput, whole=False)
        if bound is None or bound.value >= -1e-9:
            return None
        devices = len(self.devices)
        fewest = total([*((devices + 1) * cost for cost in self.bounds), *self.device_counts]) * (
            SAME / (devices + 1) ** 2
        )
        optimum = self.model.minimise(fewest - throughput / -bound.value)
        if optimum is None or throughput.at(optimum.values) <= 1e-9:
            return None
        selection: Chosen = []
        for group, (configurations, ways) in zip(self.groups, self.counts, strict=True):
            config_counts = [(config, round(x.at(optimum.values))) for config, x in configurations]
            if group.configurations is not None or not ways:
                whole = [config for config, count in config_counts for _ in range(count)]
                per_host = (
                    whole
                    if group.configurations is not None
                    else [tuple(chained.from_iterable(whole))]
                )
            else:
                per_host = list(
                    _deal(group.ways, [round(y.at(optimum.values)) for y in ways], config_counts)
                )
            for host, config in zip(group.hosts, per_host, strict=False):
                selection += _on_devices(host, config)
        place = {device.name: number for number, device in enumerate(self.devices)}
        return throughput.at(optimum.values) / self.unit, sorted(
            selection, key=lambda item: place[item.devices[0].name]
        )


def _deal(
    ways: Sequence[Mapping[DeviceClass, int]],
    hosts: Sequence[int],
    config_counts: Iterable[tuple[Configuration, int]],
) -> Iterator[Configuration]:
    """Yield the configuration of each host, dealing out the counted options. ``hosts[i]`` hosts
    combine their devices as ``ways[i]``."""
    pools: dict[DeviceClass, list[Option]] = defaultdict(list)
    for ((kind, option),), count in config_counts:
        pools[kind] += [option] * count
    for way, count in zip(ways, hosts, strict=True):
        for _ in range(count):
            yield tuple(
                (kind, pools[kind].pop(0))
                for kind, kind_count in way.items()
                for _ in range(kind_count)
                if pools[kind]
            )


def _on_devices(host: ClusterHost, config: Configuration) -> Iterator[PlacedOption]:
    """Yield ``config`` on the devices of ``host``; equal devices are taken in order."""
    kinds, free = kinds_of(Cluster((host,))), defaultdict[DeviceClass, list[ClusterDevice]](list)
    for device in host.devices:
        free[kinds[device.name]].append(device)
    for kind, option in config:
        yield PlacedOption(tuple(free[member].pop(0) for member in kind.members), kind, option)


def _groups(cluster: Cluster, pricing: Pricing, *, by_host: bool) -> list[_Group]:
    alike: dict[tuple[object, ...], list[ClusterHost]] = defaultdict(list)
    for host in cluster.hosts:
        alike[
            host.name if by_host else "",
            frozenset(_counts(host).items()),
            host.ram_bytes,
            host.pinned_bytes,
        ].append(host)
    return [group for hosts in alike.values() for group in _group_hosts(tuple(hosts), pricing)]


def _group_hosts(hosts: tuple[ClusterHost, ...], pricing: Pricing) -> Iterator[_Group]:
    """Yield equal ``hosts`` as one group, or one by one."""
    host, counts = hosts[0], _counts(hosts[0])
    kinds = {kind: _undominated(pricing.options(kind)) for kind in _kinds(host, pricing)}
    ways = _ways(counts, kinds)
    fields = ("ram_bytes", "pinned_bytes")
    max_bytes = {
        kind: [max((getattr(option, field) for option in options), default=0) for field in fields]
        for kind, options in kinds.items()
    }
    host_bytes = [
        max(sum(max_bytes[kind][n] * count for kind, count in way.items()) for way in ways)
        if ways
        else None
        for n in (0, 1)
    ]
    limits = host.ram_bytes, host.pinned_bytes
    if (
        all(
            limit is None or (nbytes is not None and nbytes <= limit)
            for nbytes, limit in zip(host_bytes, limits, strict=True)
        )
        and ways
    ):
        yield _Group(hosts, kinds, ways=tuple(ways))
        return
    config_count = sum(
        prod(comb(len(kinds[kind]) + count, count) for kind, count in way.items()) for way in ways
    )
    if ways and config_count <= MOST_CONFIGURATIONS:
        yield _Group(hosts, kinds, configurations=tuple(_configurations(host, kinds, ways)))
        return
    for each_host in hosts:
        yield _Group((each_host,), kinds)


def _ways(
    counts: Mapping[DeviceClass, int], kinds: Mapping[DeviceClass, Sequence[Option]]
) -> list[Mapping[DeviceClass, int]]:
    """Return every way to combine a host's devices into teams; none if there are over MOST_WAYS."""
    usable_kinds = [
        (kind, Counter(kind.members))
        for kind, options in kinds.items()
        if options or not kind.secondaries
    ]
    ways = list[Mapping[DeviceClass, int]]()

    def put(index: int, rest: Counter[DeviceClass], way: Counter[DeviceClass]) -> None:
        if len(ways) > MOST_WAYS:
            return
        if not rest.total():
            ways.append(dict(way))
            return
        if index == len(usable_kinds):
            return
        kind, members = usable_kinds[index]
        max_count = min(rest[member] // count for member, count in members.items())
        for count in range(max_count, -1, -1):
            way_members = Counter({member: n * count for member, n in members.items()})
            put(index + 1, rest - way_members, way + Counter({kind: count}))

    put(0, Counter(counts), Counter())
    return ways if len(ways) <= MOST_WAYS else []


def _configurations(
    host: ClusterHost,
    kinds: Mapping[DeviceClass, Sequence[Option]],
    ways: Iterable[Mapping[DeviceClass, int]],
) -> Iterator[Configuration]:
    """Yield every choice of assignments within the memory of ``host``; devices may stay unused.
    Equal devices are not permuted."""
    configs = set[Configuration]()
    for way in ways:
        kind_choices = [
            combinations_with_replacement(
                [*((kind, option) for option in kinds[kind]), None], count
            )
            for kind, count in way.items()
        ]
        for parts in product(*map(list, kind_choices)):
            config = tuple(choice for part in parts for choice in part if choice is not None)
            if config and config not in configs and _fits([option for _, option in config], host):
                configs.add(config)
                yield config


def _fits(options: Sequence[Option], host: ClusterHost) -> bool:
    ram, pinned = (
        sum(getattr(option, field) for option in options) for field in ("ram_bytes", "pinned_bytes")
    )
    return ram <= host.ram_bytes and (host.pinned_bytes is None or pinned <= host.pinned_bytes)


def _undominated(options: Sequence[Option]) -> list[Option]:
    """Return ``options`` without those that a priced option for the same stages improves on."""

    def better(option: Option, other: Option) -> bool:
        costs, other_costs = (
            (
                candidate.seconds,
                candidate.ahead_seconds,
                candidate.ram_bytes,
                candidate.pinned_bytes,
            )
            for candidate in (option, other)
        )
        return (
            option.column is not None
            and costs != other_costs
            and all(a <= b for a, b in zip(costs, other_costs, strict=True))
        )

    return [
        option
        for option in options
        if not any(a.parts == option.parts and better(a, option) for a in options)
    ]


def _fastest_chain(cluster: Cluster, pricing: Pricing, nbytes: Sequence[int]) -> Chosen | None:
    stages, hosts = pricing.stages, {host.name: host for host in cluster.hosts}
    counts, kind_of_device = {host.name: _counts(host) for host in cluster.hosts}, kinds_of(cluster)
    equal = {host.name: frozenset(counts[host.name].items()) for host in cluster.hosts}
    columns = dict[object, list[tuple[DeviceClass, list[Option]]]]()
    for host in cluster.hosts:
        if equal[host.name] not in columns:
            columns[equal[host.name]] = [
                (kind, _undominated(pricing.options(kind))) for kind in _kinds(host, pricing)
            ]
    kinds = {kind for host_columns in columns.values() for kind, _ in host_columns}
    lower_bounds = [min(pricing.least_seconds(kind, stage) for kind in kinds) for stage in stages]
    rest = [sum(lower_bounds[number:]) for number in range(len(stages) + 1)]
    is_uniform = len(cluster.links) <= 1 and all(
        set(hosts) <= set(link.hosts) for link in cluster.links
    )
    best: tuple[tuple[float, int, int], Chosen] | None = None

    def rank_of(seconds: float, chain: Chosen) -> tuple[float, int, int]:
        return (
            seconds,
            sum(item.option.column is None for item in chain),
            sum(len(item.devices) for item in chain),
        )

    def worth(seconds: float, stage: int, chain: Chosen) -> bool:
        rank = rank_of(seconds + rest[stage], chain)
        if best is None:
            return rank[0] < float("inf")
        is_tie = abs(rank[0] - best[0][0]) <= SAME * best[0][0]
        return rank[1:] < best[0][1:] if is_tie else rank[0] < best[0][0]

    def extend(stage: int, clock: float, chain: Chosen) -> None:
        nonlocal best
        if stage == len(stages):
            if worth(clock, stage, chain):
                best = rank_of(clock, chain), list(chain)
            return
        for finish, choice in sorted(
            candidates(stage, clock, chain),
            key=lambda pair: (
                pair[0] + rest[pair[1].option.parts[-1][1]],
                [device.name for device in pair[1].devices],
            ),
        ):
            chain.append(choice)
            if worth(finish, choice.option.parts[-1][1], chain):
                extend(choice.option.parts[-1][1], finish, chain)
            chain.pop()

    def candidates(stage: int, clock: float, chain: Chosen) -> Iterator[tuple[float, PlacedOption]]:
        busy_devices, keys = (
            {device.name for item in chain for device in item.devices},
            set[object](),
        )
        chain_hosts = {item.devices[0].host for item in chain}
        for host in cluster.hosts:
            key = (
                host.name
                if host.name in chain_hosts or not is_uniform
                else (equal[host.name], host.ram_bytes, host.pinned_bytes)
            )
            link = cluster.link(chain[-1].devices[0].host if chain else host.name, host.name)
            if key in keys or link is None:
                continue
            keys.add(key)
            arrived = clock + (
                link.seconds + nbytes[stage] / link.bytes_per_second if chain else 0.0
            )
            free = defaultdict[DeviceClass, list[ClusterDevice]](list)
            for device in host.devices:
                if device.name not in busy_devices:
                    free[kind_of_device[device.name]].append(device)
            host_options = [item.option for item in chain if item.devices[0].host == host.name]
            for kind, options in columns[equal[host.name]]:
                members = kind.members
                if any(members.count(member) > len(free[member]) for member in members):
                    continue
                iterators = {member: iter(free[member]) for member in members}
                devices = tuple(next(iterators[member]) for member in members)
                for option in options:
                    if option.parts[0][0] == stage and _fits([*host_options, option], host):
                        yield (
                            max(arrived, option.ahead_seconds) + option.seconds,
                            PlacedOption(devices, kind, option),
                        )

    extend(0, 0.0, [])
    return best[1] if best is not None else None
