"""A plan with its proof, apart from the solver that made it: reading a saved plan needs no solver.

``bound`` and ``objective`` are of the program that was solved; a plan's own seconds and bytes come from `simulate` alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphrun.model.plan import Plan
from graphrun.model.problem import Problem


@dataclass(frozen=True, slots=True)
class Solution:
    """The plan and how good it is. ``objective_seconds``: what the program says it takes (`simulate` is what is printed);
    ``bound_seconds``: no plan of this program takes less; ``gap``: by how much, relatively, the best that the program was solved to
    may be above that. The plan is that one, or one that the simulator finds faster. In a session both are of all its runs
    together, and ``again_seconds`` is what one further run takes."""

    problem: Problem
    plan: Plan
    proven_optimal: bool
    bound_seconds: float
    objective_seconds: float
    gap: float
    again_seconds: float = 0.0
