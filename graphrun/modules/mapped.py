"""Tensors that are mapped from files, and the place of their bytes in these files.

    from_pretrained   model.safetensors --mmap--> parameters     pages of the page cache
    smaps             7f31a0000000-7f31a8000000 rw-p 00000000 ... /models/unet/model.safetensors
                      Anonymous: 0 kB                            no page was written
    tensor at         7f31a0001000                               byte 4096 of the file

A page that the process writes becomes its own copy, which the file does not contain: such a mapping
does not count, nor does one of a deleted file. Only Linux lists mappings.
"""

from __future__ import annotations

import bisect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from graphrun.errors import InputError
from graphrun.modules.blocks import BlockLayout, TensorEntry, direct_tensors
from graphrun.modules.source_files import Stored
from graphrun.modules.trees import modules_below

SMAPS = Path("/proc/self/smaps")
# start-stop, permissions, offset, device, inode, path (proc_pid_smaps(5))
_HEADER = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) .(.).(.) ([0-9a-f]+) \S+ (\d+) *(.*)")
_WRITTEN = re.compile(rb"(?:Anonymous|Swap): +[1-9]")


class MappedFileStamp(NamedTuple):
    """What changes when a file is written or replaced. ``modified``: in nanoseconds."""

    inode: int
    nbytes: int
    modified: int


@dataclass(frozen=True, slots=True)
class FileMapping:
    """Memory ``start .. stop`` of this process, in which ``file`` is mapped from ``offset`` on."""

    start: int
    stop: int
    offset: int
    inode: int
    file: str


def file_mappings(smaps: Path = SMAPS) -> list[FileMapping]:
    """Return the mappings of files with no written page, by address; empty if ``smaps`` does not
    exist. Mappings that write to their files are omitted."""
    try:
        lines = smaps.read_bytes().split(b"\n")
    except OSError:
        return []
    mappings = dict[int, FileMapping]()
    start = 0
    for line in lines:
        if header := _HEADER.fullmatch(line):
            start = int(header[1], 16)
            if header[7].startswith(b"/") and (header[3], header[4]) != (b"w", b"s"):
                file = os.fsdecode(header[7].replace(rb"\012", b"\n"))
                stop, offset = int(header[2], 16), int(header[5], 16)
                mappings[start] = FileMapping(start, stop, offset, int(header[6]), file)
        elif _WRITTEN.match(line):
            mappings.pop(start, None)
    return list(mappings.values())


class MappedTensors:
    """The tensors of ``modules`` that are mapped from files, now. Keeps them alive. Only contiguous
    tensors count, and no parameters of special classes (quantized weights)."""

    def __init__(self, modules: Iterable[nn.Module], smaps: Path = SMAPS) -> None:
        self._tensors = dict[int, tuple[torch.Tensor, Stored]]()
        self._stamps = dict[str, MappedFileStamp | None]()
        mappings = file_mappings(smaps)
        starts = [mapping.start for mapping in mappings]
        for module in modules:
            for tensor in _plain_tensors(module):
                address, nbytes = tensor.data_ptr(), tensor.nbytes
                number = bisect.bisect_right(starts, address) - 1
                if number < 0 or address + nbytes > mappings[number].stop:
                    continue
                mapping = mappings[number]
                begin, stamp = mapping.offset + address - mapping.start, self._stamp(mapping.file)
                if stamp is None or stamp.inode != mapping.inode or begin + nbytes > stamp.nbytes:
                    continue
                dtype = str(tensor.dtype).removeprefix("torch.")
                file_tensor = Stored("", dtype, tuple(tensor.shape), nbytes, mapping.file, begin)
                self._tensors[id(tensor)] = tensor, file_tensor

    def __eq__(self, other: object) -> bool:
        """Return whether the same tensors are mapped from the same places, of unchanged files."""
        return (
            isinstance(other, MappedTensors)
            and self._tensors.keys() == other._tensors.keys()
            and all(self.place_of(t) == other.place_of(t) for t, _ in self._tensors.values())
        )

    __hash__ = None  # type: ignore[assignment]

    def stored(self, tensor: torch.Tensor) -> Stored | None:
        mapped_tensor, file_tensor = self._tensors.get(id(tensor), (None, None))
        return file_tensor if mapped_tensor is tensor else None

    def place_of(self, tensor: torch.Tensor) -> tuple[Stored, MappedFileStamp | None] | None:
        """Return where ``tensor`` is stored, with the file's stamp; None if it is not mapped."""
        file_tensor = self.stored(tensor)
        return None if file_tensor is None else (file_tensor, self._stamps[file_tensor.file])

    def refuse_changed_files(self, modules: Mapping[str, nn.Module]) -> None:
        """Raise InputError if a file that is still used was written, replaced or deleted.
        ``modules``: by name, with their tensors now."""
        changed_files = {file for file, stamp in self._stamps.items() if _stamp_of(file) != stamp}
        for name, module in modules.items() if changed_files else ():
            for tensor in _plain_tensors(module):
                if (
                    file_tensor := self.stored(tensor)
                ) is not None and file_tensor.file in changed_files:
                    raise InputError(
                        f"{name}: {file_tensor.file} was changed or deleted after the pipeline was "
                        "attached: call detach(), and load the pipeline again"
                    )

    def unmapped_bytes(self, module: nn.Module) -> int:
        """Return the bytes of the parameters of ``module`` that are not mapped from files."""
        return sum(
            parameter.nbytes
            for parameter in module.parameters()
            if self.stored(parameter) is None and not parameter.is_meta
        )

    def layouts(self, layouts: Mapping[str, BlockLayout]) -> dict[str, BlockLayout]:
        """Return ``layouts`` of blocks with the mapped tensors alone. Tensors on meta stay: they
        stand for tensors that would be mapped."""
        return {
            path: layout.with_entries(
                entry
                for entry in layout.entries
                if not entry.field
                and (entry.tensor.is_meta or self.stored(entry.tensor) is not None)
            )
            for path, layout in layouts.items()
        }

    def _stamp(self, file: str) -> MappedFileStamp | None:
        if file not in self._stamps:
            self._stamps[file] = _stamp_of(file)
        return self._stamps[file]


class MappedWriter:
    """The weights of a component whose tensors are mapped (`graphrun.runtime.backing.BlockWriter`).

    Direct reads fill all blocks, except for tensors at odd offsets of their files, which are copied
    from their mappings.
    """

    def __init__(self, mapped_tensors: MappedTensors) -> None:
        self.mapped_tensors = mapped_tensors

    def write(
        self, layout: BlockLayout, buffer: torch.Tensor, count: Callable[[torch.Tensor], None]
    ) -> int:
        """Copy the tensors of ``layout`` into ``buffer``, and return their bytes."""
        for entry in layout.entries:
            target = buffer[entry.offset : entry.offset + entry.nbytes].view(entry.tensor.dtype)
            target.view(entry.tensor.shape).copy_(entry.tensor.detach())
        return sum(entry.nbytes for entry in layout.entries)

    def stored(self, entry: TensorEntry) -> Stored | None:
        return self.mapped_tensors.stored(entry.tensor)

    def table(self, entry: TensorEntry) -> Stored | None:
        """Return `stored`."""
        return self.stored(entry)

    def close(self) -> None:
        """Do nothing: the mappings stay."""


def _plain_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [
        tensor
        for child in modules_below(module)
        for tensor, field, _, _ in direct_tensors(child)
        if not field
        and type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and tensor.nbytes
    ]


def _stamp_of(file: str) -> MappedFileStamp | None:
    try:
        status = os.stat(file)
    except (OSError, ValueError):
        return None
    return MappedFileStamp(status.st_ino, status.st_size, status.st_mtime_ns)
