"""The option ``--cluster`` of ``plan``: several machines, each with its devices."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphrun.cli.common import cache_folder, load, prepare_to_plan, show, solving
from graphrun.cli.options import PlanOptions, option
from graphrun.cli.terminal import alive, width

if TYPE_CHECKING:
    from graphrun.cluster.machines import Cluster

ClusterFile = Annotated[
    Path | None,
    option("Plan for the machines in this file (docs/howto/cluster.md).", "FILE", "--cluster"),
]
ObjectiveOption = Annotated[
    str | None,
    typer.Option(
        help="With --cluster: throughput (of many requests, the default) or latency (of one).",
        metavar="WHICH",
        show_default=False,
    ),
]
ItemsOption = Annotated[
    int | None,
    typer.Option(
        help="With --cluster: number of requests to plan for (100). 1: a cold one.",
        metavar="N",
        min=1,
        show_default=False,
    ),
]


def open_cluster(path: Path, options: PlanOptions) -> Cluster:
    """Return the cluster in the file ``path``. Raises InputError for options that the file
    replaces."""
    from graphrun.cluster.machines import read_cluster

    options.refuse_for_cluster(path)
    return read_cluster(path, cache_folder(options.no_cache))


def plan_cluster(
    graph: Path,
    options: PlanOptions,
    file: Path,
    objective: str | None,
    items: int | None,
    output_file: Path | None,
    as_json: bool,
) -> None:
    """Run ``plan`` with ``--cluster``."""
    from graphrun.cluster import files
    from graphrun.cluster.place import place
    from graphrun.cluster.placement import refuse_objective
    from graphrun.cluster.screen import placement_screen, summary
    from graphrun.report.screen import Look

    refuse_objective(objective or "throughput")
    prepare_to_plan()
    cluster, pipeline_graph = open_cluster(file, options), load(graph, options)
    start = time.perf_counter()
    with (
        solving(),
        alive(f"planning {pipeline_graph.name} for {len(cluster.devices)} devices"),
    ):
        placement = place(
            pipeline_graph,
            cluster,
            objective="latency" if objective == "latency" else "throughput",
            items=items or 100,
            inputs=options.inputs,
            cache=cache_folder(options.no_cache),
            **options.cluster_arguments,
        )
    plan_summary = summary(placement, time.perf_counter() - start)
    if output_file is not None:
        files.save(output_file, graph, placement.placement, plan_summary)
    next_command = (
        f"saved: {output_file}"
        if output_file is not None
        else f"next: graphrun plan {graph} --cluster {file} -o plan.json"
    )
    show(
        plan_summary, as_json, placement_screen(placement, Look(width(), next_command=next_command))
    )
