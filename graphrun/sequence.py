"""What a run takes if one process for each of several equal devices divides the sequence.

Each process has a plan for its device (`graphrun.profile.sequence`), with its part of the RAM and
of the disk's rate (`graphrun.devices.share_of`). Transfers between devices are part of the compute
of a call, so the plan and its bound count them. Copies from the host at the same time, of streamed
weights, share the link: they may take longer, by the seconds of the transfers at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from graphrun import api
from graphrun.disk_store import Store
from graphrun.model.problem import Secondary
from graphrun.model.sequence import DividedRun
from graphrun.store import dry_run_or_refusal, fitting_for

if TYPE_CHECKING:
    from graphrun.graph.graph import Graph
    from graphrun.model.problem import Problem


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

    graph = graph.divided(len(devices))
    traced, inputs = graph.until(arguments.get("until")).for_first(arguments.get("inputs") or {})
    run = dry_run_or_refusal(traced, traced.for_planning(inputs), store)
    if isinstance(run, str):  # undivided, the graph runs
        return DividedRun(refusal=run)
    transfers = [kernel for _, call in run.recording.entries() for kernel in call.transfers]
    if not transfers:
        return None
    hardware = problem.hardware
    limits = {
        "vram": problem.budget_bytes,
        "ram": problem.ram_bytes,
        "pinned": problem.pinned_bytes,
        "disk": problem.disk_bytes,
    }
    process_problem = api.estimate(
        graph, **{**arguments, **limits, "hardware": hardware, "reserve": problem.reserve_bytes}
    )
    return DividedRun(
        fitting_for(process_problem, store),
        sum(kernel.nbytes for kernel in transfers),
        sum(kernel_seconds(kernel, hardware) for kernel in transfers),
    )
