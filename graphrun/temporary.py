"""Temporary folders that outlive a killed process only until the next one removes them.

A folder is named after the id of its process, which locks it:

    TMP/graphrun-serve-1234-abcd/    lock    ...
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import psutil
from filelock import FileLock

from graphrun.systems import take_lock

LOCK = "lock"


class TemporaryFolder:
    """A new folder in ``root``; those of killed processes with this ``prefix`` are removed."""

    def __init__(self, prefix: str, root: Path | None = None) -> None:
        remove_stale(root or Path(tempfile.gettempdir()), prefix)
        self._process = os.getpid()
        self.path = Path(tempfile.mkdtemp(prefix=f"{prefix}{self._process}-", dir=root))
        self._lock: FileLock | None = None
        with contextlib.suppress(OSError):  # the file system has no locks
            self._lock = take_lock(self.path / LOCK)

    def close(self) -> None:
        """Delete the folder; may be called again. Does nothing in a forked child."""
        if os.getpid() != self._process:
            return
        if self._lock is not None:
            self._lock.release()
        shutil.rmtree(self.path, ignore_errors=True)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_stale(root: Path, prefix: str) -> list[Path]:
    """Remove and return this user's folders in ``root`` whose processes no longer run.

    A locked folder stays, and one without a lock whose process may yet lock it.
    """
    removed_folders = []
    for folder in sorted(root.glob(f"{prefix}*")):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or not folder.is_dir() or not _is_own(folder):
                continue
            if (folder / LOCK).exists():
                if (lock := take_lock(folder / LOCK)) is None:
                    continue
                lock.release()
            elif _may_run(folder.name.removeprefix(prefix)):
                continue
            shutil.rmtree(folder, ignore_errors=True)
            removed_folders.append(folder)
    return removed_folders


def _is_own(folder: Path) -> bool:
    """Return whether this process's user owns ``folder``; Windows has a TMP for each user."""
    return not hasattr(os, "getuid") or folder.lstat().st_uid == os.getuid()


def _may_run(name: str) -> bool:
    """Return whether the process that ``name`` begins with runs, or no process is named."""
    number = name.partition("-")[0]
    return not number.isdigit() or psutil.pid_exists(int(number))
