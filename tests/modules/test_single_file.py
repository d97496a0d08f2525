"""One file for many components in the original authors' layout: the same tensors as diffusers' own
loading, without a second copy in memory.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import original_layouts as layouts
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import graphrun
from graphrun.errors import GraphError
from graphrun.graph.graph import Graph
from graphrun.graph.parts import Component
from graphrun.modules.build import build, draft, meta_module, resolve_class
from graphrun.modules.conversions import Derivation, SymbolicTensors
from graphrun.modules.source_files import Stored, stored_tensors
from graphrun.modules.sources import FileSource
from graphrun.modules.stored import holding

GRAPHS = Path(__file__).parents[2] / "graphs"
COMPONENTS = ("text_encoder", "text_encoder_2", "unet", "vae")


@pytest.fixture(scope="module")
def sdxl() -> Graph:
    return graphrun.load(GRAPHS / "sdxl-tiny.yaml")


@pytest.fixture(scope="module")
def modules(sdxl: Graph) -> dict[str, nn.Module]:
    return {name: build(component, sdxl) for name, component in sdxl.components.items()}


@pytest.fixture(scope="module")
def original(modules: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
    states = {name: dict(module.state_dict()) for name, module in modules.items()}
    return {
        **layouts.clip(states["text_encoder"]),
        **layouts.open_clip(states["text_encoder_2"]),
        **layouts.unet(states["unet"], 1),
        **layouts.vae(states["vae"]),
    }


@pytest.fixture(scope="module")
def file(original: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny SDXL in one file."""
    path = tmp_path_factory.mktemp("single") / "sdxl-tiny.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in original.items()}, path)
    return path


@pytest.fixture(scope="module")
def graph_file(file: Path) -> Path:
    """The graph of a tiny SDXL, with the file as the source of all components."""
    text = (
        (GRAPHS / "sdxl-tiny.yaml")
        .read_text()
        .replace("name: sdxl-tiny", f"name: sdxl-tiny\nsource: {file.name}")
    )
    path = file.with_name("graph.yaml")
    path.write_text(
        text.replace("configs/", f"{GRAPHS}/configs/").replace(
            "tokenizers/", f"{GRAPHS}/tokenizers/"
        )
    )
    return path


def test_diffusers_reads_the_same_file(
    sdxl: Graph,
    file: Path,
    modules: dict[str, nn.Module],
    original: dict[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    from diffusers.loaders.single_file_utils import create_diffusers_clip_model_from_ldm

    for name, module in modules.items():
        kind: Any = resolve_class(sdxl.component(name).class_path, sdxl.trust)
        (module.save_config if hasattr(module, "save_config") else module.config.save_pretrained)(
            tmp_path / name
        )  # type: ignore[operator]
        if hasattr(kind, "from_single_file"):
            reference = kind.from_single_file(str(file), config=str(tmp_path), subfolder=name)
        else:
            reference = create_diffusers_clip_model_from_ldm(
                kind, dict(original), name, str(tmp_path), torch.float32, True
            )
        state = reference.state_dict()
        assert state.keys() == module.state_dict().keys()
        assert all(
            torch.equal(state[key], tensor) for key, tensor in module.state_dict().items()
        ), name


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize("name", COMPONENTS)
def test_every_tensor_of_a_component_is_found(
    graph_file: Path, modules: dict[str, nn.Module], name: str
) -> None:
    graph = graphrun.load(graph_file)
    component = graph.component(name)
    assert component.source == str(graph_file.with_name("sdxl-tiny.safetensors"))
    files = holding(component, meta_module(component, graph.trust))
    assert files is not None
    assert files.absent_count == 0
    module = build(component, graph)
    assert all(
        torch.equal(tensor, modules[name].state_dict()[key])
        for key, tensor in module.state_dict().items()
    )


def test_tensors_are_read_as_ranges_and_only_transposed_ones_are_computed(graph_file: Path) -> None:
    """In SDXL's file every tensor is a range of bytes, except the transposed text projection."""
    graph = graphrun.load(graph_file)
    tensors = {}
    for name in COMPONENTS:
        _, writer = draft(graph.component(name), graph, "float32")
        assert writer.reads_as_stored
        source = writer.source  # type: ignore[attr-defined]
        assert isinstance(source, FileSource)
        tensors |= {
            key: piece for key, piece in source._pieces.items() if isinstance(piece, Derivation)
        }
    assert list(tensors) == ["text_projection.weight"]


@pytest.mark.sweep("more")
def test_a_run_from_one_file_equals_the_run_of_its_modules(sdxl: Graph, graph_file: Path) -> None:
    graph = graphrun.load(graph_file)
    problem = graphrun.estimate(graph, vram="16M", ram="1G", hardware="sim", inputs={"steps": 1})
    assert all(
        "disk" in {variant.backing_store for variant in component.variants}
        for component in problem.components
    )
    trace = graphrun.run(graphrun.plan(problem), graph, {"steps": 1})
    plain = graphrun.estimate(sdxl, vram="16M", ram="1G", hardware="sim", inputs={"steps": 1})
    expected = graphrun.run(graphrun.plan(plain), sdxl, {"steps": 1})
    assert trace.outputs["image"].tobytes() == expected.outputs["image"].tobytes()
    assert trace.left_bytes == 0


def test_a_single_file_has_no_configs_and_no_parts(graph_file: Path, tmp_path: Path) -> None:
    text = graph_file.read_text().replace(
        "sdxl-tiny.safetensors", str(graph_file.with_name("sdxl-tiny.safetensors"))
    )
    bare = text.replace(f", config: {GRAPHS}/configs/sdxl-scheduler.json", "")
    bare = bare.replace(f", config: {GRAPHS}/configs/tiny-sdxl-vae.json", "")
    (tmp_path / "graph.yaml").write_text(bare)
    with pytest.raises(GraphError) as error_info:
        graphrun.load(tmp_path / "graph.yaml")
    lines = str(error_info.value).splitlines()
    assert [line.split(": ", 1)[1] for line in lines] == [
        "components.vae: no config, and a single file has none: give config:",
        "parts.scheduler: no config, file or source; give config: {} for the defaults of its class",
    ]


def refusal(component: Component, graph: Graph) -> str:
    with pytest.raises(GraphError) as error_info:
        holding(component, meta_module(component, graph.trust))
    return str(error_info.value)


def test_a_component_missing_in_the_file_is_named(
    sdxl: Graph, file: Path, original: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    model_file = tmp_path / "model.safetensors"
    save_file(
        {
            name: tensor.contiguous()
            for name, tensor in original.items()
            if "first_stage" not in name
        },
        model_file,
    )
    vae = replace(sdxl.component("vae"), source=str(model_file))
    assert f"components.vae: {model_file} " in refusal(vae, sdxl)
    flux = graphrun.load(GRAPHS / "flux-tiny.yaml")
    transformer = replace(flux.component("transformer"), source=str(file))
    assert f"{file} cannot be used: it is not a FluxTransformer2DModel" in refusal(
        transformer, flux
    )
    t5 = replace(flux.component("text_encoder_2"), source=str(file))
    assert (
        f"components.text_encoder_2: {file} has no tensors for it: give it its own source:"
        in refusal(t5, flux)
    )


def test_a_tensor_that_is_missing_or_has_another_shape_is_named(
    sdxl: Graph, original: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    absent_counts = {
        name: t.contiguous()
        for name, t in original.items()
        if name != "model.diffusion_model.time_embed.0.bias"
    }
    save_file(absent_counts, path)
    unet = replace(sdxl.component("unet"), source=str(path))
    assert refusal(unet, sdxl).endswith(
        f"{path}: 1 tensor is missing, such as time_embedding.linear_1.bias"
    )
    save_file({**absent_counts, "model.diffusion_model.time_embed.0.bias": torch.zeros(3)}, path)
    assert "time_embedding.linear_1.bias is [3] float32, not [128]" in refusal(unet, sdxl)


def test_a_truncated_or_changed_file_is_named(sdxl: Graph, file: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file.read_bytes()[:-1])
    vae = replace(sdxl.component("vae"), source=str(path))
    assert f"{path} is truncated or corrupt" in refusal(vae, sdxl)
    path.write_bytes(file.read_bytes())
    _, writer = draft(vae, sdxl, "float32")
    path.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(graphrun.InputError, match="was changed while it was in use"):
        writer.source.read_into("decoder.conv_in.bias", torch.empty(32))


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_flux_at_full_size_needs_the_header_only(tmp_path: Path, prefix: str) -> None:
    """A sparse file of 23.8 GB, of which only the header is read. One layer's tensors are computed
    from swapped halves, all others are ranges.
    """
    graph = graphrun.load(GRAPHS / "flux-dev.yaml")
    path = tmp_path / "flux1-dev.safetensors"
    shapes = layouts.flux_shapes(graph.component("transformer").config | {"in_channels": 64})
    nbytes = layouts.write_hollow(
        path, {f"{prefix}{name}": shape for name, shape in shapes.items()}
    )
    component = replace(graph.component("transformer"), source=str(path))
    files = holding(component, meta_module(component, graph.trust))
    assert files is not None
    assert (files.absent_count, files.used_bytes, files.nbytes) == (0, nbytes, 2 * 11_901_408_320)
    _, writer = draft(component, graph, "bfloat16")
    pieces = writer.source._pieces  # type: ignore[attr-defined]
    derived_names = sorted(name for name, piece in pieces.items() if isinstance(piece, Derivation))
    assert derived_names == ["norm_out.linear.bias", "norm_out.linear.weight"]
    query, key = (pieces[f"transformer_blocks.3.attn.to_{name}.weight"] for name in "qk")
    assert query.name == key.name == f"{prefix}double_blocks.3.img_attn.qkv.weight"
    assert key.begin - query.begin == query.nbytes == 2 * 3072 * 3072


def test_a_conversion_is_repeated_on_the_values(tmp_path: Path) -> None:
    whole = torch.arange(24, dtype=torch.float32).reshape(6, 4)
    save_file({"w": whole}, tmp_path / "w.safetensors")
    leaves = {tensor.name: tensor for tensor in stored_tensors(tmp_path, "")}
    symbols = SymbolicTensors(leaves)

    def convert(w: torch.Tensor) -> dict[str, torch.Tensor]:
        first, second = w.chunk(2, dim=0)
        tensors = {"first": first, "second": second.clone()}
        return {
            **tensors,
            "swapped": torch.cat([second, first]),
            "turned": w.T.contiguous(),
            "part": w[:, 1:3] * 2,
        }

    with symbols:
        parts = convert(symbols.tensors["w"])
    pieces = {name: symbols.piece(name, tensor) for name, tensor in parts.items()}
    assert {name for name, piece in pieces.items() if isinstance(piece, Stored)} == {
        "first",
        "second",
    }
    source = FileSource(pieces)
    for name, expected in convert(whole).items():
        value = torch.empty(expected.shape)
        source.read_into(name, value)
        assert torch.equal(value, expected), name
