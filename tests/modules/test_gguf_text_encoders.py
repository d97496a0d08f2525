"""Text encoders in GGUF files of llama.cpp, whose tensors have other names: read, quantized in the
blocks, and computed with the numbers that diffusers' functions dequantize."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from torch import nn
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

import graphrun
from graphrun.graph.graph import Graph
from graphrun.graph.parts import Checkpoint, Component
from graphrun.modules.build import build, draft
from graphrun.modules.contents import content_of
from graphrun.modules.gguf import dequantized, gguf_tensors
from graphrun.modules.quantize import quantizable_layers

GRAPHS = Path(__file__).parents[2] / "graphs"
TYPES = gguf.GGMLQuantizationType
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
PADDED_SIZES = SIZES | {"head_dim": 16, "pad_token_id": 0}
CASES = {
    "t5": (
        "transformers.T5EncoderModel",
        {
            "d_model": 64,
            "d_ff": 128,
            "d_kv": 16,
            "num_heads": 4,
            "num_layers": 2,
            "vocab_size": 96,
            "feed_forward_proj": "gated-gelu",
        },
        gguf.MODEL_ARCH.T5ENCODER,
    ),
    "qwen3": (
        "transformers.Qwen3Model",
        SIZES | {"head_dim": 16},
        gguf.MODEL_ARCH.QWEN3,
    ),
    "qwen2": (
        "transformers.Qwen2Model",
        SIZES,
        gguf.MODEL_ARCH.QWEN2,
    ),
    "k-quants": (
        "transformers.Qwen2ForCausalLM",
        SIZES | {"hidden_size": 256, "intermediate_size": 512},
        gguf.MODEL_ARCH.QWEN2,
    ),
    "llama": ("transformers.LlamaModel", PADDED_SIZES, gguf.MODEL_ARCH.LLAMA),
    "mistral": ("transformers.MistralModel", PADDED_SIZES, gguf.MODEL_ARCH.LLAMA),
    "gemma2": ("transformers.Gemma2Model", PADDED_SIZES, gguf.MODEL_ARCH.GEMMA2),
    "gemma3": ("transformers.Gemma3TextModel", PADDED_SIZES, gguf.MODEL_ARCH.GEMMA3),
}
K_QUANTS = (TYPES.Q4_K, TYPES.Q5_K, TYPES.Q6_K)


def k_quantized(data: Any, kind: Any) -> Any:
    """Rows of blocks of ``kind`` with random numbers and small scales: the package gguf quantizes
    to no k-quant."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    generator = numpy.random.default_rng(data.size)
    blocks = generator.integers(0, 256, (data.shape[0], data.shape[1] // 256, size), numpy.uint8)
    scale = numpy.frombuffer(numpy.float16(1e-3).tobytes(), numpy.uint8)
    if kind == TYPES.Q6_K:  # the scale is last
        blocks[..., -2:] = scale
    else:  # the scale, and that of the minima
        blocks[..., :2], blocks[..., 2:4] = scale, scale
    return blocks.reshape(data.shape[0], -1)


def write(file: Path, module: nn.Module, architecture: int) -> Path:
    """Write ``module`` as llama.cpp does: matrices in Q8_0 or Q4_0, vectors in fp32."""
    names = gguf.get_tensor_name_map(architecture, 2)
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    titles = set[str]()
    for number, (name, parameter) in enumerate(module.named_parameters()):
        path, _, suffix = name.rpartition(".")
        original = names.get_name(path) or names.get_name(f"model.{path}")
        assert original is not None, name
        if (title := f"{original}.{suffix}") in titles:
            continue
        titles.add(title)
        data = parameter.detach().float().numpy()
        is_matrix = data.ndim == 2 and data.shape[-1] % 32 == 0
        kind = TYPES.F32 if not is_matrix else TYPES.Q8_0 if number % 2 else TYPES.Q4_0
        if is_matrix and data.shape[-1] % 256 == 0 and "embed" not in name:
            kind = K_QUANTS[number % 3]
            writer.add_tensor(title, k_quantized(data, kind), raw_dtype=kind)
            continue
        writer.add_tensor(title, gguf.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module", params=sorted(CASES))
def encoder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Component, Graph, Path]:
    class_path, config, architecture = CASES[request.param]
    graph = graphrun.load(GRAPHS / "flux-tiny.yaml")
    component = replace(
        graph.component("text_encoder_2"),
        class_path=class_path,
        config=config,
        has_config=True,
        dtype="bfloat16",
        precision=("bfloat16",),
        source=None,
    )
    file = tmp_path_factory.mktemp(request.param) / "encoder-Q4_0.gguf"
    write(file, build(component, graph), architecture)
    checkpoints = (Checkpoint("Q4_0", str(file)),)
    return replace(component, precision=("bfloat16", "Q4_0"), checkpoints=checkpoints), graph, file


def as_transformers_has_it(component: Component, name: str, numbers: torch.Tensor) -> torch.Tensor:
    """The tensor ``name`` of a file as transformers' own loader of GGUF files changes it."""
    architecture = gguf.MODEL_ARCH_NAMES[CASES[kind_of(component)][2]]
    kind = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    processed = kind(config=component.config).process(numbers.numpy(), name).weights
    return torch.from_numpy(numpy.ascontiguousarray(processed))


def filled(component: Component, graph: Graph) -> nn.Module:
    module, writer = draft(component, graph, "Q4_0")
    for path, child in module.named_modules():
        for key, parameter in child._parameters.items():
            if parameter is not None:
                target = torch.empty(parameter.shape, dtype=parameter.dtype)
                writer.source.read_into(f"{path}.{key}", target)
                child._parameters[key] = nn.Parameter(target, requires_grad=False)
    return module


def test_outputs_are_those_of_the_weights_that_diffusers_dequantizes(
    encoder: tuple[Component, Graph, Path],
) -> None:
    component, graph, file = encoder
    plain = replace(component.without_checkpoints(), precision=("bfloat16",))
    reference = build(plain, graph)
    names = gguf.get_tensor_name_map(CASES[kind_of(component)][2], 2)
    tensors = {tensor.name: tensor for tensor in gguf_tensors(file, "")}
    raw = file.read_bytes()
    for name, parameter in reference.named_parameters():
        path, _, suffix = name.rpartition(".")
        original = names.get_name(path) or names.get_name(f"model.{path}")
        entry = tensors[f"{original}.{suffix}"]
        data = torch.frombuffer(
            bytearray(raw[entry.begin : entry.begin + entry.nbytes]),
            dtype=getattr(torch, entry.dtype),
        ).reshape(entry.shape)
        numbers = dequantized(data, entry.quant) if entry.quant else data
        parameter.data = as_transformers_has_it(component, entry.name, numbers).to(parameter.dtype)
    module = filled(component, graph)
    ids = torch.arange(24).reshape(1, 24) % 96
    with torch.no_grad():
        output, expected = module(ids)[0], reference(ids)[0]
    assert expected.isfinite().all()
    assert torch.equal(output, expected)


def kind_of(component: Component) -> str:
    return next(name for name, case in CASES.items() if case[0] == component.class_path)


def test_the_linear_layers_stay_quantized(encoder: tuple[Component, Graph, Path]) -> None:
    component, graph, file = encoder
    module, _ = draft(component, graph, "Q4_0")
    bytes_by_dtype: Mapping[Any, int] = {
        dtype: sum(p.nbytes for p in module.parameters() if p.dtype == dtype)
        for dtype in (torch.uint8, torch.bfloat16)
    }
    assert bytes_by_dtype[torch.uint8] > 0
    plain = build(replace(component.without_checkpoints(), precision=("bfloat16",)), graph)
    layers = quantizable_layers(plain, torch.bfloat16)
    quantized = sum(layer.weight.nbytes for layer in layers.values())
    assert bytes_by_dtype[torch.uint8] < 0.6 * quantized
    content = content_of(component, plain, file, "Q4_0")
    assert content.pieces.keys() == plain.state_dict().keys()
