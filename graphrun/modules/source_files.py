"""Find the files of a component's source, check that its safetensors are complete, list tensors.

Pickled weights are never read. Of safetensors, only the headers are read: names, dtypes and shapes.

    source
    /folder                     owner/name/transformer       a component's folder, as diffusers
                                                             lays it out
    /model.safetensors          owner/name/model.safetensors one file; its tensors in any order
                                owner/name@revision/...      a commit, branch or tag, with "/" in
                                                             its name as %2F
    s3://bucket/folder          a URL that fsspec reads (`graphrun.modules.remote`)

    file.safetensors (`graphrun.reading.safetensors_header`)
    | header's length, 8 bytes | header: {name: {dtype, shape, data_offsets}} | data ............ |
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphrun.errors import GraphError, InputError
from graphrun.graph.parts import Component
from graphrun.limits import LIMITS, require
from graphrun.modules import hub, remote
from graphrun.reading import (
    is_url,
    open_regular,
    parse_json,
    path_inside,
    read_json,
    safetensors_header,
)

if TYPE_CHECKING:
    import torch

# files of a component's folder, and of a tokenizer's, scheduler's or processor's
OF_COMPONENT, OF_PART = ("*.json", "*.safetensors"), ("*.json", "*.txt", "*.model")

# half-precision copies and exports for other frameworks, which many repositories also contain
_IGNORED_PATTERNS = ["*.fp16.*", "*.fp16-*", "*.non_ema.*", "*openvino*", "*onnx*"]
_PICKLED = (".bin", ".ckpt", ".pt", ".pth")

# bits per element of each dtype of the format, and torch's name for it (safetensors' `Dtype`)
_DTYPES = {
    **{
        "F64": (64, "float64"),
        "F32": (32, "float32"),
        "F16": (16, "float16"),
        "BF16": (16, "bfloat16"),
        "BOOL": (8, "bool"),
    },
    **{
        "I64": (64, "int64"),
        "I32": (32, "int32"),
        "I16": (16, "int16"),
        "I8": (8, "int8"),
        "U8": (8, "uint8"),
    },
    **{
        "U64": (64, "uint64"),
        "U32": (32, "uint32"),
        "U16": (16, "uint16"),
        "C64": (64, "complex64"),
    },
    **{"F6_E2M3": (6, "float6_e2m3fn"), "F6_E3M2": (6, "float6_e3m2fn")},
    **{
        "F8_E4M3": (8, "float8_e4m3fn"),
        "F8_E5M2": (8, "float8_e5m2"),
        "F8_E8M0": (8, "float8_e8m0fnu"),
        "F4": (4, "float4"),
    },
}
_COMPUTABLE = re.compile(r"B?F(16|32|64)|F8_\w+")
_INDEX, _WEIGHTS = "*.safetensors.index*.json", "*.safetensors"
WEIGHT_FILES = (".safetensors", ".gguf")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file, as a header describes it.

    ``dtype``: torch's name. The data are ``nbytes`` from offset ``begin`` of ``file``. ``quant``:
    the type of a quantized GGUF tensor, whose rows are bytes; "" for others.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str = ""
    begin: int = 0
    quant: str = ""

    @property
    def leaves(self) -> tuple[Stored, ...]:
        """The tensors in files that this tensor is made of: itself."""
        return (self,)

    def make(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensor from the values of its leaves."""
        return values[0]


FileStamp = tuple[int, int]
"""Size of a file, and its modification time in ns."""


def file_stamp(file: Path | str | int) -> FileStamp:
    """Return the stamp of ``file``, a path or an open file's number. Raises OSError."""
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def find_folder(source: str, patterns: tuple[str, ...], file_line: str, variant: str = "") -> Path:
    """Return the local path of ``source`` with the files that match ``patterns``.

    Missing files are downloaded to the hub's cache, those of a URL to graphrun's. ``source``: an
    absolute path, a URL or ``owner/repo[@revision][/subfolder or file]``. ``variant``: which
    variant of the files to use. Raises GraphError at ``file_line``.
    """
    if is_url(source):
        return remote_files(source, patterns, file_line, variant).copy()
    if Path(source).is_absolute():
        if not os.path.exists(source):
            raise GraphError(
                f"no such folder: {source}; give the path of a folder, or remove source: for "
                "random weights",
                file_line,
            )
        return Path(source)
    repository, _, subpath = split_source(source)
    revision, allow, ignore = hub_query(source, patterns, variant)
    root = hub.snapshot(repository, revision, allow, ignore, subject=source, file_line=file_line)
    place = root / subpath
    if not place.exists():
        kind = "file" if subpath.endswith(WEIGHT_FILES) else "folder"
        raise GraphError(f"the repository {repository} has no {kind} {subpath}", file_line)
    return place


def hub_query(
    source: str, patterns: Sequence[str], variant: str = ""
) -> tuple[str | None, list[str], list[str]]:
    """Return (revision, patterns of paths, patterns to exclude) for files of a hub path.

    The revision is the commit in the local cache if there is one, even if the branch has moved
    since.
    """
    _, revision, subpath = split_source(source)
    allow = (
        [subpath]
        if subpath.endswith(WEIGHT_FILES)
        else [f"{subpath}/{pattern}" if subpath else pattern for pattern in patterns]
    )
    commit = commit_of(source)
    return commit if len(commit) == 40 else revision, allow, _ignored(variant)


def _ignored(variant: str) -> list[str]:
    return [pattern for pattern in _IGNORED_PATTERNS if not variant or variant not in pattern]


def remote_files(
    source: str, patterns: Sequence[str], file_line: str, variant: str = ""
) -> remote.Remote:
    """Return the files of the URL ``source`` that `find_folder` copies. Raises GraphError."""
    return remote.look(source, patterns, _ignored(variant), file_line)


def split_source(source: str) -> tuple[str, str | None, str]:
    """Return (``owner/name``, revision or None, path inside the repository) of a hub path."""
    owner, repository, *steps = source.split("/")
    name, separator, revision = repository.partition("@")
    return f"{owner}/{name}", revision.replace("%2F", "/") if separator else None, "/".join(steps)


def commit_of(source: str) -> str:
    """Return the commit of a hub path's revision in the local hub cache; "" for an absolute path, a
    URL or a revision that is not cached."""
    return snapshot.name if (snapshot := _snapshot(source)) is not None else ""


def local_place(source: str) -> Path | None:
    """Return the local folder or file of ``source``, without using the network; None if not local.
    A hub path's snapshot in the hub's cache may be incomplete, and so may the copy of a URL."""
    if is_url(source):
        return place if os.path.exists(place := remote.place_of(source)) else None
    snapshot = Path("/") if Path(source).is_absolute() else _snapshot(source)
    subpath = source if Path(source).is_absolute() else split_source(source)[2]
    return place if snapshot is not None and os.path.exists(place := snapshot / subpath) else None


def _snapshot(source: str) -> Path | None:
    """Return the hub cache's folder of a hub path's revision, named after the commit; else None."""
    if is_url(source):
        return None
    from huggingface_hub import constants

    repository, revision, _ = split_source(source)
    root = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    try:
        commit = (root / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        commit = revision or ""
    return folder if commit and (folder := root / "snapshots" / commit).is_dir() else None


def local_folder(source: str | None) -> Path | None:
    """Return `local_place` if it is a folder, else None."""
    place = local_place(source) if source is not None else None
    return place if place is not None and place.is_dir() else None


def config_file(source: str | None) -> Path | None:
    """Return the ``config.json`` of a component in its source's folder, if that is local."""
    folder = local_folder(source)
    return file if folder is not None and (file := folder / "config.json").is_file() else None


def has_weights(place: Path, variant: str = "") -> bool:
    """Return whether ``place`` is a file, or has safetensors or an index, complete or not."""
    return place.is_file() or bool(
        _of_variant(place, _INDEX, variant) or _of_variant(place, _WEIGHTS, variant)
    )


def complete(source: str, file_line: str, variant: str = "") -> bool:
    """Return whether all weight files of ``source`` are local."""
    place = local_place(source)
    return (
        place is not None
        and has_weights(place, variant)
        and all(file.exists() for file in _listed(place, file_line, variant))
    )


def stored_tensors(place: Path, file_line: str, variant: str = "") -> tuple[Stored, ...]:
    """Return every tensor in the safetensors of ``place``, from their headers. Raises GraphError if
    there is none, a shard of the index is missing, or a file is damaged."""
    return tuple(
        tensor for file in _listed(place, file_line, variant) for tensor in _header(file, file_line)
    )


def file_stamps(place: Path, file_line: str, variant: str = "") -> list[list[Any]]:
    """Return name, bytes and modification time (ns) of each safetensors file; if missing, its
    name."""
    files = _listed(place, file_line, variant) if has_weights(place, variant) else ()
    return [[file.name, *_stamp(file)] for file in files]


def _stamp(file: Path) -> tuple[int, ...]:
    try:
        return file_stamp(file)
    except OSError:
        return ()


def _listed(place: Path, file_line: str, variant: str) -> list[Path]:
    if place.is_file():
        return [place]
    indices = _of_variant(place, _INDEX, variant)
    if (
        files := _shards(indices[0], file_line)
        if indices
        else _of_variant(place, _WEIGHTS, variant)
    ):
        return files
    variants = sorted(
        {
            name
            for path in place.glob("*.safetensors*")
            if (name := variant_of(path.name)) != variant
        }
    )
    pickled = sorted(path.name for path in place.glob("*") if path.suffix in _PICKLED)
    text = f"no safetensors{f' of variant {variant}' if variant else ''} in {place}"
    if variants:
        have = ", ".join(f"variant: {name}" if name else "no variant" for name in variants)
        text += f"; it has files of {have}: set variant:, or give the component its own source:"
    elif pickled:
        names = ", ".join(pickled[:3])
        text += (
            f", only {names}: nothing is unpickled; convert it to safetensors (save_pretrained "
            "does)"
        )
    raise GraphError(text, file_line)


def _of_variant(folder: Path, pattern: str, variant: str) -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if variant_of(path.name) == variant)


def only_variant(folder: Path) -> str:
    """Return the variant to read: "" if there are safetensors without one or none at all."""
    names = {variant_of(path.name) for path in folder.glob("*.safetensors*")}
    return "" if "" in names else min(names, default="")


def variant_of(name: str) -> str:
    """Return the variant in a file name, as diffusers' `_add_variant` writes it.

    ``fp16`` for ``model.fp16.safetensors``, ``model.fp16-00001-of-00002.safetensors`` and
    ``model.safetensors.index.fp16.json``.
    """
    stem, _, index = name.partition(".safetensors")
    return _SHARD.sub("", stem.partition(".")[2]) or index.removeprefix(".index").removesuffix(
        ".json"
    ).strip(".")


def _shards(index: Path, file_line: str) -> list[Path]:
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
    except (InputError, KeyError, TypeError, AttributeError) as error:
        raise GraphError(
            f"{index} is not a safetensors index: {_first_line(error)}", file_line
        ) from error
    return [
        path_inside(
            index.parent,
            name,
            f"{index} is not a safetensors index: it names",
            file_line,
            GraphError,
        )
        for name in names
    ]


def _header(file: Path, file_line: str) -> list[Stored]:
    """Return the tensors in the header of ``file``, which must cover the file without overlap."""
    try:
        with open_regular(file) as content:
            size = os.fstat(content.fileno()).st_size
            length, text = safetensors_header(content, LIMITS.text_bytes)
        if length > size - 8:
            raise broken(
                file,
                f"is truncated or corrupt: its header should have {length} bytes and the file has "
                f"{size}",
                file_line,
            )
        problem = f"{file} has a header of {length:,} bytes"
        require("text_bytes", length, problem, file_line, GraphError)
        header = parse_json(text)
        tensors = [
            _stored(name, item, str(file), 8 + length)
            for name, item in header.items()
            if name != "__metadata__"
        ]
    except GraphError:
        raise
    except InputError as error:
        raise broken(
            file,
            "is missing" if not os.path.lexists(file) else str(error).removeprefix(f"{file}: "),
            file_line,
        ) from error
    except OSError as error:
        raise broken(file, f"cannot be read: {error.strerror}", file_line) from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise broken(
            file, "is corrupt: its header is not a safetensors header", file_line
        ) from error
    # tensors are stored end to end, without overlap or unused bytes
    end = 8 + length
    for tensor in sorted(tensors, key=lambda tensor: (tensor.begin, tensor.nbytes)):
        if tensor.begin != end:
            raise broken(
                file, f"is corrupt: {tensor.name} is not where the tensor before it ends", file_line
            )
        end += tensor.nbytes
    if end != size:
        raise broken(
            file,
            f"is truncated or corrupt: its header describes {end} bytes and the file has {size}",
            file_line,
        )
    return tensors


def _stored(name: str, item: Any, file: str, start: int) -> Stored:
    """Return the tensor that ``item`` describes. Raises ValueError, TypeError, KeyError if none."""
    bits, dtype = _DTYPES[item["dtype"]]
    shape, (begin, end) = tuple(item["shape"]), item["data_offsets"]
    if any(type(n) is not int or n < 0 for n in (*shape, begin, end)) or 8 * (
        end - begin
    ) != bits * math.prod(shape):
        raise ValueError(name)
    refuse_overflow(shape)
    return Stored(name, dtype, shape, end - begin, file, start + begin)


def refuse_overflow(shape: Sequence[int]) -> None:
    """Raise ValueError if torch cannot represent ``shape``: strides must fit 64 bits, even if
    empty."""
    if math.prod(max(1, n) for n in shape) >= 2**63:
        raise ValueError(f"a tensor of shape {list(shape)}")


def refuse_uncomputable(kinds: Mapping[str, str]) -> None:
    """Raise ValueError for a tensor of a safetensors type that torch cannot cast to floating point.
    ``kinds``: name of a tensor -> its type, such as ``BF16``."""
    if odd := [
        f"{name} is {kind}" for name, kind in kinds.items() if not _COMPUTABLE.fullmatch(kind)
    ]:
        raise ValueError(f"{odd[0]}, and torch needs floating-point numbers of 8 bits or more")


def broken(file: Path, problem: str, file_line: str) -> GraphError:
    """Return the error for a damaged ``file``."""
    return GraphError(f"{file} {problem}; download it again", file_line)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def origin_of(component: Component, precision: str) -> dict[str, Any] | None:
    """Return the origin of ``component``'s weights for a trace; None for random weights.

    JSON-ready: ``source``; ``commit`` ("" for a path); ``files``: each with ``name``, ``bytes``,
    ``mtime_ns`` and, if the hub's cache names the file by its content, ``sha256``. Raises OSError
    for a missing file.
    """
    source = component.source_in(precision)
    place = local_place(source) if source is not None else None
    if source is None or place is None:
        return None
    files = [place] if place.is_file() else _listed(place, component.file_line, component.variant)
    paths = [*files, *(Path(lora.file) for lora in component.loras)]
    return {
        "component": component.name,
        "source": source,
        "commit": commit_of(source),
        "files": [_origin(path) for path in paths],
    }


def commits_of(components: Iterable[Component]) -> tuple[tuple[str, str], ...]:
    """Return (repository, commit) for each repository that ``components`` have weights from.

    A repository is ``owner/name`` or ``owner/name@revision``. Repositories without a commit in the
    local hub cache are omitted.
    """
    commits = {}
    for component in components:
        for source in component.sources:
            if commit := commit_of(source):
                repository, revision, _ = split_source(source)
                commits[
                    f"{repository}@{revision.replace('/', '%2F')}" if revision else repository
                ] = commit
    return tuple(sorted(commits.items()))


def blob(path: Path) -> str:
    """Return the SHA-256 of the file's content if the hub's cache names the file by it, else ""."""
    name = path.resolve().name
    return (
        name
        if path.is_symlink() and len(name) == 64 and path.resolve().parent.name == "blobs"
        else ""
    )


def _origin(path: Path) -> dict[str, Any]:
    origin = dict(zip(("name", "bytes", "mtime_ns"), (path.name, *file_stamp(path)), strict=True))
    return {**origin, "sha256": content} if (content := blob(path)) else origin
