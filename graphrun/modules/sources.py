"""Read or generate a component's values, tensor by tensor, in host memory.

Values come from files, from a random generator, or from a module in memory. A source holds no more
of a checkpoint than the tensor being read, except `LoadedSource`, which is used if the files name
their tensors differently than the module.

    name --Source--> value in the component's dtype --(quantized)--> the fields of the block's
    layout

Random weights depend on name and seed only, whatever is built before. They keep activations near 1
at any depth, so that images are finite and not flat in 16 bits.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from graphrun.errors import InputError
from graphrun.modules.bitsandbytes_files import field_name
from graphrun.modules.blocks import BlockLayout, TensorEntry
from graphrun.modules.conversions import Piece
from graphrun.modules.lora import Delta
from graphrun.modules.quantize import quantized
from graphrun.modules.source_files import Stored, file_stamp
from graphrun.systems import read_at

# Larger tensors repeat a tile of this many elements: 12 billion parameters then fill at memory
# speed instead of the generator's speed (one thread, about 10**8 numbers a second). The number is
# odd, so that rows of usual lengths differ.
TILE = 2**20 - 3


def values_of(owner: nn.Module, key: str, template: torch.Tensor, seed: str) -> torch.Tensor:
    """Return random CPU values for ``owner``'s parameter ``key``, shaped like ``template``."""
    if template.dim() == 1 and "Norm" in type(owner).__name__:
        return torch.full(
            template.shape, 0.0 if key == "bias" else 1.0, dtype=template.dtype, device="cpu"
        )
    generator = torch.Generator("cpu").manual_seed(
        int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "big")
    )
    tile = (
        torch.randn(min(template.numel(), TILE), generator=generator, device="cpu")
        .mul_(standard_deviation(owner, key, template))
        .to(template.dtype)
    )
    values = torch.empty(template.shape, dtype=template.dtype, device="cpu")
    for piece in torch.split(values.view(-1), TILE):
        piece.copy_(tile[: piece.numel()])
    return values


def standard_deviation(owner: nn.Module, key: str, template: torch.Tensor) -> float:
    """Return the standard deviation of random values: 1 for embeddings, 1/sqrt(fan in) for weights
    (LeCun et al. 1998, Efficient BackProp, 4.6), 0.02 for biases."""
    if isinstance(owner, nn.Embedding):
        return 1.0
    if key == "bias" or template.dim() == 0:
        return 0.02
    return 1 / math.sqrt(
        template.numel() / template.shape[0] if template.dim() > 1 else template.numel()
    )


PIECE_BYTES = 16 << 20  # read at a time if the dtype differs


class Source(Protocol):
    """Values by name. ``reads_as_stored``: values are read as stored in files, so that reading them
    again takes no extra work."""

    reads_as_stored: bool

    def read_into(self, name: str, target: torch.Tensor) -> int:
        """Write the tensor ``name`` to ``target``, of its shape and dtype. Return the bytes
        read."""

    def stored(self, name: str, dtype: torch.dtype) -> Stored | None:
        """Return the tensor of a file whose bytes are the tensor ``name`` in ``dtype``, if any."""

    def close(self) -> None:
        """Close open files. The next `read_into` opens them again."""


class RandomSource:
    """The random weights of ``module``, whose parameters may be on meta."""

    reads_as_stored = False

    def __init__(self, module: nn.Module, seed: str) -> None:
        self._seed = seed
        self._makers: dict[str, tuple[nn.Module, str, torch.Tensor, str]] = {}
        first: dict[int, str] = {}  # tied parameters have the values of the first
        for name, parameter in module.named_parameters(remove_duplicate=False):
            path, _, key = name.rpartition(".")
            self._makers[name] = (
                module.get_submodule(path),
                key,
                parameter,
                first.setdefault(id(parameter), f"{path}.{key}"),
            )

    def read_into(self, name: str, target: torch.Tensor) -> int:
        """Write random values, whose bytes count as read."""
        owner, key, template, first = self._makers[name]
        target.copy_(values_of(owner, key, template, f"{self._seed}/{first}"))
        return target.nbytes

    def stored(self, name: str, dtype: torch.dtype) -> Stored | None:
        return None

    def close(self) -> None:
        """Do nothing: nothing is open."""


class FileSource:
    """Tensors of files, read directly into their target, and cast on the way if dtypes differ.

    ``pieces``: by the module's names. The leaves of a derived tensor are in memory while it is
    computed. Raises InputError if a file was changed or truncated since its header was read.
    """

    reads_as_stored = True

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        self._pieces = dict(pieces)
        files = {leaf.file for piece in self._pieces.values() for leaf in piece.leaves}
        self._stamps = {file: file_stamp(file) for file in files}
        self._handles: dict[str, io.FileIO] = {}

    def read_into(self, name: str, target: torch.Tensor) -> int:
        piece = self._pieces[name]
        if isinstance(piece, Stored):
            return self._read_plain(piece, target)
        values = [
            torch.empty(leaf.shape, dtype=getattr(torch, leaf.dtype), device="cpu")
            for leaf in piece.leaves
        ]
        for leaf, value in zip(piece.leaves, values, strict=True):
            self._read_plain(leaf, value)
        target.copy_(piece.make(values).reshape(target.shape))
        return piece.nbytes

    def read_rows(self, name: str, numbers: Sequence[int], target: torch.Tensor) -> None:
        """Write the rows ``numbers`` of the tensor ``name``, in ascending order, to ``target``.
        Rows that follow each other are read at once."""
        table = self._pieces[name]
        assert isinstance(table, Stored)
        row_bytes = table.nbytes // table.shape[0]
        begin = 0
        while begin < len(numbers):
            end = begin + 1
            while end < len(numbers) and numbers[end] == numbers[end - 1] + 1:
                end += 1
            piece = replace(
                table,
                shape=(end - begin, *table.shape[1:]),
                nbytes=(end - begin) * row_bytes,
                begin=table.begin + numbers[begin] * row_bytes,
            )
            self._read_plain(piece, target[begin:end])
            begin = end

    def table(self, name: str) -> Stored | None:
        """Return the tensor of a file that has the rows of the tensor ``name``, in any dtype."""
        piece = self._pieces.get(name)
        return piece if isinstance(piece, Stored) else None

    def stored(self, name: str, dtype: torch.dtype) -> Stored | None:
        piece = self._pieces.get(name)
        if not isinstance(piece, Stored) or getattr(torch, piece.dtype, None) != dtype:
            return None
        self._refuse_changed(piece.file, piece.file)
        return piece

    def _refuse_changed(self, file: str, place: str | int) -> None:
        try:
            is_same = file_stamp(place) == self._stamps[file]
        except OSError as error:
            raise InputError(f"{file} can no longer be opened: {error.strerror}") from error
        if not is_same:
            raise InputError(f"{file} was changed while it was in use: plan again")

    def _read_plain(self, tensor: Stored, target: torch.Tensor) -> int:
        flat, dtype = target.view(-1), getattr(torch, tensor.dtype)
        if dtype == target.dtype:
            self._read(tensor, 0, flat.view(torch.uint8))
            return tensor.nbytes
        step = max(1, PIECE_BYTES // dtype.itemsize)
        scratch = torch.empty(min(step, flat.numel()), dtype=dtype, device="cpu")
        for start in range(0, flat.numel(), step):
            piece = scratch[: min(step, flat.numel() - start)]
            self._read(tensor, start * dtype.itemsize, piece.view(torch.uint8))
            flat[start : start + piece.numel()].copy_(piece)
        return tensor.nbytes

    def close(self) -> None:
        while self._handles:
            self._handles.popitem()[1].close()

    def _read(self, tensor: Stored, skip: int, target: torch.Tensor) -> None:
        handle = self._open(tensor.file)
        self._refuse_changed(tensor.file, handle.fileno())
        raw: Any = target.numpy()
        view, offset = memoryview(raw), tensor.begin + skip
        while view:
            try:
                count = read_at(handle, view, offset)
            except OSError as error:
                raise InputError(f"{tensor.file} cannot be read: {error.strerror}") from error
            if count == 0:
                raise InputError(
                    f"{tensor.file} is truncated: it ends at {offset} bytes, inside "
                    f"{tensor.name}; download it again"
                )
            view, offset = view[count:], offset + count

    def _open(self, file: str) -> io.FileIO:
        if file not in self._handles:
            try:
                self._handles[file] = io.FileIO(file)
            except OSError as error:
                raise InputError(f"{file} can no longer be opened: {error.strerror}") from error
        return self._handles[file]

    def __del__(self) -> None:
        self.close()


class LoadedSource:
    """The tensors that ``load`` returns by name. It is called for the first tensor; `close`
    releases the tensors."""

    reads_as_stored = False

    def __init__(self, load: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._load = load
        self._tensors: Mapping[str, torch.Tensor] = {}

    def read_into(self, name: str, target: torch.Tensor) -> int:
        self._tensors = self._tensors or self._load()
        target.copy_(self._tensors[name])
        return target.nbytes

    def stored(self, name: str, dtype: torch.dtype) -> Stored | None:
        """Return None: files name their tensors differently."""
        return None

    def close(self) -> None:
        self._tensors = {}


@dataclass(slots=True)
class Writer:
    """Writes a component's blocks.

    Values come from ``source``, or from memory: ``buffers``, computed when the module was built,
    and ``adapters``, tensors of IP-Adapters. ``shapes``: shape and dtype, by name, of the weights
    that are quantized to ``precision`` after reading. ``deltas``: what LoRAs add to weights, by
    name. ``quantize``: returns the fields of a weight in a precision, as `quantized` does.
    """

    source: Source
    precision: str = ""
    shapes: Mapping[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    adapters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    deltas: Mapping[str, Sequence[Delta]] = field(default_factory=dict)
    quantize: Callable[[torch.Tensor, str], Mapping[str, torch.Tensor]] = quantized

    @property
    def reads_as_stored(self) -> bool:
        """As in `Source`."""
        return self.source.reads_as_stored and not (self.shapes or self.adapters or self.deltas)

    def read_into(self, name: str, target: torch.Tensor) -> int:
        """Write the tensor ``name`` to ``target``, before it is quantized. Return the bytes
        read."""
        if name in self.buffers:
            target.copy_(self.buffers[name])
            return 0
        if name in self.adapters:
            target.copy_(self.adapters[name])
            return target.nbytes
        nbytes = self.source.read_into(name, target)
        for delta in self.deltas.get(name, ()):
            delta.add_to(target)
        return nbytes

    def stored(self, entry: TensorEntry) -> Stored | None:
        """Return the tensor of a file that has the bytes of ``entry`` unchanged, if any."""
        name = entry.names[0]
        if entry.field and name not in self.shapes:
            return self.source.stored(field_name(name, entry.field), entry.tensor.dtype)
        if entry.field or name in self.buffers or name in self.adapters or self.deltas.get(name):
            return None
        return self.source.stored(name, entry.tensor.dtype)

    def table(self, entry: TensorEntry) -> Stored | None:
        """Return the tensor of a file that has the rows of ``entry``, in any dtype, if any."""
        if not isinstance(self.source, FileSource) or self.adapters or self.deltas:
            return None
        return self.source.table(entry.names[0])

    def write(
        self,
        layout: BlockLayout,
        buffer: torch.Tensor,
        count: Callable[[torch.Tensor], Any] = lambda _: None,
    ) -> int:
        """Write the block to ``buffer`` (flat uint8, in host memory). Return the bytes read.
        ``count(tensor)`` is called for each temporary tensor."""
        read_bytes, fields = 0, dict[str, Mapping[str, torch.Tensor]]()
        for entry in layout.entries:
            view = (
                buffer[entry.offset : entry.offset + entry.nbytes]
                .view(entry.tensor.dtype)
                .view(entry.tensor.shape)
            )
            name = entry.names[0]
            if not entry.field:
                read_bytes += self.read_into(name, view)
                continue
            if name not in self.shapes:  # quantized in the files
                read_bytes += self.source.read_into(field_name(name, entry.field), view)
                continue
            if name not in fields:
                shape, dtype = self.shapes[name]
                weight = torch.empty(shape, dtype=dtype, device="cpu")
                count(weight)
                read_bytes += self.read_into(name, weight)
                fields = {name: self.quantize(weight, self.precision)}
                del weight
            view.copy_(fields[name][entry.field].view(entry.tensor.shape))
        return read_bytes

    def close(self) -> None:
        self.source.close()
