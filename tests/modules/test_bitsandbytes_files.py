"""Checkpoints that bitsandbytes quantized and diffusers or transformers saved: read as they are,
and computed bit for bit as these libraries compute them, resident and streamed.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import functional
from campaign import sampled
from quantized_folders import loaded, quantization
from safetensors.torch import load_file, save_file
from streamed_pictures import problems_with_the_same_picture
from torch import nn

import graphrun
from graphrun.errors import GraphError
from graphrun.graph.graph import Graph
from graphrun.graph.parts import Checkpoint, Component
from graphrun.modules.build import build, draft

GRAPHS = Path(__file__).parents[2] / "graphs"
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def flux() -> Graph:
    return graphrun.load(GRAPHS / "flux-tiny.yaml")


@pytest.fixture(scope="module")
def plain_folder(flux: Graph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    build(flux.component("transformer"), flux).save_pretrained(folder)  # type: ignore[operator]
    return folder


KINDS = ["nf4", "nested", "int8"]


@pytest.fixture(scope="module", params=KINDS)
def folder(
    request: pytest.FixtureRequest, plain_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder that diffusers wrote."""
    target = tmp_path_factory.mktemp(request.param)
    module = loaded(
        plain_folder, quantization_config=quantization(request.param), device_map={"": "cpu"}
    )
    module.save_pretrained(target)
    return target


def precision_of(folder: Path) -> str:
    return "int8" if folder.name.startswith("int8") else "nf4"


def component_with(flux: Graph, folder: Path) -> Component:
    precision = precision_of(folder)
    checkpoint = Checkpoint(precision, str(folder))
    component = flux.component("transformer")
    return replace(component, precision=("bfloat16", precision), checkpoints=(checkpoint,))


def arguments_for(config: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    return {
        "hidden_states": random(1, 16, config.in_channels),
        "encoder_hidden_states": random(1, 8, config.joint_attention_dim),
        "pooled_projections": random(1, config.pooled_projection_dim),
        "timestep": torch.tensor([0.5], dtype=torch.bfloat16),
        "guidance": torch.tensor([3.5], dtype=torch.bfloat16),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
        "return_dict": False,
    }


def with_weights(component: Component, graph: Graph, precision: str) -> nn.Module:
    from graphrun.modules.blocks import lay_out

    module, writer = draft(component, graph, precision)
    (layout,) = lay_out(module, ()).values()
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    writer.write(layout, buffer)
    for entry in layout.entries:
        view = buffer[entry.offset : entry.offset + entry.nbytes]
        tensor = view.view(entry.tensor.dtype).view(entry.tensor.shape)
        for location in entry.locations:
            value = tensor
            if location.kind == "_parameters":
                value = nn.Parameter(tensor, requires_grad=False)
                for name in ("quant_state", "bnb_quantized", "CB", "SCB"):
                    if hasattr(entry.tensor, name):
                        setattr(value, name, getattr(entry.tensor, name))
            location.assign(value)
    return module


@pytest.mark.sweep("more", sample=1)
def test_outputs_are_those_of_diffusers_loading_the_same_folder(flux: Graph, folder: Path) -> None:
    reference = loaded(folder, device_map={"": "cpu"})
    for child in reference.modules():  # as graphrun's own layers: no repacking for this CPU
        if hasattr(child, "support_avx512bf16_for_cpu"):
            child.support_avx512bf16_for_cpu = False
    component, precision = component_with(flux, folder), precision_of(folder)
    module = with_weights(component, flux, precision)
    arguments = arguments_for(reference.config)
    with torch.no_grad():
        output, expected = module(**arguments)[0], reference(**arguments)[0]
    assert expected.isfinite().all()
    assert torch.equal(output, expected)


@pytest.mark.sweep("more", sample=2)
def test_nothing_is_quantized_and_the_plan_reads_the_bytes_of_the_files(
    flux: Graph, folder: Path
) -> None:
    component, precision = component_with(flux, folder), precision_of(folder)
    graph = replace(flux, components={**flux.components, "transformer": component})
    _, writer = draft(component, graph, precision)
    assert writer.reads_as_stored
    problem = graphrun.estimate(
        graph, vram="64M", ram="1G", hardware="rtx4060", inputs={"steps": 1}, allow=[precision]
    )
    variants = [v for v in problem.component("transformer").variants if v.precision == precision]
    rate = problem.hardware.disk_bytes_per_second
    assert [v.backing_store for v in variants] == ["pinned", "disk"]
    for variant in variants:
        assert variant.transient_bytes == 0
        assert not variant.read_bytes
        seconds = variant.disk_seconds if variant.backing_store == "disk" else variant.read_seconds
        assert seconds == tuple(nbytes / rate for nbytes in variant.block_bytes)


@pytest.mark.parametrize("folder", sampled(KINDS, ["nested"], "precisions"), indirect=True)
def test_streamed_and_resident_with_the_same_picture(flux: Graph, folder: Path) -> None:
    component, precision = component_with(flux, folder), precision_of(folder)
    graph = replace(
        flux,
        components={**flux.components, "transformer": replace(component, precision=(precision,))},
    )
    problems_with_the_same_picture(graph)


def test_the_weights_are_dequantized_for_another_precision(flux: Graph, folder: Path) -> None:
    component = replace(flux.component("transformer"), source=str(folder))
    module = build(component, flux)
    reference = dict(loaded(folder, device_map={"": "cpu"}).named_parameters())
    quantized_count = 0
    for name, parameter in module.named_parameters():
        expected: Any = reference[name]
        if hasattr(expected, "quant_state"):
            expected = functional.dequantize_4bit(expected.data, expected.quant_state)
        elif hasattr(expected, "SCB"):
            expected = functional.int8_vectorwise_dequant(expected.data, expected.SCB)
        quantized_count += expected is not reference[name]
        assert torch.equal(parameter, expected.to(parameter.dtype)), name
    assert quantized_count > 10


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("state", "quantized weight that cannot be read"),
        ("block", "nf4 in blocks of 64 works"),
        ("absmax", "not .* of float32"),
        ("shape", "does not match its config"),
        ("nested", "nested statistics that do not match"),
    ],
)
def test_a_damaged_state_is_refused(
    flux: Graph, plain_folder: Path, tmp_path: Path, change: str, words: str
) -> None:
    kind = "nested" if change == "nested" else "nf4"
    module = loaded(plain_folder, quantization_config=quantization(kind), device_map={"": "cpu"})
    module.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    key = next(name for name in tensors if "quant_state" in name)
    weight = key.partition(".quant_state")[0]
    state = json.loads(bytes(tensors[key].tolist()))
    if change == "state":
        tensors[key] = torch.tensor(list(b"{]"), dtype=torch.uint8)
    elif change == "absmax":
        tensors[f"{weight}.absmax"] = tensors[f"{weight}.absmax"][:-1].clone()
    else:
        changes = {"block": {"blocksize": 128}, "nested": {"nested_blocksize": -1}}
        state |= changes.get(change, {"shape": state["shape"][::-1]})
        if change == "shape" and state["shape"][0] == state["shape"][1]:
            state["shape"] = [state["shape"][0] * 2, state["shape"][1] // 2]
        tensors[key] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    save_file(tensors, tmp_path / WEIGHTS)
    component = replace(
        flux.component("transformer"),
        precision=("nf4",),
        checkpoints=(Checkpoint("nf4", str(tmp_path)),),
    )
    with pytest.raises(GraphError, match=words):
        draft(component, flux, "nf4")
