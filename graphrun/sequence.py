"""What a run takes if one process for each of several equal devices divides the sequence.

Each process has a plan for its device, with its part of the RAM and of the disk's rate
(`graphrun.profile.sequence`). Transfers between devices are part of the compute of a call, so the
plan and its bound count them. Copies from the host at the same time, of streamed weights, share the
link: they may take longer, by the seconds of the transfers at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphrun import api
from graphrun.disk_store import Store
from graphrun.model.problem import Secondary
from graphrun.model.sequence import DividedRun
from graphrun.store import dry_run_or_refusal, fitting_for
from graphrun.units import MIB

if TYPE_CHECKING:
    from graphrun.graph.graph import Graph
    from graphrun.model.problem import Problem

# On an A100, the communicator of a group of two took 544 MB (NVIDIA/nccl, issue 964). Two groups
# communicate: one divides and gathers tokens, one exchanges heads.
COMMUNICATORS, COMMUNICATOR_BYTES = 2, 519 * MIB


def divided_run(
    graph: Graph, problem: Problem, arguments: Mapping[str, Any], store: Store | None
) -> DividedRun | None:
    """Return the run of ``graph`` with its sequence divided over the devices of ``problem``.

    ``arguments``: of `graphrun.estimate`, which made ``problem``. None if the devices differ, or no
    component of the graph can be divided.
    """
    devices = (Secondary(problem.hardware, problem.budget_bytes), *problem.secondaries)
    if len(devices) == 1 or any(device != devices[0] for device in devices):
        return None
    from graphrun.profile.costs import kernel_seconds

    processes = len(devices)
    graph = graph.divided(processes)
    traced, inputs = graph.until(arguments.get("until")).for_first(arguments.get("inputs") or {})
    run = dry_run_or_refusal(traced, traced.for_planning(inputs), store)
    if isinstance(run, str):  # undivided, the graph runs
        return DividedRun(refusal=run)
    transfers = [kernel for _, call in run.recording.entries() for kernel in call.transfers]
    if not transfers:
        return None
    limits = {
        name: nbytes // processes
        for name, nbytes in (
            ("ram", problem.ram_bytes),
            ("pinned", problem.pinned_bytes),
            ("disk", problem.disk_bytes),
        )
        if nbytes is not None
    }
    hardware = problem.hardware
    disk_rate = hardware.disk_bytes_per_second / processes  # each reads all files
    has_buffers = not hardware.kind.has_virtual_clock
    reserve_bytes = COMMUNICATORS * COMMUNICATOR_BYTES if has_buffers else 0
    process_problem = api.estimate(
        graph,
        **{
            **arguments,
            **limits,
            "vram": problem.budget_bytes,
            "hardware": replace(hardware, disk_bytes_per_second=disk_rate),
            "reserve": problem.reserve_bytes + reserve_bytes,
        },
    )
    return DividedRun(
        fitting_for(process_problem, store),
        sum(kernel.nbytes for kernel in transfers),
        sum(kernel_seconds(kernel, hardware) for kernel in transfers),
    )
