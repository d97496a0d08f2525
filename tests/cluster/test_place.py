"""`graphrun plan --cluster`: a placement of the small FLUX, its file, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from graphrun import store
from graphrun.cluster import files
from graphrun.cluster.columns import DeviceClass, Pricing, kinds_of
from graphrun.cluster.machines import read_cluster
from graphrun.cluster.place import place
from graphrun.cluster.placement import Column, parse_placement
from graphrun.errors import PlanError
from graphrun.graph.loading import load
from graphrun.profile.hardware_profiles import hardware
from graphrun.report.plan_files import VERSION

Cli = Callable[..., tuple[int, str, str]]
SMALL = (
    "--set",
    "height=32",
    "--set",
    "width=32",
    "--set",
    "steps=3",
    "--set",
    "max_sequence_length=16",
)
TEXT = """graphrun: 1
hosts: {a: {ram: 8G, devices: [{id: 0, hardware: sim, vram: 4M}, {id: 1, hardware: sim, vram: 4M}]}}
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(TEXT)
    return path


@pytest.mark.sweep("cluster")
def test_a_placement_is_shown_saved_read_and_checked(
    graphrun: Cli, cluster: Path, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    command = ("plan", "flux-tiny", "--cluster", str(cluster), *SMALL, "--items", "24")
    code, text, err = graphrun(*command, "--json", "-o", str(path))
    assert code == 0, err
    output = json.loads(text)
    assert output["items_per_second"] >= output["replicas"]["items_per_second"] > 0
    assert output["gains"][0]["items_per_second"] > output["items_per_second"]

    placement, data = files.read(path)
    assert (placement.items_per_second, placement.seconds) == (
        output["items_per_second"],
        output["seconds"],
    )
    assert str(placement).splitlines() == data["actions"]
    screen = graphrun(*command)[1]
    assert "bottleneck:" in screen
    assert all(assignment.name in screen for assignment in placement.assignments)
    assert graphrun("check", str(path))[1].startswith("ok: ")

    data["cluster"]["hosts"][0]["ram_bytes"] = 2**20
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match="host a: [0-9]+ bytes of RAM of 1048576"):
        files.read(path)
    path.write_text(json.dumps({**data, "actions": data["actions"][:1]}))
    with pytest.raises(PlanError, match="no chain of devices runs every stage"):
        files.read(path)
    path.write_text(
        json.dumps(
            {
                **data,
                "actions": [line.replace("device a/", "device b/") for line in data["actions"]],
            }
        )
    )
    with pytest.raises(PlanError, match="there is no device b/"):
        files.read(path)


@pytest.mark.sweep("cluster")
def test_two_devices_of_a_host_hold_what_one_would_stream(
    graphrun: Cli, cluster: Path, tmp_path: Path
) -> None:
    """One item takes less time on both together; two items at a time are still done sooner one on
    each."""
    cluster.write_text(TEXT.replace("4M", "2M"))
    command, path = (
        ("plan", "flux-tiny", "--cluster", str(cluster), *SMALL, "--items", "24"),
        tmp_path / "plan.json",
    )
    code, screen, err = graphrun(*command, "--objective", "latency", "-o", str(path))
    assert code == 0, err
    assert "a/0+a/1 2 x sim 2 x 2.00 MiB" in " ".join(screen.split())
    (assignment,) = files.read(path)[0].assignments
    assert assignment.plan.splits
    assert graphrun("check", str(path))[1].startswith("ok: 2 devices")
    latency_data, throughput_data = (
        json.loads(graphrun(*command, "--json", "--objective", objective)[1])
        for objective in ("latency", "throughput")
    )
    assert [len(device["secondaries"]) for device in latency_data["devices"]] == [1]
    assert latency_data["latency_seconds"] < 0.9 * latency_data["replicas"]["latency_seconds"]
    assert [device["secondaries"] for device in throughput_data["devices"]] == [[], []]


@pytest.mark.sweep("cluster")
def test_two_devices_of_a_host_make_both_calls_of_guidance_at_once(
    graphrun: Cli, cluster: Path, tmp_path: Path
) -> None:
    """An item alone takes less time with a copy of the denoiser on the second device; many items
    are done sooner one on each."""
    cluster.write_text(TEXT.replace("4M", "64M"))
    command, path = ("plan", "wan-tiny", "--cluster", str(cluster)), tmp_path / "plan.json"
    code, _, err = graphrun(*command, "--objective", "latency", "-o", str(path))
    assert code == 0, err
    (assignment,) = files.read(path)[0].assignments
    assert assignment.plan.copies == (("transformer", 1),)
    assert graphrun("check", str(path))[1].startswith("ok: 2 devices")
    latency_data, throughput_data = (
        json.loads(graphrun(*command, "--json", "--objective", objective)[1])
        for objective in ("latency", "throughput")
    )
    assert [len(device["secondaries"]) for device in latency_data["devices"]] == [1]
    assert latency_data["latency_seconds"] < 0.7 * latency_data["replicas"]["latency_seconds"]
    assert [device["secondaries"] for device in throughput_data["devices"]] == [[], []]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "",
            "placement:1: expected 'place throughput|latency items COUNT' as the first line, "
            "found no text",
        ),
        (
            "place fast items 3",
            "placement:1: expected 'place throughput|latency items COUNT', "
            "found 'place fast items 3'",
        ),
        (
            "place latency items 1\nplan x",
            "placement:2: expected 'device HOST/ID stages STAGE ...', found 'plan x'",
        ),
        (
            "place latency items 1\ndevice a/0 stages s\nslot",
            "section of a/0, placement:2:1: expected 'plan DIGEST'",
        ),
    ],
)
def test_a_text_that_is_no_placement_is_refused_with_its_line(text: str, expected: str) -> None:
    with pytest.raises(PlanError) as error:
        parse_placement(text)
    assert str(error.value).startswith(expected)


@pytest.mark.parametrize("command", ["run", "explain", "diff", "report"])
def test_a_command_for_one_machine_refuses_the_plan_of_a_cluster(
    graphrun: Cli, tmp_path: Path, command: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"graphrun": VERSION, "cluster": {}, "actions": []}))
    code, _, err = graphrun(command, str(path), *([str(path)] if command == "diff" else []))
    assert code == 2
    assert "plan.json: is a plan for a cluster: graphrun check reads it" in err


def test_options_that_the_file_takes_the_place_of_are_refused(graphrun: Cli, cluster: Path) -> None:
    code, _, err = graphrun(
        "plan", "flux-tiny", "--cluster", str(cluster), "--vram", "4M", "--runs", "3"
    )
    assert code == 2
    assert "leave out --vram, --runs" in err
    code, _, err = graphrun("plan", "flux-tiny", "--cluster", str(cluster), "--fail-over", "3s")
    assert code == 2
    assert "leave them out with --cluster" in err
    code, _, err = graphrun("plan", "flux-tiny", "--vram", "4M", "--items", "3")
    assert code == 2
    assert "add --cluster FILE" in err


def test_smaller_shares_of_memory_are_not_priced_for_a_spare_device() -> None:
    asked_shares = list[float]()

    def price(_: DeviceClass, stages: tuple[str, ...], share: float) -> Column:
        asked_shares.append(share)
        return Column(stages, 2.0, 0.0, 1.0 / share, int(share * 800), 0)

    kind = DeviceClass(hardware("sim", None), 4 << 20, 800, None)
    pricing = Pricing(("encode",), price, lambda *_: 0.5)
    pricing.refine(kind, pricing.options(kind)[0])
    assert [option.column is None for option in pricing.options(kind)] == [False, True]
    pricing.price_no_smaller_shares()
    assert [option.share for option in pricing.options(kind)] == [1.0]
    assert asked_shares == [1.0]


def test_device_classes_share_a_dry_run_without_a_cache(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.write_text(TEXT.replace("4M", "6M", 1))
    probed_names, probe = list[str](), store._probe
    monkeypatch.setattr(
        store,
        "_probe",
        lambda graph, *rest: (probed_names.append(graph.name), probe(graph, *rest))[1],
    )
    graph = load("flux-tiny")
    machines = read_cluster(cluster, None)
    assert len(set(kinds_of(machines).values())) > 1
    place(graph, machines, gains=False, inputs={"steps": 2, "height": 32, "width": 32})
    assert len(probed_names) == 1
