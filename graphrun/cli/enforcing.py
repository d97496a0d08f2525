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
from dataclasses import replace
from pathlib import Path

from graphrun.cli.options import PlanOptions
from graphrun.errors import InputError, OutOfMemory
from graphrun.host_ram import host_ram_bytes, total_ram_bytes
from graphrun.memory_group import MemoryGroup, enforceable
from graphrun.report import plan_files as planfile
from graphrun.units import parse_size, show_size


@contextlib.contextmanager
def enforced(graph: Path, options: PlanOptions) -> Iterator[tuple[PlanOptions, MemoryGroup | None]]:
    """Provide a context in which the kernel enforces the memory budget on this process.

    Yields the options with the budget in bytes, and the group; None, after a line that says why,
    where no group can be made. Only a forked child gets here; the parent leaves with its exit code.
    Raises InputError without a memory budget, OutOfMemory in the parent if the kernel killed the
    child.
    """
    limit_bytes = _limit_bytes(graph, options)
    if graph.suffix != ".json":
        options = replace(options, memory=str(limit_bytes))
    if reason := enforceable():
        sys.stderr.write(f"the memory budget is not enforced: {reason}\n")
        yield options, None
        return
    _supervise(limit_bytes)
    with MemoryGroup.create(limit_bytes) as group:
        group.enter()
        yield options, group


def kernel_line(group: MemoryGroup) -> str:
    """Return what the kernel counted for the run, next to the limit that it enforced."""
    return (
        f"the kernel counted at most {show_size(group.peak_bytes)} of the enforced "
        f"{show_size(group.limit_bytes)}, page cache apart"
    )


def _limit_bytes(graph: Path, options: PlanOptions) -> int:
    if graph.suffix == ".json":
        solution, _ = planfile.read_solution(graph)
        if not solution.problem.hardware.unified:
            raise InputError(f"--enforce limits the memory of a CPU, and {graph} is for a card")
        return solution.problem.budget_bytes
    if options.memory is None:
        raise InputError(
            "--enforce limits the memory of a run on the CPU: add --device cpu --memory 8G"
        )
    if options.memory == "auto":
        from graphrun.profile.hardware import budget_of

        return budget_of(host_ram_bytes())
    return parse_size(options.memory, whole_bytes=total_ram_bytes(), name="memory")


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
            f"the run was killed: in all it took more than the enforced {show_size(limit_bytes)}; "
            "give a larger --memory, or leave --enforce out to see by how much"
        )
    sys.stdout.flush()
    os._exit(code if code >= 0 else 128 - code)
