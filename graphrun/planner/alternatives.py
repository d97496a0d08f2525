"""What if a component were placed otherwise: the same problem solved again with one directive on that component instead of its own.

Explains a plan by what it was chosen over; changes nothing about the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphrun.errors import InputError
from graphrun.planner.directives import directed
from graphrun.planner.infeasible import Infeasible, smallest_budget
from graphrun.planner.needs import Need
from graphrun.planner.plan import Plan
from graphrun.planner.problem import Directive, Placement, Problem
from graphrun.planner.simulate import simulate
from graphrun.planner.solution import Solution
from graphrun.planner.solve import solve

PLACEMENTS: tuple[Placement, ...] = ("whole", "exclude", "drop", "keep")


@dataclass(frozen=True, slots=True)
class Alternative:
    """One placement of the component. ``placement`` is "" for the plan itself.

    ``refusal``: why it cannot be tried at all. ``needs``: the phases that do not fit, with ``smallest_budget_bytes``, the least
    budget for it. Otherwise seconds and bytes as `simulate` says; ``same``: its plan's slots are those of the plan.
    """

    placement: Placement | str
    refusal: str = ""
    needs: tuple[Need, ...] = ()
    smallest_budget_bytes: int = 0
    seconds: float = 0.0
    moved_bytes: int = 0
    peak_bytes: int = 0
    same: bool = False

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return not self.refusal and not self.needs


def alternatives(solution: Solution, component: str) -> tuple[Alternative, ...]:
    """The plan first, then every placement of ``component``, each re-solved and simulated; other components keep their directives.

    Raises InputError for a component that the plan's problem does not have.
    """
    problem, names = solution.problem, [numbers.name for numbers in solution.problem.components]
    if component not in names:
        raise InputError(f"the plan has no component {component!r}; it has {', '.join(names)}")
    others = [directive for directive in problem.directives if directive.component != component]
    as_planned = _simulated("", problem, solution.plan, solution.plan)
    return as_planned, *(_tried(solution, others, Directive(placement, component)) for placement in PLACEMENTS)


def _tried(solution: Solution, others: list[Directive], directive: Directive) -> Alternative:
    try:
        problem = directed(solution.problem, [*others, directive])
        return _simulated(directive.placement, problem, solve(problem).plan, solution.plan)
    except InputError as error:
        return Alternative(directive.placement, refusal=str(error))
    except Infeasible as error:
        return Alternative(directive.placement, needs=error.needs, smallest_budget_bytes=smallest_budget(problem))


def _simulated(placement: str, problem: Problem, plan: Plan, planned: Plan) -> Alternative:
    found = simulate(problem, plan)
    same = plan.slots == planned.slots
    return Alternative(placement, seconds=found.seconds, moved_bytes=found.moved_bytes, peak_bytes=found.peak_bytes, same=same)
