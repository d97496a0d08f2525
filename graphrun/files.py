"""Atomic file writes, and a size-limited store of JSON entries that several processes may share.

Files: a file exists completely under its name or not at all, whichever process is killed when.

    write .a.png.new-x7k2p9qd (locked) -> rename to a.png     a process that is killed in between leaves its temporary file,
    unlocked the next write of a.png removes .a.png.new-* that no process locks

Entries: a damaged entry counts as absent. Entries may vanish or be written by several processes at once.

    <folder>/<kind>-<key>.json       first line: SHA-256 of the second; second line: the data
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphrun.errors import InputError
from graphrun.reading import parse_json, read_bytes
from graphrun.units import MIB


def write_whole(path: Path, write: Callable[[Path], Any], *, lasting: bool = False) -> None:
    """Calls ``write(temporary)``, then renames the temporary file to ``path``. Removes temporary files of killed processes first.

    ``lasting``: `os.fsync` before renaming. Raises OSError.
    """
    sweep(path)
    handle, temporary = _locked_temporary(path)
    try:
        write(temporary)
        if lasting:
            os.fsync(handle)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
        os.close(handle)


def sweep(path: Path) -> None:
    """Removes temporary files of ``path`` left by killed processes. Those of running processes are locked and stay."""
    _remove_unlocked(path.parent, f"{glob.escape(_prefix(path))}*")


def _remove_unlocked(folder: Path, pattern: str) -> None:
    for leftover in folder.glob(pattern):
        with contextlib.suppress(OSError), leftover.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink(missing_ok=True)


def _locked_temporary(path: Path) -> tuple[int, Path]:
    """A new temporary file for ``path``: its descriptor, locked, and its path."""
    while True:
        temporary = path.with_name(f"{_prefix(path)}{secrets.token_hex(8)}")
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)  # less the user's umask
        with contextlib.suppress(OSError):  # on file systems without locks, `sweep` removes nothing
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, temporary
        os.close(handle)  # removed by `sweep` in another process before it was locked


def _prefix(path: Path) -> str:
    return f".{path.name}.new-"


# Enough for a few hundred graphs and sizes: a FLUX dry run takes 0.3 MB, a problem or a plan 10 KB.
LIMIT_BYTES = 128 * MIB


def digest_of(content: Any) -> str:
    """First 32 hexadecimal digits of SHA-256 over the canonical JSON form of ``content``."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:32]


class Store:
    """JSON entries by kind and key in ``folder``, which is created with the first entry. Above ``limit_bytes`` in all, the least
    recently used entries are removed. If the folder cannot be written to, nothing is stored, without an error."""

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes

    def get(self, kind: str, key: str) -> Any | None:
        """The entry; None where it is absent, damaged or unreadable."""
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
        """Stores ``data``, which must be JSON-ready, and replaces an existing entry."""
        text = json.dumps(data, separators=(",", ":")).encode()
        content = hashlib.sha256(text).hexdigest().encode() + b"\n" + text
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._path(kind, key), lambda temporary: temporary.write_bytes(content))
            self._prune()

    def entries(self) -> list[Path]:
        """Paths of all entries, the least recently used first."""
        found = []
        with contextlib.suppress(OSError):
            for path in self.folder.glob("*.json"):
                with contextlib.suppress(OSError):
                    found.append((path.stat().st_mtime_ns, path))
        return [path for _, path in sorted(found)]

    def _path(self, kind: str, key: str) -> Path:
        return self.folder / f"{kind}-{key}.json"

    def _prune(self) -> None:
        _remove_unlocked(self.folder, ".*.new-*")
        sizes = []
        for path in self.entries():
            with contextlib.suppress(OSError):
                sizes.append((path, path.stat().st_size))
        excess = sum(size for _, size in sizes) - self.limit_bytes
        for path, size in sizes[:-1]:  # the newest is the one just written
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size
