"""A folder of small JSON entries that may vanish, be damaged, or be written by several processes at once, without harm.

Decides how an entry is kept, never what. An entry is whole under its name or absent; one that does not read back is absent too.

    <folder>/<kind>-<key>.json       first line: SHA-256 of the second; second line: the data

Files that are whole under their names or absent, whatever is killed when. Knows nothing of what they hold.

write .a.png.new-x7k2p9qd (locked) -> rename to a.png      killed between: the lock goes with the process, the file stays,
the next to write a.png: .a.png.new-* that nobody locks are swept away           and whoever writes a.png next sweeps it away
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphrun.units import MIB


def write_whole(path: Path, write: Callable[[Path], Any], *, lasting: bool = False) -> None:
    """``write(temporary)`` makes the content, which then appears at ``path``; what dead processes left of it is gone.

    ``lasting``: it is on the disk for good before it appears. Raises OSError.
    """
    sweep(path)
    handle, temporary = _begun(path)
    try:
        write(temporary)
        os.fchmod(handle, 0o644)
        if lasting:
            os.fsync(handle)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
        os.close(handle)


def sweep(path: Path) -> None:
    """Removes what processes that were killed while they wrote ``path`` left beside it; a living one's file is locked."""
    for torn in path.parent.glob(f"{glob.escape(_prefix(path))}*"):
        with contextlib.suppress(OSError), torn.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            torn.unlink(missing_ok=True)


def _begun(path: Path) -> tuple[int, Path]:
    while True:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=_prefix(path))
        with contextlib.suppress(OSError):  # where files cannot be locked nobody's are swept
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, Path(name)
        os.close(handle)  # swept away before it was locked


def _prefix(path: Path) -> str:
    return f".{path.name}.new-"


# A FLUX dry run takes 0.3 MB, a problem or a plan 10 KB: a few hundred graphs and sizes.
LIMIT_BYTES = 128 * MIB

# A temporary file as old as this was left by a process that died.
STALE_SECONDS = 3600.0


def digest_of(content: Any) -> str:
    """First 32 hexadecimal digits of SHA-256 over the canonical JSON form of ``content``."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:32]


class Store:
    """Entries by kind and key in ``folder``, which is made when the first one is written. The least recently used go first when
    all together take more than ``limit_bytes``. A folder that cannot be written to keeps nothing; that is no error."""

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes

    def get(self, kind: str, key: str) -> Any | None:
        """The entry, or None: absent, damaged, or not readable."""
        path = self._path(kind, key)
        try:
            check, _, text = path.read_bytes().partition(b"\n")
            if hashlib.sha256(text).hexdigest().encode() != check:
                return None
            data = json.loads(text)
        except (OSError, ValueError):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return data

    def put(self, kind: str, key: str, data: Any) -> None:
        """Keep ``data``, which must be JSON, in place of what is there."""
        text = json.dumps(data, separators=(",", ":")).encode()
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=".new-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
                os.replace(name, self._path(kind, key))
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise
            self._prune()

    def entries(self) -> list[Path]:
        """The files of all entries, the least recently used first."""
        found = []
        with contextlib.suppress(OSError):
            for path in self.folder.glob("*.json"):
                with contextlib.suppress(OSError):
                    found.append((path.stat().st_mtime_ns, path))
        return [path for _, path in sorted(found)]

    def _path(self, kind: str, key: str) -> Path:
        return self.folder / f"{kind}-{key}.json"

    def _prune(self) -> None:
        entries = self.entries()
        sizes = []
        for path in entries:
            with contextlib.suppress(OSError):
                sizes.append((path, path.stat().st_size))
        excess = sum(size for _, size in sizes) - self.limit_bytes
        for path, size in sizes[:-1]:  # the newest is the one just written
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size
        for path in self.folder.glob(".new-*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()
