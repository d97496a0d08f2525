"""Plans within a budget counted in pages: what the allocator reserves, not the bytes of tensors.

    solve -> replay -> over the budget? -> solve again with the overshoot set aside in the slots concerned -> ...

The program counts bytes of tensors. Where the replay of its plan reserves more than the budget in a slot, so many bytes are set aside
in that slot, and the problem is solved again. What is set aside only grows. The bound on seconds stays that of the program without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from graphrun.model.allocator import Caching
from graphrun.model.plan import Plan
from graphrun.model.problem import PhaseNumbers, Problem
from graphrun.verify.pages import reserved_bytes

ROUNDS = 8
STEP_BYTES = 2 * 2**20  # of what is set aside

Reserve = Mapping[tuple[str, str], int]  # (phase, part) -> bytes


def counts_pages(problem: Problem) -> bool:
    """Whether the device reserves pages, and the problem knows what its phases allocate."""
    return problem.hardware.caching_allocator and all(phase.trace is not None for phase in problem.phases)


def overshoot(problem: Problem, chosen: Problem, plan: Plan) -> dict[tuple[str, str], int]:
    """Bytes that ``plan`` reserves above the budget, by phase and part; empty where it keeps to it."""
    found: dict[tuple[str, str], int] = {}
    slots = (*plan.slots, *plan.again)
    for slot, nbytes in zip(slots, reserved_bytes(chosen, plan, Caching), strict=True):
        if (over := nbytes - problem.effective_bytes) > 0:
            found[slot.phase, slot.part] = max(over, found.get((slot.phase, slot.part), 0))
    return found


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
