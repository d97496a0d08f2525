"""Explains why no plan exists: the phases that do not fit, the binding budget, the smallest
budgets, and verified repairs."""

from __future__ import annotations

from dataclasses import dataclass

from graphrun.errors import GraphrunError
from graphrun.model.least_memory import PhaseMinimum, used_components
from graphrun.model.problem import Problem
from graphrun.solve.granularity import finer
from graphrun.solve.least import (
    has_usable_variants,
    least_memory_of,
    smallest_disk,
    smallest_pinned,
    smallest_ram,
)
from graphrun.solve.pages import smallest_budget, with_pages_of_least
from graphrun.solve.repairs import Repair, python_arguments, repairs_of
from graphrun.units import typed_size

__all__ = [
    "Infeasible",
    "refusal",
    "smallest_budget",
    "smallest_disk",
    "smallest_pinned",
    "smallest_ram",
]


@dataclass(frozen=True, slots=True)
class Tier:
    """A budget: its name, its size, and the least size for which a plan exists; bytes."""

    name: str
    have_bytes: int
    least_bytes: int

    @property
    def short(self) -> bool:
        """Whether the budget is too small."""
        return self.least_bytes > self.have_bytes


class Infeasible(GraphrunError):
    """No plan exists. ``needs``: the phases that do not fit in VRAM, empty where VRAM suffices;
    ``binding``: the budget that is short.

    With one of the smallest budgets, and the others unchanged, a plan exists; with one byte less
    none is found. Where several budgets are short, each is the least while the others are
    unlimited. Each of ``repairs`` suffices alone, best first.
    """

    exit_code = 3

    def __init__(
        self,
        problem: Problem,
        needs: tuple[PhaseMinimum, ...],
        tiers: tuple[Tier, ...],
        repairs: tuple[Repair, ...],
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
            (c.name, min((c.variants[n].host_bytes for n in problem.usable(c)), default=0))
            for c in used_components(problem)
        )
        self.repairs = repairs
        super().__init__(self._message())

    def _message(self) -> str:
        lines = [
            f"{need.phase} {need.part} needs {typed_size(need.total_bytes)} = {typed_size(need.weights_bytes)} fixed weights"
            f" + {typed_size(need.ring_buffer_bytes)} ring buffer + {typed_size(need.activation_bytes)} activation"
            f" + {typed_size(need.values_bytes)} values > {typed_size(need.available_bytes, down=True)}"
            for need in self.needs
        ]
        for tier in self.tiers:
            if tier.short and (tier.name != "VRAM" or not self.needs):
                have = typed_size(tier.have_bytes, down=True)
                lines.append(f"it takes {typed_size(tier.least_bytes)} > {have} of {tier.name}")
        if not lines:
            lines.append(f"{self.binding} leaves no variant to choose")
        return (
            "nothing fits: "
            + "; ".join(lines)
            + ". Do one of: "
            + "; ".join(map(self._suggestion, self.repairs))
        )

    def _suggestion(self, repair: Repair) -> str:
        """A repair in words, after the arguments to type for it."""
        arguments = python_arguments(repair, self.problem)
        return f"{arguments}: {repair}" if arguments else str(repair)


def _binding(problem: Problem, needs: tuple[PhaseMinimum, ...], tiers: tuple[Tier, ...]) -> str:
    if not has_usable_variants(problem):
        return "what is allowed"
    if needs:
        return "VRAM"
    short = [tier for tier in tiers if tier.short]
    return (
        min(short, key=lambda tier: tier.least_bytes / max(1, tier.have_bytes)).name
        if short
        else "VRAM"
    )


def refusal(problem: Problem, *, repairs: bool = True) -> Infeasible:
    """The explanation for ``problem``, which has no plan; ``repairs``: whether to look for repairs,
    each of which is a solve.

    Its figures are for components split into layers where the phases that do not fit then need
    less.
    """
    smallest_bytes = smallest_budget(problem)
    problem = with_pages_of_least(problem)
    needs = _short(problem)
    while (more := finer(problem, needs)) is not None:
        if (left := _short(more)) and not needs:
            break  # layers need less host memory but more device memory than there is
        problem, needs = more, left
    capacity = problem.hardware.capacity_bytes
    tiers = [
        Tier("VRAM", min(problem.budget_bytes, capacity), smallest_bytes),
        Tier("RAM", problem.ram_bytes, smallest_ram(problem)),
    ]
    if problem.pinned_bytes is not None:
        tiers.append(Tier("pinned RAM", problem.pinned_bytes, smallest_pinned(problem)))
    if problem.disk_bytes is not None:
        tiers.append(Tier("disk", problem.disk_bytes, smallest_disk(problem)))
    least = {tier.name: tier.least_bytes for tier in tiers}
    return Infeasible(
        problem, needs, tuple(tiers), repairs_of(problem, needs, least) if repairs else ()
    )


def _short(problem: Problem) -> tuple[PhaseMinimum, ...]:
    """The phases that do not fit in VRAM."""
    return tuple(need for need in least_memory_of(problem) if need.short_bytes > 0)
