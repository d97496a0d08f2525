"""The manifest for KubeRay runs what this version has, on nodes that the cluster file names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from graphrun.cluster.actors import node_addresses
from graphrun.cluster.machines import read_cluster

ROOT = Path(__file__).parents[2]
JOB: Any = yaml.safe_load((ROOT / "packaging" / "kuberay.yaml").read_text())
RAY = JOB["spec"]["rayClusterSpec"]


def test_the_command_has_options_of_run() -> None:
    program, command, *words = shlex.split(JOB["spec"]["entrypoint"])
    assert (program, command) == ("graphrun", "run")
    section = (ROOT / "docs" / "cli.md").read_text().partition("## graphrun run\n")[2]
    section = section.partition("\n## ")[0]
    for option in [word for word in words if word.startswith("-")]:
        assert f"`{option}" in section or f" {option}" in section, option


def test_the_pods_are_the_hosts_of_the_cluster_file(tmp_path: Path) -> None:
    """A pod has a random name, and the labels of its group."""
    (group,) = RAY["workerGroupSpecs"]
    labels = ", ".join(f"{name}: {value}" for name, value in group["labels"].items())
    assert f"labels: {{{labels}}}" in (ROOT / "docs" / "howto" / "cluster.md").read_text()
    devices = "[{id: 0, hardware: rtx4090, vram: 22G}, {id: 1, hardware: rtx4090, vram: 22G}]"
    host = f"{{ram: 48G, labels: {{{labels}}}, devices: {devices}}}"
    (tmp_path / "cluster.yaml").write_text(
        f"graphrun: 1\naddress: auto\nhosts: {{a: {host}, b: {host}}}\n"
        "links: [{between: [a, b], bytes_per_second: 1.2e9, seconds: 1e-4}]\n"
    )
    cluster = read_cluster(tmp_path / "cluster.yaml", None)
    nodes = [
        {
            "NodeManagerHostname": f"pod-{number}",
            "NodeManagerAddress": f"10.0.0.{number}",
            "NodeName": f"10.0.0.{number}",
            "Labels": group["labels"],
        }
        for number in range(group["replicas"])
    ]
    addresses = node_addresses(cluster.hosts, nodes)
    assert sorted(addresses.values()) == ["10.0.0.0", "10.0.0.1"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) == len(cluster.hosts[0].devices)


def test_all_pods_have_the_same_image_version_of_ray_and_volume() -> None:
    pods = [group["template"]["spec"] for group in (RAY["headGroupSpec"], *RAY["workerGroupSpecs"])]
    containers = [pod["containers"][0] for pod in pods]
    assert len({container["image"] for container in containers}) == 1
    assert all(container["env"] == containers[0]["env"] for container in containers)
    assert all(pod["volumes"] == pods[0]["volumes"] for pod in pods)
    (version,) = re.findall(r"^ray==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert RAY["rayVersion"] == version
