"""Compare plans with the fixed modes of other programs, written as plans for the same problem."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from graphrun.model.choices import reorder  # noqa: E402
from graphrun.model.plan import Plan  # noqa: E402
from graphrun.model.problem import Problem  # noqa: E402
from graphrun.solve.actions import plan_of  # noqa: E402
from graphrun.solve.baselines import BASELINES, Baseline, fitting  # noqa: E402
from graphrun.solve.programs import program_of  # noqa: E402
from graphrun.verify.solution import checked_solution  # noqa: E402


def compared(problem: Problem, plan: Plan, seconds: float) -> dict[str, Any]:
    """Return each mode's seconds over ``seconds``, those of ``plan``, and its bytes; None: no fit.

    The modes use the plan's variants, options and order, and count pages if the problem does. They
    stream whole blocks, even if the plan splits a component into layers.
    """
    times = dict[str, Any]()
    for mode in BASELINES:
        solutions = (
            checked_solution(problem, other, 0.0, 0.0) for other in _plans(problem, plan, mode)
        )
        simulations = [
            other.simulation
            for other in solutions
            if other is not None and not other.excess_page_overheads()
        ]
        best = min(simulations, key=lambda simulation: simulation.total_seconds, default=None)
        times[mode] = best and {
            "seconds": round(best.total_seconds, 4),
            "times_ours": round(best.total_seconds / seconds, 5) if seconds else 1.0,
            "moved_gib": round(best.total_moved_bytes / 2**30, 3),
        }
    return times


def _plans(problem: Problem, plan: Plan, mode: Baseline) -> Iterator[Plan]:
    reordered = reorder(problem, plan.order, dict(plan.options))
    names = dict(plan.variants)
    variants = []
    for component in problem.components:
        variant_names = [variant.name for variant in component.variants]
        variants.append((variant_names.index(names.get(component.name, variant_names[0])),))
    program = program_of(reordered, variants)
    for choice in fitting(program, mode):
        yield plan_of(program, choice, problem, plan.options, plan.order)
