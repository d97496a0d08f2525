"""Fixed strategies for running a pipeline, as integers of the program: bounds that a plan must not be slower than. Uses no solver.

    resident     every component is loaded before its first phase and stays to the end
    one by one   before each phase, components that it does not use are evicted and those it uses are loaded whole
    streamed     no streamable block stays: all of them pass through the ring in every call
    single K     one by one, but K blocks of each group of the largest component stay and the others are streamed; components that
                 do not fit are streamed

A ring holds two of the largest streamed block, or one where otherwise nothing fits.

A device map is a further strategy: given numbers of blocks stay for the whole run, the others are streamed.

    kept     # # # # # # # #      from the first slot to the last
    others     ~ ~       ~ ~      through the ring in every call; loaded for a phase where they cannot be streamed
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from graphrun.solve.dominance import budget_excess
from graphrun.solve.milp import with_drops
from graphrun.solve.program import Choice, Program

Baseline = Literal["resident", "one by one", "streamed", "single K"]
BASELINES: tuple[Baseline, ...] = ("resident", "one by one", "streamed", "single K")


def fitting(program: Program, baseline: Baseline, most: int | None = None) -> Iterator[Choice]:
    """The choices of ``baseline`` that fit the budgets. ``single K`` yields one choice per K, from the largest K down, at most
    ``most``; larger K are usually faster. ``program`` has one variant per component."""
    sizes = [sum(c.count * c.block_bytes for c in program.groups if c.component == n) for n in range(len(program.variant_choices))]
    largest = max(range(len(sizes)), key=lambda n: sizes[n], default=0)
    blocks = max((group.count for group in program.groups if group.component == largest), default=0)
    found = 0
    for kept in range(blocks, -1, -1) if baseline == "single K" else (0,):
        double = _choice(program, baseline, largest, kept)
        single = replace(double, depths=((1,) * len(program.groups),) * len(program.intervals))
        for choice in (with_drops(program, double), with_drops(program, single)):
            if found != most and not budget_excess(program, choice):
                found += 1
                yield choice
                break


def _short_bytes(program: Program, component: int) -> int:
    """Bytes missing to hold all of ``component`` in the tightest slot that uses it; 0 or less: it fits."""
    weights = sum(group.count * group.held_bytes for group in program.groups if group.component == component)
    slots = [t for t, interval in enumerate(program.intervals) if component in interval.used]
    fixed = max((program.intervals[t].fixed_bytes + program.activation_bytes(t) for t in slots), default=0)
    return weights + fixed - program.problem.effective_bytes


def _choice(program: Program, baseline: Baseline, largest: int, kept: int) -> Choice:
    present, loaded = list[tuple[int, ...]](), list[tuple[int, ...]]()
    held = [0] * len(program.groups)
    too_large = {c for c in range(len(program.problem.components)) if _short_bytes(program, c) > 0}
    reads = [-1] * len(program.variant_choices)
    for t, interval in enumerate(program.intervals):
        phase = program.problem.phases[interval.phase]
        uses = {use.component: use for use in phase.uses}
        goal = []
        for group in program.groups:
            use = uses.get(program.problem.components[group.component].name)
            needed = use is not None and use.group_calls[group.index] > 0
            streamed = group.streamable and (
                baseline == "streamed" or (baseline == "single K" and group.component in (largest, *too_large))
            )
            stays = min(kept, group.count) if group.component == largest else 0
            goal.append(0 if not needed else stays if streamed else group.count)
        stay = held if baseline == "resident" else [min(h, g) for h, g in zip(held, goal, strict=True)]
        more = [max(0, g - h) if interval.part == "load" else 0 for g, h in zip(goal, stay, strict=True)]
        present.append(tuple(stay))
        loaded.append(tuple(more))
        held = [h + m for h, m in zip(stay, more, strict=True)]
        for variant_choice in program.variant_choices:
            name = program.problem.components[variant_choice.component].name
            if (
                variant_choice.read_seconds is not None
                and reads[variant_choice.component] < 0
                and name in uses
                and t < program.run_length
            ):
                reads[variant_choice.component] = t
    if program.session and baseline == "resident":
        further = program.run_length
        present[further:] = [tuple(held) for _ in present[further:]]
        loaded[further:] = [tuple(0 for _ in held) for _ in loaded[further:]]
    return Choice(
        tuple(present), tuple(loaded), tuple(reads), (-1,) * len(program.variant_choices), (False,) * len(program.spill_gaps)
    )


def mapped(program: Program, kept: Mapping[str, Sequence[int]]) -> Choice:
    """The choice that keeps ``kept`` (component -> number of blocks per group) on the device for the whole run. Other components
    are loaded for their phases. ``program`` has one variant per component."""
    components = [component.name for component in program.problem.components]
    stay = [kept[name][c.index] if (name := components[c.component]) in kept else 0 for c in program.groups]
    present, loaded = list[tuple[int, ...]](), list[tuple[int, ...]]()
    held, reads = [0] * len(program.groups), [-1] * len(program.variant_choices)
    for t, interval in enumerate(program.intervals):
        uses = {use.component: use for use in program.problem.phases[interval.phase].uses}
        goal = []
        for number, group in enumerate(program.groups):
            name = components[group.component]
            needed = name in uses and uses[name].group_calls[group.index] > 0
            streamed = group.streamable and name in kept
            goal.append(max(stay[number], group.count if needed and not streamed else 0))
        stays = [min(h, g) for h, g in zip(held, goal, strict=True)]
        more = [g - s if interval.part == "load" else 0 for g, s in zip(goal, stays, strict=True)]
        present.append(tuple(stays))
        loaded.append(tuple(more))
        held = [s + m for s, m in zip(stays, more, strict=True)]
        for variant_choice in program.variant_choices:
            begins = components[variant_choice.component] in uses or any(
                more[n] for n, group in enumerate(program.groups) if group.component == variant_choice.component
            )
            if (
                variant_choice.read_seconds is not None
                and reads[variant_choice.component] < 0
                and begins
                and t < program.run_length
            ):
                reads[variant_choice.component] = t
    return with_drops(
        program,
        Choice(
            tuple(present), tuple(loaded), tuple(reads), (-1,) * len(program.variant_choices), (False,) * len(program.spill_gaps)
        ),
    )
