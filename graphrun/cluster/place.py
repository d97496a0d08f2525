"""Plans a graph for a cluster: prices columns, chooses devices, and says what further devices would
bring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graphrun.cluster.columns import MOST_DEVICES_APART, Kind, Planner, Pricing, kinds_of
from graphrun.cluster.machines import Cluster, Device
from graphrun.cluster.master import Unplaceable, assignments_for
from graphrun.cluster.placement import Objective, Placement
from graphrun.cluster.stream import with_figures
from graphrun.graph.graph import Graph
from graphrun.model.problem import Problem


@dataclass(frozen=True, slots=True)
class Gain:
    """What one more ``device`` would bring: items per second and latency with it."""

    device: Device
    items_per_second: float
    latency_seconds: float


@dataclass(frozen=True, slots=True)
class Placed:
    """A placement. ``replicas``: the best one where each device runs all stages, None where no
    device can; ``gains``: one per kind of device in the cluster. ``priced``: columns that the
    planner was asked for. ``problem``: of all stages on the first device."""

    placement: Placement
    replicas: Placement | None
    gains: tuple[Gain, ...]
    priced: int
    problem: Problem


def place(
    graph: Graph,
    cluster: Cluster,
    *,
    objective: Objective = "throughput",
    items: int = 100,
    inputs: Mapping[str, Any] | None = None,
    cache: Path | None = None,
    gains: bool = True,
    until: str | None = None,
    **budgets: Any,
) -> Placed:
    """The best placement of ``graph`` on ``cluster`` for ``items`` items: the most items per
    second, or the shortest time of one.

    ``gains``: whether to look for what one more device of each kind would bring. ``budgets``:
    further arguments of `graphrun.estimate`, without those that the cluster has. Raises Unplaceable
    where no devices can run all stages.
    """
    graph, inputs = graph.until(until).for_first(inputs or {})
    planner = Planner(graph, items, cache, {**budgets, "inputs": inputs})
    stages, kinds = tuple(stage.name for stage in graph.stages), kinds_of(cluster)
    problem = planner.problem(next(iter(kinds.values())))

    def placed(on: Cluster, pricing: Pricing) -> Placement:
        found = assignments_for(objective, on, pricing, problem.values)
        return with_figures(Placement(objective, items, stages, problem.values, on, found))

    linked = all(
        cluster.link(a.name, b.name) is not None for a in cluster.hosts for b in cluster.hosts
    )
    apart = linked and len(cluster.devices) <= MOST_DEVICES_APART
    apart &= objective == "throughput" and items > 1  # of one item, nothing runs beside it
    pricing = Pricing(
        stages, planner.price, planner.least, cold=items == 1, apart=apart, values=problem.values
    )
    placement = placed(cluster, pricing)
    whole = Pricing(stages, planner.price, planner.least, cold=items == 1, whole=True, together=1)
    try:
        replicas = placed(cluster, whole)
    except Unplaceable:
        replicas = None
    likes: dict[Kind, Device] = {kinds[device.name]: device for device in reversed(cluster.devices)}
    more = (
        [(like, placed(with_spare(cluster, like), pricing)) for like in reversed(likes.values())]
        if gains
        else []
    )
    found = tuple(Gain(like, of.items_per_second, of.latency_seconds) for like, of in more)
    return Placed(placement, replicas, found, planner.priced, problem)


def with_spare(cluster: Cluster, like: Device) -> Cluster:
    """``cluster`` with one more device like ``like`` in its host, with the same shares of what the
    host's devices share."""
    host = next(host for host in cluster.hosts if host.name == like.host)
    number = 1 + max(device.id for device in host.devices)
    more = replace(
        host,
        devices=(*host.devices, replace(like, id=number, torch=f"{like.hardware.device}:{number}")),
    )
    return replace(
        cluster, hosts=tuple(more if of.name == host.name else of for of in cluster.hosts)
    )
