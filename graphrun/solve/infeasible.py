"""Why no plan exists: phases that do not fit, minimum budgets, and verified suggestions."""

from __future__ import annotations

from collections.abc import Iterator
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
from graphrun.solve.pages import (
    smallest_budget,
    sufficient_budget,
    with_page_overhead_of_minimum,
)
from graphrun.solve.suggestions import Suggestion, python_arguments, suggestions_of
from graphrun.units import typed_size

__all__ = [
    "Infeasible",
    "refusal",
    "smallest_budget",
    "smallest_disk",
    "smallest_pinned",
    "smallest_ram",
]


SHORTAGE_ROUNDS = 2  # of `sufficient_budget` where another placement is only compared


@dataclass(frozen=True, slots=True)
class BudgetTier:
    """A budget, and its minimum for which a plan exists."""

    name: str
    have_bytes: int
    least_bytes: int

    @property
    def short(self) -> bool:
        return self.least_bytes > self.have_bytes


class Infeasible(GraphrunError):
    """No plan exists.

    ``needs``: the phases that do not fit on the device; empty if its budget suffices. ``binding``:
    the budget that is too small; of several, the budget that has to grow by the smallest factor.
    ``tiers``: all budgets, the device's first. ``suggestions``: changes that each suffice alone,
    best first.

    If one budget is too small, a plan exists with its minimum, and none is found with one byte
    less. VRAM and RAM may both be too small although raising either suffices. If no budget
    suffices alone, each minimum assumes that the others are unlimited.
    """

    exit_code = 3

    def __init__(
        self,
        problem: Problem,
        needs: tuple[PhaseMinimum, ...],
        tiers: tuple[BudgetTier, ...],
        suggestions: tuple[Suggestion, ...],
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
        minimum_bytes = {tier.name: tier.least_bytes for tier in tiers}
        self.smallest_budget_bytes, self.smallest_ram_bytes = (
            minimum_bytes[problem.hardware.budget_name],
            minimum_bytes.get("RAM", 0),
        )
        self.host_bytes = tuple(
            (c.name, min((c.variants[n].host_bytes for n in problem.usable(c)), default=0))
            for c in used_components(problem)
        )
        self.suggestions = suggestions
        super().__init__(self._message())

    def _message(self) -> str:
        lines = [
            f"{need.phase} {need.part} needs at least {typed_size(need.total_bytes)}, and the "
            f"budget leaves {typed_size(need.available_bytes, round_down=True)} for tensors"
            for need in self.needs
        ]
        if self.effective_bytes < 0:
            overhead_bytes = self.problem.overhead_bytes
            lines = [
                f"the process itself takes {typed_size(overhead_bytes)}, more than the budget of "
                f"{typed_size(self.budget_bytes, round_down=True)}"
            ]
        for tier in self.tiers:
            if tier.short and (tier is not self.tiers[0] or not self.needs):
                have = typed_size(tier.have_bytes, round_down=True)
                lines.append(
                    f"it needs {typed_size(tier.least_bytes)} of {tier.name}, and the budget is "
                    f"{have}"
                )
        if not lines:
            lines.append(f"no precision and backing store fits; {self.binding} is the limit")
        return (
            "nothing fits: "
            + "; ".join(lines)
            + ". Do one of: "
            + "; ".join(map(self._suggestion, self.suggestions))
        )

    def _suggestion(self, suggestion: Suggestion) -> str:
        arguments = python_arguments(suggestion, self.problem)
        return f"{arguments}: {suggestion}" if arguments else str(suggestion)


def _binding(
    problem: Problem, needs: tuple[PhaseMinimum, ...], tiers: tuple[BudgetTier, ...]
) -> str:
    if not has_usable_variants(problem):
        return "what is allowed"
    if needs:
        return problem.hardware.budget_name
    short = [tier for tier in tiers if tier.short]
    # where VRAM and RAM can replace each other, this is the smaller change
    return (
        min(short, key=lambda tier: tier.least_bytes / max(1, tier.have_bytes)).name
        if short
        else problem.hardware.budget_name
    )


def shortage(problem: Problem) -> Infeasible:
    """Explain why ``problem`` has no plan, in less time than `refusal`.

    Without suggestions. The budgets suffice, but less may suffice too. If the device's budget is
    too small, the other budgets are left out.
    """
    sufficient_bytes = sufficient_budget(problem, SHORTAGE_ROUNDS)
    problem, needs = _split_with_needs(with_page_overhead_of_minimum(problem, SHORTAGE_ROUNDS))
    tier = _device_tier(problem, sufficient_bytes)
    tiers = (tier,) if needs else (tier, *_host_tiers(problem))
    return Infeasible(problem, needs, tiers, ())


def short_of(problem: Problem, needs: tuple[PhaseMinimum, ...]) -> Infeasible:
    """Explain why ``problem`` has no plan by ``needs``, the `surely_short` phases.

    It takes no solve: without suggestions, and with a lower bound of the minimum budget.
    """
    bound_bytes = problem.budget_for(max(need.total_bytes for need in needs))
    return Infeasible(problem, needs, (_device_tier(problem, bound_bytes),), ())


def _split_with_needs(problem: Problem) -> tuple[Problem, tuple[PhaseMinimum, ...]]:
    """Return ``problem`` with components of phases that do not fit split into layers where that
    needs less memory, and the phases that then do not fit."""
    needs = _short(problem)
    while (split := finer(problem, needs)) is not None:
        if (split_needs := _short(split)) and not needs:
            break  # layers need less host memory, but more device memory than available
        problem, needs = split, split_needs
    return problem, needs


def _device_tier(problem: Problem, least_bytes: int) -> BudgetTier:
    have_bytes = min(problem.budget_bytes, problem.hardware.capacity_bytes)
    return BudgetTier(problem.hardware.budget_name, have_bytes, least_bytes)


def _host_tiers(problem: Problem) -> Iterator[BudgetTier]:
    """Yield the budgets of host memory and disk."""
    if not problem.hardware.unified:
        yield BudgetTier("RAM", problem.ram_bytes, smallest_ram(problem))
    if problem.pinned_bytes is not None:
        yield BudgetTier("pinned RAM", problem.pinned_bytes, smallest_pinned(problem))
    if problem.disk_bytes is not None:
        yield BudgetTier("disk", problem.disk_bytes, smallest_disk(problem))


def refusal(problem: Problem) -> Infeasible:
    """Explain why ``problem`` has no plan, with suggestions: each takes a solve."""
    smallest_bytes = smallest_budget(problem)
    problem, needs = _split_with_needs(with_page_overhead_of_minimum(problem))
    tiers = (_device_tier(problem, smallest_bytes), *_host_tiers(problem))
    minimum_bytes = {tier.name: tier.least_bytes for tier in tiers}
    return Infeasible(problem, needs, tiers, suggestions_of(problem, needs, minimum_bytes))


def _short(problem: Problem) -> tuple[PhaseMinimum, ...]:
    return tuple(need for need in least_memory_of(problem) if need.short_bytes > 0)
