"""Translates the integers of a solution into a plan: names of blocks, and the order of actions in a
slot.

drop, evict | spill, restore | read | stream | load, nearest use first | run
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from graphrun.model.keep_order import keep_order
from graphrun.model.plan import (
    Action,
    Blocks,
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

Counts = NDArray[np.int64]  # blocks per group


def plan_of(
    program: Program,
    choice: Choice,
    of: Problem | None = None,
    options: Sequence[tuple[str, str]] = (),
    order: Sequence[str] = (),
) -> Plan:
    """The plan for ``choice``. Of each block group, the resident blocks are the first of its
    `keep_order`.

    ``program`` has one variant per component. ``of``: the original problem, before stage
    ``options`` and stage ``order`` were applied to it.
    """
    of, none = of or program.problem, np.zeros(len(program.groups), dtype=np.int64)
    stay = choice.present[program.run_length] if program.session else none  # when a run ends
    first = _run(program, choice, range(program.run_length), none, stay)
    again = (
        _run(program, choice, range(program.run_length, len(program.intervals)), stay, stay)
        if program.session
        else ()
    )
    pairs = zip(of.components, program.variant_choices, strict=True)
    variants = tuple(
        (component.name, by.variant.name) for component, by in pairs if len(component.variants) > 1
    )
    kept = _blocks(program, none, stay) if program.session else {}
    leaves = tuple((program.problem.components[c].name, blocks) for c, blocks in kept.items())
    splits = splits_of(of, program.problem)
    return Plan(
        of.digest,
        first,
        variants,
        tuple(options),
        tuple(order),
        again,
        leaves=leaves,
        splits=splits,
    )


def _run(
    program: Program, choice: Choice, intervals: range, held: Counts, stay: Counts
) -> tuple[Slot, ...]:
    """The slots of ``intervals`` and the end slot. Blocks per group: ``held`` are present before,
    ``stay`` after them."""
    components, slots = program.problem.components, list[Slot]()
    streamed, ring_buffers = program.streamed(choice), program.ring_buffer_bytes(choice)
    for t in intervals:
        interval, present, after = (
            program.intervals[t],
            choice.present[t],
            choice.present[t] + choice.loaded[t],
        )
        phase = program.problem.phases[interval.phase]
        loads, keeps = (
            _blocks(program, present, after),
            _blocks(program, np.zeros_like(after), after),
        )
        actions: list[Action] = [Drop(components[c].name) for c in _at(program, choice.drops, t)]
        actions += [
            Evict(components[c].name, blocks)
            for c, blocks in _blocks(program, present, held).items()
        ]
        gaps = [gap for gap, out in zip(program.spill_gaps, choice.spills, strict=True) if out]
        actions += [Spill(program.problem.values[gap.value].name) for gap in gaps if gap.out == t]
        actions += [
            Restore(program.problem.values[gap.value].name) for gap in gaps if gap.back == t
        ]
        actions += [Read(components[c].name) for c in _at(program, choice.reads, t)]
        numbers = {component.name: c for c, component in enumerate(components)}
        for c in (numbers[use.component] for use in phase.uses):
            if streamed[t, program.groups_of[c]].any():
                actions.append(
                    Stream(components[c].name, keeps.get(c, ()), int(ring_buffers[t, c]))
                )
        following = [
            numbers[use.component]
            for later in program.problem.phases[interval.phase :]
            for use in later.uses
        ]
        for c in dict.fromkeys(
            (*following, *numbers.values())
        ):  # in the order of next use; unused ones last
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
        held = after
    evicts = tuple(
        Evict(components[c].name, blocks) for c, blocks in _blocks(program, stay, held).items()
    )
    return *slots, Slot("", "end", 0, evicts)


def _at(program: Program, intervals: Sequence[int], t: int) -> list[int]:
    """Used components whose entry in ``intervals`` is ``t``."""
    return [
        c
        for c, (of, at) in enumerate(zip(program.variant_choices, intervals, strict=True))
        if at == t and of.used
    ]


def _blocks(program: Program, first: Counts, last: Counts) -> dict[int, Blocks]:
    """Blocks by component, as plans name them; None: all blocks of the component. Of each group
    those from place ``first`` up to ``last`` of its `keep_order`."""
    found: dict[int, Blocks] = {}
    for c, component in enumerate(program.problem.components):
        groups = [(program.groups[j], first[j], last[j]) for j in program.groups_of[c]]
        named = tuple(
            (component.groups[group.index].name, tuple(sorted(keep_order(group.count)[begin:end])))
            for group, begin, end in groups
            if begin < end
        )
        if named:
            found[c] = (
                None if all(end - begin == group.count for group, begin, end in groups) else named
            )
    return found
