"""Result of solving: a plan with its bound. Loading a saved plan does not import the solver."""

from __future__ import annotations

from dataclasses import dataclass

from graphrun.model.plan import Plan
from graphrun.model.problem import ComponentNumbers, Problem
from graphrun.model.simulation import Simulation
from graphrun.units import html_table, show_seconds, show_size

OPTIMAL_GAP = 1e-3
SLOW_SHARE, SLOW_SECONDS = 2 / 3, 10.0


@dataclass(frozen=True, slots=True, repr=False)
class Solution:
    """A plan, its simulation, and its quality.

    ``plan``: the best solution of the integer program, or a plan that simulates faster.
    ``simulation``: its seconds and peaks (``simulation.peak_bytes``), which screens show.
    ``objective_seconds``: the program's seconds of its best solution. ``bound_seconds``: lower
    bound on the objective of any plan, 0.0 if unknown; if ``plan`` simulates faster than that, a
    bound on the simulated seconds. In a session, objective and bound cover all runs.
    """

    problem: Problem
    plan: Plan
    simulation: Simulation
    bound_seconds: float
    objective_seconds: float

    def __repr__(self) -> str:
        problem, simulation = self.problem, self.simulation
        further_text = (
            f", every further run {show_seconds(simulation.further_seconds)}"
            if simulation.further_slots
            else ""
        )
        return (
            f"<Solution {problem.graph}: {show_seconds(simulation.seconds)}{further_text},"
            f" peak {show_size(simulation.peak_bytes)} of {show_size(problem.effective_bytes)},"
            f" moves {show_size(simulation.moved_bytes)}>"
        )

    def _repr_html_(self) -> str:
        rows = [
            (
                f"{slot.phase} {slot.part}",
                show_size(slot.peak_bytes),
                show_size(slot.loaded_bytes + slot.streamed_bytes),
                show_seconds(slot.seconds),
            )
            for slot in self.simulation.slots
        ]
        return html_table(repr(self), [("slot", "peak", "moves", "takes"), *rows])

    @property
    def seconds(self) -> float:
        """Simulated seconds, in a session of all runs."""
        return self.simulation.total_seconds

    @property
    def gap(self) -> float:
        """Share of the simulated time above the bound; 1.0 if no bound is known."""
        return max(0.0, 1 - self.bound_seconds / self.seconds) if self.seconds else 0.0

    @property
    def proven_optimal(self) -> bool:
        """Whether no plan is faster by more than `OPTIMAL_GAP`."""
        return self.gap <= OPTIMAL_GAP

    @property
    def slow(self) -> bool:
        """Whether the device waits for at least two thirds of a run's time, and for ten seconds."""
        seconds = self.seconds / self.problem.runs
        return seconds - self.simulation.compute_seconds >= max(SLOW_SECONDS, SLOW_SHARE * seconds)

    @property
    def chosen(self) -> Problem:
        """``problem`` with the plan's choices applied."""
        return self.simulation.problem

    @property
    def variant_names(self) -> dict[str, str]:
        """The chosen variant of each component."""
        return {component.name: component.variants[0].name for component in self.chosen.components}

    @property
    def components(self) -> tuple[ComponentNumbers, ...]:
        """The components of the graph, each with its chosen variant; without copies."""
        return tuple(component for component in self.chosen.components if not component.copy_of)

    def excess_page_overheads(self) -> dict[tuple[str, str], int]:
        """Return the page overhead of the slots that exceed the budget, by phase and part.

        For a secondary device: the maximum over all slots, by ``deviceN`` and "".
        """
        excess: dict[tuple[str, str], int] = {}
        for slot in self.simulation.all_slots:
            if slot.peak_bytes > self.problem.effective_bytes:
                excess[slot.phase, slot.part] = max(
                    slot.pages_bytes, excess.get((slot.phase, slot.part), 0)
                )
            for number, secondary in enumerate(self.problem.secondaries, 1):
                if slot.secondary_peaks[number - 1] > secondary.effective_bytes:
                    pages = slot.secondary_pages[number - 1]
                    excess[f"device{number}", ""] = max(
                        pages, excess.get((f"device{number}", ""), 0)
                    )
        return excess
