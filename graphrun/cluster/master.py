"""The master program: which device takes which stages, for the most items per second or the shortest time of one item. Exact.

Throughput. Items flow from stage 0 to the last through devices that hold consecutive stages; a device passes 1 / seconds of them:

    0 --[encode]--> 1 --[denoise]--> 2 --[decode]--> 3        the rate of an interval is the sum over the devices that hold it
    0 --[encode denoise]-----------> 2                        what flows into a boundary flows out of it
    0 --[encode denoise decode]----------------------> 3

    maximise what leaves 0, by the number of hosts with each configuration (an option per device, within RAM and page-locked RAM)

A host whose memory suffices for any options of its devices is no row: its devices count one by one. Equal hosts are counted, not
named, unless a link between hosts could limit the rate. A host with very many configurations has a row for its memory instead.

Latency. A search over chains of options with the devices' memory, cut where the time so far and the least of the remaining stages
are no better than the best known.

Both begin with bounds in place of plans (`Pricing`); options that are chosen are priced, and the program is solved again, until all
chosen ones have plans. What was not priced then cannot be better.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, product
from math import comb, prod

from graphrun.cluster.columns import Kind, Option, Pricing, kinds_of
from graphrun.cluster.machines import Cluster, Device, Host
from graphrun.cluster.placement import Assignment, bytes_before
from graphrun.errors import GraphrunError
from graphrun.model.problem import ValueNumbers
from graphrun.solve.linear import Linear, MilpModel, total

GAP = 1e-6
MOST_CONFIGURATIONS = 3000  # of a host
SAME = 1e-5  # relative difference of rates, and of seconds, that are taken for equal

Chosen = list[tuple[Device, Option]]


class Unplaceable(GraphrunError):
    """No devices of a cluster can run all stages of a graph."""

    exit_code = 3  # as where one device cannot


def assignments_for(objective: str, cluster: Cluster, pricing: Pricing, values: Sequence[ValueNumbers]) -> tuple[Assignment, ...]:
    """The best assignments. Raises Unplaceable where no devices can run all stages."""
    search: Callable[[Cluster, Pricing, Sequence[int]], Chosen | None] = _fastest_chain if objective == "latency" else _most_items
    nbytes = bytes_before(pricing.stages, values)
    kinds = kinds_of(cluster)
    while True:
        chosen = search(cluster, pricing, nbytes)
        if chosen is None:
            raise Unplaceable(_why_none(pricing, set(kinds.values())))
        unpriced = {(kinds[device.name], option) for device, option in chosen if option.column is None}
        for kind, option in sorted(unpriced, key=lambda of: (of[1].begin, of[1].end, of[0].hardware.name, of[0].vram_bytes)):
            pricing.refine(kind, option)
        if not unpriced:
            return tuple(Assignment(device, option.column) for device, option in chosen if option.column is not None)


def _why_none(pricing: Pricing, kinds: Iterable[Kind]) -> str:
    able = {(of.begin, of.end) for kind in kinds for of in pricing.options(kind)}
    without = [stage for at, stage in enumerate(pricing.stages) if not any(begin <= at < end for begin, end in able)]
    if without:
        return f"{', '.join(without)}: fits no device of the cluster, within its VRAM and all of its host's RAM"
    return "each stage fits some device, but not all of them on devices that are linked, within the RAM of their hosts"


@dataclass(frozen=True, slots=True)
class _Group:
    """Equal hosts, or equal devices. ``members``: the devices of each. ``configurations``: an option or None for each device of a
    member, in their order. ``row``: the host whose memory is a row for these devices; None: it suffices for any configuration."""

    members: tuple[tuple[Device, ...], ...]
    configurations: tuple[tuple[Option | None, ...], ...]
    row: Host | None = None


def _most_items(cluster: Cluster, pricing: Pricing, nbytes: Sequence[int]) -> Chosen | None:
    found = _Throughput(cluster, pricing, nbytes, by_host=False).solve()
    if found is None:
        return None
    rate, chosen = found
    pairs = [cluster.link(a.name, b.name) for a in cluster.hosts for b in cluster.hosts]
    slowest = min((link.bytes_per_second if link is not None else 0.0 for link in pairs), default=0.0)
    if rate * sum(nbytes) <= slowest:  # even if all items took one link
        return chosen
    found = _Throughput(cluster, pricing, nbytes, by_host=True).solve()
    return found[1] if found is not None else None


class _Throughput:
    """The mixed-integer program. ``by_host``: with every host by name, and the links between them."""

    def __init__(self, cluster: Cluster, pricing: Pricing, nbytes: Sequence[int], *, by_host: bool) -> None:
        self.model, self.last, self.devices = MilpModel(GAP), len(pricing.stages), cluster.devices
        self.groups = _groups(cluster, pricing, by_host=by_host)
        every = [of for group in self.groups for config in group.configurations for of in config if of is not None]
        self.unit = max((of.seconds for of in every), default=1.0)  # of rates: items in so many seconds
        self.counts: list[list[Linear]] = []
        capacity: dict[tuple[str, int, int], list[Linear]] = defaultdict(list)
        self.bounds, self.used = list[Linear](), list[Linear]()
        rows: dict[tuple[Host, str], list[Linear]] = defaultdict(list)
        for group in self.groups:
            counts = [self.model.column(0.0, len(group.members), integer=True) for _ in group.configurations]
            self.model.add(total(counts) <= len(group.members))
            self.counts.append(counts)
            host = group.members[0][0].host if by_host else ""
            for x, config in zip(counts, group.configurations, strict=True):
                held = [of for of in config if of is not None]
                self.used.append(float(len(held)) * x)
                self.bounds.append(float(sum(of.column is None for of in held)) * x)
                for of in held:
                    if group.row is not None:
                        for field in ("ram_bytes", "pinned_bytes"):
                            rows[group.row, field].append(float(getattr(of, field)) * x)
                    capacity[host, of.begin, of.end].append(self.unit / max(of.seconds, 1e-9) * x)
        for (of_host, field), parts in rows.items():
            if (limit := getattr(of_host, field)) is not None:
                self.model.add(total(parts) / max(1, limit) <= 1.0)
        self.flows = {}
        for key, parts in capacity.items():
            self.flows[key] = flow = self.model.column()
            self.model.add(flow <= total(parts))
        self._conserve(cluster, nbytes, by_host=by_host)

    def _flow(self, *, host: str | None = None, begin: int | None = None, end: int | None = None) -> Linear:
        return total(
            flow for (at, a, b), flow in self.flows.items() if host in (None, at) and begin in (None, a) and end in (None, b)
        )

    def _conserve(self, cluster: Cluster, nbytes: Sequence[int], *, by_host: bool) -> None:
        """What flows into each boundary flows out of it; by host, over links that carry its values."""
        loads: dict[tuple[str, str], list[Linear]] = defaultdict(list)
        names = [host.name for host in cluster.hosts] if by_host else []
        for at in range(1, self.last):
            if not by_host:
                self.model.add(self._flow(end=at).equals(self._flow(begin=at)))
                continue
            moves = {(a, b): self.model.column() for a, b in product(names, names) if cluster.link(a, b) is not None}
            for name in names:
                leaving, coming = (total(flow for way, flow in moves.items() if way[end] == name) for end in (0, 1))
                self.model.add(self._flow(host=name, end=at).equals(leaving), coming.equals(self._flow(host=name, begin=at)))
            for way, flow in moves.items():
                if way[0] != way[1]:
                    loads[way].append(nbytes[at] * flow)
        for (a, b), parts in loads.items():
            link = cluster.link(a, b)
            assert link is not None
            self.model.add(total(parts) / (link.bytes_per_second * self.unit) <= 1.0)

    def solve(self) -> tuple[float, Chosen] | None:
        """Items per second, and the options of devices: of the best those with the fewest that are not priced, on the fewest
        devices. None where no item can pass."""
        out = self._flow(begin=0)
        if not out.terms:
            return None
        bound = self.model.minimise(-1.0 * out, whole=False)
        if bound is None or bound.value >= -1e-9:
            return None
        devices = len(self.devices)
        fewest = total([*((devices + 1) * of for of in self.bounds), *self.used]) * (SAME / (devices + 1) ** 2)
        found = self.model.minimise(fewest - out / -bound.value)
        if found is None or out.at(found.values) <= 1e-9:
            return None
        chosen: Chosen = []
        for group, counts in zip(self.groups, self.counts, strict=True):
            members = iter(group.members)
            for x, config in zip(counts, group.configurations, strict=True):
                for _ in range(round(x.at(found.values))):
                    chosen += [(device, of) for device, of in zip(next(members), config, strict=True) if of is not None]
        place = {device.name: number for number, device in enumerate(self.devices)}
        return out.at(found.values) / self.unit, sorted(chosen, key=lambda of: place[of[0].name])


def _groups(cluster: Cluster, pricing: Pricing, *, by_host: bool) -> list[_Group]:
    kinds = kinds_of(cluster)
    members: dict[tuple[Host | None, str, tuple[Kind, ...]], list[tuple[Device, ...]]] = defaultdict(list)
    for host in cluster.hosts:
        devices = tuple(sorted(host.devices, key=lambda of: (kinds[of.name].hardware.name, kinds[of.name].vram_bytes, of.id)))
        options = [_undominated(pricing.options(kinds[of.name])) for of in devices]
        most = [
            sum(max((getattr(of, field) for of in own), default=0) for own in options) for field in ("ram_bytes", "pinned_bytes")
        ]
        suffices = most[0] <= host.ram_bytes and (host.pinned_bytes is None or most[1] <= host.pinned_bytes)
        counts = Counter(kinds[of.name] for of in devices)
        many = prod(comb(len(pricing.options(kind)) + count, count) for kind, count in counts.items()) > MOST_CONFIGURATIONS
        row, name = host if many and not suffices else None, host.name if by_host else ""
        for own in [(device,) for device in devices] if suffices or many else [devices]:
            members[row, name, tuple(kinds[device.name] for device in own)].append(own)
    hosts = {host.name: host for host in cluster.hosts}
    return [
        _Group(tuple(of), tuple(_configurations(of[0], hosts[of[0][0].host], kinds, pricing)), row)
        for (row, _, _), of in members.items()
    ]


def _configurations(
    devices: Sequence[Device], host: Host, kinds: Mapping[str, Kind], pricing: Pricing
) -> Iterator[tuple[Option | None, ...]]:
    """Every choice of an option or None for each of ``devices`` that the host's memory allows; equal devices in one order."""
    counts = Counter(kinds[device.name] for device in devices)
    ways = [combinations_with_replacement([*_undominated(pricing.options(kind)), None], count) for kind, count in counts.items()]
    for parts in product(*map(list, ways)):
        config = tuple(option for part in parts for option in part)
        if any(config) and _fits(config, host):
            yield config


def _fits(config: Sequence[Option | None], host: Host) -> bool:
    ram, pinned = (sum(getattr(of, field) for of in config if of is not None) for field in ("ram_bytes", "pinned_bytes"))
    return ram <= host.ram_bytes and (host.pinned_bytes is None or pinned <= host.pinned_bytes)


def _undominated(options: Sequence[Option]) -> list[Option]:
    """``options`` without those that another one for the same stages betters, and is priced."""

    def better(one: Option, other: Option) -> bool:
        mine, its = ((of.seconds, of.ahead_seconds, of.ram_bytes, of.pinned_bytes) for of in (one, other))
        return one.column is not None and mine != its and all(a <= b for a, b in zip(mine, its, strict=True))

    return [of for of in options if not any((a.begin, a.end) == (of.begin, of.end) and better(a, of) for a in options)]


def _fastest_chain(cluster: Cluster, pricing: Pricing, nbytes: Sequence[int]) -> Chosen | None:
    kinds, stages = kinds_of(cluster), pricing.stages
    hosts = {host.name: host for host in cluster.hosts}
    least = [min(pricing.least_seconds(kind, stage) for kind in set(kinds.values())) for stage in stages]
    rest = [sum(least[at:]) for at in range(len(stages) + 1)]
    alike = len(cluster.links) <= 1 and all(set(hosts) <= set(link.between) for link in cluster.links)
    alikes = {host.name: frozenset(Counter(kinds[device.name] for device in host.devices).items()) for host in cluster.hosts}
    best: tuple[tuple[float, int, int], Chosen] | None = None

    def worth(seconds: float, at: int, chain: Chosen) -> bool:
        rank = seconds + rest[at], sum(of.column is None for _, of in chain), len(chain)
        if best is None:
            return rank[0] < float("inf")
        equal = abs(rank[0] - best[0][0]) <= SAME * best[0][0]
        return rank[1:] < best[0][1:] if equal else rank[0] < best[0][0]

    def extend(at: int, clock: float, chain: Chosen) -> None:
        nonlocal best
        if at == len(stages):
            if worth(clock, at, chain):
                best = (clock, sum(of.column is None for _, of in chain), len(chain)), list(chain)
            return
        for finish, device, option in sorted(candidates(at, clock, chain), key=lambda of: (of[0] + rest[of[2].end], of[1].name)):
            chain.append((device, option))
            if worth(finish, option.end, chain):
                extend(option.end, finish, chain)
            chain.pop()

    def candidates(at: int, clock: float, chain: Chosen) -> Iterator[tuple[float, Device, Option]]:
        used, seen = {device.name for device, _ in chain}, set[tuple[object, ...]]()
        touched = {device.host for device, _ in chain}
        for device in cluster.devices:
            kind = kinds[device.name]
            key = kind, device.host if device.host in touched or not alike else alikes[device.host]
            if device.name in used or key in seen:
                continue
            seen.add(key)
            link = cluster.link(chain[-1][0].host if chain else device.host, device.host)
            own = [option for of, option in chain if of.host == device.host]
            for option in _undominated(pricing.options(kind)) if link is not None else ():
                if option.begin == at and _fits([*own, option], hosts[device.host]):
                    arrived = clock + (link.seconds + nbytes[at] / link.bytes_per_second if chain and link is not None else 0.0)
                    yield max(arrived, option.ahead_seconds) + option.seconds, device, option

    extend(0, 0.0, [])
    return best[1] if best is not None else None
