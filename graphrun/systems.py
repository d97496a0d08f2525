"""Differences between Linux, macOS and Windows.

All other code uses what the three systems have in common: no file is renamed or deleted while it is
open, and text files are explicitly UTF-8.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import mmap
import os
import sys
import tempfile
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from graphrun.errors import InputError
from graphrun.units import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from filelock import FileLock

_seeking = threading.Lock()
# addresses of the memory of `anonymous_memory`, which forked processes do not have
_unforked_memory = weakref.WeakKeyDictionary[mmap.mmap, int]()
# of PyTorch, c10/core/impl/alloc_cpu.cpp
HUGE_PAGES_VARIABLE = "THP_MEM_ALLOC_ENABLE"
_MAP_FIXED_NOREPLACE = 0x100000  # mmap(2), on every architecture of Linux


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
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        return None
    return lock


def read_at(file: io.FileIO, view: memoryview, offset: int) -> int:
    """Read from ``offset`` of ``file`` into ``view``, and return the number of bytes read.

    Maybe fewer than requested; 0 at the end. Raises OSError. Several threads may read from one
    file. Windows has no `os.preadv`.
    """
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), [view], offset)
    with _seeking:
        file.seek(offset)
        return file.readinto(view) or 0


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files to ``count``, as far as the system permits."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            maximum = count if hard == resource.RLIM_INFINITY else min(count, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, maximum), hard))


def open_direct(path: str) -> io.FileIO | None:
    """Return the file ``path``, open for reads that bypass the page cache (O_DIRECT).

    Offsets, sizes and addresses of reads must then be multiples of 4096, or of what the disk needs.
    None if the system or the file system has no such reads; some refuse the first read with EINVAL
    instead. tmpfs is the page cache, and ignores the flag from Linux 6.6 on. Raises OSError.
    """
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        file = io.FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_DIRECT))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None
    if file_system(file.fileno()) in ("tmpfs", "ramfs"):
        file.close()
        return None
    return file


def reads_directly(folder: Path) -> bool:
    """Return whether the file system of ``folder`` has reads that bypass the page cache.

    Reads a page of a temporary file there. Raises OSError if none can be written.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".graphrun-") as written_file:
        written_file.write(bytes(PAGE_BYTES))
        written_file.flush()
        if (file := open_direct(written_file.name)) is None:
            return False
        with file, contextlib.closing(mmap.mmap(-1, PAGE_BYTES)) as page:
            try:
                return file.readinto(page) == PAGE_BYTES
            except OSError:  # some file systems refuse the read instead of the flag
                return False


def file_system(handle: int, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the open file's file system, as ``ext4``; "" if unknown (proc_pid_mountinfo(5))."""
    number = os.fstat(handle).st_dev
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
        device = f"{os.major(number)}:{os.minor(number)}"
    except (OSError, AttributeError):
        return ""
    for line in lines:
        mount, _, source = line.partition(" - ")
        if device in mount.split()[2:3]:
            return source.split()[0]
    return ""


def forget_cached(handle: int, offset: int = 0, nbytes: int = 0) -> None:
    """Drop ``nbytes`` from ``offset`` of the file ``handle`` from the page cache, on Linux only.

    0 bytes: up to the file's end. On other systems, reading it again may be as fast as RAM.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, offset, nbytes, os.POSIX_FADV_DONTNEED)


def anonymous_memory(nbytes: int, *, huge_pages: bool = True) -> mmap.mmap:
    """Return ``nbytes`` of zeroed memory of this process alone, which starts at a page.

    ``huge_pages``: in pages of 2 MiB, if the kernel has them. A process forked from this one does
    not have the memory, and ends with SIGSEGV if it uses it: while a file is read directly into
    memory that a fork shares, the bytes may arrive in the fork (open(2), O_DIRECT). Raises OSError.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    names = ("MADV_DONTFORK", "MADV_HUGEPAGE" if huge_pages else "MADV_NOHUGEPAGE")
    for advice in [getattr(mmap, name) for name in names if hasattr(mmap, name)]:
        with contextlib.suppress(OSError):
            memory.madvise(advice)
    _unforked_memory[memory] = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return memory


def huge_pages_mode(file: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> str:
    """Return to what memory the kernel gives pages of 2 MiB: to ``always`` all, with ``madvise`` to
    what asks for them, ``never``. "" if unknown, as on systems other than Linux."""
    try:
        return file.read_text(encoding="utf-8").partition("[")[2].partition("]")[0]
    except OSError:
        return ""


def request_huge_pages(environment: MutableMapping[str, str]) -> None:
    """Let PyTorch ask for huge pages for CPU tensors from 2 MiB on, by this process's
    ``environment``. Without effect once PyTorch is loaded, or if the variable is set."""
    if "torch" not in sys.modules:  # it reads the variable at its first tensor
        environment.setdefault(HUGE_PAGES_VARIABLE, "1")


def tensors_get_huge_pages() -> bool:
    """Return whether large CPU tensors of this process are in pages of 2 MiB.

    PyTorch tells its setting by no function, so it is read where PyTorch reads it.
    """
    mode = huge_pages_mode()
    asks = os.environ.get(HUGE_PAGES_VARIABLE) == "1"  # noqa: TID251
    return mode == "always" or (mode == "madvise" and asks)


def _reserve_unforked_memory() -> None:
    """Reserve the addresses of the memory that this process, which was forked, does not have.

    Otherwise the kernel gives them to the next allocation, which inherited tensors then show, and
    which the end of an inherited `mmap` unmaps.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
    for memory, address in list(_unforked_memory.items()):
        if not memory.closed:
            _map(address, len(memory), 0, flags, -1, 0)  # no access; a failure changes nothing


if sys.platform == "linux":
    _map = ctypes.CDLL(None).mmap
    _map.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    _map.restype = ctypes.c_void_p
    os.register_at_fork(after_in_child=_reserve_unforked_memory)


def spills_vram(wsl: Path = Path("/dev/dxg")) -> bool:
    """Return whether the driver moves what exceeds a card's memory to RAM.

    A run then becomes slow instead of failing. This happens on Windows, and in its subsystem for
    Linux (NVIDIA's drivers from 536.40 on; the setting is "CUDA - Sysmem Fallback Policy").
    """
    return sys.platform == "win32" or wsl.exists()


def pinned_limit_bytes() -> int | None:
    """Return RLIMIT_MEMLOCK, the bytes that this process may lock; None if unlimited or unknown."""
    try:
        import resource
    except ImportError:
        return None
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else int(soft)
