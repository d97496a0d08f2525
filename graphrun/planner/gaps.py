"""When a value may be away from the device: between its producer and its consumers. Decides nothing else.

phases    encode   | denoise | decode         embeds: used, unused, used
embeds    ########   spill..restore ######
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphrun.planner.problem import Problem


@dataclass(frozen=True, slots=True)
class Gap:
    """A value that may be spilled in load interval ``out`` and restored in load interval ``back``."""

    value: int
    nbytes: int
    out: int
    back: int
    out_seconds: float
    back_seconds: float

    def absent(self, t: int) -> bool:
        """Whether a spill keeps it off the device in interval ``t``."""
        return self.out < t < self.back

    def seconds(self, t: int) -> float:
        """What a spill takes of the copies in interval ``t``."""
        return self.out_seconds if t == self.out else self.back_seconds if t == self.back else 0.0


def gaps_of(problem: Problem, loads: Mapping[int, int], turn: int, count: int) -> tuple[Gap, ...]:
    """Every gap of every value, in each run: phases in a row in which it lives unused, with load slots to spill and restore in.

    ``loads``: the load interval of each phase; ``count`` intervals in all, ``turn`` of them to a run.
    """
    found = []
    for number, value in enumerate(problem.values):
        if not value.nbytes:
            continue
        start = None
        for phase in range(value.first_phase, min(value.last_phase + 1, len(problem.phases))):
            idle = problem.phases[phase].stage not in (*value.consumers, value.producer)
            if not idle and start is not None and start in loads and phase in loads:
                found.append((number, value.nbytes, loads[start], loads[phase]))
            start = (phase if start is None else start) if idle else None
    to, back = problem.hardware.d2h_bytes_per_second, problem.hardware.h2d_bytes_per_second
    return tuple(
        Gap(number, nbytes, out + shift, home + shift, nbytes / to, nbytes / back)
        for shift in range(0, count, max(turn, 1))
        for number, nbytes, out, home in found
    )
