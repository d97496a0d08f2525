"""Alternatives to a plan: the same problem solved again with another directive on one component, or
with another of its variants.

They explain why the plan was chosen. The search is within its tolerances, so one of them may be a
faster plan of the same problem: then it takes the plan's place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from graphrun.errors import InputError
from graphrun.model.directives import directed
from graphrun.model.least_memory import PhaseMinimum
from graphrun.model.plan import Plan
from graphrun.model.problem import ComponentNumbers, Directive, Placement, Problem
from graphrun.model.solution import Solution
from graphrun.solve.infeasible import refusal
from graphrun.solve.pages import carried_over, solved

Solve = Callable[[Problem], Solution | None]
PLACEMENTS: tuple[Placement, ...] = ("whole", "exclude", "drop", "keep")


@dataclass(frozen=True, slots=True)
class Alternative:
    """A directive on the component (``placement``), or the name of another ``variant``. Both are ""
    for the plan itself.

    ``permission``: what ``allow`` would have to contain, "" if nothing. ``refusal``: why the
    directive cannot be tried, "" if it can. Where it does not fit: ``binding``, the budget that is
    too small; ``needs``, the phases that do not fit, and ``smallest_budget_bytes``, the smallest
    VRAM budget for it. Where it fits: seconds and bytes of all runs from `simulate`; ``same``: its
    plan equals the given one.
    """

    placement: Placement | str
    variant: str = ""
    permission: str = ""
    refusal: str = ""
    binding: str = ""
    needs: tuple[PhaseMinimum, ...] = ()
    smallest_budget_bytes: int = 0
    seconds: float = 0.0
    moved_bytes: int = 0
    peak_bytes: int = 0
    same: bool = False

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return not self.refusal and not self.binding


def alternatives(
    solution: Solution,
    component: str,
    solve: Solve = solved,
    step: Callable[[str], None] = lambda _: None,
) -> tuple[Solution, tuple[Alternative, ...]]:
    """The plan itself, then each of `PLACEMENTS` for ``component``, then each of its other
    variants, all solved and simulated; and before them the plan: ``solution``, or the fastest of
    the alternatives that keep what its problem demands and allows.

    Other components keep their directives; the solver may choose other variants for them.
    ``solve``: returns a solution, or None where nothing fits. ``step``: called with the name of
    each alternative before it is solved. Raises InputError for an unknown component.
    """
    problem, names = solution.problem, [numbers.name for numbers in solution.problem.components]
    if component not in names:
        raise InputError(f"the plan has no component {component!r}; it has {', '.join(names)}")
    others = [directive for directive in problem.directives if directive.component != component]
    problems = [
        _with_placement(solution, others, Directive(placement, component))
        for placement in PLACEMENTS
    ]
    problems += _with_other_variants(solution, problem.component(component))
    tried = [_solved_alternative(of, changed, solve, step) for of, changed in problems]
    allowed = (_as_plan(solution, component, of, found) for of, found in tried if found is not None)
    best = min(
        (solution, *(of for of in allowed if of is not None)),
        key=lambda of: of.simulation.total_seconds,
    )
    rows = (_simulated(of, found, best.plan) if found is not None else of for of, found in tried)
    return best, (_simulated(Alternative(""), best, best.plan), *rows)


_Tried = tuple[Alternative, Solution | None]
_Untried = tuple[Alternative, Problem | None]  # None: it cannot be tried


def _with_placement(solution: Solution, others: list[Directive], directive: Directive) -> _Untried:
    try:
        problem = directed(solution.problem, [*others, directive])
    except InputError as error:
        return Alternative(directive.placement, refusal=str(error)), None
    return Alternative(directive.placement), problem


def _with_other_variants(solution: Solution, component: ComponentNumbers) -> Iterator[_Untried]:
    """Every variant except the plan's, each as the only variant. A variant that is not allowed is
    tried as if it were."""
    problem = solution.problem
    planned = dict(solution.plan.variants).get(component.name, component.variants[0].name)
    for variant in component.variants:
        if variant.name != planned:
            permission = variant.needs if variant.needs not in problem.allow else ""
            only = component.stored_as(variant.name)
            components = tuple(
                only if other.name == component.name else other for other in problem.components
            )
            yield Alternative("", variant.name, permission), replace(problem, components=components)


def _as_plan(
    solution: Solution, component: str, of: Alternative, found: Solution
) -> Solution | None:
    """``found`` as a solution of the problem of ``solution``; None where that forbids it."""
    if of.permission:
        return None
    chosen = dict(found.plan.variants) | ({component: of.variant} if of.variant else {})
    variants = tuple(
        (c.name, chosen[c.name]) for c in solution.problem.components if c.name in chosen
    )
    named = replace(found, plan=replace(found.plan, variants=variants))
    return carried_over(solution.problem, named, solution.bound_seconds)


def _solved_alternative(
    of: Alternative, problem: Problem | None, solve: Solve, step: Callable[[str], None]
) -> _Tried:
    if problem is None:
        return of, None
    step(of.placement or of.variant)
    if (solution := solve(problem)) is not None:
        return of, solution
    why = refusal(problem, repairs=False)
    return replace(
        of, binding=why.binding, needs=why.needs, smallest_budget_bytes=why.smallest_budget_bytes
    ), None


def _simulated(of: Alternative, solution: Solution, planned: Plan) -> Alternative:
    found = solution.simulation
    same = replace(solution.plan, problem=planned.problem, variants=planned.variants) == planned
    return replace(
        of,
        seconds=found.total_seconds,
        moved_bytes=found.total_moved_bytes,
        peak_bytes=found.peak_bytes,
        same=same and not of.variant,
    )
