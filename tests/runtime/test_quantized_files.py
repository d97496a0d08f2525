"""Weights that graphrun quantizes: on the device, once, in a file that later runs read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import graphrun
from graphrun.graph.graph import Graph
from graphrun.graph.parts import Adapter
from graphrun.model.problem import Problem, ProblemLimits
from graphrun.modules.quantize import quantized, quantized_in_parts
from graphrun.modules.sources import RandomSource, Writer
from graphrun.profile.hardware import hardware, simulated
from graphrun.profile.processor import cpu_estimate
from graphrun.profile.quantizing import quantizing_costs
from graphrun.runtime.devices.cpu import CpuDevice
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.runtime.spool import Spool, has_file, quantizing_on, weights_key
from graphrun.sim import Machine
from graphrun.sim.active import active_machine
from graphrun.store import problem_for
from graphrun.units import GIB, MIB

pytest.importorskip("bitsandbytes")
ROOT = Path(__file__).parents[2]


def quantized_graph(precision: str) -> Graph:
    """The trained FLUX whose transformer is only in ``precision``."""
    graph = graphrun.load(ROOT / "graphs" / "shapes.yaml")
    component = replace(graph.components["transformer"], precision=(precision,))
    return replace(graph, components={**graph.components, "transformer": component})


def run(graph: Graph, cache: Path | None) -> tuple[Any, Any, list[str]]:
    budgets: Any = {"vram": "16M", "ram": "64M", "hardware": "sim"}
    inputs = {"steps": 2}
    problem = graphrun.estimate(graph, inputs=inputs, cache=cache, **budgets)
    lines: list[str] = []
    trace = graphrun.run(
        graphrun.plan(problem), graph, inputs, cache=cache, reuse="none", tell=lines.append
    )
    return np.asarray(trace.outputs["image"]), trace, lines


def files_in(cache: Path) -> list[Path]:
    return sorted((cache / "quantized").glob("*.safetensors"))


@pytest.mark.long
@pytest.mark.parametrize("precision", ["nf4", "int8", "fp8"])
def test_the_first_run_keeps_quantized_weights_that_later_runs_read(
    precision: str, tmp_path: Path
) -> None:
    graph = quantized_graph(precision)
    picture, plain_trace, lines = run(graph, None)
    assert not lines
    first_picture, first, lines = run(graph, tmp_path)
    assert [line for line in lines if f"transformer in {precision}" in line], lines
    (file,) = files_in(tmp_path)
    stamp = file.stat().st_mtime_ns
    second_picture, second, lines = run(graph, tmp_path)
    assert not lines
    assert file.stat().st_mtime_ns == stamp
    assert np.array_equal(picture, first_picture)
    assert np.array_equal(picture, second_picture)
    # the transformer is read in its precision, not in 16 bits
    saved_bytes = plain_trace.disk_bytes_read - second.disk_bytes_read
    parameters = _problem(graph).component("transformer").parameters
    assert saved_bytes > {"nf4": 1.3, "int8": 0.9, "fp8": 0.9}[precision] * parameters
    assert second.disk_bytes_read == first.disk_bytes_read


def _problem(graph: Graph) -> Problem:
    return graphrun.estimate(graph, vram="16M", ram="64M", hardware="sim")


@pytest.mark.long
def test_a_kept_file_has_a_digest_and_is_made_again_if_it_is_damaged(tmp_path: Path) -> None:
    graph = quantized_graph("nf4")
    picture, *_ = run(graph, tmp_path)
    (file,) = files_in(tmp_path)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header["__metadata__"]["sha256"] == hashlib.sha256(data[8 + length :]).hexdigest()
    assert Spool(keep=tmp_path / "quantized").damaged() == []
    broken_data = bytearray(data)
    broken_data[-1] ^= 1
    file.write_bytes(broken_data)
    assert Spool(keep=tmp_path / "quantized").damaged() == [file]
    file.write_bytes(data[:-1000])
    third_picture, _, lines = run(graph, tmp_path)
    assert lines
    assert np.array_equal(picture, third_picture)
    assert file.read_bytes() == data


def test_the_key_has_everything_that_the_weights_are_made_of(tmp_path: Path) -> None:
    component = quantized_graph("nf4").components["transformer"]
    lora = tmp_path / "lora.safetensors"
    lora.write_bytes(b"x")
    keys = [
        weights_key(component, "nf4", simulated()),
        weights_key(component, "nf4", hardware("rtx4090")),
        weights_key(component, "int8", simulated()),
        weights_key(component.in_dtype("float16"), "nf4", simulated()),
        weights_key(replace(component, loras=(Adapter(str(lora)),)), "nf4", simulated()),
        weights_key(replace(component, loras=(Adapter(str(lora), 0.5),)), "nf4", simulated()),
    ]
    assert len(set(keys)) == len(keys)
    for source in (None, "owner/not-here"):
        assert weights_key(replace(component, source=source), "nf4", simulated()) == ""
    assert weights_key(replace(component, compile="blocks"), "nf4", simulated()) == keys[0]
    missing_lora = replace(component, loras=(Adapter(str(tmp_path / "missing")),))
    assert weights_key(missing_lora, "nf4", simulated()) == ""
    with_lora = replace(component, loras=(Adapter(str(lora)),))
    os.utime(lora, ns=(1, 1))
    assert weights_key(with_lora, "nf4", simulated()) not in keys


def test_the_time_of_a_file_counts_unless_the_hub_names_it_by_its_content(tmp_path: Path) -> None:
    file = tmp_path / "weights" / "model.safetensors"
    component = replace(quantized_graph("nf4").components["transformer"], source=str(file.parent))
    (tmp_path / "blobs").mkdir()
    file.parent.mkdir()
    keys = list[set[str]]()
    for blob in ("0123456789abcdef" * 4, "fedcba9876543210" * 4, None):
        file.unlink(missing_ok=True)
        if blob is not None:
            file.symlink_to(tmp_path / "blobs" / blob)
        file.write_bytes(b"x")
        keys.append(set())
        for seconds in (1, 2):
            os.utime(file, (seconds, seconds))
            keys[-1].add(weights_key(component, "nf4", simulated()))
    assert [len(keys_of_file) for keys_of_file in keys] == [1, 1, 2]
    assert len(keys[0] | keys[1] | keys[2]) == 4, "a key for each content"
    assert "" not in keys[0] | keys[1] | keys[2]


def test_a_file_of_quantized_weights_is_found_by_its_key(tmp_path: Path) -> None:
    component = quantized_graph("nf4").components["transformer"]
    assert not has_file(tmp_path, component, "nf4", simulated())
    (tmp_path / "quantized").mkdir()
    for key in ("", weights_key(component, "nf4", simulated())):
        (tmp_path / "quantized" / f"{key}.safetensors").write_bytes(b"")
    assert has_file(tmp_path, component, "nf4", simulated())
    assert not has_file(tmp_path, component, "int8", simulated())
    assert not has_file(tmp_path, replace(component, source=None), "nf4", simulated())


def test_parts_of_a_weight_are_quantized_to_the_bits_of_the_whole() -> None:
    for shape in ((96, 128), (7, 33), (200, 80), (1, 64), (3, 4096)):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        for precision in ("nf4", "int8"):
            whole = quantized(weight, precision)
            for elements in (64, 1000, 10**6):
                parts = quantized_in_parts(weight, precision, torch.device("cpu"), elements)
                assert parts.keys() == whole.keys()
                for name, tensor in whole.items():
                    assert torch.equal(parts[name], tensor), (shape, precision, elements, name)


@pytest.mark.parametrize("has_room", [True, False])
def test_a_weight_is_quantized_on_the_device_within_its_budget_or_on_the_host(
    has_room: bool,
) -> None:
    weight = torch.randn(72, 128).bfloat16()
    writer = Writer(RandomSource(torch.nn.Linear(128, 72), "seed"))
    budget_bytes = 16 * weight[:8].numel() + 1000  # for eight rows, and not for nine
    device = SimulatedDevice(Machine(capacity_bytes=None if has_room else 100))
    with quantizing_on(device, writer, budget_bytes):
        fields = writer.quantize(weight, "int8")
    assert device.machine.copies_in == (9 if has_room else 0)
    assert (device.machine.peak_bytes > 0) == has_room
    assert device.machine.peak_bytes <= budget_bytes
    assert device.allocated_bytes == 0
    for name, tensor in quantized(weight, "int8").items():
        assert torch.equal(fields[name], tensor)
    assert writer.quantize is quantized, "the device is for this time only"


def test_weights_are_quantized_on_the_host_where_the_device_has_its_memory() -> None:
    writer = Writer(RandomSource(torch.nn.Linear(2, 2), "seed"))
    with quantizing_on(CpuDevice(cpu_estimate()), writer, GIB):
        assert writer.quantize is quantized


def test_a_writer_that_does_not_quantize_is_left_alone() -> None:
    writer = object()
    with quantizing_on(SimulatedDevice(Machine()), writer, GIB):
        assert not hasattr(writer, "quantize")


@pytest.mark.long
@pytest.mark.parametrize("refuses", [False, True])
def test_weights_are_quantized_on_the_device_in_parts_that_fit_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    """If the device refuses, on the host, with the same bits."""
    places, peaks, real = [], [], quantized_in_parts

    def in_parts(weight: torch.Tensor, precision: str, device: torch.device, elements: int) -> Any:
        places.append(device.type)
        assert 0 < active_machine().capacity_bytes <= 16 * MIB
        if refuses:
            raise torch.OutOfMemoryError("no room")
        fields = real(weight, precision, device, elements)
        assert {tensor.device.type for tensor in fields.values()} == {"cpu"}
        peaks.append(elements)
        return fields

    monkeypatch.setattr("graphrun.runtime.spool.quantized_in_parts", in_parts)
    picture, *_ = run(quantized_graph("int8"), tmp_path)
    assert set(places) == {"sim"}
    assert bool(peaks) is not refuses
    assert np.array_equal(picture, run(quantized_graph("int8"), None)[0])


def variants_in(problem: Problem, precision: str) -> Sequence[Any]:
    return [v for v in problem.component("transformer").variants if v.precision == precision]


def test_kept_weights_are_read_from_disk_in_their_precision_and_cost_no_quantizing() -> None:
    graph = graphrun.load("flux-dev", source="owner/fine-tuned")
    inputs = graph.for_planning({})
    card = hardware("rtx4060laptop")
    limits = ProblemLimits(8 * GIB, 16 * GIB)
    plain = problem_for(graph, inputs, card, limits, None)
    keeping = problem_for(graph, inputs, card, replace(limits, keeps_quantized=True), None)
    assert {v.backing_store for v in variants_in(plain, "nf4")} == {"pinned"}
    assert {v.backing_store for v in variants_in(keeping, "nf4")} == {"pinned", "disk"}
    (quantized_variant,) = variants_in(plain, "nf4")
    file_variant = next(v for v in variants_in(keeping, "nf4") if v.backing_store == "pinned")
    assert (quantized_variant.stored_bytes, file_variant.transient_bytes) == (0, 0)
    assert file_variant.stored_bytes == file_variant.host_bytes
    assert sum(file_variant.read_seconds) < 0.1 * sum(quantized_variant.read_seconds)
    assert variants_in(keeping, "bfloat16") == variants_in(plain, "bfloat16")
    solution = graphrun.plan(replace(keeping, allow=("nf4",)))
    components = solution.chosen.components
    encoder_cost, cost = quantizing_costs(components, card)
    assert quantizing_costs(components, card, ["transformer"]) == (encoder_cost,)
    assert (cost.component, cost.precision) == ("transformer", "nf4")
    assert cost.read_bytes == 2 * keeping.component("transformer").parameters
    assert 6e9 < cost.written_bytes < 7e9
    reads = cost.read_bytes / card.disk_bytes_per_second
    assert reads < cost.seconds < 2.5 * reads, "one core took 390 s"
    assert solution.simulation.seconds < 1.2 * solution.simulation.compute_seconds
