"""Hosts, their devices and the links between hosts, as ``cluster.yaml`` describes them.

graphrun: 1
hosts:
  a:
    ram: 64G
    pinned: 32G
    devices:
      - {id: 0, hardware: rtx4090, vram: 22G}
      - {id: 1, hardware: rtx3060, vram: 11G}
  b: {ram: 32G, devices: [{id: 0, hardware: rtx4090, vram: 22G}]}
links: [{between: [a, b], bytes_per_second: 1.2e9, seconds: 1e-4}]
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from graphrun.device_kinds import kind_called
from graphrun.errors import InputError
from graphrun.graph.document import Document, read_document
from graphrun.graph.schema import Spec, Text
from graphrun.graph.shape import spec_of
from graphrun.graph.values import did_you_mean
from graphrun.limits import require
from graphrun.model.hardware import Hardware
from graphrun.profile.hardware_profiles import hardware as hardware_called
from graphrun.units import parse_size


def _nbytes(size: Any) -> Any:
    """Return the bytes of a size given as text or int. Pydantic refuses other types."""
    try:
        return (
            parse_size(size)
            if isinstance(size, (str, int)) and not isinstance(size, bool)
            else size
        )
    except InputError as error:
        raise PydanticCustomError(
            "size", "{text}", {"text": str(error).removeprefix("size: ")}
        ) from None


def _number(text: Any) -> Any:
    """Convert a number that YAML 1.1 reads as text: 1.2e9 has no sign after the e."""
    return (
        float(text)
        if isinstance(text, str) and re.fullmatch(r"[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]{1,3})?", text)
        else text
    )


SizeField = Annotated[int, BeforeValidator(_nbytes)]
Rate = Annotated[float, BeforeValidator(_number), Field(gt=0, lt=1e18)]


class DeviceSpec(Spec):
    """A device of a host."""

    id: Annotated[int, Field(ge=0)] = Field(description="Its number on the host.")
    hardware: Text = Field(description="A built-in device or a profile, as for --hardware.")
    vram: SizeField = Field(description="Its VRAM budget, such as 22G.")
    device: Text | None = Field(
        default=None, description="The torch device on its host; left out: cuda:ID, or sim:ID."
    )


class HostSpec(Spec):
    """A machine with its devices, and the memory that they share."""

    ram: SizeField = Field(description="RAM budget of all its devices together, such as 64G.")
    pinned: SizeField | None = Field(
        default=None, description="Part of the RAM that may be page-locked."
    )
    pcie: Rate | None = Field(
        default=None,
        description="Bytes per second between RAM and all devices together; "
        "left out: each has what its hardware has.",
    )
    devices: list[DeviceSpec] = Field(min_length=1, description="Its devices.")
    labels: dict[Text, Text] = Field(
        default_factory=dict,
        description="Labels of its node in a running Ray cluster, such as {pool: big}: for nodes "
        "whose names are not known before; left out: the node with the name of the host.",
    )


class LinkSpec(Spec):
    """A network between hosts. Any two of the hosts reach each other at this rate."""

    host_names: list[Text] = Field(alias="between", min_length=2, description="Names of hosts.")
    bytes_per_second: Rate = Field(description="In each direction.")
    seconds: Annotated[float, BeforeValidator(_number), Field(ge=0, lt=1e6)] = Field(
        default=0.0, description="Latency."
    )


class ClusterSpec(Spec):
    """A cluster file of graphrun."""

    graphrun: Literal[1] = Field(description="The version of this file format.")
    address: Text | None = Field(
        default=None,
        description="Of a running Ray cluster, or auto; left out: one is started here.",
    )
    hosts: dict[Text, HostSpec] = Field(min_length=1, description="Machines by name.")
    links: list[LinkSpec] = Field(
        default_factory=list, description="Networks; hosts without one exchange nothing."
    )


@dataclass(frozen=True, slots=True)
class ClusterDevice:
    """A device of a cluster. ``hardware``: with the device's share of its host's shared resources.
    ``torch``: a torch device such as ``cuda:1``."""

    host: str
    id: int
    hardware: Hardware
    vram_bytes: int
    torch: str

    @property
    def name(self) -> str:
        """``HOST/ID``."""
        return f"{self.host}/{self.id}"


@dataclass(frozen=True, slots=True)
class ClusterHost:
    """A machine. ``pinned_bytes``: page-locked RAM of all its devices; None: up to
    ``ram_bytes``. ``labels``: pairs that its Ray node has; empty: the node has the host's name."""

    name: str
    ram_bytes: int
    pinned_bytes: int | None
    devices: tuple[ClusterDevice, ...]
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Link:
    """A network between any two of ``hosts``: rate in each direction, and latency in
    ``seconds``."""

    hosts: tuple[str, ...]
    bytes_per_second: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts and the links between them. ``address``: of a Ray cluster, ``auto``, or None."""

    hosts: tuple[ClusterHost, ...]
    links: tuple[Link, ...] = ()
    address: str | None = None

    @property
    def devices(self) -> tuple[ClusterDevice, ...]:
        return tuple(device for host in self.hosts for device in host.devices)

    @property
    def label(self) -> str:
        """The distinct hardware labels of its devices, as in the keys of cached outputs."""
        return ", ".join(sorted({device.hardware.label for device in self.devices}))

    def link(self, host: str, other: str) -> Link | None:
        """Return the link between two hosts, or None. From a host to itself, it takes no time."""
        if host == other:
            return Link((host, other), float("inf"), 0.0)
        return next(
            (link for link in self.links if host in link.hosts and other in link.hosts), None
        )


def read_cluster(path: Path, cache: Path | None = None) -> Cluster:
    """Return the cluster in the YAML file ``path``. ``cache``: a folder with measured profiles.
    Raises GraphError with one line per problem: ``file:line: entry: what is wrong``."""
    document = read_document(path)
    spec = spec_of(ClusterSpec, document)
    profile = functools.cache(lambda name: hardware_called(name, cache))  # many hosts name the same
    hosts = tuple(
        _host(name, host_spec, document, profile) for name, host_spec in spec.hosts.items()
    )
    links = tuple(
        Link(tuple(link.host_names), link.bytes_per_second, link.seconds) for link in spec.links
    )
    refuse_large(Cluster(hosts, links), str(path))
    _check_links(links, spec.hosts, document)
    document.raise_if_any()
    return Cluster(hosts, links, spec.address)


def refuse_large(cluster: Cluster, location: str) -> None:
    """Raise InputError if ``cluster``, from file ``location``, exceeds a limit."""
    for count, noun in ((len(cluster.hosts), "hosts"), (len(cluster.devices), "devices")):
        require("devices", count, f"it has {count:,} {noun}", location)
    names = sum(len(link.hosts) for link in cluster.links)
    require("entries", names, f"its links name {names:,} hosts", location)


def _host(
    name: str, spec: HostSpec, document: Document, profile: Callable[[str], Hardware]
) -> ClusterHost:
    """Return a host. ``profile`` returns the hardware that a name stands for."""
    location = ("hosts", name)
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", name):
        document.add(
            location,
            "is not a host's name: letters, digits, dots, dashes and underscores, at most 64, "
            "no dot or dash first",
        )
    devices = list[ClusterDevice]()
    for number, device_spec in enumerate(spec.devices):
        path = (*location, "devices", number)
        if device_spec.id in {device.id for device in devices}:
            document.add(
                (*path, "id"), f"another device of this host has the number {device_spec.id}"
            )
        try:
            hardware = profile(device_spec.hardware)
        except InputError as error:
            document.add((*path, "hardware"), str(error))
            continue
        kind = (device_spec.device or hardware.device).partition(":")[0]
        if not kind_called(kind).in_clusters or kind != hardware.device:
            document.add(
                (*path, "device"),
                f"{device_spec.device!r} is no {hardware.device} device, "
                f"which {device_spec.hardware} is",
            )
        shared = _shared(hardware, len(spec.devices), spec.pcie)
        devices.append(
            ClusterDevice(
                name,
                device_spec.id,
                shared,
                device_spec.vram,
                device_spec.device or f"{hardware.device}:{device_spec.id}",
            )
        )
    if len({device.torch for device in devices}) < len(devices):
        document.add((*location, "devices"), "two devices have the same `device`")
    labels = tuple(sorted(spec.labels.items()))
    return ClusterHost(name, spec.ram, spec.pinned, tuple(devices), labels)


def _shared(hardware: Hardware, count: int, pcie: float | None) -> Hardware:
    """Return ``hardware`` as one of ``count`` devices of a host.

    Each gets a fixed, equal share of the disk's rate and of the host's ``pcie``, so that the
    duration of a plan does not depend on the other devices.
    """
    share = (pcie or float("inf")) / count
    return replace(
        hardware,
        disk_bytes_per_second=hardware.disk_bytes_per_second / count,
        h2d_bytes_per_second=min(hardware.h2d_bytes_per_second, share),
        d2h_bytes_per_second=min(hardware.d2h_bytes_per_second, share),
        pageable_bytes_per_second=min(hardware.pageable_bytes_per_second, share),
    )


def _check_links(
    links: tuple[Link, ...], hosts: Mapping[str, HostSpec], document: Document
) -> None:
    linked = set[frozenset[str]]()
    for number, link in enumerate(links):
        for index, name in enumerate(link.hosts):
            if name not in hosts:
                document.add(
                    ("links", number, "between", index),
                    f"there is no host {name!r}{did_you_mean(name, hosts)}",
                )
        pairs = [frozenset(pair) for pair in combinations(link.hosts, 2)]
        if duplicates := [pair for pair in pairs if pair in linked or len(pair) == 1]:
            document.add(
                ("links", number, "between"),
                f"{' and '.join(sorted(duplicates[0]))} are linked twice",
            )
        linked |= set(pairs)
