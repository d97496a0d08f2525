"""Check a plan against every rule that plans must follow. `Violation` has the name of the rule.

This module shares no code with the solver or the simulator.

Choices of the plan:

digest           The plan is for this problem.
problem          The numbers of the problem are consistent (`coherence`).
variant, option  Each choice exists, is permitted and is made once. A component with several
                 variants has a choice.
split            The chosen variant of a split component computes on the main device. The blocks of
                 the component on a secondary device are consecutive.
copy             The component of a copy makes two calls a step, is not split, and computes on the
                 main device. Its backing store is in RAM.
pin              The backing store is pinned if a directive demands it.
order            `Problem.precedence` allows the order of stages. Actions follow the order of
                 `KINDS`. First and steady slots have one run action, other slots have none.
disk             The variants write no more to disk than the limit.

Slots and blocks on the device:

structure        The slots are load, first and steady of every phase in order, then end, with the
                 planned numbers of calls. A session repeats them for its further runs; a plan of
                 one run does not.
unknown          Components, block groups, blocks and values exist.
load-present     No loaded block is already on the device.
backing-store    Each load names the component's backing store.
evict-absent     Every evicted block is on the device.
immovable        A block that cannot be moved is evicted in the end slot only; in a session never.
cpu              No block of a component on the CPU is loaded, evicted or streamed.
missing          Every block that the slot computes with is resident, streamed, or (in a first slot)
                 loaded.
not-streamable   Blocks that cannot be streamed are resident when the slot starts.
steady-load      A steady slot loads no block of a component that it uses.
stream           A slot streams only components that it uses, each once. The field `Stream.keep` is
                 exactly the resident and loaded blocks.
ring_buffer      A ring buffer has room for the largest block that passes through it.
vram             Every slot fits the budget of the device, in bytes of tensors. `verify.solution`
                 adds the rule ``pages``, which counts allocator pages.
secondary        Every slot fits the budget of each secondary device, in bytes of tensors.
baseline         The device is as before the run: empty. In a session, every run leaves exactly the
                 blocks in `Plan.leaves`.

Backing stores and values:

read             A backing store is read from disk once, before the end slot of the first run. It is
                 not read if its kind is disk or if it is in RAM before the run.
host-missing     The backing store of a component that is copied to the device or called on the CPU
                 has been read, in the same slot at the latest, and not dropped.
drop             A backing store is dropped only after it was read, and never in a session.
spill, restore   A value is spilled and restored in load slots, around a gap between its consumers.
ram, pinned      RAM and page-locked RAM are within their limits. Reported in slots where the use
                 rises.

Directives (`problem.Directive`):

keep             From its first use on, the whole component is resident, and it is not streamed.
exclude          None of its streamable blocks is on the device.
whole            It is not streamed, and it computes on the device.
drop             It is on the device in its own phases only, and absent when one begins.

A gap is a sequence of phases in which a value is on the device, but not consumed. The value may be
spilled in the load slot of the gap's first phase, and restored in the load slot of the next phase
that consumes the value. Example: ``encode`` makes a value that ``denoise`` and ``decode`` consume.

    phase             encode/0   encode/1   upscale/0   denoise/0   decode/0
    live at the start                       x           x           x
    consumed                                            x           x
    load slot                               spill       restore
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice, zip_longest

from graphrun.limits import LIMITS
from graphrun.model.blocks import Blocks, named
from graphrun.model.choices import apply_choices
from graphrun.model.plan import BlockNames, Plan, Slot, Violation
from graphrun.model.problem import Problem
from graphrun.reading import shortened
from graphrun.verify.choice_rules import choice_violations, plan_violation
from graphrun.verify.coherence import incoherent
from graphrun.verify.host_rules import HostRules
from graphrun.verify.slot_rules import SlotRules, listing, unknown_blocks


@functools.lru_cache(maxsize=8)
def check(problem: Problem, plan: Plan) -> tuple[Violation, ...]:
    """Return the rules that ``plan`` violates, in slot order; empty if the plan may be run.

    At most `LIMITS.problems` violations. The slots of a session's further run are numbered after
    the first run. Invalid choices, an invalid structure and unknown blocks in ``finds`` or
    ``leaves`` hide all other violations.
    """
    return tuple(
        replace(violation, detail=shortened(violation.detail))
        for violation in islice(_check(problem, plan), LIMITS.problems)
    )


def _check(problem: Problem, plan: Plan) -> Iterator[Violation]:
    if plan.problem != problem.digest:
        yield Violation(
            "digest",
            -1,
            -1,
            f"the plan was made for problem {plan.problem}, this is problem {problem.digest}",
        )
    if wrong := [plan_violation("problem", text) for text in incoherent(problem)]:
        yield from wrong
        return
    choices = list(choice_violations(problem, plan))
    yield from choices
    if any(
        violation.rule in ("variant", "pin", "split", "copy", "option", "order")
        for violation in choices
    ):
        return
    applied = apply_choices(problem, plan)
    wrong = (
        [*_structure(applied, plan.slots, 0)]
        or [*_further_runs(applied, plan)]
        or [*_unknown_state(applied, plan)]
    )
    yield from wrong
    if wrong:
        return
    host = HostRules(problem, applied, plan)
    planned_end_blocks = _state(applied, plan.leaves)
    resident_blocks = yield from _run(applied, plan.slots, 0, _state(applied, plan.finds), host)
    yield from _leaves_violations(applied, planned_end_blocks, resident_blocks, len(plan.slots) - 1)
    if problem.runs > 1:
        resident_blocks = yield from _run(
            applied, plan.further_slots, len(plan.slots), planned_end_blocks, host
        )
        yield from _leaves_violations(
            applied,
            planned_end_blocks,
            resident_blocks,
            len(plan.slots) + len(plan.further_slots) - 1,
        )


def _state(
    applied: Problem, blocks_by_component: Iterable[tuple[str, BlockNames]]
) -> dict[str, Blocks]:
    state = {component.name: named(component, ()) for component in applied.components}
    for name, names in blocks_by_component:
        state[name] |= named(applied.component(name), names)
    return state


def _unknown_state(applied: Problem, plan: Plan) -> Iterator[Violation]:
    components = {component.name: component for component in applied.components}
    for name, blocks in (*plan.finds, *plan.leaves):
        if name not in components:
            yield plan_violation("unknown", f"no component {name!r}")
        elif unknown := unknown_blocks(components[name], blocks):
            yield plan_violation("unknown", unknown)
        elif components[name].variants[0].device == "cpu":
            yield plan_violation("cpu", f"{name} computes on the CPU")


def _leaves_violations(
    applied: Problem,
    planned_end_blocks: Mapping[str, Blocks],
    resident_blocks: Mapping[str, Blocks],
    slot: int,
) -> Iterator[Violation]:
    """Check that the run that ends with ``slot`` leaves the planned blocks."""
    if applied.runs == 1:
        planned_end_blocks = _state(applied, ())
    for name, blocks in resident_blocks.items():
        if difference := blocks ^ planned_end_blocks[name]:
            description = (
                "on the device after the end"
                if applied.runs == 1
                else "on the device at the end but not in `leaves`, or only in `leaves`"
            )
            yield Violation("baseline", slot, -1, f"{description}: {listing(difference)}")


def _run(
    applied: Problem,
    slots: tuple[Slot, ...],
    start: int,
    resident: dict[str, Blocks],
    host: HostRules,
) -> Generator[Violation, None, dict[str, Blocks]]:
    """Check the run that begins with slot ``start``; return the blocks left, per component."""
    phases = {phase.name: (index, phase) for index, phase in enumerate(applied.phases)}
    # groups that earlier slots used
    used_groups: dict[str, set[int]] = {component.name: set() for component in applied.components}
    for index, slot in enumerate(slots, start):
        number, phase = phases.get(slot.phase, (-1, None))
        computing = phase if slot.part in ("first", "steady") else None
        rules = SlotRules(applied, index, slot, resident)
        yield from rules.actions()
        yield from rules.required_blocks(computing)
        if phase:
            yield from rules.directives(phase, used_groups)
        yield from rules.vram(number, phase, host.spilled_bytes(slot))
        yield from host.actions(index, slot, is_further_run=start > 0)
        yield from host.backing_stores(index, rules.copies, computing)
        yield from host.budgets(index, slot)
        resident = rules.blocks_after()
    return resident


def _further_runs(applied: Problem, plan: Plan) -> Iterator[Violation]:
    if (applied.runs > 1) != bool(plan.further_slots):
        verb = "has" if plan.further_slots else "has no"
        yield Violation(
            "structure",
            -1,
            -1,
            f"the problem has {applied.runs} runs, and the plan {verb} slots of further runs",
        )
    elif plan.further_slots:
        yield from _structure(applied, plan.further_slots, len(plan.slots))


def _structure(problem: Problem, slots: tuple[Slot, ...], start: int) -> Iterator[Violation]:
    expected: list[tuple[str, str, int]] = []
    for phase in problem.phases:
        expected += [(phase.name, "load", 0)] if phase.uses else []
        expected += [(phase.name, "first", 1)]
        expected += [(phase.name, "steady", phase.steady_calls)] if phase.steady_calls else []
    expected.append(("", "end", 0))
    actual = [(slot.phase, slot.part, slot.calls) for slot in slots]
    for index, pair in enumerate(zip_longest(expected, actual), start):
        if pair[0] != pair[1]:
            expected_text, actual_text = (
                "nothing" if s is None else f"{s[0] or 'the run'} {s[1]} with {s[2]} calls"
                for s in pair
            )
            yield Violation(
                "structure", index, -1, f"expected {expected_text}, found {actual_text}"
            )
            return
