"""Check a plan against every rule that plans must follow.

Shares no code with the solver or the simulator. Each rule has a name, which its `Violation`
carries.

Choices of the plan:

digest           The plan is for this problem.
problem          The numbers of the problem are consistent (`coherence`).
variant, option  Each choice exists, is permitted and is made once. A component with several
                 variants has a choice.
split            The chosen variant of a split component computes on the main device. The blocks of
                 the component on a secondary device are consecutive.
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
baseline         The device is empty after the run. In a session, every run leaves exactly the
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

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, zip_longest

from graphrun.errors import PlanError
from graphrun.limits import LIMITS
from graphrun.model.blocks import Blocks, all_blocks, named
from graphrun.model.choices import apply_choices
from graphrun.model.plan import (
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
    Violation,
    blocks_text,
)
from graphrun.model.problem import (
    ALLOCATION_BYTES,
    ComponentNumbers,
    PhaseNumbers,
    Problem,
    Use,
    ValueNumbers,
    Variant,
)
from graphrun.model.splits import with_splits
from graphrun.reading import shortened
from graphrun.units import round_up
from graphrun.verify.coherence import incoherent


def _choice_violations(problem: Problem, plan: Plan) -> Iterator[Violation]:
    """Return violations of the rules about the whole plan: variant, pin, option, order, split and
    disk."""
    yield from _repeated_choices("variant", [name for name, _ in plan.variants])
    yield from _repeated_choices("option", [stage for stage, _ in plan.options])
    variant_names, components = (
        dict(plan.variants),
        {component.name for component in problem.components},
    )
    for name in variant_names:
        if name not in components:
            yield _plan_violation("variant", f"the problem has no component {name!r}")
    for component in problem.components:
        yield from _variant(problem, component, variant_names.get(component.name))
    for stage, name in plan.options:
        yield from _option(problem, stage, name)
    yield from _order(problem, plan.order)
    yield from _splits(problem, plan)
    used_components = {
        use.component for phase in _chosen_phases(problem, plan) for use in phase.uses
    }
    used_variants = {
        c.name: _chosen_variant(c, variant_names.get(c.name))
        for c in problem.components
        if c.name in used_components
    }
    terms = {
        name: variant.stored_bytes
        for name, variant in used_variants.items()
        if variant and variant.stored_bytes
    }
    if problem.disk_bytes is not None and (total := sum(terms.values())) > problem.disk_bytes:
        yield _plan_violation(
            "disk", f"{_sum(terms)} = {total} bytes on disk > {problem.disk_bytes}"
        )


def _chosen_variant(component: ComponentNumbers, name: str | None) -> Variant | None:
    """Return the variant called ``name``, or None if there is no such variant.

    If ``name`` is None, return the component's only variant.
    """
    if name is None:
        return component.variants[0] if len(component.variants) == 1 else None
    return next((variant for variant in component.variants if variant.name == name), None)


def _chosen_phases(problem: Problem, plan: Plan) -> tuple[PhaseNumbers, ...]:
    """Return the phases of every stage with ``plan``'s options, in no particular order.

    Their bytes and seconds are those of the problem, without the effects of variants.
    """
    options = {(option.stage, option.name): option for option in problem.options}
    selection = [options[choice] for choice in plan.options if choice in options]
    stages = {option.stage for option in selection}
    return (
        *(phase for phase in problem.phases if phase.stage not in stages),
        *(p for option in selection for p in option.phases),
    )


def _variant(
    problem: Problem, component: ComponentNumbers, name: str | None
) -> Iterator[Violation]:
    variant = _chosen_variant(component, name)
    if variant is None:
        names = ", ".join(variant.name for variant in component.variants)
        yield _plan_violation(
            "variant",
            f"{component.name}: expected one of the variants {names}; found {name or 'none'}",
        )
        return
    if variant.needs and variant.needs not in problem.allow:
        yield _plan_violation(
            "variant",
            f"{component.name} {variant.name} changes the output, and {variant.needs} is not "
            "allowed",
        )
    if variant.backing_store != "pinned" and "pin" in problem.demanded(component.name):
        yield _plan_violation(
            "pin",
            f"the backing store of {component.name} is {variant.backing_store}, but a directive "
            "demands pinned",
        )


def _option(problem: Problem, stage: str, name: str) -> Iterator[Violation]:
    matches = [option for option in problem.options if (option.stage, option.name) == (stage, name)]
    if not matches:
        yield _plan_violation("option", f"the problem has no {name!r} for stage {stage!r}")
    elif matches[0].needs and matches[0].needs not in problem.allow:
        yield _plan_violation(
            "option", f"{name} of {stage} changes the output, and {matches[0].needs} is not allowed"
        )


def _order(problem: Problem, order: Sequence[str]) -> Iterator[Violation]:
    stages = list(dict.fromkeys(phase.stage for phase in problem.phases))
    if not order or list(order) == stages:
        return
    if problem.precedence is None:
        yield _plan_violation(
            "order", f"the order of stages is fixed, {' '.join(stages)}; found {' '.join(order)}"
        )
    elif sorted(order) != sorted(stages):
        yield _plan_violation(
            "order", f"expected each of {' '.join(stages)} once; found {' '.join(order)}"
        )
    else:
        for predecessor, successor in problem.precedence:
            if list(order).index(predecessor) > list(order).index(successor):
                yield _plan_violation(
                    "order", f"{successor} runs before {predecessor}, which it depends on"
                )


def _splits(problem: Problem, plan: Plan) -> Iterator[Violation]:
    try:
        split = with_splits(problem, plan.splits)
    except PlanError as error:
        yield _plan_violation("split", str(error))
        return
    variant_names = dict(plan.variants)
    for name, secondary, _ in plan.splits:
        if _chosen_variant(split.component(name), variant_names.get(name)) is None:
            yield _plan_violation(
                "split",
                f"{name} with the variant {variant_names.get(name)} cannot be split over "
                f"device{secondary}",
            )


def _repeated_choices(rule: str, names: Sequence[str]) -> Iterator[Violation]:
    for name, count in Counter(names).items():
        if count > 1:
            yield _plan_violation(rule, f"{name} is chosen {count} times")


def _sum(terms: dict[str, int]) -> str:
    return " + ".join(f"{nbytes} {name}" for name, nbytes in terms.items())


def _plan_violation(rule: str, detail: str) -> Violation:
    return Violation(rule, -1, -1, detail)


class _HostRules:
    """Rules about backing stores, values and RAM.

    Tracks the state of the host, starting before the run. ``applied`` is ``problem`` with the
    choices of ``plan`` applied.
    """

    def __init__(self, problem: Problem, applied: Problem, plan: Plan) -> None:
        self.applied, self.variants = applied, {c.name: c.variants[0] for c in applied.components}
        self.values = {value.name: value for value in applied.values}
        # unused components take no RAM
        self.used_components = {use.component for phase in applied.phases for use in phase.uses}
        self.available_stores = {
            name
            for name, v in self.variants.items()
            if v.backing_store == "disk" or v.read_seconds == ()
        }
        # on disk, in RAM before the run, or already read
        self.stores_not_to_read = set(self.available_stores)
        # value -> phase in whose load slot the value must be restored
        self.spilled_values: dict[str, int] = {}
        self.restored_values: set[str] = set()  # in this slot
        self.spill_gaps = {
            value.name: dict(_spill_gaps(value, applied.phases)) for value in applied.values
        }
        self.numbers = {phase.name: number for number, phase in enumerate(applied.phases)}
        # phases with their activation in the dry run; in `applied` it depends on the variants
        dry_run_phases = {phase.name: phase for phase in _chosen_phases(problem, plan)}
        self.on_cpu = {
            phase.name: dry_run_phases[phase.name]
            for phase in applied.phases
            if phase.uses and not self._on_device(phase)
        }
        self.previous = [0, 0]  # RAM and page-locked bytes of the previous slot

    def spilled_bytes(self, slot: Slot) -> int:
        """Return the bytes of values that stay spilled throughout ``slot``. Call before
        `actions`."""
        restored_values = {action.value for action in slot.actions if isinstance(action, Restore)}
        return sum(
            self.values[name].nbytes for name in self.spilled_values if name not in restored_values
        )

    def actions(self, index: int, slot: Slot, is_further_run: bool) -> Iterator[Violation]:
        """Check the slot's host actions, and apply them to the state of the host."""
        for number, action in enumerate(slot.actions):
            fault = None
            if isinstance(action, Drop):
                fault = self._drop(action.component)
            elif isinstance(action, Read):
                fault = self._read(action.component, slot, is_further_run)
            elif isinstance(action, Spill | Restore):
                fault = self._spill_or_restore(action, slot)
            if fault:
                yield Violation(fault[0], index, number, fault[1])
        for name, restore_phase in self.spilled_values.items():
            if slot.part == "load" and restore_phase == self.numbers[slot.phase]:
                yield Violation(
                    "restore",
                    index,
                    -1,
                    f"{name} is still on the host, but {slot.phase} consumes it",
                )

    def backing_stores(
        self, index: int, copies: Mapping[str, int], phase: PhaseNumbers | None
    ) -> Iterator[Violation]:
        """Check that every backing store needed in the slot is available.

        ``copies``: component -> first action that copies its blocks. ``phase``: its calls on the
        CPU need backing stores in RAM; None if the slot computes nothing.
        """
        cpu_components = (
            [use.component for use in phase.uses if self.variants[use.component].device == "cpu"]
            if phase
            else []
        )
        for name, number in (*copies.items(), *((name, -1) for name in cpu_components)):
            variant = self.variants[name]
            if name in self.available_stores and (
                variant.backing_store != "disk" or name not in cpu_components
            ):
                continue
            state_after_read = "on disk" if variant.backing_store == "disk" else "dropped already"
            state = state_after_read if name in self.stores_not_to_read else "not read yet"
            yield Violation(
                "host-missing",
                index,
                number,
                f"the backing store of {name} is needed, but it is {state}",
            )

    def budgets(self, index: int, slot: Slot) -> Iterator[Violation]:
        """Check the limits of RAM and page-locked RAM in slots where the use rises.

        Call last for a slot.
        """
        reading = [
            action.component
            for action in slot.actions
            if isinstance(action, Read) and action.component in self.available_stores
        ]
        terms = {
            name: self.variants[name].host_bytes
            for name in self.variants
            if name in self.available_stores & self.used_components
        }
        pinned_terms = {
            name: terms[name] for name in terms if self.variants[name].backing_store != "pageable"
        }
        terms |= {
            f"{name} (transient)": n
            for name in reading
            if (n := self.variants[name].transient_bytes)
        }
        terms |= {
            name: value.nbytes
            for name, value in self.values.items()
            if name in self.restored_values or name in self.spilled_values
        }
        if (phase := self.on_cpu.get(slot.phase)) and slot.part != "load":
            terms["activation"] = _activation(phase, slot)
        pinned = self.applied.pinned_bytes
        for position, (rule, bytes_by_name, limit) in enumerate(
            (("ram", terms, self.applied.ram_bytes), ("pinned", pinned_terms, pinned))
        ):
            total = sum(bytes_by_name.values())
            if limit is not None and total > max(limit, self.previous[position]):
                kind = "on the host" if rule == "ram" else "page-locked"
                yield Violation(
                    rule, index, -1, f"{_sum(bytes_by_name)} = {total} bytes {kind} > {limit}"
                )
            self.previous[position] = total
        self.restored_values = set()

    def _drop(self, name: str) -> tuple[str, str] | None:
        if name not in self.variants:
            return "unknown", f"no component {name!r}"
        if self.applied.runs > 1:
            return "drop", f"the next run of the session needs the backing store of {name}"
        if name not in self.available_stores:
            return "drop", f"the backing store of {name} is not in RAM"
        self.available_stores.discard(name)
        return None

    def _read(self, name: str, slot: Slot, is_further_run: bool) -> tuple[str, str] | None:
        if name not in self.variants:
            return "unknown", f"no component {name!r}"
        if is_further_run or slot.part == "end":
            return "read", f"{name} is read in a further run, or in the end slot of the first run"
        if name in self.stores_not_to_read:
            reason = (
                "has its backing store on disk"
                if self.variants[name].backing_store == "disk"
                else "was read before"
            )
            return "read", f"{name} {reason}"
        for names in (self.stores_not_to_read, self.available_stores, self.used_components):
            names.add(name)
        return None

    def _spill_or_restore(self, action: Spill | Restore, slot: Slot) -> tuple[str, str] | None:
        name, verb = action.value, "spill" if isinstance(action, Spill) else "restore"
        if name not in self.values:
            return "unknown", f"no value {name!r}"
        if self.applied.hardware.unified:
            return verb, f"{name} cannot leave the device, which shares its memory with the host"
        if slot.part != "load":
            return (
                verb,
                f"{name} is moved in a {slot.part} slot; values are moved in load slots only",
            )
        phase_number = self.numbers[slot.phase]
        if isinstance(action, Restore):
            if self.spilled_values.get(name) != phase_number:
                return verb, f"{name} is not to be restored in this slot"
            del self.spilled_values[name]
            self.restored_values.add(name)
            return None
        if name in self.spilled_values or phase_number not in self.spill_gaps[name]:
            return verb, f"no gap between consumers of {name} begins at {slot.phase}"
        self.spilled_values[name] = self.spill_gaps[name][phase_number]
        return None

    def _on_device(self, phase: PhaseNumbers) -> bool:
        return any(self.variants[use.component].device != "cpu" for use in phase.uses)


def _spill_gaps(value: ValueNumbers, phases: tuple[PhaseNumbers, ...]) -> Iterator[tuple[int, int]]:
    """Return (phase to spill, phase to restore) for each gap in which ``value`` is live but
    unused."""
    first = None
    for number in range(max(0, value.first_phase), min(value.last_phase + 1, len(phases))):
        unused = phases[number].stage not in (*value.consumers, value.producer)
        if not unused and first is not None:
            if phases[first].uses and phases[number].uses:
                yield first, number
            first = None
        elif unused and first is None:
            first = number


# Types of actions, in the order that a slot must follow.
KINDS = (Drop, Evict, Spill, Restore, Read, Stream, Load, Run)


def check(problem: Problem, plan: Plan) -> tuple[Violation, ...]:
    """Return the violations of the rules by ``plan``, in slot order; empty if the plan may be run.

    Returns at most `LIMITS.problems` violations. The slots of a session's further run
    (`Plan.further_slots`) are numbered after the slots of the first run. Invalid choices hide all
    other violations. So does an invalid structure, or unknown blocks in ``finds`` or ``leaves``.
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
    if wrong := [_plan_violation("problem", text) for text in incoherent(problem)]:
        yield from wrong
        return
    choices = list(_choice_violations(problem, plan))
    yield from choices
    if any(
        violation.rule in ("variant", "pin", "split", "option", "order") for violation in choices
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
    host = _HostRules(problem, applied, plan)
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
    """Return the blocks of every component."""
    state = {component.name: named(component, ()) for component in applied.components}
    for name, names in blocks_by_component:
        state[name] |= named(applied.component(name), names)
    return state


def _unknown_state(applied: Problem, plan: Plan) -> Iterator[Violation]:
    components = {component.name: component for component in applied.components}
    for name, blocks in (*plan.finds, *plan.leaves):
        if name not in components:
            yield _plan_violation("unknown", f"no component {name!r}")
        elif unknown := _unknown_blocks(components[name], blocks):
            yield _plan_violation("unknown", unknown)
        elif components[name].variants[0].device == "cpu":
            yield _plan_violation("cpu", f"{name} computes on the CPU")


def _leaves_violations(
    applied: Problem,
    planned_end_blocks: Mapping[str, Blocks],
    resident_blocks: Mapping[str, Blocks],
    slot: int,
) -> Iterator[Violation]:
    """Check that the run that ends with ``slot`` leaves the planned blocks on the device.

    A plan of one run leaves none.
    """
    if applied.runs == 1:
        planned_end_blocks = _state(applied, ())
    for name, blocks in resident_blocks.items():
        if difference := blocks ^ planned_end_blocks[name]:
            description = (
                "on the device after the end"
                if applied.runs == 1
                else "on the device at the end but not in `leaves`, or only in `leaves`"
            )
            yield Violation("baseline", slot, -1, f"{description}: {_show(difference)}")


def _run(
    applied: Problem,
    slots: tuple[Slot, ...],
    start: int,
    resident: dict[str, Blocks],
    host: _HostRules,
) -> Generator[Violation, None, dict[str, Blocks]]:
    """Check one run, whose first slot has number ``start``.

    Returns the blocks on the device after the run, per component.
    """
    phases = {phase.name: (index, phase) for index, phase in enumerate(applied.phases)}
    # groups that earlier slots used
    used_groups: dict[str, set[int]] = {component.name: set() for component in applied.components}
    for index, slot in enumerate(slots, start):
        number, phase = phases.get(slot.phase, (-1, None))
        computing = phase if slot.part in ("first", "steady") else None
        rules = _SlotRules(applied, index, slot, resident)
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


class _SlotRules:
    """Rules about one slot.

    ``resident``: blocks on the device when the slot begins. `actions` removes the evicted blocks.
    """

    def __init__(
        self, problem: Problem, index: int, slot: Slot, resident: dict[str, Blocks]
    ) -> None:
        self.problem, self.index, self.slot = problem, index, slot
        self.components = {component.name: component for component in problem.components}
        self.resident, self.loaded_blocks = dict(resident), _state(problem, ())
        self.streams: dict[str, tuple[int, Stream]] = {}
        # component -> first action that copies its blocks to the device
        self.copies: dict[str, int] = {}

    def violation(self, rule: str, action: int, detail: str) -> Violation:
        return Violation(rule, self.index, action, detail)

    def blocks_after(self) -> dict[str, Blocks]:
        return {name: blocks | self.loaded_blocks[name] for name, blocks in self.resident.items()}

    def actions(self) -> Iterator[Violation]:
        """Check each action, and the order of actions."""
        runs = [
            number for number, action in enumerate(self.slot.actions) if isinstance(action, Run)
        ]
        computes = self.slot.part in ("first", "steady")
        if len(runs) != computes:
            yield self.violation(
                "order",
                -1,
                f"a {self.slot.part} slot must have {int(computes)} run actions; found {len(runs)}",
            )
        elif runs and runs[0] != len(self.slot.actions) - 1:
            yield self.violation("order", runs[0], "run must be the last action of its slot")
        latest = 0
        for number, action in enumerate(self.slot.actions):
            kind = KINDS.index(type(action))
            if kind < latest:
                names = [action_type.__name__.lower() for action_type in KINDS]
                yield self.violation(
                    "order",
                    number,
                    f"{names[kind]} after {names[latest]}; the order must be {', '.join(names)}",
                )
            latest = max(latest, kind)
            if isinstance(action, (Load, Evict, Stream)):
                yield from self.action(number, action)

    def action(self, number: int, action: Load | Evict | Stream) -> Iterator[Violation]:
        name = action.component
        component = self.components.get(name)
        if component is None:
            yield self.violation("unknown", number, f"no component {name!r}")
            return
        blocks = action.keep if isinstance(action, Stream) else action.blocks
        if unknown := _unknown_blocks(component, blocks):
            yield self.violation("unknown", number, unknown)
            return
        block_set = named(component, blocks)
        if component.variants[0].device == "cpu":
            yield self.violation("cpu", number, f"{name} computes on the CPU")
        elif isinstance(action, Load):
            yield from self.load(number, action, component, block_set)
        elif isinstance(action, Evict):
            if absent := block_set - self.resident[name]:
                yield self.violation("evict-absent", number, f"not on the device: {_show(absent)}")
            if not component.variants[0].movable and (
                self.slot.part != "end" or self.problem.runs > 1
            ):
                period = "until the end" if self.problem.runs == 1 else "in all runs"
                yield self.violation(
                    "immovable", number, f"{name} must stay on the device {period}"
                )
            self.resident[name] -= block_set
        elif name in self.streams or self.slot.part not in ("first", "steady"):
            yield self.violation(
                "stream", number, f"{name} may be streamed once per slot, in first and steady slots"
            )
        else:
            self.streams[name] = (number, action)

    def load(
        self, number: int, action: Load, component: ComponentNumbers, block_set: Blocks
    ) -> Iterator[Violation]:
        name = component.name
        if present := block_set & (self.resident[name] | self.loaded_blocks[name]):
            yield self.violation("load-present", number, f"on the device already: {_show(present)}")
        if action.backing_store != component.variants[0].backing_store:
            store = component.variants[0].backing_store
            yield self.violation(
                "backing-store",
                number,
                f"the backing store of {name} is {store}, not {action.backing_store}",
            )
        if self.slot.part == "end":
            yield self.violation("order", number, "the end slot must not load")
        self.loaded_blocks[name] |= block_set
        self.copies.setdefault(name, number)

    def required_blocks(self, phase: PhaseNumbers | None) -> Iterator[Violation]:
        """Check that all blocks that the slot's calls need are available.

        ``phase`` is None if the slot computes nothing.
        """
        used_groups = {use.component: self.groups(use) for use in phase.uses} if phase else {}
        for name, (number, stream) in self.streams.items():
            component = self.problem.component(name)
            if not used_groups.get(name):
                yield self.violation("stream", number, f"the slot does not use {name}")
            device_blocks = self.resident[name] | self.loaded_blocks[name]
            if odd := named(component, stream.keep) ^ device_blocks:
                yield self.violation(
                    "stream",
                    number,
                    f"keep and the blocks on the device differ in {_show(odd)}",
                )
        for name, groups in used_groups.items():
            component = self.problem.component(name)
            if component.variants[0].device == "cpu":
                continue
            needed_blocks = all_blocks(component, groups)
            if self.slot.part == "steady" and groups and self.loaded_blocks[name]:
                yield self.violation(
                    "steady-load",
                    -1,
                    f"loaded in a steady slot that uses it: {_show(self.loaded_blocks[name])}",
                )
            yield from self.streaming(component, needed_blocks - self.resident[name])

    def streaming(self, component: ComponentNumbers, absent: Blocks) -> Iterator[Violation]:
        """Check that the ``absent`` blocks are loaded or can be streamed.

        The slot's calls need these blocks, and they are not resident when the slot starts.
        """
        variant, name = component.variants[0], component.name
        streamable = {
            k
            for k, group in enumerate(component.groups)
            if group.streamable and variant.streamable and variant.movable
        }
        if fixed := absent - absent.in_groups(streamable):
            yield self.violation(
                "not-streamable",
                -1,
                f"must be on the device when the slot starts: {_show(fixed)}",
            )
        streamed = (absent - self.loaded_blocks[name]).in_groups(streamable)
        if not streamed:
            return
        if name not in self.streams:
            yield self.violation(
                "missing",
                -1,
                f"needed, but neither resident, loaded nor streamed: {_show(streamed)}",
            )
            return
        number, stream = self.streams[name]
        self.copies.setdefault(name, number)
        minimum_bytes = max(variant.block_bytes[k] for k, _ in streamed)
        if stream.ring_buffer_bytes < minimum_bytes:
            yield self.violation(
                "ring_buffer",
                number,
                f"{len(streamed)} blocks are streamed through a ring buffer of "
                f"{stream.ring_buffer_bytes} bytes; it needs {minimum_bytes}",
            )

    def groups(self, use: Use) -> set[int]:
        """Return the numbers of the groups whose blocks the slot runs."""
        return {k for k, calls in enumerate(use.group_calls_in(self.slot.part)) if calls}

    def directives(self, phase: PhaseNumbers, groups: dict[str, set[int]]) -> Iterator[Violation]:
        """Check that the slot follows the directives.

        ``groups``: the groups used so far, per component. The groups that this slot uses are added.
        """
        uses = {use.component: use for use in phase.uses}
        for component in self.problem.components:
            name, demanded = component.name, self.problem.demanded(component.name)
            device_blocks = self.resident[name] | self.loaded_blocks[name]
            if "keep" in demanded:
                used_blocks = all_blocks(component, groups[name])
                if absent := used_blocks - self.resident[name]:
                    yield self.violation(
                        "keep",
                        -1,
                        f"kept from its first use on, but not on the device: {_show(absent)}",
                    )
            for rule in sorted(demanded & {"keep", "whole"})[:1]:
                if name in self.streams:
                    yield self.violation(
                        rule,
                        self.streams[name][0],
                        f"{name} is streamed, which the directive {rule} forbids",
                    )
                if name in uses and component.variants[0].device == "cpu":
                    yield self.violation(
                        rule, -1, f"{name} computes on the CPU, which the directive {rule} forbids"
                    )
            staying = device_blocks.in_groups(
                {k for k, group in enumerate(component.groups) if group.streamable}
            )
            if "exclude" in demanded and staying:
                yield self.violation(
                    "exclude", -1, f"on the device, though excluded: {_show(staying)}"
                )
            misplaced_blocks = (
                (self.resident[name] if self.slot.part == "load" else named(component, ()))
                if name in uses
                else device_blocks
            )
            if "drop" in demanded and misplaced_blocks:
                yield self.violation(
                    "drop",
                    -1,
                    f"on the device outside its own phases: {_show(misplaced_blocks)}",
                )
            if name in uses:
                groups[name] |= self.groups(uses[name])

    def weight_bytes(self) -> list[int]:
        """Return the bytes of weights on each device."""
        weights = [0] * (1 + len(self.problem.secondaries))
        for component in self.problem.components:
            variant = component.variants[0]
            blocks = self.resident[component.name] | self.loaded_blocks[component.name]
            for group, count, nbytes in zip(
                component.groups, blocks.counts, variant.block_bytes, strict=True
            ):
                device = variant.secondary or group.secondary
                weights[device] += count * round_up(nbytes, ALLOCATION_BYTES)
        return weights

    def vram(
        self, number: int, phase: PhaseNumbers | None, spilled_bytes: int
    ) -> Iterator[Violation]:
        weights, *secondary_weights = self.weight_bytes()
        ring_buffers = sum(
            round_up(stream.ring_buffer_bytes, ALLOCATION_BYTES)
            for _, stream in self.streams.values()
        )
        values = (
            self.problem.value_bytes(number) - spilled_bytes + phase.input_bytes if phase else 0
        )
        activation = _activation(phase, self.slot) if phase else 0
        total, limit = weights + ring_buffers + activation + values, self.problem.effective_bytes
        if total > limit:
            terms = (
                f"{weights} weights + {ring_buffers} ring buffers + {activation} activation + "
                f"{values} values and inputs"
            )
            yield self.violation("vram", -1, f"{terms} = {total} > {limit} bytes")
        for secondary, (nbytes, secondary_device) in enumerate(
            zip(secondary_weights, self.problem.secondaries, strict=True), 1
        ):
            compute_bytes = (
                phase.secondary_bytes[secondary - 1][self.slot.part == "steady"]
                if phase and self.slot.part != "load"
                else 0
            )
            if nbytes + compute_bytes > secondary_device.effective_bytes:
                terms = f"{nbytes} weights + {compute_bytes} activation and transfers"
                yield self.violation(
                    "secondary",
                    -1,
                    f"device{secondary}: {terms} = {nbytes + compute_bytes} > "
                    f"{secondary_device.effective_bytes} bytes",
                )


def _activation(phase: PhaseNumbers, slot: Slot) -> int:
    return {"first": phase.first_bytes, "steady": phase.steady_bytes}.get(slot.part, 0)


def _unknown_blocks(component: ComponentNumbers, blocks: BlockNames) -> str:
    """Return which of ``blocks`` do not exist; "" if all do."""
    try:
        named(component, blocks)
    except PlanError as error:
        return str(error)
    return ""


def _show(blocks: Blocks) -> str:
    component = blocks.component
    nbytes = sum(component.variants[0].block_bytes[k] for k, _ in blocks)
    return f"{component.name} {blocks_text(blocks.groups)} ({nbytes} bytes)"
