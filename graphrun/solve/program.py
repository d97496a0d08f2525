"""The exact program behind a plan: its integers, and what they cost in seconds and bytes. Knows no solver.

A way is a component in one of its variants; exactly one way of each component is taken (y = 1). Per slot t and cell j (a class of
blocks of one way that computes on the device): K blocks present at its start, d loaded in it, n calls, nb blocks.

    unused      any K + d <= nb                                     x = d        blocks moved: prefetch
    used        K = nb, d = 0             not streamable            x = 0
    used        K + d + nb*s >= nb        first: x = nb - K         s: the rest of them pass through the ring
                                          rest:  x = n*(nb - K), d = 0 for the whole component
    ring        >= L + M                  L >= b*s: the largest that passes; M >= b*s - b*r: beside it one of each class
                                          but those with r, whose copies and compute take turns
    layers      s = 1, L >= (b - room)*s where all have r; K and d are whole only in the end; one that runs p times in a call
                has x = n*p*(nb - K) - (p - 1)*d; of one child of the component copies hide behind each other's compute
    next slot   K' <= K + d               eviction is free; immovable: K' = K + d;  K = 0 at first
    session     first run, then a further one: it begins with K <= K + d at the end of either, and counts R - 1 times
    demanded    keep     s = 0 in its first slot, K = nb in later ones       exclude  K = d = 0 where streamable
                whole    s = 0 where used         drop     K = 0 in load slots, K = d = 0 in phases of others
    backing store        filled in one slot at most; x = 0 before it, and after it was freed; on the CPU: filled before it is entered
    spill       of a value over a gap: out in the load slot of its first phase, back in that of the phase behind it
    time        D >= sum over the used j of max(compute of j, copies of j, where r: compute of j + copies of j)
                     + compute on the CPU
                D >= load_seconds*x summed over all j + spills     D >= disk_seconds*x summed over all j + fills
    memory      sum b*(K + d) + rings + activation + values + carry <= effective budget;  backing stores and spills <= RAM, page-locked RAM

x follows from K and d, so it is no variable. Room for one block alone pays where copies take much longer than compute: the bytes of
the other hold a block that then need not be copied; and where there is no more room.

When a value may be away from the device: between its producer and its consumers. Decides nothing else.

phases    encode   | denoise | decode         embeds: used, unused, used
embeds    ########   spill..restore ######
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from graphrun.model.choices import activation_bytes, use_with
from graphrun.model.least_memory import DEPTH, room_bytes, streamable_groups, used_components
from graphrun.model.plan import Part
from graphrun.model.problem import ALLOCATION_BYTES, ComponentNumbers, PhaseNumbers, Placement, Problem, Variant
from graphrun.units import round_up


@dataclass(frozen=True, slots=True)
class SpillGap:
    """A value that may be spilled in load interval ``out`` and restored in load interval ``back``."""

    value: int
    nbytes: int
    out: int
    back: int
    out_seconds: float
    back_seconds: float

    def absent(self, t: int) -> bool:
        """Whether a spill keeps it off the device in interval ``t``."""
        return self.out < t < self.back

    def seconds(self, t: int) -> float:
        """What a spill takes of the copies in interval ``t``."""
        return self.out_seconds if t == self.out else self.back_seconds if t == self.back else 0.0


def spill_gaps_of(problem: Problem, loads: Mapping[int, int], turn: int, count: int) -> tuple[SpillGap, ...]:
    """Every gap of every value, in each run: phases in a row in which it lives unused, with load slots to spill and restore in.

    ``loads``: the load interval of each phase; ``count`` intervals in all, ``turn`` of them to a run.
    """
    found = []
    for number, value in enumerate(problem.values):
        if not value.nbytes:
            continue
        start = None
        for phase in range(value.first_phase, min(value.last_phase + 1, len(problem.phases))):
            idle = problem.phases[phase].stage not in (*value.consumers, value.producer)
            if not idle and start is not None and start in loads and phase in loads:
                found.append((number, value.nbytes, loads[start], loads[phase]))
            start = (phase if start is None else start) if idle else None
    to, back = problem.hardware.d2h_bytes_per_second, problem.hardware.h2d_bytes_per_second
    return tuple(
        SpillGap(number, nbytes, out + shift, backing_store + shift, nbytes / to, nbytes / back)
        for shift in range(0, count, max(turn, 1))
        for number, nbytes, out, backing_store in found
    )


@dataclass(frozen=True, slots=True)
class VariantChoice:
    """A component in one of its variants. ``read_seconds``: of its whole backing store, None where it is never filled. ``used``: whether any
    phase enters the component; one that none does takes nothing."""

    component: int
    variant: int
    of: Variant
    read_seconds: float | None
    used: bool

    @property
    def computes(self) -> bool:
        """Whether it computes on the device."""
        return self.of.device != "cpu"


@dataclass(frozen=True, slots=True)
class Group:
    """One class of blocks of one way. ``held_bytes``: what a block takes on the device, rounded up. ``demanded`` of the component
    by directives."""

    variant_choice: int
    component: int
    index: int
    count: int
    block_bytes: int
    held_bytes: int
    load_seconds: float
    disk_seconds: float
    streamable: bool
    movable: bool
    demanded: frozenset[Placement] = frozenset()
    stretch: str = ""  # of layers: the child in which they alternate with others; copies of one hide behind compute of another
    by_layer: bool = False
    excluded: bool = False  # by a directive: blocks that another variant could stream, if not this one


@dataclass(frozen=True, slots=True)
class Interval:
    """A slot of the problem. ``calls[j]``, ``seconds[j]`` (one block, one call) per cell; ``used``: components it computes with;
    ``around``: components of its phase, on the CPU too, none in load; ``cpu_seconds`` per way.
    ``fixed_bytes``: values and carry; ``activation_bytes``: the phase's own, of any variants, and ``glue_bytes``
    of them where all compute on the CPU. ``weight``: how often it runs.
    ``passes[j]``: how often a block runs in a call; ``rooms[j]``: activation that is not there while it does."""

    phase: int
    part: Part
    rounds: int
    weight: float
    fixed_bytes: int
    activation_bytes: int
    calls: tuple[int, ...]
    seconds: tuple[float, ...]
    used: frozenset[int]
    around: frozenset[int]
    cpu_seconds: tuple[float, ...]
    passes: tuple[int, ...] = ()
    rooms: tuple[int, ...] = ()
    glue_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """Integers of a solution: ``present[t][j]`` and ``loaded[t][j]`` per cell of the ways taken, in which interval each component's
    backing store is filled and freed (-1: never), which gaps are spilled; ``depths[t][j]``: for how many blocks the ring has room where some
    of the cell are streamed, the largest that passes being one of them (none: for two everywhere)."""

    present: tuple[tuple[int, ...], ...]
    loaded: tuple[tuple[int, ...], ...]
    reads: tuple[int, ...] = ()
    drops: tuple[int, ...] = ()
    spills: tuple[bool, ...] = ()
    depths: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """A problem as ways, cells and intervals (the end slot is no interval: it only evicts). In a session the further run's
    intervals follow the first run's, from number ``turn`` on. What costs seconds and bytes is asked of a program with one way to
    a component (`taking`)."""

    problem: Problem
    variant_choices: tuple[VariantChoice, ...]
    groups: tuple[Group, ...]
    intervals: tuple[Interval, ...]
    spill_gaps: tuple[SpillGap, ...]
    turn: int

    @property
    def session(self) -> bool:
        """Whether further runs follow the first."""
        return self.turn < len(self.intervals)

    def moved(self, t: int, j: int, present: int, loaded: int) -> int:
        """x: blocks of cell ``j`` copied in interval ``t``."""
        calls, group = self.intervals[t].calls[j], self.groups[j]
        passes = self.intervals[t].passes[j]
        return calls * passes * (group.count - present) - (passes - 1) * loaded if calls else loaded

    def compute_seconds(self, t: int, j: int) -> float:
        """Compute of cell ``j`` in interval ``t``."""
        return self.intervals[t].calls[j] * self.groups[j].count * self.intervals[t].seconds[j]

    def slot_seconds(self, choice: Choice, factors: Sequence[float] = (), *, apart: bool = True) -> tuple[float, ...]:
        """D per interval, once each, copy times multiplied by ``factors`` where there are any. ``apart`` False: as if every copy
        hid behind all that its slot computes, which nothing betters."""
        found = []
        for t, interval in enumerate(self.intervals):
            factor = factors[t] if factors else 1.0
            blocks = [self.moved(t, j, k, d) for j, (k, d) in enumerate(zip(choice.present[t], choice.loaded[t], strict=True))]
            copies = [factor * group.load_seconds * moved for group, moved in zip(self.groups, blocks, strict=True)]
            disk_reads = [factor * group.disk_seconds * moved for group, moved in zip(self.groups, blocks, strict=True)]
            groups, stretches = range(len(self.groups)), self.stretches(t)
            turns = [self.compute_seconds(t, j) if apart and self._alone(choice, t, j) else 0.0 for j in groups]
            own = sum(
                max(
                    sum(self.compute_seconds(t, j) for j in of),
                    sum(copies[j] + turns[j] for j in of),
                    sum(disk_reads[j] for j in of),
                )
                for of in (stretches if apart else [[j for of in stretches for j in of]])
            )
            spills = sum(gap.seconds(t) for gap, out in zip(self.spill_gaps, choice.spills, strict=False) if out)
            reads = sum(
                variant_choice.read_seconds or 0.0
                for variant_choice, at in zip(self.variant_choices, choice.reads, strict=False)
                if at == t
            )
            found.append(max(own + sum(interval.cpu_seconds), sum(copies) + factor * spills, sum(disk_reads) + factor * reads))
        return tuple(found)

    def stretches(self, t: int) -> list[list[int]]:
        """The cells that interval ``t`` computes with, those together whose copies can hide behind each other's compute."""
        found: dict[tuple[int, str], list[int]] = {}
        for j, calls in enumerate(self.intervals[t].calls):
            if calls:
                found.setdefault((self.groups[j].variant_choice, self.groups[j].stretch), []).append(j)
        return list(found.values())

    def _alone(self, choice: Choice, t: int, j: int) -> bool:
        """Whether blocks of cell ``j`` pass where none has room beside the largest, so that copies and compute take turns."""
        if not self._passing(choice, t, j):
            return False
        component, groups = self.groups[j].component, enumerate(self.groups)
        largest = max(group.held_bytes for i, group in groups if group.component == component and self._passing(choice, t, i))
        return self.ring_bytes(choice, t, component) < largest + self.groups[j].held_bytes

    def seconds(self, choice: Choice, factors: Sequence[float] = (), *, apart: bool = True) -> float:
        """All runs together; the rest as in `slot_seconds`."""
        slots = self.slot_seconds(choice, factors, apart=apart)
        return sum(i.weight * seconds for i, seconds in zip(self.intervals, slots, strict=True))

    def moved_bytes(self, choice: Choice) -> int:
        """Bytes copied to the device in all runs: blocks, streamed ones each time, and values that come back."""
        restored = sum(
            int(self.intervals[g.back].weight) * g.nbytes for g, out in zip(self.spill_gaps, choice.spills, strict=False) if out
        )
        return restored + sum(
            int(interval.weight) * group.block_bytes * self.moved(t, j, choice.present[t][j], choice.loaded[t][j])
            for t, interval in enumerate(self.intervals)
            for j, group in enumerate(self.groups)
        )

    def _passing(self, choice: Choice, t: int, j: int) -> int:
        """Blocks of cell ``j`` that are streamed in interval ``t``."""
        return self.groups[j].count - choice.present[t][j] - choice.loaded[t][j] if self.intervals[t].calls[j] else 0

    def streams(self, choice: Choice, t: int, component: int) -> bool:
        """Whether any block of ``component`` is streamed in interval ``t``."""
        return any(group.component == component and self._passing(choice, t, j) for j, group in enumerate(self.groups))

    def ring_bytes(self, choice: Choice, t: int, component: int) -> int:
        """The ring of ``component`` in interval ``t``: the largest block that passes, and what the classes want beside it."""
        passing = [j for j, group in enumerate(self.groups) if group.component == component and self._passing(choice, t, j)]
        depths = choice.depths[t] if choice.depths else (DEPTH,) * len(self.groups)
        beside = max(((depths[j] - 1) * self.groups[j].held_bytes for j in passing), default=0)
        return max((self.in_ring(t, j, beside > 0) for j in passing), default=0) + beside

    def in_ring(self, t: int, j: int, deep: bool) -> int:
        """What a block of cell ``j`` takes of a ring that has room for another beside it (``deep``), or not."""
        room = 0 if deep else self.intervals[t].rooms[j] // ALLOCATION_BYTES * ALLOCATION_BYTES
        return max(0, self.groups[j].held_bytes - room)

    def device_bytes(self, choice: Choice) -> tuple[int, ...]:
        """What is on the device per interval, at most."""
        found = []
        for t, interval in enumerate(self.intervals):
            held = sum(c.held_bytes * (choice.present[t][j] + choice.loaded[t][j]) for j, c in enumerate(self.groups))
            rings = sum(self.ring_bytes(choice, t, component) for component in interval.used)
            spilled = sum(g.nbytes for g, out in zip(self.spill_gaps, choice.spills, strict=False) if out and g.absent(t))
            found.append(interval.fixed_bytes - spilled + self.activation_bytes(t) + held + rings)
        return tuple(found)

    def activation_bytes(self, t: int) -> int:
        """The activation on the device in interval ``t``."""
        interval = self.intervals[t]
        around = [variant_choice.of for variant_choice in self.variant_choices if variant_choice.component in interval.around]
        return activation_bytes(interval.activation_bytes, around, interval.glue_bytes) if interval.rounds else 0

    def excess_bytes(self, choice: Choice) -> tuple[int, ...]:
        """Bytes above the effective budget per interval (negative: headroom), in integers."""
        return tuple(nbytes - self.problem.effective_bytes for nbytes in self.device_bytes(choice))

    def host_bytes(self, choice: Choice) -> tuple[tuple[int, int], ...]:
        """RAM, and page-locked bytes of it, per interval."""
        found = []
        for t, interval in enumerate(self.intervals):
            ram = locked = 0
            for variant_choice, fill, free in zip(self.variant_choices, choice.reads, choice.drops, strict=True):
                if not variant_choice.used:
                    continue
                if (variant_choice.read_seconds is None or 0 <= fill <= t) and not 0 <= free <= t:
                    ram, locked = ram + variant_choice.of.host_bytes, locked + variant_choice.of.locked_bytes
                ram += variant_choice.of.transient_bytes if fill == t else 0
            ram += sum(g.nbytes for g, out in zip(self.spill_gaps, choice.spills, strict=True) if out and g.out <= t <= g.back)
            if (
                interval.rounds
                and interval.around
                and not any(w.computes for w in self.variant_choices if w.component in interval.around)
            ):
                ram += interval.activation_bytes
            found.append((ram, locked))
        return tuple(found)

    def last_need(self, choice: Choice) -> tuple[int, ...]:
        """The last interval in which each component's backing store is copied from or computed with, -1 where none is."""
        found = []
        for variant_choice in self.variant_choices:
            groups = [j for j, group in enumerate(self.groups) if group.component == variant_choice.component]
            found.append(
                max(
                    (
                        t
                        for t, interval in enumerate(self.intervals)
                        if any(self.moved(t, j, choice.present[t][j], choice.loaded[t][j]) for j in groups)
                        or (not variant_choice.computes and variant_choice.component in interval.around)
                    ),
                    default=-1,
                )
            )
        return tuple(found)

    def taking(self, variants: Sequence[int]) -> Program:
        """The program with one way to a component, by its variant's index."""
        return program_of(self.problem, tuple((variant,) for variant in variants))


def program_of(problem: Problem, variants: Sequence[Sequence[int]] | None = None) -> Program:
    """The program of ``problem``, whose order and options are chosen, with these variants of each component (None: the usable)."""
    used = {component.name for component in used_components(problem)}
    variant_choices: list[VariantChoice] = []
    for number, component in enumerate(problem.components):
        for index in variants[number] if variants is not None else usable(problem, number):
            variant = component.variants[index]
            blocks = zip(component.groups, variant.read_seconds, strict=False)
            fill = sum(len(of.blocks) * seconds for of, seconds in blocks) if variant.read_seconds else None
            variant_choices.append(VariantChoice(number, index, variant, fill, component.name in used))
    groups = tuple(
        group for number, variant_choice in enumerate(variant_choices) for group in _groups(problem, number, variant_choice)
    )
    weights = (1.0, float(problem.runs - 1))[: min(2, problem.runs)]
    intervals = tuple(
        interval
        for weight in weights
        for number in range(len(problem.phases))
        for interval in _intervals(problem, variant_choices, groups, number, weight)
    )
    turn = len(intervals) // len(weights)
    loads = {interval.phase: t for t, interval in enumerate(intervals[:turn]) if interval.part == "load"}
    return Program(problem, tuple(variant_choices), groups, intervals, spill_gaps_of(problem, loads, turn, len(intervals)), turn)


def usable(problem: Problem, number: int) -> tuple[int, ...]:
    """Variants of component ``number`` that may be chosen, and with which its directives can be obeyed."""
    component = problem.components[number]
    demanded = problem.demanded(component.name)
    return tuple(index for index in problem.usable(component) if _obeys(component.variants[index], demanded))


def _obeys(variant: Variant, demanded: frozenset[Placement]) -> bool:
    return variant.device != "cpu" or (variant.backing_store != "disk" and not demanded & {"keep", "whole"})


def _groups(problem: Problem, number: int, variant_choice: VariantChoice) -> Iterator[Group]:
    component, variant = problem.components[variant_choice.component], variant_choice.of
    for index, streamable in enumerate(streamable_groups(component, variant_choice.variant) if variant_choice.computes else ()):
        nbytes = variant.block_bytes[index]
        yield Group(
            variant_choice=number,
            component=variant_choice.component,
            index=index,
            count=len(component.groups[index].blocks),
            block_bytes=nbytes,
            held_bytes=round_up(nbytes, ALLOCATION_BYTES),
            load_seconds=variant.load_seconds[index],
            disk_seconds=variant.disk_seconds[index] if variant.backing_store == "disk" and variant.disk_seconds else 0.0,
            streamable=streamable,
            movable=variant.movable,
            demanded=problem.demanded(component.name),
            stretch=_stretch(component, index),
            by_layer=component.granularity == "layers",
            excluded=component.groups[index].streamable and "exclude" in problem.demanded(component.name),
        )


def _stretch(component: ComponentNumbers, index: int) -> str:
    """Classes of blocks pass one after another; those of layers alternate within one child of their component."""
    return component.groups[index].blocks[0].split(".")[0] if component.granularity == "layers" else f"{index}"


def _intervals(
    problem: Problem, variant_choices: Sequence[VariantChoice], groups: Sequence[Group], number: int, weight: float
) -> Iterator[Interval]:
    """The slots of phase ``number``: load where it uses anything, first, rest where there are further calls."""
    phase = problem.phases[number]
    names = [component.name for component in problem.components]
    uses = {names.index(use.component): use for use in phase.uses}
    components = problem.components
    computed = [
        use_with(uses[w.component], components[w.component], w.of) if w.component in uses else None for w in variant_choices
    ]
    found = [computed[group.variant_choice] for group in groups]
    seconds = tuple(use.seconds[group.index] if use else 0.0 for use, group in zip(found, groups, strict=True))
    passes = tuple(use.passes_of(group.index) if use else 1 for use, group in zip(found, groups, strict=True))
    values = problem.value_bytes(number) + phase.live_in_bytes
    parts: tuple[tuple[Part, int, int], ...] = (
        ("load", 0, 0),
        ("first", 1, phase.first_bytes),
        ("steady", phase.steady_calls, phase.steady_bytes),
    )
    for part, rounds, activation in parts:
        if rounds or (part == "load" and phase.uses):
            calls = tuple(use.group_calls_in(part)[group.index] if use else 0 for use, group in zip(found, groups, strict=True))
            used = frozenset(group.component for group, n in zip(groups, calls, strict=True) if n)
            around = frozenset(uses) if part != "load" else frozenset()
            on_cpu = tuple(
                _cpu_seconds(problem, phase, variant_choice, part) if c else 0.0
                for variant_choice, c in zip(variant_choices, computed, strict=True)
            )
            rooms = tuple(room_bytes(activation, use, group.index) if use else 0 for use, group in zip(found, groups, strict=True))
            more = passes, rooms, min(activation, phase.glue_bytes)
            yield Interval(number, part, rounds, weight, values, activation, calls, seconds, used, around, on_cpu, *more)


def _cpu_seconds(problem: Problem, phase: PhaseNumbers, variant_choice: VariantChoice, part: Part) -> float:
    """Compute of ``variant_choice`` on the CPU in a slot, 0 where it computes on the device."""
    if variant_choice.computes:
        return 0.0
    component = problem.components[variant_choice.component]
    use = use_with(next(use for use in phase.uses if use.component == component.name), component, variant_choice.of)
    blocks = zip(component.groups, use.group_calls_in(part), use.seconds, strict=True)
    return sum(len(of.blocks) * calls * seconds for of, calls, seconds in blocks)


def usual_seconds(program: Program) -> float:
    """All compute and one copy of everything, each component in its first way."""
    first = [
        min(n for n, variant_choice in enumerate(program.variant_choices) if variant_choice.component == c)
        for c in {variant_choice.component for variant_choice in program.variant_choices}
    ]
    groups = [j for j, group in enumerate(program.groups) if group.variant_choice in first]
    compute = sum(program.compute_seconds(t, j) for t in range(program.turn) for j in groups)
    compute += sum(interval.cpu_seconds[n] for interval in program.intervals[: program.turn] for n in first)
    copies = sum(program.groups[j].count * (program.groups[j].load_seconds + program.groups[j].disk_seconds) for j in groups)
    return compute + copies
