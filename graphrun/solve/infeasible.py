"""Why nothing fits: the phases that cannot, with their terms, the binding resource, the least budgets, and repairs that work."""

from __future__ import annotations

from dataclasses import dataclass

from graphrun.errors import GraphrunError
from graphrun.model.least_memory import PhaseMinimum, least_memory, used_components
from graphrun.model.problem import Problem
from graphrun.solve.granularity import finer
from graphrun.solve.least import (
    has_usable_variants,
    backing_store_bytes,
    least_memory_of,
    with_only_variants,
    smallest_budget,
    smallest_disk,
    smallest_pinned,
    smallest_ram,
)
from graphrun.solve.repairs import Repair, repairs_of
from graphrun.solve.variants import only_blocks_to_choose
from graphrun.units import show_size

__all__ = ["Infeasible", "refusal", "smallest_budget", "smallest_disk", "smallest_pinned", "smallest_ram"]


@dataclass(frozen=True, slots=True)
class Tier:
    """A budget: its name, what there is, and the least that works (equal where it is enough)."""

    name: str
    have_bytes: int
    least_bytes: int

    @property
    def short(self) -> bool:
        """Whether it is not enough."""
        return self.least_bytes > self.have_bytes


class Infeasible(GraphrunError):
    """No plan exists. ``needs``: the phases that cannot fit (empty where VRAM is not short); ``binding``: the resource that is.

    The smallest budgets are exact: with one of them, the others as they are, a plan exists, and with a byte less none does; where
    several are short, each is the least with the others ample. ``repairs`` each suffice alone, best first.
    """

    exit_code = 3

    def __init__(
        self, problem: Problem, needs: tuple[PhaseMinimum, ...], tiers: tuple[Tier, ...], repairs: tuple[Repair, ...]
    ) -> None:
        self.graph = problem.graph
        self.hardware = problem.hardware.name
        self.problem = problem
        self.budget_bytes = problem.budget_bytes
        self.effective_bytes = problem.effective_bytes
        self.capacity_bytes = problem.hardware.capacity_bytes
        self.ram_bytes = problem.ram_bytes
        self.needs = needs
        self.tiers = tiers
        self.binding = _binding(problem, needs, tiers)
        least = {tier.name: tier.least_bytes for tier in tiers}
        self.smallest_budget_bytes, self.smallest_ram_bytes = least["VRAM"], least["RAM"]
        self.host_bytes = tuple(
            (c.name, min((c.variants[n].host_bytes for n in problem.usable(c)), default=0)) for c in used_components(problem)
        )
        self.repairs = repairs
        super().__init__(self._message())

    def _message(self) -> str:
        lines = [
            f"{need.phase} {need.part} needs {show_size(need.total_bytes)} = {show_size(need.weights_bytes)} fixed weights"
            f" + {show_size(need.ring_bytes)} ring + {show_size(need.activation_bytes)} activation"
            f" + {show_size(need.values_bytes)} values > {show_size(need.available_bytes)}"
            for need in self.needs
        ]
        for tier in self.tiers:
            if tier.short and (tier.name != "VRAM" or not self.needs):
                lines.append(f"it takes {show_size(tier.least_bytes)} > {show_size(tier.have_bytes)} of {tier.name}")
        if not lines:
            lines.append(f"{self.binding} leaves no variant to choose")
        return "nothing fits: " + "; ".join(lines) + ". Do one of: " + "; ".join(map(str, self.repairs))


def _binding(problem: Problem, needs: tuple[PhaseMinimum, ...], tiers: tuple[Tier, ...]) -> str:
    if not has_usable_variants(problem):
        return "what is allowed"
    if needs:
        return "VRAM"
    short = [tier for tier in tiers if tier.short]
    return min(short, key=lambda tier: tier.least_bytes / max(1, tier.have_bytes)).name if short else "VRAM"


def refusal(problem: Problem, *, repairs: bool = True) -> Infeasible:
    """The explanation for ``problem``, which has no plan; ``repairs``: with what would help, which takes some solves.

    Its figures are those of components that are cut into layers where that takes less in the phases that do not fit.
    """
    needs = _short(problem)
    while (more := finer(problem, needs)) is not None:
        if (left := _short(more)) and not needs:
            break  # what spares the host takes more of the device than there is
        problem, needs = more, left
    whole = problem.hardware.capacity_bytes
    tiers = [
        Tier("VRAM", min(problem.budget_bytes, whole), smallest_budget(problem)),
        Tier("RAM", problem.ram_bytes, smallest_ram(problem)),
    ]
    if problem.pinned_bytes is not None:
        tiers.append(Tier("pinned RAM", problem.pinned_bytes, smallest_pinned(problem)))
    if problem.disk_bytes is not None:
        tiers.append(Tier("disk", problem.disk_bytes, smallest_disk(problem)))
    least = {tier.name: tier.least_bytes for tier in tiers}
    return Infeasible(problem, needs, tuple(tiers), repairs_of(problem, needs, least) if repairs else ())


def _short(problem: Problem) -> tuple[PhaseMinimum, ...]:
    """The phases that cannot fit."""
    return tuple(need for need in least_memory_of(problem) if need.short_bytes > 0)


def surely_infeasible(problem: Problem) -> bool:
    """Whether it can be said without solving that no plan exists."""
    if not has_usable_variants(problem):
        return True
    if not only_blocks_to_choose(problem):
        return False
    short = any(need.short_bytes > 0 for need in least_memory(with_only_variants(problem)))
    return short or (problem.runs == 1 and backing_store_bytes(problem) > problem.ram_bytes)
