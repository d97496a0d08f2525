"""Differences between Linux, macOS and Windows.

All other code uses what the three systems have in common: no file is renamed or deleted while it is
open, and text files are written and read explicitly as UTF-8.
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


def refuse_forked(process: int, subject: str, instruction: str) -> None:
    """Raise InputError in a process that was forked from the process of ``subject``.

    ``process``: the id of the process that made ``subject``. Its threads are not in a fork, and its
    locks may never be released there. ``instruction``: how to get one here.
    """
    if os.getpid() != process:
        raise InputError(
            f"{subject} belongs to process {process}, and this process was forked from it: "
            f"{instruction} here, or start the process by "
            "spawn (multiprocessing.set_start_method('spawn')), which a CUDA device needs anyway"
        )


def take_lock(path: Path) -> FileLock | None:
    """Create the file ``path`` and lock it; return None if another process has the lock.

    ``release()``, or the end of the process, ends the lock. Raises OSError if the file system has
    no locks.
    """
    lock = FileLock(path, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    return lock


def read_at(file: io.FileIO, view: memoryview, offset: int) -> int:
    """Read from ``offset`` of ``file`` into ``view``, and return the number of bytes read.

    It may be fewer than requested; 0 at the end. Raises OSError. Several threads may read from one
    file. Windows has no `os.preadv`.
    """
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), [view], offset)
    with _seeking:
        file.seek(offset)
        return file.readinto(view) or 0


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files to ``count``, as far as the system permits.

    Windows has no such limit.
    """
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            maximum = count if hard == resource.RLIM_INFINITY else min(count, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, maximum), hard))


def forget_cached(handle: int) -> None:
    """Drop the file ``handle`` from the page cache, on Linux only.

    On other systems, reading it again may be as fast as RAM.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def spills_vram(wsl: Path = Path("/dev/dxg")) -> bool:
    """Return whether the driver moves what exceeds a card's memory to RAM.

    A run then becomes slow instead of failing. This happens on Windows, and in its subsystem for
    Linux (NVIDIA's drivers from 536.40 on; the setting is "CUDA - Sysmem Fallback Policy").
    """
    return sys.platform == "win32" or wsl.exists()


def pinned_limit_bytes() -> int | None:
    """Return RLIMIT_MEMLOCK, the bytes that this process may lock.

    None without a limit, or if the system has none.
    """
    try:
        import resource
    except ImportError:
        return None
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else int(soft)
