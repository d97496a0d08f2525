"""What a server is started with. Sent to its processes as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from graphrun.model.problem import Hardware

if TYPE_CHECKING:
    from graphrun.cluster.machines import Cluster


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one request may ask for; checked before anything is planned."""

    body_bytes: int = 2**20  # of a request without files
    upload_bytes: int = 20 * 2**20  # of a request with files
    characters: int = 10_000  # of each text
    pixels: int = 2**22  # of each picture: 2048 x 2048
    steps: int = 100
    pictures: int = 4
    body_seconds: float = 20.0  # for headers, and again for the body
    # without a byte of a body, without a request, or without a byte of an answer read
    idle_seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class Settings:
    """``budgets``: arguments of `graphrun.estimate`, with ``ram`` in bytes. ``hardware``: of each
    device, the first is main. ``cluster``: it has the devices and their budgets then; ``hardware``
    is empty, and ``budgets`` has the others. ``folder``: for journals, uploads and pictures.
    ``limits``: those of `graphrun.limits` that the processes take over. ``keys``: hashes of API
    keys by name; empty: none is asked for. ``queue_seconds``: the longest predicted wait of a
    request that is admitted. ``drain_seconds``: of requests after SIGTERM. ``connections``: open at
    once. ``allow_hosts`` and ``allow_origins``: as `graphrun.serve.origins` takes them.
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
    keys: Mapping[str, str] = field(default_factory=dict)
    queue_seconds: float = 300.0
    drain_seconds: float = 30.0
    connections: int = 512
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    cluster: Cluster | None = None
