"""Weights behind a URL: listed and copied with fsspec, to the hub's cache (HF_ASSETS_CACHE).

    s3://bucket/flux/transformer -> ~/.cache/huggingface/assets/graphrun/s3/bucket/flux/transformer/
                                        config.json  model.safetensors  .versions

A copy is used again while its size and version at the URL are those in ``.versions``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import quote

from graphrun.errors import GraphError, GraphrunError, InputError
from graphrun.files import write_whole
from graphrun.reading import path_inside, read_json

_VERSIONS, _LOCK = ".versions", ".lock"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at a URL. ``path``: on its file system. ``version``: changes with the content, as far
    as the file system tells."""

    name: str
    path: str
    nbytes: int
    version: str


@dataclass(frozen=True, slots=True)
class Remote:
    """The folder or file at ``url``. ``place``: this machine's copy; ``folder``: of all copied
    ``files``. ``system``: of fsspec."""

    url: str
    file_line: str
    place: Path
    folder: Path
    files: tuple[RemoteFile, ...]
    system: Any

    def missing(self) -> list[RemoteFile]:
        """Return the files of which this machine has no current copy."""
        versions = _versions(self.folder)
        return [
            file
            for file in self.files
            if versions.get(file.name) != file.version
            or not (self.folder / file.name).is_file()
            or (self.folder / file.name).stat().st_size != file.nbytes
        ]

    def copy(self, progress: Callable[[str, int, int], None] | None = None) -> Path:
        """Copy the missing files, and return ``place``. Waits while another process copies.

        ``progress``: see `graphrun.modules.hub.DownloadCallback`. Raises GraphError; complete files
        stay, and the next call continues with the others.
        """
        from filelock import FileLock

        with _explained(self.url, self.file_line):
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder / _LOCK):
                missing_files, copied_bytes = self.missing(), 0
                total_bytes = sum(file.nbytes for file in missing_files)
                for file in missing_files:
                    hooks = {}
                    if progress is not None:
                        hooks["progress"] = _reporter(progress, copied_bytes, total_bytes)
                    write_whole(
                        self.folder / file.name, functools.partial(self._copy_to, file, hooks)
                    )
                    versions = json.dumps({**_versions(self.folder), file.name: file.version})
                    write_whole(
                        self.folder / _VERSIONS,
                        functools.partial(Path.write_text, data=versions, encoding="utf-8"),
                    )
                    copied_bytes += file.nbytes
        return self.place

    def _copy_to(self, file: RemoteFile, hooks: dict[str, Any], target: Path) -> None:
        from fsspec.callbacks import Callback

        self.system.get_file(file.path, str(target), callback=Callback(hooks=hooks))
        if (nbytes := target.stat().st_size) != file.nbytes:
            raise GraphError(
                f"{self.url}: {file.name} ended after {nbytes:,} of {file.nbytes:,} bytes; run the "
                "command again",
                self.file_line,
            )


def place_of(url: str) -> Path:
    """Return where this machine's copy of ``url`` is or would be: a folder, or one file."""
    from huggingface_hub import constants

    scheme, _, path = url.partition("://")
    steps = (quote(step, safe="") for step in path.split("/") if step)
    return Path(constants.HF_ASSETS_CACHE, "graphrun", scheme, *steps)


def look(url: str, patterns: Sequence[str], ignored: Sequence[str], file_line: str) -> Remote:
    """Return the files at ``url`` whose names match ``patterns`` and not ``ignored``; if it is of
    one file, that file. Raises GraphError at ``file_line`` if they cannot be listed."""
    import fsspec

    place = place_of(url)
    with _explained(url, file_line):
        system, path = fsspec.core.url_to_fs(url)
        system.invalidate_cache()
        whole = system.info(path)
        is_file = whole["type"] == "file"
        folder = place.parent if is_file else place
        files = []
        for entry in [whole] if is_file else system.ls(path, detail=True):
            name = entry["name"].rstrip("/").rpartition("/")[2]
            if is_file or (
                entry["type"] == "file"
                and any(fnmatch(name, pattern) for pattern in patterns)
                and not any(fnmatch(name, pattern) for pattern in ignored)
            ):
                path_inside(folder, name, f"{url} lists", file_line, GraphError)
                name = place.name if is_file else name
                version = f"{entry['size']} {system.ukey(entry['name'])}"
                files.append(RemoteFile(name, entry["name"], int(entry["size"]), version))
    files.sort(key=lambda file: file.name)
    return Remote(url, file_line, place, folder, tuple(files), system)


def _reporter(
    progress: Callable[[str, int, int], None], copied_bytes: int, total_bytes: int
) -> Callable[..., None]:
    """Return a hook of fsspec's callbacks for the file after ``copied_bytes`` of all files."""

    def hook(size: int | None, value: int, **_: Any) -> None:
        progress("downloading", copied_bytes + value, total_bytes)

    return hook


def _versions(folder: Path) -> dict[str, str]:
    """Return the version of each file copied to ``folder``; empty if that is not known."""
    try:
        versions = read_json(folder / _VERSIONS)
    except InputError:
        return {}
    return versions if isinstance(versions, dict) else {}


@contextmanager
def _explained(url: str, file_line: str) -> Iterator[None]:
    """Turn every exception of fsspec and its file systems into a GraphError."""
    try:
        yield
    except GraphrunError:
        raise
    except FileNotFoundError as error:
        raise GraphError(f"there is no {url}", file_line) from error
    except Exception as error:  # each file system has errors of its own
        message = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        raise GraphError(f"cannot read {url}: {message}", file_line) from error
