"""The integer program behind a plan: its variables, its constraints, and what they cost in seconds
and bytes.

This module states the program and computes the cost of given integers. `graphrun.solve.milp` solves
it.

Variables of slot t and block group j. Each variant that computes on the device has block groups of
its own.

    y     1 for the chosen variant of a component; exactly one is chosen K     blocks on the device
    at the start of the slot d     blocks loaded during the slot; they stay on the device s     1 if
    blocks of the group are streamed through the ring buffer in the slot r     1 if the group is
    single-buffered: the ring buffer has no room for one of its blocks beside the largest, so its
    copies and its
          compute alternate
    L, M  bytes of the component's ring buffer: for the largest streamed block, and beside it
    D     seconds of the slot

Constants:

    n     calls in the slot that run the group's blocks       p     times that a layer runs in one
    call nb    blocks in the group                                 R     runs of the session b
    device bytes of one block

x stands for the blocks copied to the device during the slot. It follows from K and d, so it is not
a variable.

    group that the slot does not run        any K + d <= nb                    x = d: loaded for a
    later slot (prefetch) group that it runs, not streamable      K = nb, d = 0
    x = 0 group that it runs, streamable          K + d + nb*s >= nb: the remaining blocks are
    streamed, so s = 1 unless K + d = nb
                                            first slot:  x = nb - K steady slot: x = n*(nb - K), and
                                            d = 0 for all groups of the component

    ring buffer            bytes >= L + M     L >= b*s     M >= b*s - b*r: room for a second block
    of each group, except where r = 1 layers          x = n*p*(nb - K) - (p - 1)*d. K and d are
    rounded to integers at the end next slot       K' <= K + d: eviction costs nothing. K' = K + d
    if the variant is not movable. K = 0 in the first slot session         the slots of the first
    run, then those of one further run, whose seconds count R - 1 times. The further run
                    starts with K <= K + d of the first run's last slot, and with K <= K + d of its
                    own last slot
    directives      keep     s = 0 in the first slot that uses the component, K = nb in later ones
                    exclude  K = d = 0 where the blocks can be streamed
                    whole    s = 0 in every slot that uses the component
                    drop     K = 0 in load slots, K = d = 0 in phases that do not use the component
    backing store   read from disk in at most one slot; x = 0 before that slot, and after the store
    was dropped. If the component
                    computes on the CPU, the store is read before the component is entered
    spill           a value is copied to the host in the load slot of the first phase of a gap, and
    back in the load slot of the
                    phase after the gap
    time            D >= the sum over overlap sets of max(compute, copies + compute of the groups
    with r = 1, reads from disk)
                         + compute on the CPU and on secondary devices, with what crosses to these
                         and back. An overlap set is one block group, or all groups of layers in one
                         child module: copies of one group in the set overlap compute of the others
                    D >= load_seconds*x summed over all j + spills     D >= disk_seconds*x summed
                    over all j + reads the former for each device by itself, since each is copied to
                    over a link of its own
    memory          sum b*(K + d) + ring buffers + activation + values + input_bytes <= effective
    budget
                    backing stores and spilled values <= RAM; page-locked ones <= page-locked RAM
    secondary device          a component on a secondary device is a variant whose groups are not
    streamable, and whose bytes count there:
                    sum b*(K + d) + the most activation of a component that computes there in the
                    slot <= its effective budget

A single-buffered ring buffer is faster where copies take much longer than compute: the bytes that
it saves hold one more resident block, which then need not be copied. It is also used where memory
does not allow more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from graphrun.model.choices import activation_bytes, use_with
from graphrun.model.choices import secondary_bytes as bytes_on_secondary
from graphrun.model.least_memory import streamable_groups, used_components
from graphrun.model.plan import Part
from graphrun.model.problem import ALLOCATION_BYTES, Placement, Problem, Use, Variant
from graphrun.model.splits import (
    block_seconds,
    secondaries_for,
    slowdown_of,
    transfer_seconds,
    twin,
)
from graphrun.units import round_up


@dataclass(frozen=True, slots=True)
class VariantChoice:
    """A variant that may be chosen for a component; y = 1 if it is.

    ``component``: index of the component in the problem. ``index``: index of the variant in the
    component. ``read_seconds``: time to read the whole backing store from disk; None where a plan
    has no `Read` action for it. ``used``: whether any phase calls the component; one that no phase
    calls takes no memory."""

    component: int
    index: int
    variant: Variant
    read_seconds: float | None
    used: bool

    @property
    def computes(self) -> bool:
        """Whether the component computes on the device or a secondary device, not on the CPU."""
        return self.variant.device != "cpu"


@dataclass(frozen=True, slots=True)
class Group:
    """A block group of one variant.

    ``variant_choice``, ``component``: indices in `Program.variant_choices` and in the problem.
    ``index``: index of the group in its component. ``count``: number of blocks. ``block_bytes``:
    weights of one block; ``held_bytes``: the device allocation for them, rounded up to
    `ALLOCATION_BYTES`. ``load_seconds``: to copy one block to the device; ``disk_seconds``: to read
    one block from disk for that copy, 0 if the backing store is not on disk. ``movable``: as in
    `Variant`. ``demanded``: placements that directives demand of the component. ``overlap_key``:
    groups of the variant with equal keys form one overlap set. ``by_layer``: the blocks are layers.
    ``excluded``: the directive `exclude` applies: the blocks must be off the device, even if this
    variant cannot stream them. ``secondary``: number of the secondary device that they are copied
    to; 0: the device. ``mirror``: of a program whose component may yet be split, the group of whose
    blocks this one may have some; -1: none."""

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
    demanded: frozenset[Placement]
    overlap_key: str
    by_layer: bool
    excluded: bool
    secondary: int = 0
    mirror: int = -1


@dataclass(frozen=True, slots=True)
class SpillGap:
    """Consecutive phases in which a value is on the device but not read. It may be spilled to the
    host for that time.

    ``value``: index of the value in the problem. ``out``, ``back``: indices of the intervals (load
    slots) that spill and restore it. ``out_seconds``, ``back_seconds``: of the two copies.

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
    """A slot t of the program, before it has actions. In a session: a slot of the first run, or of
    the one further run.

    ``rounds``: calls in the slot of the component that is called most. ``weight``: number of runs
    that execute the slot. For each group j: ``calls[j]`` (n), calls that run its blocks;
    ``seconds[j]``, compute of one block in one call; ``passes[j]`` (p), how often a block runs in
    one call; ``own_seconds[j]``, of ``seconds[j]`` those that go with the block to a secondary
    device. ``cpu_seconds``: for each variant choice, compute on the CPU, or on a secondary device
    with what crosses to it and back. ``used``: components (indices) that compute on the device or a
    secondary device in the slot. ``entered``: all components of the phase; none in a load slot.
    ``secondary_bytes``: for each variant choice, bytes beyond weights that it takes on each
    secondary device. ``fixed_bytes``: values and inputs bytes. ``activation_bytes``: as traced,
    without the scratch of variants; ``pipeline_code_bytes`` of them remain on the device if every
    component of the phase computes on the CPU."""

    phase: int
    part: Part
    rounds: int
    weight: float
    fixed_bytes: int
    activation_bytes: int
    pipeline_code_bytes: int
    calls: tuple[int, ...]
    seconds: tuple[float, ...]
    passes: tuple[int, ...]
    used: frozenset[int]
    entered: frozenset[int]
    cpu_seconds: tuple[float, ...]
    secondary_bytes: tuple[tuple[int, ...], ...] = ()
    own_seconds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """The integers of one solution of a program that has one variant per component.

    ``present[t, j]``, ``loaded[t, j]``: K and d. ``depths[t, j]``: for how many blocks the ring
    buffer has room where group j is streamed; 1: single-buffered (r = 1). ``reads``, ``drops``: for
    each component, the interval in which its backing store is read and dropped; -1: never.
    ``spills``: for each spill gap, whether the value is spilled."""

    present: NDArray[np.int64]
    loaded: NDArray[np.int64]
    depths: NDArray[np.int64]
    reads: tuple[int, ...]
    drops: tuple[int, ...]
    spills: tuple[bool, ...]


@dataclass(frozen=True)
class Program:
    """A problem as variant choices, block groups and intervals. The end slot is not an interval,
    because it only evicts.

    ``run_length``: number of intervals of one run. In a session, the intervals of the further run
    follow, from that index on. ``part``: the run of a session that the program is of (see `alone`),
    "" for both. ``full_overlap``: as in `slot_seconds`, for a bound on what `simulate` says of any
    plan; blocks on secondary devices need not be in a row. Arrays have a row per interval and a
    column per group. Methods that take a `Choice` need a program with one variant per component, as
    `with_variants` returns it."""

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
        """Whether the problem is a session: a first run and further ones."""
        return self.problem.runs > 1

    def alone(self, part: Literal["", "first", "further"]) -> Program:
        """The program of one of a session's runs, executed once; "" for both. A further run alone
        begins with what it leaves, and all backing stores are read before it."""
        if not part:
            return self
        of = (
            self.intervals[: self.run_length]
            if part == "first"
            else self.intervals[self.run_length :]
        )
        gaps = tuple(gap for gap in self.spill_gaps if gap.out < self.run_length)
        return replace(
            self,
            intervals=tuple(replace(each, weight=1.0) for each in of),
            spill_gaps=gaps,
            part=part,
        )

    @cached_property
    def choices_of(self) -> list[list[int]]:
        """For each component, the numbers of its variant choices."""
        components = range(len(self.problem.components))
        return [
            [n for n, of in enumerate(self.variant_choices) if of.component == c]
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
    def passes(self) -> NDArray[np.int64]:
        """p: how often a block of a group runs in one call."""
        return self._table([interval.passes for interval in self.intervals])

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Blocks per group."""
        return np.array([group.count for group in self.groups], dtype=np.int64)

    @cached_property
    def held_bytes(self) -> NDArray[np.int64]:
        """`Group.held_bytes` of each group."""
        return np.array([group.held_bytes for group in self.groups], dtype=np.int64)

    @cached_property
    def on_secondary(self) -> NDArray[np.int64]:
        """`Group.secondary` of each group."""
        return np.array([group.secondary for group in self.groups], dtype=np.int64)

    @property
    def secondaries(self) -> range:
        """The numbers of the secondary devices."""
        return range(1, len(self.problem.secondaries) + 1)

    @cached_property
    def compute_seconds(self) -> NDArray[np.float64]:
        """Seconds of compute of all blocks of a group; 0 on a secondary device."""
        seconds: NDArray[np.float64] = self._table(
            [interval.seconds for interval in self.intervals]
        )
        return self.calls * self.counts * seconds

    @cached_property
    def overlap_sets(self) -> list[list[list[int]]]:
        """For each interval, the groups that it runs as overlap sets: copies of one group overlap
        compute of all in its set."""
        found = []
        for interval in self.intervals:
            sets: dict[tuple[int, str], list[int]] = {}
            for j, (group, calls) in enumerate(zip(self.groups, interval.calls, strict=True)):
                if calls and not group.secondary:
                    sets.setdefault((group.variant_choice, group.overlap_key), []).append(j)
            found.append(list(sets.values()))
        return found

    @cached_property
    def fixed_bytes(self) -> NDArray[np.int64]:
        """Per interval, bytes on the device beside weights and ring buffers, if nothing is
        spilled."""
        return np.array(
            [
                interval.fixed_bytes + self.activation_bytes(t)
                for t, interval in enumerate(self.intervals)
            ]
        )

    def copied_blocks(self, choice: Choice) -> NDArray[np.int64]:
        """x: blocks copied to the device. A block that is copied several times counts as often."""
        used = (
            self.calls * self.passes * (self.counts - choice.present)
            - (self.passes - 1) * choice.loaded
        )
        return np.where(self.calls > 0, used, choice.loaded)

    def slot_seconds(
        self, choice: Choice, factors: Sequence[float] = (), *, full_overlap: bool = False
    ) -> list[float]:
        """D of each interval when it is executed once.

        ``factors[t]`` multiplies the times of copies and disk reads in interval t; empty: 1.
        ``full_overlap``: as if every copy overlapped all compute of its slot, which gives a lower
        bound.
        """
        factor = np.array(factors or [1.0] * len(self.intervals))
        copied = self.copied_blocks(choice) * factor[:, None]
        copies, reads = (
            copied * [of.load_seconds for of in self.groups],
            copied * [of.disk_seconds for of in self.groups],
        )
        serial = (
            copies
            if full_overlap
            else copies + self.compute_seconds * self._single_buffered(choice)
        )
        busy = np.array([sum(interval.cpu_seconds) for interval in self.intervals])
        for t, sets in enumerate(self.overlap_sets):
            for of in (
                [sum(sets, [])] if full_overlap else sets
            ):  # full overlap: one set of all groups
                busy[t] += max(
                    self.compute_seconds[t, of].sum(), serial[t, of].sum(), reads[t, of].sum()
                )
        copy_seconds, disk_seconds = (
            copies[:, self.on_secondary == 0].sum(axis=1),
            reads.sum(axis=1),
        )
        for gap, spilled in zip(self.spill_gaps, choice.spills, strict=True):
            copy_seconds[gap.out] += spilled * factor[gap.out] * gap.out_seconds
            copy_seconds[gap.back] += spilled * factor[gap.back] * gap.back_seconds
        for each, at in zip(self.variant_choices, choice.reads, strict=True):
            if at >= 0:
                disk_seconds[at] += factor[at] * (each.read_seconds or 0.0)
        for number in self.secondaries:
            busy = np.maximum(busy, copies[:, self.on_secondary == number].sum(axis=1))
        found: list[float] = np.maximum(busy, np.maximum(copy_seconds, disk_seconds)).tolist()
        return found

    def seconds(
        self, choice: Choice, factors: Sequence[float] = (), *, full_overlap: bool = False
    ) -> float:
        """Seconds of all runs together; arguments as in `slot_seconds`."""
        slots = self.slot_seconds(choice, factors, full_overlap=full_overlap)
        return sum(
            interval.weight * seconds
            for interval, seconds in zip(self.intervals, slots, strict=True)
        )

    def moved_bytes(self, choice: Choice) -> int:
        """Bytes copied to the device in all runs: blocks, streamed ones each time they are copied,
        and restored values."""
        runs = np.array([int(interval.weight) for interval in self.intervals], dtype=np.int64)
        restored = sum(
            gap.nbytes * runs[gap.back]
            for gap, spilled in zip(self.spill_gaps, choice.spills, strict=True)
            if spilled
        )
        return int(
            restored
            + sum(runs @ self.copied_blocks(choice) * [group.block_bytes for group in self.groups])
        )

    def streamed(self, choice: Choice) -> NDArray[np.bool_]:
        """Whether any block of a group is streamed."""
        return (self.calls > 0) & (choice.present + choice.loaded < self.counts)

    def _single_buffered(self, choice: Choice) -> NDArray[np.bool_]:
        """Whether a group is streamed, and the ring buffer has no room for one of its blocks beside
        the largest block (r = 1)."""
        streamed, ring_buffers = self.streamed(choice), self.ring_buffer_bytes(choice)
        found = np.zeros_like(streamed)
        for c, of in enumerate(self.groups_of):
            largest = np.max(self.held_bytes[of] * streamed[:, of], axis=1, initial=0)
            found[:, of] = streamed[:, of] & (
                ring_buffers[:, [c]] < largest[:, None] + self.held_bytes[of]
            )
        return found

    def ring_buffer_bytes(self, choice: Choice) -> NDArray[np.int64]:
        """L + M: bytes of the ring buffer of each component (columns) in each interval; 0: nothing
        is streamed. It has room for the largest streamed block, and beside it for the further
        blocks that `Choice.depths` says."""
        streamed = self.streamed(choice)
        more = (choice.depths - 1) * self.held_bytes * streamed
        found = np.zeros((len(self.intervals), len(self.groups_of)), dtype=np.int64)
        for c, of in enumerate(self.groups_of):
            beside = np.max(more[:, of], axis=1, initial=0)
            found[:, c] = beside + np.max(self.held_bytes[of] * streamed[:, of], axis=1, initial=0)
        return found

    def device_bytes(self, choice: Choice) -> NDArray[np.int64]:
        """Peak bytes on the device per interval."""
        found = self.fixed_bytes.copy()
        for gap, spilled in zip(self.spill_gaps, choice.spills, strict=True):
            found[gap.out + 1 : gap.back] -= gap.nbytes * spilled
        weights: NDArray[np.int64] = (choice.present + choice.loaded) @ (
            self.held_bytes * (self.on_secondary == 0)
        )
        ring_buffers: NDArray[np.int64] = self.ring_buffer_bytes(choice).sum(axis=1)
        return found + weights + ring_buffers

    def activation_bytes(self, t: int) -> int:
        """Bytes of activation on the device in interval ``t``, with the scratch of the variants; 0
        in a load slot."""
        interval = self.intervals[t]
        variants = [of.variant for of in self.variant_choices if of.component in interval.entered]
        return (
            activation_bytes(interval.activation_bytes, variants, interval.pipeline_code_bytes)
            if interval.rounds
            else 0
        )

    def secondary_bytes(self, choice: Choice, number: int) -> NDArray[np.int64]:
        """Bytes on secondary device ``number`` per interval."""
        weights: NDArray[np.int64] = (choice.present + choice.loaded) @ (
            self.held_bytes * (self.on_secondary == number)
        )
        working = [
            max((of[number - 1] for of in interval.secondary_bytes), default=0)
            for interval in self.intervals
        ]
        return weights + np.array(working, dtype=np.int64)

    def host_bytes(self, choice: Choice) -> NDArray[np.int64]:
        """For each interval: bytes of RAM in backing stores, spilled values and activation on the
        CPU, and how many of them are page-locked."""
        found = np.zeros((len(self.intervals), 2), dtype=np.int64)
        for of, read, drop in zip(self.variant_choices, choice.reads, choice.drops, strict=True):
            if of.used and (of.read_seconds is None or read >= 0):
                held = slice(0 if of.read_seconds is None else read, drop if drop >= 0 else None)
                found[held] += of.variant.host_bytes, of.variant.locked_bytes
            if of.used and read >= 0:
                found[read, 0] += of.variant.transient_bytes
        for gap, spilled in zip(self.spill_gaps, choice.spills, strict=True):
            found[gap.out : gap.back + 1, 0] += gap.nbytes * spilled
        for t, interval in enumerate(self.intervals):
            entered = [
                of.computes for of in self.variant_choices if of.component in interval.entered
            ]
            if (
                interval.rounds and interval.entered and not any(entered)
            ):  # all components of the phase compute on the CPU
                found[t, 0] += interval.activation_bytes
        return found

    def most_host_bytes(self, locked: bool) -> int:
        """Upper bound on the RAM (``locked``: page-locked RAM) that any choice takes in any
        interval, in bytes."""
        used = [
            [self.variant_choices[n].variant for n in of if self.variant_choices[n].used]
            for of in self.choices_of
        ]
        if locked:
            return sum(max((v.locked_bytes for v in variants), default=0) for variants in used)
        total = sum(
            max((v.host_bytes + v.transient_bytes for v in variants), default=0)
            for variants in used
        )
        if any(not of.computes for of in self.variant_choices):
            total += max((interval.activation_bytes for interval in self.intervals), default=0)
        return total + sum(gap.nbytes for gap in self.spill_gaps)

    @property
    def stored_bytes(self) -> int:
        """Bytes that the variants write to disk."""
        return sum(of.variant.stored_bytes for of in self.variant_choices if of.used)

    def excess_bytes(self, choice: Choice) -> dict[str, NDArray[np.int64]]:
        """For each budget that is exceeded, the exact bytes above it: per interval, for ``disk``
        one number."""
        problem, host = self.problem, self.host_bytes(choice)
        tiers: dict[str, tuple[NDArray[np.int64], int | None]] = {
            "device": (self.device_bytes(choice), problem.effective_bytes),
            "ram": (host[:, 0], problem.ram_bytes),
            "pinned": (host[:, 1], problem.pinned_bytes),
            "disk": (np.array([self.stored_bytes]), problem.disk_bytes),
        }
        for number, secondary in enumerate(problem.secondaries, 1):
            tiers[f"secondary device {number}"] = (
                self.secondary_bytes(choice, number),
                secondary.effective_bytes,
            )
        found = {
            tier: np.maximum(taken - limit, 0)
            for tier, (taken, limit) in tiers.items()
            if limit is not None
        }
        return {tier: excess for tier, excess in found.items() if excess.any()}

    def with_drops(self, choice: Choice, *, always: bool = False) -> Choice:
        """``choice`` with every backing store dropped after its last use, where RAM cannot hold all
        of them to the end of the run, or ``always``. Sessions keep all backing stores."""
        limits, most = (
            (self.problem.ram_bytes, self.problem.pinned_bytes),
            self.host_bytes(choice).max(axis=0, initial=0),
        )
        fits = all(
            limit is None or nbytes <= limit for nbytes, limit in zip(most, limits, strict=True)
        )
        if self.session or (fits and not always):
            return choice
        copied, drops = self.copied_blocks(choice) > 0, list[int]()
        for of, read, groups in zip(
            self.variant_choices, choice.reads, self.groups_of, strict=True
        ):
            after = 1 + max(
                np.flatnonzero(copied[:, groups].any(axis=1) | self._called_on_cpu(of)), default=-1
            )
            held = of.used and (of.read_seconds is None or read >= 0)
            drops.append(int(after) if held and after < len(self.intervals) else -1)
        return replace(choice, drops=tuple(drops))

    def first_use(self, number: int) -> int:
        """The first interval that uses variant choice ``number``; -1: none does."""
        of, groups = (
            self.variant_choices[number],
            [j for j, group in enumerate(self.groups) if group.variant_choice == number],
        )
        uses = np.flatnonzero(self.calls[:, groups].any(axis=1) | self._called_on_cpu(of))
        return int(uses[0]) if len(uses) else -1

    def _called_on_cpu(self, of: VariantChoice) -> NDArray[np.bool_]:
        """Whether an interval calls the component on the CPU."""
        return np.array(
            [not of.computes and of.component in interval.entered for interval in self.intervals],
            dtype=bool,
        )

    def with_variants(self, variants: Sequence[int]) -> Program:
        """The program in which each component has one variant only: the one at this index."""
        return program_of(self.problem, tuple((variant,) for variant in variants)).alone(self.part)

    def on_first_device(self) -> Program | None:
        """The program without variants on secondary devices; None where a component has no other
        one."""
        own = [
            [n for n in of if not self.variant_choices[n].variant.secondary]
            for of in self.choices_of
        ]
        return (
            program_of(self.problem, [[self.variant_choices[n].index for n in of] for of in own])
            if all(own)
            else None
        )

    @property
    def reference_seconds(self) -> float:
        """Seconds of one run's compute plus one copy of every block, each component in its first
        variant that may be chosen. The MILP scales its times by this number."""
        first = [of[0] for of in self.choices_of if of]
        groups = [j for j, group in enumerate(self.groups) if group.variant_choice in first]
        compute = sum(self.compute_seconds[t, j] for t in range(self.run_length) for j in groups)
        compute += sum(
            interval.cpu_seconds[n] for interval in self.intervals[: self.run_length] for n in first
        )
        copied = [self.groups[j] for j in groups]
        return float(
            compute
            + sum(group.count * (group.load_seconds + group.disk_seconds) for group in copied)
        )


# ---- Building a program


def program_of(
    problem: Problem, variants: Sequence[Sequence[int]] | None = None, *, split: bool = False
) -> Program:
    """The program of ``problem``, whose stage order and options are already applied.

    ``variants``: for each component, indices of the variants that may be chosen; None: all usable
    ones. ``split``: blocks of a component may be put on a secondary device (`Group.mirror`); such a
    program is for `graphrun.solve.milp` alone.
    """
    used = used_components(problem)
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
                VariantChoice(number, index, variant, read_seconds, component in used)
            )
    groups = tuple(
        group for number, of in enumerate(variant_choices) for group in _groups(problem, number, of)
    )
    groups += tuple(_mirrors(problem, variant_choices, groups)) if split else ()
    # how many runs the first and the further one stand for
    run_weights = (1.0, float(problem.runs - 1))[: min(2, problem.runs)]
    intervals = tuple(
        interval
        for weight in run_weights
        for number in range(len(problem.phases))
        for interval in _intervals(problem, variant_choices, groups, number, weight)
    )
    run_length = len(intervals) // len(run_weights)
    loads = {
        interval.phase: t
        for t, interval in enumerate(intervals[:run_length])
        if interval.part == "load"
    }
    return Program(
        problem,
        tuple(variant_choices),
        groups,
        intervals,
        spill_gaps_of(problem, loads, run_length, len(intervals)),
        run_length,
    )


def usable(problem: Problem, number: int) -> tuple[int, ...]:
    """Indices of the variants of component ``number`` that are allowed and compatible with its
    directives. One that computes on the CPU has no blocks on the device, as `keep` and `whole`
    demand, and needs its weights in RAM."""
    component = problem.components[number]
    resident = problem.demanded(component.name) & {"keep", "whole"}
    of = component.variants
    return tuple(
        n
        for n in problem.usable(component)
        if of[n].device != "cpu" or (of[n].backing_store != "disk" and not resident)
    )


def _groups(problem: Problem, number: int, variant_choice: VariantChoice) -> Iterator[Group]:
    component, variant = problem.components[variant_choice.component], variant_choice.variant
    demanded, by_layer = problem.demanded(component.name), component.granularity == "layers"
    for index, streamable in enumerate(
        streamable_groups(component, variant_choice.index) if variant_choice.computes else ()
    ):
        of, nbytes = component.groups[index], variant.block_bytes[index]
        yield Group(
            variant_choice=number,
            component=variant_choice.component,
            index=index,
            count=len(of.blocks),
            block_bytes=nbytes,
            held_bytes=round_up(nbytes, ALLOCATION_BYTES),
            load_seconds=variant.load_seconds[index],
            disk_seconds=variant.disk_seconds[index]
            if variant.backing_store == "disk" and variant.disk_seconds
            else 0.0,
            streamable=streamable,
            movable=variant.movable,
            demanded=demanded,
            # Block groups run one after another: each is a set of its own. Calls of layers in one
            # child module alternate.
            overlap_key=of.blocks[0].split(".")[0] if by_layer else f"{index}",
            by_layer=by_layer,
            excluded=of.streamable and "exclude" in demanded,
            secondary=variant.secondary or of.secondary,
        )


def _mirrors(
    problem: Problem, variant_choices: Sequence[VariantChoice], groups: Sequence[Group]
) -> Iterator[Group]:
    """For each secondary device over which the component of one of ``groups`` may be split, a group
    for its blocks there."""
    for j, group in enumerate(groups):
        component, chosen = (
            problem.components[group.component],
            variant_choices[group.variant_choice],
        )
        for secondary in (
            secondaries_for(problem, component)
            if chosen.used and "" not in component.groups[group.index].blocks
            else ()
        ):
            if (there := twin(component, chosen.variant, secondary)) is not None:
                load = there.load_seconds[group.index]
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
    """Intervals of phase ``number``: load where the phase uses a component, first, and steady where
    there are further calls."""
    phase = problem.phases[number]
    own = {use.component: use for use in phase.uses}
    components = [problem.components[of.component] for of in variant_choices]
    # the phase's use of each variant choice with the seconds of the variant; None if the phase does
    # not use it
    uses = [
        use_with(own[component.name], component, of.variant) if component.name in own else None
        for component, of in zip(components, variant_choices, strict=True)
    ]
    pairs = [(uses[group.variant_choice], group.index) for group in groups]
    parts: tuple[tuple[Part, int, int], ...] = (
        ("load", 0, 0),
        ("first", 1, phase.first_bytes),
        ("steady", phase.steady_calls, phase.steady_bytes),
    )
    for part, rounds, activation in parts:
        if not rounds and (part != "load" or not phase.uses):
            continue
        calls = tuple(use.group_calls_in(part)[k] if use else 0 for use, k in pairs)
        cpu_seconds, secondary_bytes = (
            [0.0] * len(variant_choices),
            [(0,) * len(problem.secondaries)] * len(variant_choices),
        )
        for n, (use, component) in enumerate(zip(uses, components, strict=True)):
            if use is None:
                continue
            variant = variant_choices[n].variant
            triples = zip(component.groups, use.group_calls_in(part), use.seconds, strict=True)
            away = [of for of in triples if variant.device != "device" or of[0].secondary]
            cpu_seconds[n] = sum(
                (len(group.blocks) * times * seconds for group, times, seconds in away), 0.0
            )
            chosen = replace(component, variants=(variant,))
            if rounds:
                cpu_seconds[n] += use.calls_in(part) * sum(
                    transfer_seconds(problem, use, chosen).values()
                )
                numbers = range(1, len(problem.secondaries) + 1)
                secondary_bytes[n] = tuple(
                    bytes_on_secondary(activation, [(use, chosen)], number) for number in numbers
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
                _seconds(problem, group, variant_choices, use, own) if use else 0.0
                for group, (use, _) in zip(groups, pairs, strict=True)
            ),
            passes=tuple(use.passes_of(k) if use else 1 for use, k in pairs),
            used=frozenset(group.component for group, n in zip(groups, calls, strict=True) if n),
            entered=frozenset(
                c for c, of in enumerate(problem.components) if of.name in own and part != "load"
            ),
            cpu_seconds=tuple(cpu_seconds),
            secondary_bytes=tuple(secondary_bytes),
            own_seconds=tuple(
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
    own: Mapping[str, Use],
) -> float:
    """Seconds of one block of ``group`` in one call; 0 where they count in `Interval.cpu_seconds`.
    ``use``: with the seconds of the variant; ``own``: without."""
    if group.mirror < 0:
        return 0.0 if group.secondary else use.seconds[group.index]
    component, here = (
        problem.components[group.component],
        variant_choices[group.variant_choice].variant,
    )
    there, k = twin(component, here, group.secondary), group.index
    extra = there.block_seconds[k] if there is not None and there.block_seconds else 0.0
    seconds = block_seconds(own[component.name], component)[k]
    return max(0.0, here.slowdown * seconds * slowdown_of(component, group.secondary) + extra)


def spill_gaps_of(
    problem: Problem, loads: Mapping[int, int], run_length: int, count: int
) -> tuple[SpillGap, ...]:
    """All spill gaps of all values, in each run (see `SpillGap`). Only gaps whose first phase and
    following phase both have a load slot are returned.

    ``loads``: index of a phase -> index of its load slot in the first run. ``count``: number of
    intervals of the program, ``run_length`` of them in each run.
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
                found.append((number, value, loads[start], loads[phase]))
            start = None
    on = problem.hardware
    return tuple(
        SpillGap(
            number,
            value.nbytes,
            run_start + out,
            run_start + back,
            value.copy_seconds(on, to_host=True),
            value.copy_seconds(on, to_host=False),
        )
        for run_start in range(0, count, max(run_length, 1))
        for number, value, out, back in found
    )
