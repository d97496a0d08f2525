"""The program as columns and rows for a MILP solver, scaled; and its integers read back. Decides nothing.

Bytes are scaled so that the effective budget is 1000, seconds so that all compute and one copy of everything are 100. HiGHS accepts
rows that are violated by 1e-6: that is then 1e-9 of the budget, less than one allocation's rounding on any card.
Byte-sized coefficients made it call 18.25 s optimal where 15.99 s was.

Every way has integers of its own, bounded by whether it is taken: that keeps the relaxation tight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from graphrun.planner.homes import NOTHING, ONE, Homes, freed, most_host_bytes
from graphrun.planner.model import COARSE_GAP, GAP, Model, Sum, plus, row_of, value_of
from graphrun.planner.needs import DEPTH
from graphrun.planner.program import Cell, Choice, Program, usual_seconds
from graphrun.planner.settle import activation_bytes

MEMORY_SCALE = 1000.0
TIME_SCALE = 100.0
ROUNDED = 1e-5  # blocks: by how much the solver may miss an integer

Tier = Literal["ram", "pinned", "disk"]


@dataclass(frozen=True, slots=True)
class Spare:
    """Bytes that are kept free in each interval, on the device and of both budgets of the host."""

    device: Mapping[int, int] = field(default_factory=dict)
    ram: Mapping[int, int] = field(default_factory=dict)
    pinned: Mapping[int, int] = field(default_factory=dict)


class Matrix:
    """Rows and columns of ``program``. ``factors[t]`` multiplies copy times of interval t; ``weigh``: a tier whose least is sought;
    ``depth``: for how many blocks a ring has room, unless for one alone.

    ``seconds``, ``copying`` (of blocks), ``moved``, ``memory``: goals in scaled units, the last one being the peak plus a little of
    the mean, so that nothing is loaded earlier than it helps. ``peak`` alone; ``tier``: the most bytes taken of the tier weighed.
    """

    def __init__(
        self,
        program: Program,
        factors: Sequence[float],
        spare: Spare | None = None,
        weigh: Tier | None = None,
        depth: int = DEPTH,
    ) -> None:
        self.program, problem = program, program.problem
        self.factors, self.spare, self.weigh, self.depth = factors, spare or Spare(), weigh, depth
        self.bytes_unit = max(1, problem.effective_bytes) / MEMORY_SCALE
        self.seconds_unit = max(usual_seconds(program), 1e-9) / TIME_SCALE
        self.model = Model(COARSE_GAP if any(cell.by_layer for cell in program.cells) else GAP)
        self.present: list[list[int]] = []
        self.loaded: list[list[int]] = []
        self.alone: list[dict[int, int]] = []  # per interval: r of the cells that may be streamed
        self._activations: list[tuple[Sum, Sum]] = []  # per interval: on the device, on the host
        self._uses = [[t for t, interval in enumerate(program.intervals) if interval.calls[j]] for j in range(len(program.cells))]
        self._starts = (0, program.turn) if program.session else (0,)
        peak = self.model.column(0.0, np.inf)
        self._ram, self._pinned = self._binds("ram"), self._binds("pinned")
        self.homes = Homes(self.model, program, self._ram or self._pinned)
        self._spills = [self.model.column(0.0, 1.0, True) for _ in program.gaps]
        seconds: dict[int, float] = {}
        moved, copying = dict[int, float](), dict[int, float]()
        occupied: dict[int, float] = {}
        always = 0.0
        for t, interval in enumerate(program.intervals):
            self.present.append([])
            self.loaded.append([])
            self.alone.append({})
            copies, rings = self._cells(t)
            seconds[self._time(t, copies, factors[t])] = interval.weight
            used, fixed = self._memory(t, rings)
            kept = self.spare.device.get(t, 0) / self.bytes_unit
            self.model.row(used, -np.inf, MEMORY_SCALE - fixed - kept)
            self.model.row({**used, peak: -1.0}, -np.inf, -fixed)
            for j, column in self.alone[t].items():  # nor is a ring for one block alone chosen where it saves nothing
                occupied[column] = 2e-3 * program.cells[j].block_bytes / self.bytes_unit / len(program.intervals)
            for column, value in used.items():
                occupied[column] = occupied.get(column, 0.0) + 1e-3 * value / len(program.intervals)
            for cell, (terms, constant) in zip(program.cells, copies, strict=True):
                size, takes = cell.block_bytes / self.bytes_unit, cell.load_seconds / self.seconds_unit
                for column, value in terms.items():
                    moved[column] = moved.get(column, 0.0) + interval.weight * size * value
                    copying[column] = copying.get(column, 0.0) + interval.weight * takes * value
                always += interval.weight * size * constant
        for gap, column in zip(program.gaps, self._spills, strict=True):
            moved[column] = program.intervals[gap.back].weight * gap.nbytes / self.bytes_unit
        self._returns()
        self.seconds: Sum = (seconds, 0.0)
        self.moved: Sum = (moved, always)
        self.copying: Sum = (copying, 0.0)
        self.memory: Sum = ({**occupied, peak: 1.0 + occupied.get(peak, 0.0)}, 0.0)
        self.peak: Sum = ({peak: 1.0}, 0.0)
        self.tier: Sum = self._hosts()

    def _binds(self, tier: Tier) -> bool:
        problem, most = self.program.problem, most_host_bytes(self.program, tier == "pinned")
        limit = problem.ram_bytes if tier == "ram" else problem.pinned_bytes
        return self.weigh == tier or (limit is not None and most > limit)

    def _cells(self, t: int) -> tuple[list[Sum], dict[int, list[tuple[int, int]]]]:
        """K, d and s of interval ``t``. Returns blocks moved per cell, and per streaming way its (s column, cell)s."""
        interval, model = self.program.intervals[t], self.model
        copies: list[Sum] = []
        streams: dict[int, list[tuple[int, int]]] = {}
        for j, cell in enumerate(self.program.cells):
            calls, count = interval.calls[j], float(cell.count)
            whole, stays = bool(calls) and not cell.streamable, "keep" in cell.demanded and self._used_before(t, j)
            needed = t <= max(self._uses[j], default=-1) or (self.program.session and bool(self._uses[j]))
            beside = interval.part == "rest" and cell.component in interval.used
            may_be, may_load = self._allowed(t, j)
            may_be = may_be and (needed or stays or not cell.movable)
            all_of: Sum = plus((count, self.homes.taken[cell.way]))
            fixed = count if (whole or stays) and not all_of[0] else 0.0
            present = model.column(fixed, count if may_be else 0.0, not cell.by_layer)
            loaded = model.column(0.0, count if may_load and needed and not whole and not beside else 0.0, not cell.by_layer)
            self.present[t].append(present)
            self.loaded[t].append(loaded)
            here: Sum = ({present: 1.0}, 0.0)
            after: Sum = ({present: 1.0, loaded: 1.0}, 0.0)
            model.row(*row_of(plus((1.0, after), (-1.0, all_of)), most=True))
            if (whole or stays) and all_of[0]:
                model.row(*row_of(plus((1.0, here), (-1.0, all_of))))
            self._follows(t, j)
            if not calls:
                copies.append(({loaded: 1.0}, 0.0))
                self._ready(t, cell.way, ({loaded: 1.0}, 0.0), count)
            elif whole:
                copies.append(({}, 0.0))
            else:
                passes = interval.passes[j]
                times, kept = float(calls * passes), float(passes - 1)
                copies.append(plus((times, all_of), (-times, here), (-kept, ({loaded: 1.0}, 0.0))))
                self._ready(t, cell.way, plus((1.0, all_of), (-1.0, here)), count)
                streamed = model.column(0.0, 0.0 if cell.demanded & {"keep", "whole"} else 1.0, True)
                if cell.by_layer and not cell.demanded & {"keep", "whole"}:  # a ring for the way that is taken, and for no other
                    model.row(*row_of(plus((1.0, ({streamed: 1.0}, 0.0)), (-1.0, self.homes.taken[cell.way]))))
                model.row(*row_of(plus((1.0, after), (count, ({streamed: 1.0}, 0.0)), (-1.0, all_of))))
                streams.setdefault(cell.way, []).append((streamed, j))
                known = [self.alone[t][i] for _, i in streams[cell.way][:-1]] if cell.by_layer else []
                self.alone[t][j] = known[0] if known else model.column(0.0, 1.0, True)
        return copies, streams

    def _follows(self, t: int, j: int) -> None:
        """K in interval ``t`` against what the interval before left; nothing at the very first."""
        cell, present = self.program.cells[j], self.present[t][j]
        before = {self.present[t - 1][j]: -1.0, self.loaded[t - 1][j]: -1.0} if t else {}
        self.model.row({present: 1.0, **before}, -np.inf if cell.movable else 0.0, 0.0)

    def _returns(self) -> None:
        """A session's further run begins with what the run before it left, be that the first or one of its own kind."""
        if not self.program.session:
            return
        start, end = self.program.turn, len(self.program.intervals) - 1
        for j, cell in enumerate(self.program.cells):
            terms = {self.present[start][j]: 1.0, self.present[end][j]: -1.0}
            terms[self.loaded[end][j]] = -1.0
            if start != end:
                self.model.row(terms, -np.inf if cell.movable else 0.0, 0.0)

    def _ready(self, t: int, way: int, copied: Sum, most: float) -> None:
        """Nothing is copied while the home is not held. ``copied``: blocks, ``most`` of them."""
        if not self.homes.always_held(way, t):
            terms, constant = plus((1.0, copied), (-most, self.homes.held(way, t)))
            self.model.row(terms, -np.inf, -constant)

    def _used_before(self, t: int, j: int) -> bool:
        """Whether an earlier interval of the same run uses cell ``j``."""
        start = max(begin for begin in self._starts if begin <= t)
        return any(start <= use < t for use in self._uses[j])

    def _allowed(self, t: int, j: int) -> tuple[bool, bool]:
        """Whether directives let blocks of cell ``j`` be present when interval ``t`` starts, and be loaded in it."""
        cell, interval = self.program.cells[j], self.program.intervals[t]
        if cell.excluded:
            return False, False
        if "drop" in cell.demanded:
            name = self.program.problem.components[cell.component].name
            own = any(use.component == name for use in self.program.problem.phases[interval.phase].uses)
            return own and interval.part != "load", own
        return True, True

    def _time(self, t: int, copies: list[Sum], factor: float) -> int:
        """D of interval ``t``: its column."""
        program, model = self.program, self.model
        every: list[tuple[float, Sum]] = []
        reads: list[tuple[float, Sum]] = []
        time = model.column(0.0, np.inf)
        own: list[tuple[float, Sum]] = [(1.0, ({time: 1.0}, 0.0))]
        for j, blocks in enumerate(copies):
            cell = program.cells[j]
            every.append((-cell.load_seconds * factor / self.seconds_unit, blocks))
            reads += [(-cell.disk_seconds * factor / self.seconds_unit, blocks)] if cell.disk_seconds else []
        for cells in program.stretches(t):
            longer = self._stretch(t, cells, copies, factor)
            own.append((-1.0, ({longer: 1.0}, 0.0)))
        interval = program.intervals[t]
        own += [(-s / self.seconds_unit, y) for s, y in zip(interval.cpu_seconds, self.homes.taken, strict=True) if s]
        model.row(*row_of(plus(*own)))
        for gap, column in zip(program.gaps, self._spills, strict=True):
            if seconds := gap.seconds(t):
                every.append((-seconds * factor / self.seconds_unit, ({column: 1.0}, 0.0)))
        model.row(*row_of(plus((1.0, ({time: 1.0}, 0.0)), *every)))
        for way, filled in zip(program.ways, self.homes.fills, strict=True):
            if t in filled and way.fill_seconds:
                reads.append((-way.fill_seconds * factor / self.seconds_unit, ({filled[t]: 1.0}, 0.0)))
        if reads:
            model.row(*row_of(plus((1.0, ({time: 1.0}, 0.0)), *reads)))
        for number, way in enumerate(program.ways):
            if not way.computes and way.component in interval.around and not self.homes.always_held(number, t):
                model.row(*row_of(plus((1.0, self.homes.held(number, t)), (-1.0, self.homes.taken[number]))))
        return time

    def _stretch(self, t: int, cells: list[int], copies: list[Sum], factor: float) -> int:
        """E of ``cells``, whose copies can hide behind each other's compute in interval ``t``: its column."""
        program, model, unit = self.program, self.model, self.seconds_unit
        compute = plus((sum(program.compute_seconds(t, j) for j in cells) / unit, self.homes.taken[program.cells[cells[0]].way]))
        longer = model.column(compute[1], np.inf)
        if compute[0]:
            model.row(*row_of(plus((1.0, ({longer: 1.0}, 0.0)), (-1.0, compute))))
        copied = [(-program.cells[j].load_seconds * factor / unit, copies[j]) for j in cells]
        reads = [(-program.cells[j].disk_seconds * factor / unit, copies[j]) for j in cells if program.cells[j].disk_seconds]
        for rated in (copied, reads) if reads else (copied,):
            model.row(*row_of(plus((1.0, ({longer: 1.0}, 0.0)), *rated)))
        turns = [(-program.compute_seconds(t, j) / unit, ({self.alone[t][j]: 1.0}, 0.0)) for j in cells if j in self.alone[t]]
        if turns:
            model.row(*row_of(plus((1.0, ({longer: 1.0}, 0.0)), *copied, *turns)))
        return longer

    def _memory(self, t: int, streams: dict[int, list[tuple[int, int]]]) -> tuple[dict[int, float], float]:
        """What interval ``t`` takes on the device: scaled terms, and what it takes anyway."""
        used: dict[int, float] = {}
        for j, cell in enumerate(self.program.cells):
            used[self.present[t][j]] = used[self.loaded[t][j]] = cell.held_bytes / self.bytes_unit
        fixed = float(self.program.intervals[t].fixed_bytes)
        for members in streams.values():
            largest, beside = self.model.column(0.0, np.inf), self.model.column(0.0, np.inf)
            used[largest] = used[beside] = 1.0
            for streamed, j in members:
                size = self.program.cells[j].held_bytes / self.bytes_unit
                least, more = self.program.in_ring(t, j, False) / self.bytes_unit, (self.depth - 1) * size
                self.model.row({largest: 1.0, streamed: -least}, 0.0, np.inf)
                self.model.row({beside: 1.0, streamed: -more, self.alone[t][j]: more}, 0.0, np.inf)
                if least < size:
                    self.model.row({largest: 1.0, streamed: -size, self.alone[t][j]: size}, 0.0, np.inf)
        self._activations.append(self._activation(t))
        activation, _ = self._activations[t]
        spilled = [(-float(g.nbytes), ({s: 1.0}, 0.0)) for g, s in zip(self.program.gaps, self._spills, strict=True) if g.absent(t)]
        terms, constant = plus((1.0, activation), *spilled)
        for column, value in terms.items():
            used[column] = used.get(column, 0.0) + value / self.bytes_unit
        return used, (fixed + constant) / self.bytes_unit

    def _activation(self, t: int) -> tuple[Sum, Sum]:
        """Activation on the device in interval ``t``, in bytes, and on the host."""
        interval, taken = self.program.intervals[t], self.homes.taken
        if not interval.rounds:
            return NOTHING, NOTHING
        nbytes = interval.activation_bytes
        around = [[n for n, way in enumerate(self.program.ways) if way.component == c] for c in sorted(interval.around)]
        ways = self.program.ways
        if all(len(of) == 1 for of in around):
            device = activation_bytes(nbytes, [ways[n].of for of in around for n in of], interval.handed_bytes)
            return ({}, float(device)), ({}, 0.0 if not around or any(ways[n].computes for of in around for n in of) else nbytes)
        if len(around) == 1:
            (of,) = around
            device_of = [(float(activation_bytes(nbytes, [ways[n].of], interval.handed_bytes)), taken[n]) for n in of]
            return plus(*device_of), plus(*((float(nbytes), taken[n]) for n in of if not ways[n].computes))
        return self._shared_activation(nbytes, around, interval.handed_bytes)

    def _shared_activation(self, nbytes: int, around: list[list[int]], handed: int) -> tuple[Sum, Sum]:
        """Several components, some with a choice. A >= nbytes and the largest scratch where one is on the device (z)."""
        model, ways, taken, more = self.model, self.program.ways, self.homes.taken, nbytes - handed
        on_device = [plus(*((1.0, taken[n]) for n in of if ways[n].computes)) for of in around]
        unit = self.bytes_unit
        activation, awake = model.column(0.0, np.inf), model.column(0.0, 1.0)
        a: Sum = ({activation: unit}, 0.0)
        z: Sum = ({awake: 1.0}, 0.0)
        model.row(*row_of(plus((1.0, z), *((-1.0, of) for of in on_device)), most=True))
        for of, here in zip(around, on_device, strict=True):
            model.row(*row_of(plus((1.0, z), (-1.0, here))))
            scratch = [(-float(ways[n].of.scratch_bytes) / unit, taken[n]) for n in of if ways[n].computes]
            model.row(*row_of(plus((1.0 / unit, a), (-more / unit, z), *scratch)))
            for n in of:
                if not ways[n].computes and (extra := float(ways[n].of.scratch_bytes)):
                    both = plus((1.0, taken[n]), (1.0, z), (-1.0, ONE))
                    model.row(*row_of(plus((1.0 / unit, a), (-more / unit, z), (-extra / unit, both))))
        return plus((1.0, a), (handed, ONE)), plus((float(nbytes), ONE), (-float(nbytes), z))

    def _hosts(self) -> Sum:
        """Rows of RAM, page-locked RAM and disk, where they can bind; the goal of the tier that is weighed."""
        problem, goal = self.program.problem, NOTHING
        tiers: list[tuple[Tier, int | None, bool]] = [
            ("ram", problem.ram_bytes, self._ram),
            ("pinned", problem.pinned_bytes, self._pinned),
        ]
        for tier, limit, binds in tiers:
            most_bytes = most_host_bytes(self.program, tier == "pinned")
            unit = max(1, most_bytes if limit is None or self.weigh == tier else limit) / MEMORY_SCALE
            most = self.model.column(0.0, np.inf) if self.weigh == tier else None
            for t in range(len(self.program.intervals)) if binds else ():
                nbytes, constant = self._host(t, tier)
                terms = {column: value / unit for column, value in nbytes.items()}
                kept = (self.spare.ram if tier == "ram" else self.spare.pinned).get(t, 0)
                if most is not None:
                    self.model.row({**terms, most: -1.0}, -np.inf, -constant / unit)
                elif limit is not None:
                    self.model.row(terms, -np.inf, (limit - constant - kept) / unit)
            goal = ({most: unit}, 0.0) if most is not None else goal
        ways = zip(self.program.ways, self.homes.taken, strict=True)
        stored = plus(*((float(way.of.stored_bytes), y) for way, y in ways if way.used))
        if self.weigh == "disk":
            return stored
        if problem.disk_bytes is not None:
            unit = max(1.0, float(problem.disk_bytes)) / MEMORY_SCALE
            terms = {column: value / unit for column, value in stored[0].items()}
            self.model.row(terms, -np.inf, (problem.disk_bytes - stored[1]) / unit)
        return goal

    def _host(self, t: int, tier: Tier) -> Sum:
        homes = self.homes.host(t, tier == "pinned")
        if tier == "pinned":
            return homes
        gaps = zip(self.program.gaps, self._spills, strict=True)
        spilled = [(float(g.nbytes), ({column: 1.0}, 0.0)) for g, column in gaps if g.out <= t <= g.back]
        return plus((1.0, homes), (1.0, self._activations[t][1]), *spilled)

    def choice(self, values: NDArray[np.float64]) -> tuple[tuple[int, ...], Choice]:
        """The variant of each component, and the integers of the program that takes them. Homes are freed as `freed` says."""
        program = self.program
        ways = self._taken(values)
        cells = [j for j, cell in enumerate(program.cells) if cell.way in ways]
        counts = [
            [_whole_blocks(program.cells[j], float(values[here[j]]), float(values[more[j]])) for j in cells]
            for here, more in zip(self.present, self.loaded, strict=True)
        ]
        present, loaded = (tuple(tuple(of[n] for of in row) for row in counts) for n in (0, 1))
        fills = tuple(max((t for t, c in self.homes.fills[n].items() if values[c] > 0.5), default=-1) for n in ways)
        spills = tuple(bool(values[column] > 0.5) for column in self._spills)
        variants = tuple(program.ways[n].variant for n in ways)
        depths = tuple(tuple(1 if j in alone and values[alone[j]] > 0.5 else self.depth for j in cells) for alone in self.alone)
        kept = Choice(present, loaded, fills, (-1,) * len(ways), spills, depths)
        return variants, freed(program.taking(variants), kept)

    @property
    def layers(self) -> list[int]:
        """The columns that count layers, of which the program lets parts be held."""
        found = list[int]()
        for of in (*self.present, *self.loaded):
            found += [column for column, cell in zip(of, self.program.cells, strict=True) if cell.by_layer]
        return found

    def taken(self, values: NDArray[np.float64]) -> dict[int, float]:
        """The columns that say which variant of each component is taken, as in ``values``, where these are whole."""
        variants, fixed = self._taken(values), dict[int, float]()
        for number, (terms, _) in enumerate(self.homes.taken):
            fixed |= dict.fromkeys(terms, float(number in variants))
        return fixed

    def computing(self, values: NDArray[np.float64]) -> dict[int, float]:
        """The columns of blocks in the slots that compute with them, as in ``values``."""
        found = dict[int, float]()
        for t, interval in enumerate(self.program.intervals):
            here = [column for of in (self.present[t], self.loaded[t]) for column, n in zip(of, interval.calls, strict=True) if n]
            found |= {column: float(round(values[column])) for column in here}
        return found

    @property
    def first(self) -> dict[int, float]:
        """As `taken`, of the first variant of each component."""
        fixed = dict[int, float]()
        for number, (terms, _) in enumerate(self.homes.taken):
            fixed |= dict.fromkeys(terms, float(number == self._ways(self.program.ways[number].component)[0]))
        return fixed

    def _taken(self, values: NDArray[np.float64]) -> list[int]:
        """The way of each component that ``values`` take, or are nearest to taking."""
        components = range(len(self.program.problem.components))
        return [max(self._ways(c), key=lambda n: value_of(self.homes.taken[n], values)) for c in components]

    def _ways(self, component: int) -> list[int]:
        return [n for n, way in enumerate(self.program.ways) if way.component == component]


def _whole_blocks(cell: Cell, present: float, loaded: float) -> tuple[int, int]:
    """K and d as integers. Layers are so small and so many that what is left of one is given away: it is streamed."""
    if not cell.by_layer:
        return round(present), round(loaded)
    held = int(present + ROUNDED)
    return held, int(present + loaded + ROUNDED) - held
