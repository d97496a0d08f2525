"""Attached pipelines with components quantized by bitsandbytes: placed field by field, released,
restored on detach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import BitsAndBytesConfig, UNet2DConditionModel
from diffusers.quantizers.bitsandbytes import (
    BnB4BitDiffusersQuantizer,
    BnB8BitDiffusersQuantizer,
)
from test_attach_pipelines import equal, weight_bytes
from tiny_pipelines import Case, cases
from torch import nn

import graphrun
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.sim import Machine

bnb = pytest.importorskip("bitsandbytes")
SDXL: Case = cases()["StableDiffusionXLPipeline"]


def quantized(module: nn.Module, precision: str) -> None:
    """The linear layers of ``module`` replaced by bitsandbytes' own, as its loaders do."""
    for path, child in list(module.named_modules()):
        if type(child) is not nn.Linear or child.in_features % 64:
            continue
        size: Any = (child.in_features, child.out_features, child.bias is not None)
        if precision == "int8":
            layer = bnb.nn.Linear8bitLt(*size, has_fp16_weights=False, threshold=6.0)
            layer.weight = bnb.nn.Int8Params(
                child.weight.data, has_fp16_weights=False, requires_grad=False
            )
        else:
            layer = bnb.nn.Linear4bit(*size, child.weight.dtype, precision == "nf4 twice", "nf4")
            layer.weight = bnb.nn.Params4bit(
                child.weight.data, False, quant_type="nf4", module=layer
            )
            layer.weight.compress_statistics = precision == "nf4 twice"
            layer.support_avx512bf16_for_cpu = False
        if child.bias is not None:
            layer.bias = child.bias
        parent, _, key = path.rpartition(".")
        setattr(module.get_submodule(parent), key, layer.to("cpu").eval())
    module.requires_grad_(False)


def built(precision: str) -> Any:
    pipe = SDXL.build()
    quantized(pipe.unet, precision)
    quantized(pipe.text_encoder_2, precision)
    return pipe


@pytest.mark.sweep("more", sample=1)
@pytest.mark.parametrize("precision", ["int8", "nf4", "nf4 twice"])
def test_quantized_components_are_placed_and_released(precision: str) -> None:
    want, pipe, device = SDXL.call(built(precision)), built(precision), SimulatedDevice(Machine())
    kinds = {path: type(child) for path, child in pipe.unet.named_modules()}
    assert any(kind.__module__.startswith("bitsandbytes") for kind in kinds.values())
    with graphrun.attach(pipe, vram=int(0.95 * weight_bytes(pipe)), device=device) as attachment:
        peaks = []
        for _ in range(3):
            assert equal(SDXL.call(pipe), want)
            assert attachment.replans == ()
            assert device.allocated_bytes == attachment.held_bytes
            assert attachment.trace is not None
            peaks.append(attachment.trace.peak_bytes)
    assert peaks[1] == peaks[2], "steady"
    assert {path: type(child) for path, child in pipe.unet.named_modules()} == kinds
    assert equal(SDXL.call(pipe), want)


@pytest.mark.sweep("more")
@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_a_component_that_diffusers_quantized_is_attached_once_it_is_on_the_cpu(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = SDXL.build()
    pipe.unet.save_pretrained(tmp_path)
    # the loader, on a machine without a GPU
    for quantizer in (BnB4BitDiffusersQuantizer, BnB8BitDiffusersQuantizer):
        monkeypatch.setattr(quantizer, "validate_environment", lambda *_, **_options: None)
        monkeypatch.setattr(quantizer, "update_device_map", lambda *_: {"": "cpu"})
    load_options = (
        {"load_in_8bit": True}
        if precision == "int8"
        else {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": torch.float32,
        }
    )
    unet = UNet2DConditionModel.from_pretrained(
        tmp_path, quantization_config=BitsAndBytesConfig(**load_options), torch_dtype=torch.float32
    )
    assert unet.hf_device_map == {"": "cpu"}, "accelerate notes where it loaded the component"
    unet.hf_device_map = {"": "cuda:0"}  # with a GPU, also after unet.to("cpu")
    pipe.unet = unet
    with graphrun.attach(pipe, vram=weight_bytes(pipe), device="sim") as attachment:
        SDXL.call(pipe)
        assert attachment.trace is not None


class WrappedTensor(torch.Tensor):
    """A weight that stands for several tensors, as torchao's and quanto's do."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data"], None


REFUSED = (
    "has weights of .*{name}, each made of several tensors, which cannot be placed: load it in 16 "
    "bits or quantized by bitsandbytes, or, for torchao's Int8WeightOnlyConfig and "
    r"Float8WeightOnlyConfig, save the pipeline \(save_pretrained\) and type graphrun import FOLDER"
)


def test_weights_made_of_several_tensors_are_refused_with_what_to_type() -> None:
    pipe = SDXL.build()
    layer = pipe.unet.time_embedding.linear_1
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(WrappedTensor), False)
    refusal = f"unet {REFUSED.format(name='WrappedTensor')}"
    with pytest.raises(graphrun.InputError, match=refusal):
        graphrun.attach(pipe, vram="64M", device="sim")
    with pytest.raises(graphrun.InputError, match=refusal):
        graphrun.from_pipeline(pipe)
    assert SDXL.call(pipe) is not None, "the pipeline is as it was"


@pytest.mark.parametrize(
    ("config", "name"),
    [("Int8WeightOnlyConfig", "Int8Tensor"), ("Float8WeightOnlyConfig", "Float8Tensor")],
)
def test_what_torchao_quantized_is_refused_by_name(config: str, name: str) -> None:
    """Needs `pip install torchao==0.18.0`, which slows every import of diffusers."""
    quantization = pytest.importorskip("torchao.quantization")
    pipe = SDXL.build()
    quantization.quantize_(pipe.unet, getattr(quantization, config)())
    with pytest.raises(graphrun.InputError, match=f"unet {REFUSED.format(name=name)}"):
        graphrun.attach(pipe, vram="64M", device="sim")
