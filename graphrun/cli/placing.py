"""The option ``--cluster`` of ``plan``: several machines, each with its devices."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphrun.cli.common import cache_folder, load, native_stdout_to_stderr, show
from graphrun.cli.options import Asked
from graphrun.cli.terminal import alive, width
from graphrun.errors import InputError
from graphrun.report.screen import Look

if TYPE_CHECKING:
    from graphrun.cluster.machines import Cluster

ClusterFile = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        help="Hosts, devices and links (YAML): plan for all of them together.",
        show_default=False,
    ),
]
Objective = Annotated[
    str | None,
    typer.Option(
        help="With --cluster: throughput (most items per second) or latency (of one item).",
        show_default="throughput",
    ),
]
Items = Annotated[
    int | None,
    typer.Option(
        help="With --cluster: items to plan for; 1: one, with nothing loaded.",
        min=1,
        show_default="100",
    ),
]


def cluster_of(path: Path, asked: Asked) -> Cluster:
    """The cluster in the file ``path``. Raises InputError for options that it takes the place
    of."""
    from graphrun.cluster.machines import read_cluster

    own = {
        "vram": None,
        "ram": "auto",
        "pinned": None,
        "disk": None,
        "hardware": None,
        "device": None,
        "runs": 1,
    }
    if given := [f"--{name}" for name, default in own.items() if getattr(asked, name) != default]:
        raise InputError(
            f"{path} has the hosts' and devices' budgets: leave {', '.join(given)} out"
        )
    return read_cluster(path, cache_folder(asked.no_cache))


def plan_cluster(
    graph: Path,
    asked: Asked,
    file: Path,
    objective: str | None,
    items: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """``plan`` with ``--cluster``."""
    from graphrun.cluster import files
    from graphrun.cluster.place import place
    from graphrun.cluster.screen import placement_screen, summary

    if objective not in (None, "throughput", "latency"):
        raise InputError(f"--objective {objective!r} is not known; it is throughput or latency")
    cluster, loaded = cluster_of(file, asked), load(graph, asked)
    arguments: dict[str, Any] = {
        name: of
        for name, of in asked.estimate_arguments.items()
        if name not in ("ram", "pinned", "runs", "until")
    }
    start = time.perf_counter()
    with (
        native_stdout_to_stderr(),
        alive(f"planning {loaded.name} for {len(cluster.devices)} devices"),
    ):
        placed = place(
            loaded,
            cluster,
            objective="latency" if objective == "latency" else "throughput",
            items=items or 100,
            inputs=asked.inputs,
            cache=cache_folder(asked.no_cache),
            **arguments,
        )
    found = summary(placed, time.perf_counter() - start)
    if out is not None:
        files.save(out, graph, placed.placement, found)
    then = (
        f"saved: {out}"
        if out is not None
        else f"next: graphrun plan {graph} --cluster {file} -o plan.json"
    )
    show(found, as_json, placement_screen(placed, Look(width(), then=then)))
