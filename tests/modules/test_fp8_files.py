"""fp8 checkpoints, with and without scales: stored as in the file, computed as diffusers' layerwise
casting does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from campaign import sampled
from safetensors.torch import save_file
from torch import nn

import graphrun
from graphrun.errors import GraphError
from graphrun.graph.graph import Graph
from graphrun.graph.parts import Component
from graphrun.modules.build import build, draft, held_meta_module, meta_module
from graphrun.modules.conversions import Derivation
from graphrun.modules.quantize import quantizable_layers
from graphrun.modules.stored import holding

GRAPHS = Path(__file__).parents[2] / "graphs"
FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def flux() -> Graph:
    return graphrun.load(GRAPHS / "flux-tiny.yaml")


@pytest.fixture(scope="module")
def module(flux: Graph) -> nn.Module:
    return build(flux.component("transformer"), flux)


@pytest.fixture(scope="module")
def cast(module: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything in fp8, norms and biases too, as in FLUX's single fp8 files."""
    path = tmp_path_factory.mktemp("fp8") / "flux-fp8.safetensors"
    save_file({name: tensor.to(FP8) for name, tensor in module.state_dict().items()}, path)
    return path


@pytest.fixture(scope="module")
def scaled(module: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Linear weights in fp8, each with a scale of one element or one per row, and format markers:
    ComfyUI's scaled fp8."""
    tensors = dict(module.state_dict())
    for number, path in enumerate(quantizable_layers(module, torch.bfloat16)):
        weight = tensors[f"{path}.weight"].float()
        scale = (
            weight.abs().amax(dim=1, keepdim=True) / 448
            if number % 2
            else (weight.abs().amax() / 448).reshape(1)
        )
        tensors[f"{path}.weight"] = (weight / scale).to(FP8)
        tensors[f"{path}.{'weight_scale' if number % 3 else 'scale_weight'}"] = scale.squeeze(
            -1
        ).float()
        tensors[f"{path}.scale_input"] = torch.ones(())
    file = tmp_path_factory.mktemp("fp8") / "flux-scaled.safetensors"
    save_file({**tensors, "scaled_fp8": torch.zeros(2).to(FP8)}, file)
    return file


def at(graph: Graph, file: Path, *precision: str) -> Graph:
    component = replace(graph.component("transformer"), source=str(file), precision=precision)
    return replace(graph, components={**graph.components, "transformer": component})


def picture(graph: Graph, vram: str = "64M") -> bytes:
    problem = graphrun.estimate(graph, vram=vram, ram="1G", hardware="sim", inputs={"steps": 2})
    trace = graphrun.run(graphrun.plan(problem), graph, {"steps": 2})
    assert trace.left_bytes == 0
    assert trace.peak_bytes <= problem.effective_bytes
    return trace.outputs["image"].tobytes()


@pytest.mark.parametrize("kind", sampled(["cast", "scaled"], ["scaled"], "precisions"))
def test_fp8_layers_and_weights_widened_when_read_give_the_same_picture(
    flux: Graph, kind: str, request: pytest.FixtureRequest
) -> None:
    file = request.getfixturevalue(kind)
    wide, narrow = picture(at(flux, file, "bfloat16")), picture(at(flux, file, "fp8"))
    assert wide == narrow == picture(at(flux, file, "fp8"), "4M")
    assert wide != picture(flux)


def test_layers_are_diffusers_layerwise_casting(flux: Graph, cast: Path, module: nn.Module) -> None:
    from diffusers.hooks import apply_layerwise_casting

    component = at(flux, cast, "fp8").component("transformer")
    wide = build(replace(component, precision=("bfloat16",)), flux)
    layer = wide.get_submodule("transformer_blocks.0.ff.net.2")
    meta, content = held_meta_module(component, flux.trust, "fp8")
    apply_layerwise_casting(layer, FP8, torch.bfloat16)
    assert (
        layer.weight.dtype
        == meta.get_parameter("transformer_blocks.0.ff.net.2.weight").dtype
        == FP8
    )
    graphrun_layer = meta.get_submodule("transformer_blocks.0.ff.net.2").to_empty(device="cpu")
    graphrun_layer.weight.copy_(layer.weight)  # type: ignore[operator]
    graphrun_layer.bias.copy_(layer.bias)  # type: ignore[operator]
    x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0)).to(
        torch.bfloat16
    )
    assert torch.equal(graphrun_layer(x), layer(x))


@pytest.mark.sweep("more")
@pytest.mark.parametrize("kind", ["cast", "scaled"])
def test_planned_bytes_are_those_of_the_file(
    flux: Graph, kind: str, request: pytest.FixtureRequest
) -> None:
    graph = at(flux, request.getfixturevalue(kind), "fp8")
    component = graph.component("transformer")
    module, content = held_meta_module(component, graph.trust, "fp8")
    layers = [
        name.removesuffix(".weight") for name, p in module.named_parameters() if p.dtype == FP8
    ]
    scales = (
        sum(4 * module.get_submodule(path).out_features for path in layers)
        if kind == "scaled"
        else 0
    )
    sizes = {name: p.numel() * p.element_size() for name, p in module.named_parameters()}
    assert sum(n for name, n in sizes.items() if name.endswith(".scale")) == scales
    problem = graphrun.estimate(graph, vram="64M", ram="1G", hardware="sim", inputs={"steps": 1})
    numbers = problem.component("transformer")
    whole = sum(
        len(k.blocks) * n
        for k, n in zip(numbers.groups, numbers.variants[0].block_bytes, strict=True)
    )
    padding = 256 * len(sizes) + 512 * sum(len(k.blocks) for k in numbers.groups)
    assert sum(sizes.values()) <= whole <= sum(sizes.values()) + padding
    # read as stored: nothing is quantized
    assert [variant.backing_store for variant in numbers.variants] == [
        "pinned",
        "disk",
    ]
    assert [variant.transient_bytes for variant in numbers.variants] == [0, 0]
    assert (
        numbers.variants[0].read_seconds[0]
        == numbers.variants[0].block_bytes[0] / problem.hardware.disk_bytes_per_second
    )


def test_in_fp8_weights_are_read_as_stored_and_in_16_bit_multiplied_by_their_scale(
    flux: Graph, scaled: Path, module: nn.Module
) -> None:
    graph = at(flux, scaled, "fp8", "bfloat16")
    name = "transformer_blocks.0.ff.net.2.weight"
    for precision, is_derived in (("fp8", False), ("bfloat16", True)):
        _, writer = draft(graph.component("transformer"), graph, precision)
        assert writer.reads_as_stored
        assert isinstance(writer.source._pieces[name], Derivation) == is_derived  # type: ignore[attr-defined]
    value = torch.empty(module.get_parameter(name).shape, dtype=torch.bfloat16)
    writer.source.read_into(name, value)
    expected = module.get_parameter(name)
    assert (value - expected).abs().max() < 0.07 * expected.abs().max()


def test_the_scale_of_a_converted_weight_is_converted_with_it(tmp_path: Path) -> None:
    """FLUX's query, key and value are thirds of one weight, and the halves of its last norm are
    swapped: so are their scales."""
    import original_layouts as layouts

    small = {
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "pooled_projection_dim": 64,
        "joint_attention_dim": 64,
    }
    small |= {"in_channels": 64, "guidance_embeds": False, "num_layers": 1, "num_single_layers": 1}
    component = Component(
        "transformer",
        "diffusers.FluxTransformer2DModel",
        str(tmp_path / "f.safetensors"),
        small,
        True,
        "bfloat16",
        ("fp8",),
    )
    shapes = layouts.flux_shapes(small)
    scales = {
        f"{name}_scale": (shape[0], 1) for name, shape in shapes.items() if name.endswith(".weight")
    }
    scales["double_blocks.0.txt_attn.qkv.weight_scale"] = ()  # one element for all rows
    layouts.write_hollow(
        tmp_path / "f.safetensors",
        {**shapes, **scales},
        {name: "F32" for name in scales},
        "F8_E4M3",
    )
    _, content = held_meta_module(component, ("diffusers",), "fp8")
    query, key = (content.scales[f"transformer_blocks.0.attn.to_{name}.weight"] for name in "qk")
    assert query.shape == key.shape == (3072, 1)
    assert not isinstance(query, Derivation)
    assert not isinstance(key, Derivation)
    assert key.begin - query.begin == 4 * 3072
    assert content.scales["transformer_blocks.0.attn.add_k_proj.weight"].shape == (3072, 1)
    assert isinstance(content.scales["norm_out.linear.weight"], Derivation)
    assert content.scales["norm_out.linear.weight"].shape == (6144, 1)


def test_scales_of_another_shape_are_refused(
    flux: Graph, module: nn.Module, tmp_path: Path
) -> None:
    tensors = {name: tensor.to(FP8) for name, tensor in module.state_dict().items()}
    save_file({**tensors, "x_embedder.weight_scale": torch.ones(2, 3)}, tmp_path / "f.safetensors")
    component = at(flux, tmp_path / "f.safetensors", "fp8").component("transformer")
    with pytest.raises(
        GraphError,
        match=(
            "x_embedder.weight_scale \\[2, 3\\] is not a supported scale of x_embedder.weight "
            "\\[128, 16\\]"
        ),
    ):
        holding(component, meta_module(component, flux.trust))
