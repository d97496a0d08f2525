"""Why nothing fits, and the least that would."""

from __future__ import annotations

from dataclasses import replace

from graphrun.errors import GraphrunError
from graphrun.planner.needs import Need, least_needs, used_components
from graphrun.planner.problem import PhaseNumbers, Problem
from graphrun.planner.variants import simple
from graphrun.units import show_size


class Infeasible(GraphrunError):
    """No plan exists. ``needs``: the phases that cannot fit (empty where only RAM is short). ``smallest_budget_bytes`` and
    ``smallest_ram_bytes`` are exact: with them a plan exists, with a byte less none does. ``repairs`` each suffice alone for what
    they name."""

    exit_code = 3

    def __init__(self, problem: Problem, needs: tuple[Need, ...]) -> None:
        self.graph = problem.graph
        self.hardware = problem.hardware.name
        self.problem = problem
        self.budget_bytes = problem.budget_bytes
        self.effective_bytes = problem.effective_bytes
        self.capacity_bytes = problem.hardware.capacity_bytes
        self.ram_bytes = problem.ram_bytes
        self.needs = needs
        self.binding = "VRAM" if needs else "RAM"
        self.smallest_budget_bytes = smallest_budget(problem)
        self.smallest_ram_bytes = smallest_ram(problem)
        self.host_bytes = tuple((c.name, c.variants[0].host_bytes) for c in used_components(problem))
        self.repairs = _repairs(problem, needs)
        super().__init__(self._message())

    def _message(self) -> str:
        lines = [
            f"{need.phase} {need.part} needs {show_size(need.total_bytes)} = {show_size(need.weights_bytes)} fixed weights"
            f" + {show_size(need.ring_bytes)} ring + {show_size(need.activation_bytes)} activation"
            f" + {show_size(need.values_bytes)} values > {show_size(need.available_bytes)}"
            for need in self.needs
        ]
        if self.smallest_ram_bytes > self.ram_bytes:
            lines.append(f"the host's copies take {show_size(self.smallest_ram_bytes)} > {show_size(self.ram_bytes)} of RAM")
        return "nothing fits: " + "; ".join(lines) + ". Do one of: " + "; ".join(self.repairs)


def require_feasible(problem: Problem) -> None:
    """Raises Infeasible unless a plan exists."""
    if not simple(problem):
        return
    needs = tuple(need for need in least_needs(problem) if need.short_bytes > 0)
    if needs or smallest_ram(problem) > problem.ram_bytes:
        raise Infeasible(problem, needs)


def smallest_budget(problem: Problem) -> int:
    """The least total budget (context, workspace and reserve included) for which a plan exists, whatever the card's capacity."""
    return problem.overhead_bytes + max((need.total_bytes for need in least_needs(problem)), default=0)


def smallest_ram(problem: Problem) -> int:
    """Host bytes of all components that some phase uses: every home is filled before the run starts."""
    return sum(component.variants[0].host_bytes for component in used_components(problem))


def _repairs(problem: Problem, needs: tuple[Need, ...]) -> tuple[str, ...]:
    """What would help, each checked: after it, `least_needs` (or the sum of host bytes) fits."""
    repairs = []
    if needs:
        smallest = smallest_budget(problem)
        capacity = problem.hardware.capacity_bytes
        if smallest <= capacity:
            repairs.append(
                f"raise the VRAM budget from {show_size(problem.budget_bytes)} to {smallest} bytes ({show_size(smallest)})"
            )
        else:
            repairs.append(
                f"use a device with {smallest} bytes ({show_size(smallest)}) or more: this one has {show_size(capacity)}"
            )
        limits = {need.phase: need.available_bytes - need.total_bytes + need.activation_bytes for need in needs}
        if all(limit > 0 for limit in limits.values()):
            parts = [f"{need.phase} from {show_size(need.activation_bytes)} to {show_size(limits[need.phase])}" for need in needs]
            smaller = tuple(_limit(phase, limits.get(phase.name)) for phase in problem.phases)
            if all(need.short_bytes <= 0 for need in least_needs(replace(problem, phases=smaller))):
                repairs.append(f"shrink the activation of {', '.join(parts)}: a smaller image, fewer images at once, tiling")
        if (rest := problem.reserve_bytes - max(need.short_bytes for need in needs)) >= 0:
            repairs.append(f"lower the reserve from {show_size(problem.reserve_bytes)} to {rest} bytes ({show_size(rest)})")
        for directive in problem.directives:
            others = tuple(other for other in problem.directives if other != directive)
            if all(need.short_bytes <= 0 for need in least_needs(replace(problem, directives=others))):
                repairs.append(f"do without the directive {directive.placement} {directive.component}")
    ram = smallest_ram(problem)
    if ram > problem.ram_bytes:
        repairs.append(f"raise the RAM budget from {show_size(problem.ram_bytes)} to {ram} bytes ({show_size(ram)})")
    return tuple(repairs)


def _limit(phase: PhaseNumbers, activation: int | None) -> PhaseNumbers:
    if activation is None:
        return phase
    return replace(phase, first_bytes=min(phase.first_bytes, activation), rest_bytes=min(phase.rest_bytes, activation))
