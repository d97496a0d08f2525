"""Reads the headers of GGUF files, and dequantizes their block types with diffusers' own functions.

Planning needs the header only.

    GGUF | version | tensors, keys | key: value ... | name, shape, type, offset ... | padding | data
    ............ | row of Q8_0    | scale, fp16 | 32 int8 | scale | 32 int8 | ...      a weight [out
    in] is [out bytes-per-row] uint8

Format: ggml's docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import io
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from graphrun.errors import GraphError, InputError
from graphrun.extras import install_command
from graphrun.modules.source_files import Stored, broken, refuse_overflow
from graphrun.reading import opened

# Types that torch has: used as they are, or cast to the component's dtype when they are read.
_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
_ALIGNMENT = 32  # of the data, unless `general.alignment` is set
# keys, tensors and array elements together: a damaged count must not exhaust memory
_MAX_ENTRIES = 1 << 20
_MAX_DIMENSIONS = 4  # ggml's GGML_MAX_DIMS
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_TEXT, _ARRAY = 8, 9


def gguf_tensors(file: Path, where: str) -> tuple[Stored, ...]:
    """Every tensor of the GGUF ``file``; quantized ones as rows of bytes, with their type.

    Raises GraphError for a file that is not GGUF or is truncated, or has a tensor of a type that
    diffusers cannot compute with.
    """
    try:
        import gguf
    except ImportError as error:
        raise GraphError(
            f"precision gguf needs the package gguf: {install_command('gguf')}", where
        ) from error
    sizes = {int(kind): (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    known = _PLAIN.keys() | quantized_types().keys()
    try:
        with opened(file) as content:
            length = os.fstat(content.fileno()).st_size
            tensors, start = _header(content)
    except InputError as error:
        raise GraphError(
            f"{error}; its header is needed to plan: get it, or leave gguf out of precision:", where
        ) from None
    except OSError as error:
        raise GraphError(f"{file} cannot be read: {error.strerror}", where) from error
    except (ValueError, struct.error, KeyError, EOFError, OverflowError) as error:
        raise broken(
            file, "is truncated or corrupt: its header is not a GGUF header", where
        ) from error
    found = []
    for name, shape, number, offset in tensors:
        kind, block, size = sizes.get(number, (f"type {number}", 0, 0))
        if kind not in known:
            raise GraphError(
                f"{file}: {name} is {kind}, which diffusers cannot compute with", where
            )
        row, nbytes = shape[-1] if shape else 1, math.prod(shape) // block * size
        what = (
            f"{name} has rows of {row} elements, not a multiple of {block}" if row % block else ""
        )
        if start + offset + nbytes > length:
            what = what or f"it ends at {length} bytes, inside {name}"
        if what:
            raise broken(file, f"is truncated or corrupt: {what}", where)
        plain = kind in _PLAIN
        held = shape if plain else (*shape[:-1], row // block * size)
        found.append(
            Stored(
                name,
                _PLAIN.get(kind, "uint8"),
                held,
                nbytes,
                str(file),
                start + offset,
                "" if plain else kind,
            )
        )
    return tuple(found)


def quantized_types() -> Mapping[str, Any]:
    """Type -> diffusers' function that dequantizes its blocks. Needs the package gguf."""
    from diffusers.quantizers.gguf.utils import dequantize_functions

    return {
        kind.name: function
        for kind, function in dequantize_functions.items()
        if kind.name not in _PLAIN
    }


def shape_of(rows: torch.Size | tuple[int, ...], kind: str) -> tuple[int, ...]:
    """The shape of the dequantized tensor for ``rows`` of bytes of type ``kind``."""
    block, size = _block(kind)
    return (*rows[:-1], rows[-1] // size * block)


def dequantized(data: torch.Tensor, kind: str) -> torch.Tensor:
    """``data`` [... bytes-per-row] of type ``kind`` as numbers, in fp16 or fp32 as diffusers'
    `dequantize_gguf_tensor` returns."""
    block, size = _block(kind)
    numbers: torch.Tensor = quantized_types()[kind](data.reshape(-1, size), block, size)
    return numbers.reshape(shape_of(data.shape, kind))


def _block(kind: str) -> tuple[int, int]:
    """(elements, bytes) of a block of type ``kind``."""
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return block, size


def _header(opened: BinaryIO) -> tuple[list[tuple[str, tuple[int, ...], int, int]], int]:
    """(name, shape with the slowest-varying dimension first, type, offset) of every tensor, and the
    file offset of the data."""
    read = _Reader(opened)
    if opened.read(4) != b"GGUF" or read.number("I") not in (2, 3):
        raise ValueError("no GGUF")
    tensors, keys = read.number("Q"), read.number("Q")
    alignment = _ALIGNMENT
    for _ in read.entries(keys):
        key, value = read.text(), read.value(read.number("I"))
        alignment = value if key == "general.alignment" else alignment
    if type(alignment) is not int or alignment <= 0:
        raise ValueError("the alignment is not a positive integer")
    found = []
    for _ in read.entries(tensors):
        name, dimensions = read.text(), read.number("I")
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError("too many dimensions")
        shape = tuple(read.number("Q") for _ in range(dimensions))
        refuse_overflow(shape)
        found.append((name, shape[::-1], read.number("I"), read.number("Q")))
    if len({name for name, *_ in found}) < len(found):
        raise ValueError("a name is there twice")
    end = opened.tell()
    return found, end + -end % alignment


class _Reader:
    """Reads a header's values, up to a limit on entries and text lengths."""

    def __init__(self, opened: BinaryIO) -> None:
        self._opened, self._left = opened, _MAX_ENTRIES

    def number(self, kind: str) -> Any:
        length = struct.calcsize(f"<{kind}")
        (value,) = struct.unpack(f"<{kind}", self._opened.read(length))
        return value

    def entries(self, count: int) -> range:
        self._left -= count
        if self._left < 0:
            raise ValueError("too many entries")
        return range(count)

    def text(self) -> str:
        length = self.number("Q")
        if length > _MAX_ENTRIES:
            raise ValueError("too long")
        data = self._opened.read(length)
        if len(data) != length:
            raise EOFError
        return data.decode()

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        inner, length = self.number("I"), int(self.number("Q"))
        if inner == _ARRAY:  # the format allows it, and nothing writes it
            raise ValueError("an array of arrays")
        if inner in _SCALARS:  # such as a language model's token scores: not needed
            self._opened.seek(length * struct.calcsize(f"<{_SCALARS[inner]}"), io.SEEK_CUR)
            return None
        for _ in self.entries(length):
            self.value(inner)
        return None
