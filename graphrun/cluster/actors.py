"""Workers as Ray actors in a placement group: one actor per device, or per team of devices.

Values pass through Ray's object store. Ray restarts a dead actor in the same place and repeats its
runs. Ray sends no usage statistics from here, and a cluster started here has no dashboard.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from graphrun.batch.cache.pack import pack, unpack
from graphrun.batch.queue import Batch, BatchContext
from graphrun.batch.requests import Request
from graphrun.batch.schedule import StageSegment
from graphrun.cluster.flow import Flow, segments_of
from graphrun.cluster.machines import Cluster, ClusterDevice, ClusterHost
from graphrun.cluster.place import place
from graphrun.cluster.placement import Assignment, Objective, Placement
from graphrun.cluster.worker import LostValue, Report, StageWorker, Visit
from graphrun.errors import DeviceLost, InputError
from graphrun.extras import install_command
from graphrun.graph.graph import Graph
from graphrun.graph.settings import settings_of

RETRIES = 8  # attempts to repeat a run after its actor died
READY_SECONDS = 60  # to wait for the placement group
# limits of the object store of a cluster started here
STORE_BYTES = (
    256 << 20,
    2 << 30,
)
CPUS = 0.001  # of an actor that reserves no core, in Ray's accounting


@contextlib.contextmanager
def ray_connection(cluster: Cluster) -> Iterator[Any]:
    """Connect to the Ray cluster at ``cluster.address``, or start one here and stop it at the end.

    Reuses the process's connection. Raises InputError if Ray is not installed or not at the
    address.
    """
    ray = _import_ray()
    if ray.is_initialized():
        yield ray
        return
    quiet: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": "error",
        "namespace": "graphrun",
    }
    try:
        if cluster.address is not None:
            ray.init(cluster.address, **quiet)
        else:
            store_bytes = sorted(
                (*STORE_BYTES, sum(host.ram_bytes for host in cluster.hosts) // 4)
            )[1]
            resources = {
                "num_cpus": 1,
                "num_gpus": _gpus(cluster),
                "object_store_memory": store_bytes,
                "include_dashboard": False,
            }
            ray.init("local", **resources, **quiet, _system_config={"worker_niceness": 0})
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InputError(
            f"Ray at {cluster.address or 'this machine'}: {error}{_hint(ray, cluster)}"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _hint(ray: Any, cluster: Cluster) -> str:
    """Return what to check where a running cluster is not reached: Ray does not say why."""
    if cluster.address is None:
        return ""
    if os.environ.get("RAY_AUTH_MODE") == "token":
        return "; is the token of RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH the cluster's?"
    return (
        "; if the cluster asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE; "
        f"it must run Ray {ray.__version__}, as this process does"
    )


def _import_ray() -> Any:
    try:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        import ray.util.scheduling_strategies
    except ImportError:
        raise InputError(
            f"--cluster runs on Ray, which is not installed: {install_command('cluster')}"
        ) from None
    return ray


def _gpus(cluster: Cluster) -> int:
    return sum(bool(device.hardware.kind.visibility) for device in cluster.devices)


class _Ticket(NamedTuple):
    """References to the result of each visit of a run, and to its report."""

    values: tuple[Any, ...]
    report: Any


class _Actor:
    """A `StageWorker` in a process of its own."""

    def __init__(self, name: str, threads: int) -> None:
        torch.set_num_threads(threads)  # CPU results depend on the thread count
        self._name = name
        self._worker: StageWorker | None = None

    def run(self, segment: Sequence[Any], visits: Sequence[Visit]) -> tuple[Any, ...]:
        """Run the worker of ``segment``. Return the result of each visit, then the report.
        ``segment`` and the visits' values are references."""
        local_visits = [
            visit._replace(
                values=[functools.partial(_value, reference) for reference in visit.values]
            )
            for visit in visits
        ]
        values, report = self._open_worker(segment).run(local_visits)
        return *values, replace(report, process=os.getpid())

    def load_ahead(self, segment: Sequence[Any]) -> Report:
        return replace(self._open_worker(segment).load_ahead(), process=os.getpid())

    def _open_worker(self, segment: Sequence[Any]) -> StageWorker:
        if self._worker is None:
            import ray

            self._worker = StageWorker(ray.get(segment[0]), self._name)
        return self._worker

    def release(self) -> None:
        """Free device and host memory. The next run may use another segment."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
            gc.collect()


def _value(reference: Any) -> bytes:
    import ray

    try:
        return bytes(ray.get(reference))
    except ray.exceptions.ObjectLostError as error:
        raise LostValue(str(error)) from None


class Actors(contextlib.ExitStack):
    """The crew of ``placement`` (`graphrun.cluster.flow.Crew`), on ``ray``. A context manager.

    Raises InputError if the cluster has no node for a host, or no room.
    """

    def __init__(self, ray: Any, segments: Sequence[StageSegment], placement: Placement) -> None:
        super().__init__()
        self._ray, self._actors_by_name = ray, dict[str, Any]()
        self.switch_to(segments, placement)

    def switch_to(self, segments: Sequence[StageSegment], placement: Placement) -> None:
        """Use ``placement`` from now on, on the same cluster. Empties every actor's devices and
        memory, or restarts the actors if the teams change."""
        team_of_device = {
            device.name: assignment.name
            for assignment in placement.assignments
            for device in assignment.devices
        }
        if any(
            team_of_device.get(device, name) != name
            for name in self._actors_by_name
            for device in name.split("+")
        ):
            self.close()
            self._actors_by_name.clear()
        self._ray.get([actor.release.remote() for actor in self._actors_by_name.values()])
        if new_assignments := [
            assignment
            for assignment in placement.assignments
            if assignment.name not in self._actors_by_name
        ]:
            self._start(new_assignments, placement.cluster)
        self._actors = [
            self._actors_by_name[assignment.name] for assignment in placement.assignments
        ]
        self._segments = [self._ray.put(segment) for segment in segments]

    def _start(self, assignments: Sequence[Assignment], cluster: Cluster) -> None:
        ray, nodes = self._ray, _nodes(self._ray, cluster)
        bundles = [bundle_of(assignment, nodes, cluster) for assignment in assignments]
        places = ray.util.placement_group(bundles, strategy="PACK")
        self.callback(ray.util.remove_placement_group, places)
        if not places.wait(READY_SECONDS):
            self.close()
            raise InputError(
                f"Ray has no room for {', '.join(assignment.name for assignment in assignments)}: "
                f"it has {ray.available_resources()}"
            )
        for number, assignment in enumerate(assignments):
            actor = ray.remote(_Actor).options(
                num_cpus=bundles[number]["CPU"],
                num_gpus=bundles[number].get("GPU", 0),
                memory=bundles[number].get("memory"),
                max_restarts=-1,
                max_task_retries=RETRIES,
                runtime_env={"env_vars": visible_devices(assignment.devices, cluster)},
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    places, number
                ),
            )
            self._actors_by_name[assignment.name] = actor.remote(
                assignment.name, torch.get_num_threads()
            )
            self.callback(ray.kill, self._actors_by_name[assignment.name])

    def load_ahead(self, worker: int) -> _Ticket:
        """Start loading the blocks that actor number ``worker`` needs first."""
        return _Ticket((), self._actors[worker].load_ahead.remote([self._segments[worker]]))

    def begin(self, worker: int, visits: Sequence[Visit]) -> _Ticket:
        """Queue a run of actor number ``worker`` after its earlier runs."""
        run = self._actors[worker].run.options(num_returns=1 + len(visits))
        *values, report = run.remote([self._segments[worker]], list(visits))
        return _Ticket(tuple(values), report)

    def finished(self, tickets: Collection[_Ticket], *, wait_for_all: bool) -> Collection[_Ticket]:
        """Wait up to a second for one of ``tickets``, or for all. Return the finished ones."""
        count = len(tickets) if wait_for_all else 1
        ready, _ = self._ray.wait(
            [ticket.report for ticket in tickets], num_returns=count, timeout=1.0
        )
        return (
            [ticket for ticket in tickets if ticket.report in ready] if len(ready) >= count else []
        )

    def report(self, ticket: _Ticket) -> Report:
        """Return the report of a finished run. Raises DeviceLost if the actor died in every
        attempt."""
        try:
            report: Report = self._ray.get(ticket.report)
            return report
        except self._ray.exceptions.RayActorError as error:
            raise DeviceLost(f"its process died {RETRIES + 1} times: {error}") from None

    def result(self, ticket: _Ticket, visit: int) -> Any:
        return ticket.values[visit]

    def keep(self, values: Mapping[str, Any]) -> Any:
        return self._ray.put(pack(dict(values)))

    def fetch(self, handle: Any) -> dict[str, Any]:
        return dict(unpack(_value(handle)))


def bundle_of(
    assignment: Assignment, nodes: Mapping[str, str], cluster: Cluster
) -> dict[str, float]:
    """Return the resources of an actor in Ray's accounting. On a running cluster they include the
    planned RAM and a core for each GPU, which other jobs then leave free. ``nodes``: host ->
    address of its node."""
    host = assignment.devices[0].host
    gpus = sum(bool(device.hardware.kind.visibility) for device in assignment.devices)
    nbytes = assignment.column.ram_bytes if cluster.address is not None else 0
    return {
        "CPU": gpus if gpus and cluster.address is not None else CPUS,
        **({"GPU": gpus} if gpus else {}),
        **({"memory": nbytes} if nbytes else {}),
        **({f"node:{nodes[host]}": CPUS} if host in nodes else {}),
    }


def visible_devices(devices: Sequence[ClusterDevice], cluster: Cluster) -> dict[str, str]:
    """Return the environment of an actor on ``devices``.

    It makes only them visible, in this order. On a running cluster with equal GPUs in the host it
    is empty: Ray chooses GPUs that no other job has, and makes these visible.
    """
    if not (variable := devices[0].hardware.kind.visibility):
        return {}
    host = next(host for host in cluster.hosts if host.name == devices[0].host)
    if cluster.address is not None and len({device.hardware.name for device in host.devices}) == 1:
        return {}
    numbers = ",".join(device.torch.partition(":")[2] or "0" for device in devices)
    return {variable: numbers, f"RAY_EXPERIMENTAL_NOSET_{variable}": "1"}


def _nodes(ray: Any, cluster: Cluster) -> dict[str, str]:
    """Return the address of each host's Ray node, by host name. Empty on a single node if all hosts
    are simulated or there is only one. Raises InputError for a host without a node."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    has_labels = any(host.labels for host in cluster.hosts)
    if len(alive) == 1 and not has_labels and (len(cluster.hosts) == 1 or not _gpus(cluster)):
        return {}
    return node_addresses(cluster.hosts, alive)


def node_addresses(
    hosts: Sequence[ClusterHost], nodes: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """Return the address of each host's node among ``nodes``, as `ray.nodes` lists them: the node
    with the host's name, or for a host with labels one that has them and is no other host's. Raises
    InputError for a host without a node."""
    address_of = {
        node[key]: node["NodeManagerAddress"]
        for key in ("NodeManagerHostname", "NodeManagerAddress", "NodeName")
        for node in nodes
    }
    if unknown_hosts := [
        host.name for host in hosts if not host.labels and host.name not in address_of
    ]:
        raise InputError(
            f"Ray has no node called {', '.join(unknown_hosts)}, "
            f"but {', '.join(sorted(address_of))}: name the hosts of the cluster file so, give "
            "them labels, or start a node with ray start --node-name NAME"
        )
    addresses = {host.name: address_of[host.name] for host in hosts if not host.labels}
    # hosts with many labels choose first, since fewer nodes have them
    for host in sorted(hosts, key=lambda host: -len(host.labels)):
        if not host.labels:
            continue
        candidates = (
            node["NodeManagerAddress"]
            for node in nodes
            if {*host.labels} <= {*node.get("Labels", {}).items()}
        )
        free = [address for address in candidates if address not in addresses.values()]
        if not free:
            labels = ", ".join(f"{name}={value}" for name, value in host.labels)
            raise InputError(
                f"Ray has no free node with the labels {labels} of host {host.name}: start one "
                f"with ray start --labels {labels.replace(', ', ',')}"
            )
        addresses[host.name] = min(free)
    return addresses


class ClusterRunner(contextlib.ExitStack):
    """Runs requests of equal settings on ``cluster``. A context manager.

    Implements `graphrun.batch.queue.BatchContext.dispatch`. ``objective``, ``cache`` and
    ``budgets``: as for `graphrun.cluster.place.place`. ``items``: the number to plan for, instead
    of the number of requests. ``placement``: of the latest requests, whose weights stay loaded.
    Raises InputError without Ray.
    """

    def __init__(
        self,
        cluster: Cluster,
        objective: Objective,
        cache: Path | None,
        budgets: Mapping[str, Any],
        items: int | None = None,
    ) -> None:
        super().__init__()
        _import_ray()
        self._cluster, self._items, self._ray = cluster, items, None
        self._arguments = {**budgets, "objective": objective, "cache": cache, "gains": False}
        self._placements: dict[Any, Placement] = {}
        self._crew: Actors | None = None
        self.placement: Placement | None = None

    def join(self) -> Any:
        if self._ray is None:
            self._ray = self.enter_context(ray_connection(self._cluster))
        return self._ray

    def reload(self, allow: Sequence[str]) -> None:
        """Load the weights of the next requests even if they are placed as before. ``allow``: what
        their plans may choose."""
        self.placement, self._arguments["allow"] = None, tuple(allow)

    def place(self, graph: Graph, requests: Sequence[Request]) -> Placement:
        """Return the placement for ``requests``, cached."""
        inputs, items = requests[0].inputs, self._items or len(requests)
        key = graph.name, graph.digest, settings_of(graph, inputs), items
        if key not in self._placements:
            self._placements[key] = place(
                graph, self._cluster, **{**self._arguments, "inputs": inputs, "items": items}
            ).placement
        return self._placements[key]

    def __call__(
        self, graph: Graph, requests: Sequence[Request], context: BatchContext, batch: Batch
    ) -> None:
        """Place the stages, start the actors and run ``requests``."""
        placement = self.place(graph, requests)
        if placement is not self.placement:
            segments = segments_of(graph, placement)
            if self._crew is None:
                self._crew = self.enter_context(Actors(self.join(), segments, placement))
            else:
                self._crew.switch_to(segments, placement)
            self.placement = placement
        assert self._crew is not None
        Flow(graph, requests, context, batch, placement, self._crew).run()
