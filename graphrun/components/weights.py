"""The files of a component's source: where its folder is, whether its safetensors are whole, and which tensors they hold.

Decides which files count and refuses broken ones by name. Must not know modules. Pickled weights are never read, and of
safetensors only the headers: names, dtypes and shapes.

    file.safetensors    | header's length, 8 bytes | header: {name: {dtype, shape, data_offsets}} | data ............ |
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphrun.errors import GraphError

# Half-precision copies and other frameworks' exports that stand beside the weights in many repositories.
_LEFT_OUT = ["*.fp16.*", "*.non_ema.*", "*openvino*", "*onnx*"]

# Bits of an element of each dtype of the format, and torch's name for it where graphrun's components may have it (safetensors' own
# `Dtype`). A header may have 100 MB at most (`MAX_HEADER_SIZE`).
_DTYPES = {
    **{"F64": (64, "float64"), "F32": (32, "float32"), "F16": (16, "float16"), "BF16": (16, "bfloat16"), "BOOL": (8, "bool")},
    **{"I64": (64, "int64"), "I32": (32, "int32"), "I16": (16, "int16"), "I8": (8, "int8"), "U8": (8, "uint8")},
    **{"U64": (64, "uint64"), "U32": (32, "uint32"), "U16": (16, "uint16"), "C64": (64, "complex64")},
    **{"F6_E2M3": (6, "float6_e2m3fn"), "F6_E3M2": (6, "float6_e3m2fn")},
    **{"F8_E4M3": (8, "float8_e4m3fn"), "F8_E5M2": (8, "float8_e5m2"), "F8_E8M0": (8, "float8_e8m0fnu"), "F4": (4, "float4")},
}
_LONGEST_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a safetensors header describes it: ``dtype`` by torch's name, ``nbytes`` in ``file`` from ``begin`` on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str = ""
    begin: int = 0


def find_folder(source: str, patterns: tuple[str, ...], where: str) -> Path:
    """The local folder of ``source`` with the files that match ``patterns``; from the hub's cache, or downloaded to it.

    ``source`` is an absolute path or ``owner/repo[/subfolder]``. Raises GraphError at ``where``.
    """
    if Path(source).is_absolute():
        if not Path(source).is_dir():
            raise GraphError(f"no such folder: {source}; give the source's folder, or remove source: for random weights", where)
        return Path(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    owner, repository, *below = source.split("/")
    inside = "/".join(below)
    wanted = [f"{inside}/{pattern}" if inside else pattern for pattern in patterns]
    try:
        root = snapshot_download(f"{owner}/{repository}", allow_patterns=wanted, ignore_patterns=_LEFT_OUT)
    except (OSError, ValueError, HfHubHTTPError) as error:
        text = f"cannot get {source} from the hub ({_first_line(error)}); download it, and give its folder"
        raise GraphError(text, where) from error
    folder = Path(root) / inside
    if not folder.is_dir():
        raise GraphError(f"the repository {owner}/{repository} has no folder {inside}", where)
    return folder


def local_folder(source: str) -> Path | None:
    """The folder of ``source`` if it is on this machine: a folder, or what of a repository lies in the hub's cache. No network.

    Only some of a repository's files may be there. None where there is nothing.
    """
    if Path(source).is_absolute():
        return Path(source) if Path(source).is_dir() else None
    from huggingface_hub import constants

    owner, repository, *below = source.split("/")
    root = Path(constants.HF_HUB_CACHE) / f"models--{owner}--{repository}"
    try:
        revision = (root / "refs" / "main").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    folder = root.joinpath("snapshots", revision, *below)
    return folder if folder.is_dir() else None


def config_file(source: str | None) -> Path | None:
    """The configuration of a component in its source's folder, if that is on this machine."""
    folder = local_folder(source) if source is not None else None
    file = folder / "config.json" if folder is not None else None
    return file if file is not None and file.is_file() else None


def has_weights(folder: Path) -> bool:
    """Whether there are safetensors, or an index of them, in ``folder``: whole or not."""
    return bool(_indices(folder) or _single(folder))


def weight_files(folder: Path, where: str) -> tuple[Path, ...]:
    """The safetensors files in ``folder``, shards in order, each checked to be whole.

    Raises GraphError when there is none, a shard of the index is missing, or a file is cut or corrupt.
    """
    files = tuple(_listed(folder, where))
    for file in files:
        _header(file, where)
    return files


def stored_tensors(folder: Path, where: str) -> tuple[Stored, ...]:
    """Every tensor in the safetensors of ``folder``, from their headers alone. Raises what `weight_files` raises."""
    return tuple(tensor for file in _listed(folder, where) for tensor in _header(file, where))


def file_stamps(folder: Path, where: str) -> list[list[Any]]:
    """Name, bytes and time of writing of each file that `weight_files` finds: what changes when the weights do. May be missing."""
    found: list[list[Any]] = []
    for file in _listed(folder, where) if has_weights(folder) else ():
        try:
            status = file.stat()
            found.append([file.name, status.st_size, status.st_mtime_ns])
        except OSError:
            found.append([file.name])
    return found


def _listed(folder: Path, where: str) -> list[Path]:
    indices = _indices(folder)
    files = [folder / name for name in _shards(indices[0], where)] if indices else _single(folder)
    if not files:
        raise GraphError(f"no safetensors in {folder}", where)
    return files


def _indices(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.safetensors.index.json") if ".fp16." not in path.name)


def _single(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.safetensors") if ".fp16." not in path.name)


def _shards(index: Path, where: str) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if not all(isinstance(name, str) for name in names):
            raise TypeError("a file's name must be a text")
        return names
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise GraphError(f"{index} is no index of safetensors: {_first_line(error)}", where) from error


def _header(file: Path, where: str) -> list[Stored]:
    """What the header of ``file`` says, checked against itself and the file's size."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST_HEADER_BYTES):
                raise _broken(file, f"is cut or corrupt: its header should have {length} bytes and the file has {size}", where)
            header = json.loads(opened.read(length))
        items = {name: item for name, item in header.items() if name != "__metadata__"}
        end = 8 + length + max((item["data_offsets"][1] for item in items.values()), default=0)
        tensors = [_stored(name, item, str(file), 8 + length) for name, item in items.items()]
    except FileNotFoundError as error:
        raise _broken(file, "is missing", where) from error
    except OSError as error:
        raise _broken(file, f"cannot be read: {error.strerror}", where) from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise _broken(file, "is corrupt: its header is not that of a safetensors file", where) from error
    if end != size:
        raise _broken(file, f"is cut or corrupt: its header describes {end} bytes and the file has {size}", where)
    return tensors


def _stored(name: str, item: Any, file: str, start: int) -> Stored:
    """Raises ValueError, or what else a wrong type raises, where the item does not describe a tensor."""
    bits, dtype = _DTYPES[item["dtype"]]
    shape, (begin, end) = tuple(item["shape"]), item["data_offsets"]
    if any(type(n) is not int or n < 0 for n in (*shape, begin, end)) or 8 * (end - begin) != bits * math.prod(shape):
        raise ValueError(name)
    return Stored(name, dtype, shape, end - begin, file, start + begin)


def _broken(file: Path, what: str, where: str) -> GraphError:
    return GraphError(f"{file} {what}; get it again", where)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
