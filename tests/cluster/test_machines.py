"""A cluster file is read, or refused with the line, the entry, what is wrong and what was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphrun.cluster.machines import read_cluster
from graphrun.errors import GraphError
from graphrun.units import GIB

TEXT = """graphrun: 1
hosts:
  a: {ram: 64G, pinned: 32G, devices: [{id: 0, hardware: rtx4090, vram: 22G}, \
{id: 1, hardware: rtx3060, vram: 11G}]}
  b-1.lan: {ram: 32G, pcie: 1e10, devices: [{id: 0, hardware: rtx4090, vram: 22G, device: cuda:3}]}
links: [{between: [a, b-1.lan], bytes_per_second: 1.2e9, seconds: 1e-4}]
"""


def written(folder: Path, old: str = "", new: str = "") -> Path:
    assert old in TEXT
    path = folder / "cluster.yaml"
    path.write_text(TEXT.replace(old, new, 1) if old else TEXT)
    return path


def test_hosts_devices_and_links(tmp_path: Path) -> None:
    cluster = read_cluster(written(tmp_path))
    assert [(device.name, device.torch, device.vram_bytes) for device in cluster.devices] == [
        ("a/0", "cuda:0", 22 * GIB),
        ("a/1", "cuda:1", 11 * GIB),
        ("b-1.lan/0", "cuda:3", 22 * GIB),
    ]
    assert [(host.ram_bytes, host.pinned_bytes) for host in cluster.hosts] == [
        (64 * GIB, 32 * GIB),
        (32 * GIB, None),
    ]
    link = cluster.link("b-1.lan", "a")
    assert link is not None
    assert (link.bytes_per_second, link.seconds) == (1.2e9, 1e-4)


def test_what_devices_of_a_host_share_is_shared_equally(tmp_path: Path) -> None:
    of_a, _, of_b = (device.hardware for device in read_cluster(written(tmp_path)).devices)
    assert of_a.disk_bytes_per_second == of_b.disk_bytes_per_second / 2
    assert (of_a.h2d_bytes_per_second, of_b.h2d_bytes_per_second) == (25e9, 1e10)


REFUSED = {
    "unknown key": ("pinned", "lock", "3: hosts.a: unknown key 'lock'"),
    "size": (
        "64G",
        "64X",
        "3: hosts.a.ram: '64X' is not a size; write it as 8G, 7.5GiB, 900M or a number of bytes",
    ),
    "size without unit": (
        "11G",
        "11",
        "3: hosts.a.devices.1.vram: 11 has no unit: did you mean 11G?",
    ),
    "kind": ("64G", "[1]", "3: hosts.a.ram: expected an int, got a list"),
    "hardware": (
        "rtx3060",
        "rtx306",
        "3: hosts.a.devices.1.hardware: hardware 'rtx306' is not known; did you mean 'rtx3060'?",
    ),
    "number twice": (
        "id: 1",
        "id: 0",
        "3: hosts.a.devices.1.id: another device of this host has the number 0",
    ),
    "device": (
        "cuda:3",
        "sim:3",
        "4: hosts.b-1.lan.devices.0.device: 'sim:3' is no cuda device, which rtx4090 is",
    ),
    "name of a host": ("  a:", "  a b:", "3: hosts.a b: is not a host's name"),
    "no devices": (
        "[{id: 0, hardware: rtx4090, vram: 22G, device: cuda:3}]",
        "[]",
        "4: hosts.b-1.lan.devices: must not be empty",
    ),
    "host of a link": (
        "[a, b-1",
        "[a, b-2",
        "5: links.0.between.1: there is no host 'b-2.lan'; did you mean 'b-1.lan'?",
    ),
    "rate": ("1.2e9", "fast", "5: links.0.bytes_per_second: expected a number, got 'fast'"),
    "linked twice": ("[a, b-1.lan]", "[a, a]", "5: links.0.between: a are linked twice"),
    "version": (
        "graphrun: 1",
        "graphrun: 2",
        "1: graphrun: this graphrun reads files of version 1, not 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_line_entry_and_cause(name: str, tmp_path: Path) -> None:
    old, new, expected = REFUSED[name]
    path = written(tmp_path, old, new)
    with pytest.raises(GraphError) as error:
        read_cluster(path)
    assert any(line.startswith(f"{path}:{expected}") for line in str(error.value).splitlines()), (
        error.value
    )
