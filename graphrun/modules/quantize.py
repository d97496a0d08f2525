"""Quantized layers: which layers of a component become one, what they hold, and how a weight is turned into it.

Decides what int8, nf4 (both bitsandbytes'), fp8 and gguf mean for a module. Must not know devices other than the CPU, plans, or
where weights come from.

    nf4     weight -> data [n/2 1] uint8 | absmax, fp32 per 64 elements | code, 16 values        computes in the component's dtype
    int8    weight -> CB [out in] int8   | SCB, fp32 per output feature                          outliers (6 and above) in 16 bits
    fp8     weight -> float8_e4m3fn    (| scale, fp32 per row, where a file has one)             cast back in every call
    gguf    rows of bytes of a GGUF type, as a file has them                                     made numbers in every call
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from graphrun.modules.gguf import dequantized

BLOCK = 64  # elements to a maximum: bitsandbytes' own default
THRESHOLD = 6.0  # LLM.int8's, of activations (Dettmers et al. 2022, section 3.2), as transformers and diffusers take it


def quantizable_layers(module: nn.Module, own: torch.dtype) -> dict[str, nn.Linear]:
    """The linear layers of ``module`` that int8 and nf4 replace, by path: those of dtype ``own`` whose weight nothing shares.

    Left out as the libraries do: what a class keeps in fp32 in any precision (`_keep_in_fp32_modules`), and of transformers' models
    the output embedding and the last module (`transformers.quantizers.base.get_keys_to_not_convert`).
    """
    users: dict[int, int] = {}
    for child in module.modules():
        for parameter in child._parameters.values():
            if parameter is not None:
                users[id(parameter)] = users.get(id(parameter), 0) + 1
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    last = _last_of_transformers(module)
    return {
        path: child
        for path, child in module.named_modules()
        if isinstance(child, nn.Linear)
        and child.weight.dtype == own
        and users[id(child.weight)] == 1
        and not kept & set(path.split("."))
        and path not in last
    }


def convert(
    module: nn.Module,
    precision: str,
    own: torch.dtype,
    rows: Mapping[str, tuple[str, int]] | None = None,
    scaled: Collection[str] = (),
) -> tuple[str, ...]:
    """Replaces `quantizable_layers` by layers of ``precision`` whose weights are on meta, with the shapes that they will have.

    ``rows``: for gguf, the weights that the file has quantized, each with its type and bytes of a row; others stay. ``scaled``: for
    fp8, the weights that have a scale. Returns the names of the weights. Where the module is on the CPU, biases stay as they are.
    """
    made = []
    for path, layer in quantizable_layers(module, own).items():
        parent, _, key = path.rpartition(".")
        name = f"{path}.weight"
        if precision == "gguf":
            if rows is None or name not in rows:
                continue
            new = gguf_linear(layer, own, *rows[name])
        else:
            new = _layer(layer, precision, own)
        if name in scaled:
            new.register_parameter("scale", nn.Parameter(torch.empty(layer.out_features, 1, device="meta"), requires_grad=False))
        setattr(module.get_submodule(parent), key, new)
        made.append(f"{path}.weight")
    return tuple(made)


def quantized(weight: torch.Tensor, precision: str) -> dict[str, torch.Tensor]:
    """The tensors that hold ``weight`` [out in] in ``precision``, by field, as bitsandbytes makes them."""
    from bitsandbytes import functional

    if precision == "nf4":
        data, state = functional.quantize_4bit(
            weight.contiguous(), blocksize=BLOCK, compress_statistics=False, quant_type="nf4", quant_storage=torch.uint8
        )
        return {"data": data, "absmax": state.absmax, "code": state.code}
    values, scales, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
    return {"CB": values, "SCB": scales}


def settle_layers(module: nn.Module) -> None:
    """Layers that somebody else quantized hold what `lay_out` looks for: 8-bit ones move their scales to their state, as they would
    at their first call, and 4-bit ones never repack their weights for the CPU."""
    child: Any
    for child in module.modules():
        if callable(getattr(child, "init_8bit_state", None)) and getattr(child.weight, "CB", None) is not None:
            child.init_8bit_state()
        if hasattr(child, "support_avx512bf16_for_cpu"):
            child.support_avx512bf16_for_cpu = False


def ill_suited(module: nn.Module, component: str) -> str:
    """Why ``module``, which has nf4 layers and is called ``component``, computes wrongly on the CPU; "" where it does not.

    bitsandbytes 0.50's kernel for CPUs (`dequantize_4bit` in its backends/cpu/ops.py) takes a new maximum at each row's begin,
    while weights are quantized without regard to rows. Measured on normal weights: mean error 0.18 in place of 0.07 for rows of 96.
    """
    found: Any
    for path, found in module.named_modules():
        if hasattr(getattr(found, "weight", None), "quant_state") and found.in_features % BLOCK:
            return (
                f"{component}.{path} has rows of {found.in_features} elements in nf4, and bitsandbytes dequantizes rows that are "
                f"no multiple of {BLOCK} wrongly on the CPU, where sim computes: what comes out is not what a card makes; "
                "take another precision for pictures that count"
            )
    return ""


def _layer(layer: nn.Linear, precision: str, own: torch.dtype) -> nn.Linear:
    from bitsandbytes import nn as layers
    from bitsandbytes.functional import QuantState

    outputs, inputs, bias = layer.out_features, layer.in_features, layer.bias
    made: Any
    if precision == "fp8":
        made = _Fp8Linear(inputs, outputs, bias is not None, device="meta", dtype=torch.float8_e4m3fn)
        weight: Any = made.weight
    elif precision == "nf4":
        count = outputs * inputs
        made = layers.Linear4bit(inputs, outputs, bias is not None, own, False, "nf4", device="meta")
        made.support_avx512bf16_for_cpu = False
        state = QuantState(
            absmax=torch.empty(-(-count // BLOCK), dtype=torch.float32, device="meta"),
            shape=torch.Size((outputs, inputs)),
            code=torch.empty(16, dtype=torch.float32, device="meta"),
            blocksize=BLOCK,
            quant_type="nf4",
            dtype=own,
        )
        data = torch.empty(-(-count // 2), 1, dtype=torch.uint8, device="meta")
        weight = nn.Parameter(data, requires_grad=False)
        weight.quant_state, weight.bnb_quantized, made.quant_state = state, True, state
    else:
        made = layers.Linear8bitLt(inputs, outputs, bias is not None, has_fp16_weights=False, threshold=THRESHOLD, device="meta")
        weight = nn.Parameter(torch.empty(outputs, inputs, dtype=torch.int8, device="meta"), requires_grad=False)
        weight.CB = weight.SCB = None  # the layer looks here first; its state has them
        made.state.CB, made.state.SCB = weight, torch.empty(outputs, dtype=torch.float32, device="meta")
    made._parameters["weight"] = weight
    made._parameters["bias"] = bias
    quiet: nn.Linear = made.requires_grad_(False).eval()
    return quiet


class _Fp8Linear(nn.Linear):
    """A linear layer whose weight is stored in 8 bits and cast for each call, as diffusers' layerwise casting does for a layer;
    then scaled where the file has a scale (ComfyUI's scaled fp8: cast, then multiplied in the compute dtype)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(input.dtype)
        if (scale := self._parameters.get("scale")) is not None:
            weight *= scale.to(input.dtype)
        return nn.functional.linear(input, weight, self.bias)

    def reset_parameters(self) -> None:
        """Its values come later."""


class _GgufLinear(nn.Linear):
    """A linear layer whose weight is rows of bytes of a GGUF type, made numbers for each call: what diffusers' `GGUFLinear`
    computes. Its weight is a plain parameter: theirs, a subclass of one, cannot be a view of a block's buffer."""

    def __init__(self, like: nn.Linear, own: torch.dtype, kind: str) -> None:
        super().__init__(like.in_features, like.out_features, like.bias is not None, device="meta")
        self.kind, self.own = kind, own

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, dequantized(self.weight, self.kind).to(self.own), self.bias)

    def reset_parameters(self) -> None:
        """Its values come later."""


def gguf_linear(layer: nn.Linear, own: torch.dtype, kind: str, row_bytes: int) -> nn.Linear:
    """A layer in the place of ``layer`` that computes in ``own`` with a weight of type ``kind``, on meta."""
    made = _GgufLinear(layer, own, kind)
    weight = torch.empty(layer.out_features, row_bytes, dtype=torch.uint8, device="meta")
    made._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    made._parameters["bias"] = layer.bias
    quiet: nn.Linear = made.requires_grad_(False).eval()
    return quiet


def _last_of_transformers(module: nn.Module) -> set[str]:
    if getattr(module, "config_class", None) is None or not hasattr(module, "get_output_embeddings"):
        return set()
    names = [name for name, _ in module.named_parameters()]
    model: Any = module
    output = model.get_output_embeddings()
    found = {path for path, child in module.named_modules() if output is not None and child is output}
    return found | {names[-1].rpartition(".")[0]} if names else found
