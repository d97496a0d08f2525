"""The files of a component's source: where its folder is, and whether its safetensors are whole.

Decides which files count and refuses broken ones by name. Must not know modules. Pickled weights are never read.
"""

from __future__ import annotations

import json
from pathlib import Path

from graphrun.errors import GraphError

# Half-precision copies and other frameworks' exports that stand beside the weights in many repositories.
_LEFT_OUT = ["*.fp16.*", "*.non_ema.*", "*openvino*", "*onnx*"]


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


def weight_files(folder: Path, where: str) -> tuple[Path, ...]:
    """The safetensors files in ``folder``, shards in order, each checked to be whole.

    Raises GraphError when there is none, a shard of the index is missing, or a file is cut or corrupt.
    """
    indices = sorted(path for path in folder.glob("*.safetensors.index.json") if ".fp16." not in path.name)
    if indices:
        files = tuple(folder / name for name in _shards(indices[0], where))
    else:
        files = tuple(sorted(path for path in folder.glob("*.safetensors") if ".fp16." not in path.name))
    if not files:
        raise GraphError(f"no safetensors in {folder}", where)
    for file in files:
        if text := _fault(file):
            raise GraphError(f"{file} {text}; get it again", where)
    return files


def _shards(index: Path, where: str) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise GraphError(f"{index} is no index of safetensors: {_first_line(error)}", where) from error


def _fault(file: Path) -> str:
    """What is wrong with a safetensors file: 8 bytes header length, a JSON header, then data as far as the header says."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > size - 8:
                return f"is cut or corrupt: its header should have {length} bytes and the file has {size}"
            header = json.loads(opened.read(length))
        end = 8 + length + max((item["data_offsets"][1] for name, item in header.items() if name != "__metadata__"), default=0)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return "is corrupt: its header is not that of a safetensors file"
    return "" if end == size else f"is cut or corrupt: its header describes {end} bytes and the file has {size}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
