"""A Ray cluster that exists: nodes by their labels, GPUs that Ray assigns, reserved RAM, tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from placing import cluster_of

from graphrun.cluster.actors import CPUS, bundle_of, node_addresses, visible_devices
from graphrun.cluster.machines import ClusterHost, read_cluster
from graphrun.errors import InputError
from graphrun.profile.hardware_profiles import hardware

TOKEN = "0123456789abcdef" * 2


def host(name: str, **labels: str) -> ClusterHost:
    return ClusterHost(name, 1 << 30, None, (), tuple(sorted(labels.items())))


def node(address: str, name: str = "", **labels: str) -> dict[str, Any]:
    return {
        "NodeManagerHostname": f"pod-{address}",
        "NodeManagerAddress": address,
        "NodeName": name or address,
        "Labels": {"ray.io/node-id": address, **labels},
    }


def test_hosts_are_nodes_by_name_or_by_labels_each_its_own() -> None:
    nodes = [node("1", pool="big"), node("2", pool="big", zone="a"), node("3", name="head")]
    hosts = [host("x", pool="big"), host("y", pool="big", zone="a"), host("head")]
    assert node_addresses(hosts, nodes) == {"x": "1", "y": "2", "head": "3"}
    with pytest.raises(InputError, match="no free node with the labels pool=big of host z") as info:
        node_addresses([*hosts, host("z", pool="big")], nodes)
    assert "ray start --labels pool=big" in str(info.value)
    with pytest.raises(InputError, match="no node called other, but .*head"):
        node_addresses([host("other")], nodes)


def test_labels_are_read_from_the_file(tmp_path: Path) -> None:
    (path := tmp_path / "cluster.yaml").write_text(
        "graphrun: 1\naddress: auto\nhosts:\n  a: {ram: 8G, labels: {pool: big, zone: a}, "
        "devices: [{id: 0, hardware: sim, vram: 6M}]}\n"
    )
    (a,) = read_cluster(path).hosts
    assert a.labels == (("pool", "big"), ("zone", "a"))


@pytest.mark.parametrize(
    ("address", "names", "expected"),
    [
        (None, ("rtx4090", "rtx4090"), {"CUDA_VISIBLE_DEVICES": "1"}),
        ("auto", ("rtx4090", "rtx4090"), {}),
        ("auto", ("rtx4090", "rtx3060"), {"CUDA_VISIBLE_DEVICES": "1"}),
    ],
)
def test_on_a_running_cluster_ray_assigns_equal_gpus(
    address: str | None, names: tuple[str, str], expected: dict[str, str]
) -> None:
    plain = cluster_of(3, address=address)
    first, last = plain.hosts
    devices = tuple(
        replace(device, hardware=hardware(name, None), torch=f"cuda:{number}")
        for number, (device, name) in enumerate(zip(first.devices, names, strict=True))
    )
    cluster = replace(plain, hosts=(replace(first, devices=devices), last))
    environment = visible_devices(devices[1:], cluster)
    assert {name: environment[name] for name in expected} == expected
    assert bool(environment) == bool(expected)
    assert visible_devices(last.devices, cluster) == {}, "simulated devices have no variable"

    assignment: Any = SimpleNamespace(devices=devices, column=SimpleNamespace(ram_bytes=5 << 30))
    bundle = bundle_of(assignment, {"a": "10.0.0.1"}, cluster)
    assert bundle["GPU"] == 2
    assert bundle.get("memory") == (5 << 30 if address else None), "other jobs leave it free"
    assert bundle["CPU"] == (2 if address else CPUS), "a core for the code that feeds each GPU"
    assert "node:10.0.0.1" in bundle


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    """A Ray cluster that asks for a token, with a labelled node: its address, and the environment
    that has the token."""
    ray = Path(sys.executable).with_name("ray")
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(tmp_path_factory.mktemp("ray", numbered=False)),
    }
    options = ("--port", "6388", "--num-cpus", "1", "--include-dashboard", "false")
    command = [str(ray), "start", "--head", *options, "--labels", "pool=big"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    yield "127.0.0.1:6388", environment
    subprocess.run([str(ray), "stop", "--force"], env=environment, capture_output=True, check=False)


@pytest.mark.sweep("cluster")
def test_a_token_opens_the_cluster_and_without_it_the_error_says_what_to_set(
    head: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    address, environment = head
    (tmp_path / "cluster.yaml").write_text(
        f"graphrun: 1\naddress: {address}\nhosts:\n  a: {{ram: 1G, labels: {{pool: big}}, "
        "devices: [{id: 0, hardware: sim, vram: 6M}]}\n"
    )
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a boat"}) + "\n")
    settings = ("--set", "steps=1", "--set", "height=32", "--set", "width=32")
    command = [
        str(Path(sys.executable).with_name("graphrun")),
        *("run", "flux-tiny", "--cluster", "cluster.yaml", "--inputs", "prompts.jsonl"),
        *(*settings, "-o", "out"),
    ]
    process = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert len(list(tmp_path.glob("out/*.png"))) == 1
    open_environment = {
        name: value for name, value in environment.items() if not name.startswith("RAY_AUTH")
    }
    for variables, text in (
        (open_environment, "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE"),
        ({**environment, "RAY_AUTH_TOKEN": TOKEN[::-1]}, "is the token of RAY_AUTH_TOKEN"),
    ):
        refusal = subprocess.run(
            [*command, "--overwrite"],
            env=variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert refusal.returncode == 2
        assert text in " ".join(refusal.stderr.split())
        assert "Traceback" not in refusal.stderr
