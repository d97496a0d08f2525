"""Python as graphrun finds it on Windows: takes away modules, calls and signals of POSIX, and
refuses to rename or delete a file that this process has open. Then runs the code given as the first
argument.

What other packages import is left to them: they have code of their own for Windows.
"""

from __future__ import annotations

import builtins
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

MODULES = ("fcntl", "resource", "termios", "pwd", "grp")
CALLS = (
    "fchmod",
    "fchown",
    "fork",
    "preadv",
    "pread",
    "posix_fadvise",
    "getuid",
    "geteuid",
    "O_CLOEXEC",
    "O_DIRECT",
    "sched_getaffinity",
)
SIGNALS = ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGALRM")
# of the standard library, through which graphrun renames and deletes
BETWEEN = (
    "os",
    "pathlib",
    "shutil",
    "contextlib",
)


def take_away() -> None:
    original_import = builtins.__import__

    def imported(name: str, globals: Any = None, *rest: Any, **keywords: Any) -> Any:
        if name in MODULES and str((globals or {}).get("__name__", "")).partition(".")[0] in (
            "graphrun",
            "filelock",
        ):
            raise ImportError(f"this system has no {name}")
        return original_import(name, globals, *rest, **keywords)

    builtins.__import__ = imported
    for module, names in ((os, CALLS), (signal, SIGNALS)):
        for name in names:
            delattr(module, name)
    for name in ("rename", "replace", "unlink", "remove"):
        setattr(os, name, refusing(getattr(os, name)))


def refusing(change: Callable[..., Any]) -> Callable[..., Any]:
    """``change`` (its first one or two arguments are paths), which fails where graphrun calls it
    for a file that is open."""

    def changed(*paths: Any, **options: Any) -> Any:
        for path in paths:
            if (
                options.get("dir_fd") is None
                and os.path.realpath(path) in open_files()
                and graphrun_calls()
            ):
                raise PermissionError(13, "the file is in use", str(path))
        return change(*paths, **options)

    return changed


def open_files() -> set[str]:
    return {os.path.realpath(f"/proc/self/fd/{handle}") for handle in os.listdir("/proc/self/fd")}


def graphrun_calls() -> bool:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in BETWEEN:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).startswith("graphrun")


take_away()
exec(sys.argv[1])
