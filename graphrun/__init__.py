"""graphrun plans the placement of every component of a diffusion pipeline within a VRAM and a RAM budget, and executes that plan.

    graph    = graphrun.load("flux-dev")
    problem  = graphrun.estimate(graph, vram="8G", ram="64G", hardware="rtx4090")
    solution = graphrun.plan(problem)  # raises graphrun.Infeasible, which says what does not fit
    trace    = graphrun.run(solution, graph, inputs={"prompt": "a lighthouse"})

Importing this package imports neither torch nor a solver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from graphrun.api import Budget, attach, estimate, from_pipeline, load, plan, precomputed, run, survey
from graphrun.errors import BrokenPlan, GraphError, GraphrunError, InputError, OutOfMemory, PlanError, TransferFailed
from graphrun.graph.ops import op
from graphrun.limits import raise_limits
from graphrun.many import run_many
from graphrun.notices import drop_notices

if TYPE_CHECKING:
    from graphrun.session import Session
    from graphrun.solve.infeasible import Infeasible

__version__ = "0.1.0"
__all__ = [
    "BrokenPlan",
    "Budget",
    "GraphError",
    "GraphrunError",
    "Infeasible",
    "InputError",
    "OutOfMemory",
    "PlanError",
    "Session",
    "TransferFailed",
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
    "survey",
]

drop_notices()

_LAZY = {"Session": "graphrun.session", "Infeasible": "graphrun.solve.infeasible"}


def __getattr__(name: str) -> Any:
    """Imports `Session` and `Infeasible` on first use: their modules import torch or a solver."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
