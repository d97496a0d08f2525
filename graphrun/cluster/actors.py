"""Workers as actors of Ray, one per device, or per column of several, in a placement group; values
go through its object store.

An actor that dies is started again by Ray in the same place, and what it was asked to run is run
again. Ray sends no usage statistics from here, and a cluster that is started here has no dashboard.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from graphrun.batch.cache.pack import pack, unpack
from graphrun.batch.queue import Batch, BatchContext
from graphrun.batch.requests import Request
from graphrun.batch.schedule import Segment
from graphrun.cluster.flow import Flow, segments_of
from graphrun.cluster.machines import Cluster, Device
from graphrun.cluster.place import place
from graphrun.cluster.placement import Assignment, Objective, Placement
from graphrun.cluster.worker import LostValue, Report, Visit, Worker
from graphrun.errors import DeviceLost, InputError
from graphrun.extras import install_command
from graphrun.graph.graph import Graph
from graphrun.graph.settings import settings_of

RETRIES = 8  # of a run whose actor died
READY_SECONDS = 60  # that the actors' places may take to be there
# least and most of the object store of a cluster that is started here
STORE_BYTES = (
    256 << 20,
    2 << 30,
)
CPUS = 0.001  # of an actor, in Ray's count, so that the cores of the machine set no limit


@contextlib.contextmanager
def joined(cluster: Cluster) -> Iterator[Any]:
    """Ray, connected to the cluster at ``cluster.address``; else to one that is started here, and
    stopped. A connection that the process has is used. Raises InputError where Ray is not
    installed, or is not at the address."""
    ray = _imported()
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
            own = {
                "num_cpus": 1,
                "num_gpus": _gpus(cluster),
                "object_store_memory": store_bytes,
                "include_dashboard": False,
            }
            ray.init("local", **own, **quiet, _system_config={"worker_niceness": 0})
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InputError(f"Ray at {cluster.address or 'this machine'}: {error}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _imported() -> Any:
    try:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        import ray.util.scheduling_strategies
    except ImportError:
        raise InputError(
            f"--cluster runs on Ray, which is not installed: {install_command('cluster')}"
        ) from None
    return ray


def _gpus(cluster: Cluster) -> int:
    return sum(device.hardware.device == "cuda" for device in cluster.devices)


class _Ticket(NamedTuple):
    """References to what a run makes in each of its visits, and to its report."""

    values: tuple[Any, ...]
    report: Any


class _Actor:
    """A `Worker` in a process of its own."""

    def __init__(self, name: str, threads: int) -> None:
        torch.set_num_threads(threads)  # kernels of the CPU round by their number
        self._name = name
        self._worker: Worker | None = None

    def run(self, segment: Sequence[Any], visits: Sequence[Visit]) -> tuple[Any, ...]:
        """As `Worker.run`, of the one ``segment``: what each visit made, then the report.
        ``segment`` and values are references."""
        own = [
            of._replace(values=[functools.partial(_value, reference) for reference in of.values])
            for of in visits
        ]
        made, report = self._of(segment).run(own)
        return *made, report

    def load_ahead(self, segment: Sequence[Any]) -> Report:
        """As `Worker.load_ahead`, of the one ``segment``, a reference."""
        return self._of(segment).load_ahead()

    def _of(self, segment: Sequence[Any]) -> Worker:
        if self._worker is None:
            import ray

            self._worker = Worker(ray.get(segment[0]), self._name)
        return self._worker

    def release(self) -> None:
        """Frees the device and the host memory: the next run may be of another segment."""
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

    Raises InputError where the cluster has no node for a host, or no room.
    """

    def __init__(self, ray: Any, segments: Sequence[Segment], placement: Placement) -> None:
        super().__init__()
        self._ray, self._every = ray, dict[str, Any]()
        self.turn_to(segments, placement)

    def turn_to(self, segments: Sequence[Segment], placement: Placement) -> None:
        """From now on runs are of ``placement``, on the same cluster. All actors leave devices and
        memory empty first, or end where devices are to be held together that were not before, or no
        longer."""
        wanted = {device.name: of.name for of in placement.assignments for device in of.devices}
        if any(
            wanted.get(device, name) != name for name in self._every for device in name.split("+")
        ):
            self.close()
            self._every.clear()
        self._ray.get([actor.release.remote() for actor in self._every.values()])
        if missing := [of for of in placement.assignments if of.name not in self._every]:
            self._start(missing, placement.cluster)
        self._actors = [self._every[of.name] for of in placement.assignments]
        self._segments = [self._ray.put(segment) for segment in segments]

    def _start(self, assignments: Sequence[Assignment], cluster: Cluster) -> None:
        """Starts the actors of ``assignments``."""
        ray, nodes = self._ray, _nodes(self._ray, cluster)
        bundles = [_bundle(of.devices, nodes) for of in assignments]
        places = ray.util.placement_group(bundles, strategy="PACK")
        self.callback(ray.util.remove_placement_group, places)
        if not places.wait(READY_SECONDS):
            self.close()
            raise InputError(
                f"Ray has no room for {', '.join(of.name for of in assignments)}: it has {ray.available_resources()}"
            )
        for number, of in enumerate(assignments):
            actor = ray.remote(_Actor).options(
                num_cpus=CPUS,
                num_gpus=bundles[number].get("GPU", 0),
                max_restarts=-1,
                max_task_retries=RETRIES,
                runtime_env={"env_vars": _visible(of.devices)},
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    places, number
                ),
            )
            self._every[of.name] = actor.remote(of.name, torch.get_num_threads())
            self.callback(ray.kill, self._every[of.name])

    def load_ahead(self, worker: int) -> _Ticket:
        """Begins to load what the first run of actor number ``worker`` begins with."""
        return _Ticket((), self._actors[worker].load_ahead.remote([self._segments[worker]]))

    def begin(self, worker: int, visits: Sequence[Visit]) -> _Ticket:
        """Begins a run of actor number ``worker``, after those begun before."""
        run = self._actors[worker].run.options(num_returns=1 + len(visits))
        *values, report = run.remote([self._segments[worker]], list(visits))
        return _Ticket(tuple(values), report)

    def done(self, tickets: Collection[_Ticket], *, every: bool) -> Collection[_Ticket]:
        """Those of ``tickets`` that are done, when one is, or with ``every`` all are; none after a
        second."""
        wanted = len(tickets) if every else 1
        ready, _ = self._ray.wait([of.report for of in tickets], num_returns=wanted, timeout=1.0)
        return [of for of in tickets if of.report in ready] if len(ready) >= wanted else []

    def report(self, ticket: _Ticket) -> Report:
        """Of a run that is done. Raises DeviceLost where its actor died each time."""
        try:
            found: Report = self._ray.get(ticket.report)
            return found
        except self._ray.exceptions.RayActorError as error:
            raise DeviceLost(f"its process died {RETRIES + 1} times: {error}") from None

    def made(self, ticket: _Ticket, visit: int) -> Any:
        """The reference to what the run makes in visit number ``visit``."""
        return ticket.values[visit]

    def keep(self, values: Mapping[str, Any]) -> Any:
        """Puts values into the object store."""
        return self._ray.put(pack(dict(values)))

    def fetch(self, handle: Any) -> dict[str, Any]:
        """The values of a reference. Raises LostValue."""
        return dict(unpack(_value(handle)))


def _bundle(devices: Sequence[Device], nodes: Mapping[str, str]) -> dict[str, float]:
    host, gpus = devices[0].host, sum(of.hardware.device == "cuda" for of in devices)
    node = {f"node:{nodes[host]}": CPUS} if host in nodes else {}
    return {"CPU": CPUS, **({"GPU": gpus} if gpus else {}), **node}


def _visible(devices: Sequence[Device]) -> dict[str, str]:
    """The environment in which ``devices`` are the only CUDA devices, in this order."""
    if devices[0].hardware.device != "cuda":
        return {}
    numbers = ",".join(of.torch.partition(":")[2] or "0" for of in devices)
    return {"CUDA_VISIBLE_DEVICES": numbers, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


def _nodes(ray: Any, cluster: Cluster) -> dict[str, str]:
    """Host -> address of the node of that name. Empty where the cluster is one node, and all hosts
    are simulated on it or are one.

    Raises InputError for a host without a node.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    if len(alive) == 1 and (len(cluster.hosts) == 1 or not _gpus(cluster)):
        return {}
    named = {
        node[key]: node["NodeManagerAddress"]
        for key in ("NodeManagerHostname", "NodeManagerAddress", "NodeName")
        for node in alive
    }
    if missing := [host.name for host in cluster.hosts if host.name not in named]:
        raise InputError(
            f"Ray has no node called {', '.join(missing)}, but {', '.join(sorted(named))}: name the hosts of the cluster file so, "
            "or start a node with ray start --node-name NAME"
        )
    return {host.name: named[host.name] for host in cluster.hosts}


class OnCluster(contextlib.ExitStack):
    """Runs requests of equal settings on ``cluster``
    (`graphrun.batch.queue.BatchContext.elsewhere`). A context manager.

    ``objective``, ``cache`` and ``budgets`` are as for `graphrun.cluster.place.place`. ``items``:
    to plan for, in place of the number of requests. ``placement``: of the requests that were run
    last; their weights stay. Raises InputError without Ray.
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
        _imported()
        self._cluster, self._items, self._ray = cluster, items, None
        self._arguments = {**budgets, "objective": objective, "cache": cache, "gains": False}
        self._placed: dict[Any, Placement] = {}
        self._crew: Actors | None = None
        self.placement: Placement | None = None

    def join(self) -> Any:
        """Ray, connected as `joined` does, once."""
        if self._ray is None:
            self._ray = self.enter_context(joined(self._cluster))
        return self._ray

    def place(self, graph: Graph, requests: Sequence[Request]) -> Placement:
        """The placement for ``requests``, made once."""
        inputs, items = requests[0].inputs, self._items or len(requests)
        key = graph.name, graph.digest, settings_of(graph, inputs), items
        if key not in self._placed:
            self._placed[key] = place(
                graph, self._cluster, **{**self._arguments, "inputs": inputs, "items": items}
            ).placement
        return self._placed[key]

    def __call__(
        self, graph: Graph, requests: Sequence[Request], context: BatchContext, batch: Batch
    ) -> None:
        """Places the stages, starts the actors and runs ``requests``."""
        placement = self.place(graph, requests)
        if placement is not self.placement:
            segments = segments_of(graph, placement)
            if self._crew is None:
                self._crew = self.enter_context(Actors(self.join(), segments, placement))
            else:
                self._crew.turn_to(segments, placement)
            self.placement = placement
        assert self._crew is not None
        Flow(graph, requests, context, batch, placement, self._crew).run()
