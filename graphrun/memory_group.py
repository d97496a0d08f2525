"""Limit the memory of processes by a cgroup. Only Linux has them; both versions are supported."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from graphrun.errors import InputError
from graphrun.kernel_memory import (
    PROC,
    SAMPLE_SECONDS,
    GroupFolder,
    MemoryUse,
    current_group,
    group_bytes,
    number,
    numbers,
    process_bytes,
    words,
)
from graphrun.units import MIB, PAGE_BYTES, show_size

PREFIX = "graphrun-"
SCOPE = (
    "run under systemd-run --user --scope -p Delegate=yes -p MemoryMax=8G -p MemorySwapMax=0 "
    "graphrun ..."
)


def enforceable(proc: Path = PROC) -> str:
    """Return why the kernel cannot enforce a limit for this process, and what to type; "": it can.

    Makes a group without processes where that is allowed, and removes it. Raises nothing.
    """
    if sys.platform != "linux":
        return f"only Linux limits the memory of processes, and this is {sys.platform}"
    try:
        group = current_group(proc=proc)
        if group is None:
            return (
                "no memory cgroup of this process is visible: the kernel has no memory controller "
                "(cgroup_disable=memory), or /sys/fs/cgroup is not mounted here"
            )
        if reason := _refusal(group, proc):
            return reason
        folder = group.path / f"{PREFIX}{os.getpid()}-{threading.get_ident()}"
        folder.mkdir()
        folder.rmdir()
    except (OSError, ValueError) as error:
        return f"no memory group can be made ({error}): {SCOPE}"
    return ""


class MemoryGroup:
    """A cgroup of this process with a memory limit and without swap; a context manager.

    Memory that a process has when it enters stays counted in its former group: ``outside_bytes``,
    measured then. It is part of the limit and of each peak, also if it is freed later. So enter
    early; before torch is imported, it is about 10 MB.

    Leaving the context, or the interpreter's end, moves the processes back and removes the group. A
    process that is killed leaves its empty group behind: the next `create` removes it.
    """

    def __init__(self, group: GroupFolder, parent: GroupFolder, limit_bytes: int) -> None:
        self.group, self.parent = group, parent
        self.limit_bytes, self.outside_bytes = limit_bytes, 0
        self._former = dict[int, Path]()  # of each process that entered
        self._spare: Path | None = None  # the group of the parent's processes meanwhile
        self._delegates = False  # whether the parent's controllers were changed
        self._creator, self._closed = os.getpid(), False
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._sampler: threading.Thread | None = None
        self._peak_file: int | None = None
        self._resettable, self._highest_bytes = False, 0
        # at the latest sample
        self._counted_bytes = self._usage_bytes = self._file_bytes = self._unused_bytes = 0
        self._peak_bytes = self._usage_peak_bytes = 0
        self._seconds = SAMPLE_SECONDS

    @classmethod
    def create(
        cls,
        limit_bytes: int,
        name: str = "run",
        *,
        sample_seconds: float = SAMPLE_SECONDS,
        proc: Path = PROC,
    ) -> MemoryGroup:
        """Make a group below this process's, limited to ``limit_bytes``, in whole pages.

        ``name``: letters, digits, ``-`` and ``_``. ``sample_seconds``: between measurements.
        Version 2 permits processes or limited children in a group, not both, so this process and
        its descendants wait in a second child group. Raises InputError with the reason of
        `enforceable`, if the name or the limit is invalid, or if this process has a group already.
        """
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise InputError(f"{name!r} is not a valid group name: use letters, digits, - and _")
        if limit_bytes < PAGE_BYTES:
            raise InputError(f"a memory limit of {limit_bytes} bytes is less than a page")
        if reason := enforceable(proc):
            raise InputError(f"the memory limit cannot be enforced: {reason}")
        parent = current_group(proc=proc)
        assert parent is not None
        _remove_stale(parent.path, proc)
        path = parent.path / f"{PREFIX}{os.getpid()}-{name}"
        existing = [*parent.path.glob(f"{PREFIX}{os.getpid()}-*"), parent.path]
        if existing[0].name.startswith(f"{PREFIX}{os.getpid()}-"):
            raise InputError(f"this process already has the memory group {existing[0]}: remove it")
        result = cls(GroupFolder(path, parent.version), parent, limit_bytes)
        result._seconds = sample_seconds
        try:
            result._make(proc)
        except OSError as error:
            result.remove()
            raise InputError(f"the memory limit cannot be enforced: {error}") from error
        except BaseException:
            result.remove()
            raise
        atexit.register(result.remove)
        return result

    def __enter__(self) -> MemoryGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def enter(self, process: int | None = None, proc: Path = PROC) -> None:
        """Move a process into the group: this one, or the descendant with the id ``process``.

        Processes that it starts later are in the group too. Raises InputError if it is no
        descendant, has ended, or already uses more than the limit.
        """
        identity = process or os.getpid()
        if identity in self._former:
            return
        if not _descends(identity, proc):
            raise InputError(f"process {identity} was not started by this process")
        try:
            former = current_group(process, proc)
            outside_bytes = process_bytes(process, proc).nbytes
        except OSError as error:
            raise InputError(f"process {identity} has ended") from error
        left_bytes = self.limit_bytes - self.outside_bytes - outside_bytes
        if left_bytes < PAGE_BYTES:
            raise InputError(
                f"process {identity} already uses {show_size(outside_bytes)} of the limit of "
                f"{show_size(self.limit_bytes)}: give it more"
            )
        self._former[identity] = former.path if former else self.parent.path
        try:
            self._limit(left_bytes)
            _write(self.group.processes, str(identity))
        except OSError as error:
            del self._former[identity]
            raise InputError(f"process {identity} cannot enter its group: {error}") from error
        self.outside_bytes += outside_bytes
        if self._sampler is None:
            self._sampler = threading.Thread(
                target=self._sample_until_removed, name="memory-group", daemon=True
            )
            self._sampler.start()

    def use(self) -> MemoryUse:
        """Return the memory of the group now, without ``outside_bytes``. Raises OSError."""
        return group_bytes(self.group)

    @property
    def peak_bytes(self) -> int:
        """The most counted bytes since `reset_peak`, ``outside_bytes`` included.

        The kernel's mark of the group's usage less the page cache and freed parts of huge pages,
        or a higher sample of memory.stat. A huge page stays in the usage until all of it is freed,
        or until memory is short, when the kernel splits it (Transparent Hugepage Support, "Partial
        unmap and deferred_split_folio()"). Where there is neither page cache nor such a part, the
        error is 64 pages for each CPU that the group runs on. A peak between two samples may be
        wrong by the page cache that is read or dropped between them. On version 2 before Linux
        6.12, a peak below an earlier mark comes from samples. ``usage_peak_bytes`` is an upper
        bound.
        """
        self._sample()
        return self.outside_bytes + self._peak_bytes

    @property
    def usage_peak_bytes(self) -> int:
        """The most bytes since `reset_peak`, page cache and ``outside_bytes`` included.

        The kernel's mark; below an earlier mark on version 2 before Linux 6.12, the highest sample.
        """
        self._sample()
        return self.outside_bytes + self._usage_peak_bytes

    @property
    def kills(self) -> int:
        """Processes of the group that the kernel killed because of the limit."""
        name = "memory.events" if self.group.version == 2 else "memory.oom_control"
        try:
            text = (self.group.path / name).read_text(encoding="utf-8")
        except OSError:
            return 0
        return numbers(text).get("oom_kill", 0)

    def reset_peak(self) -> None:
        self._sample()
        with self._lock:
            self._peak_bytes, self._usage_peak_bytes = self._counted_bytes, self._usage_bytes

    def remove(self) -> None:
        """Move the processes back and remove the group, and everything made for it.

        Does nothing the second time, and in a process forked from the group's creator. Memory still
        in use is then counted in the parent. Raises OSError if a process cannot be moved.
        """
        if self._closed or os.getpid() != self._creator:
            return
        self._stop.set()
        if self._sampler:
            self._sampler.join()
            self._sample()
        with self._lock:
            if self._peak_file is not None:
                os.close(self._peak_file)
                self._peak_file = None
        default = self._spare or self.parent.path
        _empty(self.group.path, self._former, default)
        if self._delegates:
            _write(self.parent.control, "-memory")
            self._delegates = False
        if self._spare is not None:
            _empty(self._spare, {}, self.parent.path)
            self._spare = None
        self._closed = True
        atexit.unregister(self.remove)

    def _make(self, proc: Path) -> None:
        if self.group.version == 2 and "memory" not in words(self.parent.control):
            if not _is_root(self.parent.path):
                self._spare = self.parent.path / f"{self.group.path.name}-rest"
                self._spare.mkdir()
                for process in words(self.parent.processes):
                    if _descends(int(process), proc):
                        _write(self._spare / "cgroup.procs", process)
            self._delegates = True
            _write(self.parent.control, "+memory")
        self.group.path.mkdir()
        self._limit(self.limit_bytes)
        try:  # version 2 before Linux 6.12 cannot reset the mark, and before 5.19 has none
            self._peak_file = os.open(self.group.peak, os.O_RDWR)
            os.pwrite(self._peak_file, b"0", 0)
            self._resettable = True
        except OSError:
            if self._peak_file is None and self.group.peak.exists():
                self._peak_file = os.open(self.group.peak, os.O_RDONLY)

    def _limit(self, limit_bytes: int) -> None:
        """Set the kernel's limit, and forbid swap where the kernel accounts for it."""
        text = str(limit_bytes)
        _write(self.group.limit, text)
        version_2 = self.group.version == 2
        swap = self.group.path / ("memory.swap.max" if version_2 else "memory.memsw.limit_in_bytes")
        swappiness = self.group.path / "memory.swappiness"
        if swap.exists():
            _write(swap, "0" if version_2 else text)
        if swappiness.exists():
            _write(swappiness, "0")

    def _sample_until_removed(self) -> None:
        while not self._stop.wait(self._seconds):
            self._sample()

    def _sample(self) -> None:
        """Add what was in use since the last sample to the peaks."""
        with self._lock, contextlib.suppress(OSError):
            mark_bytes, earlier_bytes = self._mark(), number(self.group.current)
            use, usage_bytes = group_bytes(self.group), number(self.group.current)
            # Allocations go on between these reads, so their values are of different moments. The
            # page cache changes seldom: it grows if files are read, and shrinks if they are
            # dropped, before or after the mark, or if other memory fills the group, at the mark.
            full = mark_bytes >= self.limit_bytes - self.outside_bytes - MIB
            evicted = full and use.file_bytes < self._file_bytes
            cache_bytes = use.file_bytes if evicted else max(self._file_bytes, use.file_bytes)
            # The least of this sample and the last one, as memory may be freed between these reads.
            used_bytes = use.nbytes + use.file_bytes
            unused_bytes = max(0, min(earlier_bytes, usage_bytes) - used_bytes)
            peak_bytes = mark_bytes - cache_bytes - min(unused_bytes, self._unused_bytes)
            self._counted_bytes, self._file_bytes = use.nbytes, use.file_bytes
            self._unused_bytes = unused_bytes
            self._usage_bytes = max(usage_bytes, use.nbytes)
            self._peak_bytes = max(self._peak_bytes, peak_bytes, self._counted_bytes)
            self._usage_peak_bytes = max(self._usage_peak_bytes, mark_bytes, self._usage_bytes)

    def _mark(self) -> int:
        """Return the kernel's mark since the last sample in bytes; 0 if it is not known."""
        if self._peak_file is None:
            return 0
        mark_bytes = int(os.pread(self._peak_file, 64, 0))
        if self._resettable:
            os.pwrite(self._peak_file, b"0", 0)
            return mark_bytes
        risen, self._highest_bytes = mark_bytes > self._highest_bytes, mark_bytes
        return mark_bytes if risen else 0


def _refusal(group: GroupFolder, proc: Path) -> str:
    """Return why no limited child of ``group`` can be made, "" if it can."""
    if group.version == 1:
        if not _writable(group.path):
            return (
                f"cgroup v1 lets only root limit memory in {group.path}: run as root, or on a "
                "system with cgroup v2"
            )
        return ""
    if "memory" in words(group.control):  # the root, or a group whose processes were moved
        files = [group.path, group.processes]
    elif "memory" not in words(group.path / "cgroup.controllers"):
        return f"cgroup v2 has no memory controller in {group.path}; {SCOPE}"
    else:
        files = [group.path, group.processes, group.control]
    if not all(_writable(path) for path in files):
        return f"cgroup v2 is not delegated to this user in {group.path}; {SCOPE}"
    if _is_root(group.path):
        return ""
    strangers = [text for text in words(group.processes) if not _descends(int(text), proc)]
    if strangers:
        return (
            f"cgroup v2 group {group.path} has other processes ({', '.join(strangers[:5])}), which "
            f"are not moved; {SCOPE}"
        )
    return ""


def _is_root(folder: Path) -> bool:
    """Return whether ``folder`` is the root of version 2, which may have processes and children."""
    return not (folder / "cgroup.events").exists()


def _writable(path: Path) -> bool:
    return os.access(path, os.W_OK | (os.X_OK if path.is_dir() else 0))


def _descends(process: int, proc: Path) -> bool:
    """Return whether ``process`` is this process or was started by it, directly or not."""
    while process > 1 and process != os.getpid():
        try:
            status = (proc / str(process) / "status").read_text(encoding="utf-8")
        except OSError:
            return False
        process = numbers(status).get("PPid:", 0)
    return process == os.getpid()


def _remove_stale(parent: Path, proc: Path) -> None:
    """Remove groups that killed processes left in ``parent``; the kernel keeps those in use."""
    for folder in parent.glob(f"{PREFIX}*-*"):
        process = folder.name.removeprefix(PREFIX).split("-")[0]
        if process.isdigit() and not (proc / process).exists():
            for path, _folders, _files in os.walk(folder, topdown=False):
                with contextlib.suppress(OSError):
                    Path(path).rmdir()


def _empty(folder: Path, homes: dict[int, Path], default: Path) -> None:
    """Move the processes of the group in ``folder`` to their ``homes``, and remove the group.

    Groups in it, which its processes left, are removed too. Waits two seconds for processes that
    are ending, which leave their group later. Raises OSError.
    """
    for _ in _attempts(seconds=2.0):
        for path, _folders, _files in os.walk(folder, topdown=False):
            for text in words(Path(path) / "cgroup.procs"):
                home = homes.get(int(text), default)
                with contextlib.suppress(ProcessLookupError):
                    _write((home if home.is_dir() else default) / "cgroup.procs", text)
            with contextlib.suppress(OSError):
                Path(path).rmdir()
        if not folder.is_dir():
            return
    folder.rmdir()


def _attempts(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.005)


def _write(path: Path, text: str) -> None:
    """Write to a file of the kernel, in one call. Raises OSError."""
    with open(path, "wb", buffering=0) as file:
        file.write(text.encode())
