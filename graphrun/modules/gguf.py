"""Read the headers of GGUF files, and dequantize their types with diffusers' own functions.

    GGUF | version | tensors, keys | key: value ... | name, shape, type, offset ... | padding | data
    row of Q8_0    | scale, fp16 | 32 int8 | scale | 32 int8 | ...
    a weight [out in] is [out bytes-per-row] uint8

Format: ggml's docs/gguf.md, versions 2 and 3. `gguf.GGUFReader` is not used: it makes an array of
every element of every key (11 s for a vocabulary of 150,000 words, 0.1 s here), and does not return
from a file that claims an array of 2**62 elements.
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
from graphrun.reading import open_regular

# types that torch has: used as they are, or cast to the component's dtype when read
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


def gguf_tensors(file: Path, file_line: str) -> tuple[Stored, ...]:
    """Return every tensor of the GGUF ``file``; quantized ones as rows of bytes, with their type.

    Raises GraphError for a file that is not GGUF or is truncated, or has a tensor of a type that
    diffusers cannot compute with.
    """
    try:
        import gguf
    except ImportError as error:
        raise GraphError(
            f"precision gguf needs the package gguf: {install_command('gguf')}", file_line
        ) from error
    sizes = {int(kind): (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    types = _PLAIN.keys() | quantized_types().keys()
    try:
        with open_regular(file) as content:
            length = os.fstat(content.fileno()).st_size
            tensors, start = _header(content)
    except InputError as error:
        raise GraphError(
            f"{error}; its header is needed to plan: get it, or leave gguf out of precision:",
            file_line,
        ) from None
    except OSError as error:
        raise GraphError(f"{file} cannot be read: {error.strerror}", file_line) from error
    except (ValueError, struct.error, KeyError, EOFError, OverflowError) as error:
        raise broken(
            file, "is truncated or corrupt: its header is not a GGUF header", file_line
        ) from error
    file_tensors = []
    for name, shape, number, offset in tensors:
        kind, block, size = sizes.get(number, (f"type {number}", 0, 0))
        if kind not in types:
            raise GraphError(
                f"{file}: {name} is {kind}, which diffusers cannot compute with", file_line
            )
        row, nbytes = shape[-1] if shape else 1, math.prod(shape) // block * size
        problem = (
            f"{name} has rows of {row} elements, not a multiple of {block}" if row % block else ""
        )
        if start + offset + nbytes > length:
            problem = problem or f"it ends at {length} bytes, inside {name}"
        if problem:
            raise broken(file, f"is truncated or corrupt: {problem}", file_line)
        plain = kind in _PLAIN
        stored_shape = shape if plain else (*shape[:-1], row // block * size)
        file_tensors.append(
            Stored(
                name,
                _PLAIN.get(kind, "uint8"),
                stored_shape,
                nbytes,
                str(file),
                start + offset,
                "" if plain else kind,
            )
        )
    return tuple(file_tensors)


def has_whole_header(content: bytes) -> bool:
    """Return whether ``content``, the beginning of a GGUF file, has its whole header. True for
    content that is no header: reading the file reports that."""
    try:
        _header(io.BytesIO(content))
    except (struct.error, EOFError):
        return False
    except (ValueError, KeyError, OverflowError):
        return True
    return True


def quantized_types() -> Mapping[str, Any]:
    """Return type -> diffusers' function that dequantizes its blocks. Needs the package gguf."""
    from diffusers.quantizers.gguf.utils import dequantize_functions

    return {
        kind.name: function
        for kind, function in dequantize_functions.items()
        if kind.name not in _PLAIN
    }


def shape_of(rows: torch.Size | tuple[int, ...], kind: str) -> tuple[int, ...]:
    """Return the shape of the dequantized tensor for ``rows`` of bytes of type ``kind``."""
    block, size = _block(kind)
    return (*rows[:-1], rows[-1] // size * block)


def dequantized(data: torch.Tensor, kind: str) -> torch.Tensor:
    """Return ``data`` [... bytes-per-row] of type ``kind`` as numbers, fp16 or fp32, as diffusers'
    `dequantize_gguf_tensor` returns them."""
    block, size = _block(kind)
    numbers: torch.Tensor = quantized_types()[kind](data.reshape(-1, size), block, size)
    return numbers.reshape(shape_of(data.shape, kind))


def _block(kind: str) -> tuple[int, int]:
    """Return (elements, bytes) of a block of type ``kind``."""
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return block, size


def _header(file: BinaryIO) -> tuple[list[tuple[str, tuple[int, ...], int, int]], int]:
    """Return (name, shape, type, offset) of every tensor, and the file offset of the data. Shapes
    have the slowest-varying dimension first."""
    reader = _HeaderReader(file)
    if file.read(4) != b"GGUF" or reader.number("I") not in (2, 3):
        raise ValueError("no GGUF")
    tensors, keys = reader.number("Q"), reader.number("Q")
    alignment = _ALIGNMENT
    for _ in reader.entries(keys):
        key, value = reader.text(), reader.value(reader.number("I"))
        alignment = value if key == "general.alignment" else alignment
    if type(alignment) is not int or alignment <= 0:
        raise ValueError("the alignment is not a positive integer")
    tensor_headers = []
    for _ in reader.entries(tensors):
        name, dimensions = reader.text(), reader.number("I")
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError("too many dimensions")
        shape = tuple(reader.number("Q") for _ in range(dimensions))
        refuse_overflow(shape)
        tensor_headers.append((name, shape[::-1], reader.number("I"), reader.number("Q")))
    if len({name for name, *_ in tensor_headers}) < len(tensor_headers):
        raise ValueError("a name is there twice")
    end = file.tell()
    return tensor_headers, end + -end % alignment


class _HeaderReader:
    """Reads the values of a header, with limits on entries and text lengths."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._entry_budget = file, _MAX_ENTRIES

    def number(self, kind: str) -> Any:
        length = struct.calcsize(f"<{kind}")
        (value,) = struct.unpack(f"<{kind}", self._file.read(length))
        return value

    def entries(self, count: int) -> range:
        self._entry_budget -= count
        if self._entry_budget < 0:
            raise ValueError("too many entries")
        return range(count)

    def text(self) -> str:
        length = self.number("Q")
        if length > _MAX_ENTRIES:
            raise ValueError("too long")
        data = self._file.read(length)
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
        if inner in _SCALARS:  # not needed: such as a language model's token scores
            self._file.seek(length * struct.calcsize(f"<{_SCALARS[inner]}"), io.SEEK_CUR)
            return None
        for _ in self.entries(length):
            self.value(inner)
        return None
