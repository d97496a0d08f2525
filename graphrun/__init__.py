"""graphrun plans ahead where every component of a diffusion pipeline lies, within a VRAM and a RAM budget, and runs it so.

    graph    = graphrun.load("graphs/flux-dev.yaml")
    problem  = graphrun.estimate(graph, vram="8G", ram="64G", hardware="rtx4090")
    solution = graphrun.plan(problem)  # raises graphrun.Infeasible, which explains itself
    trace    = graphrun.run(solution, graph, inputs={"prompt": "a lighthouse"})

Importing this package imports neither torch nor a solver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from graphrun.api import attach, estimate, from_pipeline, load, plan, precomputed, run, run_many, survey
from graphrun.errors import BrokenPlan, GraphError, GraphrunError, InputError, OutOfMemory, PlanError, TransferFailed

if TYPE_CHECKING:
    from graphrun.session import Session
    from graphrun.solve.infeasible import Infeasible

__version__ = "0.1.0"
__all__ = [
    "BrokenPlan",
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
    "plan",
    "precomputed",
    "run",
    "run_many",
    "survey",
]

_IMPORTED_WHEN_USED = {"Session": "graphrun.session", "Infeasible": "graphrun.solve.infeasible"}


def __getattr__(name: str) -> Any:
    """`Session` and `Infeasible`, whose modules import torch or a solver."""
    if name in _IMPORTED_WHEN_USED:
        return getattr(import_module(_IMPORTED_WHEN_USED[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
