"""Alternatives to a plan: the problem solved again with one component placed or stored differently.

They explain why the plan was chosen. Because the search has tolerances, an alternative may be
faster. It then replaces the plan.

A plan that already does what a directive demands is its own alternative. Another variant is first
solved in less time (`graphrun.solve.frontier.quickly_solved`), and fully only if it needs no
permission and may then be as fast as the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from graphrun.errors import InputError
from graphrun.model.directives import directed
from graphrun.model.least_memory import PhaseMinimum
from graphrun.model.plan import Plan
from graphrun.model.problem import ComponentNumbers, ComponentPlacement, Directive, Problem
from graphrun.model.solution import Solution
from graphrun.solve.frontier import quickly_solved
from graphrun.solve.infeasible import shortage
from graphrun.solve.pages import carried_over, solved

SolveOrNone = Callable[[Problem], Solution | None]
# directives to try, in this order; what each demands: `graphrun.model.problem.Directive`
PLACEMENTS: tuple[ComponentPlacement, ...] = ("whole", "exclude", "drop", "keep")
# relative difference of seconds that does not matter here
NEAR = 0.005


@dataclass(frozen=True, slots=True)
class Alternative:
    """A directive ``placement`` or another ``variant``; both "" for the plan itself.

    ``permission``: what must be added to ``allow``; "" if nothing. ``refusal``: why the directive
    cannot be tried; "" if it can. If nothing fits: ``binding``, the budget that is too small;
    ``needs``, the phases that do not fit; ``sufficient_bytes``, a VRAM budget that fits. Otherwise:
    simulated seconds and bytes of all runs, a lower bound on the seconds, and whether the plan
    ``is_same_plan`` as the chosen one.
    """

    placement: ComponentPlacement | str
    variant: str = ""
    permission: str = ""
    refusal: str = ""
    binding: str = ""
    needs: tuple[PhaseMinimum, ...] = ()
    sufficient_bytes: int = 0
    seconds: float = 0.0
    bound_seconds: float = 0.0
    moved_bytes: int = 0
    peak_bytes: int = 0
    is_same_plan: bool = False

    @property
    def fits(self) -> bool:
        return not self.refusal and not self.binding

    @property
    def is_rough(self) -> bool:
        """Whether a longer search may find a plan that is faster by more than NEAR."""
        return self.fits and self.bound_seconds * (1 + NEAR) < self.seconds


def alternatives(
    solution: Solution,
    component: str,
    solve: SolveOrNone = solved,
    solve_quickly: SolveOrNone = quickly_solved,
    step: Callable[[str], None] = lambda _: None,
) -> tuple[Solution, tuple[Alternative, ...]]:
    """Solve and simulate the alternatives for ``component``.

    Return the best plan and the alternatives: the plan itself, each of `PLACEMENTS`, each other
    variant. The best plan is ``solution``, or a faster alternative that its problem permits.

    Other components keep their directives, but may change variants. ``solve``, ``solve_quickly``:
    return None if nothing fits. ``step``: called with the name of each alternative before it is
    solved. Raises InputError for an unknown component.
    """
    problem, names = solution.problem, [numbers.name for numbers in solution.problem.components]
    if component not in names:
        raise InputError(f"the plan has no component {component!r}; it has {', '.join(names)}")
    other_directives = [
        directive for directive in problem.directives if directive.component != component
    ]
    problems = [
        _with_placement(solution, other_directives, Directive(placement, component))
        for placement in PLACEMENTS
    ]
    problems += _with_other_variants(solution, problem.component(component))
    results = [
        _solved_alternative(solution, alternative, new_problem, solve, solve_quickly, step)
        for alternative, new_problem in problems
    ]
    candidates = (
        _as_plan(solution, alternative, result)
        for alternative, result in results
        if result is not None
    )
    best = min(
        (solution, *(candidate for candidate in candidates if candidate is not None)),
        key=lambda candidate: candidate.seconds,
    )
    rows = (
        _simulated(alternative, result, best.plan) if result is not None else alternative
        for alternative, result in results
    )
    return best, (_simulated(Alternative(""), best, best.plan), *rows)


_Tried = tuple[Alternative, Solution | None]
_Untried = tuple[Alternative, Problem | None]  # None: it cannot be tried


def _with_placement(
    solution: Solution, other_directives: list[Directive], directive: Directive
) -> _Untried:
    try:
        problem = directed(solution.problem, [*other_directives, directive])
    except InputError as error:
        return Alternative(directive.placement, refusal=str(error)), None
    return Alternative(directive.placement), problem


def _with_other_variants(solution: Solution, component: ComponentNumbers) -> Iterator[_Untried]:
    """Yield every variant but the plan's, each as the only one, permitted or not."""
    problem = solution.problem
    plan_variant = dict(solution.plan.variants).get(component.name, component.variants[0].name)
    for variant in component.variants:
        if variant.name != plan_variant:
            permission = variant.needs if variant.needs not in problem.allow else ""
            only = component.stored_as(variant.name)
            components = tuple(
                only if other.name == component.name else other for other in problem.components
            )
            yield Alternative("", variant.name, permission), replace(problem, components=components)


def _as_plan(solution: Solution, alternative: Alternative, result: Solution) -> Solution | None:
    """Return ``result`` for the problem of ``solution``; None if the problem forbids it."""
    if alternative.permission:
        return None
    variants = solution.problem.named_variants(result.variant_names)
    plan = replace(result.plan, variants=variants)
    return carried_over(solution.problem, replace(result, plan=plan), solution.bound_seconds)


def _solved_alternative(
    solution: Solution,
    alternative: Alternative,
    problem: Problem | None,
    solve: SolveOrNone,
    solve_quickly: SolveOrNone,
    step: Callable[[str], None],
) -> _Tried:
    if problem is None:
        return alternative, None
    step(alternative.placement or alternative.variant)
    if not alternative.variant:
        # the plan itself, if it already does what the directive demands
        plan_solution = carried_over(problem, solution, solution.bound_seconds)
        if plan_solution is not None and not plan_solution.excess_page_overheads():
            return alternative, plan_solution
    quick = solve_quickly(problem) if alternative.variant else None
    if quick is not None and (
        alternative.permission
        or quick.gap <= NEAR
        or quick.bound_seconds > solution.seconds * (1 + NEAR)
    ):
        return alternative, quick
    if (result := solve(problem)) is not None:
        return alternative, result
    infeasible = shortage(problem)
    return replace(
        alternative,
        binding=infeasible.binding,
        needs=infeasible.needs,
        sufficient_bytes=infeasible.smallest_budget_bytes,
    ), None


def _simulated(alternative: Alternative, solution: Solution, best_plan: Plan) -> Alternative:
    simulation = solution.simulation
    is_same = (
        replace(solution.plan, problem=best_plan.problem, variants=best_plan.variants) == best_plan
    )
    return replace(
        alternative,
        seconds=simulation.total_seconds,
        bound_seconds=solution.bound_seconds,
        moved_bytes=simulation.total_moved_bytes,
        peak_bytes=simulation.peak_bytes,
        is_same_plan=is_same and not alternative.variant,
    )
