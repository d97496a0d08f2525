"""Serializes stage outputs as one safetensors file: the tensors, and the structure that holds them as JSON in the header.

Nothing is pickled, so reading an untrusted file runs no code. Pure: works on bytes, not on files.

    {"embeds": {"prompt_embeds": T0, "pooled": T1}}   ->   header {"value": ["map", [["embeds", ["map", ...]]]]} | 0: T0 | 1: T1
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from graphrun.errors import InputError

VERSION = 1


def pack(value: Any) -> bytes:
    """``value`` as the bytes of a safetensors file.

    ``value`` may nest mappings with string keys, lists, tuples, tensors, numpy arrays, PIL images, dtypes, numbers, strings, None.
    A tensor that occurs twice is written once. Raises InputError naming any other type.
    """
    from safetensors.torch import save

    tensors: dict[int, torch.Tensor] = {}
    shape = _described(value, tensors)
    named = {str(number): tensor.detach().cpu().contiguous().clone() for number, tensor in enumerate(tensors.values())}
    return bytes(save(named, metadata={"graphrun": str(VERSION), "value": json.dumps(shape)}))


def unpack(data: bytes) -> Any:
    """The value that `pack` wrote, with its tensors on the CPU. Raises InputError where ``data`` is anything else."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])["__metadata__"]
        if header["graphrun"] != str(VERSION):
            raise ValueError(f"version {header['graphrun']}")
        return _made(json.loads(header["value"]), load(data))
    except (SafetensorError, KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise InputError(f"is not a saved value: {type(error).__name__} {error}") from error


def _described(value: Any, tensors: dict[int, torch.Tensor]) -> list[Any]:
    """``value`` as JSON: each tensor is added to ``tensors``, and replaced by its index there."""
    if isinstance(value, torch.Tensor):
        tensors.setdefault(id(value), value)
        return ["tensor", list(tensors).index(id(value))]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return ["map", [[key, _described(item, tensors)] for key, item in value.items()]]
    if type(value) in (list, tuple):
        return ["list" if type(value) is list else "tuple", [_described(item, tensors) for item in value]]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["plain", value]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    kind = f"{type(value).__module__.split('.')[0]}.{type(value).__name__}"
    if kind == "numpy.ndarray":
        tensor = torch.from_numpy(value.copy())
        tensors[id(tensor)] = tensor
        return ["array", len(tensors) - 1]
    if kind == "PIL.Image":
        tensor = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8)
        tensors[id(tensor)] = tensor
        return ["picture", [value.mode, list(value.size), len(tensors) - 1]]
    if hasattr(value, "item") and kind.startswith("numpy."):
        return ["plain", value.item()]
    raise InputError(f"a {type(value).__name__} cannot be saved; tensors, images, numbers, strings and containers of them can")


def _made(shape: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    kind, content = shape
    if kind == "tensor":
        return tensors[str(content)]
    if kind == "map":
        return {key: _made(item, tensors) for key, item in content}
    if kind in ("list", "tuple"):
        items = [_made(item, tensors) for item in content]
        return items if kind == "list" else tuple(items)
    if kind == "plain":
        return content
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "array":
        return tensors[str(content)].numpy()
    if kind == "picture":
        from PIL import Image

        mode, size, number = content
        return Image.frombytes(mode, tuple(size), tensors[str(number)].numpy().tobytes())
    raise ValueError(f"unknown kind {kind!r}")
