"""Run a graph for a list of inputs, on one device or on the devices of a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from graphrun import api
from graphrun.errors import InputError
from graphrun.graph.values import as_path
from graphrun.trace import warn_of

if TYPE_CHECKING:
    from graphrun.batch.cache.reuse import What
    from graphrun.batch.queue import Batch, Sink
    from graphrun.batch.requests import Request
    from graphrun.batch.watch import Watcher
    from graphrun.cluster.machines import Cluster
    from graphrun.graph.graph import Graph
    from graphrun.runtime.devices.device import Device


# arguments of `graphrun.estimate` that a cluster file replaces
CLUSTER_OPTIONS = ("vram", "ram", "memory", "pinned", "disk", "hardware", "runs")


def run_many(
    graph: Graph,
    inputs: str | Mapping[str, Any] | Iterable[Mapping[str, Any] | str | Request],
    *,
    common: Mapping[str, Any] | None = None,
    modules: Mapping[str, Any] | None = None,
    random_weights: bool = False,
    cache: str | Path | None = None,
    reuse: What = "encoded",
    resume: str | Path | None = None,
    strict: bool = False,
    sink: Sink | None = None,
    watcher: Watcher | None = None,
    device: Device | None = None,
    note: Callable[[str], None] | None = None,
    cluster: str | Path | Cluster | None = None,
    objective: Literal["throughput", "latency"] = "throughput",
    **budgets: Any,
) -> Batch:
    """Run ``graph`` for each of ``inputs``: mappings of inputs or prompts, or a single one.

    ``common``: inputs that all runs share. Requests run one by one or stage by stage, whichever is
    predicted to be faster, in groups that fit RAM and disk. Weights stay loaded from run to run if
    the plan says so, and equal stages run once. The items of a list (``for_each``) run like
    requests, and their results are a list. ``budgets``: arguments of `estimate`.

    ``resume``: a folder for the state of the batch; a call with the same folder resumes after the
    last finished request, item, stage or denoising step, and ends with the same bits. ``sink`` is
    called with the outputs of each finished request and returns the files it wrote; without it the
    outputs are in the result. A request whose run fails is in the result's ``errors``; ``strict``
    raises its error instead. Other arguments are as for `run`. Warns (RuntimeWarning) if a run
    takes more than planned.

    ``cluster``: a cluster file, whose devices run the stages within the budgets in the file, placed
    as by `graphrun plan --cluster` for ``objective``. A request then resumes after its last
    finished stage. Raises InputError if Ray is not installed.

    Example:

        batch = graphrun.run_many(graph, ["a cat", "a dog"], vram="8G", hardware="rtx4090")
        for number, outputs in batch.outputs.items():
            outputs["image"].save(f"{number}.png")
    """
    from graphrun.batch import queue
    from graphrun.batch.cache.reuse import reuse_for
    from graphrun.batch.items import Items
    from graphrun.batch.journal import Journal
    from graphrun.batch.requests import refuse_broken, requests_from, resolved
    from graphrun.batch.watch import Watcher as NoWatcher
    from graphrun.devices import resolved_in_process
    from graphrun.graph.graph import require_graph
    from graphrun.runtime.spool import spool_in

    require_graph(graph, "run_many")
    folder = as_path(cache)
    graph = graph.until(budgets.pop("until", None))
    graph = graph.without_sources() if random_weights else graph
    requests = resolved(requests_from(inputs), graph, common or {})
    if strict:
        refuse_broken(requests)
    allow = graph.allowed(budgets.get("allow", ()))
    cluster_runner, cards = None, list[Any]()
    if cluster is not None:
        replaced_arguments = {"modules": modules, "device": device} | {
            name: budgets.pop(name, None) for name in CLUSTER_OPTIONS
        }
        machines = _machines(cluster, objective, replaced_arguments, folder)
        device_name = machines.label
    else:
        machines = None
        cards, budgets = resolved_in_process(budgets, (modules or {}).values(), folder)
        device_name = cards[0].label
    with contextlib.ExitStack() as stack:
        if machines is not None:
            from graphrun.cluster.actors import ClusterRunner

            cluster_runner = stack.enter_context(
                ClusterRunner(machines, objective, folder, budgets)
            )
        journal, items = Journal(Path(resume)) if resume is not None else None, None
        if graph.list_input:
            items = Items(graph, requests, sink, journal)
            graph, requests, sink = graph.per_item(), items.requests, items.sink
        context = queue.BatchContext(
            estimate=lambda values: api.estimate(
                graph, inputs=values, hardware=cards, cache=folder, **budgets
            ),
            solve=lambda problem: api.plan(problem, cache=folder),
            device_name=device_name,
            reuse=(
                None
                if folder is None or modules or reuse == "none"
                else lambda values: reuse_for(
                    graph, values, device_name, folder, reuse, allow, note
                )
            ),
            modules=modules,
            journal=journal,
            device=device,
            sink=sink,
            watcher=watcher or NoWatcher(),
            strict=strict,
            spool=spool_in(folder, note),
            dispatch=cluster_runner,
        )
        batch = queue.run_requests(graph, requests, context)
    batch = batch if items is None else items.finish(batch)
    warn_of(batch.overruns, stacklevel=2)
    return batch


def _machines(
    cluster: str | Path | Cluster,
    objective: str,
    replaced_arguments: Mapping[str, Any],
    cache: Path | None,
) -> Cluster:
    """Return the cluster. Raises InputError for arguments that it replaces, and for an unknown
    objective."""
    from graphrun.cluster.machines import Cluster, read_cluster
    from graphrun.cluster.placement import refuse_objective

    if extra_names := [name for name, value in replaced_arguments.items() if value is not None]:
        raise InputError(
            f"{', '.join(extra_names)}: leave out with a cluster, which has the budgets and the "
            "devices"
        )
    refuse_objective(objective)
    return cluster if isinstance(cluster, Cluster) else read_cluster(Path(cluster), cache)
