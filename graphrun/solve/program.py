"""Exact integer program behind a plan: its variables, its constraints, and what they cost in seconds and bytes. Uses no solver.

Exactly one variant of each component is chosen (y = 1). Block groups exist per variant that computes on the device. Variables per
slot t and block group j: K blocks present at the start of the slot, d blocks loaded during it. Constants: n calls of the group's
blocks in the slot, nb blocks in the group, b bytes of one block. x: blocks copied to the device during the slot.

    unused      any K + d <= nb                                      x = d        prefetch for a later slot
    used        K = nb, d = 0             not streamable             x = 0
    used        K + d + nb*s >= nb        first:  x = nb - K         s = 1: the remaining blocks are streamed through the ring
                                          steady: x = n*(nb - K), d = 0 for all groups of the component
    ring        >= L + M                  L >= b*s: the largest streamed block; M >= b*s - b*r: a second block of every group,
                                          unless r = 1: single-buffered, copies and compute of the group alternate
    layers      s = 1, L >= (b - room)*s where every streamed group has r = 1; K and d are rounded to integers at the end; a layer
                that runs p times in a call has x = n*p*(nb - K) - (p - 1)*d; within one child module of the component, copies of
                one group overlap compute of the others
    next slot   K' <= K + d               eviction costs nothing; immovable: K' = K + d;  K = 0 in the first slot
    session     first run, then a further one: it starts with K <= K + d at the end of either run, and counts R - 1 times
    directives  keep     s = 0 in its first slot, K = nb in later ones       exclude  K = d = 0 where streamable
                whole    s = 0 where used         drop     K = 0 in load slots, K = d = 0 in phases of other components
    backing store        read in one slot at most; x = 0 before that, and after it was dropped; of a component that computes on the
                         CPU: read before the component is entered
    spill       of a value over a gap: out in the load slot of the gap's first phase, back in that of the phase after the gap
    time        D >= sum over used groups j of max(compute of j, copies of j, and where r = 1: compute of j + copies of j)
                     + compute on the CPU
                D >= load_seconds*x summed over all j + spills     D >= disk_seconds*x summed over all j + reads
    memory      sum b*(K + d) + rings + activation + values + live_in_bytes <= effective budget
                backing stores and spilled values <= RAM, and page-locked RAM

x follows from K and d, so it is not a variable. A single-buffered ring pays off where copies take much longer than compute: the
saved bytes hold one more block, which then need not be copied. It is also used where memory does not allow more.
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
class VariantChoice:
    """A component in one of its variants. ``component``, ``index``: positions in the problem and among the component's variants.

    ``read_seconds``: time to read the whole backing store from disk, None where no plan action reads it. ``used``: whether any
    phase enters the component; a component that no phase enters takes no memory.
    """

    component: int
    index: int
    variant: Variant
    read_seconds: float | None
    used: bool

    @property
    def computes(self) -> bool:
        """Whether the component computes on the device, not on the CPU."""
        return self.variant.device != "cpu"


@dataclass(frozen=True, slots=True)
class Group:
    """A block group of one variant. ``variant_choice``: index of its `VariantChoice`; ``index``: the group's index in its
    component.

    ``block_bytes``: weights of one block; ``held_bytes``: the device allocation for them, rounded up to `ALLOCATION_BYTES`.
    ``load_seconds``, ``disk_seconds``: of one block. ``demanded``: what directives demand of the component. ``overlap_key``: copies
    of a group overlap compute of all groups of the variant with the same key. ``by_layer``: its blocks are layers. ``excluded``:
    the directive `exclude` applies to its blocks; they must be off the device even if this variant cannot stream them.
    """

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
    overlap_key: str = ""
    by_layer: bool = False
    excluded: bool = False


@dataclass(frozen=True, slots=True)
class SpillGap:
    """A period in which a value is on the device but not read: it may be spilled in load interval ``out`` and restored in load
    interval ``back``. ``value``: its index in the problem; seconds of the copy in each direction.

        phases    encode   | denoise | decode         embeds: read, not read, read
        embeds    ########   spill..restore ######
    """

    value: int
    nbytes: int
    out: int
    back: int
    out_seconds: float
    back_seconds: float

    def absent(self, t: int) -> bool:
        """Whether the value, if spilled, is off the device during all of interval ``t``."""
        return self.out < t < self.back

    def seconds(self, t: int) -> float:
        """Seconds that the spill adds to the copies of interval ``t``."""
        return self.out_seconds if t == self.out else self.back_seconds if t == self.back else 0.0


@dataclass(frozen=True, slots=True)
class Interval:
    """A slot of the problem, of the first run or of a session's further runs.

    ``rounds``: calls of the phase's components in the slot; ``weight``: how many times the slot is executed in all runs.
    Per group j: ``calls[j]``; ``seconds[j]``, compute of one block in one call; ``passes[j]``, how often a block runs in a call;
    ``rooms[j]``, bytes of the phase's activation that are not allocated while a block runs. ``cpu_seconds`` per variant choice.
    ``used``: components that compute on the device in the slot; ``entered``: all components of its phase, none in a load slot.
    ``fixed_bytes``: values and live_in_bytes; ``activation_bytes``: the phase's own, before any variant's scratch; ``glue_bytes``
    of them remain where every component of the phase computes on the CPU.
    """

    phase: int
    part: Part
    rounds: int
    weight: float
    fixed_bytes: int
    activation_bytes: int
    calls: tuple[int, ...]
    seconds: tuple[float, ...]
    used: frozenset[int]
    entered: frozenset[int]
    cpu_seconds: tuple[float, ...]
    passes: tuple[int, ...] = ()
    rooms: tuple[int, ...] = ()
    glue_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """Integers of a solution, for a program with one variant per component.

    ``present[t][j]``, ``loaded[t][j]``: K and d per interval and group. ``reads``, ``drops``: the interval in which each
    component's backing store is read and dropped, -1: never. ``spills``: which gaps are used. ``depths[t][j]``: number of blocks
    that the ring holds at once where group j is streamed, 1: single-buffered; empty: `DEPTH` everywhere.
    """

    present: tuple[tuple[int, ...], ...]
    loaded: tuple[tuple[int, ...], ...]
    reads: tuple[int, ...] = ()
    drops: tuple[int, ...] = ()
    spills: tuple[bool, ...] = ()
    depths: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """A problem as variant choices, block groups and intervals. The end slot is not an interval, because it only evicts.

    In a session, the intervals of a further run follow those of the first run, from index ``run_length`` on. Methods that take a
    `Choice` need a program with one variant per component, as `with_variants` returns it.
    """

    problem: Problem
    variant_choices: tuple[VariantChoice, ...]
    groups: tuple[Group, ...]
    intervals: tuple[Interval, ...]
    spill_gaps: tuple[SpillGap, ...]
    run_length: int

    @property
    def session(self) -> bool:
        """Whether further runs follow the first."""
        return self.run_length < len(self.intervals)

    def copied_blocks(self, t: int, j: int, present: int, loaded: int) -> int:
        """x: blocks of group ``j`` copied to the device in interval ``t``; a block that is copied again counts again."""
        calls, group = self.intervals[t].calls[j], self.groups[j]
        passes = self.intervals[t].passes[j]
        return calls * passes * (group.count - present) - (passes - 1) * loaded if calls else loaded

    def compute_seconds(self, t: int, j: int) -> float:
        """Compute of group ``j`` in interval ``t``."""
        return self.intervals[t].calls[j] * self.groups[j].count * self.intervals[t].seconds[j]

    def slot_seconds(self, choice: Choice, factors: Sequence[float] = (), *, full_overlap: bool = False) -> tuple[float, ...]:
        """D per interval, executed once. ``factors[t]``, where given, multiplies the copy times of interval t. ``full_overlap``: as
        if every copy overlapped all compute of its slot, a lower bound."""
        found = []
        for t, interval in enumerate(self.intervals):
            factor = factors[t] if factors else 1.0
            blocks = [
                self.copied_blocks(t, j, k, d) for j, (k, d) in enumerate(zip(choice.present[t], choice.loaded[t], strict=True))
            ]
            copies = [factor * group.load_seconds * moved for group, moved in zip(self.groups, blocks, strict=True)]
            disk_reads = [factor * group.disk_seconds * moved for group, moved in zip(self.groups, blocks, strict=True)]
            overlap_sets = self.overlap_sets(t)
            serial = [
                self.compute_seconds(t, j) if not full_overlap and self._single_buffered(choice, t, j) else 0.0
                for j in range(len(self.groups))
            ]
            own = sum(
                max(
                    sum(self.compute_seconds(t, j) for j in of),
                    sum(copies[j] + serial[j] for j in of),
                    sum(disk_reads[j] for j in of),
                )
                for of in ([[j for of in overlap_sets for j in of]] if full_overlap else overlap_sets)
            )
            spills = sum(gap.seconds(t) for gap, out in zip(self.spill_gaps, choice.spills, strict=False) if out)
            reads = sum(
                variant_choice.read_seconds or 0.0
                for variant_choice, at in zip(self.variant_choices, choice.reads, strict=False)
                if at == t
            )
            found.append(max(own + sum(interval.cpu_seconds), sum(copies) + factor * spills, sum(disk_reads) + factor * reads))
        return tuple(found)

    def overlap_sets(self, t: int) -> list[list[int]]:
        """Groups that interval ``t`` computes with, in lists within which copies of one group overlap compute of another."""
        found: dict[tuple[int, str], list[int]] = {}
        for j, calls in enumerate(self.intervals[t].calls):
            if calls:
                found.setdefault((self.groups[j].variant_choice, self.groups[j].overlap_key), []).append(j)
        return list(found.values())

    def _single_buffered(self, choice: Choice, t: int, j: int) -> bool:
        """Whether group ``j`` is streamed and its ring has no space for a block beside the largest: copies and compute
        alternate."""
        if not self._streamed_count(choice, t, j):
            return False
        component, groups = self.groups[j].component, enumerate(self.groups)
        largest = max(
            group.held_bytes for i, group in groups if group.component == component and self._streamed_count(choice, t, i)
        )
        return self.ring_bytes(choice, t, component) < largest + self.groups[j].held_bytes

    def seconds(self, choice: Choice, factors: Sequence[float] = (), *, full_overlap: bool = False) -> float:
        """Seconds of all runs together; arguments as in `slot_seconds`."""
        slots = self.slot_seconds(choice, factors, full_overlap=full_overlap)
        return sum(i.weight * seconds for i, seconds in zip(self.intervals, slots, strict=True))

    def moved_bytes(self, choice: Choice) -> int:
        """Bytes copied to the device in all runs: blocks, streamed ones each time they are copied, and restored values."""
        restored = sum(
            int(self.intervals[g.back].weight) * g.nbytes for g, out in zip(self.spill_gaps, choice.spills, strict=False) if out
        )
        return restored + sum(
            int(interval.weight) * group.block_bytes * self.copied_blocks(t, j, choice.present[t][j], choice.loaded[t][j])
            for t, interval in enumerate(self.intervals)
            for j, group in enumerate(self.groups)
        )

    def _streamed_count(self, choice: Choice, t: int, j: int) -> int:
        """Blocks of group ``j`` that are streamed in interval ``t``."""
        return self.groups[j].count - choice.present[t][j] - choice.loaded[t][j] if self.intervals[t].calls[j] else 0

    def streams(self, choice: Choice, t: int, component: int) -> bool:
        """Whether any block of ``component`` is streamed in interval ``t``."""
        return any(group.component == component and self._streamed_count(choice, t, j) for j, group in enumerate(self.groups))

    def ring_bytes(self, choice: Choice, t: int, component: int) -> int:
        """Size of the ring of ``component`` in interval ``t``: its largest streamed block, and the other blocks it holds beside
        it."""
        passing = [j for j, group in enumerate(self.groups) if group.component == component and self._streamed_count(choice, t, j)]
        depths = choice.depths[t] if choice.depths else (DEPTH,) * len(self.groups)
        beside = max(((depths[j] - 1) * self.groups[j].held_bytes for j in passing), default=0)
        return max((self.ring_share_bytes(t, j, beside > 0) for j in passing), default=0) + beside

    def ring_share_bytes(self, t: int, j: int, deep: bool) -> int:
        """Bytes that the ring needs for the largest block of group ``j``. In a ring for one block (``deep`` False), part of
        it may use activation bytes that are not allocated while the block runs."""
        room = 0 if deep else self.intervals[t].rooms[j] // ALLOCATION_BYTES * ALLOCATION_BYTES
        return max(0, self.groups[j].held_bytes - room)

    def device_bytes(self, choice: Choice) -> tuple[int, ...]:
        """Peak bytes on the device per interval."""
        found = []
        for t, interval in enumerate(self.intervals):
            held = sum(c.held_bytes * (choice.present[t][j] + choice.loaded[t][j]) for j, c in enumerate(self.groups))
            rings = sum(self.ring_bytes(choice, t, component) for component in interval.used)
            spilled = sum(g.nbytes for g, out in zip(self.spill_gaps, choice.spills, strict=False) if out and g.absent(t))
            found.append(interval.fixed_bytes - spilled + self.activation_bytes(t) + held + rings)
        return tuple(found)

    def activation_bytes(self, t: int) -> int:
        """Bytes of activation on the device in interval ``t``, scratch of the variants included."""
        interval = self.intervals[t]
        variants = [
            variant_choice.variant for variant_choice in self.variant_choices if variant_choice.component in interval.entered
        ]
        return activation_bytes(interval.activation_bytes, variants, interval.glue_bytes) if interval.rounds else 0

    def excess_bytes(self, choice: Choice) -> tuple[int, ...]:
        """Bytes above the effective budget per interval, exact; negative: headroom."""
        return tuple(nbytes - self.problem.effective_bytes for nbytes in self.device_bytes(choice))

    def host_bytes(self, choice: Choice) -> tuple[tuple[int, int], ...]:
        """Per interval: bytes of RAM, and how many of them are page-locked."""
        found = []
        for t, interval in enumerate(self.intervals):
            ram = locked = 0
            for variant_choice, read, drop in zip(self.variant_choices, choice.reads, choice.drops, strict=True):
                if not variant_choice.used:
                    continue
                if (variant_choice.read_seconds is None or 0 <= read <= t) and not 0 <= drop <= t:
                    ram, locked = ram + variant_choice.variant.host_bytes, locked + variant_choice.variant.locked_bytes
                ram += variant_choice.variant.transient_bytes if read == t else 0
            ram += sum(g.nbytes for g, out in zip(self.spill_gaps, choice.spills, strict=True) if out and g.out <= t <= g.back)
            if (
                interval.rounds
                and interval.entered
                and not any(w.computes for w in self.variant_choices if w.component in interval.entered)
            ):
                ram += interval.activation_bytes
            found.append((ram, locked))
        return tuple(found)

    def last_need(self, choice: Choice) -> tuple[int, ...]:
        """Per component: the last interval that copies from its backing store or computes with it on the CPU; -1: none does."""
        found = []
        for variant_choice in self.variant_choices:
            groups = [j for j, group in enumerate(self.groups) if group.component == variant_choice.component]
            found.append(
                max(
                    (
                        t
                        for t, interval in enumerate(self.intervals)
                        if any(self.copied_blocks(t, j, choice.present[t][j], choice.loaded[t][j]) for j in groups)
                        or (not variant_choice.computes and variant_choice.component in interval.entered)
                    ),
                    default=-1,
                )
            )
        return tuple(found)

    def with_variants(self, variants: Sequence[int]) -> Program:
        """The program with one variant per component, given by index."""
        return program_of(self.problem, tuple((variant,) for variant in variants))


# ---- Building a program


def program_of(problem: Problem, variants: Sequence[Sequence[int]] | None = None) -> Program:
    """Program of ``problem``, whose stage order and options are already applied. ``variants``: indices of the variants to choose
    from, per component; None: all usable ones."""
    used = {component.name for component in used_components(problem)}
    variant_choices: list[VariantChoice] = []
    for number, component in enumerate(problem.components):
        for index in variants[number] if variants is not None else usable(problem, number):
            variant = component.variants[index]
            blocks = zip(component.groups, variant.read_seconds, strict=False)
            read = sum(len(of.blocks) * seconds for of, seconds in blocks) if variant.read_seconds else None
            variant_choices.append(VariantChoice(number, index, variant, read, component.name in used))
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
    run_length = len(intervals) // len(weights)
    loads = {interval.phase: t for t, interval in enumerate(intervals[:run_length]) if interval.part == "load"}
    return Program(
        problem, tuple(variant_choices), groups, intervals, spill_gaps_of(problem, loads, run_length, len(intervals)), run_length
    )


def usable(problem: Problem, number: int) -> tuple[int, ...]:
    """Indices of the variants of component ``number`` that are allowed and compatible with its directives."""
    component = problem.components[number]
    demanded = problem.demanded(component.name)
    return tuple(index for index in problem.usable(component) if _obeys(component.variants[index], demanded))


def _obeys(variant: Variant, demanded: frozenset[Placement]) -> bool:
    return variant.device != "cpu" or (variant.backing_store != "disk" and not demanded & {"keep", "whole"})


def _groups(problem: Problem, number: int, variant_choice: VariantChoice) -> Iterator[Group]:
    component, variant = problem.components[variant_choice.component], variant_choice.variant
    for index, streamable in enumerate(streamable_groups(component, variant_choice.index) if variant_choice.computes else ()):
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
            overlap_key=_overlap_key(component, index),
            by_layer=component.granularity == "layers",
            excluded=component.groups[index].streamable and "exclude" in problem.demanded(component.name),
        )


def _overlap_key(component: ComponentNumbers, index: int) -> str:
    """Block groups run one after another, so each overlaps only itself. Groups of layers alternate within one child module."""
    return component.groups[index].blocks[0].split(".")[0] if component.granularity == "layers" else f"{index}"


def _intervals(
    problem: Problem, variant_choices: Sequence[VariantChoice], groups: Sequence[Group], number: int, weight: float
) -> Iterator[Interval]:
    """Intervals of phase ``number``: load where the phase uses a component, first, and steady where there are further calls."""
    phase = problem.phases[number]
    names = [component.name for component in problem.components]
    uses = {names.index(use.component): use for use in phase.uses}
    components = problem.components
    computed = [
        use_with(uses[w.component], components[w.component], w.variant) if w.component in uses else None for w in variant_choices
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
            entered = frozenset(uses) if part != "load" else frozenset()
            on_cpu = tuple(
                _cpu_seconds(problem, phase, variant_choice, part) if c else 0.0
                for variant_choice, c in zip(variant_choices, computed, strict=True)
            )
            rooms = tuple(room_bytes(activation, use, group.index) if use else 0 for use, group in zip(found, groups, strict=True))
            more = passes, rooms, min(activation, phase.glue_bytes)
            yield Interval(number, part, rounds, weight, values, activation, calls, seconds, used, entered, on_cpu, *more)


def _cpu_seconds(problem: Problem, phase: PhaseNumbers, variant_choice: VariantChoice, part: Part) -> float:
    """Seconds of compute on the CPU in a slot; 0 where the component computes on the device."""
    if variant_choice.computes:
        return 0.0
    component = problem.components[variant_choice.component]
    use = use_with(next(use for use in phase.uses if use.component == component.name), component, variant_choice.variant)
    blocks = zip(component.groups, use.group_calls_in(part), use.seconds, strict=True)
    return sum(len(of.blocks) * calls * seconds for of, calls, seconds in blocks)


def spill_gaps_of(problem: Problem, loads: Mapping[int, int], run_length: int, count: int) -> tuple[SpillGap, ...]:
    """All spill gaps of all values, in each run: consecutive phases in which the value is on the device and no stage reads it. A
    gap counts only where both its first phase and the phase after it have a load slot.

    ``loads``: phase -> its load interval in the first run; ``count``: number of intervals, ``run_length`` of them per run.
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
    d2h, h2d = problem.hardware.d2h_bytes_per_second, problem.hardware.h2d_bytes_per_second
    return tuple(
        SpillGap(number, nbytes, out + shift, back + shift, nbytes / d2h, nbytes / h2d)
        for shift in range(0, count, max(run_length, 1))
        for number, nbytes, out, back in found
    )


def reference_seconds(program: Program) -> float:
    """Seconds of all compute of one run and one copy of every block, each component in its first variant: the unit of time in the
    solver's scaling."""
    first = [
        min(n for n, variant_choice in enumerate(program.variant_choices) if variant_choice.component == c)
        for c in {variant_choice.component for variant_choice in program.variant_choices}
    ]
    groups = [j for j, group in enumerate(program.groups) if group.variant_choice in first]
    compute = sum(program.compute_seconds(t, j) for t in range(program.run_length) for j in groups)
    compute += sum(interval.cpu_seconds[n] for interval in program.intervals[: program.run_length] for n in first)
    copies = sum(program.groups[j].count * (program.groups[j].load_seconds + program.groups[j].disk_seconds) for j in groups)
    return compute + copies
