"""What Linux, macOS and Windows do differently. Everything else uses what all of them have: no file
is renamed or deleted while it is open, and text files are written and read as UTF-8 by name.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from pathlib import Path

from filelock import FileLock, Timeout

from graphrun.errors import InputError

_seeking = threading.Lock()


def refuse_forked(process: int, what: str, again: str) -> None:
    """Raises InputError in a process that was forked from the one with id ``process``, where
    ``what`` was made: its threads are not here, and its locks may be held for ever. ``again``: how
    to have one here."""
    if os.getpid() != process:
        raise InputError(
            f"{what} belongs to process {process}, and this process was forked from it: {again} here, or start the process by "
            "spawn (multiprocessing.set_start_method('spawn')), which a CUDA device needs anyway"
        )


def take_lock(path: Path) -> FileLock | None:
    """A lock on the file ``path``, which is created; None where another process has it.
    ``release()`` ends it, and the end of the process does.

    Raises OSError where the file system has no locks.
    """
    lock = FileLock(path, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    return lock


def read_at(file: io.FileIO, view: memoryview, offset: int) -> int:
    """Reads from ``offset`` of ``file`` into ``view``. Returns the bytes read, which may be fewer;
    0 at the end. Raises OSError.

    Several threads may read from one file. Windows has no `os.preadv`.
    """
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), [view], offset)
    with _seeking:
        file.seek(offset)
        return file.readinto(view) or 0


def allow_open_files(count: int) -> None:
    """Raises this process's limit of open files to ``count``, as far as the system lets it. Windows
    has no such limit."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            most = count if hard == resource.RLIM_INFINITY else min(count, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def forget_cached(handle: int) -> None:
    """Drops the file ``handle`` from the page cache, on Linux alone: elsewhere reading it again may
    be as fast as RAM."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def spills_vram(wsl: Path = Path("/dev/dxg")) -> bool:
    """Whether the driver moves what exceeds a card's memory to RAM, so that a run becomes slow
    instead of failing: on Windows, and in its subsystem for Linux (NVIDIA's drivers from 536.40 on;
    their setting is "CUDA - Sysmem Fallback Policy")."""
    return sys.platform == "win32" or wsl.exists()


def pinned_limit_bytes() -> int | None:
    """RLIMIT_MEMLOCK, the bytes that this process may lock; None without a limit, or where the
    system has none."""
    try:
        import resource
    except ImportError:
        return None
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else int(soft)
