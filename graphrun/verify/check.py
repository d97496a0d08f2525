"""Whether a plan may be run: every rule, from the meaning of its actions alone. Shares no code with solver or simulator.

digest           the plan was made for this problem
variant, option  chosen once, from what the problem has and allows; one variant to each component that has several
pin              a backing store is pinned where the directive says so
order            stages come in an order that precedence allows; actions in the order of their kinds, with one run in first and rest
disk             what the chosen variants store fits
structure        slots are load, first, rest of every phase in order, then end, with the right numbers of calls; further runs, with
                 slots of the same kinds, are there in a session and only there
unknown          components, classes, blocks and values exist
load-present     nothing present is loaded;          backing store        loads come from the component's backing store
evict-absent     nothing absent is dropped;          immovable   nor an immovable block before the end, in a session never
cpu              nothing of a component that computes on the CPU is on the device
missing          what the slot's calls need is present, loaded by the slot (first only), or streamed
not-streamable   blocks that cannot be streamed are present when the slot starts
steady-load        a rest slot loads nothing of a component that it uses
stream           only what the slot uses is streamed, once; its keep is exactly what is present or loaded
ring             a ring holds the largest block that passes; of a layer what finds no room among the activation while it runs
fill             a backing store is filled once, before the end of the first run, and only one that does not lie on disk or is there before
held             copies, and entering on the CPU, find the backing store filled, by the slot itself at the latest, and not freed
free             only a backing store that is held is freed, and none in a session
spill, restore   a value moves in the load slots around a gap between its consumers, and is back for the next of them
keep             from its first use on all of it is present, and not streamed
exclude          nothing of it that can be streamed is on the device
whole            it is not streamed, and computes on the device
drop             it is there in its own phases only, and absent when one begins
vram             the budget holds in every slot;     ram, pinned  likewise, told where they rise
baseline         nothing is left at the end; in a session what the first run leaves is what every further run leaves

Whether what a plan chooses is there to be chosen: variants, options, the order of stages, bytes on disk. Knows no slots.

The rules of the host: which backing stores are held, what is filled, freed, spilled and restored, and whether RAM suffices. Knows nothing
of blocks on the device but that they were copied from a backing store.

    phase         encode/0   encode/1   upscale/0   denoise/0   decode/0        value: encode -> denoise, decode
    lives                               x           x           x
    gap                                 ^ spill                                 restore in denoise/0, which consumes it
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence

from graphrun.model.choices import apply_choices
from graphrun.model.plan import Blocks, Drop, Evict, Load, Plan, Read, Restore, Run, Slot, Spill, Stream, Violation
from graphrun.model.problem import ALLOCATION_BYTES, ComponentNumbers, PhaseNumbers, Problem, ValueNumbers, Variant
from graphrun.units import round_up


def broken_choices(problem: Problem, plan: Plan) -> Iterator[Violation]:
    """The rules ``variant``, ``pin``, ``option``, ``order`` and ``disk``, which belong to no slot."""
    yield from _twice("variant", [name for name, _ in plan.variants])
    yield from _twice("option", [stage for stage, _ in plan.options])
    named, known = dict(plan.variants), {component.name for component in problem.components}
    for name in named:
        if name not in known:
            yield _broken("variant", f"the problem has no component {name!r}")
    for component in problem.components:
        yield from _variant(problem, component, named.get(component.name))
    for stage, name in plan.options:
        yield from _option(problem, stage, name)
    yield from _order(problem, plan.order)
    used = {use.component for phase in chosen_phases(problem, plan) for use in phase.uses}
    stored = {c.name: chosen(c, named.get(c.name)) for c in problem.components if c.name in used}
    terms = {name: variant.stored_bytes for name, variant in stored.items() if variant and variant.stored_bytes}
    if problem.disk_bytes is not None and (total := sum(terms.values())) > problem.disk_bytes:
        yield _broken("disk", f"{_sum(terms)} = {total} bytes on disk > {problem.disk_bytes}")


def chosen(component: ComponentNumbers, name: str | None) -> Variant | None:
    """The variant called ``name``; the only one where nothing is named."""
    if name is None:
        return component.variants[0] if len(component.variants) == 1 else None
    return next((variant for variant in component.variants if variant.name == name), None)


def chosen_phases(problem: Problem, plan: Plan) -> tuple[PhaseNumbers, ...]:
    """The phases of every stage as ``plan`` runs it, with the numbers that they have whatever the variants; in no special order."""
    options = {(option.stage, option.name): option for option in problem.options}
    picked = [options[choice] for choice in plan.options if choice in options]
    stages = {option.stage for option in picked}
    return (*(phase for phase in problem.phases if phase.stage not in stages), *(p for option in picked for p in option.phases))


def _variant(problem: Problem, component: ComponentNumbers, name: str | None) -> Iterator[Violation]:
    variant = chosen(component, name)
    if variant is None:
        known = ", ".join(variant.name for variant in component.variants)
        yield _broken("variant", f"{component.name} is to be one of {known}; found {name or 'none of them'}")
        return
    if variant.needs and variant.needs not in problem.allow:
        yield _broken("variant", f"{component.name} {variant.name} changes the output, and {variant.needs} is not allowed")
    if variant.backing_store != "pinned" and "pin" in problem.demanded(component.name):
        yield _broken("pin", f"{component.name} has the backing store {variant.backing_store}, and the directive wants it pinned")


def _option(problem: Problem, stage: str, name: str) -> Iterator[Violation]:
    found = [option for option in problem.options if (option.stage, option.name) == (stage, name)]
    if not found:
        yield _broken("option", f"the problem has no {name!r} for stage {stage!r}")
    elif found[0].needs and found[0].needs not in problem.allow:
        yield _broken("option", f"{name} of {stage} changes the output, and {found[0].needs} is not allowed")


def _order(problem: Problem, order: Sequence[str]) -> Iterator[Violation]:
    stages = list(dict.fromkeys(phase.stage for phase in problem.phases))
    if not order or list(order) == stages:
        return
    if problem.precedence is None:
        yield _broken("order", f"the stages run as they stand, {' '.join(stages)}; found {' '.join(order)}")
    elif sorted(order) != sorted(stages):
        yield _broken("order", f"each of {' '.join(stages)} once; found {' '.join(order)}")
    else:
        for earlier, later in problem.precedence:
            if list(order).index(earlier) > list(order).index(later):
                yield _broken("order", f"{later} runs before {earlier}, which it needs")


def _twice(rule: str, names: Sequence[str]) -> Iterator[Violation]:
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield _broken(rule, f"{name} is chosen {names.count(name)} times")


def _sum(terms: dict[str, int]) -> str:
    return " + ".join(f"{nbytes} {name}" for name, nbytes in terms.items())


def _broken(rule: str, detail: str) -> Violation:
    return Violation(rule, -1, -1, detail)


class HostRules:
    """The host before the first slot. ``problem`` as it is given, ``applied`` as ``plan`` chose."""

    def __init__(self, problem: Problem, applied: Problem, plan: Plan) -> None:
        self.applied, self.variants = applied, {c.name: c.variants[0] for c in applied.components}
        self.values = {value.name: value for value in applied.values}
        self.counted = {use.component for phase in applied.phases for use in phase.uses}  # what nothing uses takes no RAM
        self.held = {name for name, v in self.variants.items() if v.backing_store == "disk" or v.read_seconds == ()}
        self.filled = set(self.held)
        self.spilled: dict[str, int] = {}  # value -> the phase in whose load slot it has to come back
        self.returning: set[str] = set()  # values that the slot restores
        self.spill_gaps = {value.name: dict(_spill_gaps(value, applied.phases)) for value in applied.values}
        self.numbers = {phase.name: number for number, phase in enumerate(applied.phases)}
        plain = {phase.name: phase for phase in chosen_phases(problem, plan)}
        self.on_cpu = {phase.name: plain[phase.name] for phase in applied.phases if phase.uses and not self._on_device(phase)}
        self.before = [0, 0]  # RAM and page-locked bytes of the slot before

    def away_bytes(self, slot: Slot) -> int:
        """Bytes of values that are not on the device in ``slot``, which is about to begin."""
        back = {action.value for action in slot.actions if isinstance(action, Restore)}
        return sum(self.values[name].nbytes for name in self.spilled if name not in back)

    def actions(self, index: int, slot: Slot, again: bool) -> Iterator[Violation]:
        """Rules of what the slot does on the host; holds from then on what it says."""
        for number, action in enumerate(slot.actions):
            broken = None
            if isinstance(action, Drop):
                broken = self._free(action.component)
            elif isinstance(action, Read):
                broken = self._fill(action.component, slot, again)
            elif isinstance(action, Spill | Restore):
                broken = self._crossing(action, slot)
            if broken:
                yield Violation(broken[0], index, number, broken[1])
        for name, back in self.spilled.items():
            if slot.part == "load" and back == self.numbers[slot.phase]:
                yield Violation("restore", index, -1, f"{name} is on the host, and {slot.phase} consumes it")

    def needed(self, index: int, copies: Mapping[str, int], phase: PhaseNumbers | None) -> Iterator[Violation]:
        """Whether backing stores are held: of what is copied (component -> action), and of what ``phase`` enters on the CPU."""
        entered = [use.component for use in phase.uses if self.variants[use.component].device == "cpu"] if phase else []
        for name, number in (*copies.items(), *((name, -1) for name in entered)):
            variant = self.variants[name]
            if name in self.held and (variant.backing_store != "disk" or name not in entered):
                continue
            why = "not filled yet" if name not in self.filled else "freed already" if variant.backing_store != "disk" else "on disk"
            yield Violation("held", index, number, f"the backing store of {name} is needed, and is {why}")

    def budgets(self, index: int, slot: Slot) -> Iterator[Violation]:
        """RAM and page-locked RAM; told where they rise, not again in every slot that follows. Ends the slot."""
        filling = [action.component for action in slot.actions if isinstance(action, Read) and action.component in self.held]
        terms = {name: self.variants[name].host_bytes for name in self.variants if name in self.held & self.counted}
        locked = {name: terms[name] for name in terms if self.variants[name].backing_store != "pageable"}
        terms |= {f"{name} (transient)": n for name in filling if (n := self.variants[name].transient_bytes)}
        terms |= {name: value.nbytes for name, value in self.values.items() if name in self.returning or name in self.spilled}
        if (phase := self.on_cpu.get(slot.phase)) and slot.part != "load":
            terms["activation"] = phase.first_bytes if slot.part == "first" else phase.steady_bytes
        pinned = self.applied.pinned_bytes
        for which, (rule, found, limit) in enumerate((("ram", terms, self.applied.ram_bytes), ("pinned", locked, pinned))):
            total = sum(found.values())
            if limit is not None and total > max(limit, self.before[which]):
                sums = " + ".join(f"{nbytes} {name}" for name, nbytes in found.items())
                kind = "on the host" if rule == "ram" else "page-locked"
                yield Violation(rule, index, -1, f"{sums} = {total} bytes {kind} > {limit}")
            self.before[which] = total
        self.returning = set()

    def _free(self, name: str) -> tuple[str, str] | None:
        if name not in self.variants:
            return "unknown", f"no component {name!r}"
        if self.applied.runs > 1:
            return "drop", f"{name} is needed in the next run of the session"
        if name not in self.held:
            return "drop", f"the backing store of {name} is not held"
        self.held.discard(name)
        return None

    def _fill(self, name: str, slot: Slot, again: bool) -> tuple[str, str] | None:
        if name not in self.variants:
            return "unknown", f"no component {name!r}"
        if again or slot.part == "end":
            return "read", f"{name} is filled in the first run of a session, before its end"
        if name in self.filled:
            lies = "lies on disk" if self.variants[name].backing_store == "disk" else "was filled before"
            return "read", f"{name} {lies}"
        for names in (self.filled, self.held, self.counted):
            names.add(name)
        return None

    def _crossing(self, action: Spill | Restore, slot: Slot) -> tuple[str, str] | None:
        name, verb = action.value, "spill" if isinstance(action, Spill) else "restore"
        if name not in self.values:
            return "unknown", f"no value {name!r}"
        if slot.part != "load":
            return verb, f"{name} moves in a {slot.part} slot, and values move in load slots"
        here = self.numbers[slot.phase]
        if isinstance(action, Restore):
            if self.spilled.get(name) != here:
                return verb, f"{name} is not to come back here"
            del self.spilled[name]
            self.returning.add(name)
            return None
        if name in self.spilled or here not in self.spill_gaps[name]:
            return verb, f"no gap between consumers of {name} begins at {slot.phase}"
        self.spilled[name] = self.spill_gaps[name][here]
        return None

    def _on_device(self, phase: PhaseNumbers) -> bool:
        return any(self.variants[use.component].device != "cpu" for use in phase.uses)


def _spill_gaps(value: ValueNumbers, phases: tuple[PhaseNumbers, ...]) -> Iterator[tuple[int, int]]:
    """The phases in whose load slots ``value`` may leave and has to come back: around each stretch in which it only waits."""
    first = None
    for number in range(max(0, value.first_phase), min(value.last_phase + 1, len(phases))):
        waits = phases[number].stage not in (*value.consumers, value.producer)
        if not waits and first is not None:
            if phases[first].uses and phases[number].uses:
                yield first, number
            first = None
        elif waits and first is None:
            first = number


Held = set[tuple[int, int]]  # class, block
# The kinds of actions in the order in which a slot has them.
KINDS = (Drop, Evict, Spill, Restore, Read, Stream, Load, Run)


def check(problem: Problem, plan: Plan) -> tuple[Violation, ...]:
    """All rules that ``plan`` breaks, in slot order; empty: it may be run. The slots of further runs are numbered on.

    Where its choices are wrong, only these are reported; where the structure is, only that.
    """
    return tuple(_check(problem, plan))


def _check(problem: Problem, plan: Plan) -> Iterator[Violation]:
    if plan.problem != problem.digest:
        yield Violation("digest", -1, -1, f"the plan is for problem {plan.problem}, this one is {problem.digest}")
    choices = list(broken_choices(problem, plan))
    yield from choices
    if any(violation.rule in ("variant", "pin", "option", "order") for violation in choices):
        return
    applied = apply_choices(problem, plan)
    wrong = list(_structure(applied, plan.slots, 0)) or list(_further(applied, plan))
    yield from wrong
    if wrong:
        return
    host = HostRules(problem, applied, plan)
    empty: dict[str, Held] = {component.name: set() for component in problem.components}
    left = yield from _run(applied, plan.slots, 0, empty, host)
    if problem.runs > 1:
        begun, left = left, (yield from _run(applied, plan.again, len(plan.slots), left, host))
    else:
        begun = empty
    for name, held in left.items():
        if odd := held ^ begun[name]:
            what = "on the device after the end" if problem.runs == 1 else "not left as it was found"
            last = len(plan.slots) + len(plan.again) - 1
            yield Violation("baseline", last, -1, f"{what}: {_show(applied.component(name), odd)}")


def _run(
    applied: Problem, slots: tuple[Slot, ...], start: int, present: dict[str, Held], host: HostRules
) -> Generator[Violation, None, dict[str, Held]]:
    """Rules of one run, whose first slot has number ``start``; returns what is on the device after it."""
    phases = {phase.name: (index, phase) for index, phase in enumerate(applied.phases)}
    known: dict[str, set[int]] = {component.name: set() for component in applied.components}  # classes that earlier slots used
    for index, slot in enumerate(slots, start):
        number, phase = phases.get(slot.phase, (-1, None))
        computing = phase if slot.part in ("first", "steady") else None
        judge = _Slot(applied, index, slot, present)
        yield from judge.actions()
        yield from judge.needs(computing)
        if phase:
            yield from judge.directives(phase, known)
        yield from judge.vram(number, phase, host.away_bytes(slot))
        yield from host.actions(index, slot, again=start > 0)
        yield from host.needed(index, judge.copies, computing)
        yield from host.budgets(index, slot)
        present = judge.after()
    return present


def _further(applied: Problem, plan: Plan) -> Iterator[Violation]:
    if (applied.runs > 1) != bool(plan.again):
        said = "has" if plan.again else "lacks"
        yield Violation("structure", -1, -1, f"{applied.runs} runs are planned, and the plan {said} slots of further runs")
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
    for index in range(max(len(expected), len(found))):
        want = expected[index] if index < len(expected) else None
        have = found[index] if index < len(found) else None
        if want != have:
            say = ["nothing" if s is None else f"{s[0] or 'the run'} {s[1]} with {s[2]} calls" for s in (want, have)]
            yield Violation("structure", start + index, -1, f"expected {say[0]}, found {say[1]}")
            return


class _Slot:
    """One slot under judgement. ``present``: blocks on the device when it begins; evictions take from it at once."""

    def __init__(self, problem: Problem, index: int, slot: Slot, present: dict[str, Held]) -> None:
        self.problem, self.index, self.slot = problem, index, slot
        self.present = {name: set(held) for name, held in present.items()}
        self.loaded: dict[str, Held] = {name: set() for name in present}
        self.streams: dict[str, tuple[int, Stream]] = {}
        self.copies: dict[str, int] = {}  # components of which blocks are copied in -> the action that does

    def broken(self, rule: str, action: int, detail: str) -> Violation:
        return Violation(rule, self.index, action, detail)

    def after(self) -> dict[str, Held]:
        return {name: held | self.loaded[name] for name, held in self.present.items()}

    def actions(self) -> Iterator[Violation]:
        """Rules of single actions, and of their order."""
        runs = [number for number, action in enumerate(self.slot.actions) if isinstance(action, Run)]
        computes = self.slot.part in ("first", "steady")
        if len(runs) != computes:
            yield self.broken("order", -1, f"a {self.slot.part} slot has {int(computes)} run, found {len(runs)}")
        elif runs and runs[0] != len(self.slot.actions) - 1:
            yield self.broken("order", runs[0], "run is the last action of its slot")
        latest = 0
        for number, action in enumerate(self.slot.actions):
            kind = KINDS.index(type(action))
            if kind < latest:
                names = [of.__name__.lower() for of in KINDS]
                yield self.broken("order", number, f"{names[kind]} after {names[latest]}; the order is {', '.join(names)}")
            latest = max(latest, kind)
            if isinstance(action, (Load, Evict, Stream)):
                yield from self.action(number, action)

    def action(self, number: int, action: Load | Evict | Stream) -> Iterator[Violation]:
        name = action.component
        component = next((c for c in self.problem.components if c.name == name), None)
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
            if absent := named - self.present[name]:
                yield self.broken("evict-absent", number, f"not on the device: {_show(component, absent)}")
            if not component.variants[0].movable and (self.slot.part != "end" or self.problem.runs > 1):
                until = "until the end" if self.problem.runs == 1 else "from run to run"
                yield self.broken("immovable", number, f"{name} stays {until}")
            self.present[name] -= named
        elif name in self.streams or self.slot.part not in ("first", "steady"):
            yield self.broken("stream", number, f"{name} is streamed once at most, in first or rest")
        else:
            self.streams[name] = (number, action)

    def load(self, number: int, action: Load, component: ComponentNumbers, named: Held) -> Iterator[Violation]:
        name = component.name
        if there := named & (self.present[name] | self.loaded[name]):
            yield self.broken("load-present", number, f"on the device already: {_show(component, there)}")
        if action.backing_store != component.variants[0].backing_store:
            yield self.broken(
                "backing_store", number, f"{name} lies in {component.variants[0].backing_store}, not in {action.backing_store}"
            )
        if self.slot.part == "end":
            yield self.broken("order", number, "nothing is loaded at the end")
        self.loaded[name] |= named
        self.copies.setdefault(name, number)

    def needs(self, phase: PhaseNumbers | None) -> Iterator[Violation]:
        """Whether the slot's calls find their blocks, and streams what they need. ``phase`` None: the slot computes nothing."""
        used = {}
        for use in phase.uses if phase else ():
            used[use.component] = {k for k, calls in enumerate(use.group_calls_in(self.slot.part)) if calls}
        for name, (number, stream) in self.streams.items():
            component = self.problem.component(name)
            if not used.get(name):
                yield self.broken("stream", number, f"the slot does not use {name}")
            held = self.present[name] | self.loaded[name]
            if odd := _named(component, stream.keep) ^ held:
                yield self.broken("stream", number, f"keep and what is on the device differ in {_show(component, odd)}")
        for name, groups in used.items():
            component = self.problem.component(name)
            if component.variants[0].device == "cpu":
                continue
            every = {(k, i) for k in groups for i in range(len(component.groups[k].blocks))}
            if self.slot.part == "steady" and groups and self.loaded[name]:
                yield self.broken("steady-load", -1, f"loaded beside its own calls: {_show(component, self.loaded[name])}")
            yield from self.passing(component, every - self.present[name])

    def passing(self, component: ComponentNumbers, absent: Held) -> Iterator[Violation]:
        """``absent``: blocks that the slot's calls need and that are not present when it starts."""
        variant, name = component.variants[0], component.name
        may = {k for k, of in enumerate(component.groups) if of.streamable and variant.streamable and variant.movable}
        if fixed := {(k, i) for k, i in absent if k not in may}:
            yield self.broken("not-streamable", -1, f"must be on the device when the slot starts: {_show(component, fixed)}")
        through = {(k, i) for k, i in absent - self.loaded[name] if k in may}
        if not through:
            return
        if name not in self.streams:
            yield self.broken("missing", -1, f"needed, and not present, loaded or streamed: {_show(component, through)}")
            return
        number, stream = self.streams[name]
        self.copies.setdefault(name, number)
        least = max(variant.block_bytes[k] - self.room(name, k) for k, _ in through)
        if stream.ring_bytes < least:
            yield self.broken("ring", number, f"{len(through)} blocks pass through {stream.ring_bytes} bytes; it takes {least}")

    def room(self, name: str, number: int) -> int:
        """Bytes of the slot's activation that do not live while a block of this class runs."""
        phase = next(phase for phase in self.problem.phases if phase.name == self.slot.phase)
        beside = next(use for use in phase.uses if use.component == name).beside_bytes
        most = phase.first_bytes if self.slot.part == "first" else phase.steady_bytes
        return max(0, most - beside[number]) if beside else 0

    def directives(self, phase: PhaseNumbers, known: dict[str, set[int]]) -> Iterator[Violation]:
        """Whether the slot does as directives demand. ``known`` grows by the classes that it uses."""
        used = {use.component: use for use in phase.uses}
        for component in self.problem.components:
            name, demanded = component.name, self.problem.demanded(component.name)
            held = self.present[name] | self.loaded[name]
            if "keep" in demanded:
                every = {(k, i) for k in known[name] for i in range(len(component.groups[k].blocks))}
                if gone := every - self.present[name]:
                    yield self.broken("keep", -1, f"kept from its first use on, and not on the device: {_show(component, gone)}")
            if demanded & {"keep", "whole"} and name in self.streams:
                rule = "keep" if "keep" in demanded else "whole"
                yield self.broken(rule, self.streams[name][0], f"{name} is streamed, which the directive {rule} forbids")
            if demanded & {"keep", "whole"} and name in used and component.variants[0].device == "cpu":
                rule = "keep" if "keep" in demanded else "whole"
                yield self.broken(rule, -1, f"{name} computes on the CPU, which the directive {rule} forbids")
            stay = {key for key in held if component.groups[key[0]].streamable}
            if "exclude" in demanded and stay:
                yield self.broken("exclude", -1, f"on the device, though excluded: {_show(component, stay)}")
            early = (self.present[name] if self.slot.part == "load" else set()) if name in used else held
            if "drop" in demanded and early:
                yield self.broken("drop", -1, f"on the device outside its own phases: {_show(component, early)}")
            if name in used:
                known[name] |= {k for k, calls in enumerate(used[name].group_calls_in(self.slot.part)) if calls}

    def vram(self, number: int, phase: PhaseNumbers | None, away_bytes: int) -> Iterator[Violation]:
        weights = 0
        for component in self.problem.components:
            sizes = component.variants[0].block_bytes
            held = self.present[component.name] | self.loaded[component.name]
            weights += sum(round_up(sizes[k], ALLOCATION_BYTES) for k, _ in held)
        rings = sum(round_up(stream.ring_bytes, ALLOCATION_BYTES) for _, stream in self.streams.values())
        values = self.problem.value_bytes(number) - away_bytes + phase.live_in_bytes if phase else 0
        activation = {"first": phase.first_bytes, "steady": phase.steady_bytes}.get(self.slot.part, 0) if phase else 0
        total, limit = weights + rings + activation + values, self.problem.effective_bytes
        if total > limit:
            detail = (
                f"{weights} weights + {rings} rings + {activation} activation + {values} values and carry = {total} > {limit} bytes"
            )
            yield self.broken("vram", -1, detail)


def _unknown(component: ComponentNumbers, blocks: Blocks) -> Iterator[str]:
    counts = {of.name: len(of.blocks) for of in component.groups}
    for name, indices in blocks or ():
        if bad := [i for i in indices if not 0 <= i < counts.get(name, 0)]:
            yield f"{name}{bad}"


def _named(component: ComponentNumbers, blocks: Blocks) -> Held:
    if blocks is None:
        return {(k, i) for k, of in enumerate(component.groups) for i in range(len(of.blocks))}
    number = {of.name: k for k, of in enumerate(component.groups)}
    return {(number[name], i) for name, indices in blocks for i in indices}


def _show(component: ComponentNumbers, held: Held) -> str:
    parts = []
    for k, of in enumerate(component.groups):
        if indices := sorted(i for c, i in held if c == k):
            parts.append(f"{of.name}{indices}")
    nbytes = sum(component.variants[0].block_bytes[k] for k, _ in held)
    return f"{component.name} {' '.join(parts)} ({nbytes} bytes)"
