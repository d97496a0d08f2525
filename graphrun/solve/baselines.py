"""Fixed strategies for running a pipeline, as integers of the program: bounds that a plan must not
be slower than. Uses no solver.

    resident     every component is loaded before its first phase and stays to the end one by one
    before each phase, components that it does not use are evicted and those it uses are loaded
    whole streamed     no streamable block stays: all of them pass through the ring buffer in every
    call single K     one by one, but K blocks of each group of the largest component stay and the
    others are streamed; components that
                 do not fit are streamed

A ring buffer holds two of the largest streamed block, or one where otherwise nothing fits.

A device map is a further strategy: given numbers of blocks stay for the whole run, the others are
streamed.

    kept     # # # # # # # #      from the first slot to the last others     ~ ~       ~ ~
    through the ring buffer in every call; loaded for a phase where they cannot be streamed
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from graphrun.model.choices import BUFFERED_BLOCKS
from graphrun.solve.program import Choice, Program

Baseline = Literal["resident", "one by one", "streamed", "single K"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)


def fitting(program: Program, baseline: Baseline, most: int | None = None) -> Iterator[Choice]:
    """The choices of ``baseline`` that fit the budgets. ``single K`` yields one choice per K, from
    the largest K down, at most ``most``; larger K are usually faster. ``program`` has one variant
    per component."""
    weights = [
        sum(program.counts[of] * [program.groups[j].block_bytes for j in of])
        for of in program.groups_of
    ]
    largest = max(range(len(weights)), key=lambda c: weights[c], default=0)
    too_large = [c for c in range(len(weights)) if _short_bytes(program, c) > 0]
    blocks = max((group.count for group in program.groups if group.component == largest), default=0)
    found, needed = 0, _needed(program)
    for kept in range(blocks, -1, -1) if baseline == "single K" else (0,):
        streamed = [
            group.streamable
            and (
                baseline == "streamed"
                or (baseline == "single K" and group.component in (largest, *too_large))
            )
            for group in program.groups
        ]
        stay = [
            min(kept, group.count) if group.component == largest else 0 for group in program.groups
        ]
        goals = needed * np.where(streamed, stay, program.counts)
        double = _reaching(program, goals, evict=baseline != "resident")
        for choice in (double, replace(double, depths=np.ones_like(double.depths))):
            if found != most and not program.excess_bytes(choice):
                found += 1
                yield choice
                break


def _short_bytes(program: Program, component: int) -> int:
    """Bytes missing to hold all of ``component`` in the tightest slot that uses it; 0 or less: it
    fits."""
    of = program.groups_of[component]
    slots = [t for t, interval in enumerate(program.intervals) if component in interval.used]
    fixed = int(program.fixed_bytes[slots].max(initial=0))
    return (
        int(program.counts[of] @ program.held_bytes[of]) + fixed - program.problem.effective_bytes
    )


def mapped(program: Program, kept: Mapping[str, Sequence[int]]) -> Choice:
    """The choice that keeps ``kept`` (component -> number of blocks per group) on the device for
    the whole run. Other components are loaded for their phases. ``program`` has one variant per
    component."""
    names = [program.problem.components[group.component].name for group in program.groups]
    pairs = list(zip(names, program.groups, strict=True))
    stay = [kept[name][group.index] if name in kept else 0 for name, group in pairs]
    streamed = [group.streamable and name in kept for name, group in pairs]
    return _reaching(
        program, np.maximum(stay, _needed(program) * np.where(streamed, 0, program.counts))
    )


def _needed(program: Program) -> NDArray[np.int64]:
    """1 where the phase of an interval runs blocks of a group."""
    phases = np.array([interval.phase for interval in program.intervals])
    runs = [(program.calls[phases == phase] > 0).any(axis=0) for phase in phases]
    return np.array(runs, dtype=np.int64).reshape(program.calls.shape)


def _reaching(program: Program, goals: NDArray[np.int64], *, evict: bool = True) -> Choice:
    """The choice with ``goals[t, j]`` blocks of each group on the device in each interval: missing
    ones are loaded in load slots, and others leave if ``evict``. Backing stores are read when first
    needed, and dropped as in `Program.with_drops`."""
    present, loaded = np.zeros((2, *goals.shape), dtype=np.int64)
    held = np.zeros(len(program.groups), dtype=np.int64)
    reads = [-1] * len(program.variant_choices)
    for t, interval in enumerate(program.intervals):
        present[t] = np.minimum(held, goals[t]) if evict else held
        loaded[t] = np.maximum(goals[t] - present[t], 0) * (interval.part == "load")
        held = present[t] + loaded[t]
        uses = {use.component for use in program.problem.phases[interval.phase].uses}
        for c, (of, groups) in enumerate(
            zip(program.variant_choices, program.groups_of, strict=True)
        ):
            unread = of.read_seconds is not None and reads[c] < 0 and t < program.run_length
            if unread and (program.problem.components[c].name in uses or loaded[t, groups].any()):
                reads[c] = t
    spills = (False,) * len(program.spill_gaps)
    return program.with_drops(
        Choice(
            present,
            loaded,
            np.full_like(goals, BUFFERED_BLOCKS),
            tuple(reads),
            (-1,) * len(reads),
            spills,
        )
    )
