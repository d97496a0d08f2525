"""Atomic file writes, and digests.

A file exists completely under its name or not at all, whenever a process is killed.

    lock .a.png.new-x7k2p9qd.lock, write .a.png.new-x7k2p9qd -> rename to a.png

A process that is killed in between leaves both files; the next write of a.png removes every
.a.png.new-* whose lock no process has.
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

from graphrun.systems import take_lock


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


def digest_of(content: Any) -> str:
    """Return the first 32 hexadecimal digits of SHA-256 over ``content`` as canonical JSON."""
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()[:32]


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
    for leftover in {
        place.with_name(place.name.removesuffix(_LOCK))
        for place in path.parent.glob(f"{glob.escape(_prefix(path))}*")
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
