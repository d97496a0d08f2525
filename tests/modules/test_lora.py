"""LoRAs: read in the layouts of diffusers, and fused by the formula."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from graphrun.errors import GraphError
from graphrun.graph.graph import Graph
from graphrun.graph.loading import load
from graphrun.graph.parts import Adapter, Component
from graphrun.modules.blocks import lay_out
from graphrun.modules.build import build, draft

GRAPHS = Path(__file__).parents[2] / "graphs"
PATH = "transformer_blocks.0.attn.to_q"
RANK = 4


@pytest.fixture(scope="module")
def flux() -> Graph:
    return load(GRAPHS / "flux-tiny.yaml")


def halves(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    down_matrix = torch.randn(RANK, weight.shape[1], generator=generator) * 0.2
    return down_matrix, torch.randn(weight.shape[0], RANK, generator=generator) * 0.2


def with_lora(component: Component, file: Path, scale: float = 1.0) -> Component:
    return replace(component, loras=(Adapter(str(file), scale),))


def fused(weight: torch.Tensor, factor: float) -> torch.Tensor:
    down_matrix, up_matrix = (half.to(weight.dtype).float() for half in halves(weight))
    return weight + (up_matrix @ down_matrix * factor).to(weight.dtype)


Write = Callable[[Path, torch.Tensor], float]


def as_peft(file: Path, weight: torch.Tensor) -> float:
    down_matrix, up_matrix = halves(weight)
    save_file(
        {
            f"transformer.{PATH}.lora_A.weight": down_matrix,
            f"transformer.{PATH}.lora_B.weight": up_matrix,
        },
        file,
    )
    return 1.0


def with_metadata(file: Path, weight: torch.Tensor) -> float:
    as_peft(file, weight)
    down_matrix, up_matrix = halves(weight)
    metadata = {
        "lora_adapter_metadata": json.dumps({"transformer.r": RANK, "transformer.lora_alpha": 8})
    }
    save_file(
        {
            f"transformer.{PATH}.lora_A.weight": down_matrix,
            f"transformer.{PATH}.lora_B.weight": up_matrix,
        },
        file,
        metadata,
    )
    return 8 / RANK


def as_down_and_up(file: Path, weight: torch.Tensor) -> float:
    down_matrix, up_matrix = halves(weight)
    alpha = torch.tensor(2.0)
    save_file(
        {
            f"{PATH}.lora.down.weight": down_matrix,
            f"{PATH}.lora.up.weight": up_matrix,
            f"{PATH}.alpha": alpha,
        },
        file,
    )
    return 2 / RANK


def as_diffusers_saves(file: Path, weight: torch.Tensor) -> float:
    from diffusers import FluxPipeline

    down_matrix, up_matrix = halves(weight)
    layers = {f"{PATH}.lora_A.weight": down_matrix, f"{PATH}.lora_B.weight": up_matrix}
    FluxPipeline.save_lora_weights(
        file.parent, transformer_lora_layers=layers, weight_name=file.name
    )
    return 1.0


@pytest.mark.parametrize("write", [as_peft, with_metadata, as_down_and_up, as_diffusers_saves])
def test_the_layouts_that_diffusers_writes_are_fused_by_the_formula(
    flux: Graph, tmp_path: Path, write: Write
) -> None:
    plain = build(flux.components["transformer"], flux)
    weight = plain.get_submodule(PATH).weight
    factor = write(tmp_path / "lora.safetensors", weight)
    module = build(
        with_lora(flux.components["transformer"], tmp_path / "lora.safetensors", 0.5), flux
    )
    assert torch.equal(module.get_submodule(PATH).weight, fused(weight, 0.5 * factor))
    plain_parameters = dict(plain.named_parameters())
    assert all(
        torch.equal(p, plain_parameters[name])
        for name, p in module.named_parameters()
        if name != f"{PATH}.weight"
    )


def test_a_draft_writes_the_fused_weights(flux: Graph, tmp_path: Path) -> None:
    weight = build(flux.components["transformer"], flux).get_submodule(PATH).weight
    as_peft(tmp_path / "lora.safetensors", weight)
    module, writer = draft(
        with_lora(flux.components["transformer"], tmp_path / "lora.safetensors"), flux, "bfloat16"
    )
    assert not writer.reads_as_stored, (
        "a backing store on disk keeps the fused weights, so that they are fused once"
    )
    layout = lay_out(module, [PATH])[PATH]
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
    writer.write(layout, buffer)
    entry = next(entry for entry in layout.entries if entry.names[0] == f"{PATH}.weight")
    result = (
        buffer[entry.offset : entry.offset + entry.nbytes].view(torch.bfloat16).view(weight.shape)
    )
    assert torch.equal(result, fused(weight, 1.0))


def test_two_loras_add_up_in_their_order(flux: Graph, tmp_path: Path) -> None:
    weight = build(flux.components["transformer"], flux).get_submodule(PATH).weight
    as_peft(tmp_path / "lora.safetensors", weight)
    lora = Adapter(str(tmp_path / "lora.safetensors"))
    module = build(
        replace(flux.components["transformer"], loras=(lora, replace(lora, scale=-1.0))), flux
    )
    assert torch.allclose(module.get_submodule(PATH).weight, weight, atol=0.02)


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (
            {"unet.x.lora_A.weight": (4, 8)},
            "has no tensors for transformer: it has unet.x.lora_A.weight",
        ),
        (
            {"transformer.nowhere.lora_A.weight": (4, 8)},
            "changes nowhere, which diffusers.FluxTransformer2DModel does not have",
        ),
        (
            {
                f"transformer.{PATH}.lora_A.weight": (4, 7),
                f"transformer.{PATH}.lora_B.weight": (7, 4),
            },
            "does not fit",
        ),
        ({f"transformer.{PATH}.lora_A.weight": (4, 8)}, "does not fit"),
    ],
)
def test_a_file_for_another_model_is_refused(
    flux: Graph, tmp_path: Path, tensors: dict[str, Any], text: str
) -> None:
    save_file(
        {key: torch.zeros(shape) for key, shape in tensors.items()}, tmp_path / "lora.safetensors"
    )
    with pytest.raises(GraphError, match="components.transformer.loras: .*" + text):
        build(with_lora(flux.components["transformer"], tmp_path / "lora.safetensors"), flux)


def test_a_graph_file_names_loras_relative_to_itself(tmp_path: Path) -> None:
    for name in ("configs", "tokenizers"):
        (tmp_path / name).symlink_to(GRAPHS / name)
    text = (GRAPHS / "flux-tiny.yaml").read_text()
    assert "\n  transformer:" in text
    lines = []
    for line in text.splitlines():
        lines.append(line)
        if line.startswith("  transformer:") and "{" not in line:
            lines.append("    loras: [{file: style.safetensors, scale: 0.8}]")
        elif line.startswith("  transformer: {"):
            lines[-1] = line.replace("{", "{loras: [{file: style.safetensors, scale: 0.8}], ", 1)
    (tmp_path / "graph.yaml").write_text("\n".join(lines))
    with pytest.raises(
        GraphError, match=r"components.transformer.loras.*no such file: .*style.safetensors"
    ):
        load(tmp_path / "graph.yaml")
    (tmp_path / "style.safetensors").write_bytes(b"")
    assert load(tmp_path / "graph.yaml").components["transformer"].loras == (
        Adapter(str(tmp_path / "style.safetensors"), 0.8),
    )
    assert load(tmp_path / "graph.yaml").digest == load(GRAPHS / "flux-tiny.yaml").digest, (
        "no number depends on it"
    )
