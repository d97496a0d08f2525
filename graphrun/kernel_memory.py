"""Memory as the kernel reports it: of the machine and of processes in /proc, and of cgroups.

Counted is what cannot be reclaimed without swap: anonymous, shared and locked memory, and the
kernel's memory for the process (page tables, stacks, descriptors). The page cache of files counts
against a limit of the kernel, but is reclaimed before anything is killed, so it is reported apart.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from graphrun.units import KIB

PROC = Path("/proc")
CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
STACK_BYTES = 16384  # of a thread in the kernel, on x86-64 and arm64
SAMPLE_SECONDS = 0.02

# a v1 group without a limit reports 2**63 rounded down to a page
UNLIMITED_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory that the kernel counts for a process or a group, in bytes.

    ``anonymous_bytes``: heaps, stacks, private mappings. ``shared_bytes``: shared memory and tmpfs.
    ``kernel_bytes``: page tables, kernel stacks and, of a group, the kernel's objects.
    ``locked_bytes``: locked pages of files. ``file_bytes``: page cache that can be reclaimed; of a
    process, the pages that it maps.
    """

    anonymous_bytes: int = 0
    shared_bytes: int = 0
    kernel_bytes: int = 0
    locked_bytes: int = 0
    file_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that cannot be reclaimed: everything without ``file_bytes``."""
        return self.anonymous_bytes + self.shared_bytes + self.kernel_bytes + self.locked_bytes


@dataclass(frozen=True, slots=True)
class GroupFolder:
    """A cgroup: its folder, the version of cgroups (1 or 2), and the kernel's files."""

    path: Path
    version: int

    @property
    def limit(self) -> Path:
        """Limit in bytes."""
        return self.path / ("memory.max" if self.version == 2 else "memory.limit_in_bytes")

    @property
    def current(self) -> Path:
        """Bytes in use, page cache included."""
        return self.path / ("memory.current" if self.version == 2 else "memory.usage_in_bytes")

    @property
    def peak(self) -> Path:
        """Most bytes in use, page cache included."""
        return self.path / ("memory.peak" if self.version == 2 else "memory.max_usage_in_bytes")

    @property
    def processes(self) -> Path:
        return self.path / "cgroup.procs"

    @property
    def control(self) -> Path:
        """Controllers of child groups (version 2)."""
        return self.path / "cgroup.subtree_control"


def process_bytes(process: int | None = None, proc: Path = PROC) -> MemoryUse:
    """Return the memory of a process now (default: this one).

    Anonymous memory is exact on Linux. Kernel memory is page tables and kernel stacks only: up to 1
    MiB less than a group counts for the process. Pages shared with a forked process count in both.
    Other systems: the process's private bytes. Raises OSError if the process has ended.
    """
    folder = proc / (str(process) if process else "self")
    if sys.platform != "linux":
        import psutil

        return MemoryUse(anonymous_bytes=psutil.Process(process).memory_full_info().uss)
    status = numbers((folder / "status").read_text(encoding="utf-8"))
    try:
        rollup = numbers((folder / "smaps_rollup").read_text(encoding="utf-8"))
    except OSError:  # a kernel before 4.14
        rollup = {}
    anonymous = rollup.get("Anonymous:", status.get("RssAnon:", 0))
    shared = status.get("RssShmem:", 0)
    resident = rollup.get("Rss:", status.get("VmRSS:", 0))
    return MemoryUse(
        anonymous_bytes=anonymous * 1024,
        shared_bytes=shared * 1024,
        kernel_bytes=status.get("VmPTE:", 0) * 1024 + status.get("Threads:", 1) * STACK_BYTES,
        file_bytes=max(0, resident - anonymous - shared) * 1024,
    )


class ProcessPeak:
    """The most anonymous and shared bytes of this process since `reset`, from the kernel's marks.

    A context manager; a thread measures every ``sample_seconds`` meanwhile. Linux keeps one mark of
    the process's pages, including pages of files (VmHWM of proc_pid_status(5)). The mark less the
    most pages of files seen is a lower bound of the peak, and so is every sample: their maximum is
    the peak unless pages of files were dropped and read again at that moment. `reset` restarts the
    mark (proc_pid_clear_refs(5)), also for others in this process that read it. On other systems
    and where the mark cannot be restarted, samples alone count. A forked process does not measure.
    """

    def __init__(self, sample_seconds: float = SAMPLE_SECONDS, proc: Path = PROC) -> None:
        self._seconds, self._folder = sample_seconds, proc / "self"
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._file_bytes = self._peak_bytes = 0
        self._marks = True

    def __enter__(self) -> ProcessPeak:
        self.reset()
        self._thread = threading.Thread(target=self._sample_until, name="process-peak", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if os.getpid() != self._process:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def reset(self) -> None:
        if os.getpid() != self._process:
            return
        with self._lock:
            self._peak_bytes = self._file_bytes = 0
            try:
                (self._folder / "clear_refs").write_text("5", encoding="utf-8")
            except OSError:
                self._marks = False
        self._sample()

    @property
    def nbytes(self) -> int:
        self._sample()
        return self._peak_bytes

    def _sample_until(self) -> None:
        while not self._stop.wait(self._seconds):
            self._sample()

    def _sample(self) -> None:
        if os.getpid() != self._process:
            return  # the thread of the other process may have had the lock
        if sys.platform != "linux":
            self._peak_bytes = max(self._peak_bytes, process_bytes().nbytes)
            return
        with self._lock, contextlib.suppress(OSError):
            status = numbers((self._folder / "status").read_text(encoding="utf-8"))
            own_kib = status.get("RssAnon:", 0) + status.get("RssShmem:", 0)
            self._file_bytes = max(self._file_bytes, status.get("RssFile:", 0) * KIB)
            mark_bytes = status.get("VmHWM:", 0) * KIB - self._file_bytes if self._marks else 0
            self._peak_bytes = max(self._peak_bytes, own_kib * KIB, mark_bytes)


def group_bytes(group: GroupFolder) -> MemoryUse:
    """Return the memory of a group and its children now, from its memory.stat. Raises OSError.

    The kernel may postpone counting of up to 64 pages for each CPU.
    """
    stat = numbers((group.path / "memory.stat").read_text(encoding="utf-8"))
    if group.version == 2:
        anonymous, shared, cache = (stat.get(key, 0) for key in ("anon", "shmem", "file"))
        parts = ("kernel_stack", "pagetables", "percpu", "vmalloc", "slab")
        kernel = stat.get("kernel", sum(stat.get(key, 0) for key in parts))  # from Linux 5.18 on
        kernel += stat.get("sock", 0)
        unevictable = stat.get("unevictable", 0)
    else:
        keys = ("total_rss", "total_shmem", "total_cache", "total_unevictable")
        anonymous, shared, cache, unevictable = (stat.get(key, 0) for key in keys)
        kernel = number(group.path / "memory.kmem.usage_in_bytes")
    fixed = max(0, unevictable - anonymous - shared)
    return MemoryUse(anonymous, shared, kernel, fixed, max(0, cache - shared - fixed))


def current_group(process: int | None = None, proc: Path = PROC) -> GroupFolder | None:
    """Return a process's group (default: own); None if unseen. Raises OSError if it has ended."""
    membership = proc / (str(process) if process else "self") / "cgroup"
    names = _group_names(membership.read_text(encoding="utf-8"))
    version = 1 if 1 in names else 2
    if version not in names:
        return None
    for line in (proc / "self" / "mountinfo").read_text(encoding="utf-8").splitlines():
        fields, _, tail = line.partition(" - ")
        kind, _, options = tail.split(" ", 2)
        if (kind, version) != ("cgroup2", 2) and not (
            (kind, version) == ("cgroup", 1) and "memory" in options.split(",")
        ):
            continue
        # the mount shows the part of the hierarchy below its root; a container may see no more
        root, folder = (_unescape(text) for text in fields.split()[3:5])
        name = names[version]
        if name == root or root == "/":
            inner = name.removeprefix(root).lstrip("/")
        elif name.startswith(root + "/"):
            inner = name[len(root) + 1 :]
        else:
            continue
        if ".." not in inner.split("/") and (Path(folder) / inner).is_dir():
            return GroupFolder(Path(folder) / inner, version)
    return None


@dataclass(frozen=True, slots=True)
class Limit:
    """A cgroup's memory limit.

    ``path``: the file with the limit. ``version``: of cgroups. ``used_bytes``: without the page
    cache of files, which the kernel reclaims before it refuses memory.
    """

    path: str
    version: int
    nbytes: int
    used_bytes: int

    @property
    def left_bytes(self) -> int:
        return max(0, self.nbytes - self.used_bytes)


def memory_limits(root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP) -> tuple[Limit, ...]:
    """Return the memory limits of this process's cgroup and its parents, smallest first.

    ``membership``: the file that lists this process's groups. In a container, the group's files may
    be at ``root`` itself.
    """
    names = _group_names(_text(membership))
    limits = []
    for version, folder, prefix in ((2, root, ""), (1, root / "memory", "total_")):
        name = Path(names.get(version, "/"))
        for path in (name, *name.parents):
            group = GroupFolder(folder / str(path).lstrip("/"), version)
            limit_text = _text(group.limit).strip()
            if limit_text.isdigit() and int(limit_text) < UNLIMITED_BYTES:
                stat = numbers(_text(group.path / "memory.stat"))
                cache_bytes = sum(
                    stat.get(f"{prefix}{key}", 0) for key in ("inactive_file", "active_file")
                )
                used_bytes = max(0, number(group.current) - cache_bytes)
                limits.append(Limit(str(group.limit), version, int(limit_text), used_bytes))
    return tuple(sorted(limits, key=lambda item: item.nbytes))


def available_bytes(meminfo: Path = MEMINFO) -> int:
    """Return the bytes that can be taken without swapping.

    That is the kernel's MemAvailable, or psutil's estimate if there is none. Not MemTotal: a
    virtual machine may start with less memory than it gets later, and other processes use a part of
    it.
    """
    if available_kib := numbers(_text(meminfo)).get("MemAvailable:"):
        return available_kib * KIB
    import psutil

    return int(psutil.virtual_memory().available)


def _group_names(membership: str) -> dict[int, str]:
    """Return the version of cgroups -> the path of a process's memory group, from the lines
    ``number:controllers:path`` of proc_pid_cgroup(5)."""
    names = {}
    for line in membership.splitlines():
        _, controllers, name = (line.split(":", 2) + ["", ""])[:3]
        if name and (not controllers or "memory" in controllers.split(",")):
            names[1 if controllers else 2] = name
    return names


def _text(path: Path) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def words(path: Path) -> list[str]:
    """Return the words of a file of the kernel; none if it cannot be read."""
    return _text(path).split()


def number(path: Path) -> int:
    """Return the number that a file of the kernel begins with, else 0."""
    first_words = words(path)[:1]
    return int(first_words[0]) if first_words and first_words[0].isdigit() else 0


def numbers(text: str) -> dict[str, int]:
    """Return the number after each name at the start of a line."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _unescape(text: str) -> str:
    """Return a path of mountinfo, in which spaces are octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
