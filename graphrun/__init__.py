"""Plan and run diffusion pipelines within memory budgets.

graphrun plans what is on the GPU at every moment, and executes exactly that plan.

    graph    = graphrun.load("flux-dev")
    problem  = graphrun.estimate(graph, vram="8G", ram="64G", hardware="rtx4090")
    solution = graphrun.plan(problem)  # raises graphrun.Infeasible, which says what does not fit
    trace    = graphrun.run(solution, graph, inputs={"prompt": "a lighthouse"})

Importing this package imports neither torch nor a solver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from graphrun.api import (
    attach,
    estimate,
    from_pipeline,
    load,
    plan,
    precomputed,
    run,
    strategy,
    survey,
)
from graphrun.devices import Budget
from graphrun.errors import (
    BrokenPlan,
    DeviceLost,
    GraphError,
    GraphrunError,
    InputError,
    Interrupted,
    OutOfMemory,
    PlanError,
    PlanningInterrupted,
    StageError,
    TransferFailed,
)
from graphrun.graph.ops import op
from graphrun.hook import Hook
from graphrun.limits import raise_limits
from graphrun.many import run_many
from graphrun.notices import without_notices

if TYPE_CHECKING:
    from graphrun.batch.queue import Batch
    from graphrun.cluster.master import Unplaceable
    from graphrun.diffusers_.attach import Attachment
    from graphrun.diffusers_.description import LivePipeline
    from graphrun.diffusers_.dry_call import ProbeError
    from graphrun.diffusers_.strategy import OffloadStrategy
    from graphrun.graph.graph import Graph
    from graphrun.model.hardware import Hardware
    from graphrun.model.problem import Problem
    from graphrun.model.solution import Solution
    from graphrun.session import Session
    from graphrun.sim.ordering import RaceError
    from graphrun.solve.infeasible import Infeasible
    from graphrun.trace import Trace

    __version__: str

__all__ = [
    "Attachment",
    "Batch",
    "BrokenPlan",
    "Budget",
    "DeviceLost",
    "Graph",
    "GraphError",
    "GraphrunError",
    "Hardware",
    "Hook",
    "Infeasible",
    "InputError",
    "Interrupted",
    "LivePipeline",
    "OffloadStrategy",
    "OutOfMemory",
    "PlanError",
    "PlanningInterrupted",
    "ProbeError",
    "Problem",
    "RaceError",
    "Session",
    "Solution",
    "StageError",
    "Trace",
    "TransferFailed",
    "Unplaceable",
    "attach",
    "estimate",
    "from_pipeline",
    "load",
    "op",
    "plan",
    "precomputed",
    "raise_limits",
    "run",
    "run_many",
    "strategy",
    "survey",
]

# imported on first use: these modules import torch, a solver, or more than `graphrun` needs to
# start
_LAZY = {
    "Attachment": "graphrun.diffusers_.attach",
    "Batch": "graphrun.batch.queue",
    "Graph": "graphrun.graph.graph",
    "Hardware": "graphrun.model.hardware",
    "Infeasible": "graphrun.solve.infeasible",
    "LivePipeline": "graphrun.diffusers_.description",
    "OffloadStrategy": "graphrun.diffusers_.strategy",
    "ProbeError": "graphrun.diffusers_.dry_call",
    "Problem": "graphrun.model.problem",
    "RaceError": "graphrun.sim.ordering",
    "Session": "graphrun.session",
    "Solution": "graphrun.model.solution",
    "Trace": "graphrun.trace",
    "Unplaceable": "graphrun.cluster.master",
}


if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> object:
        """Import a class of ``_LAZY``, or read the installed version, on first use."""
        if name == "__version__":
            from importlib.metadata import version

            return version("graphrun")
        if name in _LAZY:
            with without_notices():
                return getattr(import_module(_LAZY[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
