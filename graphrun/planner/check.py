"""Whether a plan may be run: every rule, from the meaning of its actions alone. Shares no code with solver or simulator.

digest           the plan was made for this problem
structure        slots are load, first, rest of every phase in order, then end, with the right numbers of calls
order            evictions come first in a slot, run last, exactly one in first and rest
unknown          components, classes and blocks exist
load-present     nothing present is loaded;          home        loads come from the component's home
evict-absent     nothing absent is dropped;          immovable   nor an immovable block before the end
missing          what the slot's calls need is present, loaded by the slot (first only), or streamed
not-streamable   blocks that cannot be streamed are present when the slot starts
rest-load        a rest slot loads nothing of a component that it uses
stream           only what the slot uses is streamed, once; its keep is exactly what is present or loaded
ring             a ring holds two of the largest block that passes (one, where only one passes)
keep             from its first use on all of it is present, and not streamed
exclude          nothing of it that can be streamed is on the device
whole            it is not streamed;                 drop        it is there in its own phases only, and absent when one begins
vram, ram        budgets hold in every slot;         baseline    nothing is left at the end
"""

from __future__ import annotations

from collections.abc import Iterator

from graphrun.planner.plan import Blocks, Evict, Fill, Free, Load, Plan, Restore, Run, Slot, Spill, Stream, Violation
from graphrun.planner.problem import ALLOCATION_BYTES, ComponentNumbers, PhaseNumbers, Problem
from graphrun.units import round_up

Held = set[tuple[int, int]]  # class, block


def check(problem: Problem, plan: Plan) -> tuple[Violation, ...]:
    """All rules that ``plan`` breaks, in slot order; empty: it may be run. Where the structure is wrong, only that is reported."""
    return tuple(_check(problem, plan))


def _check(problem: Problem, plan: Plan) -> Iterator[Violation]:
    if plan.problem != problem.digest:
        yield Violation("digest", -1, -1, f"the plan is for problem {plan.problem}, this one is {problem.digest}")
    wrong = list(_structure(problem, plan))
    yield from wrong
    if wrong:
        return
    used = {use.component for phase in problem.phases for use in phase.uses}
    host = {c.name: c.variants[0].host_bytes for c in problem.components if c.name in used}
    if (total := sum(host.values())) > problem.ram_bytes:
        terms = " + ".join(f"{nbytes} {name}" for name, nbytes in host.items())
        yield Violation("ram", -1, -1, f"{terms} = {total} bytes on the host > {problem.ram_bytes}")
    phases = {phase.name: (index, phase) for index, phase in enumerate(problem.phases)}
    present: dict[str, Held] = {component.name: set() for component in problem.components}
    known: dict[str, set[int]] = {component.name: set() for component in problem.components}  # classes that earlier slots used
    for index, slot in enumerate(plan.slots):
        judge = _Slot(problem, index, slot, present)
        yield from judge.actions()
        yield from judge.needs(phases[slot.phase][1] if slot.part in ("first", "rest") else None)
        if slot.part != "end":
            yield from judge.directives(phases[slot.phase][1], known)
        yield from judge.vram(*phases.get(slot.phase, (-1, None)))
        present = judge.after()
    for name, held in present.items():
        if held:
            left = _show(problem.component(name), held)
            yield Violation("baseline", len(plan.slots) - 1, -1, f"on the device after the end: {left}")


def _structure(problem: Problem, plan: Plan) -> Iterator[Violation]:
    expected: list[tuple[str, str, int]] = []
    for phase in problem.phases:
        expected += [(phase.name, "load", 0)] if phase.uses else []
        expected += [(phase.name, "first", 1)]
        expected += [(phase.name, "rest", phase.rest_calls)] if phase.rest_calls else []
    expected.append(("", "end", 0))
    found = [(slot.phase, slot.part, slot.calls) for slot in plan.slots]
    for index in range(max(len(expected), len(found))):
        want = expected[index] if index < len(expected) else None
        have = found[index] if index < len(found) else None
        if want != have:
            say = ["nothing" if s is None else f"{s[0] or 'the run'} {s[1]} with {s[2]} calls" for s in (want, have)]
            yield Violation("structure", index, -1, f"expected {say[0]}, found {say[1]}")
            return


class _Slot:
    """One slot under judgement. ``present``: blocks on the device when it begins; evictions take from it at once."""

    def __init__(self, problem: Problem, index: int, slot: Slot, present: dict[str, Held]) -> None:
        self.problem, self.index, self.slot = problem, index, slot
        self.present = {name: set(held) for name, held in present.items()}
        self.loaded: dict[str, Held] = {name: set() for name in present}
        self.streams: dict[str, tuple[int, Stream]] = {}

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
        begun = False
        for number, action in enumerate(self.slot.actions):
            if isinstance(action, Evict) and begun:
                yield self.broken("order", number, "evictions come first in a slot")
            begun = begun or not isinstance(action, Evict)
            if isinstance(action, (Spill, Restore, Fill, Free)):
                yield self.broken("unknown", number, f"{type(action).__name__.lower()} cannot be carried out by this version")
            elif not isinstance(action, Run):
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
        if isinstance(action, Load):
            yield from self.load(number, action, component, named)
        elif isinstance(action, Evict):
            if absent := named - self.present[name]:
                yield self.broken("evict-absent", number, f"not on the device: {_show(component, absent)}")
            if not component.variants[0].movable and self.slot.part != "end":
                yield self.broken("immovable", number, f"{name} stays until the end")
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
        least = min(2, len(through)) * max(variant.block_bytes[k] for k, _ in through)
        if stream.ring_bytes < least:
            yield self.broken("ring", number, f"{len(through)} blocks pass through {stream.ring_bytes} bytes; it takes {least}")

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
            stay = {key for key in held if component.classes[key[0]].streamable}
            if "exclude" in demanded and stay:
                yield self.broken("exclude", -1, f"on the device, though excluded: {_show(component, stay)}")
            early = (self.present[name] if self.slot.part == "load" else set()) if name in used else held
            if "drop" in demanded and early:
                yield self.broken("drop", -1, f"on the device outside its own phases: {_show(component, early)}")
            if name in used:
                known[name] |= {k for k, calls in enumerate(used[name].class_calls_in(self.slot.part)) if calls}

    def vram(self, number: int, phase: PhaseNumbers | None) -> Iterator[Violation]:
        weights = 0
        for component in self.problem.components:
            sizes = component.variants[0].block_bytes
            held = self.present[component.name] | self.loaded[component.name]
            weights += sum(round_up(sizes[k], ALLOCATION_BYTES) for k, _ in held)
        rings = sum(round_up(stream.ring_bytes, ALLOCATION_BYTES) for _, stream in self.streams.values())
        values = self.problem.value_bytes(number) + phase.carry_bytes if phase else 0
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
