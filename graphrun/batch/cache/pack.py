"""Serialize stage outputs as one safetensors file, with their structure as JSON in its header.

Nothing is pickled, so reading an untrusted file runs no code.

    {"embeds": {"prompt_embeds": T0, "pooled": T1}}
    -> header {"value": ["map", [["embeds", ["map", ...]]]]} | 0: T0 | 1: T1
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import torch

from graphrun.errors import InputError
from graphrun.reading import safetensors_header

VERSION = 2


def pack(value: Any) -> bytes:
    """Return ``value`` as the bytes of a safetensors file.

    ``value`` may nest mappings with string keys, lists, tuples, tensors, numpy arrays, PIL images,
    dtypes, numbers, strings and None. A tensor that occurs twice is written once. The memory order
    of a tensor's dimensions is kept: kernels depend on it and round differently. Raises InputError
    that names any other type.
    """
    from safetensors.torch import save

    tensors: dict[int, tuple[int, torch.Tensor]] = {}
    shape = _describe(value, tensors)
    orders = {
        str(number): sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        for number, tensor in tensors.values()
    }
    tensors_by_name = {
        str(n): tensor.detach().cpu().permute(orders[str(n)]).contiguous().clone()
        for n, tensor in tensors.values()
    }
    metadata = {"graphrun": str(VERSION), "value": json.dumps(shape), "orders": json.dumps(orders)}
    return bytes(save(tensors_by_name, metadata=metadata))


def unpack(data: bytes) -> Any:
    """Return the value that `pack` wrote, tensors on the CPU. Raises InputError for other
    ``data``."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        header = json.loads(safetensors_header(io.BytesIO(data), len(data))[1])["__metadata__"]
        if header["graphrun"] != str(VERSION):
            raise ValueError(f"version {header['graphrun']}")
        orders = json.loads(header["orders"])
        tensors = {
            name: tensor.permute([orders[name].index(dim) for dim in range(tensor.ndim)])
            for name, tensor in load(data).items()
        }
        return _rebuild(json.loads(header["value"]), tensors)
    except (
        SafetensorError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
        RuntimeError,
    ) as error:
        raise InputError(f"is not a saved value: {type(error).__name__} {error}") from error


def _describe(value: Any, tensors: dict[int, tuple[int, torch.Tensor]]) -> list[Any]:
    """Return ``value`` as JSON, with tensors moved to ``tensors`` (by `id`) and numbered."""

    def index(tensor: torch.Tensor) -> int:
        return tensors.setdefault(id(tensor), (len(tensors), tensor))[0]

    kind = f"{type(value).__module__.split('.')[0]}.{type(value).__name__}"
    match value:
        case torch.Tensor():
            return ["tensor", index(value)]
        case Mapping() if all(isinstance(key, str) for key in value):
            return ["map", [[key, _describe(item, tensors)] for key, item in value.items()]]
        case list() | tuple() if type(value) in (list, tuple):
            return [type(value).__name__, [_describe(item, tensors) for item in value]]
        case None | bool() | int() | float() | str():
            return ["plain", value]
        case torch.dtype():
            return ["dtype", str(value).removeprefix("torch.")]
        case _ if kind == "numpy.ndarray":
            return ["array", index(torch.from_numpy(value.copy()))]
        case _ if kind == "PIL.Image":
            pixels = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
            return ["picture", [value.mode, list(value.size), index(pixels)]]
        case _ if hasattr(value, "item") and kind.startswith("numpy."):
            return ["plain", value.item()]
    raise InputError(
        f"a {type(value).__name__} cannot be saved; "
        "tensors, images, numbers, strings and containers of them can"
    )


def _rebuild(shape: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    match shape:
        case ["tensor", number]:
            return tensors[str(number)]
        case ["map", items]:
            return {key: _rebuild(item, tensors) for key, item in items}
        case ["list", items]:
            return [_rebuild(item, tensors) for item in items]
        case ["tuple", items]:
            return tuple(_rebuild(item, tensors) for item in items)
        case ["plain", value]:
            return value
        case ["dtype", name] if isinstance(dtype := getattr(torch, name), torch.dtype):
            return dtype
        case ["array", number]:
            return tensors[str(number)].numpy()
        case ["picture", [mode, size, number]]:
            from PIL import Image

            return Image.frombytes(mode, tuple(size), tensors[str(number)].numpy().tobytes())
    raise ValueError(f"unknown kind {shape!r}")
