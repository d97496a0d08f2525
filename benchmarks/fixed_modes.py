"""The fixed modes that other programs run a pipeline in, written out as plans for the same problem, to compare the planner's with.

resident     every component is loaded before its first phase and stays to the end
one by one   before each phase what it does not use is evicted, what it uses is loaded whole
streamed     nothing that can be streamed stays: all of it passes through the ring in every call
single K     one by one, but of the largest component the same number of blocks stays in every class, the others pass: the best K;
             other components that do not fit whole are streamed
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from graphrun.planner.actions import plan_of  # noqa: E402
from graphrun.planner.check import check  # noqa: E402
from graphrun.planner.plan import Plan  # noqa: E402
from graphrun.planner.problem import Problem  # noqa: E402
from graphrun.planner.program import Choice, Program, program_of  # noqa: E402
from graphrun.planner.settle import arrange  # noqa: E402
from graphrun.planner.simulate import simulate  # noqa: E402

MODES = ("resident", "one by one", "streamed", "single K")


def compared(problem: Problem, plan: Plan) -> dict[str, Any]:
    """Per mode, with the variants, options and order of ``plan``: its seconds over the plan's, its bytes; None: it does not fit."""
    ours, found = simulate(problem, plan), dict[str, Any]()
    for mode in MODES:
        fitting = [other for other in _plans(problem, plan, mode) if not check(problem, other)]
        best = min((simulate(problem, other) for other in fitting), key=lambda each: each.total_seconds, default=None)
        found[mode] = best and {
            "seconds": round(best.total_seconds, 4),
            "times_ours": round(best.total_seconds / ours.total_seconds, 5) if ours.total_seconds else 1.0,
            "moved_gib": round(best.total_moved_bytes / 2**30, 3),
        }
    return found


def _plans(problem: Problem, plan: Plan, mode: str) -> Iterator[Plan]:
    arranged = arrange(problem, plan.order, dict(plan.options))
    names = dict(plan.variants)
    variants = []
    for component in problem.components:
        every = [variant.name for variant in component.variants]
        variants.append((every.index(names.get(component.name, every[0])),))
    program = program_of(arranged, variants)
    largest = max((sum(c.count * c.block_bytes for c in program.cells if c.component == n), n) for n in range(len(variants)))[1]
    most = max((cell.count for cell in program.cells if cell.component == largest), default=0)
    for kept in range(most + 1) if mode == "single K" else (0,):
        choice = _choice(program, mode, largest, kept)
        yield plan_of(program, choice, problem, plan.options, plan.order)


def _short_bytes(program: Program, component: int) -> int:
    """What is missing to hold ``component`` whole in the tightest of its slots."""
    weights = sum(cell.count * cell.held_bytes for cell in program.cells if cell.component == component)
    slots = [t for t, interval in enumerate(program.intervals) if component in interval.used]
    fixed = max((program.intervals[t].fixed_bytes + program.activation_bytes(t) for t in slots), default=0)
    return weights + fixed - program.problem.effective_bytes


def _choice(program: Program, mode: str, largest: int, kept: int) -> Choice:
    present, loaded = list[tuple[int, ...]](), list[tuple[int, ...]]()
    held = [0] * len(program.cells)
    too_large = {c for c in range(len(program.problem.components)) if _short_bytes(program, c) > 0}
    fills = [-1] * len(program.ways)
    for t, interval in enumerate(program.intervals):
        phase = program.problem.phases[interval.phase]
        uses = {use.component: use for use in phase.uses}
        goal = []
        for cell in program.cells:
            use = uses.get(program.problem.components[cell.component].name)
            needed = use is not None and use.class_calls[cell.index] > 0
            passes = cell.streamable and (mode == "streamed" or (mode == "single K" and cell.component in (largest, *too_large)))
            stays = min(kept, cell.count) if cell.component == largest else 0
            goal.append(0 if not needed else stays if passes else cell.count)
        stay = held if mode == "resident" else [min(h, g) for h, g in zip(held, goal, strict=True)]
        more = [max(0, g - h) if interval.part == "load" else 0 for g, h in zip(goal, stay, strict=True)]
        present.append(tuple(stay))
        loaded.append(tuple(more))
        held = [h + m for h, m in zip(stay, more, strict=True)]
        for way in program.ways:
            name = program.problem.components[way.component].name
            if way.fill_seconds is not None and fills[way.component] < 0 and name in uses and t < program.turn:
                fills[way.component] = t
    if program.session and mode == "resident":
        turn = program.turn
        present[turn:] = [tuple(held) for _ in present[turn:]]
        loaded[turn:] = [tuple(0 for _ in held) for _ in loaded[turn:]]
    return Choice(tuple(present), tuple(loaded), tuple(fills), (-1,) * len(program.ways), (False,) * len(program.gaps))
