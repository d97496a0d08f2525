"""Plain ways to run a pipeline, as integers: what other programs do, and what a plan must never be slower than. Knows no solver.

resident     every component is loaded before its first phase and stays to the end
one by one   before each phase what it does not use is evicted, what it uses is loaded whole
streamed     nothing that can be streamed stays: all of it passes through the ring in every call
single K     one by one, but of the largest component K blocks stay in every class, the others pass; what does not fit is streamed

A ring has room for two of the largest block that passes through it; for one alone where otherwise nothing fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from graphrun.planner.homes import freed
from graphrun.planner.program import Choice, Program
from graphrun.planner.variants import over

Mode = Literal["resident", "one by one", "streamed", "single K"]
MODES: tuple[Mode, ...] = ("resident", "one by one", "streamed", "single K")


def fitting(program: Program, mode: Mode, most: int | None = None) -> Iterator[Choice]:
    """The choices of ``mode`` that fit; of a single K the largest ``most``, best first as a rule. ``program``: one way each."""
    sizes = [sum(c.count * c.block_bytes for c in program.cells if c.component == n) for n in range(len(program.ways))]
    largest = max(range(len(sizes)), key=lambda n: sizes[n], default=0)
    blocks = max((cell.count for cell in program.cells if cell.component == largest), default=0)
    found = 0
    for kept in range(blocks, -1, -1) if mode == "single K" else (0,):
        deep = _choice(program, mode, largest, kept)
        alone = replace(deep, depths=((1,) * len(program.cells),) * len(program.intervals))
        for choice in (freed(program, deep), freed(program, alone)):
            if found != most and not over(program, choice):
                found += 1
                yield choice
                break


def _short_bytes(program: Program, component: int) -> int:
    """What is missing to hold ``component`` whole in the tightest of its slots."""
    weights = sum(cell.count * cell.held_bytes for cell in program.cells if cell.component == component)
    slots = [t for t, interval in enumerate(program.intervals) if component in interval.used]
    fixed = max((program.intervals[t].fixed_bytes + program.activation_bytes(t) for t in slots), default=0)
    return weights + fixed - program.problem.effective_bytes


def _choice(program: Program, mode: Mode, largest: int, kept: int) -> Choice:
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
