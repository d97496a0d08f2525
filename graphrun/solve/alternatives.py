"""What if a component were placed otherwise: the same problem solved again with one directive on that component instead of its own,
or with one of its other variants.

Explains a plan by what it was chosen over; changes nothing about the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from graphrun.errors import InputError
from graphrun.model.directives import directed
from graphrun.model.least_memory import PhaseMinimum
from graphrun.model.plan import Plan
from graphrun.model.problem import ComponentNumbers, Directive, Placement, Problem
from graphrun.model.solution import Solution
from graphrun.solve.infeasible import refusal
from graphrun.solve.solve import solved
from graphrun.verify.simulate import simulate

PLACEMENTS: tuple[Placement, ...] = ("whole", "exclude", "drop", "keep")


@dataclass(frozen=True, slots=True)
class Alternative:
    """One placement of the component, or one ``variant`` of it (its name). Both are "" for the plan itself.

    ``permission``: what would have to be allowed for it, "" where nothing. ``refusal``: why it cannot be tried at all. ``binding``:
    the budget that it exceeds, "" where it fits; ``needs``: the phases that do not fit, with ``smallest_budget_bytes``, the least
    budget for it. Otherwise seconds and bytes of all runs as `simulate` says; ``same``: its plan is the plan.
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


def alternatives(solution: Solution, component: str) -> tuple[Alternative, ...]:
    """The plan first, then every placement of ``component``, then every other variant of it, each re-solved and simulated; other
    components keep their directives, and may take other variants.

    Raises InputError for a component that the plan's problem does not have.
    """
    problem, names = solution.problem, [numbers.name for numbers in solution.problem.components]
    if component not in names:
        raise InputError(f"the plan has no component {component!r}; it has {', '.join(names)}")
    others = [directive for directive in problem.directives if directive.component != component]
    as_planned = _simulated(Alternative(""), problem, solution.plan, solution.plan)
    placed = (_placed(solution, others, Directive(placement, component)) for placement in PLACEMENTS)
    return as_planned, *placed, *_varied(solution, problem.component(component))


def _placed(solution: Solution, others: list[Directive], directive: Directive) -> Alternative:
    try:
        problem = directed(solution.problem, [*others, directive])
    except InputError as error:
        return Alternative(directive.placement, refusal=str(error))
    return _tried(Alternative(directive.placement), problem, solution.plan)


def _varied(solution: Solution, component: ComponentNumbers) -> Iterator[Alternative]:
    """Every variant but the plan's, as if it were the only one; one that is not allowed is tried as if it alone were."""
    problem = solution.problem
    planned = dict(solution.plan.variants).get(component.name, component.variants[0].name)
    for variant in component.variants:
        if variant.name != planned:
            permission = variant.needs if variant.needs not in problem.allow else ""
            only = component.held_as(variant.name)
            components = tuple(only if other.name == component.name else other for other in problem.components)
            yield _tried(Alternative("", variant.name, permission), replace(problem, components=components), solution.plan)


def _tried(of: Alternative, problem: Problem, planned: Plan) -> Alternative:
    if (solution := solved(problem)) is not None:
        return _simulated(of, solution.problem, solution.plan, planned)
    why = refusal(problem, repairs=False)
    return replace(of, binding=why.binding, needs=why.needs, smallest_budget_bytes=why.smallest_budget_bytes)


def _simulated(of: Alternative, problem: Problem, plan: Plan, planned: Plan) -> Alternative:
    found = simulate(problem, plan)
    same = replace(plan, problem=planned.problem, variants=planned.variants) == planned
    return replace(
        of,
        seconds=found.total_seconds,
        moved_bytes=found.total_moved_bytes,
        peak_bytes=found.peak_bytes,
        same=same and not of.variant,
    )
