"""The integer program behind a plan: its variables, its constants, and its constraints.

`graphrun.solve.rows` has the constraints of seconds and bytes, `graphrun.solve.columns` the others,
and `graphrun.solve.milp` solves the program.

Terms:

    slot           A part of the run, within one phase: a load slot (no compute), a first slot (the
                   first call) or a steady slot (the further calls). Slots of the program are called
                   intervals.
    block group    Equal blocks of a component. A component may instead be split into layers, which
                   are smaller than blocks. What is said of blocks holds for layers.
    mirror group   The blocks of a group that are on one secondary device, if a component is split
                   over devices. The group itself has its blocks on the main device.
    gap            Consecutive phases in which a value is on the device, but no stage reads it.

Variables of slot t and block group j. Each variant that computes on the device has its own block
groups.

    y     1 for the chosen variant of a component; exactly one is chosen
    K     blocks on the device at the start of the slot
    d     blocks loaded during the slot; they stay on the device
    s     1 if blocks of the group are streamed through the ring buffer in the slot
    r     1 if the group is single-buffered: the ring buffer has no room for one of its blocks next
          to the largest, so its copies and its compute alternate
    L, M  bytes of the component's ring buffer: for the largest streamed block, and for a second one
    D     seconds of the slot

Constants:

    n     calls in the slot that run the group's blocks
    p     times that a layer runs in one call
    nb    blocks in the group
    b     device bytes of one block
    R     runs of the session

Constraints other than those of seconds and bytes:

    blocks          K + d <= nb
                    a group that the slot runs, not streamable: K = nb, d = 0
                    streamable: K + d + nb*s >= nb: the others are streamed, so s = 1 unless
                    K + d = nb. d = 0 in steady slots for all groups of the component
                    layers: K and d are rounded to integers at the end
    next slot       K' <= K + d: eviction costs nothing. K' = K + d if the variant is not movable.
                    K = 0 in the first slot
    session         The slots of the first run, then the slots of one further run, whose seconds
                    count R - 1 times. The further run starts with K <= K + d of the first run's
                    last slot, and with K <= K + d of its own last slot.
    directives      keep     s = 0 in the first slot that uses the component, K = nb in later ones
                    exclude  K = d = 0 where the blocks can be streamed
                    whole    s = 0 in every slot that uses the component
                    drop     K = 0 in load slots, K = d = 0 in phases that do not use the component
    backing store   Read from disk in at most one slot. x = 0 before that slot, and after the store
                    is dropped. If the component computes on the CPU, the store is read before the
                    component is called.
    spill           A value is copied to the host in the load slot of the first phase of a gap, and
                    back in the load slot of the phase after the gap.
    split           A component on a secondary device is a variant whose groups are not streamable.

A single-buffered ring buffer is faster where copies take much longer than compute: the bytes it
saves make room for one more resident block, which needs no copy. It is also used where memory does
not allow more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from graphrun.model.choices import secondary_bytes as bytes_on_secondary
from graphrun.model.choices import use_with
from graphrun.model.least_memory import streamable_groups, used_components
from graphrun.model.plan import SlotPart
from graphrun.model.problem import ALLOCATION_BYTES, ComponentPlacement, Problem, Use, Variant
from graphrun.model.splits import (
    block_seconds,
    secondaries_for,
    slowdown_of,
    transfer_seconds,
    twin,
)
from graphrun.units import round_up

HostTier = Literal["ram", "pinned"]
# A memory that may have a budget: the number of a device (0: the main device), or a host tier
Memory = int | Literal["ram", "pinned", "disk"]
HOST_TIERS: tuple[HostTier, ...] = get_args(HostTier)


@dataclass(frozen=True, slots=True)
class VariantChoice:
    """A variant that may be chosen for a component; y = 1 if it is.

    ``component``: index of the component in the problem. ``index``: index of the variant in the
    component. ``read_seconds``: time to read the whole backing store from disk; None if no `Read`
    action of a plan reads the store, because it stays on disk or is in RAM before the run.
    ``is_used``: whether any phase calls the component; without calls it takes no memory.
    """

    component: int
    index: int
    variant: Variant
    read_seconds: float | None
    is_used: bool

    @property
    def computes(self) -> bool:
        """Whether the component computes on the device or a secondary device, not on the CPU."""
        return self.variant.device != "cpu"


@dataclass(frozen=True, slots=True)
class Group:
    """A block group of one variant.

    ``variant_choice``, ``component``: indices in `Program.variant_choices` and in the problem.
    ``index``: index of the group in its component. ``count``: number of blocks. ``block_bytes``:
    weights of one block; ``held_bytes``: their device allocation, rounded up to `ALLOCATION_BYTES`.
    ``load_seconds``: to copy one block to the device. ``disk_seconds``: to read one block from disk
    for that copy; 0 if the backing store is not on disk. ``movable``: as in `Variant`.
    ``demanded``: placements that directives demand of the component. ``overlap_key``: groups of the
    variant with equal keys form one overlap set. ``by_layer``: the blocks are layers. ``excluded``:
    the directive `exclude` keeps the blocks off the device. A variant that cannot stream them is
    then infeasible. ``secondary``: number of the secondary device with these blocks; 0: the main
    device.
    ``mirror``: index of the main-device group that this group takes blocks from; -1 if none.
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
    demanded: frozenset[ComponentPlacement]
    overlap_key: str
    by_layer: bool
    excluded: bool
    secondary: int = 0
    mirror: int = -1


@dataclass(frozen=True, slots=True)
class SpillGap:
    """Consecutive phases in which a value is on the device but not read. The value may be spilled
    to the host during the gap.

    ``value``: index of the value in the problem. ``spill_slot``, ``restore_slot``: indices of the
    intervals (load slots) that spill and restore the value. ``spill_seconds``,
    ``restore_seconds``: of the two copies.

        phases        encode   | denoise          | decode
        value         produced | not read         | read
        load slot              | ``spill_slot``   | ``restore_slot``
    """

    value: int
    nbytes: int
    spill_slot: int
    restore_slot: int
    spill_seconds: float
    restore_seconds: float

    def absent(self, t: int) -> bool:
        """Whether the value, if spilled, is off the device for the whole of interval ``t``."""
        return self.spill_slot < t < self.restore_slot

    def seconds(self, t: int) -> float:
        """Return the seconds that the spill adds to the copies of interval ``t``."""
        return (
            self.spill_seconds
            if t == self.spill_slot
            else self.restore_seconds
            if t == self.restore_slot
            else 0.0
        )


@dataclass(frozen=True, slots=True)
class Interval:
    """A slot t of the program, before it has actions. In a session: a slot of the first run, or of
    the one further run.

    ``rounds``: the largest number of calls of one component in the slot; 0 in a load slot.
    ``weight``: number of runs that execute the slot.

    For each group j: ``calls[j]`` (n), calls that run its blocks. ``seconds[j]``, compute of one
    block in one call. ``passes[j]`` (p), how often a block runs in one call. ``block_seconds[j]``,
    the part of ``seconds[j]`` that the main device saves if the block is on a secondary device.

    For each variant choice: ``off_device_seconds``, seconds of compute on the CPU, or of compute on
    a secondary device and transfers to that device and back. ``secondary_bytes``, bytes beyond
    weights on each secondary device.

    ``computing_components``: indices of the components that compute on the device or a secondary
    device in the slot. ``phase_components``: all components of the phase; empty in a load slot.
    ``fixed_bytes``: bytes of values and inputs. ``activation_bytes``: as traced, without the
    scratch of variants. If no component of the phase computes on the main device, the activation
    there is only ``pipeline_code_bytes``: tensors of the op's own code and results of the calls.
    """

    phase: int
    part: SlotPart
    rounds: int
    weight: float
    fixed_bytes: int
    activation_bytes: int
    pipeline_code_bytes: int
    calls: tuple[int, ...]
    seconds: tuple[float, ...]
    passes: tuple[int, ...]
    computing_components: frozenset[int]
    phase_components: frozenset[int]
    off_device_seconds: tuple[float, ...]
    secondary_bytes: tuple[tuple[int, ...], ...] = ()
    block_seconds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """The integers of one solution of a program that has one variant per component.

    ``present[t, j]``, ``loads[t, j]``: K and d. ``depths[t, j]``: number of blocks with room in the
    ring buffer where group j is streamed; 1: single-buffered (r = 1). ``reads``, ``drops``: for
    each component, the intervals in which its backing store is read and dropped; -1: never.
    ``spills``: for each spill gap, whether the value is spilled.
    """

    present: NDArray[np.int64]
    loads: NDArray[np.int64]
    depths: NDArray[np.int64]
    reads: tuple[int, ...]
    drops: tuple[int, ...]
    spills: tuple[bool, ...]


@dataclass(frozen=True)
class Program:
    """A problem as variant choices, block groups and intervals. The end slot is not an interval,
    because it only evicts.

    ``run_length``: number of intervals of one run. In a session, the intervals of the further run
    start at that index. ``part``: which run of a session the program consists of, if it is only
    one ("first" or "further", see `single_run`); "": both. ``full_overlap``: relax the program. Its
    minimum is then a lower bound on the simulated seconds of any plan. Every copy overlaps all
    compute of its slot, and blocks on secondary devices need not be consecutive.

    Arrays have a row per interval and a column per group.
    """

    problem: Problem
    variant_choices: tuple[VariantChoice, ...]
    groups: tuple[Group, ...]
    intervals: tuple[Interval, ...]
    spill_gaps: tuple[SpillGap, ...]
    run_length: int
    part: Literal["", "first", "further"] = ""
    full_overlap: bool = False

    @property
    def session(self) -> bool:
        """Whether the problem is a session: a first run and further runs."""
        return self.problem.runs > 1

    def single_run(self, part: Literal["", "first", "further"]) -> Program:
        """Return the program of one run of a session, executed once; "" returns both runs.

        A single further run is a steady state: it starts with blocks that are on the device at its
        own end. All backing stores are read before it.
        """
        if not part:
            return self
        intervals = (
            self.intervals[: self.run_length]
            if part == "first"
            else self.intervals[self.run_length :]
        )
        gaps = tuple(gap for gap in self.spill_gaps if gap.spill_slot < self.run_length)
        return replace(
            self,
            intervals=tuple(replace(interval, weight=1.0) for interval in intervals),
            spill_gaps=gaps,
            part=part,
        )

    @cached_property
    def choices_of(self) -> list[list[int]]:
        """For each component, the numbers of its variant choices."""
        components = range(len(self.problem.components))
        return [
            [
                n
                for n, variant_choice in enumerate(self.variant_choices)
                if variant_choice.component == c
            ]
            for c in components
        ]

    @cached_property
    def groups_of(self) -> list[list[int]]:
        """For each component, the numbers of its groups."""
        return [
            [j for j, group in enumerate(self.groups) if group.component == c]
            for c in range(len(self.problem.components))
        ]

    def _table(self, rows: Sequence[Sequence[float]]) -> NDArray[Any]:
        return np.array(rows).reshape(len(self.intervals), len(self.groups))

    @cached_property
    def calls(self) -> NDArray[np.int64]:
        """n: calls that run the blocks of a group."""
        return self._table([interval.calls for interval in self.intervals])

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Blocks per group."""
        return np.array([group.count for group in self.groups], dtype=np.int64)

    @cached_property
    def held_bytes(self) -> NDArray[np.int64]:
        """`Group.held_bytes` of each group."""
        return np.array([group.held_bytes for group in self.groups], dtype=np.int64)

    @property
    def devices(self) -> range:
        """The numbers of the devices: 0, the main device, then the secondary devices."""
        return range(len(self.problem.secondaries) + 1)

    @property
    def memories(self) -> tuple[Memory, ...]:
        """All memories that may have a budget."""
        return *self.devices, *HOST_TIERS, "disk"

    def limit(self, memory: Memory) -> int | None:
        """Return the bytes of ``memory`` that the plan may use; None: unlimited."""
        problem = self.problem
        if isinstance(memory, int):
            devices = (problem, *problem.secondaries)
            return devices[memory].effective_bytes
        limits = {
            "ram": problem.ram_bytes,
            "pinned": problem.pinned_bytes,
            "disk": problem.disk_bytes,
        }
        return limits[memory]

    @cached_property
    def compute_seconds(self) -> list[list[float]]:
        """For each interval and group, the seconds of compute of all of its blocks; 0 on a
        secondary device."""
        return [
            [
                calls * group.count * seconds
                for calls, group, seconds in zip(
                    interval.calls, self.groups, interval.seconds, strict=True
                )
            ]
            for interval in self.intervals
        ]

    @cached_property
    def overlap_sets(self) -> list[list[list[int]]]:
        """For each interval, the overlap sets of the groups that it runs. Copies of one group
        overlap compute of all groups in its set."""
        sets_by_interval = []
        for interval in self.intervals:
            sets: dict[tuple[int, str], list[int]] = {}
            for j, (group, calls) in enumerate(zip(self.groups, interval.calls, strict=True)):
                if calls and not group.secondary:
                    sets.setdefault((group.variant_choice, group.overlap_key), []).append(j)
            sets_by_interval.append(list(sets.values()))
        return sets_by_interval

    def most_host_bytes(self, tier: HostTier) -> int:
        """Return an upper bound on the bytes in ``tier`` of any choice in any interval."""
        variants_by_component = [
            [self.variant_choices[n].variant for n in numbers if self.variant_choices[n].is_used]
            for numbers in self.choices_of
        ]
        if tier == "pinned":
            return sum(
                max((v.locked_bytes for v in variants), default=0)
                for variants in variants_by_component
            )
        total = sum(
            max((v.host_bytes + v.transient_bytes for v in variants), default=0)
            for variants in variants_by_component
        )
        if any(not variant_choice.computes for variant_choice in self.variant_choices):
            total += max((interval.activation_bytes for interval in self.intervals), default=0)
        return total + sum(gap.nbytes for gap in self.spill_gaps)

    def first_use(self, number: int) -> int:
        """Return the first interval that uses variant choice ``number``; -1 if none does."""
        groups = [j for j, group in enumerate(self.groups) if group.variant_choice == number]
        uses = (
            t
            for t in range(len(self.intervals))
            if self.calls[t, groups].any() or self.called_on_cpu(number, t)
        )
        return next(uses, -1)

    def has_store(self, number: int) -> bool:
        """Whether host memory has the backing store of variant choice ``number`` without a read in
        the program."""
        return self.variant_choices[number].read_seconds is None or self.part == "further"

    def called_on_cpu(self, number: int, t: int) -> bool:
        """Whether interval ``t`` calls the component of variant choice ``number``, which computes
        on the CPU."""
        variant_choice = self.variant_choices[number]
        return (
            not variant_choice.computes
            and variant_choice.component in self.intervals[t].phase_components
        )

    def with_variants(self, variants: Sequence[int]) -> Program:
        """Return the program in which each component has one variant, given by its index."""
        return program_of(self.problem, tuple((variant,) for variant in variants)).single_run(
            self.part
        )

    def on_first_device(self) -> Program | None:
        """Return the program without variants on secondary devices: only the main device and the
        CPU compute. Return None if a component has no such variant."""
        first_device = [
            [n for n in numbers if not self.variant_choices[n].variant.secondary]
            for numbers in self.choices_of
        ]
        return (
            program_of(
                self.problem,
                [[self.variant_choices[n].index for n in numbers] for numbers in first_device],
            )
            if all(first_device)
            else None
        )

    @property
    def reference_seconds(self) -> float:
        """Seconds of one run's compute plus one copy of every block, with the first variant choice
        of each component. The MILP scales its times by this number."""
        first = [numbers[0] for numbers in self.choices_of if numbers]
        groups = [j for j, group in enumerate(self.groups) if group.variant_choice in first]
        compute = sum(self.compute_seconds[t][j] for t in range(self.run_length) for j in groups)
        compute += sum(
            interval.off_device_seconds[n]
            for interval in self.intervals[: self.run_length]
            for n in first
        )
        first_groups = [self.groups[j] for j in groups]
        return float(
            compute
            + sum(group.count * (group.load_seconds + group.disk_seconds) for group in first_groups)
        )


# ---- Building a program


def program_of(
    problem: Problem, variants: Sequence[Sequence[int]] | None = None, *, split: bool = False
) -> Program:
    """Return the program of ``problem``, with the stage order and the options of stages applied.

    ``variants``: for each component, indices of the variants that may be chosen; None: all usable
    variants. ``split``: blocks of a component may be on a secondary device (`Group.mirror`); only
    `graphrun.solve.milp` can use such a program.
    """
    components = used_components(problem)
    variant_choices: list[VariantChoice] = []
    for number, component in enumerate(problem.components):
        for index in variants[number] if variants is not None else usable(problem, number):
            variant = component.variants[index]
            pairs = zip(component.groups, variant.read_seconds, strict=False)
            read_seconds = (
                sum(len(group.blocks) * seconds for group, seconds in pairs)
                if variant.read_seconds
                else None
            )
            variant_choices.append(
                VariantChoice(number, index, variant, read_seconds, component in components)
            )
    groups = tuple(
        group
        for number, variant_choice in enumerate(variant_choices)
        for group in _groups(problem, number, variant_choice)
    )
    groups += tuple(_mirrors(problem, variant_choices, groups)) if split else ()
    # number of runs that the first and the further run stand for
    run_weights = (1.0, float(problem.runs - 1))[: min(2, problem.runs)]
    intervals = tuple(
        interval
        for weight in run_weights
        for number in range(len(problem.phases))
        for interval in _intervals(problem, variant_choices, groups, number, weight)
    )
    run_length = len(intervals) // len(run_weights)
    load_slots = {
        interval.phase: t
        for t, interval in enumerate(intervals[:run_length])
        if interval.part == "load"
    }
    return Program(
        problem,
        tuple(variant_choices),
        groups,
        intervals,
        spill_gaps_of(problem, load_slots, run_length, len(intervals)),
        run_length,
    )


def usable(problem: Problem, number: int) -> tuple[int, ...]:
    """Return the indices of the variants of component ``number`` that are allowed and compatible
    with its directives.

    A variant on the CPU has no blocks on the device, so it violates `keep` and `whole`. It needs
    its weights in RAM.
    """
    component = problem.components[number]
    resident = problem.demanded(component.name) & {"keep", "whole"}
    variants = component.variants
    return tuple(
        n
        for n in problem.usable(component)
        if variants[n].device != "cpu" or (variants[n].backing_store != "disk" and not resident)
    )


def _groups(problem: Problem, number: int, variant_choice: VariantChoice) -> Iterator[Group]:
    component, variant = problem.components[variant_choice.component], variant_choice.variant
    demanded, by_layer = problem.demanded(component.name), component.granularity == "layers"
    for index, streamable in enumerate(
        streamable_groups(component, variant_choice.index) if variant_choice.computes else ()
    ):
        block_group, nbytes = component.groups[index], variant.block_bytes[index]
        yield Group(
            variant_choice=number,
            component=variant_choice.component,
            index=index,
            count=len(block_group.blocks),
            block_bytes=nbytes,
            held_bytes=round_up(nbytes, ALLOCATION_BYTES),
            load_seconds=variant.load_seconds[index],
            disk_seconds=variant.disk_seconds[index]
            if variant.backing_store == "disk" and variant.disk_seconds
            else 0.0,
            streamable=streamable,
            movable=variant.movable,
            demanded=demanded,
            # Block groups run one after another, so each is its own overlap set. Calls of layers
            # in one child module alternate.
            overlap_key=block_group.blocks[0].split(".")[0] if by_layer else f"{index}",
            by_layer=by_layer,
            excluded=block_group.streamable and "exclude" in demanded,
            secondary=variant.secondary or block_group.secondary,
        )


def _mirrors(
    problem: Problem, variant_choices: Sequence[VariantChoice], groups: Sequence[Group]
) -> Iterator[Group]:
    """Yield for each of ``groups`` a mirror group for every secondary device that its component may
    be split over."""
    for j, group in enumerate(groups):
        component, variant_choice = (
            problem.components[group.component],
            variant_choices[group.variant_choice],
        )
        for secondary in (
            secondaries_for(problem, component)
            if variant_choice.is_used and "" not in component.groups[group.index].blocks
            else ()
        ):
            # `twin`: the same variant on the secondary device
            if (
                secondary_variant := twin(component, variant_choice.variant, secondary)
            ) is not None:
                load = secondary_variant.load_seconds[group.index]
                yield replace(
                    group,
                    load_seconds=load,
                    disk_seconds=0.0,
                    streamable=False,
                    secondary=secondary,
                    mirror=j,
                )


def _intervals(
    problem: Problem,
    variant_choices: Sequence[VariantChoice],
    groups: Sequence[Group],
    number: int,
    weight: float,
) -> Iterator[Interval]:
    """Yield the intervals of phase ``number``.

    These are a load slot (if the phase uses a component), a first slot, and a steady slot (if there
    are further calls).
    """
    phase = problem.phases[number]
    uses_by_name = {use.component: use for use in phase.uses}
    components = [
        problem.components[variant_choice.component] for variant_choice in variant_choices
    ]
    # per variant choice, the phase's use with the seconds of the variant; None without a use
    uses = [
        use_with(uses_by_name[component.name], component, variant_choice.variant)
        if component.name in uses_by_name
        else None
        for component, variant_choice in zip(components, variant_choices, strict=True)
    ]
    pairs = [(uses[group.variant_choice], group.index) for group in groups]
    parts: tuple[tuple[SlotPart, int, int], ...] = (
        ("load", 0, 0),
        ("first", 1, phase.first_bytes),
        ("steady", phase.steady_calls, phase.steady_bytes),
    )
    for part, rounds, activation in parts:
        if not rounds and (part != "load" or not phase.uses):
            continue
        calls = tuple(use.group_calls_in(part)[k] if use else 0 for use, k in pairs)
        off_device_seconds, secondary_bytes = (
            [0.0] * len(variant_choices),
            [(0,) * len(problem.secondaries)] * len(variant_choices),
        )
        for n, (use, component) in enumerate(zip(uses, components, strict=True)):
            if use is None:
                continue
            variant = variant_choices[n].variant
            triples = zip(component.groups, use.group_calls_in(part), use.seconds, strict=True)
            remote = [
                triple for triple in triples if variant.device != "device" or triple[0].secondary
            ]
            off_device_seconds[n] = sum(
                (len(group.blocks) * times * seconds for group, times, seconds in remote), 0.0
            )
            component_variant = replace(component, variants=(variant,))
            if rounds:
                off_device_seconds[n] += use.calls_in(part) * sum(
                    transfer_seconds(problem, use, component_variant).values()
                )
                numbers = range(1, len(problem.secondaries) + 1)
                secondary_bytes[n] = tuple(
                    bytes_on_secondary(activation, [(use, component_variant)], number)
                    for number in numbers
                )
        yield Interval(
            phase=number,
            part=part,
            rounds=rounds,
            weight=weight,
            fixed_bytes=problem.value_bytes(number) + phase.input_bytes,
            activation_bytes=activation,
            pipeline_code_bytes=min(activation, phase.pipeline_code_bytes),
            calls=calls,
            seconds=tuple(
                _seconds(problem, group, variant_choices, use, uses_by_name) if use else 0.0
                for group, (use, _) in zip(groups, pairs, strict=True)
            ),
            passes=tuple(use.passes_of(k) if use else 1 for use, k in pairs),
            computing_components=frozenset(
                group.component for group, n in zip(groups, calls, strict=True) if n
            ),
            phase_components=frozenset(
                c
                for c, component in enumerate(problem.components)
                if component.name in uses_by_name and part != "load"
            ),
            off_device_seconds=tuple(off_device_seconds),
            secondary_bytes=tuple(secondary_bytes),
            block_seconds=tuple(
                block_seconds(use, components[group.variant_choice])[group.index]
                if use and group.mirror < 0
                else 0.0
                for group, (use, _) in zip(groups, pairs, strict=True)
            ),
        )


def _seconds(
    problem: Problem,
    group: Group,
    variant_choices: Sequence[VariantChoice],
    use: Use,
    uses_by_name: Mapping[str, Use],
) -> float:
    """Return the seconds of one block of ``group`` in one call; 0 if `Interval.off_device_seconds`
    counts them. ``use`` has the seconds of the variant, ``uses_by_name`` has not."""
    if group.mirror < 0:
        return 0.0 if group.secondary else use.seconds[group.index]
    component, main_variant = (
        problem.components[group.component],
        variant_choices[group.variant_choice].variant,
    )
    secondary_variant, k = twin(component, main_variant, group.secondary), group.index
    variant_seconds = (
        secondary_variant.block_seconds[k]
        if secondary_variant is not None and secondary_variant.block_seconds
        else 0.0
    )
    seconds = block_seconds(uses_by_name[component.name], component)[k]
    return max(
        0.0,
        main_variant.slowdown * seconds * slowdown_of(component, group.secondary) + variant_seconds,
    )


def spill_gaps_of(
    problem: Problem, load_slots: Mapping[int, int], run_length: int, count: int
) -> tuple[SpillGap, ...]:
    """Return the spill gaps of all values in each run (see `SpillGap`).

    The first phase of a gap and the phase after the gap must both have a load slot. ``load_slots``:
    index of a phase -> index of its load slot in the first run. ``count``: number of intervals of
    the program, ``run_length`` of them in each run.
    """
    gaps = []
    for number, value in enumerate(problem.values):
        if not value.nbytes or problem.hardware.unified:  # no second memory to spill to
            continue
        start = None  # first phase of the gap that ``phase`` is in
        for phase in range(value.first_phase, min(value.last_phase + 1, len(problem.phases))):
            if problem.phases[phase].stage not in (*value.consumers, value.producer):
                start = phase if start is None else start
                continue
            if start is not None and start in load_slots and phase in load_slots:
                gaps.append((number, value, load_slots[start], load_slots[phase]))
            start = None
    hardware = problem.hardware
    return tuple(
        SpillGap(
            number,
            value.nbytes,
            run_start + spill_slot,
            run_start + restore_slot,
            value.copy_seconds(hardware, to_host=True),
            value.copy_seconds(hardware, to_host=False),
        )
        for run_start in range(0, count, max(run_length, 1))
        for number, value, spill_slot, restore_slot in gaps
    )
