"""Run in a memory cgroup of exactly the budget (``graphrun run --enforce``).

graphrun --fork--> parent: waits, forwards signals, says what the kernel did
              |--> child: enters the cgroup before it imports anything large, and runs
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from graphrun.cli.common import cache_folder, cards_for, say, with_budget
from graphrun.cli.options import PlanOptions
from graphrun.errors import InputError, OutOfMemory
from graphrun.memory_group import MemoryGroup, enforceable
from graphrun.report import plan_files as planfile
from graphrun.units import show_size


@contextlib.contextmanager
def enforced(graph: Path, options: PlanOptions) -> Iterator[tuple[PlanOptions, MemoryGroup | None]]:
    """Provide a context in which the kernel enforces the memory budget on this process.

    Yields the options with the budget in bytes, and the group; None, after a line that says why, if
    no group can be made. Only a forked child gets here; the parent leaves with its exit code.
    Raises InputError without a memory budget, OutOfMemory in the parent if the kernel killed the
    child.
    """
    if graph.suffix == ".json":
        problem = planfile.read_solution(graph)[0].problem
        hardware, limit_bytes = problem.hardware, problem.budget_bytes
    else:
        hardware, *_ = cards_for(options, cache_folder(options.no_cache), to_run=True)
        options = with_budget(options, hardware)
        limit_bytes = int(options.memory or 0)
    if not hardware.kind.is_host:
        raise InputError(
            f"--enforce is for runs on the CPU, and {graph} is for {hardware.name}: "
            "add --device cpu --memory 8G"
        )
    if reason := enforceable():
        say(f"the memory budget is not enforced: {reason}")
        yield options, None
        return
    _supervise(limit_bytes)
    with MemoryGroup.create(limit_bytes) as group:
        group.enter()
        yield options, group


def kernel_line(group: MemoryGroup) -> str:
    """Return the kernel's count for the run, next to the limit that it enforced."""
    return (
        f"the kernel counted at most {show_size(group.peak_bytes)} of the enforced "
        f"{show_size(group.limit_bytes)}, without the page cache"
    )


def _supervise(limit_bytes: int) -> None:
    """Fork. Return in the child; in the parent, wait for it and exit with its exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda code, _: os.kill(child, code))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the child too
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL:
        raise OutOfMemory(
            "the run was killed (SIGKILL), probably because it took more than the enforced "
            f"{show_size(limit_bytes)}; use a larger --memory, or leave out --enforce to see how "
            "much it takes"
        )
    sys.stdout.flush()
    os._exit(code if code >= 0 else 128 - code)
