"""Quantized layers: the same tensors and results as bitsandbytes' own, quantized one weight at a
time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from graphrun.modules.blocks import lay_out
from graphrun.modules.quantize import (
    convert,
    ill_suited,
    normalize_quantized_layers,
    quantizable_layers,
    quantized,
)
from graphrun.modules.sources import RandomSource, Writer

bnb = pytest.importorskip("bitsandbytes")
functional = bnb.functional


class Two(nn.Module):
    _keep_in_fp32_modules = ("fp32",)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(128, 96)
        self.fp32 = nn.Linear(96, 64)
        self.norm = nn.LayerNorm(64)
        self.to(torch.bfloat16).requires_grad_(False).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.norm(self.fp32(self.first(x)))
        return output


def with_weights(precision: str) -> tuple[nn.Module, nn.Module]:
    """A converted module with its weights, and a plain one with the same."""
    plain = Two()
    module = Two()
    source = RandomSource(plain, "seed")
    for name, parameter in plain.named_parameters():
        source.read_into(name, parameter.data)
    shapes = {
        f"{path}.weight": (layer.weight.shape, layer.weight.dtype)
        for path, layer in quantizable_layers(module, torch.bfloat16).items()
    }
    convert(module, precision, torch.bfloat16)
    layout = lay_out(module, [])[""]
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
    Writer(source, precision, shapes).write(layout, buffer)
    for entry in layout.entries:
        view = (
            buffer[entry.offset : entry.offset + entry.nbytes]
            .view(entry.tensor.dtype)
            .view(entry.tensor.shape)
        )
        new_layer: Any = (
            nn.Parameter(view, requires_grad=False)
            if isinstance(entry.tensor, nn.Parameter)
            else view
        )
        new_layer.__dict__.update(entry.tensor.__dict__)
        for location in entry.locations:
            location.assign(new_layer)
    return module, plain


def of_bitsandbytes(layer: nn.Linear, precision: str) -> nn.Module:
    new_layer: Any
    if precision == "nf4":
        new_layer = bnb.nn.Linear4bit(128, 96, True, torch.bfloat16, False, "nf4")
        new_layer.weight = bnb.nn.Params4bit(
            layer.weight.data, False, quant_type="nf4", compress_statistics=False, module=new_layer
        )
    else:
        new_layer = bnb.nn.Linear8bitLt(128, 96, True, has_fp16_weights=False, threshold=6.0)
        new_layer.weight = bnb.nn.Int8Params(
            layer.weight.data, has_fp16_weights=False, requires_grad=False
        )
    new_layer.bias = nn.Parameter(layer.bias.data, requires_grad=False)
    new_layer = new_layer.to("cpu").eval()
    normalize_quantized_layers(new_layer)
    return new_layer


@pytest.mark.parametrize("precision", ["nf4", "int8"])
def test_a_layer_computes_bit_for_bit_as_bitsandbytes_own(precision: str) -> None:
    module, plain = with_weights(precision)
    other = of_bitsandbytes(plain.first, precision)
    x = torch.randn(5, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        actual, expected, exact = module.first(x), other(x), plain.first(x)
    assert torch.equal(actual, expected)
    assert 0 < (actual - exact).float().norm() / exact.float().norm() < 0.15


@pytest.mark.parametrize(("inputs", "wrong"), [(96, True), (64, False), (160, True), (128, False)])
def test_layers_that_the_cpu_dequantizes_wrongly_are_named(inputs: int, wrong: bool) -> None:
    weight = torch.randn(64, inputs, generator=torch.Generator().manual_seed(1))
    tensors = quantized(weight.bfloat16(), "nf4")
    values = tensors["code"][
        torch.stack([tensors["data"].view(-1) >> 4, tensors["data"].view(-1) & 15], -1)
        .view(-1)
        .long()
    ]
    right = (values.view(-1, 64) * tensors["absmax"].view(-1, 1)).view(64, inputs)
    state = functional.QuantState(
        tensors["absmax"], right.shape, tensors["code"], 64, "nf4", torch.float32
    )
    actual = functional.dequantize_4bit(tensors["data"], state)
    wrong = wrong and torch.backends.cpu.get_cpu_capability() == "AVX512"
    assert torch.allclose(actual, right) is not wrong, (
        "bitsandbytes has fixed this: remove the warning"
    )
    module = nn.Sequential(nn.Linear(inputs, 64, dtype=torch.bfloat16))
    convert(module, "nf4", torch.bfloat16)
    reason = ill_suited(module, "transformer")
    assert bool(reason) is wrong
    assert not wrong or reason.startswith(f"transformer.0 has rows of {inputs} elements in nf4")


def test_fp8_weights_take_one_byte_and_compute_in_the_inputs_dtype() -> None:
    module, plain = with_weights("fp8")
    assert module.first.weight.dtype == torch.float8_e4m3fn
    x = torch.randn(5, 128, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = nn.functional.linear(
            x, plain.first.weight.to(torch.float8_e4m3fn).to(torch.bfloat16), plain.first.bias
        )
        assert torch.equal(module.first(x), expected)


def test_modules_kept_in_fp32_and_other_layers_stay() -> None:
    module, plain = with_weights("nf4")
    assert list(quantizable_layers(plain, torch.bfloat16)) == ["first"]
    assert type(module.fp32) is nn.Linear
    assert torch.equal(module.fp32.weight, plain.fp32.weight)
    assert torch.equal(module.norm.weight, plain.norm.weight)
    assert torch.equal(module.first.bias, plain.first.bias)


def test_the_output_embedding_and_last_module_of_transformers_models_stay() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=50,
    )
    layers = quantizable_layers(LlamaForCausalLM(config), torch.float32)
    assert "lm_head" not in layers
    assert "model.layers.0.mlp.up_proj" in layers
