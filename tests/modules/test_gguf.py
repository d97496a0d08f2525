"""GGUF files as a precision: counted by their headers, computed bit for bit as diffusers' own GGUF
layers, resident and streamed.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from original_layouts import GGUF_TYPES as TYPES
from original_layouts import by_role, write_gguf
from torch import nn

import graphrun
from graphrun.errors import GraphError
from graphrun.graph.graph import Graph
from graphrun.graph.parts import Component
from graphrun.modules.blocks import lay_out
from graphrun.modules.build import build, draft, held_meta_module, meta_module
from graphrun.modules.gguf import dequantized, gguf_tensors, quantized_types, shape_of
from graphrun.modules.quantize import convert
from graphrun.profile.precision import flags
from graphrun.profile.quantized import (
    dequantization_bytes,
    expected_rows,
    gguf_bytes,
    quantized_shapes,
)
from graphrun.solve.infeasible import Infeasible
from graphrun.verify.simulate import simulate

GRAPHS = Path(__file__).parents[2] / "graphs"


@pytest.fixture(scope="module")
def flux() -> Graph:
    return graphrun.load(GRAPHS / "flux-tiny.yaml")


@pytest.fixture(scope="module")
def file(flux: Graph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    module = build(flux.component("transformer"), flux)
    return write_gguf(
        tmp_path_factory.mktemp("gguf") / "flux-tiny-Q4.gguf", dict(module.state_dict()), by_role
    )


@pytest.fixture(scope="module")
def graph(flux: Graph, file: Path) -> Graph:
    component = replace(flux.component("transformer"), precision=("gguf",), gguf=str(file))
    return replace(flux, components={**flux.components, "transformer": component})


def with_weights(component: Component, graph: Graph) -> nn.Module:
    module, writer = draft(component, graph, "gguf")
    for path, child in module.named_modules():
        for key, parameter in child._parameters.items():
            if parameter is not None:
                target = torch.empty(parameter.shape, dtype=parameter.dtype)
                writer.source.read_into(f"{path}.{key}" if path else key, target)
                child._parameters[key] = nn.Parameter(target, requires_grad=False)
    return module


def theirs_of(component: Component, graph: Graph, file: Path, folder: Path) -> Any:
    from diffusers import FluxTransformer2DModel, GGUFQuantizationConfig

    meta_module(component, graph.trust).save_config(folder)  # type: ignore[operator]
    quantization = GGUFQuantizationConfig(compute_dtype=torch.bfloat16)
    return FluxTransformer2DModel.from_single_file(
        str(file), config=str(folder), quantization_config=quantization, torch_dtype=torch.bfloat16
    )


def test_the_header_agrees_with_the_gguf_library(file: Path) -> None:
    tensors = {tensor.name: tensor for tensor in gguf_tensors(file, "")}
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert tensors.keys() == reference.keys()
    for name, tensor in tensors.items():
        assert (tensor.nbytes, tensor.begin) == (
            int(reference[name].n_bytes),
            int(reference[name].data_offset),
        ), name
        plain = reference[name].tensor_type in (TYPES.F32, TYPES.F16, TYPES.BF16)
        assert tensor.quant == ("" if plain else reference[name].tensor_type.name)
        shape = shape_of(tensor.shape, tensor.quant) if tensor.quant else tensor.shape
        assert shape == tuple(int(n) for n in reference[name].shape)[::-1]
    assert {tensor.quant for tensor in tensors.values()} == {"", "Q4_0", "Q8_0", "Q5_1"}


def test_outputs_are_those_of_diffusers_own_gguf_layers(
    graph: Graph, file: Path, tmp_path: Path
) -> None:
    component = graph.component("transformer")
    module, reference = with_weights(component, graph), theirs_of(component, graph, file, tmp_path)
    names = dict(reference.named_parameters())
    assert names.keys() == dict(module.named_parameters()).keys()
    generator, config = torch.Generator().manual_seed(0), reference.config

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    arguments = {
        "hidden_states": random(1, 16, config.in_channels),
        "encoder_hidden_states": random(1, 8, config.joint_attention_dim),
        "pooled_projections": random(1, config.pooled_projection_dim),
        "timestep": torch.tensor([0.5], dtype=torch.bfloat16),
        "guidance": torch.tensor([3.5], dtype=torch.bfloat16),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
        "return_dict": False,
    }
    with torch.no_grad():
        output, expected = module(**arguments)[0], reference(**arguments)[0]
    assert torch.equal(output, expected)
    assert expected.isfinite().all()


@pytest.mark.parametrize("kind", sorted(quantized_types()))
def test_every_type_of_diffusers_is_dequantized_as_by_diffusers(kind: str) -> None:
    from diffusers.quantizers.gguf.utils import GGUFParameter, dequantize_gguf_tensor

    block, size = gguf.GGML_QUANT_SIZES[TYPES[kind]]
    raw = torch.randint(
        0, 100, (3, 2 * size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    expected = dequantize_gguf_tensor(GGUFParameter(raw, quant_type=TYPES[kind]))
    numbers = dequantized(raw, kind)
    assert numbers.shape == shape_of(raw.shape, kind) == (3, 2 * block)
    assert torch.equal(numbers.view(torch.uint8), expected.view(torch.uint8))


def test_planned_bytes_are_the_file_s(graph: Graph, file: Path) -> None:
    """The transformer's tensors without padding: quantized ones as stored in the file, others in
    the component's dtype."""
    module, content = held_meta_module(graph.component("transformer"), graph.trust, "gguf")
    quantized = {tensor.name: tensor.nbytes for tensor in content.tensors if tensor.quant}
    sizes = {name: p.numel() * p.element_size() for name, p in module.named_parameters()}
    assert {name: sizes[name] for name in quantized} == quantized
    problem = graphrun.estimate(graph, vram="64M", ram="1G", hardware="sim", inputs={"steps": 1})
    numbers = problem.component("transformer")
    whole = sum(
        len(k.blocks) * n
        for k, n in zip(numbers.groups, numbers.variants[0].block_bytes, strict=True)
    )
    assert sum(sizes.values()) <= whole < 1.02 * sum(sizes.values())
    assert [variant.backing_store for variant in numbers.variants] == ["pinned", "disk"]
    assert all(variant.transient_bytes == 0 for variant in numbers.variants)
    rate = problem.hardware.disk_bytes_per_second
    assert numbers.variants[0].read_seconds == tuple(
        n / rate for n in numbers.variants[0].block_bytes
    )


def test_a_plain_module_of_a_published_file_is_not_that_of_a_block() -> None:
    component = graphrun.load(GRAPHS / "flux-dev.yaml").component("transformer")
    sizes = (3072, 15360)
    layers = {"proj_out": sizes, "single_transformer_blocks.0.proj_out": sizes}
    rows = expected_rows(component, "Q4_K_S", layers)
    assert rows == {"single_transformer_blocks.0.proj_out": ("Q4_K", 15360 // 256 * 144)}


def test_bytes_of_a_published_file_are_those_of_its_layers() -> None:
    graph = graphrun.load(GRAPHS / "flux-tiny.yaml")
    component = graph.component("transformer")
    module, converted = (meta_module(component, graph.trust) for _ in range(2))
    paths = [name for name in quantized_shapes(module, component.dtype) if "single" in name]
    rows = {name: ("Q8_0", module.get_parameter(name).shape[1] // 32 * 34) for name in paths}
    convert(converted, "Q8_0", torch.bfloat16, rows)
    sizes = gguf_bytes(module, rows)
    layout = lay_out(module, [""])[""]
    assert rows
    assert [sizes[id(entry.tensor)] for entry in layout.entries] == [
        (entry.nbytes,) for entry in lay_out(converted, [""])[""].entries
    ]


@pytest.mark.parametrize("kind", sorted(quantized_types()))
def test_dequantization_memory_is_counted_from_its_allocations(kind: str) -> None:
    block, size = gguf.GGML_QUANT_SIZES[TYPES[kind]]
    outputs, inputs = 64, 2048
    ((peak, output_bytes),) = dequantization_bytes(
        {"w": (kind, inputs // block * size, (outputs, inputs))}, "bfloat16"
    ).values()
    elements = outputs * inputs
    # the numbers in fp16 or fp32 and in 16 bit, and indices for types with a codebook
    assert 4 * elements < peak < 40 * elements
    assert output_bytes > peak - 1024


@pytest.mark.sweep("more")
def test_streamed_resident_and_released_with_the_same_picture(graph: Graph) -> None:
    pictures, digests = set(), set()
    for vram in ("64M", "5M", "4M"):
        problem = graphrun.estimate(graph, vram=vram, ram="1G", hardware="sim", inputs={"steps": 2})
        solution = graphrun.plan(problem)
        trace = graphrun.run(solution, graph, {"steps": 2})
        digests.add("stream transformer" in str(solution.plan))
        pictures.add(trace.outputs["image"].tobytes())
        assert trace.left_bytes == 0
        assert all(tier.left_bytes == 0 for tier in trace.tiers)
        for slot, slot_trace in trace.pairs_with(simulate(solution.problem, solution.plan).slots):
            assert slot_trace.peak_bytes <= slot.peak_bytes, slot.phase
            if slot.phase.startswith("denoise") and slot_trace.calls:
                assert slot_trace.peak_bytes > 0.97 * slot.peak_bytes
    assert len(pictures) == 1
    assert digests == {True, False}


@pytest.mark.sweep("more")
def test_gguf_may_be_one_of_several_precisions(flux: Graph, file: Path, tmp_path: Path) -> None:
    plain = flux.component("transformer")
    build(plain, flux).save_pretrained(tmp_path)  # type: ignore[operator]
    component = replace(plain, source=str(tmp_path), precision=("bfloat16", "gguf"), gguf=str(file))
    graph = replace(flux, components={**flux.components, "transformer": component})
    arguments = {
        "vram": "9M",
        "ram": "1G",
        "hardware": "sim",
        "inputs": {"steps": 1},
        "keep": ["transformer"],
    }
    with pytest.raises(Infeasible):  # `keep` all of it: streamed in 16 bit it would fit
        graphrun.plan(graphrun.estimate(graph, **arguments))
    solution = graphrun.plan(graphrun.estimate(graph, allow=["gguf"], **arguments))
    assert dict(solution.plan.variants)["transformer"].startswith("gguf")


def test_the_version_table_has_gguf() -> None:
    assert flags("gguf", {"gguf": "0.19", "diffusers": "0.42"}).disk_able
    assert "gguf 0.10" in flags("gguf", {"diffusers": "0.42"}).reason
    assert not flags("gguf", {"gguf": "0.9.1", "diffusers": "0.42"}).available


def refusal(component: Component, graph: Graph) -> str:
    with pytest.raises(GraphError) as error_info:
        held_meta_module(component, graph.trust, "gguf")
    return str(error_info.value)


@pytest.mark.parametrize("cut", [0, 3, 20, 200, -200_000, -1])
def test_a_truncated_file_is_named(graph: Graph, file: Path, tmp_path: Path, cut: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(file.read_bytes()[:cut] if cut else b"")
    text = refusal(replace(graph.component("transformer"), gguf=str(path)), graph)
    assert f"{path} is truncated or corrupt" in text
    if cut < 0:
        assert "inside " in text
        assert "proj_out.bias" in text or "single_transformer_blocks" in text


def test_damaged_counts_do_not_exhaust_memory(graph: Graph, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for tensors, keys in ((1 << 60, 0), (0, 1 << 60), (1, 0)):
        path.write_bytes(
            b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + struct.pack("<Q", 1 << 60)
        )
        assert "is not a GGUF header" in refusal(
            replace(graph.component("transformer"), gguf=str(path)), graph
        )


def test_other_shapes_and_types_are_named(graph: Graph, flux: Graph, tmp_path: Path) -> None:
    state = {
        name: tensor
        for name, tensor in build(flux.component("transformer"), flux).state_dict().items()
    }
    tensors = {**state, "x_embedder.weight": torch.zeros(128, 64)}
    component = graph.component("transformer")
    other = write_gguf(tmp_path / "other.gguf", tensors, by_role)
    assert "x_embedder.weight is [128, 64] float16, not [128, 16]" in refusal(
        replace(component, gguf=str(other)), graph
    )
    path = tmp_path / "types.gguf"
    writer = gguf.GGUFWriter(path, "flux")
    writer.add_tensor("a.weight", numpy.zeros((4, 54), numpy.uint8), raw_dtype=TYPES.TQ1_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "a.weight is TQ1_0, which diffusers cannot compute with" in refusal(
        replace(component, gguf=str(path)), graph
    )


@pytest.mark.parametrize(
    "name", ["time_text_embed.timestep_embedder.linear_1.weight", "proj_out.bias"]
)
def test_a_missing_tensor_is_named_before_a_plan(
    graph: Graph, flux: Graph, tmp_path: Path, name: str
) -> None:
    state = {
        key: tensor
        for key, tensor in build(flux.component("transformer"), flux).state_dict().items()
        if key != name
    }
    path = write_gguf(tmp_path / "short.gguf", state, by_role)
    component = replace(graph.component("transformer"), gguf=str(path))
    with pytest.raises(
        GraphError, match=f"components.transformer: {path}: 1 tensor is missing, such as {name}"
    ):
        graphrun.estimate(
            replace(graph, components={**graph.components, "transformer": component}),
            vram="64M",
            hardware="sim",
        )


def test_the_error_for_a_missing_file_says_what_to_do(flux: Graph, tmp_path: Path) -> None:
    text = (
        (GRAPHS / "flux-tiny.yaml")
        .read_text()
        .replace("configs/", f"{GRAPHS}/configs/")
        .replace("tokenizers/", f"{GRAPHS}/tokenizers/")
    )
    line = "transformer.json, dtype: bfloat16"
    path = tmp_path / "graph.yaml"

    def said(precision: str) -> str:
        path.write_text(text.replace(line, f"{line}, {precision}"))
        with pytest.raises(GraphError) as error_info:
            graphrun.load(path)
        return str(error_info.value).split(": ", 1)[1]

    todo = "its header is needed to plan: get it, or leave gguf out of precision:"
    assert (
        said("precision: [gguf], gguf: a.gguf")
        == f"components.transformer.gguf: no such file: {tmp_path}/a.gguf; {todo}"
    )
    assert (
        said("precision: [gguf]")
        == "components.transformer.precision: gguf needs a file: add gguf: with the path of one"
    )
    assert "is not used: add gguf to precision:" in said("gguf: graph.yaml")
    component = replace(
        flux.component("transformer"),
        precision=("gguf",),
        gguf="nobody/nothing-of-this-name/a.gguf",
    )
    assert refusal(component, flux).endswith(
        f"nobody/nothing-of-this-name/a.gguf is not on this machine, and {todo}"
    )


def test_a_lora_is_not_fused_into_gguf_weights(graph: Graph) -> None:
    from graphrun.graph.parts import Adapter

    with pytest.raises(GraphError, match="a LoRA cannot be fused into weights in gguf"):
        draft(
            replace(graph.component("transformer"), loras=(Adapter("a.safetensors"),)),
            graph,
            "gguf",
        )


def test_flux_at_full_size_needs_the_header_only(tmp_path: Path) -> None:
    """FLUX in Q4_0 in its authors' layout, a sparse file of 6.7 GiB: fused weights are split,
    swapped ones computed."""
    import original_layouts as layouts

    graph = graphrun.load(GRAPHS / "flux-dev.yaml")
    path = tmp_path / "flux1-dev-Q4_0.gguf"
    total, writer = 0, gguf.GGUFWriter(path, "flux")
    for name, shape in layouts.flux_shapes(
        graph.component("transformer").config | {"in_channels": 64}
    ).items():
        kind = TYPES.Q4_0 if len(shape) == 2 else TYPES.F32
        block, size = gguf.GGML_QUANT_SIZES[kind]
        nbytes = int(numpy.prod(shape)) // block * size
        dtype = numpy.dtype(numpy.uint8 if len(shape) == 2 else numpy.float32)
        writer.add_tensor_info(
            name,
            gguf.quant_shape_to_byte_shape(shape, kind) if len(shape) == 2 else shape,
            dtype,
            nbytes,
            kind,
        )
        total += -(-nbytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("ab") as file:
        file.truncate(-(-file.tell() // 32) * 32 + total)
    component = replace(graph.component("transformer"), precision=("gguf",), gguf=str(path))
    module, content = held_meta_module(component, graph.trust, "gguf")
    assert module.state_dict().keys() == content.pieces.keys()
    module_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    assert 6.2e9 < module_bytes < total
    assert content.kind("norm_out.linear.weight") == "Q4_0"
    assert module.get_parameter("transformer_blocks.0.attn.to_q.weight").shape == (
        3072,
        3072 // 32 * 18,
    )
    _, draft_writer = draft(component, graph, "gguf")
    assert draft_writer.reads_as_stored
