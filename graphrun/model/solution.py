"""The result of solving: a plan with its bound. Kept apart from the solver, so that loading a saved
plan does not import it.

``bound_seconds`` and ``objective_seconds`` refer to the integer program; a plan's own seconds and
bytes are in ``simulation``.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphrun.model.plan import Plan
from graphrun.model.problem import Problem
from graphrun.model.simulation import Simulation
from graphrun.units import html_table, show_seconds, show_size

OPTIMAL_GAP = 1e-3
SLOW_SHARE, SLOW_SECONDS = 2 / 3, 10.0


@dataclass(frozen=True, slots=True, repr=False)
class Solution:
    """A plan, what it takes by `simulate`, and its quality.

    ``objective_seconds``: the integer program's objective for its best solution (the screen prints
    the simulation's seconds instead). ``bound_seconds``: lower bound on the objective of any plan,
    0.0 where none is known; where ``plan`` simulates faster than that, a bound on what any plan
    simulates. ``plan`` is the best solution, or a plan that simulates faster. In a session,
    objective and bound cover all runs.
    """

    problem: Problem
    plan: Plan
    simulation: Simulation
    bound_seconds: float
    objective_seconds: float

    def __repr__(self) -> str:
        problem, simulation = self.problem, self.simulation
        again = (
            f", every further run {show_seconds(simulation.again_seconds)}"
            if simulation.again
            else ""
        )
        return (
            f"<Solution {problem.graph}: {show_seconds(simulation.seconds)}{again}, peak {show_size(simulation.peak_bytes)} of"
            f" {show_size(problem.effective_bytes)}, moves {show_size(simulation.moved_bytes)}>"
        )

    def _repr_html_(self) -> str:
        rows = [
            (
                f"{of.phase} {of.part}",
                show_size(of.peak_bytes),
                show_size(of.loaded_bytes + of.streamed_bytes),
                show_seconds(of.seconds),
            )
            for of in self.simulation.slots
        ]
        return html_table(repr(self), [("slot", "peak", "moves", "takes"), *rows])

    @property
    def gap(self) -> float:
        """How far the simulated time is above the bound, relative to it; 1.0 where no bound is
        known."""
        seconds = self.simulation.total_seconds
        return max(0.0, 1 - self.bound_seconds / seconds) if seconds else 0.0

    @property
    def proven_optimal(self) -> bool:
        """Whether no plan is faster by more than `OPTIMAL_GAP`."""
        return self.gap <= OPTIMAL_GAP

    @property
    def slow(self) -> bool:
        """Whether the device waits for at least two thirds of a run's time, and for ten seconds."""
        seconds = self.simulation.total_seconds / self.problem.runs
        return seconds - self.simulation.compute_seconds >= max(SLOW_SECONDS, SLOW_SHARE * seconds)

    @property
    def chosen(self) -> Problem:
        """``problem`` with the plan's choices applied: order, options, and one variant per
        component."""
        return self.simulation.problem

    def short_of_pages(self) -> dict[tuple[str, str], int]:
        """Of the slots that exceed the budget, by phase and part: bytes that the allocator reserves
        beyond those of tensors. Of the secondary devices likewise, the most of all slots, by
        ``deviceN`` and no part."""
        found: dict[tuple[str, str], int] = {}
        for slot in (*self.simulation.slots, *self.simulation.again):
            if slot.peak_bytes > self.problem.effective_bytes:
                found[slot.phase, slot.part] = max(
                    slot.pages_bytes, found.get((slot.phase, slot.part), 0)
                )
            for number, secondary in enumerate(self.problem.secondaries, 1):
                if slot.secondary_peaks[number - 1] > secondary.effective_bytes:
                    pages = slot.secondary_pages[number - 1]
                    found[f"device{number}", ""] = max(pages, found.get((f"device{number}", ""), 0))
        return found
