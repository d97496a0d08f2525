"""The master program: which devices take which stages, for the most items per second or the
shortest time of one item. Exact.

Throughput. Items flow from stage 0 to the last through the parts of columns; a column passes 1 /
seconds of them in each part:

    0 --[encode]--> 1 --[denoise]--> 2 --[decode]--> 3        the rate of an interval is the sum
    over the columns that hold it 0 --[encode denoise]-----------> 2                        what
    flows into a boundary flows out of it 0 --[encode denoise decode]----------------------> 3 0
    --[encode]--> 1                 2 --[decode]--> 3      two parts of one column

    maximise what leaves 0, by the number of hosts with each configuration (columns on its devices,
    within RAM and page-locked RAM)

A host whose memory suffices for any columns of its devices has no row for it: there, columns count
one by one, within the ways to put its devices together. Equal hosts are counted, not named, unless
a link between hosts could limit the rate. A host with very many configurations has a row for its
memory, and one for the devices of each kind.

Latency. A search over chains of columns of consecutive stages with the devices' memory, cut where
the time so far and the least of the remaining stages are no better than the best known.

Both begin with bounds in place of plans (`Pricing`); options that are chosen are priced, and the
program is solved again, until all chosen ones have plans. What was not priced then cannot be
better.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain as chained
from itertools import combinations_with_replacement, product
from math import comb, prod
from typing import NamedTuple

from graphrun.cluster.columns import Kind, Option, Pricing, kinds_of, together
from graphrun.cluster.machines import Cluster, Device, Host
from graphrun.cluster.placement import Assignment, bytes_before
from graphrun.errors import GraphrunError
from graphrun.model.problem import ValueNumbers
from graphrun.solve.linear import Linear, MilpModel, total

GAP = 1e-6
MOST_CONFIGURATIONS = 3000  # of a host
MOST_WAYS = 200  # to put the devices of a host together
SAME = 1e-5  # relative difference of rates, and of seconds, that are taken for equal


class Held(NamedTuple):
    """An option on devices of one host, the main one first. ``kind``: of these."""

    devices: tuple[Device, ...]
    kind: Kind
    option: Option


Chosen = list[Held]
Configuration = tuple[tuple[Kind, Option], ...]  # of a host


class Unplaceable(GraphrunError):
    """No devices of a cluster can run all stages of a graph."""

    exit_code = 3  # as where one device cannot


def assignments_for(
    objective: str, cluster: Cluster, pricing: Pricing, values: Sequence[ValueNumbers]
) -> tuple[Assignment, ...]:
    """The best assignments. Raises Unplaceable where no devices can run all stages."""
    search: Callable[[Cluster, Pricing, Sequence[int]], Chosen | None] = (
        _fastest_chain if objective == "latency" else _most_items
    )
    nbytes = bytes_before(pricing.stages, values)
    while True:
        chosen = search(cluster, pricing, nbytes)
        if chosen is None:
            raise Unplaceable(
                _why_none(
                    pricing, {kind for host in cluster.hosts for kind in _kinds(host, pricing)}
                )
            )
        unpriced = {(of.kind, of.option) for of in chosen if of.option.column is None}
        for kind, option in sorted(unpriced, key=_order):
            pricing.refine(kind, option)
        if not unpriced:
            return tuple(
                Assignment(d[0], of.column, d[1:]) for d, _, of in chosen if of.column is not None
            )


def _order(of: tuple[Kind, Option]) -> tuple[object, ...]:
    cards = [(each.hardware.name, each.vram_bytes) for each in of[0].members]
    return of[1].parts, cards


def _counts(host: Host) -> Counter[Kind]:
    """How many devices of each kind ``host`` has."""
    return Counter(kinds_of(Cluster((host,))).values())


def _kinds(host: Host, pricing: Pricing) -> list[Kind]:
    """The kinds of columns of ``host``."""
    return together(_counts(host), pricing.together)


def _why_none(pricing: Pricing, kinds: Iterable[Kind]) -> str:
    able = {span for kind in kinds for of in pricing.options(kind) for span in of.parts}
    without = [
        stage
        for at, stage in enumerate(pricing.stages)
        if not any(begin <= at < end for begin, end in able)
    ]
    if without:
        return f"{', '.join(without)}: fits no device of the cluster, within its VRAM and all of its host's RAM"
    return "each stage fits some device, but not all of them on devices that are linked, within the RAM of their hosts"


@dataclass(frozen=True, slots=True)
class _Group:
    """Equal ``hosts``, or one. ``kinds``: those of its columns, with their options.

    ``configurations``: of a host, within its memory. None: columns count one by one, and each
    host's devices are put together in one of ``ways`` (kinds of columns, on all devices); without
    ``ways`` there is one host, with rows for devices and memory.
    """

    hosts: tuple[Host, ...]
    kinds: Mapping[Kind, Sequence[Option]]
    configurations: tuple[Configuration, ...] | None = None
    ways: tuple[Mapping[Kind, int], ...] = ()


def _most_items(cluster: Cluster, pricing: Pricing, nbytes: Sequence[int]) -> Chosen | None:
    found = _Throughput(cluster, pricing, nbytes, by_host=False).solve()
    if found is None:
        return None
    rate, chosen = found
    pairs = [cluster.link(a.name, b.name) for a in cluster.hosts for b in cluster.hosts]
    slowest = min(
        (link.bytes_per_second if link is not None else 0.0 for link in pairs), default=0.0
    )
    if rate * sum(nbytes) <= slowest:  # even if all items took one link
        return chosen
    found = _Throughput(cluster, pricing, nbytes, by_host=True).solve()
    return found[1] if found is not None else None


class _Throughput:
    """The mixed-integer program. ``by_host``: with every host by name, and the links between
    them."""

    def __init__(
        self, cluster: Cluster, pricing: Pricing, nbytes: Sequence[int], *, by_host: bool
    ) -> None:
        self.model, self.last, self.devices = MilpModel(GAP), len(pricing.stages), cluster.devices
        self.groups = _groups(cluster, pricing, by_host=by_host)
        every = [of for group in self.groups for options in group.kinds.values() for of in options]
        # of rates: items in so many seconds
        self.unit = max((of.seconds for of in every), default=1.0)
        self.capacity: dict[tuple[str, int, int], list[Linear]] = defaultdict(list)
        self.bounds, self.used = list[Linear](), list[Linear]()
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
        """How many hosts have each configuration, and are put together in each way."""
        most = len(group.hosts)
        if group.configurations is not None:
            found = [
                (config, self.model.column(0.0, most, integer=True))
                for config in group.configurations
            ]
            self.model.add(total(x for _, x in found) <= most)
        else:
            every = [(kind, of) for kind, options in group.kinds.items() for of in options]
            found = [((of,), self.model.column(integer=True)) for of in every]
        for config, x in found:
            for kind, of in config:
                # consecutive ones where that makes no difference
                apart = (len(of.parts) - 1) / (len(self.devices) + 1)
                self.used.append((len(kind.members) + apart) * x)
                self.bounds.append(float(of.column is None) * x)
                for span in of.parts:
                    self.capacity[host, *span].append(self.unit / max(of.seconds, 1e-9) * x)
        if group.configurations is not None:
            return found, []
        ways = [self.model.column(0.0, most, integer=True) for _ in group.ways]
        self.model.add(total(ways) <= most)
        for kind in group.kinds if ways else ():
            taken = total(x for (of,), x in found if of[0] == kind)
            self.model.add(
                taken
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
                    total(float(of[0].members.count(kind)) * x for (of,), x in found) <= count
                )
            for field in ("ram_bytes", "pinned_bytes"):
                if (limit := getattr(of_host, field)) is not None:
                    self.model.add(
                        total(getattr(of[1], field) / max(1, limit) * x for (of,), x in found)
                        <= 1.0
                    )
        return found, ways

    def _flow(
        self, *, host: str | None = None, begin: int | None = None, end: int | None = None
    ) -> Linear:
        return total(
            flow
            for (at, a, b), flow in self.flows.items()
            if host in (None, at) and begin in (None, a) and end in (None, b)
        )

    def _conserve(self, cluster: Cluster, nbytes: Sequence[int], *, by_host: bool) -> None:
        """What flows into each boundary flows out of it; by host, over links that carry its
        values."""
        loads: dict[tuple[str, str], list[Linear]] = defaultdict(list)
        names = [host.name for host in cluster.hosts] if by_host else []
        for at in range(1, self.last):
            if not by_host:
                self.model.add(self._flow(end=at).equals(self._flow(begin=at)))
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
                    self._flow(host=name, end=at).equals(leaving),
                    coming.equals(self._flow(host=name, begin=at)),
                )
            for way, flow in moves.items():
                if way[0] != way[1]:
                    loads[way].append(nbytes[at] * flow)
        for (a, b), parts in loads.items():
            link = cluster.link(a, b)
            assert link is not None
            self.model.add(total(parts) / (link.bytes_per_second * self.unit) <= 1.0)

    def solve(self) -> tuple[float, Chosen] | None:
        """Items per second, and the options of devices: of the best those with the fewest that are
        not priced, on the fewest devices. None where no item can pass."""
        out = self._flow(begin=0)
        if not out.terms:
            return None
        bound = self.model.minimise(-1.0 * out, whole=False)
        if bound is None or bound.value >= -1e-9:
            return None
        devices = len(self.devices)
        fewest = total([*((devices + 1) * of for of in self.bounds), *self.used]) * (
            SAME / (devices + 1) ** 2
        )
        found = self.model.minimise(fewest - out / -bound.value)
        if found is None or out.at(found.values) <= 1e-9:
            return None
        chosen: Chosen = []
        for group, (configurations, ways) in zip(self.groups, self.counts, strict=True):
            counted = [(config, round(x.at(found.values))) for config, x in configurations]
            if group.configurations is not None or not ways:
                whole = [config for config, count in counted for _ in range(count)]
                per_host = (
                    whole
                    if group.configurations is not None
                    else [tuple(chained.from_iterable(whole))]
                )
            else:
                per_host = list(
                    _dealt(group.ways, [round(y.at(found.values)) for y in ways], counted)
                )
            for host, config in zip(group.hosts, per_host, strict=False):
                chosen += _on_devices(host, config)
        place = {device.name: number for number, device in enumerate(self.devices)}
        return out.at(found.values) / self.unit, sorted(
            chosen, key=lambda of: place[of.devices[0].name]
        )


def _dealt(
    ways: Sequence[Mapping[Kind, int]],
    hosts: Sequence[int],
    counted: Iterable[tuple[Configuration, int]],
) -> Iterator[Configuration]:
    """The configuration of each host: options, of which there are so many, dealt to ``hosts`` put
    together in each of ``ways``."""
    left: dict[Kind, list[Option]] = defaultdict(list)
    for ((kind, option),), count in counted:
        left[kind] += [option] * count
    for way, count in zip(ways, hosts, strict=True):
        for _ in range(count):
            yield tuple(
                (kind, left[kind].pop(0))
                for kind, each in way.items()
                for _ in range(each)
                if left[kind]
            )


def _on_devices(host: Host, config: Configuration) -> Iterator[Held]:
    """``config`` on the devices of ``host``, each kind in their order."""
    kinds, free = kinds_of(Cluster((host,))), defaultdict[Kind, list[Device]](list)
    for device in host.devices:
        free[kinds[device.name]].append(device)
    for kind, option in config:
        yield Held(tuple(free[each].pop(0) for each in kind.members), kind, option)


def _groups(cluster: Cluster, pricing: Pricing, *, by_host: bool) -> list[_Group]:
    alike: dict[tuple[object, ...], list[Host]] = defaultdict(list)
    for host in cluster.hosts:
        alike[
            host.name if by_host else "",
            frozenset(_counts(host).items()),
            host.ram_bytes,
            host.pinned_bytes,
        ].append(host)
    return [of for hosts in alike.values() for of in _grouped(tuple(hosts), pricing)]


def _grouped(hosts: tuple[Host, ...], pricing: Pricing) -> Iterator[_Group]:
    """``hosts``, which are equal, as one group or one by one."""
    host, counts = hosts[0], _counts(hosts[0])
    kinds = {kind: _undominated(pricing.options(kind)) for kind in _kinds(host, pricing)}
    ways = _ways(counts, kinds)
    fields = ("ram_bytes", "pinned_bytes")
    each = {
        kind: [max((getattr(of, field) for of in own), default=0) for field in fields]
        for kind, own in kinds.items()
    }
    most = [
        max(sum(each[kind][n] * count for kind, count in way.items()) for way in ways)
        if ways
        else None
        for n in (0, 1)
    ]
    limits = host.ram_bytes, host.pinned_bytes
    if (
        all(
            limit is None or (of is not None and of <= limit)
            for of, limit in zip(most, limits, strict=True)
        )
        and ways
    ):
        yield _Group(hosts, kinds, ways=tuple(ways))
        return
    many = sum(
        prod(comb(len(kinds[kind]) + count, count) for kind, count in way.items()) for way in ways
    )
    if ways and many <= MOST_CONFIGURATIONS:
        yield _Group(hosts, kinds, configurations=tuple(_configurations(host, kinds, ways)))
        return
    for each_host in hosts:
        yield _Group((each_host,), kinds)


def _ways(
    counts: Mapping[Kind, int], kinds: Mapping[Kind, Sequence[Option]]
) -> list[Mapping[Kind, int]]:
    """Every way to put the devices of a host together, each in one column; none where there are
    more than MOST_WAYS."""
    able = [
        (kind, Counter(kind.members)) for kind, own in kinds.items() if own or not kind.secondaries
    ]
    found = list[Mapping[Kind, int]]()

    def put(at: int, left: Counter[Kind], way: Counter[Kind]) -> None:
        if len(found) > MOST_WAYS:
            return
        if not left.total():
            found.append(dict(way))
            return
        if at == len(able):
            return
        kind, members = able[at]
        most = min(left[each] // count for each, count in members.items())
        for count in range(most, -1, -1):
            taken = Counter({each: n * count for each, n in members.items()})
            put(at + 1, left - taken, way + Counter({kind: count}))

    put(0, Counter(counts), Counter())
    return found if len(found) <= MOST_WAYS else []


def _configurations(
    host: Host, kinds: Mapping[Kind, Sequence[Option]], ways: Iterable[Mapping[Kind, int]]
) -> Iterator[Configuration]:
    """Every choice of columns for the devices of ``host``, or none for some, that its memory
    allows; equal devices in one order."""
    seen = set[Configuration]()
    for way in ways:
        each = [
            combinations_with_replacement([*((kind, of) for of in kinds[kind]), None], count)
            for kind, count in way.items()
        ]
        for parts in product(*map(list, each)):
            config = tuple(of for part in parts for of in part if of is not None)
            if config and config not in seen and _fits([option for _, option in config], host):
                seen.add(config)
                yield config


def _fits(options: Sequence[Option], host: Host) -> bool:
    ram, pinned = (
        sum(getattr(of, field) for of in options) for field in ("ram_bytes", "pinned_bytes")
    )
    return ram <= host.ram_bytes and (host.pinned_bytes is None or pinned <= host.pinned_bytes)


def _undominated(options: Sequence[Option]) -> list[Option]:
    """``options`` without those that another one for the same stages betters, and is priced."""

    def better(one: Option, other: Option) -> bool:
        mine, its = (
            (of.seconds, of.ahead_seconds, of.ram_bytes, of.pinned_bytes) for of in (one, other)
        )
        return (
            one.column is not None
            and mine != its
            and all(a <= b for a, b in zip(mine, its, strict=True))
        )

    return [of for of in options if not any(a.parts == of.parts and better(a, of) for a in options)]


def _fastest_chain(cluster: Cluster, pricing: Pricing, nbytes: Sequence[int]) -> Chosen | None:
    stages, hosts = pricing.stages, {host.name: host for host in cluster.hosts}
    counts, alone = {host.name: _counts(host) for host in cluster.hosts}, kinds_of(cluster)
    equal = {host.name: frozenset(counts[host.name].items()) for host in cluster.hosts}
    columns = dict[object, list[tuple[Kind, list[Option]]]]()
    for host in cluster.hosts:
        if equal[host.name] not in columns:
            columns[equal[host.name]] = [
                (kind, _undominated(pricing.options(kind))) for kind in _kinds(host, pricing)
            ]
    kinds = {kind for every in columns.values() for kind, _ in every}
    least = [min(pricing.least_seconds(kind, stage) for kind in kinds) for stage in stages]
    rest = [sum(least[at:]) for at in range(len(stages) + 1)]
    alike = len(cluster.links) <= 1 and all(
        set(hosts) <= set(link.between) for link in cluster.links
    )
    best: tuple[tuple[float, int, int], Chosen] | None = None

    def rank_of(seconds: float, chain: Chosen) -> tuple[float, int, int]:
        return (
            seconds,
            sum(of.option.column is None for of in chain),
            sum(len(of.devices) for of in chain),
        )

    def worth(seconds: float, at: int, chain: Chosen) -> bool:
        rank = rank_of(seconds + rest[at], chain)
        if best is None:
            return rank[0] < float("inf")
        same = abs(rank[0] - best[0][0]) <= SAME * best[0][0]
        return rank[1:] < best[0][1:] if same else rank[0] < best[0][0]

    def extend(at: int, clock: float, chain: Chosen) -> None:
        nonlocal best
        if at == len(stages):
            if worth(clock, at, chain):
                best = rank_of(clock, chain), list(chain)
            return
        for finish, held in sorted(
            candidates(at, clock, chain),
            key=lambda of: (
                of[0] + rest[of[1].option.parts[-1][1]],
                [each.name for each in of[1].devices],
            ),
        ):
            chain.append(held)
            if worth(finish, held.option.parts[-1][1], chain):
                extend(held.option.parts[-1][1], finish, chain)
            chain.pop()

    def candidates(at: int, clock: float, chain: Chosen) -> Iterator[tuple[float, Held]]:
        used, seen = {device.name for of in chain for device in of.devices}, set[object]()
        touched = {of.devices[0].host for of in chain}
        for host in cluster.hosts:
            key = (
                host.name
                if host.name in touched or not alike
                else (equal[host.name], host.ram_bytes, host.pinned_bytes)
            )
            link = cluster.link(chain[-1].devices[0].host if chain else host.name, host.name)
            if key in seen or link is None:
                continue
            seen.add(key)
            arrived = clock + (link.seconds + nbytes[at] / link.bytes_per_second if chain else 0.0)
            free = defaultdict[Kind, list[Device]](list)
            for device in host.devices:
                if device.name not in used:
                    free[alone[device.name]].append(device)
            own = [of.option for of in chain if of.devices[0].host == host.name]
            for kind, options in columns[equal[host.name]]:
                members = kind.members
                if any(members.count(each) > len(free[each]) for each in members):
                    continue
                taken = {each: iter(free[each]) for each in members}
                devices = tuple(next(taken[each]) for each in members)
                for option in options:
                    if option.parts[0][0] == at and _fits([*own, option], host):
                        yield (
                            max(arrived, option.ahead_seconds) + option.seconds,
                            Held(devices, kind, option),
                        )

    extend(0, 0.0, [])
    return best[1] if best is not None else None
