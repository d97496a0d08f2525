"""Files for weights that a plan reads from disk but no file contains in the needed form.

Such weights are random, quantized or fused with a LoRA. They are written once and then read like
any other file. Each process has one temporary folder, named after its id and locked by it. The next
process that starts a run removes the folders of killed processes.

    TMP/graphrun-spool-1234-abcd/    lock    text_encoder_2.safetensors

Quantized weights are kept for later runs in a folder of the cache, the least recently used up to a
limit. A file is named after a digest of what its weights are made of (`weights_key`). Its header
has the SHA-256 of its data, which `Spool.damaged` compares; a run compares names and sizes only.

    CACHE/quantized/0a1b...f9.safetensors
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphrun.errors import GraphError, InputError
from graphrun.files import digest_of, python_digest, write_whole
from graphrun.graph.parts import Component
from graphrun.model.hardware import Hardware
from graphrun.model.problem import ComponentNumbers
from graphrun.modules.blocks import BlockLayout, TensorEntry, lay_out
from graphrun.modules.quantize import quantized, quantized_in_parts
from graphrun.modules.source_files import Stored, file_stamp, origin_of, stored_tensors
from graphrun.modules.sources import FileSource, Writer
from graphrun.reading import open_regular, parse_json
from graphrun.runtime.devices.device import Device
from graphrun.temporary import TemporaryFolder, remove_stale
from graphrun.units import GIB, PAGE_BYTES, show_size

PREFIX = "graphrun-spool-"
MARGIN_BYTES = 16 << 20  # stays free on the disk
QUANTIZED_FOLDER = "quantized"  # in the cache
KEPT_BYTES = 64 * GIB  # limit of the folder of quantized weights
# Elements that are quantized at a time on a device: with int8, which needs the most, 5 bytes each.
MOST_ELEMENTS = 1 << 24
BYTES_PER_ELEMENT = 16  # of the budget: a small one gets smaller parts


class Spool:
    """A folder in ``root`` (default: the system's temporary folder), created on first use.

    ``keep``: the folder of quantized weights; None: none are kept. ``tell``: called with a line
    before weights are quantized into it.
    """

    def __init__(
        self,
        root: Path | None = None,
        keep: Path | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._root, self._keep, self._tell = root, keep, tell
        self._folder: TemporaryFolder | None = None

    def writer_for(
        self, module: nn.Module, numbers: ComponentNumbers, writer: Any, key: str = ""
    ) -> Any:
        """Write ``module``'s blocks from ``writer`` to a file; return a writer that reads the file.

        Returns ``writer`` itself if its files contain the weights in the needed form. ``key``:
        `weights_key` of quantized weights, whose file is kept, or found. Raises InputError if the
        disk has too little free space or writing fails.
        """
        if getattr(writer, "reads_as_stored", False):
            return writer
        layouts = lay_out(
            module,
            [path for group in numbers.groups for path in group.blocks],
            split_layers=numbers.granularity == "layers",
        )
        total = sum(layout.nbytes for layout in layouts.values())
        if key and self._keep is not None:
            file = self._keep / f"{key}.safetensors"
            if (tensors := _tensors_in(file, layouts)) is not None:
                writer.close()
                with contextlib.suppress(OSError):  # the time of use, which eviction goes by
                    os.utime(file, ns=(time.time_ns(), file_stamp(file)[1]))
                return _SpooledBlocks(FileSource(tensors), layouts)
            self._keep.mkdir(parents=True, exist_ok=True)
            self._evict(KEPT_BYTES - total)
            if self._tell is not None:
                precision = numbers.variants[0].precision
                self._tell(
                    f"{numbers.name} in {precision}: weights are quantized once, "
                    f"{show_size(total)} in {self._keep}"
                )
        else:
            file = self._create_folder() / f"{numbers.name}.safetensors"
        try:
            free = shutil.disk_usage(file.parent).free
            if total + MARGIN_BYTES > free:
                raise InputError(
                    f"{numbers.name}: {show_size(total)} of weights have to be written to "
                    f"{file.parent}, which has {show_size(free)} free: make room, or plan with "
                    "less disk"
                )
            write_whole(file, partial(_write, layouts=layouts, writer=writer), lasting=True)
        except OSError as error:
            raise InputError(
                f"{numbers.name} cannot be written to {file}: {error.strerror}: make room, or plan "
                "with less disk"
            ) from error
        finally:
            writer.close()
        tensors = _tensors_in(file, layouts)
        assert tensors is not None, f"{file} was written, and its header has other tensors"
        return _SpooledBlocks(FileSource(tensors), layouts)

    @property
    def files(self) -> list[Path]:
        """The kept files."""
        return sorted(self._keep.glob("*.safetensors")) if self._keep is not None else []

    def damaged(self) -> list[Path]:
        """Return the kept files whose data differ from their digest. Reads all of them."""
        return [file for file in self.files if not _is_intact(file)]

    def _evict(self, limit_bytes: int) -> None:
        """Remove the least recently used of the kept files beyond ``limit_bytes``."""
        statuses = [(file.stat(), file) for file in self.files]
        uses = sorted((status.st_atime_ns, status.st_size, file) for status, file in statuses)
        total = sum(size for _, size, _ in uses)
        for _, size, file in uses:
            if total > limit_bytes:
                with contextlib.suppress(OSError):  # on Windows, a process may read it
                    file.unlink()
                total -= size

    def remove_stale(self) -> None:
        remove_stale(self._root or Path(tempfile.gettempdir()), PREFIX)

    def close(self) -> None:
        """Delete the folder. Does nothing in a forked child."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def _create_folder(self) -> Path:
        if self._folder is None:
            self._folder = TemporaryFolder(PREFIX, self._root)
        return self._folder.path

    def __del__(self) -> None:
        self.close()


def spool_in(cache: Path | None, tell: Callable[[str], None] | None = None) -> Spool:
    """Return a spool that keeps quantized weights in the folder ``cache``; None: keeps none."""
    return Spool(keep=cache / QUANTIZED_FOLDER if cache is not None else None, tell=tell)


def has_file(cache: Path, component: Component, precision: str, hardware: Hardware) -> bool:
    """Return whether ``cache`` has a file of ``component``'s quantized weights (`weights_key`)."""
    key = weights_key(component, precision, hardware)
    return bool(key) and (cache / QUANTIZED_FOLDER / f"{key}.safetensors").is_file()


def weights_key(component: Component, precision: str, hardware: Hardware) -> str:
    """Return a digest of all that the weights of ``component`` in ``precision`` are made of.

    The kind of device counts too: its kernels quantize, and may round differently. "" for random
    weights, and while files of the source are not on this machine.
    """
    try:
        origin = origin_of(component, precision)
        if origin is None or not origin["files"]:
            return ""
        adapters = (*component.loras, *component.ip_adapters)
        stamps = [[adapter.file, adapter.scale, *file_stamp(adapter.file)] for adapter in adapters]
    except (GraphError, OSError):
        return ""
    files = [
        {name: value for name, value in file.items() if name != "mtime_ns" or "sha256" not in file}
        for file in origin["files"]
    ]
    settings = asdict(component) | {"checkpoints": (), "precision": precision, "file_line": ""}
    settings |= {"loras": (), "ip_adapters": (), "backing_store": (), "compile": ""}
    code = python_digest(Path(__file__).parents[1] / "modules")
    place = "cpu" if hardware.unified else hardware.device
    versions = [version(name) for name in ("torch", "bitsandbytes", "diffusers", "transformers")]
    return digest_of([settings, origin["commit"], files, stamps, place, versions, code])


@contextmanager
def quantizing_on(device: Device, writer: Any, budget_bytes: int) -> Iterator[None]:
    """Let ``writer`` quantize on ``device`` within ``budget_bytes`` of its memory.

    On the host where the device shares its memory, and where it has too little memory left or no
    kernel for it.
    """
    if device.unified or not isinstance(writer, Writer):
        yield
        return
    elements = min(MOST_ELEMENTS, budget_bytes // BYTES_PER_ELEMENT)

    def quantize(weight: torch.Tensor, precision: str) -> Mapping[str, torch.Tensor]:
        try:
            return quantized_in_parts(weight, precision, device.torch_device, elements)
        except RuntimeError:  # out of memory, or no kernel
            return quantized(weight, precision)

    with device.capped(budget_bytes):
        writer.quantize = quantize
        try:
            yield
        finally:
            writer.quantize = quantized
            device.barrier()
            device.release_cached()


class _SpooledBlocks:
    """Writer of spooled blocks: one read per block, or per tensor if the layout differs."""

    def __init__(self, source: FileSource, layouts: Mapping[str, BlockLayout]) -> None:
        self._source = source
        self._keys = {
            path: [(_key(entry), entry.offset) for entry in layout.entries]
            for path, layout in layouts.items()
            if source.stored(path, torch.uint8) is not None
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

    def table(self, entry: TensorEntry) -> Stored | None:
        """Return the tensor of the file, which is saved as bytes, with the dtype of ``entry``."""
        dtype, shape = str(entry.tensor.dtype).removeprefix("torch."), tuple(entry.tensor.shape)
        file_tensor = self.stored(entry)
        return None if file_tensor is None else replace(file_tensor, dtype=dtype, shape=shape)

    def close(self) -> None:
        self._source.close()


def _key(entry: TensorEntry) -> str:
    """Return the key of a tensor in the file. The blank in it makes it differ from block paths."""
    return f"{entry.names[0]} {entry.field}"


def _tensors_in(file: Path, layouts: Mapping[str, BlockLayout]) -> dict[str, Stored] | None:
    """Return the tensors of ``layouts`` in ``file`` by `_key`, and its blocks by path.

    None without such a file, or if it has other tensors. A block whose layout differs from the
    file's has no entry.
    """
    try:
        file_tensors = {tensor.name: tensor for tensor in stored_tensors(file, "")}
    except GraphError:
        return None
    tensors = dict[str, Stored]()
    for path, layout in layouts.items():
        begins = set()
        for entry in layout.entries:
            tensor = file_tensors.get(_key(entry))
            if tensor is None or tensor.nbytes != entry.nbytes:
                return None
            tensors[tensor.name] = tensor
            begins.add(tensor.begin - entry.offset)
        begin = min(begins, default=0)
        if len(begins) == 1 and begin + layout.nbytes <= file.stat().st_size:
            size = layout.nbytes
            tensors[path] = Stored(path, "uint8", (size,), size, str(file), begin)
    return tensors


def _write(file: Path, layouts: Mapping[str, BlockLayout], writer: Writer) -> None:
    """Write a safetensors file with one uint8 tensor per tensor, and the padding between them.

    Only one block is in memory at a time. The data begin at a page, so that tensors are aligned as
    in memory.
    """
    header = dict[str, Any]()
    begin = 0

    def add(name: str, nbytes: int) -> None:
        nonlocal begin
        offsets = [begin, begin + nbytes]
        header[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": offsets}
        begin += nbytes

    for path, layout in layouts.items():
        start = begin
        for entry in layout.entries:
            if gap := start + entry.offset - begin:
                add(f"padding {begin}", gap)
            add(_key(entry), entry.nbytes)
        if gap := start + layout.nbytes - begin:
            add(f"padding {path} {begin}", gap)
    digest = hashlib.sha256()
    header["__metadata__"] = {"sha256": digest.hexdigest()}  # of as many digits as the data's
    with file.open("xb") as stream:
        stream.write(_header_bytes(header))
        for layout in layouts.values():
            buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cpu")
            writer.write(layout, buffer)
            raw: Any = buffer.numpy()
            digest.update(memoryview(raw))
            stream.write(memoryview(raw))
        header["__metadata__"] = {"sha256": digest.hexdigest()}
        stream.seek(0)
        stream.write(_header_bytes(header))


def _header_bytes(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % PAGE_BYTES)
    return len(text).to_bytes(8, "little") + text


def _is_intact(file: Path) -> bool:
    """Return whether the data of ``file`` have the SHA-256 of its header."""
    digest = hashlib.sha256()
    try:
        with open_regular(file) as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = parse_json(stream.read(length))
            while data := stream.read(1 << 20):
                digest.update(data)
        return bool(header["__metadata__"]["sha256"] == digest.hexdigest())
    except (OSError, InputError, ValueError, KeyError, TypeError):
        return False
