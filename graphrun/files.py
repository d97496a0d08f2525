"""Files that are whole under their names or absent, whatever is killed when. Knows nothing of what they hold.

write .a.png.new-x7k2p9qd (locked) -> rename to a.png      killed between: the lock goes with the process, the file stays,
the next to write a.png: .a.png.new-* that nobody locks are swept away           and whoever writes a.png next sweeps it away
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


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
