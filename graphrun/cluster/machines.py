"""Hosts, their devices and the links between hosts, as ``cluster.yaml`` declares them.

graphrun: 1
hosts:
  a: {ram: 64G, pinned: 32G, devices: [{id: 0, hardware: rtx4090, vram: 22G}, {id: 1, hardware:
  rtx3060, vram: 11G}]} b: {ram: 32G, devices: [{id: 0, hardware: rtx4090, vram: 22G}]}
links: [{between: [a, b], bytes_per_second: 1.2e9, seconds: 1e-4}]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from graphrun.errors import InputError
from graphrun.graph.document import Document, read_document
from graphrun.graph.schema import Spec, Text
from graphrun.graph.shape import spec_of
from graphrun.graph.values import did_you_mean
from graphrun.limits import require
from graphrun.model.problem import Hardware
from graphrun.profile.hardware_profiles import hardware as hardware_called
from graphrun.units import parse_size

DEVICE_KINDS = ("cuda", "sim")


def _nbytes(given: Any) -> Any:
    """Bytes of a size, which is a text or an int; others are for pydantic to refuse."""
    try:
        return (
            parse_size(given)
            if isinstance(given, (str, int)) and not isinstance(given, bool)
            else given
        )
    except InputError as error:
        raise PydanticCustomError(
            "size", "{text}", {"text": str(error).removeprefix("size: ")}
        ) from None


def _number(given: Any) -> Any:
    """A number that YAML reads as text, such as 1.2e9, for which its version 1.1 demands a sign
    behind the e."""
    return (
        float(given)
        if isinstance(given, str)
        and re.fullmatch(r"[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]{1,3})?", given)
        else given
    )


Size = Annotated[int, BeforeValidator(_nbytes)]
Rate = Annotated[float, BeforeValidator(_number), Field(gt=0, lt=1e18)]


class DeviceSpec(Spec):
    """A device of a host."""

    id: Annotated[int, Field(ge=0)] = Field(description="Its number on the host.")
    hardware: Text = Field(description="A built-in device or a profile, as for --hardware.")
    vram: Size = Field(description="Its VRAM budget, such as 22G.")
    device: Text | None = Field(
        default=None, description="The torch device on its host; left out: cuda:ID, or sim:ID."
    )


class HostSpec(Spec):
    """A machine with its devices, and the memory that they share."""

    ram: Size = Field(description="RAM budget of all its devices together, such as 64G.")
    pinned: Size | None = Field(
        default=None, description="Part of the RAM that may be page-locked."
    )
    pcie: Rate | None = Field(
        default=None,
        description="Bytes per second between RAM and all devices together; left out: each has what its hardware has.",
    )
    devices: list[DeviceSpec] = Field(min_length=1, description="Its devices.")


class LinkSpec(Spec):
    """The network between hosts, of which any two reach each other at this rate."""

    between: list[Text] = Field(min_length=2, description="Names of hosts.")
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
class Device:
    """A device of a cluster. ``hardware``: with its share of what its host's devices share.
    ``torch``: such as ``cuda:1``."""

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
class Host:
    """A machine. ``pinned_bytes``: limit of page-locked RAM of all its devices; None: that of
    RAM."""

    name: str
    ram_bytes: int
    pinned_bytes: int | None
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """What any two of the hosts ``between`` have: ``bytes_per_second`` in each direction,
    ``seconds`` of latency."""

    between: tuple[str, ...]
    bytes_per_second: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts and the links between them. ``address``: of a Ray cluster, ``auto``, or None."""

    hosts: tuple[Host, ...]
    links: tuple[Link, ...] = ()
    address: str | None = None

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of all hosts, in order."""
        return tuple(device for host in self.hosts for device in host.devices)

    @property
    def label(self) -> str:
        """Kinds of its devices, as keys of cached outputs have them."""
        return ", ".join(sorted({of.hardware.label for of in self.devices}))

    def link(self, one: str, other: str) -> Link | None:
        """The link between two hosts; of a host with itself one that takes no time. None: they
        exchange nothing."""
        if one == other:
            return Link((one, other), float("inf"), 0.0)
        return next(
            (link for link in self.links if one in link.between and other in link.between), None
        )


def read_cluster(path: Path, cache: Path | None = None) -> Cluster:
    """The cluster in the YAML file ``path``. ``cache``: a folder with profiles of measured
    hardware.

    Raises GraphError with one line per problem: ``file:line: entry: what is wrong``.
    """
    document = read_document(path)
    spec = spec_of(ClusterSpec, document)
    hosts = tuple(_host(name, of, document, cache) for name, of in spec.hosts.items())
    links = tuple(Link(tuple(of.between), of.bytes_per_second, of.seconds) for of in spec.links)
    refuse_large(Cluster(hosts, links), str(path))
    _check_links(links, spec.hosts, document)
    document.raise_if_any()
    return Cluster(hosts, links, spec.address)


def refuse_large(cluster: Cluster, where: str) -> None:
    """Raises InputError if ``cluster``, from the file ``where``, is beyond the limit ``devices`` or
    ``entries``."""
    for count, what in ((len(cluster.hosts), "hosts"), (len(cluster.devices), "devices")):
        require("devices", count, f"it has {count:,} {what}", where)
    names = sum(len(link.between) for link in cluster.links)
    require("entries", names, f"its links name {names:,} hosts", where)


def _host(name: str, spec: HostSpec, document: Document, cache: Path | None) -> Host:
    where = ("hosts", name)
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", name):
        document.add(
            where,
            "is not a host's name: letters, digits, dots, dashes and underscores, at most 64, no dot or dash first",
        )
    devices = list[Device]()
    for number, of in enumerate(spec.devices):
        own = (*where, "devices", number)
        if of.id in {device.id for device in devices}:
            document.add((*own, "id"), f"another device of this host has the number {of.id}")
        try:
            hardware = hardware_called(of.hardware, cache)
        except InputError as error:
            document.add((*own, "hardware"), str(error))
            continue
        kind = (of.device or hardware.device).partition(":")[0]
        if kind not in DEVICE_KINDS or kind != hardware.device:
            document.add(
                (*own, "device"),
                f"{of.device!r} is no {hardware.device} device, which {of.hardware} is",
            )
        shared = _shared(hardware, len(spec.devices), spec.pcie)
        devices.append(
            Device(name, of.id, shared, of.vram, of.device or f"{hardware.device}:{of.id}")
        )
    if len({device.torch for device in devices}) < len(devices):
        document.add((*where, "devices"), "two devices have the same `device`")
    return Host(name, spec.ram, spec.pinned, tuple(devices))


def _shared(hardware: Hardware, count: int, pcie: float | None) -> Hardware:
    """``hardware`` as one of ``count`` devices: a fixed, equal share of the disk's rate and of the
    host's ``pcie``, so that what a plan takes does not depend on what the others do."""
    share, own = (pcie or float("inf")) / count, hardware
    return replace(
        own,
        disk_bytes_per_second=own.disk_bytes_per_second / count,
        h2d_bytes_per_second=min(own.h2d_bytes_per_second, share),
        d2h_bytes_per_second=min(own.d2h_bytes_per_second, share),
        pageable_bytes_per_second=min(own.pageable_bytes_per_second, share),
    )


def _check_links(
    links: tuple[Link, ...], hosts: Mapping[str, HostSpec], document: Document
) -> None:
    linked = set[frozenset[str]]()
    for number, link in enumerate(links):
        for index, name in enumerate(link.between):
            if name not in hosts:
                document.add(
                    ("links", number, "between", index),
                    f"there is no host {name!r}{did_you_mean(name, hosts)}",
                )
        pairs = [frozenset(pair) for pair in combinations(link.between, 2)]
        if twice := [pair for pair in pairs if pair in linked or len(pair) == 1]:
            document.add(
                ("links", number, "between"), f"{' and '.join(sorted(twice[0]))} are linked twice"
            )
        linked |= set(pairs)
