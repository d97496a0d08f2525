"""The constraints of a program: seconds and bytes of its slots, in the terms of its variables.

`Rows` states each of them once, for two kinds of variables: columns of a MILP
(`graphrun.solve.columns`) give expressions for its rows, the integers of a `Choice` give exact
numbers. `graphrun.solve.program` names the variables and the constants.

    x         blocks copied to the device during the slot. It follows from K and d:
                  group that the slot does not run       x = d: loaded for a later slot (prefetch)
                  group that it runs, not streamable     x = 0: all of its blocks are present
                  group that it runs, streamable         x = n*p*(nb - K) - (p - 1)*d: a streamed
                                                         layer is copied every time that it runs, a
                                                         loaded layer once; p = 1 for blocks
    ring buffer   bytes >= L + M
                  L >= b*s
                  M >= b*(s - r) for each further block: room next to the largest one, except where
                       r = 1
    seconds   D >= the sum over overlap sets of max(compute + lost_seconds*(x - d), copies +
                   compute of the groups with r = 1, reads from disk)
                   + compute on the CPU and on secondary devices
                   + transfers to secondary devices and back
              D >= load_seconds*x summed over the groups of a device + spills, for each device: each
                   has its own link. If the main device cannot copy during compute
                   (`serial_copies`), its copies are added to the first sum instead
              D >= compute of copies on secondary devices + transfers to them and back
              D >= disk_seconds*x summed over all groups + reads
              In all: the sum of D + first_touch_seconds * the most bytes on the main device
              An overlap set is one block group, or all groups of layers in one child module: its
              copies overlap all of its compute.
    bytes     main device       sum b*(K + d) + ring buffers + activation + values + inputs
              secondary device  sum b*(K + d) of its groups + the largest activation of a component
                                that computes there
              RAM               backing stores + bytes that reading them takes + spilled values +
                                activation on the CPU
              page-locked RAM   page-locked backing stores
              Each is at most its budget in every slot.

    rows_of(program, choice).seconds()        of all runs
    rows_of(program, choice).bytes(3, 0)      in slot 3 on the main device
    excess_bytes(program, choice)             beyond the budgets
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from graphrun.solve.linear import Linear
from graphrun.solve.program import HOST_TIERS, Choice, Memory, Program

Quantity = TypeVar("Quantity", Linear, float)


class Variables(ABC, Generic[Quantity]):
    """Variables of a program by number of interval t, group j, variant choice n and spill gap g."""

    @abstractmethod
    def present(self, t: int, j: int) -> Quantity:
        """Return K."""

    @abstractmethod
    def loads(self, t: int, j: int) -> Quantity:
        """Return d."""

    @abstractmethod
    def blocks(self, j: int) -> Quantity:
        """Return nb if the variant of the group is chosen, else 0."""

    @abstractmethod
    def streamed(self, t: int, j: int) -> Quantity:
        """Return s."""

    @abstractmethod
    def single(self, t: int, j: int) -> Quantity:
        """Return r."""

    @abstractmethod
    def further_blocks(self, t: int, j: int) -> Quantity:
        """Return the blocks of the group with room in the ring buffer next to the largest block."""

    @abstractmethod
    def chosen(self, n: int) -> Quantity:
        """Return y."""

    @abstractmethod
    def reads(self, t: int, n: int) -> Quantity:
        """Return 1 if the backing store is read from disk in the interval, else 0."""

    @abstractmethod
    def holds(self, t: int, n: int) -> Quantity:
        """Return 1 if host memory has the backing store in the interval, else 0."""

    @abstractmethod
    def spilled(self, g: int) -> Quantity:
        """Return 1 if the value is spilled, else 0."""

    @abstractmethod
    def maximum(self, parts: Iterable[Quantity], scale: int | Literal["seconds"]) -> Quantity:
        """Return the largest of ``parts``, at least 0; ``scale``: bytes of a device, or seconds."""

    @abstractmethod
    def any_of(self, flags: Sequence[Quantity]) -> Quantity:
        """Return 1 if one of ``flags`` is 1, else 0."""

    @abstractmethod
    def number(self, value: float) -> Quantity:
        """Return ``value`` as a quantity."""

    @abstractmethod
    def total(self, parts: Iterable[Quantity]) -> Quantity:
        """Return the sum of ``parts``."""

    # While the solver still chooses how components are split, these methods return the seconds and
    # bytes of the splits. A chosen split is part of the program's groups: they then return nothing.

    def split_seconds(self, t: int) -> Sequence[Quantity]:
        """Return the seconds of split components on secondary devices, and of transfers."""
        return ()

    def saved_seconds(self, t: int, j: int) -> Sequence[Quantity]:
        """Return minus the seconds of compute that the main device saves by mirror groups."""
        return ()

    def split_working_sets(self, t: int, secondary: int) -> Sequence[Quantity]:
        """Return the bytes beyond weights on ``secondary``, for each segment that may be there.

        A segment is consecutive blocks of a split component (`graphrun.solve.split_columns`).
        """
        return ()


class Rows(Generic[Quantity]):
    """Seconds and bytes of the intervals of ``program`` for the values of ``variables``.

    ``full_overlap``: every copy overlaps all compute of its slot, which gives a lower bound.
    """

    def __init__(
        self,
        program: Program,
        variables: Variables[Quantity],
        *,
        full_overlap: bool = False,
    ) -> None:
        self.program: Program = program
        self.variables: Variables[Quantity] = variables
        self._full_overlap = full_overlap
        self._copied_blocks: dict[tuple[int, int], Quantity] = {}
        self._activations: dict[int, tuple[Quantity, Quantity]] = {}

    # ---- Copies

    def copied_blocks(self, t: int, j: int) -> Quantity:
        """Return x of group ``j`` in ``t``."""
        if (t, j) not in self._copied_blocks:
            self._copied_blocks[t, j] = self._count_copied_blocks(t, j)
        return self._copied_blocks[t, j]

    def _count_copied_blocks(self, t: int, j: int) -> Quantity:
        interval, variables = self.program.intervals[t], self.variables
        calls, passes = interval.calls[j], interval.passes[j]
        if not calls:
            return variables.loads(t, j)
        if not self.program.groups[j].streamable:
            return variables.number(0)
        copies = (variables.blocks(j) - variables.present(t, j)) * (calls * passes)
        return copies - variables.loads(t, j) * (passes - 1) if passes > 1 else copies

    def streaming_groups(self, t: int) -> dict[int, list[int]]:
        """Return the groups that may be streamed in interval ``t``, by variant choice."""
        calls, groups_by_choice = self.program.intervals[t].calls, dict[int, list[int]]()
        for j, group in enumerate(self.program.groups):
            if calls[j] and group.streamable:
                groups_by_choice.setdefault(group.variant_choice, []).append(j)
        return groups_by_choice

    def ring_buffer_bytes(self, t: int, members: Sequence[int]) -> Quantity:
        """Return L + M of the groups ``members``; 0 without streamed blocks."""
        variables, groups = self.variables, self.program.groups
        largest = (variables.streamed(t, j) * groups[j].held_bytes for j in members)
        rooms = (variables.further_blocks(t, j) * groups[j].held_bytes for j in members)
        return variables.maximum(largest, 0) + variables.maximum(rooms, 0)

    def moved_bytes(self) -> Quantity:
        """Return the bytes copied to the device in all runs: blocks and restored values."""
        program, parts = self.program, list[Quantity]()
        for t, interval in enumerate(program.intervals):
            parts += [
                self.copied_blocks(t, j) * (int(interval.weight) * group.block_bytes)
                for j, group in enumerate(program.groups)
            ]
        for g, gap in enumerate(program.spill_gaps):
            runs = int(program.intervals[gap.restore_slot].weight)
            parts.append(self.variables.spilled(g) * (runs * gap.nbytes))
        return self.variables.total(parts)

    def copy_seconds(self) -> Quantity:
        """Return the seconds of all copies of blocks in all runs."""
        return self.variables.total(
            self.copied_blocks(t, j) * (interval.weight * group.load_seconds)
            for t, interval in enumerate(self.program.intervals)
            for j, group in enumerate(self.program.groups)
        )

    # ---- Seconds

    def seconds(self: Rows[float]) -> float:
        """Return the seconds of all runs."""
        seconds = self.first_touch_seconds(self.peak_bytes(0))
        for t, interval in enumerate(self.program.intervals):
            seconds += self.slot_seconds(t) * interval.weight
        return seconds

    def first_touch_seconds(self, peak_bytes: Quantity) -> Quantity:
        """Return the seconds of first writes to memory in all runs, with a peak of ``peak_bytes``.

        Freed memory is used again, so each byte up to the peak counts once. A single further run
        has the memory of the first run.
        """
        is_further = self.program.only_run == "further"
        seconds = 0.0 if is_further else self.program.problem.hardware.first_touch_seconds
        return peak_bytes * seconds

    def slot_seconds(self, t: int) -> Quantity:
        """Return D of interval ``t``, executed once."""
        return self.variables.maximum(self._channel_seconds(t), "seconds")

    def _channel_seconds(self, t: int) -> Iterator[Quantity]:
        """Yield the seconds of interval ``t``: compute, the copies to each device, the disk."""
        program, variables = self.program, self.variables
        interval, groups = program.intervals[t], program.groups
        copies = [self.copied_blocks(t, j) for j in range(len(groups))]
        pairs = list(zip(copies, groups, strict=True))
        load = [x * group.load_seconds for x, group in pairs]
        disk = [x * group.disk_seconds for x, group in pairs]
        busy = [
            self._overlap_set_seconds(t, members, load, disk) for members in program.overlap_sets[t]
        ]
        busy += [variables.chosen(n) * s for n, s in enumerate(interval.off_device_seconds) if s]
        busy += variables.split_seconds(t)
        links = [
            [seconds for seconds, group in zip(load, groups, strict=True) if group.secondary == n]
            for n in program.devices
        ]
        links[0] += [
            variables.spilled(g) * seconds
            for g, gap in enumerate(program.spill_gaps)
            if (seconds := gap.seconds(t))
        ]
        disk += [
            variables.reads(t, n) * variant_choice.read_seconds
            for n, variant_choice in enumerate(program.variant_choices)
            if variant_choice.read_seconds
        ]
        copy_seconds = [variables.chosen(n) * s for n, s in enumerate(interval.beside_seconds) if s]
        if program.problem.hardware.serial_copies:
            busy += links.pop(0)
        yield variables.total(busy)
        yield from map(variables.total, links)
        if copy_seconds:
            yield variables.total(copy_seconds)
        yield variables.total(disk)

    def _overlap_set_seconds(
        self, t: int, members: Sequence[int], load: Sequence[Quantity], disk: Sequence[Quantity]
    ) -> Quantity:
        """Return the seconds of one overlap set; ``load``, ``disk``: seconds of all groups."""
        variables, seconds = self.variables, self.program.compute_seconds[t]
        choice = variables.chosen(self.program.groups[members[0]].variant_choice)
        savings = [part for j in members for part in variables.saved_seconds(t, j)]
        compute = choice * sum(seconds[j] for j in members) + variables.total(savings)
        if self._full_overlap:
            return compute
        compute += self._lost_seconds(t, members)
        copies = [load[j] for j in members]
        serial = [
            variables.single(t, j) * seconds[j]
            for j in members
            if self.program.groups[j].streamable
        ]
        parts = [compute, variables.total(copies), variables.total(disk[j] for j in members)]
        parts += [variables.total(copies + serial + savings)] if serial else []
        return variables.maximum(parts, "seconds")

    def _lost_seconds(self, t: int, members: Sequence[int]) -> Quantity:
        """Return the seconds of compute that reads for streamed blocks of ``members`` take."""
        return self.variables.total(
            (self.copied_blocks(t, j) - self.variables.loads(t, j)) * group.lost_seconds
            for j in members
            if (group := self.program.groups[j]).lost_seconds and group.streamable
        )

    # ---- Bytes

    def bytes(self, t: int, memory: Memory) -> Quantity:
        """Return the bytes in ``memory`` in interval ``t``; on disk, of the whole run."""
        if isinstance(memory, int):
            return self._device_bytes(t, memory)
        if memory == "disk":
            return self._stored_bytes()
        return self._host_bytes(t, memory)

    def peak_bytes(self: Rows[float], memory: Memory) -> float:
        """Return the most bytes in ``memory`` in any interval."""
        return max((self.bytes(t, memory) for t in range(len(self.program.intervals))), default=0)

    def _device_bytes(self, t: int, device: int) -> Quantity:
        variables, parts = self.variables, list[Quantity]()
        for j, group in enumerate(self.program.groups):
            if group.secondary == device:
                parts.append((variables.present(t, j) + variables.loads(t, j)) * group.held_bytes)
        if device:
            parts.append(self._working_set(t, device))
            return variables.total(parts)
        parts += [self.ring_buffer_bytes(t, js) for js in self.streaming_groups(t).values()]
        spills = [
            variables.spilled(g) * -gap.nbytes
            for g, gap in enumerate(self.program.spill_gaps)
            if gap.absent(t)
        ]
        return variables.total(parts + spills) + self.fixed_bytes(t)

    def fixed_bytes(self, t: int) -> Quantity:
        """Return the main device's bytes beyond weights and ring buffers, nothing spilled."""
        return self.activation_bytes(t)[0] + self.program.intervals[t].fixed_bytes

    def _working_set(self, t: int, secondary: int) -> Quantity:
        """Return the bytes beyond weights on ``secondary`` in interval ``t``."""
        pairs = enumerate(self.program.intervals[t].secondary_bytes)
        working_sets = [
            self.variables.chosen(n) * bytes_by_secondary[secondary - 1]
            for n, bytes_by_secondary in pairs
            if bytes_by_secondary[secondary - 1]
        ]
        working_sets += self.variables.split_working_sets(t, secondary)
        if not working_sets:
            return self.variables.number(0)
        return self.variables.maximum(working_sets, secondary)

    def activation_bytes(self, t: int) -> tuple[Quantity, Quantity]:
        """Return the activation bytes in ``t``, scratch included: on the device, on the host.

        If nothing computes on the main device, only the pipeline's own code has activation there.
        If all components of the phase compute on the CPU, their activation is on the host.
        """
        if t not in self._activations:
            self._activations[t] = self._activation_bytes(t)
        return self._activations[t]

    def _activation_bytes(self, t: int) -> tuple[Quantity, Quantity]:
        program, variables, interval = self.program, self.variables, self.program.intervals[t]
        if not interval.rounds:
            return variables.number(0), variables.number(0)
        nbytes, code_bytes = interval.activation_bytes, interval.pipeline_code_bytes
        pairs_by_component = [
            [
                (program.variant_choices[n].variant, variables.chosen(n))
                for n in program.choices_of[c]
            ]
            for c in sorted(interval.phase_components)
        ]
        if not pairs_by_component:
            return variables.number(nbytes), variables.number(0)
        on_device = [
            variables.total(y for variant, y in pairs if variant.device == "device")
            for pairs in pairs_by_component
        ]
        computes_on_main = computes_on_any_device = variables.any_of(on_device)
        if len(program.devices) > 1:
            computes_on_any_device = variables.any_of(
                [
                    variables.total(y for variant, y in pairs if variant.device != "cpu")
                    for pairs in pairs_by_component
                ]
            )
        traced, parts = computes_on_main * (nbytes - code_bytes), list[Quantity]()
        for pairs in pairs_by_component:
            scratch = [
                y * variant.scratch_bytes for variant, y in pairs if variant.device == "device"
            ]
            parts.append(traced + variables.total(scratch))
            # As in `graphrun.model.choices.activation_bytes`: if a component computes on the main
            # device, the largest scratch of all components counts, also of a component elsewhere.
            # y + computes_on_main - 1 is 1 exactly if this component is elsewhere (y) and another
            # one computes on the main device. In a phase of one component that cannot be.
            parts += [
                traced + (y + computes_on_main - 1) * variant.scratch_bytes
                for variant, y in pairs
                if variant.device != "device"
                and variant.scratch_bytes
                and len(pairs_by_component) > 1
            ]
        largest = parts[0] if len(parts) == 1 else variables.maximum(parts, 0)
        return largest + code_bytes, computes_on_any_device * -nbytes + nbytes

    def _host_bytes(self, t: int, tier: Literal["ram", "pinned"]) -> Quantity:
        program, variables, parts = self.program, self.variables, list[Quantity]()
        for n, variant_choice in enumerate(program.variant_choices):
            variant = variant_choice.variant
            nbytes = variant.locked_bytes if tier == "pinned" else variant.host_bytes
            if variant_choice.is_used and nbytes:
                parts.append(variables.holds(t, n) * nbytes)
            if variant_choice.is_used and tier == "ram" and variant.transient_bytes:
                parts.append(variables.reads(t, n) * variant.transient_bytes)
        if tier == "ram":
            parts.append(self.activation_bytes(t)[1])
            parts += [
                variables.spilled(g) * gap.nbytes
                for g, gap in enumerate(program.spill_gaps)
                if gap.spill_slot <= t <= gap.restore_slot
            ]
        return variables.total(parts)

    def _stored_bytes(self) -> Quantity:
        return self.variables.total(
            self.variables.chosen(n) * variant_choice.variant.stored_bytes
            for n, variant_choice in enumerate(self.program.variant_choices)
            if variant_choice.is_used
        )


class Integers(Variables[float]):
    """The variables as the integers of ``choice``. ``program`` has one variant per component."""

    def __init__(self, program: Program, choice: Choice) -> None:
        self._program, self._choice = program, choice
        self._present, self._loads, self._depths = (
            array.tolist() for array in (choice.present, choice.loads, choice.depths)
        )
        self._rooms: dict[tuple[int, int], int] = {}

    def present(self, t: int, j: int) -> int:
        return int(self._present[t][j])

    def loads(self, t: int, j: int) -> int:
        return int(self._loads[t][j])

    def blocks(self, j: int) -> int:
        return self._program.groups[j].count

    def streamed(self, t: int, j: int) -> int:
        is_run = bool(self._program.intervals[t].calls[j])
        return int(is_run and self.present(t, j) + self.loads(t, j) < self.blocks(j))

    def further_blocks(self, t: int, j: int) -> int:
        return self.streamed(t, j) * int(self._depths[t][j] - 1)

    def single(self, t: int, j: int) -> int:
        group = self._program.groups[j]
        return int(bool(self.streamed(t, j)) and self._room(t, group.component) < group.held_bytes)

    def _room(self, t: int, component: int) -> int:
        """Return M."""
        key = t, component
        if key not in self._rooms:
            groups, members = self._program.groups, self._program.groups_of[component]
            self._rooms[key] = max(
                (self.further_blocks(t, j) * groups[j].held_bytes for j in members), default=0
            )
        return self._rooms[key]

    def chosen(self, n: int) -> int:
        return 1

    def reads(self, t: int, n: int) -> int:
        return int(self._choice.reads[n] == t)

    def holds(self, t: int, n: int) -> int:
        read_slot, drop_slot = self._choice.reads[n], self._choice.drops[n]
        is_read = 0 <= read_slot <= t or self._program.has_store(n)
        return int(is_read and not 0 <= drop_slot <= t)

    def spilled(self, g: int) -> int:
        return int(self._choice.spills[g])

    def maximum(self, parts: Iterable[float], scale: int | Literal["seconds"]) -> float:
        return max([0, *parts])

    def any_of(self, flags: Sequence[float]) -> float:
        return max(flags)

    def number(self, value: float) -> float:
        return value

    def total(self, parts: Iterable[float]) -> float:
        return sum(parts)


def rows_of(program: Program, choice: Choice, *, full_overlap: bool = False) -> Rows[float]:
    """Return the seconds and bytes of ``choice``. ``program`` has one variant per component."""
    return Rows(program, Integers(program, choice), full_overlap=full_overlap)


def excess_bytes(program: Program, choice: Choice) -> dict[Memory, NDArray[np.int64]]:
    """Return the exact bytes above each exceeded budget, per interval."""
    rows, excess = rows_of(program, choice), dict[Memory, NDArray[np.int64]]()
    for memory in program.memories:
        if (limit := program.limit(memory)) is None:
            continue
        slots = range(len(program.intervals))
        over_bytes = np.array([max(0, int(rows.bytes(t, memory)) - limit) for t in slots], np.int64)
        if over_bytes.any():
            excess[memory] = over_bytes
    return excess


def with_drops(program: Program, choice: Choice, *, force: bool = False) -> Choice:
    """Return ``choice`` with every backing store dropped after its last use, where RAM needs that.

    ``force``: everywhere. Sessions keep all backing stores.
    """
    if program.session:
        return choice
    rows, slots = rows_of(program, choice), range(len(program.intervals))
    fits = not force and all(
        limit is None or rows.bytes(t, tier) <= limit
        for tier in HOST_TIERS
        for limit in [program.limit(tier)]
        for t in slots
    )
    if fits:
        return choice
    drops = list[int]()
    for n, (variant_choice, read_slot) in enumerate(
        zip(program.variant_choices, choice.reads, strict=True)
    ):
        groups = [
            j for j, group in enumerate(program.groups) if program.stores[group.variant_choice] == n
        ]
        uses = [
            t
            for t in slots
            if program.called_on_cpu(n, t) or any(rows.copied_blocks(t, j) > 0 for j in groups)
        ]
        drop_slot = max(uses, default=-1) + 1
        has_store = (
            variant_choice.is_used
            and program.stores[n] == n
            and (program.has_store(n) or read_slot >= 0)
        )
        drops.append(drop_slot if has_store and drop_slot < len(slots) else -1)
    return replace(choice, drops=tuple(drops))
