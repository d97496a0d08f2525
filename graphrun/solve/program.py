"""The integer program behind a plan: its variables, its constraints, and what they cost in seconds and bytes.

This module states the program and computes the cost of given integers. `graphrun.solve.milp` solves it.

Variables of slot t and block group j. Each variant that computes on the device has block groups of its own.

    y     1 for the chosen variant of a component; exactly one is chosen
    K     blocks on the device at the start of the slot
    d     blocks loaded during the slot; they stay on the device
    s     1 if blocks of the group are streamed through the ring in the slot
    r     1 if the group is single-buffered: the ring has no room for one of its blocks beside the largest, so its copies and its
          compute alternate
    L, M  bytes of the component's ring: for the largest streamed block, and beside it
    D     seconds of the slot

Constants:

    n     calls in the slot that run the group's blocks       p     times that a layer runs in one call
    nb    blocks in the group                                 R     runs of the session
    b     device bytes of one block                           room  bytes of activation that are unused while a layer runs

x stands for the blocks copied to the device during the slot. It follows from K and d, so it is not a variable.

    group that the slot does not run        any K + d <= nb                    x = d: loaded for a later slot (prefetch)
    group that it runs, not streamable      K = nb, d = 0                      x = 0
    group that it runs, streamable          K + d + nb*s >= nb: the remaining blocks are streamed, so s = 1 unless K + d = nb
                                            first slot:  x = nb - K
                                            steady slot: x = n*(nb - K), and d = 0 for all groups of the component

    ring            bytes >= L + M     L >= b*s     M >= b*s - b*r: room for a second block of each group, except where r = 1
    layers          s = 1 takes L >= (b - room)*s where every streamed group has r = 1. x = n*p*(nb - K) - (p - 1)*d. K and d are
                    rounded to integers at the end
    next slot       K' <= K + d: eviction costs nothing. K' = K + d if the variant is not movable. K = 0 in the first slot
    session         the slots of the first run, then those of one further run, whose seconds count R - 1 times. The further run
                    starts with K <= K + d of the first run's last slot, and with K <= K + d of its own last slot
    directives      keep     s = 0 in the first slot that uses the component, K = nb in later ones
                    exclude  K = d = 0 where the blocks can be streamed
                    whole    s = 0 in every slot that uses the component
                    drop     K = 0 in load slots, K = d = 0 in phases that do not use the component
    backing store   read from disk in at most one slot; x = 0 before that slot, and after the store was dropped. If the component
                    computes on the CPU, the store is read before the component is entered
    spill           a value is copied to the host in the load slot of the first phase of a gap, and back in the load slot of the
                    phase after the gap
    time            D >= the sum over overlap sets of max(compute, copies + compute of the groups with r = 1, reads from disk)
                         + compute on the CPU. An overlap set is one block group, or all groups of layers in one child module:
                         copies of one group in the set overlap compute of the others
                    D >= load_seconds*x summed over all j + spills     D >= disk_seconds*x summed over all j + reads
    memory          sum b*(K + d) + rings + activation + values + live_in_bytes <= effective budget
                    backing stores and spilled values <= RAM; page-locked ones <= page-locked RAM

A single-buffered ring is faster where copies take much longer than compute: the bytes that it saves hold one more resident block,
which then need not be copied. It is also used where memory does not allow more.
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
    """A variant that may be chosen for a component; y = 1 if it is.

    ``component``: index of the component in the problem. ``index``: index of the variant in the component. ``read_seconds``:
    time to read the whole backing store from disk; None where a plan has no `Read` action for it. ``used``: whether any phase
    calls the component; one that no phase calls takes no memory."""

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
    """A block group of one variant.

    ``variant_choice``, ``component``: indices in `Program.variant_choices` and in the problem. ``index``: index of the group
    in its component. ``count``: number of blocks. ``block_bytes``: weights of one block; ``held_bytes``: the device allocation
    for them, rounded up to `ALLOCATION_BYTES`. ``load_seconds``: to copy one block to the device; ``disk_seconds``: to read
    one block from disk for that copy, 0 if the backing store is not on disk. ``movable``: as in `Variant`. ``demanded``:
    placements that directives demand of the component. ``overlap_key``: groups of the variant with equal keys form one overlap
    set. ``by_layer``: the blocks are layers. ``excluded``: the directive `exclude` applies: the blocks must be off the device,
    even if this variant cannot stream them."""

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
    """Consecutive phases in which a value is on the device but not read. It may be spilled to the host for that time.

    ``value``: index of the value in the problem. ``out``, ``back``: indices of the intervals (load slots) that spill and restore
    it. ``out_seconds``, ``back_seconds``: of the two copies.

        phases        encode | denoise          | decode
        the value     made   | not read         | read
        load slot            | spill (``out``)  | restore (``back``)
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
    """A slot t of the program, before it has actions. In a session: a slot of the first run, or of the one further run.

    ``rounds``: calls in the slot of the component that is called most. ``weight``: number of runs that execute the slot. For
    each group j: ``calls[j]`` (n), calls that run its blocks; ``seconds[j]``, compute of one block in one call; ``passes[j]``
    (p), how often a block runs in one call; ``rooms[j]``, bytes of the phase's activation that are not allocated while a block
    runs. ``cpu_seconds``: compute on the CPU, for each variant choice. ``used``: components (indices) that compute on the
    device in the slot. ``entered``: all components of the phase; none in a load slot. ``fixed_bytes``: values and live-in
    bytes. ``activation_bytes``: as traced, without the scratch of variants; ``glue_bytes`` of them remain on the device if
    every component of the phase computes on the CPU."""

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
    """The integers of one solution of a program that has one variant per component.

    ``present[t][j]``, ``loaded[t][j]``: K and d. ``reads``, ``drops``: for each component, the interval in which its backing
    store is read and dropped; -1: never. ``spills``: for each spill gap, whether the value is spilled. ``depths[t][j]``: for
    how many blocks the ring has room where group j is streamed; 1: single-buffered (r = 1). Empty ``depths``: `DEPTH`
    everywhere."""

    present: tuple[tuple[int, ...], ...]
    loaded: tuple[tuple[int, ...], ...]
    reads: tuple[int, ...] = ()
    drops: tuple[int, ...] = ()
    spills: tuple[bool, ...] = ()
    depths: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """A problem as variant choices, block groups and intervals. The end slot is not an interval, because it only evicts.

    ``run_length``: number of intervals of one run. In a session, the intervals of the further run follow, from that index on.
    Methods that take a `Choice` need a program with one variant per component, as `with_variants` returns it."""

    problem: Problem
    variant_choices: tuple[VariantChoice, ...]
    groups: tuple[Group, ...]
    intervals: tuple[Interval, ...]
    spill_gaps: tuple[SpillGap, ...]
    run_length: int

    @property
    def session(self) -> bool:
        """Whether the problem is a session: a first run and further ones."""
        return self.run_length < len(self.intervals)

    def copied_blocks(self, t: int, j: int, present: int, loaded: int) -> int:
        """x: blocks of group ``j`` copied to the device in interval ``t``, for K ``present`` and d ``loaded``. A block that is
        copied several times counts as often."""
        calls, group = self.intervals[t].calls[j], self.groups[j]
        passes = self.intervals[t].passes[j]
        return calls * passes * (group.count - present) - (passes - 1) * loaded if calls else loaded

    def compute_seconds(self, t: int, j: int) -> float:
        """Seconds of compute of all blocks of group ``j`` in interval ``t``."""
        return self.intervals[t].calls[j] * self.groups[j].count * self.intervals[t].seconds[j]

    def slot_seconds(self, choice: Choice, factors: Sequence[float] = (), *, full_overlap: bool = False) -> tuple[float, ...]:
        """D of each interval when it is executed once.

        ``factors[t]`` multiplies the times of copies and disk reads in interval t; empty: 1. ``full_overlap``: as if every copy
        overlapped all compute of its slot, which gives a lower bound.
        """
        found = []
        for t, interval in enumerate(self.intervals):
            factor = factors[t] if factors else 1.0
            copied = [
                self.copied_blocks(t, j, k, d) for j, (k, d) in enumerate(zip(choice.present[t], choice.loaded[t], strict=True))
            ]
            copies = [factor * group.load_seconds * number for group, number in zip(self.groups, copied, strict=True)]
            disk_reads = [factor * group.disk_seconds * number for group, number in zip(self.groups, copied, strict=True)]
            overlap_sets = self.overlap_sets(t)
            if full_overlap:  # one set of all groups
                overlap_sets = [[j for members in overlap_sets for j in members]]
            alternating = [  # compute that no copy of the same group overlaps
                self.compute_seconds(t, j) if not full_overlap and self._single_buffered(choice, t, j) else 0.0
                for j in range(len(self.groups))
            ]
            device_seconds = sum(
                max(
                    sum(self.compute_seconds(t, j) for j in members),
                    sum(copies[j] + alternating[j] for j in members),
                    sum(disk_reads[j] for j in members),
                )
                for members in overlap_sets
            )
            spills = sum(gap.seconds(t) for gap, spilled in zip(self.spill_gaps, choice.spills, strict=False) if spilled)
            reads = sum(
                variant_choice.read_seconds or 0.0
                for variant_choice, read_in in zip(self.variant_choices, choice.reads, strict=False)
                if read_in == t
            )
            compute = device_seconds + sum(interval.cpu_seconds)
            found.append(max(compute, sum(copies) + factor * spills, sum(disk_reads) + factor * reads))
        return tuple(found)

    def overlap_sets(self, t: int) -> list[list[int]]:
        """The groups that interval ``t`` runs, as overlap sets: copies of one group overlap compute of all groups in its set."""
        found: dict[tuple[int, str], list[int]] = {}
        for j, calls in enumerate(self.intervals[t].calls):
            if calls:
                found.setdefault((self.groups[j].variant_choice, self.groups[j].overlap_key), []).append(j)
        return list(found.values())

    def _single_buffered(self, choice: Choice, t: int, j: int) -> bool:
        """Whether group ``j`` is streamed, and the ring has no room for one of its blocks beside the largest block (r = 1)."""
        if not self._streamed_count(choice, t, j):
            return False
        component = self.groups[j].component
        largest = max(self.groups[i].held_bytes for i in self._streamed_groups(choice, t, component))
        return self.ring_bytes(choice, t, component) < largest + self.groups[j].held_bytes

    def seconds(self, choice: Choice, factors: Sequence[float] = (), *, full_overlap: bool = False) -> float:
        """Seconds of all runs together; arguments as in `slot_seconds`."""
        slots = self.slot_seconds(choice, factors, full_overlap=full_overlap)
        return sum(interval.weight * seconds for interval, seconds in zip(self.intervals, slots, strict=True))

    def moved_bytes(self, choice: Choice) -> int:
        """Bytes copied to the device in all runs: blocks, streamed ones each time they are copied, and restored values."""
        restored = sum(
            int(self.intervals[gap.back].weight) * gap.nbytes
            for gap, spilled in zip(self.spill_gaps, choice.spills, strict=False)
            if spilled
        )
        return restored + sum(
            int(interval.weight) * group.block_bytes * self.copied_blocks(t, j, choice.present[t][j], choice.loaded[t][j])
            for t, interval in enumerate(self.intervals)
            for j, group in enumerate(self.groups)
        )

    def _streamed_count(self, choice: Choice, t: int, j: int) -> int:
        """Blocks of group ``j`` that are streamed in interval ``t``."""
        return self.groups[j].count - choice.present[t][j] - choice.loaded[t][j] if self.intervals[t].calls[j] else 0

    def _streamed_groups(self, choice: Choice, t: int, component: int) -> list[int]:
        """The groups of ``component`` of which a block is streamed in interval ``t``."""
        return [j for j, group in enumerate(self.groups) if group.component == component and self._streamed_count(choice, t, j)]

    def streams(self, choice: Choice, t: int, component: int) -> bool:
        """Whether any block of ``component`` is streamed in interval ``t``."""
        return bool(self._streamed_groups(choice, t, component))

    def ring_bytes(self, choice: Choice, t: int, component: int) -> int:
        """L + M: bytes of the ring of ``component`` in interval ``t``. It has room for the largest streamed block, and beside
        it for the further blocks that `Choice.depths` says."""
        streamed = self._streamed_groups(choice, t, component)
        depths = choice.depths[t] if choice.depths else (DEPTH,) * len(self.groups)
        beside = max(((depths[j] - 1) * self.groups[j].held_bytes for j in streamed), default=0)
        return max((self.ring_share_bytes(t, j, beside > 0) for j in streamed), default=0) + beside

    def ring_share_bytes(self, t: int, j: int, deep: bool) -> int:
        """Bytes of the ring that one block of group ``j`` takes. ``deep``: the ring has room for several blocks. In a ring for one,
        part of the block may lie in activation bytes that are not allocated while it runs (`Interval.rooms`)."""
        room = 0 if deep else self.intervals[t].rooms[j] // ALLOCATION_BYTES * ALLOCATION_BYTES
        return max(0, self.groups[j].held_bytes - room)

    def device_bytes(self, choice: Choice) -> tuple[int, ...]:
        """Peak bytes on the device per interval."""
        found = []
        for t, interval in enumerate(self.intervals):
            weights = sum(group.held_bytes * (choice.present[t][j] + choice.loaded[t][j]) for j, group in enumerate(self.groups))
            rings = sum(self.ring_bytes(choice, t, component) for component in interval.used)
            gaps = zip(self.spill_gaps, choice.spills, strict=False)
            absent = sum(gap.nbytes for gap, spilled in gaps if spilled and gap.absent(t))
            found.append(interval.fixed_bytes - absent + self.activation_bytes(t) + weights + rings)
        return tuple(found)

    def activation_bytes(self, t: int) -> int:
        """Bytes of activation on the device in interval ``t``, with the scratch of the variants; 0 in a load slot."""
        interval = self.intervals[t]
        variants = [
            variant_choice.variant for variant_choice in self.variant_choices if variant_choice.component in interval.entered
        ]
        return activation_bytes(interval.activation_bytes, variants, interval.glue_bytes) if interval.rounds else 0

    def excess_bytes(self, choice: Choice) -> tuple[int, ...]:
        """For each interval, the exact number of bytes above the effective budget; negative where it has headroom."""
        return tuple(nbytes - self.problem.effective_bytes for nbytes in self.device_bytes(choice))

    def host_bytes(self, choice: Choice) -> tuple[tuple[int, int], ...]:
        """For each interval: bytes of RAM in backing stores, spilled values and activation on the CPU, and how many of them are
        page-locked."""
        found = []
        for t, interval in enumerate(self.intervals):
            ram = locked = 0
            for variant_choice, read, drop in zip(self.variant_choices, choice.reads, choice.drops, strict=True):
                if not variant_choice.used:
                    continue
                if (variant_choice.read_seconds is None or 0 <= read <= t) and not 0 <= drop <= t:
                    ram, locked = ram + variant_choice.variant.host_bytes, locked + variant_choice.variant.locked_bytes
                ram += variant_choice.variant.transient_bytes if read == t else 0
            gaps = zip(self.spill_gaps, choice.spills, strict=True)
            ram += sum(gap.nbytes for gap, spilled in gaps if spilled and gap.out <= t <= gap.back)
            entered = [of for of in self.variant_choices if of.component in interval.entered]
            if interval.rounds and interval.entered and not any(of.computes for of in entered):
                ram += interval.activation_bytes  # all components of the phase compute on the CPU
            found.append((ram, locked))
        return tuple(found)

    def last_need(self, choice: Choice) -> tuple[int, ...]:
        """For each component: the last interval that copies from its backing store or computes with it on the CPU; -1: none
        does."""
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
        """The program in which each component has one variant only: the one at this index."""
        return program_of(self.problem, tuple((variant,) for variant in variants))


# ---- Building a program


def program_of(problem: Problem, variants: Sequence[Sequence[int]] | None = None) -> Program:
    """The program of ``problem``, whose stage order and options are already applied.

    ``variants``: for each component, indices of the variants that may be chosen; None: all usable ones.
    """
    used = {component.name for component in used_components(problem)}
    variant_choices: list[VariantChoice] = []
    for number, component in enumerate(problem.components):
        for index in variants[number] if variants is not None else usable(problem, number):
            variant = component.variants[index]
            pairs = zip(component.groups, variant.read_seconds, strict=False)
            read_seconds = sum(len(group.blocks) * seconds for group, seconds in pairs) if variant.read_seconds else None
            variant_choices.append(VariantChoice(number, index, variant, read_seconds, component.name in used))
    groups = tuple(
        group for number, variant_choice in enumerate(variant_choices) for group in _groups(problem, number, variant_choice)
    )
    run_weights = (1.0, float(problem.runs - 1))[: min(2, problem.runs)]  # how many runs the first and the further one stand for
    intervals = tuple(
        interval
        for weight in run_weights
        for number in range(len(problem.phases))
        for interval in _intervals(problem, variant_choices, groups, number, weight)
    )
    run_length = len(intervals) // len(run_weights)
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
    """Whether a component with these directives may have ``variant``. One that computes on the CPU has no blocks on the device, as
    `keep` and `whole` demand, and needs its weights in RAM."""
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
    """`Group.overlap_key`. Block groups run one after another, so each is an overlap set of its own: the key is its index. Calls of
    layers in one child module alternate between groups, so these form one set: the key is the child's name."""
    return component.groups[index].blocks[0].split(".")[0] if component.granularity == "layers" else f"{index}"


def _intervals(
    problem: Problem, variant_choices: Sequence[VariantChoice], groups: Sequence[Group], number: int, weight: float
) -> Iterator[Interval]:
    """Intervals of phase ``number``: load where the phase uses a component, first, and steady where there are further calls."""
    phase = problem.phases[number]
    names = [component.name for component in problem.components]
    uses = {names.index(use.component): use for use in phase.uses}
    components = problem.components
    use_of_choice = [  # the phase's use of the component with the seconds of this variant; None if the phase does not use it
        use_with(uses[of.component], components[of.component], of.variant) if of.component in uses else None
        for of in variant_choices
    ]
    pairs = [(use_of_choice[group.variant_choice], group) for group in groups]
    seconds = tuple(use.seconds[group.index] if use else 0.0 for use, group in pairs)
    passes = tuple(use.passes_of(group.index) if use else 1 for use, group in pairs)
    fixed_bytes = problem.value_bytes(number) + phase.live_in_bytes
    parts: tuple[tuple[Part, int, int], ...] = (
        ("load", 0, 0),
        ("first", 1, phase.first_bytes),
        ("steady", phase.steady_calls, phase.steady_bytes),
    )
    for part, rounds, activation in parts:
        if rounds or (part == "load" and phase.uses):
            calls = tuple(use.group_calls_in(part)[group.index] if use else 0 for use, group in pairs)
            yield Interval(
                phase=number,
                part=part,
                rounds=rounds,
                weight=weight,
                fixed_bytes=fixed_bytes,
                activation_bytes=activation,
                calls=calls,
                seconds=seconds,
                used=frozenset(group.component for group, n in zip(groups, calls, strict=True) if n),
                entered=frozenset(uses) if part != "load" else frozenset(),
                cpu_seconds=tuple(
                    _cpu_seconds(problem, phase, variant_choice, part) if use else 0.0
                    for variant_choice, use in zip(variant_choices, use_of_choice, strict=True)
                ),
                passes=passes,
                rooms=tuple(room_bytes(activation, use, group.index) if use else 0 for use, group in pairs),
                glue_bytes=min(activation, phase.glue_bytes),
            )


def _cpu_seconds(problem: Problem, phase: PhaseNumbers, variant_choice: VariantChoice, part: Part) -> float:
    """Seconds that a component computes on the CPU in the slot ``part``; 0 if it computes on the device."""
    if variant_choice.computes:
        return 0.0
    component = problem.components[variant_choice.component]
    use = use_with(next(use for use in phase.uses if use.component == component.name), component, variant_choice.variant)
    triples = zip(component.groups, use.group_calls_in(part), use.seconds, strict=True)
    return sum(len(group.blocks) * calls * seconds for group, calls, seconds in triples)


def spill_gaps_of(problem: Problem, loads: Mapping[int, int], run_length: int, count: int) -> tuple[SpillGap, ...]:
    """All spill gaps of all values, in each run (see `SpillGap`). Only gaps whose first phase and following phase both have a load
    slot are returned.

    ``loads``: index of a phase -> index of its load slot in the first run. ``count``: number of intervals of the program,
    ``run_length`` of them in each run.
    """
    found = []
    for number, value in enumerate(problem.values):
        if not value.nbytes:
            continue
        start = None  # first phase of the gap that ``phase`` is in
        for phase in range(value.first_phase, min(value.last_phase + 1, len(problem.phases))):
            if problem.phases[phase].stage not in (*value.consumers, value.producer):
                start = phase if start is None else start
                continue
            if start is not None and start in loads and phase in loads:
                found.append((number, value.nbytes, loads[start], loads[phase]))
            start = None
    d2h, h2d = problem.hardware.d2h_bytes_per_second, problem.hardware.h2d_bytes_per_second
    return tuple(
        SpillGap(number, nbytes, run_start + out, run_start + back, nbytes / d2h, nbytes / h2d)
        for run_start in range(0, count, max(run_length, 1))
        for number, nbytes, out, back in found
    )


def reference_seconds(program: Program) -> float:
    """Seconds of one run's compute plus one copy of every block, each component in its first variant that may be chosen. The MILP
    scales its times by this number."""
    first = [
        min(n for n, variant_choice in enumerate(program.variant_choices) if variant_choice.component == c)
        for c in {variant_choice.component for variant_choice in program.variant_choices}
    ]
    groups = [j for j, group in enumerate(program.groups) if group.variant_choice in first]
    compute = sum(program.compute_seconds(t, j) for t in range(program.run_length) for j in groups)
    compute += sum(interval.cpu_seconds[n] for interval in program.intervals[: program.run_length] for n in first)
    copies = sum(program.groups[j].count * (program.groups[j].load_seconds + program.groups[j].disk_seconds) for j in groups)
    return compute + copies
