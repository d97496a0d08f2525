"""Atomic file writes, and a size-limited store of JSON entries that several processes may share.

Files: a file exists completely under its name or not at all, whenever a process is killed.

    lock .a.png.new-x7k2p9qd.lock, write .a.png.new-x7k2p9qd -> rename to a.png

A process that is killed in between leaves both files; the next write of a.png removes every
.a.png.new-* whose lock no process has.

Entries: a damaged entry counts as absent. Entries may vanish, and several processes may write them
at once.

    <folder>/<kind>-<key>.json       first line: SHA-256 of the second; second line: the data
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from graphrun.errors import InputError
from graphrun.reading import parse_json, read_bytes
from graphrun.systems import take_lock
from graphrun.units import MIB


def user_cache(environment: Mapping[str, str]) -> Path:
    """Return the cache folder: ``$XDG_CACHE_HOME/graphrun``, or else ``~/.cache/graphrun``."""
    base = Path(environment.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "graphrun"


def write_whole(path: Path, write: Callable[[Path], Any], *, lasting: bool = False) -> None:
    """Call ``write(temporary)``, then rename the temporary file to ``path``. Raises OSError.

    Temporary files of killed processes are removed first. ``lasting``: `os.fsync` before renaming.
    """
    sweep(path)
    with _locked_temporary(path) as temporary:
        write(temporary)
        if lasting:
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
        os.replace(temporary, path)


def python_digest(*places: Path) -> str:
    """Return the SHA-256 over names and contents of the Python files at and below ``places``."""
    total = hashlib.sha256()
    for place in places:
        for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
            total.update(f"{path.relative_to(place.parent)}\0".encode() + path.read_bytes() + b"\0")
    return total.hexdigest()


def package_digest(package: str) -> str:
    """Return the `python_digest` of ``package`` without importing it; "" if it is not found."""
    try:
        spec = find_spec(package)
    except ValueError:  # a module that runs without a file, such as __main__
        return ""
    return (
        python_digest(*map(Path, spec.submodule_search_locations or filter(None, [spec.origin])))
        if spec is not None
        else ""
    )


def sweep(path: Path) -> None:
    """Remove ``path``'s temporary files of killed processes; others are locked, and stay."""
    _remove_unlocked(path.parent, f"{glob.escape(_prefix(path))}*")


def _remove_unlocked(folder: Path, pattern: str) -> None:
    for leftover in {
        path.with_name(path.name.removesuffix(_LOCK)) for path in folder.glob(pattern)
    }:
        with contextlib.suppress(OSError):
            if (
                lock := take_lock(locked_by := leftover.with_name(f"{leftover.name}{_LOCK}"))
            ) is not None:
                leftover.unlink(missing_ok=True)
                lock.release()
                locked_by.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked_temporary(path: Path) -> Iterator[Path]:
    """Provide the path of a new locked temporary file for ``path``, which is deleted at the end."""
    lock = None
    while lock is None:  # another process's `sweep` may take the new lock first
        temporary = path.with_name(f"{_prefix(path)}{secrets.token_hex(4)}")
        locked_by = temporary.with_name(f"{temporary.name}{_LOCK}")
        try:
            lock = take_lock(locked_by)
        except OSError:  # on file systems without locks, `sweep` removes nothing
            break
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
        if lock is not None:
            lock.release()
        locked_by.unlink(missing_ok=True)


def _prefix(path: Path) -> str:
    return f".{path.name}.new-"


_LOCK = ".lock"

# Enough for a few hundred graphs and sizes: a FLUX dry run takes 0.3 MB, a problem or a plan 10 KB.
LIMIT_BYTES = 128 * MIB


def digest_of(content: Any) -> str:
    """Return the first 32 hexadecimal digits of SHA-256 over ``content`` as canonical JSON."""
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()[:32]


class Store:
    """JSON entries by kind and key in ``folder``, which is created with the first entry.

    Beyond ``limit_bytes``, the least recently used entries are removed. If the folder cannot be
    written to, nothing is stored, without an error.
    """

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes

    def get(self, kind: str, key: str) -> Any | None:
        """Return the entry; None if it is absent, damaged or unreadable."""
        path = self._path(kind, key)
        try:
            check, _, text = read_bytes(path).partition(b"\n")
            if hashlib.sha256(text).hexdigest().encode() != check:
                return None
            data = parse_json(text)
        except (InputError, ValueError):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return data

    def put(self, kind: str, key: str, data: Any) -> None:
        """Store ``data``, which must be JSON-ready, and replace an existing entry."""
        text = json.dumps(data, separators=(",", ":")).encode()
        content = hashlib.sha256(text).hexdigest().encode() + b"\n" + text
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._path(kind, key), lambda temporary: temporary.write_bytes(content))
            self._prune()

    def entries(self) -> list[Path]:
        """Return the paths of all entries, the least recently used first."""
        paths_by_time = []
        with contextlib.suppress(OSError):
            for path in self.folder.glob("*.json"):
                with contextlib.suppress(OSError):
                    paths_by_time.append((path.stat().st_mtime_ns, path))
        return [path for _, path in sorted(paths_by_time)]

    def _path(self, kind: str, key: str) -> Path:
        return self.folder / f"{kind}-{key}.json"

    def _prune(self) -> None:
        _remove_unlocked(self.folder, ".*.new-*")
        sizes = []
        for path in self.entries():
            with contextlib.suppress(OSError):
                sizes.append((path, path.stat().st_size))
        excess = sum(size for _, size in sizes) - self.limit_bytes
        for path, size in sizes[:-1]:  # the newest entry was just written
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size


def store_in(folder: Path | None) -> Store | None:
    """Return the store in the cache ``folder``; None without a cache."""
    return Store(folder) if folder is not None else None
