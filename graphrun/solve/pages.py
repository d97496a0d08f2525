"""Plans within a budget counted in pages: what the allocator reserves, not the bytes of tensors.

    solve -> replay -> over the budget? -> solve again with the overshoot set aside in the slots concerned -> ...

The program counts bytes of tensors. Where the replay of its plan reserves more than the budget in a slot, so many bytes are set
aside in that slot, and the problem is solved again. What is set aside only grows. The bound on seconds stays that of the program
without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from graphrun.model.allocator import LARGE_PAGE_BYTES
from graphrun.model.problem import PhaseNumbers, Problem
from graphrun.model.solution import Solution
from graphrun.solve.granularity import split_into_layers
from graphrun.units import round_up
from graphrun.verify.solution import checked_solution

ROUNDS = 6  # in the last one, whole pages are set aside
PROVEN_GAP = 1e-5

Reserve = Mapping[tuple[str, str], int]  # (phase, part) -> bytes


def within_pages(problem: Problem, found: Solution, solved: Callable[[Problem], Solution | None]) -> Solution | None:
    """``found``, or the best plan that keeps to the budget in pages; None where none was found. ``solved``: solves a problem whose
    phases have bytes set aside."""
    first, reserve = found, dict[tuple[str, str], int]()
    for trial in range(ROUNDS):
        over = found.overshoot()
        if not over:
            return found
        for key, nbytes in over.items():
            reserve[key] = reserve.get(key, 0) + nbytes
            if trial >= ROUNDS - 2:
                reserve[key] = round_up(reserve[key], max(1, int(LARGE_PAGE_BYTES * problem.hardware.page_scale)))
        other = solved(with_reserve(problem, reserve))
        if other is None:
            return None
        layers = {component.name for component in other.problem.components if component.granularity == "layers"}
        of = split_into_layers(problem, layers)
        objective, bound = other.objective_seconds, min(first.bound_seconds, other.objective_seconds)
        gap = 1 - bound / objective if objective else 0.0
        again = checked_solution(of, replace(other.plan, problem=of.digest), gap <= PROVEN_GAP, bound, objective, gap)
        if again is None:
            return None
        found = again
    return found if not found.overshoot() else None


def with_reserve(problem: Problem, reserve: Reserve) -> Problem:
    """``problem`` with ``reserve`` set aside: as activation of the slots that compute, as live-in bytes of load slots."""

    def more(phase: PhaseNumbers) -> PhaseNumbers:
        load, first, steady = (reserve.get((phase.name, part), 0) for part in ("load", "first", "steady"))
        return replace(
            phase,
            live_in_bytes=phase.live_in_bytes + load,
            first_bytes=phase.first_bytes + max(0, first - load),
            steady_bytes=phase.steady_bytes + max(0, steady - load),
        )

    options = tuple(replace(option, phases=tuple(map(more, option.phases))) for option in problem.options)
    return replace(problem, phases=tuple(map(more, problem.phases)), options=options)
