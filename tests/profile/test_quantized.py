"""Weights by precision: the formulas compared with real bitsandbytes layers, quantized on the
CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from graphrun.modules.quantize import quantizable_layers
from graphrun.profile.quantized import layer_tensors, weights_by_precision
from graphrun.units import GIB

bnb = pytest.importorskip("bitsandbytes")
SHAPES = [(96, 64), (100, 70), (4096, 33), (1, 1), (640, 2048), (17, 4099)]


def tensors_of_nf4(layer: Any) -> list[torch.Tensor]:
    state = layer.weight.quant_state
    tensors = [layer.weight.data, state.absmax, state.code]
    if state.nested:
        tensors += [state.offset, state.state2.absmax, state.state2.code]
    return tensors


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_nf4_is_what_bitsandbytes_makes(outputs: int, inputs: int) -> None:
    layer = bnb.nn.Linear4bit(
        inputs, outputs, bias=False, quant_type="nf4", compress_statistics=False
    )
    weight = torch.randn(outputs, inputs, dtype=torch.bfloat16)
    layer.weight = bnb.nn.Params4bit(
        weight, requires_grad=False, quant_type="nf4", compress_statistics=False
    )
    layer = layer.to("cpu")
    assert sum(layer_tensors(outputs, inputs, "nf4")) == sum(
        t.nbytes for t in tensors_of_nf4(layer)
    )


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_int8_is_what_bitsandbytes_makes(outputs: int, inputs: int) -> None:
    layer = bnb.nn.Linear8bitLt(inputs, outputs, bias=False, has_fp16_weights=False)
    layer.weight = bnb.nn.Int8Params(
        torch.randn(outputs, inputs).half(), requires_grad=False, has_fp16_weights=False
    )
    layer = layer.to("cpu")
    assert (
        sum(layer_tensors(outputs, inputs, "int8"))
        == layer.weight.data.nbytes + layer.weight.SCB.nbytes
    )


def test_weights_of_a_module_are_the_sum_of_its_layers() -> None:
    module = nn.Sequential(
        nn.Embedding(10, 64), nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64, bias=False)
    ).bfloat16()
    unblocked = 10 * 64 + 96 + 2 * 96
    linear = 64 * 96 + 96 * 64
    weights = weights_by_precision(module, "bfloat16")
    assert [weights[p] for p in ("bfloat16", "float16", "float32")] == [
        n * (unblocked + linear) for n in (2, 2, 4)
    ]
    assert weights["int8"] == 2 * unblocked + linear + 4 * (96 + 64)
    assert weights["nf4"] == 2 * unblocked + 2 * sum(layer_tensors(64, 96, "nf4"))


def test_tied_layers_and_layers_of_another_dtype_are_not_quantized() -> None:
    embedding, head, linear = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False), nn.Linear(8, 8)
    head.weight = embedding.weight
    module = nn.ModuleList([embedding.bfloat16(), head.bfloat16(), linear.float()])
    assert quantizable_layers(module, torch.bfloat16) == {}
    assert weights_by_precision(module, "bfloat16")["nf4"] == 2 * 80 + 4 * 72


def test_t5_in_fp16_keeps_wo_in_fp32(dry: Any) -> None:
    from dataclasses import replace

    from graphrun.modules.build import meta_module

    graph, _, _ = dry("flux-dev")
    half = meta_module(replace(graph.components["text_encoder_2"], dtype="float16"), graph.trust)
    whole = meta_module(graph.components["text_encoder_2"], graph.trust)
    sizes = [weights_by_precision(m, d)[d] for m, d in ((half, "float16"), (whole, "bfloat16"))]
    assert sizes[0] - sizes[1] == 1.875 * GIB
