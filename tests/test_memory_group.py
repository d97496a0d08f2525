"""Memory limits that the kernel enforces, and the peaks that it counts."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil  # noqa: F401 - reads the platform when it is imported
import pytest

from graphrun import memory_group
from graphrun.c_heap import trim_freed_memory
from graphrun.errors import InputError
from graphrun.kernel_memory import (
    GroupFolder,
    MemoryUse,
    current_group,
    group_bytes,
    number,
    process_bytes,
)
from graphrun.memory_group import MemoryGroup, enforceable
from graphrun.systems import huge_pages_mode
from graphrun.units import MIB

LIMIT = 128 * MIB
TOLERANCE = LIMIT // 100
REASON = enforceable()
enforced = pytest.mark.skipif(bool(REASON), reason=REASON)
as_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user"
)


@contextmanager
def waiting_child(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process that runs ``code`` after each line it gets, with ``size`` as the line's number."""
    program = (
        "import sys\nprint('ready', flush=True)\n"
        f"for line in sys.stdin:\n    size = int(line)\n    {code}\n    print('done', flush=True)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def answer(child: subprocess.Popen[str], size: int) -> str:
    """Let the child run its code with ``size``; empty if it dies."""
    assert child.stdin
    assert child.stdout
    child.stdin.write(f"{size}\n")
    child.stdin.flush()
    return child.stdout.readline()


def python(program: str) -> subprocess.Popen[str]:
    """A process that runs ``program``; its error messages are dropped."""
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


ALLOCATE = "block = bytes([1]) * size; del block"


@enforced
@pytest.mark.parametrize("sample_seconds", [0.02, 60.0])
def test_nine_tenths_of_the_limit_live_and_are_the_peak(sample_seconds: float) -> None:
    """The memory is freed at once: the peak needs no sample that meets it."""
    with (
        MemoryGroup.create(LIMIT, sample_seconds=sample_seconds) as group,
        waiting_child(ALLOCATE) as child,
    ):
        group.enter(child.pid)
        assert group.outside_bytes == pytest.approx(process_bytes(child.pid).nbytes, rel=0.02)
        size = LIMIT * 9 // 10 - group.outside_bytes
        assert answer(child, size) == "done\n"
        assert abs(group.peak_bytes - LIMIT * 9 // 10) <= TOLERANCE
        assert 0 <= group.usage_peak_bytes - group.peak_bytes <= TOLERANCE
        assert group.kills == 0


@enforced
def test_more_than_the_limit_is_killed_by_the_kernel_and_counted() -> None:
    with MemoryGroup.create(LIMIT) as group, waiting_child(ALLOCATE) as child:
        group.enter(child.pid)
        assert answer(child, LIMIT * 105 // 100 - group.outside_bytes) == ""
        assert child.wait() == -signal.SIGKILL
        assert group.kills == 1
        assert group.usage_peak_bytes <= LIMIT
        path = group.group.path
    assert not path.exists()


@enforced
def test_page_cache_is_reclaimed_before_anything_is_killed(tmp_path: Path) -> None:
    """The cache of a file three times the limit fills the group, and is no part of the peak."""
    with (tmp_path / "file").open("wb") as file:
        file.truncate(3 * LIMIT)
    code = "file = open(sys.argv[1], 'rb', buffering=0); view = bytearray(size)\n"
    code += "    while file.readinto(view): pass"
    with (
        MemoryGroup.create(LIMIT) as group,
        waiting_child(code, tmp_path / "file") as child,
    ):
        group.enter(child.pid)
        assert answer(child, 4 * MIB) == "done\n"
        assert group.kills == 0
        assert group.usage_peak_bytes > LIMIT // 2
        assert group.use().file_bytes > LIMIT // 2
        assert group.peak_bytes < group.outside_bytes + 16 * MIB


HALVES = """block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.madvise(mmap.MADV_HUGEPAGE); block.write(bytes(size))
    for begin in range(0, size, 2 << 20): block.madvise(mmap.MADV_DONTNEED, begin, 1 << 20)"""


@enforced
@pytest.mark.skipif(huge_pages_mode() in ("", "never"), reason="this system has no huge pages")
def test_freed_halves_of_huge_pages_are_no_part_of_a_peak() -> None:
    """Each page stays in the kernel's usage as a whole until memory is short."""
    with (
        MemoryGroup.create(LIMIT) as group,
        waiting_child(
            f"import mmap; kept = globals().setdefault('blocks', [])\n    {HALVES}\n"
            "    kept.append(block)"
        ) as child,
    ):
        group.enter(child.pid)
        assert answer(child, 64 * MIB) == "done\n"
        used_bytes = number(group.group.current) - group.use().nbytes
        assert used_bytes > 28 * MIB
        group.reset_peak()
        before_bytes = group.peak_bytes
        assert before_bytes - group.outside_bytes < 40 * MIB
        assert answer(child, 40 * MIB) == "done\n"
        assert abs(group.peak_bytes - before_bytes - 40 * MIB) < 4 * MIB
        assert group.kills == 0


@enforced
def test_a_peak_begins_again_with_what_is_in_use() -> None:
    with (
        MemoryGroup.create(LIMIT) as group,
        waiting_child("block = bytes([1]) * size") as child,
    ):
        group.enter(child.pid)
        for size in (80 * MIB, 20 * MIB):
            answer(child, 0)
            group.reset_peak()
            before_bytes = group.peak_bytes
            answer(child, size)
            assert abs(group.peak_bytes - before_bytes - size) <= TOLERANCE


@enforced
def test_shared_memory_counts_as_anonymous_memory_does() -> None:
    code = "import mmap; block = mmap.mmap(-1, size); block.write(bytes(size))"
    with MemoryGroup.create(LIMIT) as group, waiting_child(code) as child:
        group.enter(child.pid)
        answer(child, 32 * MIB)
        assert abs(group.use().shared_bytes - 32 * MIB) <= TOLERANCE
        assert abs(process_bytes(child.pid).shared_bytes - 32 * MIB) <= TOLERANCE


@enforced
def test_the_group_has_no_swap() -> None:
    with MemoryGroup.create(LIMIT) as group:
        assert int(group.group.limit.read_text()) == LIMIT
        swap = {
            name: (group.group.path / name).read_text().strip()
            for name in ("memory.swap.max", "memory.memsw.limit_in_bytes", "memory.swappiness")
            if (group.group.path / name).exists()
        }
    expected = {
        "memory.swap.max": "0",
        "memory.memsw.limit_in_bytes": str(LIMIT),
        "memory.swappiness": "0",
    }
    assert swap.items() <= expected.items()


@pytest.mark.sweep("more", sample=2)
@enforced
@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("with group: group.enter()", 0),
        ("group.enter()", 0),  # at the interpreter's end
        ("with group: group.enter(); sys.exit(3)", 3),
        ("with group: group.enter(); 1 / 0", 1),
        ("with group: group.enter(); signal.raise_signal(signal.SIGINT)", -signal.SIGINT),
        ("with group: group.enter(); child = subprocess.Popen(['sleep', '60'])", 0),
    ],
)
def test_the_group_is_gone_after(body: str, code: int) -> None:
    """And the process is back in its former group, with a child that still runs."""
    program = f"""
import atexit, signal, subprocess, sys
from graphrun.kernel_memory import current_group
from graphrun.memory_group import MemoryGroup

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
sys.stdin.readline()
former, child = current_group(), None

@atexit.register
def report():
    print(current_group() == former, child is None or current_group(child.pid) == former)
    child and child.kill()

group = MemoryGroup.create({LIMIT})
{body}
"""
    with MemoryGroup.create(2 * LIMIT) as group, python(program) as child:
        group.enter(child.pid)
        output, _ = child.communicate("go\n")
        assert (child.returncode, output) == (code, "True True\n")
        assert not [path for path in group.group.path.iterdir() if path.is_dir()]


@enforced
def test_a_group_is_removed_with_the_groups_of_killed_processes_in_it() -> None:
    program = f"""
import os, signal, sys
from graphrun.memory_group import MemoryGroup
sys.stdin.readline()
MemoryGroup.create({LIMIT}).enter()
os.kill(os.getpid(), signal.SIGKILL)
"""
    with MemoryGroup.create(2 * LIMIT) as group, python(program) as child:
        group.enter(child.pid)
        child.communicate("go\n")
        assert child.returncode == -signal.SIGKILL
        folders = [path.name for path in group.group.path.iterdir() if path.is_dir()]
        assert f"graphrun-{child.pid}-run" in folders
        path = group.group.path
    assert not path.exists()


@enforced
def test_the_next_group_removes_what_a_killed_process_left() -> None:
    parent = current_group()
    assert parent
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    stale, rest = (parent.path / f"graphrun-{child.pid}-{name}" for name in ("run", "run-rest"))
    (stale / f"graphrun-{child.pid}-inner").mkdir(parents=True)
    rest.mkdir()
    with MemoryGroup.create(LIMIT):
        assert not stale.exists()
        assert not rest.exists()


@enforced
def test_a_forked_process_leaves_the_group_to_its_creator() -> None:
    with MemoryGroup.create(LIMIT) as group:
        process = os.fork()
        if process == 0:
            group.remove()
            os._exit(0)
        os.waitpid(process, 0)
        assert group.group.path.is_dir()
    group.remove()  # the second time: nothing
    assert not group.group.path.exists()


@enforced
def test_only_processes_that_this_one_started_enter() -> None:
    with MemoryGroup.create(LIMIT) as group:
        for process in (1, os.getppid()):
            with pytest.raises(InputError, match=f"{process} was not started by this process"):
                group.enter(process)
        assert not group.group.processes.read_text()


@enforced
def test_a_process_above_the_limit_does_not_enter() -> None:
    with (
        MemoryGroup.create(MIB) as group,
        waiting_child(ALLOCATE) as child,
        pytest.raises(InputError, match="already uses .* of the limit of 1.00 MiB: give it more"),
    ):
        group.enter(child.pid)


@enforced
def test_names_and_limits_are_checked() -> None:
    with pytest.raises(InputError, match="use letters"):
        MemoryGroup.create(LIMIT, "../x")
    with pytest.raises(InputError, match="less than a page"):
        MemoryGroup.create(100)
    with (
        MemoryGroup.create(LIMIT),
        pytest.raises(InputError, match="already has the memory group .*: remove it"),
    ):
        MemoryGroup.create(LIMIT)


@as_root
def test_without_rights_the_reason_says_what_to_type() -> None:
    program = """
import ctypes, os
from graphrun.errors import InputError
from graphrun.kernel_memory import process_bytes
from graphrun.memory_group import MemoryGroup, enforceable
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: as a process that this user started
print(enforceable())
try:
    MemoryGroup.create(2**27)
except InputError as error:
    assert enforceable() in str(error), error
assert process_bytes().nbytes > 2**20
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    if (group := current_group()) and group.version == 1:
        assert "cgroup v1 lets only root limit memory" in result.stdout
    else:
        assert "cgroup" in result.stdout
        assert "systemd-run --user --scope -p Delegate=yes" in result.stdout or group is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells kinds of memory apart")
def test_mapped_files_are_apart_from_what_a_process_needs(tmp_path: Path) -> None:
    trim_freed_memory()  # so that the block below takes no memory that was freed before
    start = process_bytes()
    block = bytes([1]) * (64 * MIB)
    anonymous_bytes = process_bytes().anonymous_bytes - start.anonymous_bytes
    assert abs(anonymous_bytes - len(block)) < MIB
    (tmp_path / "file").write_bytes(block[: 32 * MIB])
    del block
    start = process_bytes()
    with (tmp_path / "file").open("rb") as file:
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        assert view[:: mmap.PAGESIZE].count(1) == 32 * MIB // mmap.PAGESIZE
        end = process_bytes()
        view.close()
    assert abs(end.file_bytes - start.file_bytes - 32 * MIB) < MIB
    assert abs(end.nbytes - start.nbytes) < MIB


def test_on_other_systems_the_reason_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert enforceable() == "only Linux limits the memory of processes, and this is darwin"
    assert process_bytes().nbytes > MIB


# ---- faked trees of files ----

V1_STAT = "cache 9\nrss 9\ntotal_cache 700\ntotal_rss 1000\ntotal_shmem 200\ntotal_unevictable 0\n"
V2_STAT = "anon 1000\nfile 700\nkernel 50\nshmem 200\nunevictable 0\n"
V2_OLD_STAT = "anon 1000\nfile 700\nkernel_stack 10\npagetables 20\nslab 20\nshmem 200\n"


@pytest.mark.parametrize(
    ("version", "stat"),
    [(1, V1_STAT), (2, V2_STAT), (2, V2_OLD_STAT)],
)
def test_shared_memory_is_no_page_cache(tmp_path: Path, version: int, stat: str) -> None:
    (tmp_path / "memory.stat").write_text(stat)
    (tmp_path / "memory.kmem.usage_in_bytes").write_text("50\n")
    use = group_bytes(GroupFolder(tmp_path, version))
    assert use == MemoryUse(1000, 200, 50, 0, 500)
    assert use.nbytes == 1250


def test_locked_pages_of_files_cannot_be_reclaimed(tmp_path: Path) -> None:
    (tmp_path / "memory.stat").write_text(V2_STAT.replace("unevictable 0", "unevictable 1500"))
    use = group_bytes(GroupFolder(tmp_path, 2))
    assert (use.locked_bytes, use.file_bytes, use.nbytes) == (300, 200, 1550)


def fake_proc(tmp_path: Path, membership: str, mounts: str) -> Path:
    """A /proc with the groups and mounts of this process; ROOT in mounts is tmp_path."""
    folder = tmp_path / "proc" / "self"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup").write_text(membership)
    (folder / "mountinfo").write_text(mounts.replace("ROOT", str(tmp_path)))
    (folder.parent / str(os.getpid())).mkdir(exist_ok=True)
    (folder.parent / str(os.getpid()) / "status").write_text("PPid:\t1\n")
    (folder.parent / "77").mkdir(exist_ok=True)
    (folder.parent / "77" / "status").write_text("PPid:\t1\n")
    return folder.parent


V2_MOUNT = "30 23 0:27 / ROOT/cg rw - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 / ROOT/cg rw - cgroup cgroup rw,memory\n"
CPU_MOUNT = "34 31 0:31 / ROOT/other rw - cgroup cgroup rw,cpu\n"


@pytest.mark.parametrize(
    ("membership", "mounts", "inner", "version"),
    [
        ("0::/a/job\n", V2_MOUNT, "a/job", 2),
        ("0::/\n", V2_MOUNT, "", 2),
        ("4:cpu:/x\n3:memory:/a/job\n0::/y\n", CPU_MOUNT + V1_MOUNT + V2_MOUNT, "a/job", 1),
        # in a container without a namespace of groups: the mount is the container's group
        ("0::/docker/7f/a\n", V2_MOUNT.replace(" / ", " /docker/7f "), "a", 2),
        ("3:memory:/docker/7f\n", V1_MOUNT.replace(" / ", " /docker/7f "), "", 1),
        ("0::/a b\n", V2_MOUNT, "a b", 2),
    ],
)
def test_the_group_of_this_process_is_where_it_is_mounted(
    tmp_path: Path, membership: str, mounts: str, inner: str, version: int
) -> None:
    (tmp_path / "cg" / inner).mkdir(parents=True)
    proc = fake_proc(tmp_path, membership, mounts)
    assert current_group(proc=proc) == GroupFolder(tmp_path / "cg" / inner, version)


def test_a_mount_point_with_a_space_is_an_octal_number(tmp_path: Path) -> None:
    (tmp_path / "c g").mkdir()
    proc = fake_proc(tmp_path, "0::/\n", V2_MOUNT.replace("cg", "c\\040g", 1))
    assert current_group(proc=proc) == GroupFolder(tmp_path / "c g", 2)


@pytest.mark.parametrize(
    ("membership", "mounts"),
    [
        ("0::/../cg/a\n", V2_MOUNT),
        ("0::/a\n", CPU_MOUNT),
        ("4:cpu:/a\n", CPU_MOUNT),
        ("0::/docker/7f\n", V2_MOUNT.replace(" / ", " /docker/8 ")),
        ("", ""),
    ],
)
def test_a_group_out_of_sight_is_a_reason(tmp_path: Path, membership: str, mounts: str) -> None:
    (tmp_path / "cg" / "a").mkdir(parents=True)
    proc = fake_proc(tmp_path, membership, mounts)
    assert current_group(proc=proc) is None
    assert "no memory cgroup of this process is visible" in enforceable(proc)


def test_a_process_without_proc_is_a_reason(tmp_path: Path) -> None:
    assert "no memory group can be made" in enforceable(tmp_path)


class Kernel:
    """A tree of version 2 with the kernel's rules: files appear with folders, and a group other
    than the root has processes or controllers of children, not both."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        mkdir, rmdir = Path.mkdir, Path.rmdir

        def make(path: Path, *arguments: int, **options: bool) -> None:
            mkdir(path, *arguments, **options)
            if root in path.parents:
                self.fill(path)

        def remove(path: Path) -> None:
            if root in path.parents:
                if path.joinpath("cgroup.procs").read_text():
                    raise OSError(errno.EBUSY, "busy")
                for file in path.iterdir():
                    file.unlink()
            rmdir(path)

        monkeypatch.setattr(Path, "mkdir", make)
        monkeypatch.setattr(Path, "rmdir", remove)
        monkeypatch.setattr(memory_group, "_write", self.write)

    def fill(self, path: Path) -> None:
        """Write the files of a new group."""
        parent = path.parent / "cgroup.subtree_control"
        for name in ("cgroup.procs", "cgroup.subtree_control", "cgroup.events"):
            (path / name).write_text("")
        if not parent.exists() or "memory" in parent.read_text():
            (path / "cgroup.controllers").write_text("cpu memory\n")
            (path / "memory.max").write_text("max\n")
            (path / "memory.swap.max").write_text("max\n")
            (path / "memory.events").write_text("max 3\noom 2\noom_kill 2\n")

    def write(self, path: Path, text: str) -> None:
        """Write to a file as the kernel does. Raises OSError."""
        if path.name == "cgroup.procs":
            if "memory" in (path.parent / "cgroup.subtree_control").read_text():
                raise OSError(errno.EBUSY, "processes in a group with controllers of children")
            for file in self.root.rglob("cgroup.procs"):
                lines = [line for line in file.read_text().split() if line != text]
                file.write_text("".join(f"{line}\n" for line in lines))
            path.write_text(path.read_text() + f"{text}\n")
        elif path.name == "cgroup.subtree_control":
            if (path.parent / "cgroup.procs").read_text() and text[0] == "+":
                raise OSError(errno.EBUSY, "controllers of children in a group with processes")
            path.write_text("memory\n" if text == "+memory" else "")
        else:
            assert path.exists(), path
            path.write_text(text)


@pytest.fixture
def scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A delegated group of version 2 with this process in it."""
    kernel = Kernel(tmp_path / "cg", monkeypatch)
    (tmp_path / "cg").mkdir()
    (path := tmp_path / "cg" / "scope").mkdir()
    kernel.write(path / "cgroup.procs", str(os.getpid()))
    fake_proc(tmp_path, "0::/scope\n", V2_MOUNT)
    return path


def test_processes_and_limited_children_are_in_separate_groups(scope: Path) -> None:
    proc, process_line = scope.parents[1] / "proc", f"{os.getpid()}\n"
    assert enforceable(proc) == ""
    with MemoryGroup.create(LIMIT, "job", proc=proc) as group:
        rest = scope / f"graphrun-{os.getpid()}-job-rest"
        assert (scope / "cgroup.procs").read_text() == ""
        assert (rest / "cgroup.procs").read_text() == process_line
        assert group.group.path == scope / f"graphrun-{os.getpid()}-job"
        assert (group.group.path / "memory.max").read_text() == str(LIMIT)
        assert (group.group.path / "memory.swap.max").read_text() == "0"
        assert group.kills == 2
        memory_group._write(group.group.processes, str(os.getpid()))
    assert (scope / "cgroup.procs").read_text() == process_line
    assert (scope / "cgroup.subtree_control").read_text() == ""
    assert not [path for path in scope.iterdir() if path.is_dir()]


@pytest.mark.parametrize("moment", ["+memory", "memory.max", "memory.swap.max"])
@pytest.mark.parametrize("error", [PermissionError(errno.EPERM, "no"), KeyboardInterrupt()])
def test_nothing_is_left_where_making_a_group_fails(
    scope: Path, monkeypatch: pytest.MonkeyPatch, moment: str, error: BaseException
) -> None:
    write = memory_group._write

    def fail(path: Path, text: str) -> None:
        if moment in (path.name, text):
            raise error
        write(path, text)

    monkeypatch.setattr(memory_group, "_write", fail)
    with pytest.raises((InputError, KeyboardInterrupt)):
        MemoryGroup.create(LIMIT, proc=scope.parents[1] / "proc")
    assert (scope / "cgroup.procs").read_text() == f"{os.getpid()}\n"
    assert (scope / "cgroup.subtree_control").read_text() == ""
    assert not [path for path in scope.iterdir() if path.is_dir()]


def test_processes_of_others_are_not_moved(scope: Path) -> None:
    proc = scope.parents[1] / "proc"
    memory_group._write(scope / "cgroup.procs", "77")
    reason = enforceable(proc)
    assert "has other processes (77), which are not moved; run under systemd-run" in reason
    with pytest.raises(InputError, match="cannot be enforced: cgroup v2 group .* has other"):
        MemoryGroup.create(LIMIT, proc=proc)
    assert (scope / "cgroup.procs").read_text() == f"{os.getpid()}\n77\n"


def test_without_the_controller_or_the_rights_the_reason_says_what_to_type(
    scope: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc = scope.parents[1] / "proc"
    monkeypatch.setattr(memory_group, "_writable", lambda path: path.name != "cgroup.procs")
    assert "cgroup v2 is not delegated to this user" in enforceable(proc)
    (scope / "cgroup.controllers").write_text("cpu\n")
    assert "cgroup v2 has no memory controller in" in enforceable(proc)
    assert "systemd-run --user --scope -p Delegate=yes -p MemoryMax=8G" in enforceable(proc)
