"""Translates the integers of a solution into a plan: names of blocks, and the order of actions in a slot.

drop, evict | spill, restore | read | stream | load, nearest use first | run
"""

from __future__ import annotations

from collections.abc import Sequence

from graphrun.model.keep_order import keep_order
from graphrun.model.plan import Action, Blocks, Drop, Evict, Load, Plan, Read, Restore, Run, Slot, Spill, Stream
from graphrun.model.problem import Problem
from graphrun.solve.program import Choice, Program


def plan_of(
    program: Program,
    choice: Choice,
    of: Problem | None = None,
    options: Sequence[tuple[str, str]] = (),
    order: Sequence[str] = (),
) -> Plan:
    """The plan for ``choice``. Of each block group, the resident blocks are the first of its `keep_order`.

    ``program`` has one variant per component. ``of``: the original problem, before stage ``options`` and stage ``order`` were
    applied to it.
    """
    of = of or program.problem
    held = [0] * len(program.groups)
    first, held = _run(program, choice, 0, program.run_length, held)
    again, _ = _run(program, choice, program.run_length, len(program.intervals), held) if program.session else ((), held)
    named = {component.name for component in of.components if len(component.variants) > 1}
    names = [component.name for component in program.problem.components]
    variants = tuple(
        (names[variant_choice.component], variant_choice.variant.name)
        for variant_choice in program.variant_choices
        if names[variant_choice.component] in named
    )
    return Plan(of.digest, first, variants, tuple(options), tuple(order), again)


def _run(program: Program, choice: Choice, begin: int, end: int, held: list[int]) -> tuple[tuple[Slot, ...], list[int]]:
    """The slots of intervals ``begin`` to ``end`` and the end slot, and the blocks per group present after it. ``held``: blocks per
    group present before."""
    slots, orders = list[Slot](), tuple(keep_order(group.count) for group in program.groups)
    for t in range(begin, end):
        interval, present, loaded = program.intervals[t], choice.present[t], choice.loaded[t]
        phase = program.problem.phases[interval.phase]
        after = [k + d for k, d in zip(present, loaded, strict=True)]
        evicts = _blocks(program, [order[k:h] for order, k, h in zip(orders, present, held, strict=True)])
        loads = _blocks(program, [order[k:a] for order, k, a in zip(orders, present, after, strict=True)])
        keeps = _blocks(program, [order[:a] for order, a in zip(orders, after, strict=True)])
        actions: list[Action] = [Drop(name) for name in _at(program, choice.drops, t)]
        actions += [Evict(name, blocks) for name, blocks in evicts.items()]
        actions += _spills(program, choice, t)
        actions += [Read(name) for name in _at(program, choice.reads, t)]
        for use in phase.uses if interval.part != "load" else ():
            component = next(c for c, numbers in enumerate(program.problem.components) if numbers.name == use.component)
            if program.streams(choice, t, component):
                actions.append(Stream(use.component, keeps.get(use.component, ()), program.ring_bytes(choice, t, component)))
        backing_stores = {
            program.problem.components[variant_choice.component].name: variant_choice.variant.backing_store
            for variant_choice in program.variant_choices
        }
        actions += [Load(n, loads[n], backing_stores[n]) for n in _by_next_use(program.problem, interval.phase) if n in loads]
        actions += [Run()] if interval.rounds else []
        slots.append(Slot(phase.name, interval.part, interval.rounds, tuple(actions)))
        held = after
    stay = list(choice.present[program.run_length]) if program.session else [0] * len(program.groups)
    evicted = _blocks(program, [order[k:h] for order, k, h in zip(orders, stay, held, strict=True)])
    slots.append(Slot("", "end", 0, tuple(Evict(name, blocks) for name, blocks in evicted.items())))
    return tuple(slots), stay


def _at(program: Program, intervals: Sequence[int], t: int) -> list[str]:
    """Components whose entry in ``intervals`` is ``t``."""
    named = zip(program.variant_choices, intervals, strict=False)
    return [
        program.problem.components[variant_choice.component].name for variant_choice, at in named if at == t and variant_choice.used
    ]


def _spills(program: Program, choice: Choice, t: int) -> list[Action]:
    chosen = [gap for gap, out in zip(program.spill_gaps, choice.spills, strict=False) if out]
    names = [value.name for value in program.problem.values]
    out: list[Action] = [Spill(names[gap.value]) for gap in chosen if gap.out == t]
    return [*out, *(Restore(names[gap.value]) for gap in chosen if gap.back == t)]


def _by_next_use(problem: Problem, phase: int) -> tuple[str, ...]:
    """Names of components in the order of their next use from ``phase`` on; unused ones last."""
    following = (use.component for later in problem.phases[phase:] for use in later.uses)
    return tuple(dict.fromkeys((*following, *(component.name for component in problem.components))))


def _blocks(program: Program, chosen: Sequence[tuple[int, ...]]) -> dict[str, Blocks]:
    """Blocks by component, as plans name them; None: all blocks of the component. ``chosen``: one tuple of block indices per
    group."""
    found: dict[str, Blocks] = {}
    for number, component in enumerate(program.problem.components):
        groups = [(group, indices) for group, indices in zip(program.groups, chosen, strict=True) if group.component == number]
        if not any(indices for _, indices in groups):
            continue
        every = all(len(indices) == group.count for group, indices in groups)
        named = tuple((component.groups[group.index].name, tuple(sorted(indices))) for group, indices in groups if indices)
        found[component.name] = None if every else named
    return found
