"""The program as a mixed-integer linear program (MILP) for HiGHS: columns, rows, scaling, and the solver's answer as integers.

Bytes are scaled so that the effective budget is 1000, seconds so that all compute and one copy of every block together are 100.
HiGHS accepts rows that are violated by 1e-6 and integers that are off by as much. In scaled units that is 1e-9 of the budget, less
than the rounding of one allocation on any card. With unscaled byte coefficients HiGHS reported 18.25 s as optimal where 15.99 s
was.

Every variant of a component has integers of its own, bounded by whether the variant is chosen: that keeps the relaxation tight.

Rows for the device are described in `graphrun.solve.program`. Rows for host memory, left out where they cannot bind:

    y[w]          variant choice w is taken; exactly one per component
    F[w,t]        its backing store is read in interval t: at most once, no later than its first use
    h[w,t]        its backing store is held, where RAM may bind: h[t] <= h[t-1] + F[t]; elsewhere it is held from its read on
    RAM(t)        sum host_bytes*h + transient_bytes*F + spilled values + activation on the CPU <= RAM; page-locked bytes likewise
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import highspy
import numpy as np
from numpy.typing import NDArray

from graphrun.model.choices import activation_bytes
from graphrun.model.least_memory import DEPTH
from graphrun.solve.program import Choice, Group, Program, VariantChoice, reference_seconds

Terms = Mapping[int, float]  # column -> coefficient
Linear = tuple[Terms, float]  # linear expression: terms and a constant
Tier = Literal["ram", "pinned", "disk"]


# ---- A program as rows and columns

MEMORY_SCALE = 1000.0
TIME_SCALE = 100.0
BLOCK_TOLERANCE = 1e-5  # in blocks: how far the solver may be from an integer


@dataclass(frozen=True, slots=True)
class Margins:
    """Bytes to keep free per interval, on the device and of both host budgets."""

    device: Mapping[int, int] = field(default_factory=dict)
    ram: Mapping[int, int] = field(default_factory=dict)
    pinned: Mapping[int, int] = field(default_factory=dict)


class Formulation:
    """Rows and columns of ``program``. ``factors[t]`` multiplies the copy times of interval t; ``margins``: bytes to keep free;
    ``minimised_tier``: host tier whose bytes are to be minimised; ``depth``: blocks a ring holds at once, unless single-buffered.

    Goals, in scaled units: ``seconds``; ``copying``, seconds of copying blocks; ``moved``, bytes copied; ``memory``, the peak plus
    a little of the mean, so that nothing is loaded earlier than useful; ``peak`` alone; ``tier_bytes``, bytes of the tier to
    minimise.
    """

    def __init__(
        self,
        program: Program,
        factors: Sequence[float],
        margins: Margins | None = None,
        minimised_tier: Tier | None = None,
        depth: int = DEPTH,
    ) -> None:
        self.program, problem = program, program.problem
        self.factors, self.margins, self.minimised_tier, self.ring_depth = factors, margins or Margins(), minimised_tier, depth
        self.bytes_unit = max(1, problem.effective_bytes) / MEMORY_SCALE
        self.seconds_unit = max(reference_seconds(program), 1e-9) / TIME_SCALE
        self.model = MilpModel(COARSE_GAP if any(group.by_layer for group in program.groups) else GAP)
        self.present: list[list[int]] = []
        self.loaded: list[list[int]] = []
        self.single_buffered: list[dict[int, int]] = []  # per interval: r of the groups that may be streamed
        self._activations: list[tuple[Linear, Linear]] = []  # per interval: on the device, on the host
        self._uses = [[t for t, interval in enumerate(program.intervals) if interval.calls[j]] for j in range(len(program.groups))]
        self._starts = (0, program.run_length) if program.session else (0,)
        peak = self.model.column(0.0, np.inf)
        self._ram, self._pinned = self._binds("ram"), self._binds("pinned")
        self.backing_stores = BackingStores(self.model, program, self._ram or self._pinned)
        self._spills = [self.model.column(0.0, 1.0, True) for _ in program.spill_gaps]
        seconds: dict[int, float] = {}
        moved, copying = dict[int, float](), dict[int, float]()
        occupied: dict[int, float] = {}
        moved_always = 0.0
        for t, interval in enumerate(program.intervals):
            self.present.append([])
            self.loaded.append([])
            self.single_buffered.append({})
            copies, rings = self._add_groups(t)
            seconds[self._time_column(t, copies, factors[t])] = interval.weight
            used, fixed = self._device_terms(t, rings)
            reserved = self.margins.device.get(t, 0) / self.bytes_unit
            self.model.row(used, -np.inf, MEMORY_SCALE - fixed - reserved)
            self.model.row({**used, peak: -1.0}, -np.inf, -fixed)
            for j, column in self.single_buffered[t].items():  # a small cost, so that r = 1 is not chosen where it saves nothing
                occupied[column] = 2e-3 * program.groups[j].block_bytes / self.bytes_unit / len(program.intervals)
            for column, value in used.items():
                occupied[column] = occupied.get(column, 0.0) + 1e-3 * value / len(program.intervals)
            for group, (terms, constant) in zip(program.groups, copies, strict=True):
                size, takes = group.block_bytes / self.bytes_unit, group.load_seconds / self.seconds_unit
                for column, value in terms.items():
                    moved[column] = moved.get(column, 0.0) + interval.weight * size * value
                    copying[column] = copying.get(column, 0.0) + interval.weight * takes * value
                moved_always += interval.weight * size * constant
        for gap, column in zip(program.spill_gaps, self._spills, strict=True):
            moved[column] = program.intervals[gap.back].weight * gap.nbytes / self.bytes_unit
        self._add_session_rows()
        self.seconds: Linear = (seconds, 0.0)
        self.moved: Linear = (moved, moved_always)
        self.copying: Linear = (copying, 0.0)
        self.memory: Linear = ({**occupied, peak: 1.0 + occupied.get(peak, 0.0)}, 0.0)
        self.peak: Linear = ({peak: 1.0}, 0.0)
        self.tier_bytes: Linear = self._add_host_rows()

    def _binds(self, tier: Tier) -> bool:
        problem, most = self.program.problem, max_host_bytes(self.program, tier == "pinned")
        limit = problem.ram_bytes if tier == "ram" else problem.pinned_bytes
        return self.minimised_tier == tier or (limit is not None and most > limit)

    def _add_groups(self, t: int) -> tuple[list[Linear], dict[int, list[tuple[int, int]]]]:
        """Adds K, d and s of interval ``t``. Returns x per group, and the (s column, group)s of each variant choice that may
        stream."""
        interval, model = self.program.intervals[t], self.model
        copies: list[Linear] = []
        streams: dict[int, list[tuple[int, int]]] = {}
        for j, group in enumerate(self.program.groups):
            calls, count = interval.calls[j], float(group.count)
            whole, kept = bool(calls) and not group.streamable, "keep" in group.demanded and self._used_before(t, j)
            needed = t <= max(self._uses[j], default=-1) or (self.program.session and bool(self._uses[j]))
            in_steady_use = interval.part == "steady" and group.component in interval.used
            may_be_present, may_load = self._allowed(t, j)
            may_be_present = may_be_present and (needed or kept or not group.movable)
            all_of: Linear = linear_sum((count, self.backing_stores.chosen[group.variant_choice]))
            fixed = count if (whole or kept) and not all_of[0] else 0.0
            present = model.column(fixed, count if may_be_present else 0.0, not group.by_layer)
            loaded = model.column(
                0.0, count if may_load and needed and not whole and not in_steady_use else 0.0, not group.by_layer
            )
            self.present[t].append(present)
            self.loaded[t].append(loaded)
            here: Linear = ({present: 1.0}, 0.0)
            after: Linear = ({present: 1.0, loaded: 1.0}, 0.0)
            model.row(*bounds_row(linear_sum((1.0, after), (-1.0, all_of)), most=True))
            if (whole or kept) and all_of[0]:
                model.row(*bounds_row(linear_sum((1.0, here), (-1.0, all_of))))
            self._add_transition(t, j)
            if not calls:
                copies.append(({loaded: 1.0}, 0.0))
                self._require_backing_store(t, group.variant_choice, ({loaded: 1.0}, 0.0), count)
            elif whole:
                copies.append(({}, 0.0))
            else:
                passes = interval.passes[j]
                times, saved = float(calls * passes), float(passes - 1)
                copies.append(linear_sum((times, all_of), (-times, here), (-saved, ({loaded: 1.0}, 0.0))))
                self._require_backing_store(t, group.variant_choice, linear_sum((1.0, all_of), (-1.0, here)), count)
                streamed = model.column(0.0, 0.0 if group.demanded & {"keep", "whole"} else 1.0, True)
                if group.by_layer and not group.demanded & {"keep", "whole"}:  # only the variant that is chosen has a ring
                    model.row(
                        *bounds_row(
                            linear_sum((1.0, ({streamed: 1.0}, 0.0)), (-1.0, self.backing_stores.chosen[group.variant_choice]))
                        )
                    )
                model.row(*bounds_row(linear_sum((1.0, after), (count, ({streamed: 1.0}, 0.0)), (-1.0, all_of))))
                streams.setdefault(group.variant_choice, []).append((streamed, j))
                shared = [self.single_buffered[t][i] for _, i in streams[group.variant_choice][:-1]] if group.by_layer else []
                self.single_buffered[t][j] = shared[0] if shared else model.column(0.0, 1.0, True)
        return copies, streams

    def _add_transition(self, t: int, j: int) -> None:
        """Row of K in interval ``t`` against K + d of the interval before; in the first interval K = 0."""
        group, present = self.program.groups[j], self.present[t][j]
        before = {self.present[t - 1][j]: -1.0, self.loaded[t - 1][j]: -1.0} if t else {}
        self.model.row({present: 1.0, **before}, -np.inf if group.movable else 0.0, 0.0)

    def _add_session_rows(self) -> None:
        """Rows of a session: a further run starts with blocks that are present at the end of the first run and at its own end."""
        if not self.program.session:
            return
        start, end = self.program.run_length, len(self.program.intervals) - 1
        for j, group in enumerate(self.program.groups):
            terms = {self.present[start][j]: 1.0, self.present[end][j]: -1.0}
            terms[self.loaded[end][j]] = -1.0
            if start != end:
                self.model.row(terms, -np.inf if group.movable else 0.0, 0.0)

    def _require_backing_store(self, t: int, variant_choice: int, copied: Linear, most: float) -> None:
        """Row: no block is copied in interval ``t`` unless the backing store is held. ``copied``: blocks, at most ``most``."""
        if not self.backing_stores.always_held(variant_choice, t):
            terms, constant = linear_sum((1.0, copied), (-most, self.backing_stores.held(variant_choice, t)))
            self.model.row(terms, -np.inf, -constant)

    def _used_before(self, t: int, j: int) -> bool:
        """Whether an earlier interval of the same run uses group ``j``."""
        start = max(begin for begin in self._starts if begin <= t)
        return any(start <= use < t for use in self._uses[j])

    def _allowed(self, t: int, j: int) -> tuple[bool, bool]:
        """Whether directives allow blocks of group ``j`` to be present at the start of interval ``t``, and to be loaded in it."""
        group, interval = self.program.groups[j], self.program.intervals[t]
        if group.excluded:
            return False, False
        if "drop" in group.demanded:
            name = self.program.problem.components[group.component].name
            own = any(use.component == name for use in self.program.problem.phases[interval.phase].uses)
            return own and interval.part != "load", own
        return True, True

    def _time_column(self, t: int, copies: list[Linear], factor: float) -> int:
        """Column of D, the seconds of interval ``t``."""
        program, model = self.program, self.model
        every: list[tuple[float, Linear]] = []
        reads: list[tuple[float, Linear]] = []
        time = model.column(0.0, np.inf)
        own: list[tuple[float, Linear]] = [(1.0, ({time: 1.0}, 0.0))]
        for j, blocks in enumerate(copies):
            group = program.groups[j]
            every.append((-group.load_seconds * factor / self.seconds_unit, blocks))
            reads += [(-group.disk_seconds * factor / self.seconds_unit, blocks)] if group.disk_seconds else []
        for groups in program.overlap_sets(t):
            longest = self._overlap_column(t, groups, copies, factor)
            own.append((-1.0, ({longest: 1.0}, 0.0)))
        interval = program.intervals[t]
        own += [(-s / self.seconds_unit, y) for s, y in zip(interval.cpu_seconds, self.backing_stores.chosen, strict=True) if s]
        model.row(*bounds_row(linear_sum(*own)))
        for gap, column in zip(program.spill_gaps, self._spills, strict=True):
            if seconds := gap.seconds(t):
                every.append((-seconds * factor / self.seconds_unit, ({column: 1.0}, 0.0)))
        model.row(*bounds_row(linear_sum((1.0, ({time: 1.0}, 0.0)), *every)))
        for variant_choice, read in zip(program.variant_choices, self.backing_stores.reads, strict=True):
            if t in read and variant_choice.read_seconds:
                reads.append((-variant_choice.read_seconds * factor / self.seconds_unit, ({read[t]: 1.0}, 0.0)))
        if reads:
            model.row(*bounds_row(linear_sum((1.0, ({time: 1.0}, 0.0)), *reads)))
        for number, variant_choice in enumerate(program.variant_choices):
            if (
                not variant_choice.computes
                and variant_choice.component in interval.entered
                and not self.backing_stores.always_held(number, t)
            ):
                model.row(
                    *bounds_row(linear_sum((1.0, self.backing_stores.held(number, t)), (-1.0, self.backing_stores.chosen[number])))
                )
        return time

    def _overlap_column(self, t: int, groups: list[int], copies: list[Linear], factor: float) -> int:
        """Column of the seconds of ``groups``, whose copies overlap each other's compute in interval ``t``: the longest of compute,
        copies, disk reads, and where r = 1 copies plus compute."""
        program, model, unit = self.program, self.model, self.seconds_unit
        compute = linear_sum(
            (
                sum(program.compute_seconds(t, j) for j in groups) / unit,
                self.backing_stores.chosen[program.groups[groups[0]].variant_choice],
            )
        )
        longest = model.column(compute[1], np.inf)
        if compute[0]:
            model.row(*bounds_row(linear_sum((1.0, ({longest: 1.0}, 0.0)), (-1.0, compute))))
        copied = [(-program.groups[j].load_seconds * factor / unit, copies[j]) for j in groups]
        reads = [(-program.groups[j].disk_seconds * factor / unit, copies[j]) for j in groups if program.groups[j].disk_seconds]
        for rated in (copied, reads) if reads else (copied,):
            model.row(*bounds_row(linear_sum((1.0, ({longest: 1.0}, 0.0)), *rated)))
        serial = [
            (-program.compute_seconds(t, j) / unit, ({self.single_buffered[t][j]: 1.0}, 0.0))
            for j in groups
            if j in self.single_buffered[t]
        ]
        if serial:
            model.row(*bounds_row(linear_sum((1.0, ({longest: 1.0}, 0.0)), *copied, *serial)))
        return longest

    def _device_terms(self, t: int, streams: dict[int, list[tuple[int, int]]]) -> tuple[dict[int, float], float]:
        """Memory on the device in interval ``t``, scaled: variable terms, and the constant part."""
        used: dict[int, float] = {}
        for j, group in enumerate(self.program.groups):
            used[self.present[t][j]] = used[self.loaded[t][j]] = group.held_bytes / self.bytes_unit
        fixed = float(self.program.intervals[t].fixed_bytes)
        for members in streams.values():
            largest, beside = self.model.column(0.0, np.inf), self.model.column(0.0, np.inf)
            used[largest] = used[beside] = 1.0
            for streamed, j in members:
                size = self.program.groups[j].held_bytes / self.bytes_unit
                least, more = self.program.ring_share_bytes(t, j, False) / self.bytes_unit, (self.ring_depth - 1) * size
                self.model.row({largest: 1.0, streamed: -least}, 0.0, np.inf)
                self.model.row({beside: 1.0, streamed: -more, self.single_buffered[t][j]: more}, 0.0, np.inf)
                if least < size:
                    self.model.row({largest: 1.0, streamed: -size, self.single_buffered[t][j]: size}, 0.0, np.inf)
        self._activations.append(self._activation(t))
        activation, _ = self._activations[t]
        spilled = [
            (-float(g.nbytes), ({s: 1.0}, 0.0)) for g, s in zip(self.program.spill_gaps, self._spills, strict=True) if g.absent(t)
        ]
        terms, constant = linear_sum((1.0, activation), *spilled)
        for column, value in terms.items():
            used[column] = used.get(column, 0.0) + value / self.bytes_unit
        return used, (fixed + constant) / self.bytes_unit

    def _activation(self, t: int) -> tuple[Linear, Linear]:
        """Bytes of activation in interval ``t``: on the device, and on the host."""
        interval, taken = self.program.intervals[t], self.backing_stores.chosen
        if not interval.rounds:
            return ZERO, ZERO
        nbytes = interval.activation_bytes
        entered = [
            [n for n, variant_choice in enumerate(self.program.variant_choices) if variant_choice.component == c]
            for c in sorted(interval.entered)
        ]
        variant_choices = self.program.variant_choices
        if all(len(of) == 1 for of in entered):
            device = activation_bytes(nbytes, [variant_choices[n].variant for of in entered for n in of], interval.glue_bytes)
            return ({}, float(device)), (
                {},
                0.0 if not entered or any(variant_choices[n].computes for of in entered for n in of) else nbytes,
            )
        if len(entered) == 1:
            (of,) = entered
            device_of = [(float(activation_bytes(nbytes, [variant_choices[n].variant], interval.glue_bytes)), taken[n]) for n in of]
            return linear_sum(*device_of), linear_sum(*((float(nbytes), taken[n]) for n in of if not variant_choices[n].computes))
        return self._shared_activation(nbytes, entered, interval.glue_bytes)

    def _shared_activation(self, nbytes: int, entered: list[list[int]], glue_bytes: int) -> tuple[Linear, Linear]:
        """`_activation` of several components, some with more than one variant. z: any of them computes on the device; then the
        activation is at least ``nbytes`` plus the largest scratch."""
        model, variant_choices, taken, more = (
            self.model,
            self.program.variant_choices,
            self.backing_stores.chosen,
            nbytes - glue_bytes,
        )
        on_device = [linear_sum(*((1.0, taken[n]) for n in of if variant_choices[n].computes)) for of in entered]
        unit = self.bytes_unit
        activation, any_on_device = model.column(0.0, np.inf), model.column(0.0, 1.0)
        a: Linear = ({activation: unit}, 0.0)
        z: Linear = ({any_on_device: 1.0}, 0.0)
        model.row(*bounds_row(linear_sum((1.0, z), *((-1.0, of) for of in on_device)), most=True))
        for of, here in zip(entered, on_device, strict=True):
            model.row(*bounds_row(linear_sum((1.0, z), (-1.0, here))))
            scratch = [
                (-float(variant_choices[n].variant.scratch_bytes) / unit, taken[n]) for n in of if variant_choices[n].computes
            ]
            model.row(*bounds_row(linear_sum((1.0 / unit, a), (-more / unit, z), *scratch)))
            for n in of:
                if not variant_choices[n].computes and (extra := float(variant_choices[n].variant.scratch_bytes)):
                    both = linear_sum((1.0, taken[n]), (1.0, z), (-1.0, ONE))
                    model.row(*bounds_row(linear_sum((1.0 / unit, a), (-more / unit, z), (-extra / unit, both))))
        return linear_sum((1.0, a), (glue_bytes, ONE)), linear_sum((float(nbytes), ONE), (-float(nbytes), z))

    def _add_host_rows(self) -> Linear:
        """Adds the rows of RAM, page-locked RAM and disk where they can bind; returns the bytes of the tier to minimise."""
        problem, goal = self.program.problem, ZERO
        tiers: list[tuple[Tier, int | None, bool]] = [
            ("ram", problem.ram_bytes, self._ram),
            ("pinned", problem.pinned_bytes, self._pinned),
        ]
        for tier, limit, binds in tiers:
            most_bytes = max_host_bytes(self.program, tier == "pinned")
            unit = max(1, most_bytes if limit is None or self.minimised_tier == tier else limit) / MEMORY_SCALE
            most = self.model.column(0.0, np.inf) if self.minimised_tier == tier else None
            for t in range(len(self.program.intervals)) if binds else ():
                nbytes, constant = self._host_bytes(t, tier)
                terms = {column: value / unit for column, value in nbytes.items()}
                reserved = (self.margins.ram if tier == "ram" else self.margins.pinned).get(t, 0)
                if most is not None:
                    self.model.row({**terms, most: -1.0}, -np.inf, -constant / unit)
                elif limit is not None:
                    self.model.row(terms, -np.inf, (limit - constant - reserved) / unit)
            goal = ({most: unit}, 0.0) if most is not None else goal
        variant_choices = zip(self.program.variant_choices, self.backing_stores.chosen, strict=True)
        stored = linear_sum(
            *((float(variant_choice.variant.stored_bytes), y) for variant_choice, y in variant_choices if variant_choice.used)
        )
        if self.minimised_tier == "disk":
            return stored
        if problem.disk_bytes is not None:
            unit = max(1.0, float(problem.disk_bytes)) / MEMORY_SCALE
            terms = {column: value / unit for column, value in stored[0].items()}
            self.model.row(terms, -np.inf, (problem.disk_bytes - stored[1]) / unit)
        return goal

    def _host_bytes(self, t: int, tier: Tier) -> Linear:
        backing_stores = self.backing_stores.host(t, tier == "pinned")
        if tier == "pinned":
            return backing_stores
        spill_gaps = zip(self.program.spill_gaps, self._spills, strict=True)
        spilled = [(float(g.nbytes), ({column: 1.0}, 0.0)) for g, column in spill_gaps if g.out <= t <= g.back]
        return linear_sum((1.0, backing_stores), (1.0, self._activations[t][1]), *spilled)

    def choice(self, values: NDArray[np.float64]) -> tuple[tuple[int, ...], Choice]:
        """The variant of each component, and the integers of the program with these variants. Backing stores are dropped as in
        `with_drops`."""
        program = self.program
        variant_choices = self._chosen(values)
        groups = [j for j, group in enumerate(program.groups) if group.variant_choice in variant_choices]
        counts = [
            [_whole_blocks(program.groups[j], float(values[here[j]]), float(values[more[j]])) for j in groups]
            for here, more in zip(self.present, self.loaded, strict=True)
        ]
        present, loaded = (tuple(tuple(of[n] for of in row) for row in counts) for n in (0, 1))
        reads = tuple(
            max((t for t, c in self.backing_stores.reads[n].items() if values[c] > 0.5), default=-1) for n in variant_choices
        )
        spills = tuple(bool(values[column] > 0.5) for column in self._spills)
        variants = tuple(program.variant_choices[n].index for n in variant_choices)
        depths = tuple(
            tuple(1 if j in single and values[single[j]] > 0.5 else self.ring_depth for j in groups)
            for single in self.single_buffered
        )
        kept = Choice(present, loaded, reads, (-1,) * len(variant_choices), spills, depths)
        return variants, with_drops(program.with_variants(variants), kept)

    @property
    def layer_columns(self) -> list[int]:
        """Columns that count layers: continuous in the program, and rounded afterwards."""
        found = list[int]()
        for of in (*self.present, *self.loaded):
            found += [column for column, group in zip(of, self.program.groups, strict=True) if group.by_layer]
        return found

    def variant_columns(self, values: NDArray[np.float64]) -> dict[int, float]:
        """Columns of y, fixed to the variants that ``values`` choose."""
        variants, fixed = self._chosen(values), dict[int, float]()
        for number, (terms, _) in enumerate(self.backing_stores.chosen):
            fixed |= dict.fromkeys(terms, float(number in variants))
        return fixed

    def compute_slot_columns(self, values: NDArray[np.float64]) -> dict[int, float]:
        """Columns of K and d in the slots that compute with the blocks, fixed to ``values``."""
        found = dict[int, float]()
        for t, interval in enumerate(self.program.intervals):
            here = [column for of in (self.present[t], self.loaded[t]) for column, n in zip(of, interval.calls, strict=True) if n]
            found |= {column: float(round(values[column])) for column in here}
        return found

    @property
    def first_variant_columns(self) -> dict[int, float]:
        """Columns of y, fixed to the first variant of each component."""
        fixed = dict[int, float]()
        for number, (terms, _) in enumerate(self.backing_stores.chosen):
            fixed |= dict.fromkeys(
                terms, float(number == self._variant_choices_of(self.program.variant_choices[number].component)[0])
            )
        return fixed

    def _chosen(self, values: NDArray[np.float64]) -> list[int]:
        """The variant choice of each component with the largest y in ``values``."""
        components = range(len(self.program.problem.components))
        return [max(self._variant_choices_of(c), key=lambda n: value_of(self.backing_stores.chosen[n], values)) for c in components]

    def _variant_choices_of(self, component: int) -> list[int]:
        return [n for n, variant_choice in enumerate(self.program.variant_choices) if variant_choice.component == component]


def _whole_blocks(group: Group, present: float, loaded: float) -> tuple[int, int]:
    """K and d as integers. Fractions of a layer are rounded down: layers are small and many, and the remainder is streamed."""
    if not group.by_layer:
        return round(present), round(loaded)
    held = int(present + BLOCK_TOLERANCE)
    return held, int(present + loaded + BLOCK_TOLERANCE) - held


# ---- Host memory


class BackingStores:
    """Columns of the variant choices of ``program`` and of their backing stores. ``tight``: whether backing stores may have to be
    dropped. ``chosen``: y per variant choice; ``reads``: columns of F per variant choice, by interval."""

    def __init__(self, model: MilpModel, program: Program, tight: bool) -> None:
        self.program = program
        self.chosen: list[Linear] = []
        self.reads: list[Mapping[int, int]] = []
        self._held: list[list[int] | None] = []
        of = [
            [variant_choice for variant_choice in program.variant_choices if variant_choice.component == c]
            for c in range(len(program.problem.components))
        ]
        for variant_choices in of:
            columns = [model.column(0.0, 1.0, True) for _ in variant_choices] if len(variant_choices) > 1 else []
            if columns:
                model.row(dict.fromkeys(columns, 1.0), 1.0, 1.0)
            self.chosen += [({column: 1.0}, 0.0) for column in columns] or [ONE for _ in variant_choices]
        for number, variant_choice in enumerate(program.variant_choices):
            self.reads.append(self._read_columns(model, number, variant_choice))
            self._held.append(
                self._held_columns(model, number, variant_choice) if tight and variant_choice.used and not program.session else None
            )

    def _read_columns(self, model: MilpModel, number: int, variant_choice: VariantChoice) -> Mapping[int, int]:
        """F of a variant choice whose backing store has to be read: columns by interval, up to its first use."""
        first = first_use(self.program, number)
        if variant_choice.read_seconds is None or first < 0:
            return {}
        columns = {t: model.column(0.0, 1.0, True) for t in range(first + 1)}
        terms, constant = self.chosen[number]
        model.row(
            {**dict.fromkeys(columns.values(), 1.0), **{column: -value for column, value in terms.items()}}, constant, constant
        )
        return columns

    def _held_columns(self, model: MilpModel, number: int, variant_choice: VariantChoice) -> list[int]:
        """h of a variant choice in every interval."""
        columns = [model.column(0.0, 1.0, True) for _ in self.program.intervals]
        for t, column in enumerate(columns):
            before = ({columns[t - 1]: 1.0}, 0.0) if t else self.chosen[number] if variant_choice.read_seconds is None else ZERO
            read = self.reads[number].get(t)
            terms, constant = linear_sum(
                (1.0, ({column: 1.0}, 0.0)), (-1.0, before), (-1.0, ZERO if read is None else ({read: 1.0}, 0.0))
            )
            model.row(terms, -np.inf, -constant)
            if read is not None:
                model.row({column: 1.0, read: -1.0}, 0.0, np.inf)
        return columns

    def held(self, number: int, t: int) -> Linear:
        """1 where the backing store of variant choice ``number`` is held in interval ``t``."""
        if (columns := self._held[number]) is not None:
            return {columns[t]: 1.0}, 0.0
        if self.reads[number]:
            return {column: 1.0 for at, column in self.reads[number].items() if at <= t}, 0.0
        return self.chosen[number] if self.program.variant_choices[number].read_seconds is None else ZERO

    def always_held(self, number: int, t: int) -> bool:
        """Whether it is certainly held in interval ``t`` if the variant is chosen."""
        if self._held[number] is not None:
            return False
        return not self.reads[number] or t >= max(self.reads[number])

    def host(self, t: int, locked: bool) -> Linear:
        """Bytes of backing stores in interval ``t``; ``locked``: only page-locked ones."""
        parts: list[tuple[float, Linear]] = []
        for number, variant_choice in enumerate(self.program.variant_choices):
            nbytes = variant_choice.variant.locked_bytes if locked else variant_choice.variant.host_bytes
            if variant_choice.used and nbytes:
                parts.append((float(nbytes), self.held(number, t)))
            if not locked and variant_choice.variant.transient_bytes and (read := self.reads[number].get(t)) is not None:
                parts.append((float(variant_choice.variant.transient_bytes), ({read: 1.0}, 0.0)))
        return linear_sum(*parts)


def first_use(program: Program, number: int) -> int:
    """The first interval that uses variant choice ``number``; -1: none does."""
    variant_choice = program.variant_choices[number]
    groups = [j for j, group in enumerate(program.groups) if group.variant_choice == number]
    for t, interval in enumerate(program.intervals):
        if (not variant_choice.computes and variant_choice.component in interval.entered) or any(interval.calls[j] for j in groups):
            return t
    return -1


def max_host_bytes(program: Program, locked: bool) -> int:
    """Upper bound on the RAM (``locked``: page-locked RAM) that any choice takes in any interval, in bytes."""
    total = 0
    for component in range(len(program.problem.components)):
        variant_choices = [
            variant_choice
            for variant_choice in program.variant_choices
            if variant_choice.component == component and variant_choice.used
        ]
        total += max(
            (
                variant_choice.variant.locked_bytes
                if locked
                else variant_choice.variant.host_bytes + variant_choice.variant.transient_bytes
                for variant_choice in variant_choices
            ),
            default=0,
        )
    if locked:
        return total
    if any(not variant_choice.computes for variant_choice in program.variant_choices):
        total += max((interval.activation_bytes for interval in program.intervals), default=0)
    return total + sum(gap.nbytes for gap in program.spill_gaps)


def with_drops(program: Program, choice: Choice, *, always: bool = False) -> Choice:
    """``choice`` with every backing store dropped after its last use, where RAM cannot hold all of them to the end of the run, or
    ``always``. Sessions keep all backing stores."""
    problem, host = program.problem, program.host_bytes(choice)
    limits = (problem.ram_bytes, problem.pinned_bytes)
    fits = all(limit is None or nbytes <= limit for slot in host for nbytes, limit in zip(slot, limits, strict=True))
    if (fits and not always) or program.session:
        return choice
    after = [need + 1 for need in program.last_need(choice)]
    end = len(program.intervals)
    held = [
        variant_choice.used and (variant_choice.read_seconds is None or read >= 0)
        for variant_choice, read in zip(program.variant_choices, choice.reads, strict=True)
    ]
    drops = tuple(at if at < end and is_held else -1 for at, is_held in zip(after, held, strict=True))
    return replace(choice, drops=drops)


# ---- Linear expressions

ZERO: Linear = ({}, 0.0)
ONE: Linear = ({}, 1.0)


def linear_sum(*sums: tuple[float, Linear]) -> Linear:
    """The sum of ``factor * expression`` over the pairs."""
    terms: dict[int, float] = {}
    constant = 0.0
    for factor, (added, offset) in sums:
        constant += factor * offset
        for column, value in added.items():
            terms[column] = terms.get(column, 0.0) + factor * value
    return terms, constant


def bounds_row(of: Linear, most: bool = False) -> tuple[Terms, float, float]:
    """Arguments of `MilpModel.row` for ``of >= 0`` (``most``: ``of <= 0``)."""
    terms, constant = of
    return (terms, -np.inf, -constant) if most else (terms, -constant, np.inf)


def value_of(of: Linear, values: NDArray[np.float64]) -> float:
    """The value of ``of`` for these ``values`` of the columns."""
    return of[1] + sum(float(values[column]) * value for column, value in of[0].items())


# ---- The solver

# The search is limited by nodes, not by seconds: plans must not depend on how fast the machine is. Time is about proportional to
# nodes times columns.
NODES_TIMES_COLUMNS = 8_000_000
FEWEST_NODES = 200
GAP = 1e-6
COARSE_GAP = 1e-3  # with components split into layers: their many small groups leave far more plans that are equally good
INTEGRALITY, ROUNDING_GAP = 1e-6, 3e-4  # distance from an integer; relative loss accepted for rounding
ROUNDING_RANGE = 4.0  # layers: how far rounding may move a column from its fractional value
OPTIONS = {"output_flag": False, "threads": 1}
# HiGHS's heuristics for a first solution: half of its time where solutions are easily found, a quarter of it where they are not.
SEARCHES = ("mip_heuristic_run_feasibility_jump", "mip_heuristic_run_rens", "mip_heuristic_run_rins")
ROUGH_GAP = 0.02  # relative gap of a first solution where one is hard to find


@dataclass(frozen=True, slots=True)
class MilpResult:
    """The solver's answer: a value per column, the objective's value and the bound on it, and whether optimality was proven."""

    values: NDArray[np.float64]
    value: float
    bound: float
    proven: bool


class MilpModel:
    """A MILP of columns with bounds and rows with bounds; it may be minimised several times. ``gap``: least relative gap used."""

    def __init__(self, gap: float = GAP) -> None:
        self._gap = gap
        self._columns: list[tuple[float, float, bool]] = []
        self._rows: list[tuple[Terms, float, float]] = []
        self._arrays: _Arrays | None = None  # of all rows, built when first needed

    def column(self, lower: float, upper: float, integer: bool = False) -> int:
        """Adds a column; returns its index."""
        self._columns.append((lower, upper, integer))
        return len(self._columns) - 1

    def row(self, terms: Terms, lower: float, upper: float) -> None:
        """Adds the row ``lower <= terms <= upper``."""
        self._rows.append((terms, lower, upper))

    @property
    def size(self) -> int:
        """The number of columns."""
        return len(self._columns)

    def minimise(
        self,
        goal: Linear,
        limits: Sequence[tuple[Linear, float]] = (),
        *,
        whole: bool = True,
        gap: float = GAP,
        fixed: Mapping[int, float] | None = None,
        start: MilpResult | None = None,
    ) -> MilpResult | None:
        """Minimises ``goal`` subject to the rows and to every (expression, limit) of ``limits``. None: no solution was found.

        ``whole`` False relaxes integers to fractions, which gives a bound. ``gap``: relative optimality gap; ROUGH_GAP keeps
        HiGHS's heuristics for hard cases. ``fixed``: column -> value. ``start``: a solution within the limits to start from.
        Deterministic: HiGHS with one thread and without a time limit.
        """
        ranges = {column: (value, value) for column, value in (fixed or {}).items()}
        return self._solved(goal, limits, whole, max(gap, self._gap) if gap else gap, ranges, start=start)

    def rounded(self, known: MilpResult, columns: Collection[int], goal: Linear, gap: float) -> MilpResult | None:
        """Minimises ``goal`` with integers in ``columns``: columns that are integers in ``known`` stay fixed, the others stay
        within ROUNDING_RANGE. If that is infeasible, or costs more than ROUNDING_GAP, all of them may move. None: no solution."""
        distance = {column: abs(known.values[column] - round(known.values[column])) for column in columns}
        for fixed_within in (INTEGRALITY, -1.0):
            off = {column: 0.0 if far <= fixed_within else ROUNDING_RANGE for column, far in distance.items()}
            at = {column: round(known.values[column]) if not off[column] else known.values[column] for column in columns}
            ranges = {column: (at[column] - off[column], at[column] + off[column]) for column in columns}
            found = self._solved(goal, (), True, gap, ranges, integers=columns)
            enough = np.inf if fixed_within < 0 else value_of(goal, known.values) * (1 + ROUNDING_GAP)
            if found is not None and found.value <= enough:
                return replace(known, values=found.values, value=found.value)
        return None

    def _solved(
        self,
        goal: Linear,
        limits: Sequence[tuple[Linear, float]],
        whole: bool,
        gap: float,
        ranges: Mapping[int, tuple[float, float]],
        integers: Collection[int] = (),
        start: MilpResult | None = None,
    ) -> MilpResult | None:
        if self._arrays is None or len(self._arrays.lows) != len(self._rows):
            self._arrays = _arrays(self._rows)
        arrays = self._arrays.stacked(_arrays([(terms, -np.inf, limit - constant) for (terms, constant), limit in limits]))
        cost = np.zeros(self.size)
        cost[list(goal[0])] = list(goal[0].values())
        lower, upper, integer = (np.array(part, dtype=float) for part in zip(*self._columns, strict=True))
        for column, (low, high) in ranges.items():
            lower[column], upper[column] = max(low, lower[column]), min(high, upper[column])
        integer[list(integers)] = 1.0
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_, lp.offset_ = self.size, len(arrays.lows), goal[1]
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, lower, upper
        lp.row_lower_, lp.row_upper_ = arrays.lows, arrays.highs
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum(arrays.counts)])
        lp.a_matrix_.index_, lp.a_matrix_.value_ = arrays.columns, arrays.values
        if whole:
            lp.integrality_ = [highspy.HighsVarType(int(each)) for each in integer]
        options = {**OPTIONS, "mip_rel_gap": gap, "mip_max_nodes": max(FEWEST_NODES, NODES_TIMES_COLUMNS // self.size)}
        searched = gap == ROUGH_GAP or integers
        return _run(lp, options | ({} if searched else dict.fromkeys(SEARCHES, False)), start)


def _run(lp: highspy.HighsLp, options: Mapping[str, bool | int | float], start: MilpResult | None) -> MilpResult | None:
    highs = highspy.Highs()
    for name, value in options.items():
        highs.setOptionValue(name, value)
    highs.passModel(lp)
    if start is not None:
        highs.setSolution(len(start.values), np.arange(len(start.values), dtype=np.int32), start.values)
    highs.run()
    info = highs.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None
    value = float(info.objective_function_value)
    bound = float(info.mip_dual_bound) if len(lp.integrality_) else value
    values = np.array(highs.getSolution().col_value)
    return MilpResult(values, value, bound, highs.getModelStatus() == highspy.HighsModelStatus.kOptimal)


@dataclass(frozen=True, slots=True)
class _Arrays:
    """Rows in compressed form for HiGHS: coefficients and their columns row by row, coefficients per row, and bounds of the
    rows."""

    values: NDArray[np.float64]
    columns: NDArray[np.int32]
    counts: NDArray[np.int32]
    lows: NDArray[np.float64]
    highs: NDArray[np.float64]

    def _all(self) -> tuple[NDArray[Any], ...]:
        return self.values, self.columns, self.counts, self.lows, self.highs

    def stacked(self, other: _Arrays) -> _Arrays:
        """These rows followed by those of ``other``."""
        both = zip(self._all(), other._all(), strict=True)
        return _Arrays(*(np.concatenate(pair) for pair in both))


def _arrays(rows: Sequence[tuple[Terms, float, float]]) -> _Arrays:
    return _Arrays(
        np.array([value for terms, _, _ in rows for value in terms.values()], dtype=float),
        np.array([column for terms, _, _ in rows for column in terms], dtype=np.int32),
        np.array([len(terms) for terms, _, _ in rows], dtype=np.int32),
        np.array([low for _, low, _ in rows], dtype=float),
        np.array([high for _, _, high in rows], dtype=float),
    )
