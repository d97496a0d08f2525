"""Fixed strategies for running a pipeline, as integers of the program. No plan may be slower.

    resident     Every component is loaded before its first phase and stays to the end.
    one by one   Before each phase, components that it does not use are evicted, and components that
                 it uses are loaded whole.
    streamed     No streamable block stays: all of them pass through the ring buffer in every call.
                 Other blocks are loaded for each phase.
    single K     As one by one, but the largest component keeps K blocks of each group and streams
                 the others. K is the same in the whole run. Components that do not fit are
                 streamed.
    device map   Fixed numbers of blocks stay for the whole run; the others are streamed.

The ring buffer has room for two of the largest streamed block, or for one if nothing else fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from graphrun.model.choices import BUFFERED_BLOCKS
from graphrun.solve.program import Choice, Program
from graphrun.solve.rows import Rows, excess_bytes, rows_of, with_drops

Baseline = Literal["resident", "one by one", "streamed", "single K"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)


def fitting(program: Program, baseline: Baseline, limit: int | None = None) -> Iterator[Choice]:
    """Yield the choices of ``baseline`` that fit. ``program`` has one variant per component.

    ``single K`` yields at most ``limit`` choices, from the largest K down: a larger K is usually
    faster.
    """
    weights = [
        sum(program.counts[members] * [program.groups[j].block_bytes for j in members])
        for members in program.groups_of
    ]
    largest = max(range(len(weights)), key=lambda c: weights[c], default=0)
    yielded_count, is_needed = 0, _is_needed(program)
    rows = rows_of(program, _reaching(program, np.zeros_like(is_needed)))
    # bytes of a block on the main device; the bytes of a slot next to blocks and ring buffers
    main_bytes = program.held_bytes * [not group.secondary for group in program.groups]
    fixed_bytes = np.array([int(rows.fixed_bytes(t)) for t in range(len(program.intervals))])
    limit_bytes = program.problem.effective_bytes
    too_large = [c for c in range(len(weights)) if _short_bytes(rows, c) > 0]
    blocks = max((group.count for group in program.groups if group.component == largest), default=0)
    for resident_count in range(blocks, -1, -1) if baseline == "single K" else (0,):
        streamed = [
            group.streamable
            and (
                baseline == "streamed"
                or (baseline == "single K" and group.component in (largest, *too_large))
            )
            for group in program.groups
        ]
        stay = [
            min(resident_count, group.count) if group.component == largest else 0
            for group in program.groups
        ]
        target_counts = is_needed * np.where(streamed, stay, program.counts)
        if (target_counts @ main_bytes + fixed_bytes > limit_bytes).any():
            continue
        double_buffered = _reaching(program, target_counts, evict=baseline != "resident")
        for choice in (
            double_buffered,
            replace(double_buffered, depths=np.ones_like(double_buffered.depths)),
        ):
            if yielded_count != limit and not excess_bytes(program, choice):
                yielded_count += 1
                yield choice
                break


def _short_bytes(rows: Rows[float], component: int) -> int:
    """Return the bytes missing for all of ``component`` in its tightest slot; 0 or less: none."""
    program = rows.program
    members = program.groups_of[component]
    slots = [
        t
        for t, interval in enumerate(program.intervals)
        if component in interval.computing_components
    ]
    fixed = max((int(rows.fixed_bytes(t)) for t in slots), default=0)
    return (
        int(program.counts[members] @ program.held_bytes[members])
        + fixed
        - program.problem.effective_bytes
    )


def mapped(program: Program, resident_counts: Mapping[str, Sequence[int]]) -> Choice:
    """Return the choice of a device map. ``program`` has one variant per component.

    ``resident_counts``: component -> resident blocks per group. Other components are loaded for
    their phases.
    """
    names = [program.problem.components[group.component].name for group in program.groups]
    pairs = list(zip(names, program.groups, strict=True))
    stay = [
        resident_counts[name][group.index] if name in resident_counts else 0
        for name, group in pairs
    ]
    streamed = [group.streamable and name in resident_counts for name, group in pairs]
    return _reaching(
        program, np.maximum(stay, _is_needed(program) * np.where(streamed, 0, program.counts))
    )


def _is_needed(program: Program) -> NDArray[np.int64]:
    """Return per interval and group 1 if the interval's phase runs blocks of the group, else 0."""
    phases = np.array([interval.phase for interval in program.intervals])
    runs = [(program.calls[phases == phase] > 0).any(axis=0) for phase in phases]
    return np.array(runs, dtype=np.int64).reshape(program.calls.shape)


def _reaching(program: Program, target_counts: NDArray[np.int64], *, evict: bool = True) -> Choice:
    """Return the choice with ``target_counts[t, j]`` blocks of group j on the device in interval t.

    Missing blocks are loaded in load slots. With ``evict``, blocks beyond the target are evicted.
    Backing stores are read at first use.
    """
    present, loads = np.zeros((2, *target_counts.shape), dtype=np.int64)
    resident = np.zeros(len(program.groups), dtype=np.int64)
    reads = [-1] * len(program.variant_choices)
    for t, interval in enumerate(program.intervals):
        present[t] = np.minimum(resident, target_counts[t]) if evict else resident
        loads[t] = np.maximum(target_counts[t] - present[t], 0) * (interval.part == "load")
        resident = present[t] + loads[t]
        uses = {use.component for use in program.problem.phases[interval.phase].uses}
        for c, (variant_choice, groups) in enumerate(
            zip(program.variant_choices, program.groups_of, strict=True)
        ):
            unread = (
                variant_choice.read_seconds is not None and reads[c] < 0 and t < program.run_length
            )
            if unread and (program.problem.components[c].name in uses or loads[t, groups].any()):
                reads[c] = t
    spills = (False,) * len(program.spill_gaps)
    return with_drops(
        program,
        Choice(
            present,
            loads,
            np.full_like(target_counts, BUFFERED_BLOCKS),
            tuple(reads),
            (-1,) * len(reads),
            spills,
        ),
    )
