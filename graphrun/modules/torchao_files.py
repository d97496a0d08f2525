"""Weights that torchao quantized, as diffusers and transformers save them in safetensors.

    x._weight_qdata        [out in] int8 (int8wo) or float8_e4m3fn (fp8wo)
    x._weight_scale        [out 1] fp32: one per row
    x._weight_zero_point   of int8wo: zeros, which no layer uses
    __metadata__           "x.weight": the class of torchao's tensor and its settings, JSON as text

These two formats are weight-only: activations stay in 16 bits. torchao itself is not needed; the
layers are in `graphrun.modules.quantize`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from graphrun.limits import LIMITS
from graphrun.modules.bitsandbytes_files import PackedWeight
from graphrun.modules.source_files import Stored
from graphrun.reading import open_regular, parse_json, safetensors_header

_DATA, _SCALE, _ZERO_POINT = "._weight_qdata", "._weight_scale", "._weight_zero_point"
# class of torchao's tensor -> precision, dtype of the data
_CLASSES = {"Int8Tensor": ("int8wo", "int8"), "Float8Tensor": ("fp8wo", "float8_e4m3fn")}
# classes of torchao's configurations, as in config.json -> precision
CONFIGS = {"Int8WeightOnlyConfig": "int8wo", "Float8WeightOnlyConfig": "fp8wo"}


def torchao_weights(tensors: Mapping[str, Stored]) -> dict[str, PackedWeight]:
    """Return the weights among ``tensors`` that torchao quantized, by name.

    Reads the metadata of their files. Raises ValueError and KeyError for damaged ones, and for a
    kind that graphrun does not compute with.
    """
    paths = [name.removesuffix(_DATA) for name in tensors if name.endswith(_DATA)]
    files = {tensors[f"{path}{_DATA}"].file for path in paths}
    kinds = {name: text for file in files for name, text in _metadata(file).items()}
    return {f"{path}.weight": _weight(path, kinds, tensors) for path in paths}


def _metadata(file: str) -> dict[str, Any]:
    with open_regular(Path(file)) as content:
        header = parse_json(safetensors_header(content, LIMITS.text_bytes)[1])
    return dict(header.get("__metadata__") or {})


def _weight(path: str, kinds: Mapping[str, Any], tensors: Mapping[str, Stored]) -> PackedWeight:
    weight, data, scale = f"{path}.weight", tensors[f"{path}{_DATA}"], tensors[f"{path}{_SCALE}"]
    kind = parse_json(str(kinds.get(weight, "{}")))
    try:
        name, settings = str(kind["_type"]), dict(kind["_data"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the metadata of {weight} is not of torchao's format") from error
    if name not in _CLASSES:
        raise ValueError(f"{weight} is a {name} of torchao; {' and '.join(_CLASSES)} work")
    if settings.get("act_quant_kwargs") is not None:
        raise ValueError(f"{weight} has torchao quantize activations; weight-only formats work")
    precision, dtype = _CLASSES[name]
    if data.dtype != dtype or len(data.shape) != 2:
        raise ValueError(f"{weight} is {list(data.shape)} {data.dtype}, not a matrix of {dtype}")
    if scale.dtype != "float32" or scale.shape != (data.shape[0], 1):
        raise ValueError(f"{scale.name} is {list(scale.shape)} {scale.dtype}, not fp32 per row")
    used_names = (data.name, scale.name, f"{path}{_ZERO_POINT}")
    return PackedWeight(
        precision,
        data.shape,
        {"weight": data, "scale": scale},
        _numbers,
        tuple(name for name in used_names if name in tensors),
    )


def _numbers(
    fields: Mapping[str, torch.Tensor], _: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return (fields["weight"].to(torch.float32) * fields["scale"]).to(dtype)
