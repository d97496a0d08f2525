"""Plan a graph for a cluster: price device assignments, choose devices, and value a further
device."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graphrun.cluster.columns import MOST_DEVICES_APART, DeviceClass, Planner, Pricing, kinds_of
from graphrun.cluster.machines import Cluster, ClusterDevice
from graphrun.cluster.master import Unplaceable, assignments_for
from graphrun.cluster.placement import Objective, Placement
from graphrun.cluster.stream import with_figures
from graphrun.graph.graph import Graph
from graphrun.model.problem import Problem
from graphrun.temporary import TemporaryFolder


@dataclass(frozen=True, slots=True)
class Gain:
    """Items per second and latency with one more ``device``, at least.

    No plans are made for less memory of its host than those of the placement use.
    """

    device: ClusterDevice
    items_per_second: float
    latency_seconds: float


@dataclass(frozen=True, slots=True)
class PlacedGraph:
    """A placement and its alternatives.

    ``replicas``: the best placement where each device runs all stages; None if no device can.
    ``gains``: one per device class in the cluster. ``priced``: number of device assignments that
    the planner was asked for. ``problem``: of all stages on the first device.
    """

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
    last_stage: str | None = None,
    **budgets: Any,
) -> PlacedGraph:
    """Return the best placement of ``graph`` on ``cluster`` for ``items`` items.

    ``objective``: most items per second, or shortest time of one item. ``gains``: also compute the
    gain of one more device of each class. ``budgets``: further arguments of `graphrun.estimate`
    that the cluster does not define. Raises Unplaceable if no devices can run all stages.
    """
    graph, inputs = graph.until(last_stage).for_first(inputs or {})
    # without a cache, device classes share their dry run in a temporary one
    folder = TemporaryFolder("graphrun-place-") if cache is None else contextlib.nullcontext(cache)
    with folder as path:
        planner = Planner(graph, items, path, {**budgets, "inputs": inputs})
        return _placed(graph, cluster, planner, objective, items, gains=gains)


def _placed(
    graph: Graph,
    cluster: Cluster,
    planner: Planner,
    objective: Objective,
    items: int,
    *,
    gains: bool,
) -> PlacedGraph:
    """Return `place` of a graph whose columns ``planner`` prices."""
    stages, kinds = tuple(stage.name for stage in graph.stages), kinds_of(cluster)
    problem = planner.problem(next(iter(kinds.values())))

    def placed(on_cluster: Cluster, pricing: Pricing) -> Placement:
        assignments = assignments_for(objective, on_cluster, pricing, problem.values)
        return with_figures(
            Placement(objective, items, stages, problem.values, on_cluster, assignments)
        )

    linked = all(
        cluster.link(a.name, b.name) is not None for a in cluster.hosts for b in cluster.hosts
    )
    has_gaps = linked and len(cluster.devices) <= MOST_DEVICES_APART
    has_gaps &= objective == "throughput" and items > 1  # nothing else runs next to a single item
    pricing = Pricing(
        stages,
        planner.price,
        planner.lower_bound_seconds,
        cold=items == 1,
        has_gaps=has_gaps,
        values=problem.values,
    )
    placement = placed(cluster, pricing)
    whole = Pricing(
        stages, planner.price, planner.lower_bound_seconds, cold=items == 1, whole=True, max_team=1
    )
    try:
        replicas = placed(cluster, whole)
    except Unplaceable:
        replicas = None
    pricing.price_no_smaller_shares()
    likes: dict[DeviceClass, ClusterDevice] = {
        kinds[device.name]: device for device in reversed(cluster.devices)
    }
    spares = (
        [
            (example, placed(with_spare(cluster, example), pricing))
            for example in reversed(likes.values())
        ]
        if gains
        else []
    )
    gain_list = tuple(
        Gain(example, result.items_per_second, result.latency_seconds) for example, result in spares
    )
    return PlacedGraph(placement, replicas, gain_list, planner.price_count, problem)


def with_spare(cluster: Cluster, example: ClusterDevice) -> Cluster:
    """Return ``cluster`` with one more device like ``example``, with equal shares, in its host."""
    host = next(host for host in cluster.hosts if host.name == example.host)
    number = 1 + max(device.id for device in host.devices)
    larger_host = replace(
        host,
        devices=(
            *host.devices,
            replace(example, id=number, torch=f"{example.hardware.device}:{number}"),
        ),
    )
    return replace(
        cluster,
        hosts=tuple(larger_host if other.name == host.name else other for other in cluster.hosts),
    )
