"""Place the reference graphs on 2 to 512 mixed devices, on paper.

    python benchmarks/cluster.py [GRAPH ...] [--devices COUNT ...]    minutes a graph; writes its
                                                                      rows in results/cluster.json

Hosts have two equal cards and 64 GiB of RAM; five kinds of hosts alternate, on one network of 10
Gbit/s. A row per number of devices and objective: the placement's rate and the rate of its
simulated stream (graphrun/cluster/stream.py), the latency of one item, the same for all stages on
each card (``replicas``), and dollars per 1,000 items at PRICES. CPU seconds to plan: of pricing
device assignments (once per graph, cached in --cache), and the rest. All seconds are predictions
from data-sheet estimates.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]
os.environ.update(
    TRANSFORMERS_VERBOSITY="error",
    DIFFUSERS_VERBOSITY="error",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)

import graphrun  # noqa: E402
from graphrun.cluster import columns  # noqa: E402
from graphrun.cluster.machines import Cluster, ClusterDevice, ClusterHost, Link  # noqa: E402
from graphrun.cluster.place import place  # noqa: E402
from graphrun.cluster.placement import Objective, Placement  # noqa: E402
from graphrun.cluster.stream import steady_rate  # noqa: E402
from graphrun.profile.hardware import hardware  # noqa: E402
from graphrun.units import GIB  # noqa: E402

GRAPHS = ("flux-dev", "wan22-t2v", "hunyuan-video")
# usable VRAM in GiB
KINDS = (
    ("rtx4090", 22),
    ("rtx3060", 11),
    ("rtx4060ti", 15),
    ("a6000", 46),
    ("l4", 22),
)
# dollars per hour, assumed
PRICES = {
    "rtx4090": 0.35,
    "rtx3060": 0.08,
    "rtx4060ti": 0.12,
    "a6000": 0.50,
    "l4": 0.45,
}
SIZES = (2, 4, 8, 32, 128, 512)
BOTH = (4, 8)  # numbers of devices with both objectives
RAM_GIB, PER_HOST = 64, 2


def cluster_of(devices: int) -> Cluster:
    """Return hosts of two equal cards, which share a disk."""
    hosts = []
    for number in range(devices // PER_HOST):
        name, gib = KINDS[number % len(KINDS)]
        card = hardware(name)
        card = replace(card, disk_bytes_per_second=card.disk_bytes_per_second / PER_HOST)
        members = tuple(
            ClusterDevice(f"h{number}", n, card, gib * GIB, f"cuda:{n}") for n in range(PER_HOST)
        )
        hosts.append(ClusterHost(f"h{number}", RAM_GIB * GIB, None, members))
    return Cluster(
        tuple(hosts),
        (Link(tuple(host.name for host in hosts), 1.2e9, 1e-4),) if len(hosts) > 1 else (),
    )


def figures(placement: Placement, stream: bool) -> dict[str, Any]:
    """Return the figures of one placement; ``stream``: also of a simulated stream."""
    hours = (
        sum(
            PRICES[device.hardware.name]
            for assignment in placement.assignments
            for device in assignment.devices
        )
        / 3600
    )
    counts: dict[str, int] = {}
    for placed_stages in placement.assignments:
        key = (
            f"{'+'.join(device.hardware.name for device in placed_stages.devices)}: "
            f"{' '.join(placed_stages.stages)}"
        )
        counts[key] = counts.get(key, 0) + 1
    return {
        "items_per_second": round(placement.items_per_second, 6),
        **({"simulated_items_per_second": round(steady_rate(placement), 6)} if stream else {}),
        "latency_seconds": round(placement.latency_seconds, 2),
        "bottleneck": " ".join(placement.bottleneck),
        "dollars_per_1000": round(1000 * hours / placement.items_per_second, 2),
        "held": counts,
    }


def row(graph: Any, devices: int, objective: Objective, cache: Path | None) -> dict[str, Any]:
    """Compare one placement with replicas only."""
    pricing_seconds, plan = 0.0, columns.Planner._plan

    def timed(*arguments: Any) -> Any:
        nonlocal pricing_seconds
        start = time.process_time()
        result = plan(*arguments)
        pricing_seconds += time.process_time() - start
        return result

    columns.Planner._plan = timed  # type: ignore[method-assign]
    start = time.process_time()
    placement_result = place(
        graph, cluster_of(devices), objective=objective, cache=cache, gains=False
    )
    seconds = time.process_time() - start
    columns.Planner._plan = plan  # type: ignore[method-assign]
    return {
        "devices": devices,
        "objective": objective,
        **figures(placement_result.placement, objective == "throughput"),
        "replicas": figures(placement_result.replicas, False)
        if placement_result.replicas is not None
        else None,
        "columns_priced": placement_result.priced,
        "pricing_cpu_seconds": round(pricing_seconds, 1),
        "other_cpu_seconds": round(seconds - pricing_seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("graphs", nargs="*", default=GRAPHS)
    parser.add_argument(
        "--devices",
        type=int,
        nargs="+",
        default=SIZES,
        help="rows of so many; others stay as they are",
    )
    parser.add_argument("--cache", type=Path)
    options = parser.parse_args()
    results_file = HERE / "results" / "cluster.json"
    for name in options.graphs:
        graph = graphrun.load(name)
        for devices in options.devices:
            objectives: tuple[Objective, ...] = (
                ("throughput", "latency") if devices in BOTH else ("throughput",)
            )
            for objective in objectives:
                new_row = row(graph, devices, objective, options.cache)
                print(name, json.dumps(new_row), flush=True)
                results = json.loads(results_file.read_text()) if results_file.exists() else {}
                other_rows = [
                    old_row
                    for old_row in results.get(name, [])
                    if (old_row["devices"], old_row["objective"]) != (devices, objective)
                ]
                rows = sorted(
                    [*other_rows, new_row],
                    key=lambda item: (item["devices"], item["objective"] == "latency"),
                )
                results["date"], results["highspy"] = (
                    datetime.date.today().isoformat(),
                    version("highspy"),
                )
                results["kinds"] = [
                    {"hardware": kind, "vram_gib": gib, "dollars_per_hour": PRICES[kind]}
                    for kind, gib in KINDS
                ]
                results_file.write_text(json.dumps({**results, name: rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
