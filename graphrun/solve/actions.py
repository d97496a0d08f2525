"""Plan from the integers of a solution: block names, and the order of actions in a slot.

Order of actions: drop (a backing store), evict (blocks), spill and restore (values), read (a
backing store), stream and load (blocks), run. Loads are sorted by the next use of their components.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from graphrun.model.blocks import kept
from graphrun.model.plan import (
    Action,
    BlockNames,
    Drop,
    Evict,
    Load,
    Plan,
    Read,
    Restore,
    Run,
    Slot,
    Spill,
    Stream,
)
from graphrun.model.problem import Problem
from graphrun.model.splits import splits_of
from graphrun.solve.program import Choice, Program
from graphrun.solve.rows import rows_of

Counts = NDArray[np.int64]  # blocks per group


def plan_of(
    program: Program,
    choice: Choice,
    original: Problem | None = None,
    options: Sequence[tuple[str, str]] = (),
    order: Sequence[str] = (),
) -> Plan:
    """Return the plan for ``choice`` of ``program``, which has one variant per component.

    The first blocks of each group's `keep_order` stay resident. ``original``: the problem before
    the stage ``options`` and the stage ``order`` were applied.
    """
    original, zero_counts = (
        original or program.problem,
        np.zeros(len(program.groups), dtype=np.int64),
    )
    # the blocks that stay on the device between runs: all runs but the first start with them
    stay = choice.present[program.run_length] if program.session else zero_counts
    first = _run(program, choice, range(program.run_length), zero_counts, stay)
    further_slots = (
        _run(program, choice, range(program.run_length, len(program.intervals)), stay, stay)
        if program.session
        else ()
    )
    pairs = zip(original.components, program.variant_choices, strict=True)
    variant_names = {component.name: variant.variant.name for component, variant in pairs}
    end_blocks = _blocks(program, zero_counts, stay) if program.session else {}
    end_blocks_by_name = tuple(
        (program.problem.components[c].name, blocks) for c, blocks in end_blocks.items()
    )
    splits = splits_of(original, program.problem)
    return Plan(
        original.digest,
        first,
        original.named_variants(variant_names),
        tuple(options),
        tuple(order),
        further_slots,
        leaves=end_blocks_by_name,
        splits=splits,
    )


def _run(
    program: Program, choice: Choice, intervals: range, resident: Counts, stay: Counts
) -> tuple[Slot, ...]:
    """Return the slots and the end slot; ``resident``, ``stay``: blocks per group before, after."""
    components, slots = program.problem.components, list[Slot]()
    rows = rows_of(program, choice)
    for t in intervals:
        interval, present, end_counts = (
            program.intervals[t],
            choice.present[t],
            choice.present[t] + choice.loads[t],
        )
        phase = program.problem.phases[interval.phase]
        loads, keeps = (
            _blocks(program, present, end_counts),
            _blocks(program, np.zeros_like(end_counts), end_counts),
        )
        actions: list[Action] = [Drop(components[c].name) for c in _at(program, choice.drops, t)]
        actions += [
            Evict(components[c].name, blocks)
            for c, blocks in _blocks(program, present, resident).items()
        ]
        gaps = [
            gap
            for gap, is_spilled in zip(program.spill_gaps, choice.spills, strict=True)
            if is_spilled
        ]
        actions += [
            Spill(program.problem.values[gap.value].name) for gap in gaps if gap.spill_slot == t
        ]
        actions += [
            Restore(program.problem.values[gap.value].name) for gap in gaps if gap.restore_slot == t
        ]
        actions += [Read(components[c].name) for c in _at(program, choice.reads, t)]
        numbers = {component.name: c for c, component in enumerate(components)}
        for c in (numbers[use.component] for use in phase.uses):
            groups = program.groups_of[c]
            if any(rows.variables.streamed(t, j) for j in groups):
                ring_buffer = int(rows.ring_buffer_bytes(t, groups))
                actions.append(Stream(components[c].name, keeps.get(c, ()), ring_buffer))
        use_order = [
            numbers[use.component]
            for next_phase in program.problem.phases[interval.phase :]
            for use in next_phase.uses
        ]
        # components without a later use come last
        for c in dict.fromkeys((*use_order, *numbers.values())):
            if c in loads:
                actions.append(
                    Load(
                        components[c].name,
                        loads[c],
                        program.variant_choices[c].variant.backing_store,
                    )
                )
        actions += [Run()] if interval.rounds else []
        slots.append(Slot(phase.name, interval.part, interval.rounds, tuple(actions)))
        resident = end_counts
    evicts = tuple(
        Evict(components[c].name, blocks) for c, blocks in _blocks(program, stay, resident).items()
    )
    return *slots, Slot("", "end", 0, evicts)


def _at(program: Program, component_intervals: Sequence[int], t: int) -> list[int]:
    """Return the used components whose entry in ``component_intervals`` is ``t``.

    ``component_intervals``: `Choice.reads` or `Choice.drops`.
    """
    return [
        c
        for c, (variant_choice, slot) in enumerate(
            zip(program.variant_choices, component_intervals, strict=True)
        )
        if slot == t and variant_choice.is_used
    ]


def _blocks(program: Program, first: Counts, last: Counts) -> dict[int, BlockNames]:
    """Return the blocks at positions ``first`` to ``last`` in the `keep_order` of each group.

    Keys are component numbers. Values name blocks as plans do; None: all blocks.
    """
    blocks_by_component: dict[int, BlockNames] = {}
    for c, component in enumerate(program.problem.components):
        counts = np.zeros((2, len(component.groups)), dtype=np.int64)
        for j in program.groups_of[c]:
            counts[:, program.groups[j].index] = first[j], last[j]
        if blocks := kept(component, counts[1].tolist(), counts[0].tolist()):
            blocks_by_component[c] = blocks.names
    return blocks_by_component
