"""The settings of a server, which its processes receive unchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from graphrun import api
from graphrun.devices import in_dtype
from graphrun.errors import InputError
from graphrun.model.hardware import Hardware
from graphrun.serve.keys import ApiKey

if TYPE_CHECKING:
    from graphrun.cluster.machines import Cluster
    from graphrun.graph.graph import Graph


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of one request, checked before planning."""

    body_bytes: int = 2**20  # of a request without files
    upload_bytes: int = 20 * 2**20  # of a request with files
    characters: int = 10_000  # of each text
    pixels: int = 2**22  # of each picture: 2048 x 2048
    steps: int = 100
    pictures: int = 4
    body_seconds: float = 20.0  # for the headers, and again for the body
    # without a received byte, without a request, or without the client reading a byte
    idle_seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a server.

    ``budgets``: arguments of `graphrun.estimate`, with ``ram`` in bytes. ``hardware``: of each
    device, the main one first. ``cluster``: has the devices and their budgets; ``hardware`` is
    empty then, and ``budgets`` has only the other arguments. ``folder``: for journals, uploads and
    pictures. ``dtype``: as for `graphrun.devices.in_dtype`. ``limits``: of `graphrun.limits`, for
    the processes. ``keys``: by name; empty: no key is needed. ``keys_file``: where they are from.
    ``queue_seconds``: the longest predicted wait that is admitted. ``drain_seconds``: the time for
    requests after SIGTERM. ``connections``: the most that may be open. ``allow_hosts`` and
    ``allow_origins``: as in `graphrun.serve.origins`. ``state``: the folder of a `JobStore`; None:
    jobs end with the server. ``warms``: the server is ready once every graph has made a picture.
    ``log_as_json``: as in `graphrun.serve.log`. ``loras``: the folder of LoRAs that requests may
    name; None: none. ``webhooks`` and ``webhook_keys``: the origins and keys of
    `graphrun.serve.webhooks.Webhooks`.
    """

    graphs: tuple[Path, ...]
    trust: tuple[str, ...]
    budgets: Mapping[str, Any]
    hardware: tuple[Hardware, ...]
    cache: Path
    reuse: Literal["encoded", "all", "none"]
    folder: Path
    limits: Mapping[str, int]
    version: str
    bounds: Bounds = field(default_factory=Bounds)
    keys: Mapping[str, ApiKey] = field(default_factory=dict)
    keys_file: Path | None = None
    queue_seconds: float = 300.0
    drain_seconds: float = 30.0
    connections: int = 512
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    cluster: Cluster | None = None
    dtype: str | None = None
    state: Path | None = None
    warms: bool = False
    log_as_json: bool = False
    loras: Path | None = None
    webhooks: tuple[str, ...] = ()
    webhook_keys: tuple[bytes, ...] = field(default=(), repr=False)

    def loaded_graphs(self) -> dict[str, Graph]:
        """Read the graph files. Raises InputError for a file that is wrong, and for a graph that
        cannot be served."""
        hardware = self.hardware[0] if self.hardware else None
        graphs = [
            in_dtype(api.load(path, trust=self.trust), self.dtype, hardware) for path in self.graphs
        ]
        refuse_graphs(graphs)
        return {graph.name: graph for graph in graphs}


def refuse_graphs(graphs: Sequence[Graph]) -> None:
    """Raise InputError for a graph that makes no pictures or videos, and for a name twice."""
    for graph in graphs:
        graph.refuse_list()
        kinds = graph.kinds().values()
        if not {"image", "video"}.intersection(kinds):
            raise InputError(
                f"{graph.name} makes {', '.join(kinds)}, and no pictures or videos: leave it out"
            )
    counts = Counter(graph.name for graph in graphs)
    if duplicates := sorted(name for name, count in counts.items() if count > 1):
        raise InputError(
            f"two graphs are called {', '.join(duplicates)}: leave one out, or change name: in "
            "one of the files"
        )
