"""The program as a mixed-integer linear program (MILP): columns, rows, scaling, and the solver's
answer as integers.

Bytes are scaled so that the effective budget is 1000, seconds so that all compute and one copy of
every block together are 100. HiGHS accepts rows that are violated by 1e-6 and integers that are off
by as much. In scaled units that is 1e-9 of the budget, less than the rounding of one allocation on
any card. With unscaled byte coefficients HiGHS reported 18.25 s as optimal where 15.99 s was.

Every variant of a component has integers of its own, bounded by whether the variant is chosen: that
keeps the relaxation tight.

Rows for the device are described in `graphrun.solve.program`. Rows for host memory, left out where
they cannot bind:

    y[w]          variant choice w is taken; exactly one per component F[w,t]        its backing
    store is read in interval t: at most once, no later than its first use h[w,t]        its backing
    store is held, where RAM may bind: h[t] <= h[t-1] + F[t]; elsewhere it is held from its read on
    RAM(t)        sum host_bytes*h + transient_bytes*F + spilled values + activation on the CPU <=
    RAM; page-locked bytes likewise
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, combinations, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from graphrun.model.choices import BUFFERED_BLOCKS, activation_bytes
from graphrun.model.plan import Split
from graphrun.model.problem import LiveTensor
from graphrun.model.splits import Segment, block_arguments, in_a_row, segments_of, with_splits
from graphrun.solve.linear import GAP, Linear, MilpModel, Row, total
from graphrun.solve.program import Choice, Group, Program

Tier = Literal["ram", "pinned", "disk"]
Margins = Mapping[str, NDArray[np.int64]]  # budget -> bytes to keep free per interval

MEMORY_SCALE = 1000.0
TIME_SCALE = 100.0
BLOCK_TOLERANCE = 1e-5  # in blocks: how far the solver may be from an integer
# with components split into layers: their many small groups leave far more plans that are equally
# good
COARSE_GAP = 1e-3
ZERO, ONE = Linear(), Linear({}, 1.0)
NEAR = 3.0  # blocks by which a group may differ from a known choice


class Formulation:
    """Rows and columns of ``program``. ``factors[t]`` multiplies the copy times of interval t,
    empty: 1; ``margins``: bytes to keep free; ``minimised_tier``: host tier whose bytes are to be
    minimised; ``depth``: blocks a ring buffer holds at once, unless single-buffered; ``leaves``:
    blocks per group to be on the device at the end; ``near``: a choice of a program with the same
    groups and intervals, from which K and d differ by at most NEAR, where no component is split
    into layers.

    Goals, in scaled units: ``seconds``; ``copying``, seconds of copying blocks; ``moved``, bytes
    copied; ``memory``, the peak plus a little of the mean, so that nothing is loaded earlier than
    useful; ``peak`` alone; ``tier_bytes``, bytes of the tier to minimise.
    """

    def __init__(
        self,
        program: Program,
        factors: Sequence[float] = (),
        margins: Margins | None = None,
        minimised_tier: Tier | None = None,
        depth: int = BUFFERED_BLOCKS,
        leaves: Sequence[int] = (),
        near: Choice | None = None,
    ) -> None:
        self.program, problem, intervals = program, program.problem, program.intervals
        self.factors, self.margins, self.minimised_tier, self.depth = (
            factors,
            margins or {},
            minimised_tier,
            depth,
        )
        self.leaves, self.near = leaves, near
        self.bytes_unit = max(1, problem.effective_bytes) / MEMORY_SCALE
        self.seconds_unit = max(program.reference_seconds, 1e-9) / TIME_SCALE
        model = self.model = MilpModel(
            COARSE_GAP if any(group.by_layer for group in program.groups) else GAP
        )
        self.present: list[list[Linear]] = []
        self.loaded: list[list[Linear]] = []
        self.single_buffered: list[
            dict[int, Linear]
        ] = []  # per interval: r of the groups that may be streamed
        self._host_activations: list[Linear] = []
        self._uses = [
            np.flatnonzero(program.calls[:, j]).tolist() for j in range(len(program.groups))
        ]
        self.peak = model.column()
        self._add_variants()
        self._add_splits()
        self._spills = [model.binary() for _ in program.spill_gaps]
        seconds, moved, copying, occupied, singles = [], [], [], [], dict[int, float]()
        for t, interval in enumerate(intervals):
            copies, ring_buffers = self._add_groups(t)
            seconds.append(interval.weight * self._time(t, copies))
            used = self._device_use(t, ring_buffers)
            model.add(
                used + self._margin("device", t) / self.bytes_unit <= MEMORY_SCALE,
                used <= self.peak,
            )
            occupied += [of * (1e-3 / len(intervals)) for of in (used, *self._add_secondaries(t))]
            for group, copied in zip(program.groups, copies, strict=True):
                moved.append(copied * (interval.weight * (group.block_bytes / self.bytes_unit)))
                copying.append(
                    copied * (interval.weight * (group.load_seconds / self.seconds_unit))
                )
            for j, single in self.single_buffered[
                t
            ].items():  # a small cost, so that r = 1 is not chosen where it saves nothing
                cost = 2e-3 * program.groups[j].block_bytes / self.bytes_unit / len(intervals)
                singles |= dict.fromkeys(single.terms, cost)
        for gap, spilled in zip(program.spill_gaps, self._spills, strict=True):
            moved.append(spilled * (intervals[gap.back].weight * gap.nbytes / self.bytes_unit))
        end = len(intervals) - 1
        if (
            program.session and program.part != "first"
        ):  # a further run starts with blocks that the runs before it leave
            start = 0 if program.part else program.run_length
            for j in range(len(program.groups)) if start != end else ():
                model.add(self._kept(j, start, end))
        if near is not None and not any(group.by_layer for group in program.groups):
            for columns, known in ((self.present, near.present), (self.loaded, near.loaded)):
                for of, count in zip(chain(*columns), known.ravel().tolist(), strict=True):
                    model.add(of >= count - NEAR, of <= count + NEAR)
        for j, count in enumerate(leaves):
            after = self.present[end][j] + self.loaded[end][j]
            model.add(
                after >= float(count) if program.groups[j].movable else after.equals(float(count))
            )
        self.seconds, self.moved, self.copying = total(seconds), total(moved), total(copying)
        self.memory = total([Linear(singles), *occupied, self.peak])
        self.tier_bytes = self._add_host_rows()

    def _margin(self, budget: str, t: int) -> int:
        return int(self.margins[budget][t]) if budget in self.margins else 0

    # ---- Variants and backing stores

    def _add_variants(self) -> None:
        """Columns of the variant choices and of their backing stores: y, and F by interval."""
        program, model = self.program, self.model
        self.chosen: list[Linear] = []
        for numbers in program.choices_of:
            several = [model.binary() for _ in numbers] if len(numbers) > 1 else []
            if several:
                model.add(total(several).equals(1.0))
            self.chosen += several or [ONE for _ in numbers]
        may_drop = (self._binds("ram") or self._binds("pinned")) and not program.session
        self._reads: list[dict[int, Linear]] = []
        self._held: list[list[Linear]] = []  # empty where it is held from its read on
        for number, (of, chosen) in enumerate(
            zip(program.variant_choices, self.chosen, strict=True)
        ):
            first = program.first_use(number) if of.read_seconds is not None else -1
            reads = (
                {t: model.binary() for t in range(first + 1)} if program.part != "further" else {}
            )
            if reads:
                model.add(total(reads.values()).equals(chosen))
            held: list[Linear] = []
            for t in range(len(program.intervals)) if may_drop and of.used else ():
                held.append(model.binary())
                before = held[t - 1] if t else chosen if of.read_seconds is None else ZERO
                model.add(held[t] <= before + reads.get(t, ZERO))
                if t in reads:
                    model.add(held[t] >= reads[t])
            self._reads.append(reads)
            self._held.append(held)

    def _holds(self, number: int, t: int) -> Linear:
        """1 where the backing store of variant choice ``number`` is held in interval ``t``."""
        if self._held[number]:
            return self._held[number][t]
        if self._reads[number]:
            return total(read for at, read in self._reads[number].items() if at <= t)
        read = (
            self.program.variant_choices[number].read_seconds is None
            or self.program.part == "further"
        )
        return self.chosen[number] if read else ZERO

    def _always_holds(self, number: int, t: int) -> bool:
        """Whether it is certainly held in interval ``t`` if the variant is chosen."""
        return not self._held[number] and t >= max(self._reads[number], default=0)

    # ---- Splits

    def _add_splits(self) -> None:
        """Columns of the blocks on secondary devices, h by segment: those on one secondary device
        are in a row."""
        program, model, problem = self.program, self.model, self.program.problem
        self._moved: dict[
            int, Linear
        ] = {}  # for each group with a mirror, its blocks on the secondary device
        self._away: dict[int, list[int]] = {}  # for each group, those that may have blocks of it
        self._segments: dict[int, list[Segment]] = {}  # of each variant choice that may be split
        self._h: dict[
            tuple[int, int], list[tuple[Linear, Linear]]
        ] = {}  # by variant choice and secondary device: h, and 1 where h > 0
        for j, group in enumerate(program.groups):
            if group.mirror < 0:
                continue
            self._away.setdefault(group.mirror, []).append(j)
            pair = number, _ = group.variant_choice, group.secondary
            if number not in self._segments:
                self._segments[number] = segments_of(problem, problem.components[group.component])
            if pair not in self._h:
                counts = [float(of.stop - of.start) for of in self._segments[number]]
                own = self._h[pair] = [
                    (model.column(0.0, count, True), model.binary()) for count in counts
                ]
                for (moved, touched), count in zip(own, counts, strict=True):
                    model.add(
                        moved <= touched * count, moved >= touched, touched <= self.chosen[number]
                    )
                if not program.full_overlap:
                    self._add_interval(own, counts)
            pairs = zip(self._segments[number], self._h[pair], strict=True)
            self._moved[j] = total(moved for of, (moved, _) in pairs if of.group == group.index)
        for number, segments in self._segments.items():
            several = [own for (of, _), own in self._h.items() if of == number]
            for of, each in (
                zip(segments, zip(*several, strict=True), strict=True) if len(several) > 1 else ()
            ):
                model.add(total(moved for moved, _ in each) <= float(of.stop - of.start))
        couples = combinations(self._h.items(), 2) if not program.full_overlap else ()
        for (one, ones), (
            other,
            others,
        ) in couples:  # one interval at most goes on in the next segment
            for both in (
                zip(pairwise(ones), pairwise(others), strict=True) if one[0] == other[0] else ()
            ):
                model.add(total(touched for own in both for _, touched in own) <= 3.0)

    def _add_interval(self, own: Sequence[tuple[Linear, Linear]], counts: Sequence[float]) -> None:
        """Rows that make the blocks on a secondary device, by segment of ``counts`` blocks, ones in
        a row: one segment at most begins what others go on with, and those between two others are
        there entirely."""
        model, begins = self.model, list[Linear]()
        for (_, before), (_, touched) in pairwise(own) if len(own) > 2 else ():
            begins.append(model.column())
            model.add(begins[-1] >= touched - before)
        if begins:
            model.add(total([own[0][1], *begins]) <= 1.0)
        for n in range(1, len(own) - 1):
            model.add(own[n][0] >= (own[n - 1][1] + own[n + 1][1] - 1.0) * counts[n])

    def _all_of(self, j: int) -> Linear:
        """The number of blocks of group ``j``, if the variant is chosen, which is not so for one on
        the CPU."""
        group = self.program.groups[j]
        if group.mirror >= 0:
            return self._moved[j]
        every = self.chosen[group.variant_choice] * float(group.count)
        return (
            total([every, *(self._moved[away] * -1.0 for away in self._away[j])])
            if j in self._away
            else every
        )

    def _splits_in(
        self, values: NDArray[np.float64], numbers: Collection[int]
    ) -> tuple[Split, ...]:
        """The splits of the variant choices ``numbers``."""
        found, problem = list[Split](), self.program.problem
        for number in numbers:
            component = problem.components[self.program.variant_choices[number].component]
            pairs = [(secondary, own) for (n, secondary), own in self._h.items() if n == number]
            counts = {
                secondary: {k: round(moved.at(values)) for k, (moved, _) in enumerate(own)}
                for secondary, own in pairs
            }
            blocks = in_a_row(component, self._segments[number], counts) if pairs else {}
            found += [(component.name, secondary, of) for secondary, of in blocks.items()]
        return tuple(found)

    def _transfer(self, t: int) -> list[Linear]:
        """Seconds of blocks on secondary devices in interval ``t``, and of what crosses to them and
        back."""
        program, unit, found = self.program, self.seconds_unit, list[Linear]()
        interval = program.intervals[t]
        phase = program.problem.phases[interval.phase]
        for (number, secondary), own in self._h.items():
            name = program.problem.components[program.variant_choices[number].component].name
            use = next((use for use in phase.uses if use.component == name), None)
            if use is None or not (calls := use.calls_in(interval.part)):
                continue
            for j, group in enumerate(program.groups):
                if group.mirror >= 0 and (group.variant_choice, group.secondary) == (
                    number,
                    secondary,
                ):
                    found.append(
                        self._moved[j] * (program.calls[t, j] * interval.seconds[j] / unit)
                    )
            here = [touched for _, touched in own]
            found += [
                of * (calls * seconds / unit)
                for of, seconds in self._tensors(number, secondary, use.live_tensors, here)
            ]
        return found

    def _tensors(
        self, number: int, secondary: int, tensors: Sequence[LiveTensor], here: Sequence[Linear]
    ) -> Iterator[tuple[Linear, float]]:
        """For tensors that are made and got by the same segments: a column that is 1 where they
        cross to ``secondary`` or back, and seconds. ``here``: 1 for each segment with blocks there.
        Between two blocks of one segment nothing crosses."""
        problem = self.program.problem
        # -1: other code
        segment = [
            -1,
            *(n for n, of in enumerate(self._segments[number]) for _ in range(of.start, of.stop)),
        ]
        seconds = defaultdict[tuple[Literal["to", "back"], int, frozenset[int]], float](float)
        for row in tensors:
            maker, users = segment[row.maker], frozenset(segment[n] for n in row.users)
            to, back = problem.transfer_seconds(secondary, (row.nbytes, row.nbytes))
            if others := users - {maker, -1}:
                seconds["to", maker, others] += to
            if maker >= 0 and users != {maker}:
                seconds["back", maker, frozenset({-1}) if -1 in users else users - {maker}] += back
        for (way, maker, users), each in seconds.items():
            made = here[maker] if maker >= 0 else ZERO
            needs = [
                made if n < 0 else made - here[n] if way == "back" else here[n] - made
                for n in sorted(users)
            ]
            crosses = needs[0]
            if len(needs) > 1 or (maker >= 0 and -1 not in users):
                crosses = self.model.column()
                self.model.add(*(crosses >= of for of in needs))
            if each:
                yield crosses, each

    # ---- Blocks

    def _add_groups(self, t: int) -> tuple[list[Linear], dict[int, list[tuple[Linear, int]]]]:
        """Adds K, d and s of interval ``t``. Returns x per group, and the (s, group)s of each
        variant choice that may stream."""
        interval, model = self.program.intervals[t], self.model
        copies: list[Linear] = []
        streams: dict[int, list[tuple[Linear, int]]] = {}
        self.present.append([])
        self.loaded.append([])
        self.single_buffered.append({})
        for j, group in enumerate(self.program.groups):
            calls, count, chosen = (
                interval.calls[j],
                float(group.count),
                self.chosen[group.variant_choice],
            )
            whole, kept = (
                bool(calls) and not group.streamable,
                "keep" in group.demanded and self._used_before(t, j),
            )
            needed = t <= max(self._uses[j], default=-1) or (
                self.program.session and bool(self._uses[j])
            )
            computing = interval.part == "steady" and group.component in interval.used
            may_be_present, may_load = self._allowed(t, j)
            may_be_present = may_be_present and (needed or kept or not group.movable)
            may_load = may_load and needed and not whole and not computing
            all_of = self._all_of(j)
            fixed = count if (whole or kept) and not all_of.terms else 0.0
            present = model.column(fixed, count if may_be_present else 0.0, not group.by_layer)
            loaded = model.column(0.0, count if may_load else 0.0, not group.by_layer)
            self.present[t].append(present)
            self.loaded[t].append(loaded)
            after = present + loaded
            model.add(after <= all_of)
            if (whole or kept) and all_of.terms:
                model.add(present >= all_of)
            if t or self.program.part != "further":
                model.add(self._kept(j, t, t - 1))
            if not calls:
                copies.append(loaded)
                self._require_backing_store(t, group, loaded)
            elif whole:
                copies.append(ZERO)
            else:
                passes, resident = interval.passes[j], bool(group.demanded & {"keep", "whole"})
                copies.append(
                    (all_of - present) * float(calls * passes) - loaded * float(passes - 1)
                )
                self._require_backing_store(t, group, all_of - present)
                streamed = model.binary(upper=0.0 if resident else 1.0)
                if group.by_layer and not resident:  # rounding leaves layers to stream
                    model.add(streamed >= chosen)
                model.add(after + streamed * count >= all_of)
                streaming = streams.setdefault(group.variant_choice, [])
                shared = (
                    self.single_buffered[t][streaming[0][1]]
                    if group.by_layer and streaming
                    else None
                )
                self.single_buffered[t][j] = shared or model.binary()
                streaming.append((streamed, j))
        return copies, streams

    def _kept(self, j: int, t: int, before: int) -> Row:
        """K of group ``j`` in interval ``t`` against K + d of interval ``before``; -1: nothing is
        on the device before."""
        held = self.present[before][j] + self.loaded[before][j] if before >= 0 else ZERO
        present = self.present[t][j]
        return present <= held if self.program.groups[j].movable else present.equals(held)

    def _require_backing_store(self, t: int, group: Group, copied: Linear) -> None:
        """No block is copied in interval ``t`` unless the backing store is held."""
        if not self._always_holds(group.variant_choice, t):
            self.model.add(copied <= self._holds(group.variant_choice, t) * float(group.count))

    def _used_before(self, t: int, j: int) -> bool:
        """Whether an earlier interval of the same run uses group ``j``."""
        start = (
            self.program.run_length if self.program.session and t >= self.program.run_length else 0
        )
        return any(start <= use < t for use in self._uses[j])

    def _allowed(self, t: int, j: int) -> tuple[bool, bool]:
        """Whether directives allow blocks of group ``j`` to be present at the start of interval
        ``t``, and to be loaded in it."""
        group, interval, problem = (
            self.program.groups[j],
            self.program.intervals[t],
            self.program.problem,
        )
        if "drop" in group.demanded and not group.excluded:
            name = problem.components[group.component].name
            own = any(use.component == name for use in problem.phases[interval.phase].uses)
            return own and interval.part != "load", own
        return not group.excluded, not group.excluded

    # ---- Seconds

    def _time(self, t: int, copies: list[Linear]) -> Linear:
        """D, the seconds of interval ``t``."""
        program, model, interval = self.program, self.model, self.program.intervals[t]
        time = model.column()
        load, disk = self._rates(t, copies)
        seconds_of = (
            self._computed
            if program.full_overlap
            else partial(self._overlapped, load=load, disk=disk)
        )
        overlapped = [seconds_of(t, of) for of in program.overlap_sets[t]]
        on_cpu = [
            chosen * (s / self.seconds_unit)
            for s, chosen in zip(interval.cpu_seconds, self.chosen, strict=True)
            if s
        ]
        factor = self.factors[t] if self.factors else 1.0
        spills = [
            spilled * (seconds * factor / self.seconds_unit)
            for gap, spilled in zip(program.spill_gaps, self._spills, strict=True)
            if (seconds := gap.seconds(t))
        ]
        reads = [
            read[t] * (of.read_seconds * factor / self.seconds_unit)
            for of, read in zip(program.variant_choices, self._reads, strict=True)
            if t in read and of.read_seconds
        ]
        links = [
            [of for of, group in zip(load, program.groups, strict=True) if group.secondary == n]
            for n in (0, *program.secondaries)
        ]
        model.add(
            time >= total([*overlapped, *on_cpu, *self._transfer(t)]),
            time >= total([*links[0], *spills]),
        )
        for to_secondary in filter(None, links[1:]):
            model.add(time >= total(to_secondary))
        if reads or any(group.disk_seconds for group in program.groups):
            model.add(time >= total([*disk, *reads]))
        for number, of in enumerate(program.variant_choices):
            if (
                not of.computes
                and of.component in interval.entered
                and not self._always_holds(number, t)
            ):
                model.add(self._holds(number, t) >= self.chosen[number])
        return time

    def _rates(self, t: int, copies: list[Linear]) -> tuple[list[Linear], list[Linear]]:
        """Per group: seconds of its copies in interval ``t``, and of their reads from disk."""
        factor, groups = (self.factors[t] if self.factors else 1.0), self.program.groups
        load = [
            copied * (group.load_seconds * factor / self.seconds_unit)
            for group, copied in zip(groups, copies, strict=True)
        ]
        disk = [
            copied * (group.disk_seconds * factor / self.seconds_unit)
            if group.disk_seconds
            else ZERO
            for group, copied in zip(groups, copies, strict=True)
        ]
        return load, disk

    def _elsewhere(self, t: int, of: list[int]) -> list[Linear]:
        """Seconds, negative, that the device saves in interval ``t`` with blocks of the groups
        ``of`` on secondary devices."""
        unit, interval = self.seconds_unit, self.program.intervals[t]
        pairs = [(j, away) for j in of for away in self._away.get(j, ())]
        return [
            self._moved[away] * (-interval.calls[j] * interval.own_seconds[j] / unit)
            for j, away in pairs
        ]

    def _computed(self, t: int, of: list[int]) -> Linear:
        """Seconds in which the device computes with the groups ``of`` in interval ``t``."""
        seconds = sum(self.program.compute_seconds[t, of]) / self.seconds_unit
        compute, fewer = (
            self.chosen[self.program.groups[of[0]].variant_choice] * seconds,
            self._elsewhere(t, of),
        )
        return total([compute, *fewer]) if fewer else compute

    def _overlapped(self, t: int, of: list[int], load: list[Linear], disk: list[Linear]) -> Linear:
        """Seconds of the groups ``of`` in interval ``t``, whose copies overlap each other's
        compute: the longest of compute, copies, disk reads, and where r = 1 copies plus compute."""
        compute_seconds, groups = (
            self.program.compute_seconds[t] / self.seconds_unit,
            self.program.groups,
        )
        compute, fewer = self._computed(t, of), self._elsewhere(t, of)
        longest = self.model.column(0.0 if compute.terms else compute.constant)
        if compute.terms:
            self.model.add(longest >= compute)
        copied = total(load[j] for j in of)
        self.model.add(longest >= copied)
        if any(groups[j].disk_seconds for j in of):
            self.model.add(longest >= total(disk[j] for j in of))
        if serial := [
            self.single_buffered[t][j] * compute_seconds[j]
            for j in of
            if j in self.single_buffered[t]
        ]:
            self.model.add(longest >= total([copied, *serial, *fewer]))
        return longest

    # ---- Bytes

    def _device_use(self, t: int, streams: dict[int, list[tuple[Linear, int]]]) -> Linear:
        """Memory on the device in interval ``t``, scaled."""
        program, model, interval = self.program, self.model, self.program.intervals[t]
        used: list[Linear] = []
        for group, present, loaded in zip(
            program.groups, self.present[t], self.loaded[t], strict=True
        ):
            if not group.secondary:
                used.append((present + loaded) * (group.held_bytes / self.bytes_unit))
        for members in streams.values():
            largest, beside = model.column(), model.column()
            used += [largest, beside]
            for streamed, j in members:
                size, single = (
                    program.groups[j].held_bytes / self.bytes_unit,
                    self.single_buffered[t][j],
                )
                model.add(
                    largest >= streamed * size,
                    beside >= (streamed - single) * ((self.depth - 1) * size),
                )
        on_device, on_host = self._activation(t)
        self._host_activations.append(on_host)
        gaps = zip(program.spill_gaps, self._spills, strict=True)
        absent = [spilled * -float(gap.nbytes) for gap, spilled in gaps if gap.absent(t)]
        return total(
            [*used, (total([on_device, *absent]) + interval.fixed_bytes) / self.bytes_unit]
        )

    def _add_secondaries(self, t: int) -> list[Linear]:
        """Adds the rows of the secondary devices' memory in interval ``t``; returns what each of
        them holds, scaled by its budget."""
        program, model, found = self.program, self.model, list[Linear]()
        pairs = list(zip(program.groups, self.present[t], self.loaded[t], strict=True))
        for number, secondary in enumerate(program.problem.secondaries, 1):
            unit = max(1, secondary.effective_bytes) / MEMORY_SCALE
            used = [
                (present + loaded) * (group.held_bytes / unit)
                for group, present, loaded in pairs
                if group.secondary == number
            ]
            nbytes = enumerate(program.intervals[t].secondary_bytes)
            own = [self.chosen[n] * (of[number - 1] / unit) for n, of in nbytes if of[number - 1]]
            own += [of / unit for of in self._working(t, number)]
            if own:
                most = model.column()
                model.add(*(most >= of for of in own))
                used.append(most)
            found.append(total(used))
            if used:
                model.add(
                    found[-1] + self._margin(f"secondary device {number}", t) / unit
                    <= secondary.effective_bytes / unit
                )
        return found

    def _working(self, t: int, secondary: int) -> list[Linear]:
        """Bytes beyond weights on ``secondary`` in interval ``t`` for each segment that may have
        blocks there."""
        program, interval = self.program, self.program.intervals[t]
        uses, found = (
            {use.component: use for use in program.problem.phases[interval.phase].uses},
            list[Linear](),
        )
        for (number, of_secondary), own in self._h.items():
            of = program.variant_choices[number]
            if of_secondary == secondary and of.component in interval.entered:
                arguments, n = (
                    block_arguments(
                        uses[program.problem.components[of.component].name].live_tensors
                    ),
                    1,
                )
                for segment, (_, touched) in zip(self._segments[number], own, strict=True):
                    nbytes = interval.activation_bytes + of.variant.scratch_bytes + arguments[n]
                    found.append(touched * float(nbytes))
                    n += segment.stop - segment.start
        return found

    def _activation(self, t: int) -> tuple[Linear, Linear]:
        """Bytes of activation in interval ``t``: on the device, and on the host."""
        program, interval = self.program, self.program.intervals[t]
        if not interval.rounds:
            return ZERO, ZERO
        nbytes, pipeline_code_bytes = interval.activation_bytes, interval.pipeline_code_bytes
        entered = [program.choices_of[c] for c in sorted(interval.entered)]
        if all(len(of) == 1 for of in entered):
            variants = [program.variant_choices[n] for (n,) in entered]
            device = activation_bytes(nbytes, [of.variant for of in variants], pipeline_code_bytes)
            return ONE * float(device), ONE * (
                0.0 if not entered or any(of.computes for of in variants) else float(nbytes)
            )
        if len(entered) == 1:
            pairs = [(program.variant_choices[n], self.chosen[n]) for n in entered[0]]
            return total(
                y * float(activation_bytes(nbytes, [of.variant], pipeline_code_bytes))
                for of, y in pairs
            ), total(y * float(nbytes) for of, y in pairs if not of.computes)
        return self._shared_activation(nbytes, entered, pipeline_code_bytes)

    def _shared_activation(
        self, nbytes: int, entered: list[list[int]], pipeline_code_bytes: int
    ) -> tuple[Linear, Linear]:
        """`_activation` of several components, some with more than one variant. z: any of them
        computes on the device; then the activation is at least ``nbytes`` plus the largest scratch.
        It is on the host where none computes there or on a secondary device."""
        model, unit = self.model, self.bytes_unit
        activation, z = model.column(), model.column(upper=1.0)
        pairs = [[(self.program.variant_choices[n], self.chosen[n]) for n in of] for of in entered]
        on_device = [total(y for of, y in each if of.variant.device == "device") for each in pairs]
        model.add(z <= total(on_device))
        for each, here in zip(pairs, on_device, strict=True):
            scratch = [
                y * (float(of.variant.scratch_bytes) / unit)
                for of, y in each
                if of.variant.device == "device"
            ]
            model.add(
                z >= here,
                activation >= total([z * ((nbytes - pipeline_code_bytes) / unit), *scratch]),
            )
            for of, y in each:
                if of.variant.device != "device" and (extra := float(of.variant.scratch_bytes)):
                    model.add(
                        activation
                        >= z * ((nbytes - pipeline_code_bytes) / unit)
                        + (y + z - 1.0) * (extra / unit)
                    )
        somewhere = z
        if self.program.secondaries:
            somewhere, computing = (
                model.column(upper=1.0),
                [total(y for of, y in each if of.computes) for each in pairs],
            )
            model.add(somewhere <= total(computing), *(somewhere >= here for here in computing))
        return activation * unit + pipeline_code_bytes, (ONE - somewhere) * float(nbytes)

    def _binds(self, tier: Tier) -> bool:
        limit = self._limit(tier)
        return self.minimised_tier == tier or (
            limit is not None and self.program.most_host_bytes(tier == "pinned") > limit
        )

    def _limit(self, tier: Tier) -> int | None:
        problem = self.program.problem
        return problem.ram_bytes if tier == "ram" else problem.pinned_bytes

    def _add_host_rows(self) -> Linear:
        """Adds the rows of RAM, page-locked RAM and disk where they can bind; returns the bytes of
        the tier to minimise."""
        program, model, goal = self.program, self.model, ZERO
        tiers: tuple[Tier, ...] = ("ram", "pinned")
        for tier in tiers:
            limit, minimised = self._limit(tier), self.minimised_tier == tier
            unit = (
                max(
                    1,
                    program.most_host_bytes(tier == "pinned")
                    if limit is None or minimised
                    else limit,
                )
                / MEMORY_SCALE
            )
            most = model.column() if minimised else (limit or 0) / unit
            for t in range(len(program.intervals)) if self._binds(tier) else ():
                model.add(
                    (self._host_bytes(t, tier) + (0 if minimised else self._margin(tier, t))) / unit
                    <= most
                )
            goal = most * unit if isinstance(most, Linear) else goal
        pairs = zip(program.variant_choices, self.chosen, strict=True)
        stored = total(chosen * float(of.variant.stored_bytes) for of, chosen in pairs if of.used)
        if self.minimised_tier == "disk":
            return stored
        if (disk_bytes := program.problem.disk_bytes) is not None:
            unit = max(1.0, float(disk_bytes)) / MEMORY_SCALE
            model.add(stored / unit <= disk_bytes / unit)
        return goal

    def _host_bytes(self, t: int, tier: Tier) -> Linear:
        """Bytes in interval ``t`` of backing stores; for RAM also of reads, activation on the CPU,
        and spilled values."""
        parts: list[Linear] = []
        for number, of in enumerate(self.program.variant_choices):
            nbytes = of.variant.locked_bytes if tier == "pinned" else of.variant.host_bytes
            if of.used and nbytes:
                parts.append(self._holds(number, t) * float(nbytes))
            if tier == "ram" and of.variant.transient_bytes and t in self._reads[number]:
                parts.append(self._reads[number][t] * float(of.variant.transient_bytes))
        if tier == "ram":
            gaps = zip(self.program.spill_gaps, self._spills, strict=True)
            parts += [
                self._host_activations[t],
                *(s * float(gap.nbytes) for gap, s in gaps if gap.out <= t <= gap.back),
            ]
        return total(parts)

    # ---- The solver's answer

    def choice(self, values: NDArray[np.float64]) -> tuple[Program, Choice]:
        """The program with the chosen variants, and its integers. Backing stores are dropped as in
        `Program.with_drops`."""
        numbers = self.chosen_in(values)
        program = self._program_in(values, numbers)
        every = enumerate(self.program.groups)
        groups = [
            (j, group)
            for j, group in every
            if group.variant_choice in numbers and self._any(j, values)
        ]
        groups.sort(
            key=lambda pair: (
                pair[1].component,
                pair[1].secondary if pair[1].mirror >= 0 else 0,
                pair[1].index,
            )
        )
        present, loaded, depths = np.zeros((3, len(program.intervals), len(groups)), dtype=np.int64)
        for t, single in enumerate(self.single_buffered):
            for n, (j, group) in enumerate(groups):
                here, more = self.present[t][j].at(values), self.loaded[t][j].at(values)
                # fractions are rounded down: layers are small and many, and the remainder is
                # streamed
                if group.by_layer:
                    present[t, n] = int(here + BLOCK_TOLERANCE)
                    loaded[t, n] = int(here + more + BLOCK_TOLERANCE) - present[t, n]
                else:
                    present[t, n], loaded[t, n] = round(here), round(more)
                depths[t, n] = 1 if j in single and single[j].at(values) > 0.5 else self.depth
        reads = tuple(
            max((t for t, read in self._reads[n].items() if read.at(values) > 0.5), default=-1)
            for n in numbers
        )
        spills = tuple(bool(spilled.at(values) > 0.5) for spilled in self._spills)
        return program, program.with_drops(
            Choice(present, loaded, depths, reads, (-1,) * len(numbers), spills)
        )

    def _program_in(self, values: NDArray[np.float64], numbers: Sequence[int]) -> Program:
        """The program with the variant choices ``numbers`` and the splits of ``values``."""
        of = self.program
        if not (splits := self._splits_in(values, numbers)):
            return of.with_variants([of.variant_choices[n].index for n in numbers])
        problem, names = (
            with_splits(of.problem, splits),
            [of.variant_choices[n].variant.name for n in numbers],
        )
        pairs = zip(problem.components, names, strict=True)
        indices = [
            [variant.name for variant in component.variants].index(name)
            for component, name in pairs
        ]
        return replace(of, problem=problem).with_variants(indices)

    def _any(self, j: int, values: NDArray[np.float64]) -> bool:
        """Whether group ``j`` has any blocks, not all of them elsewhere."""
        return j not in (self._moved | self._away) or self._all_of(j).at(values) > 0.5

    @property
    def layer_columns(self) -> list[int]:
        """Columns that count layers: continuous in the program, and rounded afterwards."""
        rows = [zip(of, self.program.groups, strict=True) for of in (*self.present, *self.loaded)]
        return [
            column for row in rows for of, group in row if group.by_layer for column in of.terms
        ]

    def variant_columns(self, numbers: Collection[int]) -> dict[int, float]:
        """Columns of y, fixed to the variant choices ``numbers``."""
        return {
            column: float(n in numbers)
            for n, chosen in enumerate(self.chosen)
            for column in chosen.terms
        }

    def compute_slot_columns(self, values: NDArray[np.float64]) -> dict[int, float]:
        """Columns of K and d in the slots that compute with the blocks, fixed to ``values``."""
        found = dict[int, float]()
        for interval, *rows in zip(self.program.intervals, self.present, self.loaded, strict=True):
            for row in rows:
                used = [
                    column
                    for of, calls in zip(row, interval.calls, strict=True)
                    if calls
                    for column in of.terms
                ]
                found |= {column: float(round(values[column])) for column in used}
        return found

    @property
    def first_choices(self) -> list[int]:
        """The first variant choice of each component."""
        return [numbers[0] for numbers in self.program.choices_of]

    def chosen_in(self, values: NDArray[np.float64]) -> list[int]:
        """The variant choice of each component with the largest y in ``values``."""
        return [
            max(numbers, key=lambda n: self.chosen[n].at(values))
            for numbers in self.program.choices_of
        ]
