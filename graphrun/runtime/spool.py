"""Temporary files for weights that a plan reads from disk but no file contains in the needed form.

Such weights are random, quantized or fused with a LoRA. They are written once and then read like
any other file. Each process has one folder, named after its id and locked by it. The next process
that starts a run removes the folders of killed processes.

    TMP/graphrun-spool-1234-abcd/    lock    text_encoder_2.safetensors
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from filelock import FileLock
from torch import nn

from graphrun.errors import InputError
from graphrun.model.problem import ComponentNumbers
from graphrun.modules.blocks import BlockLayout, TensorEntry, lay_out
from graphrun.modules.source_files import Stored
from graphrun.modules.sources import FileSource, Writer
from graphrun.systems import take_lock
from graphrun.units import PAGE_BYTES, show_size

PREFIX = "graphrun-spool-"
MARGIN_BYTES = 16 << 20  # stays free on the disk


class Spool:
    """A folder in ``root`` (default: the system's temporary folder), created on first use."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root
        self._folder: Path | None = None
        self._lock: FileLock | None = None
        self._process = os.getpid()

    def writer_for(self, module: nn.Module, numbers: ComponentNumbers, writer: Any) -> Any:
        """Write ``module``'s blocks from ``writer`` to a file; return a writer that reads the file.

        Returns ``writer`` itself if its files contain the weights in the needed form. Raises
        InputError if the disk has too little free space or writing fails.
        """
        if getattr(writer, "reads_as_stored", False):
            return writer
        layouts = lay_out(
            module,
            [path for group in numbers.groups for path in group.blocks],
            split_layers=numbers.granularity == "layers",
        )
        file = self._create_folder() / f"{numbers.name}.safetensors"
        total = sum(layout.nbytes for layout in layouts.values())
        try:
            free = shutil.disk_usage(file.parent).free
            if total + MARGIN_BYTES > free:
                raise InputError(
                    f"{numbers.name}: {show_size(total)} of weights have to be written to "
                    f"{file.parent}, which has {show_size(free)} free: make room, or plan with "
                    "less disk"
                )
            begin = _write(file, layouts, writer)
        except OSError as error:
            file.unlink(missing_ok=True)
            raise InputError(
                f"{numbers.name} cannot be written to {file}: {error.strerror}: make room, or plan "
                "with less disk"
            ) from error
        finally:
            writer.close()
        places = {path: (begin[path], layout.nbytes) for path, layout in layouts.items()}
        places |= {
            _key(e): (begin[path] + e.offset, e.nbytes)
            for path, layout in layouts.items()
            for e in layout.entries
        }
        file_tensors = {
            key: Stored(key, "uint8", (nbytes,), nbytes, str(file), offset)
            for key, (offset, nbytes) in places.items()
        }
        return _SpooledBlocks(FileSource(file_tensors), layouts)

    def remove_stale(self) -> None:
        remove_stale(self._root or Path(tempfile.gettempdir()))

    def close(self) -> None:
        """Delete the folder. Does nothing in a forked child."""
        if self._folder is not None and os.getpid() == self._process:
            if self._lock is not None:
                self._lock.release()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _create_folder(self) -> Path:
        if self._folder is None:
            self.remove_stale()
            self._folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=self._root))
            self._lock = take_lock(self._folder / "lock")
        return self._folder

    def __del__(self) -> None:
        self.close()


class _SpooledBlocks:
    """Writer of spooled blocks: one read per block, or per tensor if the layout differs."""

    reads_as_stored = True

    def __init__(self, source: FileSource, layouts: Mapping[str, BlockLayout]) -> None:
        self._source = source
        self._keys = {
            path: [(_key(entry), entry.offset) for entry in layout.entries]
            for path, layout in layouts.items()
        }
        self._sizes = {path: layout.nbytes for path, layout in layouts.items()}

    def write(self, layout: BlockLayout, buffer: torch.Tensor, count: Any = None) -> int:
        if self._keys.get(layout.path) == [(_key(entry), entry.offset) for entry in layout.entries]:
            return self._source.read_into(layout.path, buffer[: self._sizes[layout.path]])
        return sum(
            self._source.read_into(_key(e), buffer[e.offset : e.offset + e.nbytes])
            for e in layout.entries
        )

    def stored(self, entry: TensorEntry) -> Stored | None:
        return self._source.stored(_key(entry), torch.uint8)

    def close(self) -> None:
        self._source.close()


def _key(entry: TensorEntry) -> str:
    """Return the key of a tensor in the file. The blank in it makes it differ from block paths."""
    return f"{entry.names[0]} {entry.field}"


def remove_stale(root: Path) -> list[Path]:
    """Remove and return spool folders of processes that no longer run; locked ones stay."""
    removed_folders = []
    for folder in sorted(root.glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            if (folder / "lock").exists():
                if (lock := take_lock(folder / "lock")) is None:
                    continue
                lock.release()
            elif _is_running(folder.name):
                continue
            shutil.rmtree(folder, ignore_errors=True)
            removed_folders.append(folder)
    return removed_folders


def _is_running(name: str) -> bool:
    """Return whether the creator of the folder ``name`` still runs, and may yet lock it."""
    number = name.removeprefix(PREFIX).partition("-")[0]
    return number.isdigit() and psutil.pid_exists(int(number))


def _write(file: Path, layouts: dict[str, BlockLayout], writer: Writer) -> dict[str, int]:
    """Write a safetensors file with one uint8 tensor per block, and return block -> file offset.

    Only one block is in memory at a time. The data begin at a page, so that tensors are aligned as
    in memory.
    """
    header, begin = dict[str, Any](), 0
    for path, layout in layouts.items():
        header[path or "unblocked"] = {
            "dtype": "U8",
            "shape": [layout.nbytes],
            "data_offsets": [begin, begin + layout.nbytes],
        }
        begin += layout.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % PAGE_BYTES)
    locations, start = {}, 8 + len(text)
    with file.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for path, layout in layouts.items():
            buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cpu")
            writer.write(layout, buffer)
            raw: Any = buffer.numpy()
            stream.write(memoryview(raw))
            locations[path] = start
            start += layout.nbytes
        stream.flush()
        os.fsync(stream.fileno())
    return locations
