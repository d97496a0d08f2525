"""Whether a plan may be run: every rule, from the meaning of its actions alone. Shares no code with solver or simulator.

digest           the plan was made for this problem
variant, option  chosen once, from what the problem has and allows; one variant to each component that has several
pin              a home is pinned where the directive says so
order            stages come in an order that precedence allows; actions in the order of their kinds, with one run in first and rest
disk             what the chosen variants store fits
structure        slots are load, first, rest of every phase in order, then end, with the right numbers of calls; further runs, with
                 slots of the same kinds, are there in a session and only there
unknown          components, classes, blocks and values exist
load-present     nothing present is loaded;          home        loads come from the component's home
evict-absent     nothing absent is dropped;          immovable   nor an immovable block before the end, in a session never
cpu              nothing of a component that computes on the CPU is on the device
missing          what the slot's calls need is present, loaded by the slot (first only), or streamed
not-streamable   blocks that cannot be streamed are present when the slot starts
rest-load        a rest slot loads nothing of a component that it uses
stream           only what the slot uses is streamed, once; its keep is exactly what is present or loaded
ring             a ring holds the largest block that passes; of a layer what finds no room among the activation while it runs
fill             a home is filled once, before the end of the first run, and only one that does not lie on disk or is there before
held             copies, and entering on the CPU, find the home filled, by the slot itself at the latest, and not freed
free             only a home that is held is freed, and none in a session
spill, restore   a value moves in the load slots around a gap between its consumers, and is back for the next of them
keep             from its first use on all of it is present, and not streamed
exclude          nothing of it that can be streamed is on the device
whole            it is not streamed, and computes on the device
drop             it is there in its own phases only, and absent when one begins
vram             the budget holds in every slot;     ram, pinned  likewise, told where they rise
baseline         nothing is left at the end; in a session what the first run leaves is what every further run leaves
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from graphrun.planner.check_choices import broken_choices
from graphrun.planner.check_host import HostRules
from graphrun.planner.plan import Blocks, Evict, Fill, Free, Load, Plan, Restore, Run, Slot, Spill, Stream, Violation
from graphrun.planner.problem import ALLOCATION_BYTES, ComponentNumbers, PhaseNumbers, Problem
from graphrun.planner.settle import settle
from graphrun.units import round_up

Held = set[tuple[int, int]]  # class, block
# The kinds of actions in the order in which a slot has them.
KINDS = (Free, Evict, Spill, Restore, Fill, Stream, Load, Run)


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
    settled = settle(problem, plan)
    wrong = list(_structure(settled, plan.slots, 0)) or list(_further(settled, plan))
    yield from wrong
    if wrong:
        return
    host = HostRules(problem, settled, plan)
    empty: dict[str, Held] = {component.name: set() for component in problem.components}
    left = yield from _run(settled, plan.slots, 0, empty, host)
    if problem.runs > 1:
        begun, left = left, (yield from _run(settled, plan.again, len(plan.slots), left, host))
    else:
        begun = empty
    for name, held in left.items():
        if odd := held ^ begun[name]:
            what = "on the device after the end" if problem.runs == 1 else "not left as it was found"
            last = len(plan.slots) + len(plan.again) - 1
            yield Violation("baseline", last, -1, f"{what}: {_show(settled.component(name), odd)}")


def _run(
    settled: Problem, slots: tuple[Slot, ...], start: int, present: dict[str, Held], host: HostRules
) -> Generator[Violation, None, dict[str, Held]]:
    """Rules of one run, whose first slot has number ``start``; returns what is on the device after it."""
    phases = {phase.name: (index, phase) for index, phase in enumerate(settled.phases)}
    known: dict[str, set[int]] = {component.name: set() for component in settled.components}  # classes that earlier slots used
    for index, slot in enumerate(slots, start):
        number, phase = phases.get(slot.phase, (-1, None))
        computing = phase if slot.part in ("first", "rest") else None
        judge = _Slot(settled, index, slot, present)
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


def _further(settled: Problem, plan: Plan) -> Iterator[Violation]:
    if (settled.runs > 1) != bool(plan.again):
        said = "has" if plan.again else "lacks"
        yield Violation("structure", -1, -1, f"{settled.runs} runs are planned, and the plan {said} slots of further runs")
    elif plan.again:
        yield from _structure(settled, plan.again, len(plan.slots))


def _structure(problem: Problem, slots: tuple[Slot, ...], start: int) -> Iterator[Violation]:
    expected: list[tuple[str, str, int]] = []
    for phase in problem.phases:
        expected += [(phase.name, "load", 0)] if phase.uses else []
        expected += [(phase.name, "first", 1)]
        expected += [(phase.name, "rest", phase.rest_calls)] if phase.rest_calls else []
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
        computes = self.slot.part in ("first", "rest")
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
        elif name in self.streams or self.slot.part not in ("first", "rest"):
            yield self.broken("stream", number, f"{name} is streamed once at most, in first or rest")
        else:
            self.streams[name] = (number, action)

    def load(self, number: int, action: Load, component: ComponentNumbers, named: Held) -> Iterator[Violation]:
        name = component.name
        if there := named & (self.present[name] | self.loaded[name]):
            yield self.broken("load-present", number, f"on the device already: {_show(component, there)}")
        if action.home != component.variants[0].home:
            yield self.broken("home", number, f"{name} lies in {component.variants[0].home}, not in {action.home}")
        if self.slot.part == "end":
            yield self.broken("order", number, "nothing is loaded at the end")
        self.loaded[name] |= named
        self.copies.setdefault(name, number)

    def needs(self, phase: PhaseNumbers | None) -> Iterator[Violation]:
        """Whether the slot's calls find their blocks, and streams what they need. ``phase`` None: the slot computes nothing."""
        used = {}
        for use in phase.uses if phase else ():
            used[use.component] = {k for k, calls in enumerate(use.class_calls_in(self.slot.part)) if calls}
        for name, (number, stream) in self.streams.items():
            component = self.problem.component(name)
            if not used.get(name):
                yield self.broken("stream", number, f"the slot does not use {name}")
            held = self.present[name] | self.loaded[name]
            if odd := _named(component, stream.keep) ^ held:
                yield self.broken("stream", number, f"keep and what is on the device differ in {_show(component, odd)}")
        for name, classes in used.items():
            component = self.problem.component(name)
            if component.variants[0].device == "cpu":
                continue
            every = {(k, i) for k in classes for i in range(len(component.classes[k].blocks))}
            if self.slot.part == "rest" and classes and self.loaded[name]:
                yield self.broken("rest-load", -1, f"loaded beside its own calls: {_show(component, self.loaded[name])}")
            yield from self.passing(component, every - self.present[name])

    def passing(self, component: ComponentNumbers, absent: Held) -> Iterator[Violation]:
        """``absent``: blocks that the slot's calls need and that are not present when it starts."""
        variant, name = component.variants[0], component.name
        may = {k for k, of in enumerate(component.classes) if of.streamable and variant.streamable and variant.movable}
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
        most = phase.first_bytes if self.slot.part == "first" else phase.rest_bytes
        return max(0, most - beside[number]) if beside else 0

    def directives(self, phase: PhaseNumbers, known: dict[str, set[int]]) -> Iterator[Violation]:
        """Whether the slot does as directives demand. ``known`` grows by the classes that it uses."""
        used = {use.component: use for use in phase.uses}
        for component in self.problem.components:
            name, demanded = component.name, self.problem.demanded(component.name)
            held = self.present[name] | self.loaded[name]
            if "keep" in demanded:
                every = {(k, i) for k in known[name] for i in range(len(component.classes[k].blocks))}
                if gone := every - self.present[name]:
                    yield self.broken("keep", -1, f"kept from its first use on, and not on the device: {_show(component, gone)}")
            if demanded & {"keep", "whole"} and name in self.streams:
                rule = "keep" if "keep" in demanded else "whole"
                yield self.broken(rule, self.streams[name][0], f"{name} is streamed, which the directive {rule} forbids")
            if demanded & {"keep", "whole"} and name in used and component.variants[0].device == "cpu":
                rule = "keep" if "keep" in demanded else "whole"
                yield self.broken(rule, -1, f"{name} computes on the CPU, which the directive {rule} forbids")
            stay = {key for key in held if component.classes[key[0]].streamable}
            if "exclude" in demanded and stay:
                yield self.broken("exclude", -1, f"on the device, though excluded: {_show(component, stay)}")
            early = (self.present[name] if self.slot.part == "load" else set()) if name in used else held
            if "drop" in demanded and early:
                yield self.broken("drop", -1, f"on the device outside its own phases: {_show(component, early)}")
            if name in used:
                known[name] |= {k for k, calls in enumerate(used[name].class_calls_in(self.slot.part)) if calls}

    def vram(self, number: int, phase: PhaseNumbers | None, away_bytes: int) -> Iterator[Violation]:
        weights = 0
        for component in self.problem.components:
            sizes = component.variants[0].block_bytes
            held = self.present[component.name] | self.loaded[component.name]
            weights += sum(round_up(sizes[k], ALLOCATION_BYTES) for k, _ in held)
        rings = sum(round_up(stream.ring_bytes, ALLOCATION_BYTES) for _, stream in self.streams.values())
        values = self.problem.value_bytes(number) - away_bytes + phase.carry_bytes if phase else 0
        activation = {"first": phase.first_bytes, "rest": phase.rest_bytes}.get(self.slot.part, 0) if phase else 0
        total, limit = weights + rings + activation + values, self.problem.effective_bytes
        if total > limit:
            detail = (
                f"{weights} weights + {rings} rings + {activation} activation + {values} values and carry = {total} > {limit} bytes"
            )
            yield self.broken("vram", -1, detail)


def _unknown(component: ComponentNumbers, blocks: Blocks) -> Iterator[str]:
    counts = {of.name: len(of.blocks) for of in component.classes}
    for name, indices in blocks or ():
        if bad := [i for i in indices if not 0 <= i < counts.get(name, 0)]:
            yield f"{name}{bad}"


def _named(component: ComponentNumbers, blocks: Blocks) -> Held:
    if blocks is None:
        return {(k, i) for k, of in enumerate(component.classes) for i in range(len(of.blocks))}
    number = {of.name: k for k, of in enumerate(component.classes)}
    return {(number[name], i) for name, indices in blocks for i in indices}


def _show(component: ComponentNumbers, held: Held) -> str:
    parts = []
    for k, of in enumerate(component.classes):
        if indices := sorted(i for c, i in held if c == k):
            parts.append(f"{of.name}{indices}")
    nbytes = sum(component.variants[0].block_bytes[k] for k, _ in held)
    return f"{component.name} {' '.join(parts)} ({nbytes} bytes)"
