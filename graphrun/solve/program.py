"""The integer program behind a plan: its variables, its constants, and its constraints.

`graphrun.solve.rows` has the constraints of seconds and bytes, `graphrun.solve.columns` the others,
and `graphrun.solve.milp` solves the program.

Terms:

    phase          A part of a stage in which the same components are called.
    slot           A part of a phase: a load slot (no compute), a first slot (the first call) or a
                   steady slot (the further calls). In code: interval.
    block group    Equal blocks of a component. If a component is split into layers, which are
                   smaller, "block" means a layer.
    mirror group   The blocks of a group that are on one secondary device, if a component is split
                   over devices. The group itself has its blocks on the main device.
    overlap set    Groups of a variant whose copies overlap all compute of the set. The sets of a
                   slot run one after another.
    gap            Consecutive phases in which a value is on the device, but no stage reads it.

Variables of slot t and block group j. Each variant that computes on the device has its own groups.

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

Constraints, without seconds and bytes:

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
    backing store   Read from disk in at most one slot. No block is copied before that slot, or
                    after the store is dropped. If the component computes on the CPU, the store is
                    read before the component is called.
    spill           A value is copied to the host in the load slot of the first phase of a gap, and
                    back in the load slot of the phase after the gap.
    secondary       A whole component on a secondary device is a variant whose groups are not
                    streamable. Of a split component, the mirror groups are not streamable.
    copy            A copy of a component (`graphrun.model.copies`) has the variant of its original,
                    and no block of it is copied without the original's backing store.

A single buffer is also faster where copies take much longer than compute: the bytes it saves make
room for one more resident block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from graphrun.model.copies import original_name
from graphrun.model.plan import SlotPart
from graphrun.model.problem import ComponentPlacement, Problem, Variant

HostTier = Literal["ram", "pinned"]
# number of a device (0: the main device), a host tier, or the disk
Memory = int | Literal["ram", "pinned", "disk"]
HOST_TIERS: tuple[HostTier, ...] = get_args(HostTier)


@dataclass(frozen=True, slots=True)
class VariantChoice:
    """A variant that may be chosen for a component.

    ``component``: index in the problem. ``index``: of the variant in the component.
    ``read_seconds``: to read the whole backing store from disk; None if no `Read` action reads it,
    because it stays on disk or is in RAM before the run. ``is_used``: whether any phase calls the
    component; else it takes no memory.
    """

    component: int
    index: int
    variant: Variant
    read_seconds: float | None
    is_used: bool

    @property
    def computes(self) -> bool:
        """Whether the component computes on a device, not on the CPU."""
        return self.variant.device != "cpu"


@dataclass(frozen=True, slots=True)
class Group:
    """A block group of one variant.

    ``variant_choice``, ``component``, ``index``: in `Program.variant_choices`, the problem and the
    component. ``block_bytes``: weights of one block; ``held_bytes``: their allocation, rounded up
    to `ALLOCATION_BYTES`. ``load_seconds``: to copy one block to the device; ``disk_seconds``: to
    read it from disk for that copy, 0 if the backing store is not on disk; ``lost_seconds``: of
    compute, to stream it. ``demanded``: placements that directives demand of the component.
    ``overlap_key``: groups of the variant with equal keys are one overlap set. ``by_layer``: the
    blocks are layers. ``excluded``: `exclude` keeps the blocks off the device; a variant that
    cannot stream them is then infeasible. ``secondary``: number of the device with these blocks; 0:
    the main device. ``mirror``: index of the main-device group that this group takes blocks from;
    -1 if none.
    """

    variant_choice: int
    component: int
    index: int
    count: int
    block_bytes: int
    held_bytes: int
    load_seconds: float
    disk_seconds: float
    lost_seconds: float
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
    """A gap of a value, during which it may be spilled to the host.

    ``value``: index in the problem. ``spill_slot``, ``restore_slot``: the load slots that copy it.

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
    """A slot t of the program, before it has actions.

    ``rounds``: the most calls of one component in the slot; 0 in a load slot. ``weight``: number of
    runs that execute the slot.

    Per group: ``calls`` (n), that run its blocks; ``seconds``, compute of one block in one call;
    ``passes`` (p), runs of a block in one call; ``movable_seconds``, ``seconds`` without the share
    of compute outside of blocks. Only they move with the block to a secondary device: compute
    outside of blocks stays on the main device.

    Per variant choice: ``off_device_seconds``, compute on the CPU, or on a secondary device with
    transfers to that device and back; ``beside_seconds``, the same of a copy, while its original
    computes (its ``off_device_seconds`` are the transfers); ``secondary_bytes``, bytes beyond
    weights on each secondary device.

    ``computing_components``: components (indices) that compute on a device in the slot.
    ``phase_components``: all components of the phase; empty in a load slot. ``fixed_bytes``: values
    and inputs. ``activation_bytes``: as traced, without the scratch of variants. If nothing
    computes on the main device, only ``pipeline_code_bytes`` remain there: tensors of the
    pipeline's own code (outside of components) and results of calls.
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
    beside_seconds: tuple[float, ...] = ()
    secondary_bytes: tuple[tuple[int, ...], ...] = ()
    movable_seconds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """The integers of one solution of a program that has one variant per component.

    ``present[t, j]``, ``loads[t, j]``: K and d. ``depths[t, j]``: blocks with room in the ring
    buffer where group j is streamed; 1: single-buffered. ``reads``, ``drops``: per component, the
    intervals in which its backing store is read and dropped; -1: never. ``spills``: whether each
    gap is used.
    """

    present: NDArray[np.int64]
    loads: NDArray[np.int64]
    depths: NDArray[np.int64]
    reads: tuple[int, ...]
    drops: tuple[int, ...]
    spills: tuple[bool, ...]

    def blocks_in(self, intervals: slice) -> Choice:
        """Return the choice with only the blocks of some ``intervals``."""
        return replace(
            self,
            present=self.present[intervals],
            loads=self.loads[intervals],
            depths=self.depths[intervals],
        )


@dataclass(frozen=True)
class Program:
    """A problem as variant choices, block groups and intervals (slots but the end slot).

    ``run_length``: intervals of one run; the further run of a session starts at that index.
    ``only_run``: the run of a session if the program has only one; "": the first and the further
    run.
    ``full_overlap``: relaxed, so that the minimum is a lower bound on the simulated seconds of any
    plan: every copy overlaps all compute of its slot, and blocks on secondary devices need not be
    consecutive.

    Arrays have a row per interval and a column per group.
    """

    problem: Problem
    variant_choices: tuple[VariantChoice, ...]
    groups: tuple[Group, ...]
    intervals: tuple[Interval, ...]
    spill_gaps: tuple[SpillGap, ...]
    run_length: int
    only_run: Literal["", "first", "further"] = ""
    full_overlap: bool = False

    @property
    def session(self) -> bool:
        return self.problem.runs > 1

    def single_run(self, only_run: Literal["", "first", "further"]) -> Program:
        """Return the program of one run of a session, executed once; "" returns both runs.

        A single further run is a steady state: it starts with the blocks at its own end, and all
        backing stores are read before it.
        """
        if not only_run:
            return self
        intervals = (
            self.intervals[: self.run_length]
            if only_run == "first"
            else self.intervals[self.run_length :]
        )
        gaps = tuple(gap for gap in self.spill_gaps if gap.spill_slot < self.run_length)
        return replace(
            self,
            intervals=tuple(replace(interval, weight=1.0) for interval in intervals),
            spill_gaps=gaps,
            only_run=only_run,
        )

    @cached_property
    def choices_of(self) -> list[list[int]]:
        """Numbers of the variant choices of each component."""
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
    def stores(self) -> list[int]:
        """The variant choice with the backing store of each; of a copy, the one of its original.

        -1: the program has no such choice, so the copy's may not be chosen.
        """
        components = self.problem.components
        numbers = {
            (components[choice.component].name, choice.variant.name): n
            for n, choice in enumerate(self.variant_choices)
        }
        return [
            numbers.get((component.copy_of, original_name(choice.variant)), -1)
            if (component := components[choice.component]).copy_of
            else n
            for n, choice in enumerate(self.variant_choices)
        ]

    @cached_property
    def groups_of(self) -> list[list[int]]:
        """Numbers of the groups of each component."""
        return [
            [j for j, group in enumerate(self.groups) if group.component == c]
            for c in range(len(self.problem.components))
        ]

    def _table(self, rows: Sequence[Sequence[float]]) -> NDArray[Any]:
        return np.array(rows).reshape(len(self.intervals), len(self.groups))

    @cached_property
    def calls(self) -> NDArray[np.int64]:
        """n, calls that run the blocks of a group."""
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
        """Numbers of the devices; 0: the main device."""
        return range(len(self.problem.secondaries) + 1)

    @property
    def memories(self) -> tuple[Memory, ...]:
        return *self.devices, *HOST_TIERS, "disk"

    def limit(self, memory: Memory) -> int | None:
        """Return the bytes of ``memory`` that the plan may use; None: unlimited."""
        problem = self.problem
        if isinstance(memory, int):
            device = problem.secondaries[memory - 1] if memory else problem
            return device.effective_bytes
        limits = {
            "ram": problem.ram_bytes,
            "pinned": problem.pinned_bytes,
            "disk": problem.disk_bytes,
        }
        return limits[memory]

    @cached_property
    def compute_seconds(self) -> list[list[float]]:
        """Seconds of compute of all blocks, per interval and group; 0 on a secondary device."""
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
        """Groups of each overlap set, per interval."""
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
        """Return the first interval that needs the store of choice ``number``; -1: none."""
        groups = [j for j, group in enumerate(self.groups) if group.variant_choice == number]
        uses = (
            t
            for t in range(len(self.intervals))
            if self.calls[t, groups].any() or self.called_on_cpu(number, t)
        )
        return next(uses, -1)

    def has_store(self, number: int) -> bool:
        """Whether host memory has the store of choice ``number`` before the program runs."""
        return self.variant_choices[number].read_seconds is None or self.only_run == "further"

    def called_on_cpu(self, number: int, t: int) -> bool:
        """Whether interval ``t`` calls the component of variant choice ``number`` on the CPU."""
        variant_choice = self.variant_choices[number]
        return (
            not variant_choice.computes
            and variant_choice.component in self.intervals[t].phase_components
        )

    @property
    def reference_seconds(self) -> float:
        """Seconds of one run's compute plus one copy of every block, by which the MILP scales."""
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
