"""Validates a plan for a problem: every rule that a plan must follow. Shares no code with the
solver or the simulator.

Rules, by the name that a `Violation` carries. Choices of the plan:

digest           the plan was made for this problem problem          the problem's numbers fit each
other (`coherence`) variant, option  each choice exists, is permitted, and is made once; every
component with several variants has one split            a component is split in a variant that
computes on the device; its blocks on a secondary device are in a row pin              the backing
store is pinned if a directive demands it order            the order of stages is one that
`Problem.precedence` allows; actions are in the order of `KINDS`, with one run in
                 first and steady slots and none in others
disk             the bytes that the chosen variants write to disk are within the limit

Slots and blocks on the device:

structure        the slots are load, first, steady of every phase in order, then end, with the right
numbers of calls; a session,
                 and only a session, has the same slots again for its further runs
unknown          components, block groups, blocks and values exist load-present     no block is
loaded that is on the device already backing-store    loads name the component's backing store
evict-absent     no block is evicted that is not on the device immovable        no block that cannot
be moved is evicted before the end; in a session never cpu              no block of a component that
computes on the CPU is loaded, evicted or streamed missing          every block that the slot's
calls need is resident, loaded by the slot (first only) or streamed not-streamable   blocks that
cannot be streamed are resident when the slot starts steady-load      a steady slot loads no block
of a component that it uses stream           only components that the slot uses are streamed, each
once; ``keep`` is exactly what is resident or loaded ring buffer             a ring buffer has room
for the largest block that passes vram             the device memory of every slot is within the
budget secondary device           the memory of every slot on a secondary device is within its
budget
                 (both in bytes of tensors; `verify.solution` adds the rule ``pages``)
baseline         nothing is on the device at the end; in a session, every run leaves what ``leaves``
says

Backing stores and values:

read             a backing store is read from disk once, before the end slot of the first run, and
not if it is of kind disk or was
                 read before the run
host-missing     the backing store of a component that is copied to the device or called on the CPU
has been read, at the latest in
                 the same slot, and not dropped
drop             a backing store is dropped only if it has been read, and never in a session
spill, restore   a value is spilled and restored in load slots, around a gap between its consumers
ram, pinned      RAM and page-locked RAM are within their limits; reported where the use rises

Directives (`problem.Directive`):

keep             from its first use on, all of the component is resident, and it is not streamed
exclude          no streamable block of it is resident
whole            it is not streamed, and it computes on the device
drop             it is on the device in its own phases only, and absent when one begins

Gaps of a value, in whose load slots it may be spilled and restored:

    phase         encode/0   encode/1   upscale/0   denoise/0   decode/0        value: encode ->
    denoise, decode live                                x           x           x gap
    ^ spill     ^ restore: denoise consumes it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, zip_longest

from graphrun.errors import PlanError
from graphrun.limits import LIMITS
from graphrun.model.choices import apply_choices
from graphrun.model.plan import (
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


def _broken_choices(problem: Problem, plan: Plan) -> Iterator[Violation]:
    """The rules ``variant``, ``pin``, ``option``, ``order`` and ``disk``, which concern the whole
    plan."""
    yield from _twice("variant", [name for name, _ in plan.variants])
    yield from _twice("option", [stage for stage, _ in plan.options])
    named, components = dict(plan.variants), {component.name for component in problem.components}
    for name in named:
        if name not in components:
            yield _broken("variant", f"the problem has no component {name!r}")
    for component in problem.components:
        yield from _variant(problem, component, named.get(component.name))
    for stage, name in plan.options:
        yield from _option(problem, stage, name)
    yield from _order(problem, plan.order)
    yield from _splits(problem, plan)
    used = {use.component for phase in _chosen_phases(problem, plan) for use in phase.uses}
    stored = {
        c.name: _chosen_variant(c, named.get(c.name)) for c in problem.components if c.name in used
    }
    terms = {
        name: variant.stored_bytes
        for name, variant in stored.items()
        if variant and variant.stored_bytes
    }
    if problem.disk_bytes is not None and (total := sum(terms.values())) > problem.disk_bytes:
        yield _broken("disk", f"{_sum(terms)} = {total} bytes on disk > {problem.disk_bytes}")


def _chosen_variant(component: ComponentNumbers, name: str | None) -> Variant | None:
    """The variant called ``name``; without a name, the component's only variant; None if there is
    no such variant."""
    if name is None:
        return component.variants[0] if len(component.variants) == 1 else None
    return next((variant for variant in component.variants if variant.name == name), None)


def _chosen_phases(problem: Problem, plan: Plan) -> tuple[PhaseNumbers, ...]:
    """The phases of every stage with ``plan``'s options, in no particular order, with numbers that
    do not depend on variants."""
    options = {(option.stage, option.name): option for option in problem.options}
    picked = [options[choice] for choice in plan.options if choice in options]
    stages = {option.stage for option in picked}
    return (
        *(phase for phase in problem.phases if phase.stage not in stages),
        *(p for option in picked for p in option.phases),
    )


def _variant(
    problem: Problem, component: ComponentNumbers, name: str | None
) -> Iterator[Violation]:
    variant = _chosen_variant(component, name)
    if variant is None:
        known = ", ".join(variant.name for variant in component.variants)
        yield _broken(
            "variant",
            f"{component.name}: expected one of the variants {known}; found {name or 'none'}",
        )
        return
    if variant.needs and variant.needs not in problem.allow:
        yield _broken(
            "variant",
            f"{component.name} {variant.name} changes the output, and {variant.needs} is not allowed",
        )
    if variant.backing_store != "pinned" and "pin" in problem.demanded(component.name):
        yield _broken(
            "pin",
            f"the backing store of {component.name} is {variant.backing_store}, but a directive demands pinned",
        )


def _option(problem: Problem, stage: str, name: str) -> Iterator[Violation]:
    found = [option for option in problem.options if (option.stage, option.name) == (stage, name)]
    if not found:
        yield _broken("option", f"the problem has no {name!r} for stage {stage!r}")
    elif found[0].needs and found[0].needs not in problem.allow:
        yield _broken(
            "option", f"{name} of {stage} changes the output, and {found[0].needs} is not allowed"
        )


def _order(problem: Problem, order: Sequence[str]) -> Iterator[Violation]:
    stages = list(dict.fromkeys(phase.stage for phase in problem.phases))
    if not order or list(order) == stages:
        return
    if problem.precedence is None:
        yield _broken(
            "order", f"the order of stages is fixed, {' '.join(stages)}; found {' '.join(order)}"
        )
    elif sorted(order) != sorted(stages):
        yield _broken("order", f"expected each of {' '.join(stages)} once; found {' '.join(order)}")
    else:
        for earlier, later in problem.precedence:
            if list(order).index(earlier) > list(order).index(later):
                yield _broken("order", f"{later} runs before {earlier}, which it depends on")


def _splits(problem: Problem, plan: Plan) -> Iterator[Violation]:
    try:
        split = with_splits(problem, plan.splits)
    except PlanError as error:
        yield _broken("split", str(error))
        return
    named = dict(plan.variants)
    for name, secondary, _ in plan.splits:
        if _chosen_variant(split.component(name), named.get(name)) is None:
            yield _broken(
                "split",
                f"{name} as {named.get(name)} is not one that may be split over device{secondary}",
            )


def _twice(rule: str, names: Sequence[str]) -> Iterator[Violation]:
    for name, count in Counter(names).items():
        if count > 1:
            yield _broken(rule, f"{name} is chosen {count} times")


def _sum(terms: dict[str, int]) -> str:
    return " + ".join(f"{nbytes} {name}" for name, nbytes in terms.items())


def _broken(rule: str, detail: str) -> Violation:
    return Violation(rule, -1, -1, detail)


class _HostRules:
    """Rules of backing stores, values and RAM. Holds the host's state, at first that before the
    run.

    ``applied`` is ``problem`` with ``plan``'s choices applied.
    """

    def __init__(self, problem: Problem, applied: Problem, plan: Plan) -> None:
        self.applied, self.variants = applied, {c.name: c.variants[0] for c in applied.components}
        self.values = {value.name: value for value in applied.values}
        # an unused component takes no RAM
        self.used = {use.component for phase in applied.phases for use in phase.uses}
        self.held = {
            name
            for name, v in self.variants.items()
            if v.backing_store == "disk" or v.read_seconds == ()
        }
        self.was_read = set(self.held)
        self.spilled: dict[str, int] = {}  # value -> phase in whose load slot it must be restored
        self.restored: set[str] = set()  # values that this slot restores
        self.spill_gaps = {
            value.name: dict(_spill_gaps(value, applied.phases)) for value in applied.values
        }
        self.numbers = {phase.name: number for number, phase in enumerate(applied.phases)}
        traced = {phase.name: phase for phase in _chosen_phases(problem, plan)}
        self.on_cpu = {
            phase.name: traced[phase.name]
            for phase in applied.phases
            if phase.uses and not self._on_device(phase)
        }
        self.previous = [0, 0]  # RAM and page-locked bytes of the previous slot

    def spilled_bytes(self, slot: Slot) -> int:
        """Bytes of values that are on the host only throughout ``slot``. To be called before
        `actions`."""
        restored = {action.value for action in slot.actions if isinstance(action, Restore)}
        return sum(self.values[name].nbytes for name in self.spilled if name not in restored)

    def actions(self, index: int, slot: Slot, again: bool) -> Iterator[Violation]:
        """Rules of the slot's host actions; applies them to the host's state."""
        for number, action in enumerate(slot.actions):
            broken = None
            if isinstance(action, Drop):
                broken = self._drop(action.component)
            elif isinstance(action, Read):
                broken = self._read(action.component, slot, again)
            elif isinstance(action, Spill | Restore):
                broken = self._spill_or_restore(action, slot)
            if broken:
                yield Violation(broken[0], index, number, broken[1])
        for name, back in self.spilled.items():
            if slot.part == "load" and back == self.numbers[slot.phase]:
                yield Violation(
                    "restore",
                    index,
                    -1,
                    f"{name} is still on the host, but {slot.phase} consumes it",
                )

    def backing_stores(
        self, index: int, copies: Mapping[str, int], phase: PhaseNumbers | None
    ) -> Iterator[Violation]:
        """Whether backing stores are available for all ``copies`` (component -> action) and for
        calls on the CPU in ``phase``."""
        called = (
            [use.component for use in phase.uses if self.variants[use.component].device == "cpu"]
            if phase
            else []
        )
        for name, number in (*copies.items(), *((name, -1) for name in called)):
            variant = self.variants[name]
            if name in self.held and (variant.backing_store != "disk" or name not in called):
                continue
            read = "on disk" if variant.backing_store == "disk" else "dropped already"
            why = read if name in self.was_read else "not read yet"
            yield Violation(
                "host-missing",
                index,
                number,
                f"the backing store of {name} is needed, but it is {why}",
            )

    def budgets(self, index: int, slot: Slot) -> Iterator[Violation]:
        """Limits of RAM and page-locked RAM, reported only in slots where the use rises. To be
        called last for a slot."""
        reading = [
            action.component
            for action in slot.actions
            if isinstance(action, Read) and action.component in self.held
        ]
        terms = {
            name: self.variants[name].host_bytes
            for name in self.variants
            if name in self.held & self.used
        }
        locked = {
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
            if name in self.restored or name in self.spilled
        }
        if (phase := self.on_cpu.get(slot.phase)) and slot.part != "load":
            terms["activation"] = _activation(phase, slot)
        pinned = self.applied.pinned_bytes
        for which, (rule, found, limit) in enumerate(
            (("ram", terms, self.applied.ram_bytes), ("pinned", locked, pinned))
        ):
            total = sum(found.values())
            if limit is not None and total > max(limit, self.previous[which]):
                kind = "on the host" if rule == "ram" else "page-locked"
                yield Violation(rule, index, -1, f"{_sum(found)} = {total} bytes {kind} > {limit}")
            self.previous[which] = total
        self.restored = set()

    def _drop(self, name: str) -> tuple[str, str] | None:
        if name not in self.variants:
            return "unknown", f"no component {name!r}"
        if self.applied.runs > 1:
            return "drop", f"the next run of the session needs the backing store of {name}"
        if name not in self.held:
            return "drop", f"the backing store of {name} is not in RAM"
        self.held.discard(name)
        return None

    def _read(self, name: str, slot: Slot, again: bool) -> tuple[str, str] | None:
        if name not in self.variants:
            return "unknown", f"no component {name!r}"
        if again or slot.part == "end":
            return "read", f"{name} is read after the first run, or in its end slot"
        if name in self.was_read:
            why = (
                "has its backing store on disk"
                if self.variants[name].backing_store == "disk"
                else "was read before"
            )
            return "read", f"{name} {why}"
        for names in (self.was_read, self.held, self.used):
            names.add(name)
        return None

    def _spill_or_restore(self, action: Spill | Restore, slot: Slot) -> tuple[str, str] | None:
        name, verb = action.value, "spill" if isinstance(action, Spill) else "restore"
        if name not in self.values:
            return "unknown", f"no value {name!r}"
        if slot.part != "load":
            return (
                verb,
                f"{name} is moved in a {slot.part} slot; values are moved in load slots only",
            )
        here = self.numbers[slot.phase]
        if isinstance(action, Restore):
            if self.spilled.get(name) != here:
                return verb, f"{name} is not to be restored in this slot"
            del self.spilled[name]
            self.restored.add(name)
            return None
        if name in self.spilled or here not in self.spill_gaps[name]:
            return verb, f"no gap between consumers of {name} begins at {slot.phase}"
        self.spilled[name] = self.spill_gaps[name][here]
        return None

    def _on_device(self, phase: PhaseNumbers) -> bool:
        return any(self.variants[use.component].device != "cpu" for use in phase.uses)


def _spill_gaps(value: ValueNumbers, phases: tuple[PhaseNumbers, ...]) -> Iterator[tuple[int, int]]:
    """(phase to spill, phase to restore) for each run of phases in which ``value`` is live and not
    used."""
    first = None
    for number in range(max(0, value.first_phase), min(value.last_phase + 1, len(phases))):
        unused = phases[number].stage not in (*value.consumers, value.producer)
        if not unused and first is not None:
            if phases[first].uses and phases[number].uses:
                yield first, number
            first = None
        elif unused and first is None:
            first = number


BlockSet = set[tuple[int, int]]  # (block group, block within it)
# Types of actions, in the order in which a slot must have them.
KINDS = (Drop, Evict, Spill, Restore, Read, Stream, Load, Run)


def check(problem: Problem, plan: Plan) -> tuple[Violation, ...]:
    """Violations of the rules by ``plan``, in slot order; empty if the plan may be run. At most as
    many as the limit ``problems``.

    The slots of a session's further run (`Plan.again`) are numbered after those of the first run.
    If choices are invalid, only they are reported; if the structure, or what the plan finds and
    leaves, is, only that.
    """
    return tuple(
        replace(of, detail=shortened(of.detail))
        for of in islice(_check(problem, plan), LIMITS.problems)
    )


def _check(problem: Problem, plan: Plan) -> Iterator[Violation]:
    if plan.problem != problem.digest:
        yield Violation(
            "digest",
            -1,
            -1,
            f"the plan was made for problem {plan.problem}, this is problem {problem.digest}",
        )
    if wrong := [_broken("problem", text) for text in incoherent(problem)]:
        yield from wrong
        return
    choices = list(_broken_choices(problem, plan))
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
    leaves = _state(applied, plan.leaves)
    after = yield from _run(applied, plan.slots, 0, _state(applied, plan.finds), host)
    yield from _left(applied, leaves, after, len(plan.slots) - 1)
    if problem.runs > 1:
        after = yield from _run(applied, plan.again, len(plan.slots), leaves, host)
        yield from _left(applied, leaves, after, len(plan.slots) + len(plan.again) - 1)


def _state(applied: Problem, named: Iterable[tuple[str, Blocks]]) -> dict[str, BlockSet]:
    """The blocks of ``named``, per component."""
    found: dict[str, BlockSet] = {component.name: set() for component in applied.components}
    for name, blocks in named:
        found[name] |= _named(applied.component(name), blocks)
    return found


def _unknown_state(applied: Problem, plan: Plan) -> Iterator[Violation]:
    components = {component.name: component for component in applied.components}
    for name, blocks in (*plan.finds, *plan.leaves):
        if name not in components:
            yield _broken("unknown", f"no component {name!r}")
        elif unknown := list(_unknown(components[name], blocks)):
            yield _broken("unknown", f"{name} has no {', '.join(unknown)}")
        elif components[name].variants[0].device == "cpu":
            yield _broken("cpu", f"{name} computes on the CPU")


def _left(
    applied: Problem, leaves: Mapping[str, BlockSet], after: Mapping[str, BlockSet], slot: int
) -> Iterator[Violation]:
    """Whether the run that ends with ``slot`` leaves what the plan says; a plan of one run leaves
    nothing."""
    if applied.runs == 1:
        leaves = {name: set() for name in leaves}
    for name, held in after.items():
        if odd := held ^ leaves[name]:
            what = (
                "on the device after the end"
                if applied.runs == 1
                else "left on the device and in leaves, but not in both"
            )
            yield Violation("baseline", slot, -1, f"{what}: {_show(applied.component(name), odd)}")


def _run(
    applied: Problem,
    slots: tuple[Slot, ...],
    start: int,
    resident: dict[str, BlockSet],
    host: _HostRules,
) -> Generator[Violation, None, dict[str, BlockSet]]:
    """Rules of one run whose first slot has number ``start``. Returns the blocks on the device
    after it, per component."""
    phases = {phase.name: (index, phase) for index, phase in enumerate(applied.phases)}
    # groups that earlier slots used
    used: dict[str, set[int]] = {component.name: set() for component in applied.components}
    for index, slot in enumerate(slots, start):
        number, phase = phases.get(slot.phase, (-1, None))
        computing = phase if slot.part in ("first", "steady") else None
        rules = _SlotRules(applied, index, slot, resident)
        yield from rules.actions()
        yield from rules.required_blocks(computing)
        if phase:
            yield from rules.directives(phase, used)
        yield from rules.vram(number, phase, host.spilled_bytes(slot))
        yield from host.actions(index, slot, again=start > 0)
        yield from host.backing_stores(index, rules.copies, computing)
        yield from host.budgets(index, slot)
        resident = rules.after()
    return resident


def _further_runs(applied: Problem, plan: Plan) -> Iterator[Violation]:
    if (applied.runs > 1) != bool(plan.again):
        verb = "has" if plan.again else "has no"
        yield Violation(
            "structure",
            -1,
            -1,
            f"the problem has {applied.runs} runs, and the plan {verb} slots of further runs",
        )
    elif plan.again:
        yield from _structure(applied, plan.again, len(plan.slots))


def _structure(problem: Problem, slots: tuple[Slot, ...], start: int) -> Iterator[Violation]:
    expected: list[tuple[str, str, int]] = []
    for phase in problem.phases:
        expected += [(phase.name, "load", 0)] if phase.uses else []
        expected += [(phase.name, "first", 1)]
        expected += [(phase.name, "steady", phase.steady_calls)] if phase.steady_calls else []
    expected.append(("", "end", 0))
    found = [(slot.phase, slot.part, slot.calls) for slot in slots]
    for index, pair in enumerate(zip_longest(expected, found), start):
        if pair[0] != pair[1]:
            want, have = (
                "nothing" if s is None else f"{s[0] or 'the run'} {s[1]} with {s[2]} calls"
                for s in pair
            )
            yield Violation("structure", index, -1, f"expected {want}, found {have}")
            return


class _SlotRules:
    """Rules of one slot. ``resident``: blocks on the device when it begins; `actions` removes
    evicted blocks from it."""

    def __init__(
        self, problem: Problem, index: int, slot: Slot, resident: dict[str, BlockSet]
    ) -> None:
        self.problem, self.index, self.slot = problem, index, slot
        self.components = {component.name: component for component in problem.components}
        self.resident = {name: set(held) for name, held in resident.items()}
        self.loaded: dict[str, BlockSet] = {name: set() for name in resident}
        self.streams: dict[str, tuple[int, Stream]] = {}
        self.copies: dict[
            str, int
        ] = {}  # component -> first action that copies its blocks to the device

    def broken(self, rule: str, action: int, detail: str) -> Violation:
        return Violation(rule, self.index, action, detail)

    def after(self) -> dict[str, BlockSet]:
        return {name: held | self.loaded[name] for name, held in self.resident.items()}

    def actions(self) -> Iterator[Violation]:
        """Rules of each action, and of the order of actions."""
        runs = [
            number for number, action in enumerate(self.slot.actions) if isinstance(action, Run)
        ]
        computes = self.slot.part in ("first", "steady")
        if len(runs) != computes:
            yield self.broken(
                "order",
                -1,
                f"a {self.slot.part} slot must have {int(computes)} run actions; found {len(runs)}",
            )
        elif runs and runs[0] != len(self.slot.actions) - 1:
            yield self.broken("order", runs[0], "run must be the last action of its slot")
        latest = 0
        for number, action in enumerate(self.slot.actions):
            kind = KINDS.index(type(action))
            if kind < latest:
                names = [of.__name__.lower() for of in KINDS]
                yield self.broken(
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
            yield self.broken("unknown", number, f"no component {name!r}")
            return
        blocks = action.keep if isinstance(action, Stream) else action.blocks
        unknown = list(_unknown(component, blocks))
        if unknown:
            yield self.broken("unknown", number, f"{name} has no {', '.join(unknown)}")
            return
        named = _named(component, blocks)
        if component.variants[0].device == "cpu":
            yield self.broken("cpu", number, f"{name} computes on the CPU")
        elif isinstance(action, Load):
            yield from self.load(number, action, component, named)
        elif isinstance(action, Evict):
            if absent := named - self.resident[name]:
                yield self.broken(
                    "evict-absent", number, f"not on the device: {_show(component, absent)}"
                )
            if not component.variants[0].movable and (
                self.slot.part != "end" or self.problem.runs > 1
            ):
                until = "until the end" if self.problem.runs == 1 else "in all runs"
                yield self.broken("immovable", number, f"{name} must stay on the device {until}")
            self.resident[name] -= named
        elif name in self.streams or self.slot.part not in ("first", "steady"):
            yield self.broken(
                "stream", number, f"{name} may be streamed once per slot, in first and steady slots"
            )
        else:
            self.streams[name] = (number, action)

    def load(
        self, number: int, action: Load, component: ComponentNumbers, named: BlockSet
    ) -> Iterator[Violation]:
        name = component.name
        if there := named & (self.resident[name] | self.loaded[name]):
            yield self.broken(
                "load-present", number, f"on the device already: {_show(component, there)}"
            )
        if action.backing_store != component.variants[0].backing_store:
            store = component.variants[0].backing_store
            yield self.broken(
                "backing-store",
                number,
                f"the backing store of {name} is {store}, not {action.backing_store}",
            )
        if self.slot.part == "end":
            yield self.broken("order", number, "the end slot must not load")
        self.loaded[name] |= named
        self.copies.setdefault(name, number)

    def required_blocks(self, phase: PhaseNumbers | None) -> Iterator[Violation]:
        """Whether all blocks that the slot's calls need are available. ``phase`` None: the slot
        computes nothing."""
        used = {use.component: self.groups(use) for use in phase.uses} if phase else {}
        for name, (number, stream) in self.streams.items():
            component = self.problem.component(name)
            if not used.get(name):
                yield self.broken("stream", number, f"the slot does not use {name}")
            held = self.resident[name] | self.loaded[name]
            if odd := _named(component, stream.keep) ^ held:
                yield self.broken(
                    "stream",
                    number,
                    f"keep and the blocks on the device differ in {_show(component, odd)}",
                )
        for name, groups in used.items():
            component = self.problem.component(name)
            if component.variants[0].device == "cpu":
                continue
            every = _every(component, groups)
            if self.slot.part == "steady" and groups and self.loaded[name]:
                yield self.broken(
                    "steady-load",
                    -1,
                    f"loaded in a steady slot that uses it: {_show(component, self.loaded[name])}",
                )
            yield from self.streaming(component, every - self.resident[name])

    def streaming(self, component: ComponentNumbers, absent: BlockSet) -> Iterator[Violation]:
        """Whether ``absent`` blocks can be streamed. These are needed by the slot's calls and not
        resident when it starts."""
        variant, name = component.variants[0], component.name
        streamable = {
            k
            for k, of in enumerate(component.groups)
            if of.streamable and variant.streamable and variant.movable
        }
        if fixed := {(k, i) for k, i in absent if k not in streamable}:
            yield self.broken(
                "not-streamable",
                -1,
                f"must be on the device when the slot starts: {_show(component, fixed)}",
            )
        streamed = {(k, i) for k, i in absent - self.loaded[name] if k in streamable}
        if not streamed:
            return
        if name not in self.streams:
            yield self.broken(
                "missing",
                -1,
                f"needed, but neither resident, loaded nor streamed: {_show(component, streamed)}",
            )
            return
        number, stream = self.streams[name]
        self.copies.setdefault(name, number)
        least = max(variant.block_bytes[k] for k, _ in streamed)
        if stream.ring_buffer_bytes < least:
            yield self.broken(
                "ring_buffer",
                number,
                f"{len(streamed)} blocks are streamed through a ring buffer of {stream.ring_buffer_bytes} bytes; it needs {least}",
            )

    def groups(self, use: Use) -> set[int]:
        """The groups of which the slot runs blocks."""
        return {k for k, calls in enumerate(use.group_calls_in(self.slot.part)) if calls}

    def directives(self, phase: PhaseNumbers, groups: dict[str, set[int]]) -> Iterator[Violation]:
        """Whether the slot follows the directives. Adds the groups it uses to ``groups``, those
        used so far per component."""
        used = {use.component: use for use in phase.uses}
        for component in self.problem.components:
            name, demanded = component.name, self.problem.demanded(component.name)
            held = self.resident[name] | self.loaded[name]
            if "keep" in demanded:
                every = _every(component, groups[name])
                if gone := every - self.resident[name]:
                    yield self.broken(
                        "keep",
                        -1,
                        f"kept from its first use on, but not on the device: {_show(component, gone)}",
                    )
            for rule in sorted(demanded & {"keep", "whole"})[:1]:
                if name in self.streams:
                    yield self.broken(
                        rule,
                        self.streams[name][0],
                        f"{name} is streamed, which the directive {rule} forbids",
                    )
                if name in used and component.variants[0].device == "cpu":
                    yield self.broken(
                        rule, -1, f"{name} computes on the CPU, which the directive {rule} forbids"
                    )
            staying = {key for key in held if component.groups[key[0]].streamable}
            if "exclude" in demanded and staying:
                yield self.broken(
                    "exclude", -1, f"on the device, though excluded: {_show(component, staying)}"
                )
            outside = (
                (self.resident[name] if self.slot.part == "load" else set())
                if name in used
                else held
            )
            if "drop" in demanded and outside:
                yield self.broken(
                    "drop", -1, f"on the device outside its own phases: {_show(component, outside)}"
                )
            if name in used:
                groups[name] |= self.groups(used[name])

    def vram(
        self, number: int, phase: PhaseNumbers | None, spilled_bytes: int
    ) -> Iterator[Violation]:
        weights, *on_secondaries = [0] * (1 + len(self.problem.secondaries))
        for component in self.problem.components:
            variant = component.variants[0]
            held = self.resident[component.name] | self.loaded[component.name]
            for k, _ in held:
                nbytes, secondary = (
                    round_up(variant.block_bytes[k], ALLOCATION_BYTES),
                    variant.secondary or component.groups[k].secondary,
                )
                if secondary:
                    on_secondaries[secondary - 1] += nbytes
                else:
                    weights += nbytes
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
            terms = f"{weights} weights + {ring_buffers} ring buffers + {activation} activation + {values} values and inputs"
            yield self.broken("vram", -1, f"{terms} = {total} > {limit} bytes")
        for secondary, (nbytes, of) in enumerate(
            zip(on_secondaries, self.problem.secondaries, strict=True), 1
        ):
            working = (
                phase.secondary_bytes[secondary - 1][self.slot.part == "steady"]
                if phase and self.slot.part != "load"
                else 0
            )
            if nbytes + working > of.effective_bytes:
                terms = f"{nbytes} weights + {working} activation and what crosses"
                yield self.broken(
                    "secondary",
                    -1,
                    f"device{secondary}: {terms} = {nbytes + working} > {of.effective_bytes} bytes",
                )


def _activation(phase: PhaseNumbers, slot: Slot) -> int:
    return {"first": phase.first_bytes, "steady": phase.steady_bytes}.get(slot.part, 0)


def _unknown(component: ComponentNumbers, blocks: Blocks) -> Iterator[str]:
    counts = {of.name: len(of.blocks) for of in component.groups}
    for name, indices in blocks or ():
        if bad := [i for i in indices if not 0 <= i < counts.get(name, 0)]:
            yield blocks_text(((name, tuple(bad)),))


def _every(component: ComponentNumbers, groups: Iterable[int]) -> BlockSet:
    return {(k, i) for k in groups for i in range(len(component.groups[k].blocks))}


def _named(component: ComponentNumbers, blocks: Blocks) -> BlockSet:
    if blocks is None:
        return _every(component, range(len(component.groups)))
    number = {of.name: k for k, of in enumerate(component.groups)}
    return {(number[name], i) for name, indices in blocks for i in indices}


def _show(component: ComponentNumbers, held: BlockSet) -> str:
    parts = []
    for k, of in enumerate(component.groups):
        if indices := sorted(i for c, i in held if c == k):
            parts.append(blocks_text(((of.name, tuple(indices)),)))
    nbytes = sum(component.variants[0].block_bytes[k] for k, _ in held)
    return f"{component.name} {' '.join(parts)} ({nbytes} bytes)"
