"""Quantized linear layers: which layers of a component are replaced, which tensors they hold, and
how a weight is quantized.

int8 and nf4 are bitsandbytes'. CPU and meta only; weights come from a `sources.Source`.

    nf4     weight -> data [n/2 1] uint8 | absmax, fp32 per 64 elements | code, 16 values
    computes in the component's dtype int8    weight -> CB [out in] int8   | SCB, fp32 per output
    feature                          outliers (6 and above) in 16 bits fp8     weight ->
    float8_e4m3fn    (| scale, fp32 per row, where a file has one)             cast back in every
    call gguf    rows of bytes of a GGUF type, as stored in the file
    dequantized in every call
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from graphrun.modules.gguf import dequantized

BLOCK = 64  # elements per absmax: bitsandbytes' default
# Outlier threshold of activations in LLM.int8 (Dettmers et al. 2022, section 3.2), the default of
# transformers and diffusers.
THRESHOLD = 6.0


def quantizable_layers(module: nn.Module, own: torch.dtype) -> dict[str, nn.Linear]:
    """The linear layers of ``module`` that a quantized precision replaces, by path: those of dtype
    ``own`` whose weight is not shared.

    Excludes the same layers as the libraries: modules that a class keeps in fp32 in any precision
    (`_keep_in_fp32_modules`), and in transformers' models the output embedding and the last module
    (`transformers.quantizers.base.get_keys_to_not_convert`).
    """
    users = Counter(
        id(parameter) for child in module.modules() for parameter in child._parameters.values()
    )
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
    rows: Mapping[str, tuple[str, int]] = MappingProxyType({}),
    scaled: Collection[str] = (),
) -> None:
    """Replaces `quantizable_layers` by layers of ``precision`` whose weights are on meta, with
    their final shapes.

    ``rows``: for gguf, the type and bytes per row of each weight that the file has quantized; other
    layers stay. ``scaled``: for fp8, the weights that have a scale. Biases stay as they are.
    """
    for path, layer in quantizable_layers(module, own).items():
        name = f"{path}.weight"
        if precision == "gguf" and name not in rows:
            continue
        new = (
            gguf_linear(layer, own, *rows[name])
            if precision == "gguf"
            else _layer(layer, precision, own)
        )
        if name in scaled:
            new.register_parameter(
                "scale",
                nn.Parameter(
                    torch.empty(layer.out_features, 1, device="meta"), requires_grad=False
                ),
            )
        module.set_submodule(path, new)


def quantized(weight: torch.Tensor, precision: str) -> dict[str, torch.Tensor]:
    """The tensors of ``weight`` [out in] in ``precision`` (nf4 or int8), by field, as bitsandbytes
    computes them."""
    from bitsandbytes import functional

    if precision == "nf4":
        data, state = functional.quantize_4bit(
            weight.contiguous(),
            blocksize=BLOCK,
            compress_statistics=False,
            quant_type="nf4",
            quant_storage=torch.uint8,
        )
        return {"data": data, "absmax": state.absmax, "code": state.code}
    values, scales, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
    return {"CB": values, "SCB": scales}


def normalize_quantized_layers(module: nn.Module) -> None:
    """Brings bitsandbytes layers that were quantized elsewhere into the state that `blocks.lay_out`
    expects.

    8-bit layers move their scales to their state, as they would in their first call. 4-bit layers
    must never repack their weights for the CPU.
    """
    child: Any
    for child in module.modules():
        if (
            callable(getattr(child, "init_8bit_state", None))
            and getattr(child.weight, "CB", None) is not None
        ):
            child.init_8bit_state()
        if hasattr(child, "support_avx512bf16_for_cpu"):
            child.support_avx512bf16_for_cpu = False


def ill_suited(module: nn.Module, component: str) -> str:
    """Why ``module``, which has nf4 layers and is called ``component``, computes wrong results on
    the CPU; "" where it does not.

    bitsandbytes 0.50's CPU kernel (`dequantize_4bit` in its backends/cpu/ops.py) starts a new
    absmax block at each row, while weights are quantized without regard to rows. Measured on
    normally distributed weights: mean error 0.18 instead of 0.07 for rows of 96.
    """
    found: Any
    for path, found in module.named_modules():
        if hasattr(getattr(found, "weight", None), "quant_state") and found.in_features % BLOCK:
            return (
                f"{component}.{path} has rows of {found.in_features} elements in nf4, and bitsandbytes dequantizes rows that are "
                f"not a multiple of {BLOCK} wrongly on the CPU, where sim computes: outputs differ from those of a GPU; "
                "use another precision where the output matters"
            )
    return ""


def _layer(layer: nn.Linear, precision: str, own: torch.dtype) -> nn.Linear:
    """The layer of ``precision`` (fp8, nf4 or int8) that replaces ``layer``, with its weight on
    meta."""
    from bitsandbytes import nn as layers
    from bitsandbytes.functional import QuantState

    outputs, inputs, bias = layer.out_features, layer.in_features, layer.bias
    made: Any
    if precision == "fp8":
        made = _Fp8Linear(
            inputs, outputs, bias is not None, device="meta", dtype=torch.float8_e4m3fn
        )
        weight: Any = made.weight
    elif precision == "nf4":
        count = outputs * inputs
        made = layers.Linear4bit(
            inputs, outputs, bias is not None, own, False, "nf4", device="meta"
        )
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
        made = layers.Linear8bitLt(
            inputs,
            outputs,
            bias is not None,
            has_fp16_weights=False,
            threshold=THRESHOLD,
            device="meta",
        )
        weight = nn.Parameter(
            torch.empty(outputs, inputs, dtype=torch.int8, device="meta"), requires_grad=False
        )
        weight.CB = weight.SCB = None  # so that the layer uses those of its state
        made.state.CB, made.state.SCB = (
            weight,
            torch.empty(outputs, dtype=torch.float32, device="meta"),
        )
    return _with_tensors(made, weight, bias)


def _with_tensors(made: nn.Linear, weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    """``made`` with this weight and bias, frozen and in eval mode."""
    made._parameters["weight"], made._parameters["bias"] = weight, bias
    return made.requires_grad_(False).eval()


class _Linear(nn.Linear):
    """A linear layer that computes its weight in each call."""

    def reset_parameters(self) -> None:
        """Does nothing: the values are set later."""


class _Fp8Linear(_Linear):
    """A linear layer with an 8-bit weight that is cast in each call, as diffusers' layerwise
    casting does.

    Where the file has a scale, the cast weight is multiplied by it in the compute dtype (ComfyUI's
    scaled fp8).
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(input.dtype)
        if (scale := self._parameters.get("scale")) is not None:
            weight *= scale.to(input.dtype)
        return nn.functional.linear(input, weight, self.bias)


class _GgufLinear(_Linear):
    """A linear layer whose weight is rows of bytes of a GGUF type, dequantized in each call;
    computes the same as diffusers' `GGUFLinear`.

    The weight is a plain parameter. diffusers' parameter subclass cannot be a view of a block's
    buffer.
    """

    kind: str  # of the weight
    own: torch.dtype  # in which it computes

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(
            input, dequantized(self.weight, self.kind).to(self.own), self.bias
        )


def gguf_linear(layer: nn.Linear, own: torch.dtype, kind: str, row_bytes: int) -> nn.Linear:
    """A layer on meta that replaces ``layer`` and computes in ``own`` with a weight of type
    ``kind``, ``row_bytes`` per row."""
    made = _GgufLinear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    made.kind, made.own = kind, own
    weight = torch.empty(layer.out_features, row_bytes, dtype=torch.uint8, device="meta")
    return _with_tensors(made, nn.Parameter(weight, requires_grad=False), layer.bias)


def _last_of_transformers(module: nn.Module) -> set[str]:
    """Paths of the output embedding and of the last module of a transformers model; empty for
    others."""
    if getattr(module, "config_class", None) is None or not hasattr(
        module, "get_output_embeddings"
    ):
        return set()
    names = [name for name, _ in module.named_parameters()]
    model: Any = module
    output = model.get_output_embeddings()
    found = {
        path for path, child in module.named_modules() if output is not None and child is output
    }
    return found | {names[-1].rpartition(".")[0]} if names else found
