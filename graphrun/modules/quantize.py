"""Quantized linear layers: which layers are replaced, their tensors, and how weights are quantized.

int8 and nf4 are those of bitsandbytes, int8wo and fp8wo those of torchao. CPU and meta only;
weights come from a `sources.Source`.

    nf4     weight -> data [n/2 1] uint8 | absmax, fp32 per 64 elements | code, 16 values
                                                          computes in the component's dtype
    int8    weight -> CB [out in] int8   | SCB, fp32 per output feature
                                                          outliers (6 and above) in 16 bits
    fp8     weight -> float8_e4m3fn      (| scale, fp32 per row, if the file has one)
                                                          cast back in every call
    int8wo  weight -> int8           | scale, fp32 per output feature
    fp8wo   weight -> float8_e4m3fn  | scale, fp32 per output feature
                                                          torchao's: cast in every call
    gguf    rows of bytes of a GGUF type, as stored in the file
                                                          dequantized in every call
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from graphrun.graph.precisions import ONLY_IN_FILES, is_gguf
from graphrun.modules.gguf import dequantized
from graphrun.modules.trees import modules_below, named_modules_below

BLOCK = 64  # elements per absmax: bitsandbytes' default
# outlier threshold of activations in LLM.int8 (Dettmers et al. 2022, section 3.2), the default of
# transformers and diffusers
THRESHOLD = 6.0


def quantizable_layers(module: nn.Module, dtype: torch.dtype) -> dict[str, nn.Linear]:
    """Return the linear layers of ``module`` that a quantized precision replaces, by path.

    They have dtype ``dtype`` and a weight that is not shared. Excludes the same layers as the
    libraries: modules that a class keeps in fp32 in any precision (`_keep_in_fp32_modules`), and in
    transformers' models the output embedding and the last module
    (`transformers.quantizers.base.get_keys_to_not_convert`).
    """
    users = Counter(
        id(parameter) for child in modules_below(module) for parameter in child._parameters.values()
    )
    fp32_modules = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    last = _last_of_transformers(module)
    return {
        path: child
        for path, child in named_modules_below(module)
        if isinstance(child, nn.Linear)
        and child.weight.dtype == dtype
        and users[id(child.weight)] == 1
        and fp32_modules.isdisjoint(path.split("."))
        and path not in last
    }


def convert(
    module: nn.Module,
    precision: str,
    dtype: torch.dtype,
    rows: Mapping[str, tuple[str, int]] = MappingProxyType({}),
    scaled: Collection[str] = (),
    packed: Collection[str] | None = None,
) -> None:
    """Replace `quantizable_layers` by layers of ``precision``, on meta in final shapes.

    ``rows``: for gguf, the type and bytes per row of each weight that is quantized in the file;
    other layers stay. ``scaled``: for fp8, the weights that have a scale. ``packed``: for
    other precisions, the weights that are quantized in the files; None: all are quantized when
    they are read. Biases stay.
    """
    for path, layer in quantizable_layers(module, dtype).items():
        name = f"{path}.weight"
        if is_gguf(precision) and name not in rows:
            continue
        if packed is not None and name not in packed:
            continue
        new = (
            gguf_linear(layer, dtype, *rows[name])
            if is_gguf(precision)
            else _layer(layer, precision, dtype)
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
    """Return the tensors of ``weight`` [out in] in ``precision`` (nf4 or int8), by field."""
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


def quantized_in_parts(
    weight: torch.Tensor, precision: str, device: torch.device, most_elements: int
) -> dict[str, torch.Tensor]:
    """Return `quantized` on the host, computed on ``device`` from parts of whole rows.

    A part has at most ``most_elements``, except where one row (of nf4: rows whose elements are a
    multiple of BLOCK) has more. Bits equal those of the whole, since statistics are of rows (int8)
    or of BLOCK elements (nf4).
    """
    outputs, inputs = weight.shape
    unit = BLOCK // math.gcd(BLOCK, inputs) if precision == "nf4" else 1  # rows of whole blocks
    rows = unit * max(1, most_elements // (unit * inputs))
    parts = []
    for start in range(0, outputs, rows):
        fields = quantized(weight[start : start + rows].to(device), precision)
        parts.append({name: tensor.to("cpu") for name, tensor in fields.items()})
    if len(parts) == 1:
        return parts[0]
    return {
        name: parts[0][name] if name == "code" else torch.cat([part[name] for part in parts])
        for name in parts[0]
    }


def normalize_quantized_layers(module: nn.Module) -> None:
    """Bring bitsandbytes layers quantized elsewhere into the state that `blocks.lay_out` expects.

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
    """Return why ``module``, the nf4 ``component``, computes wrong results on the CPU, or "".

    On a CPU with AVX-512, the kernel of bitsandbytes 0.50 (`dequantize_4bit` in its
    backends/cpu/ops.py) starts a new absmax block at each row, while weights are quantized without
    regard to rows. Measured on normally distributed weights: mean error 0.18 instead of 0.07 for
    rows of 96; 0.07 on a CPU with AVX2.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return ""
    layer: Any
    for path, layer in module.named_modules():
        if hasattr(getattr(layer, "weight", None), "quant_state") and layer.in_features % BLOCK:
            return (
                f"{component}.{path} has rows of {layer.in_features} elements in nf4, and "
                "bitsandbytes dequantizes rows that are "
                f"not a multiple of {BLOCK} wrongly on the CPU, where sim computes: outputs "
                "differ from those of a GPU; "
                "use another precision where the output matters"
            )
    return ""


def _layer(layer: nn.Linear, precision: str, dtype: torch.dtype) -> nn.Linear:
    """Return the layer of ``precision``, not gguf, that replaces ``layer``, on meta."""
    from bitsandbytes import nn as layers
    from bitsandbytes.functional import QuantState

    outputs, inputs, bias = layer.out_features, layer.in_features, layer.bias
    new_layer: Any
    weight: Any
    if precision in ONLY_IN_FILES:
        kind, element = (
            (_Int8RowsLinear, torch.int8)
            if precision == "int8wo"
            else (_Fp8RowsLinear, torch.float8_e4m3fn)
        )
        new_layer = kind(inputs, outputs, bias is not None, device="meta")
        data = torch.empty(outputs, inputs, dtype=element, device="meta")
        weight = nn.Parameter(data, requires_grad=False)
        scale = torch.empty(outputs, 1, dtype=torch.float32, device="meta")
        new_layer.register_parameter("scale", nn.Parameter(scale, requires_grad=False))
    elif precision == "fp8":
        new_layer = _Fp8Linear(
            inputs, outputs, bias is not None, device="meta", dtype=torch.float8_e4m3fn
        )
        weight = new_layer.weight
    elif precision == "nf4":
        count = outputs * inputs
        new_layer = layers.Linear4bit(
            inputs, outputs, bias is not None, dtype, False, "nf4", device="meta"
        )
        new_layer.support_avx512bf16_for_cpu = False
        state = QuantState(
            absmax=torch.empty(-(-count // BLOCK), dtype=torch.float32, device="meta"),
            shape=torch.Size((outputs, inputs)),
            code=torch.empty(16, dtype=torch.float32, device="meta"),
            blocksize=BLOCK,
            quant_type="nf4",
            dtype=dtype,
        )
        data = torch.empty(-(-count // 2), 1, dtype=torch.uint8, device="meta")
        weight = nn.Parameter(data, requires_grad=False)
        weight.quant_state, weight.bnb_quantized, new_layer.quant_state = state, True, state
    else:
        new_layer = layers.Linear8bitLt(
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
        new_layer.state.CB, new_layer.state.SCB = (
            weight,
            torch.empty(outputs, dtype=torch.float32, device="meta"),
        )
    return _with_tensors(new_layer, weight, bias)


def _with_tensors(layer: nn.Linear, weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    layer._parameters["weight"], layer._parameters["bias"] = weight, bias
    return layer.requires_grad_(False).eval()


class _Linear(nn.Linear):
    """A linear layer that computes its weight in each call."""

    def reset_parameters(self) -> None:
        """Do nothing: the values are set later."""


class _Fp8Linear(_Linear):
    """A linear layer with an 8-bit weight, cast in each call, like diffusers' layerwise casting.

    If the file has a scale, the cast weight is multiplied by it in the compute dtype (ComfyUI's
    scaled fp8).
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(input.dtype)
        if (scale := self._parameters.get("scale")) is not None:
            weight *= scale.to(input.dtype)
        return nn.functional.linear(input, weight, self.bias)


class _Int8RowsLinear(_Linear):
    """A linear layer with int8 weights that scales its product, as torchao's `Int8Tensor`."""

    scale: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product = torch.mm(input.reshape(-1, input.shape[-1]), self.weight.t().to(input.dtype))
        product = product * self.scale.to(input.dtype).flatten()
        product = product.reshape(*input.shape[:-1], self.out_features)
        if self.bias is not None:
            product += self.bias
        return product


class _Fp8RowsLinear(_Linear):
    """A linear layer with 8-bit weights, scaled in fp32 in each call, as torchao's
    `Float8Tensor`."""

    scale: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = (self.weight.t().to(torch.float32) * self.scale.t()).to(input.dtype)
        product = torch.matmul(input, weight)
        return product if self.bias is None else product + self.bias


class _GgufLinear(_Linear):
    """A linear layer with a GGUF weight, dequantized in each call, as in diffusers' `GGUFLinear`.

    The weight is a plain parameter of rows of bytes, because diffusers' parameter subclass cannot
    be a view of a block's buffer.
    """

    kind: str  # of the weight
    compute_dtype: torch.dtype

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(
            input, dequantized(self.weight, self.kind).to(self.compute_dtype), self.bias
        )


def gguf_linear(layer: nn.Linear, dtype: torch.dtype, kind: str, row_bytes: int) -> nn.Linear:
    """Return a layer on meta, computing in ``dtype``, that replaces ``layer``; its weight is of
    type ``kind``, with ``row_bytes`` per row."""
    new_layer = _GgufLinear(
        layer.in_features, layer.out_features, layer.bias is not None, device="meta"
    )
    new_layer.kind, new_layer.compute_dtype = kind, dtype
    weight = torch.empty(layer.out_features, row_bytes, dtype=torch.uint8, device="meta")
    return _with_tensors(new_layer, nn.Parameter(weight, requires_grad=False), layer.bias)


def _last_of_transformers(module: nn.Module) -> set[str]:
    """Return the paths of the output embedding and the last module of a transformers model; none
    for other models."""
    if getattr(module, "config_class", None) is None or not hasattr(
        module, "get_output_embeddings"
    ):
        return set()
    names = [name for name, _ in module.named_parameters()]
    model: Any = module
    output = model.get_output_embeddings()
    paths = {
        path
        for path, child in named_modules_below(module)
        if output is not None and child is output
    }
    return paths | {names[-1].rpartition(".")[0]} if names else paths
