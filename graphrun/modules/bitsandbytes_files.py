"""Weights that bitsandbytes quantized, as diffusers and transformers save them in safetensors.

    nf4    x.weight                          [n/2 1] uint8: the elements of block after block
           x.weight.absmax                   fp32 per 64 elements; nested: uint8
           x.weight.quant_map                the 16 values of the code
           x.weight.quant_state.bitsandbytes__nf4    JSON as bytes: shape, block size, dtype
           x.weight.nested_absmax, .nested_quant_map    of the nested statistics, if there are any
    int8   x.weight                          [out in] int8
           x.SCB                             fp32 per row
           x.weight_format                   a number that only CUDA kernels of older versions use

Nested statistics are computed once, when they are read. The bits equal those that bitsandbytes
computes in each call (`matmul_4bit` of bitsandbytes 0.50), at 4 bytes in place of 1 per 64
elements.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from graphrun.modules.conversions import Derivation, Piece
from graphrun.modules.quantize import BLOCK
from graphrun.modules.source_files import Stored
from graphrun.reading import open_regular, parse_json

_STATE, _ABSMAX, _CODE = ".quant_state.bitsandbytes__", ".absmax", ".quant_map"
_NESTED_ABSMAX, _NESTED_CODE = ".nested_absmax", ".nested_quant_map"
_STATE_BYTES = 1 << 16  # limit of a state, which takes some hundred bytes


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A quantized weight in files: its precision, its shape [out in], and its tensors by field.

    ``dequantize``: returns the numbers of these tensors, in a shape and a dtype. ``names``: of the
    tensors in the files. A shape of one size is open: that many elements, or one less.
    """

    precision: str
    shape: tuple[int, ...]
    fields: Mapping[str, Piece]
    dequantize: Callable[[Mapping[str, torch.Tensor], tuple[int, ...], torch.dtype], torch.Tensor]
    names: tuple[str, ...] = ()

    def shaped(self, shape: tuple[int, ...]) -> PackedWeight:
        """Return the weight in ``shape`` if its own is open and has as many elements."""
        is_open = len(self.shape) == 1 and math.prod(shape) in (self.shape[0], self.shape[0] - 1)
        return replace(self, shape=shape) if is_open else self

    def plain(self, name: str, dtype: str) -> Piece:
        """Return the weight ``name`` as numbers in ``dtype``, computed when it is read."""
        leaves = tuple(leaf for piece in self.fields.values() for leaf in piece.leaves)

        def make(values: Sequence[torch.Tensor]) -> torch.Tensor:
            rest, tensors = list(values), dict[str, torch.Tensor]()
            for key, piece in self.fields.items():
                count = len(piece.leaves)
                tensors[key] = piece.make(rest[:count])
                rest = rest[count:]
            return self.dequantize(tensors, self.shape, getattr(torch, dtype))

        return Derivation(name, dtype, self.shape, leaves, make)


def field_name(weight: str, key: str) -> str:
    """Return the name of the tensor ``key`` of a quantized weight in a file's source."""
    return f"{weight}:{key}"


def is_state(name: str) -> bool:
    """Return whether ``name`` is that of a quantized weight's state in a file."""
    return _STATE in name


def without_shape(state: bytes) -> bytes:
    """Return the ``state`` of a weight with an open shape, which is no longer than the state of any
    weight that was quantized with the same settings."""
    try:
        settings = parse_json(state)
        nested = {"nested_offset": 0} if "nested_offset" in settings else {}
        return json.dumps({**settings, "shape": None, **nested}).encode()
    except (ValueError, TypeError):
        return state  # damaged: for its reader to report


def packed_weights(tensors: Mapping[str, Stored]) -> dict[str, PackedWeight]:
    """Return the weights among ``tensors`` that bitsandbytes quantized, by name.

    Reads the state of each nf4 weight. Raises ValueError for a damaged state and for a kind that
    graphrun does not compute with.
    """
    packed = {}
    for key in tensors:
        weight, separator, kind = key.partition(_STATE)
        if separator:
            packed[weight] = _nf4(weight, kind, key, tensors)
        elif key.endswith(".SCB") and f"{key.removesuffix('.SCB')}.weight" in tensors:
            weight = f"{key.removesuffix('.SCB')}.weight"
            packed[weight] = _int8(weight, key, tensors)
    return packed


def _nf4(weight: str, kind: str, state_key: str, tensors: Mapping[str, Stored]) -> PackedWeight:
    state = _read_state(tensors[state_key])
    data, absmax, code = (tensors[f"{weight}{suffix}"] for suffix in ("", _ABSMAX, _CODE))
    block, is_open = state["blocksize"], state["shape"] is None
    shape = (2 * data.nbytes,) if is_open else tuple(state["shape"])
    if kind != "nf4" or state["quant_type"] != "nf4" or block != BLOCK:
        raise ValueError(f"{weight} is {kind} in blocks of {block}; nf4 in blocks of {BLOCK} works")
    if len(shape) != 2 - is_open or any(type(size) is not int or size <= 0 for size in shape):
        raise ValueError(f"{weight} has the shape {list(shape)}, and a weight has two sizes")
    count = math.prod(shape)
    expected_shapes = {
        weight: (data, "uint8", -(-count // 2)),
        f"{weight}{_CODE}": (code, "float32", 16),
    }
    names = [weight, state_key, f"{weight}{_ABSMAX}", f"{weight}{_CODE}"]
    statistics: Piece = absmax
    if f"{weight}{_NESTED_ABSMAX}" in tensors:
        nested = tuple(tensors[f"{weight}{suffix}"] for suffix in (_NESTED_ABSMAX, _NESTED_CODE))
        names += [leaf.name for leaf in nested]
        _refuse_nested(weight, state, absmax, nested[0])
        expected_shapes[f"{weight}{_ABSMAX}"] = (absmax, "uint8", -(-count // BLOCK))
        statistics = Derivation(
            f"{weight}{_ABSMAX}", "float32", absmax.shape, (absmax, *nested), _unnested(state)
        )
    else:
        expected_shapes[f"{weight}{_ABSMAX}"] = (absmax, "float32", -(-count // BLOCK))
    for name, (tensor, dtype, elements) in expected_shapes.items():
        size = getattr(torch, dtype).itemsize
        if tensor.dtype != dtype or tensor.nbytes != elements * size:
            raise ValueError(
                f"{name} is {list(tensor.shape)} {tensor.dtype}, not {elements} of {dtype}"
            )
    fields = {"data": data, "absmax": statistics, "code": code}
    return PackedWeight("nf4", shape, fields, _nf4_numbers, tuple(names))


def _int8(weight: str, scales_key: str, tensors: Mapping[str, Stored]) -> PackedWeight:
    data, scales = tensors[weight], tensors[scales_key]
    if data.dtype != "int8" or len(data.shape) != 2:
        raise ValueError(f"{weight} is {list(data.shape)} {data.dtype}, not a matrix of int8")
    if scales.dtype != "float32" or scales.nbytes != 4 * data.shape[0]:
        raise ValueError(f"{scales_key} is {list(scales.shape)} {scales.dtype}, not fp32 per row")
    names = [weight, scales_key]
    names += [name for name in (f"{weight}_format",) if name in tensors]
    fields = {"CB": data, "SCB": scales}
    return PackedWeight("int8", data.shape, fields, _int8_numbers, tuple(names))


def _read_state(tensor: Stored) -> dict[str, Any]:
    if tensor.nbytes > _STATE_BYTES:
        raise ValueError(f"{tensor.name} has {tensor.nbytes} bytes")
    with open_regular(Path(tensor.file)) as file:
        file.seek(tensor.begin)
        state = parse_json(file.read(tensor.nbytes))
    if not isinstance(state, dict) or not {"shape", "blocksize", "quant_type"} <= state.keys():
        raise ValueError(f"{tensor.name} is not a state of bitsandbytes")
    return state


def _refuse_nested(name: str, state: Mapping[str, Any], absmax: Stored, nested: Stored) -> None:
    """Raise ValueError unless ``state`` and the ``nested`` maxima describe those in ``absmax``."""
    block, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if (
        type(block) is not int
        or block <= 0
        or type(offset) not in (int, float)
        or state.get("nested_dtype") != "float32"
        or nested.dtype != "float32"
        or nested.nbytes != 4 * -(-absmax.nbytes // block)
    ):
        raise ValueError(f"{name} has nested statistics that do not match its state")


def _unnested(state: Mapping[str, Any]) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
    """Return the function that computes absmax from (absmax, nested absmax, nested code)."""

    def make(values: Sequence[torch.Tensor]) -> torch.Tensor:
        from bitsandbytes import functional

        absmax, nested_absmax, nested_code = values
        nested_state = functional.QuantState(
            absmax=nested_absmax,
            code=nested_code,
            blocksize=int(state["nested_blocksize"]),
            dtype=getattr(torch, str(state["nested_dtype"])),
        )
        numbers: torch.Tensor = functional.dequantize_blockwise(absmax, nested_state)
        return (numbers + float(state["nested_offset"])).float()

    return make


def _int8_numbers(
    fields: Mapping[str, torch.Tensor], _: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    from bitsandbytes import functional

    numbers: torch.Tensor = functional.int8_vectorwise_dequant(fields["CB"], fields["SCB"])
    return numbers.to(dtype)


def _nf4_numbers(
    fields: Mapping[str, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    from bitsandbytes import functional

    state = functional.QuantState(
        absmax=fields["absmax"],
        shape=torch.Size(shape),
        code=fields["code"],
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype,
    )
    weight: torch.Tensor = functional.dequantize_4bit(fields["data"], state)
    return weight.reshape(shape)
