"""What a plan does: bytes and seconds, per slot, per block. The only source of a plan's peak and time; chooses nothing.

device   weights present + loaded by the slot | rings | activation | values + carry      highest sum per slot: its peak
host     backing stores, what is being filled, spilled values (`Hosted`)
seconds  reads, copies and compute of each slot on a `Disk` and a `Timeline`; a barrier joins them at its end

Everything is of the settled problem: the variants, options and order of stages that the plan chose.

The disk in one slot: fills of backing stores, and what is read for copies from backing stores on disk. Knows blocks and seconds, nothing of plans.

    disk   |r d3|r d8|fill a|r s1|fill b|fill b|      one read after another
    copy        |d3  |d8    |s1  |                    a block's copy waits for its own read, or for its own fill

A block read for a copy lies in its component's bounce buffer until it was copied on; a read waits for its place there. Beside such
reads fills go in where a buffer is full, in step with the bytes read, as a prefetch does beside streamed blocks; what a copy or a
computation waits for is filled up to there at once, and what is left comes last.

One slot in time: every block's copy and compute on two timelines. Knows sizes and seconds of blocks, nothing of plans.

    copy     |d3 |s8 |s9 |f |s1 |  |s2 |  |s8 |f            s  streamed: waits until its place in the ring was computed with
    compute      |  d3  |  s8   |  s9   |  s1   |  s2  |    d  loaded and kept by the slot that computes with it
             ^ start                                        f  prefetch: loaded for later

Copies run one after the other. Streamed blocks, and blocks that the slot loads for itself, are copied in call order, across calls.
A prefetch goes in where the ring is full, in step with the streamed bytes (the executor issues copies by the same rule, since it
cannot know how long they take), once it is in RAM: of a backing store on disk the next block is read meanwhile. What is left of it comes
last. One whose backing store is filled in the same slot comes behind the others. A block's compute waits for its own copy; on the CPU, for
its own fill in that slot.

What lies on the host while a plan is followed: backing stores, what is being filled, spilled values. Bytes per slot; knows no time.

slot      0       1       2       3
te        ####    ####    free                  its backing store was filled before the run
dit                T###   ####    ####          T  transient, while the backing store is filled
embeds                    ####    ####          spilled in 2, restored in 3
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from graphrun.errors import PlanError
from graphrun.model.choices import apply_choices, reorder
from graphrun.model.least_memory import room_bytes
from graphrun.model.plan import Blocks, Drop, Evict, Load, Plan, Read, Restore, Run, Slot, Spill, Stream
from graphrun.model.problem import ALLOCATION_BYTES, ComponentNumbers, PhaseNumbers, Problem, Use, Variant
from graphrun.model.ring import Ring
from graphrun.trace import Event
from graphrun.units import round_up

Key = tuple[str, int, int]  # component, class, block within the class


@dataclass(frozen=True, slots=True)
class Size:
    """One copy of a block to the device; ``disk_seconds`` to read it from disk, for its copy or for its backing store's fill, where files
    hold ``read_bytes`` of it."""

    nbytes: int
    seconds: float
    disk_seconds: float = 0.0
    read_bytes: int = 0


class Disk:
    """The channel from ``start_seconds`` on. ``fills``: blocks in order. ``bounces``: bytes of each disk backing store's buffer.
    ``read_bytes``: how much the slot will read for copies. ``spans`` are (``fill`` or ``read``, block, start, end)."""

    def __init__(
        self, start_seconds: float, fills: Iterable[Key], sizes: Mapping[Key, Size], bounces: Mapping[str, int], read_bytes: int
    ) -> None:
        self.spans: list[tuple[str, Key, float, float]] = []
        self.free_seconds = self._start = start_seconds
        self._sizes = sizes
        self._fills = list(reversed(list(fills)))
        self._filling = {key[0] for key in self._fills}
        self._fill_bytes, self._read_bytes = sum(sizes[key].nbytes for key in self._fills), read_bytes
        self._filled_so_far = self._read_so_far = 0
        self._filled: dict[Key, float] = {}
        self._bounces = {name: Ring(nbytes) for name, nbytes in bounces.items()}
        self._left: dict[str, list[float]] = {name: [] for name in bounces}  # when each read was copied on
        self._ahead: dict[Key, float] = {}  # when reads end that were begun before their copies' turn
        if not read_bytes:
            self.finish()

    def arrives(self, key: Key) -> float:
        """When the block is in RAM for a copy: its own read's end (one read a copy), its own fill's, or the slot's start."""
        if key[0] not in self._bounces:
            return self.filled(key)
        self.begin(key)
        return self._ahead.pop(key)

    def begin(self, key: Key) -> None:
        """Begins the read of a block that will be copied once; nothing where its backing store is not on disk."""
        if key[0] in self._bounces and key not in self._ahead:
            self._ahead[key] = self._read(key)

    def filled(self, key: Key) -> float:
        """When the block's fill ends; the slot's start where its backing store is not filled in this slot."""
        if key[0] not in self._filling:
            return self._start
        while key not in self._filled:
            self._fill()
        return self._filled[key]

    def holds(self, key: Key, at_seconds: float) -> bool:
        """Whether the block need not be waited for then: what was begun is read by then, and its backing store, or this block, is filled."""
        if key[0] in self._bounces:
            return self._ahead.get(key, at_seconds + 1.0) <= at_seconds
        return key[0] not in self._filling or self._filled.get(key, at_seconds + 1.0) <= at_seconds

    def fills(self, component: str) -> bool:
        """Whether the component's backing store is filled in this slot."""
        return component in self._filling

    def copied(self, key: Key, end_seconds: float) -> None:
        """The block was copied on: its place in the buffer is free from then."""
        if key[0] in self._bounces:
            self._left[key[0]].append(end_seconds)

    def finish(self) -> None:
        """Fills what is left."""
        while self._fills:
            self._fill()

    def _fill(self) -> None:
        key = self._fills.pop()
        self._filled_so_far += self._sizes[key].nbytes
        self._filled[key] = self._take("read", key, self._start)

    def _read(self, key: Key) -> float:
        try:
            released = self._bounces[key[0]].place(self._sizes[key].nbytes).released
        except ValueError as error:
            raise PlanError(f"the bounce buffer of {key[0]}: {error}") from error
        if released:
            while self._fills and self._filled_so_far * self._read_bytes <= self._read_so_far * self._fill_bytes:
                self._fill()
        self._read_so_far += self._sizes[key].nbytes
        return self._take("fetch", key, self._left[key[0]][released[-1]] if released else self._start)

    def _take(self, kind: str, key: Key, ready: float) -> float:
        start = max(self.free_seconds, ready)
        self.free_seconds = start + self._sizes[key].disk_seconds
        self.spans.append((kind, key, start, self.free_seconds))
        return self.free_seconds


Source = Literal["present", "load", "stream", "host"]


class Work(NamedTuple):
    """Compute of one block in one call: number ``turn`` of its component. ``source``: where the block is when the slot begins;
    ``host``: it is computed with on the CPU."""

    key: Key
    seconds: float
    turn: int
    source: Source


class Span(NamedTuple):
    """Something that took time: ``load`` or ``stream`` of a block, ``run`` of a call (``key`` is its first block)."""

    kind: str
    key: Key
    turn: int
    start_seconds: float
    end_seconds: float


class Timeline:
    """Runs ``works`` from ``start_seconds`` on. ``prefetch``: blocks loaded for later, in order. ``rings``: bytes per component.
    ``copies_from_seconds``: when the copies may begin (spills and restores go before them). ``rooms``: activation that is not there
    while a block runs."""

    def __init__(
        self,
        start_seconds: float,
        works: Sequence[Work],
        prefetch: Iterable[Key],
        sizes: Mapping[Key, Size],
        rings: Mapping[str, int],
        disk: Disk,
        copies_from_seconds: float,
        rooms: Mapping[Key, int] | None = None,
    ) -> None:
        self.copies: list[Span] = []
        self.calls: dict[tuple[str, int], Span] = {}
        self._sizes, self._disk, self._rooms = sizes, disk, rooms or {}
        self._computed = self._start = start_seconds
        self._copied = copies_from_seconds
        self._prefetch = sorted(prefetch, key=lambda key: disk.fills(key[0]))[::-1]
        self._prefetch_bytes = sum(sizes[key].nbytes for key in self._prefetch)
        self._stream_bytes = sum(sizes[work.key].nbytes for work in works if work.source == "stream")
        self._prefetched_bytes = self._streamed_bytes = 0
        self._arrived: dict[Key, float] = {}
        self._rings = {name: Ring(nbytes) for name, nbytes in rings.items()}
        self._left: dict[str, list[float]] = {name: [] for name in rings}  # when compute left each placement
        streamed = [work for work in works if work.source == "stream"]
        self._following = {name: _following(streamed, name, sizes) for name in rings}
        for (name, turn), of in groupby(works, key=lambda work: (work.key[0], work.turn)):
            self._call(name, turn, list(of))
        while self._prefetch:
            self._issue_prefetch()
        disk.finish()
        self.end_seconds = max(self._copied, self._computed, disk.free_seconds)

    def _call(self, name: str, turn: int, works: Sequence[Work]) -> None:
        """Computes with the blocks of one call of a component."""
        began: float | None = None
        for work in works:
            if work.source != "present":
                self._computed = max(self._computed, self._arrives(work))
            began = self._computed if began is None else began
            self._computed += work.seconds
            if work.source == "stream":
                self._left[name].append(self._computed)
        known = self.calls.get((name, turn), Span("run", works[0].key, turn, began or 0.0, 0.0))
        self.calls[name, turn] = known._replace(end_seconds=self._computed)

    def _arrives(self, work: Work) -> float:
        """When the block that ``work`` computes with is there."""
        if work.source == "stream":
            return self._stream(work.key)
        if work.source == "host":
            return self._disk.arrives(work.key)
        if work.key not in self._arrived:
            self._arrived[work.key] = self._copy("load", work.key, self._disk.arrives(work.key))
        return self._arrived[work.key]

    def _stream(self, key: Key) -> float:
        try:
            nbytes, following, room = self._sizes[key].nbytes, next(self._following[key[0]], 0), self._rooms.get(key, 0)
            place = self._rings[key[0]].place(nbytes, following, room)
        except ValueError as error:
            raise PlanError(f"stream {key[0]}: {error}") from error
        ready = self._left[key[0]][place.released[-1]] if place.released else self._start
        ready = self._computed if place.alone else ready
        if place.released or place.alone:
            self._pace(self._copied)
            self._pace(max(self._copied, ready))
        self._streamed_bytes += self._sizes[key].nbytes
        return self._copy("stream", key, max(ready, self._disk.arrives(key)))

    def _pace(self, at_seconds: float) -> None:
        """Prefetch whose turn it is, as far as it is in RAM by then: streamed blocks do not wait behind it."""
        while self._prefetch:
            self._disk.begin(self._prefetch[-1])
            due = self._prefetched_bytes * self._stream_bytes <= self._streamed_bytes * self._prefetch_bytes
            if not due or not self._disk.holds(self._prefetch[-1], at_seconds):
                break
            self._issue_prefetch(at_seconds)

    def _issue_prefetch(self, at_seconds: float = 0.0) -> None:
        key = self._prefetch.pop()
        self._prefetched_bytes += self._sizes[key].nbytes
        self._copy("load", key, max(at_seconds, self._disk.arrives(key)))

    def _copy(self, kind: str, key: Key, ready: float) -> float:
        start = max(self._copied, ready)
        self._copied = start + self._sizes[key].seconds
        self._disk.copied(key, self._copied)
        self.copies.append(Span(kind, key, 0, start, self._copied))
        return self._copied


def _following(streamed: Sequence[Work], component: str, sizes: Mapping[Key, Size]) -> Iterator[int]:
    """For each block of ``component`` that passes, the bytes of the one behind it."""
    return iter([sizes[work.key].nbytes for work in streamed if work.key[0] == component][1:])


class Hosted:
    """The host before the first slot of ``applied``; ``reordered`` is the problem before its variants were settled."""

    def __init__(self, applied: Problem, reordered: Problem) -> None:
        self._variants = {component.name: component.variants[0] for component in applied.components}
        self._values = {value.name: value.nbytes for value in applied.values}
        used = {use.component for phase in applied.phases for use in phase.uses}
        self._held = {name for name, variant in self._variants.items() if name in used and _there_before(variant)}
        self._spilled: set[str] = set()
        self._on_cpu = {phase.name: phase for phase in reordered.phases if self._computes_on_cpu(phase)}

    def slot(self, slot: Slot) -> tuple[int, int]:
        """Bytes in RAM and page-locked bytes at the slot's most, once its actions are taken."""
        actions = slot.actions
        self._held -= {action.component for action in actions if isinstance(action, Drop)}
        filling = {action.component for action in actions if isinstance(action, Read)}
        self._held |= filling
        self._spilled |= {action.value for action in actions if isinstance(action, Spill)}
        nbytes = sum(self._variants[name].host_bytes for name in self._held)
        nbytes += sum(self._variants[name].transient_bytes for name in filling)
        nbytes += sum(self._values[name] for name in self._spilled)
        if slot.phase in self._on_cpu:
            phase = self._on_cpu[slot.phase]
            nbytes += {"first": phase.first_bytes, "steady": phase.steady_bytes}.get(slot.part, 0)
        self._spilled -= {action.value for action in actions if isinstance(action, Restore)}
        return nbytes, sum(self._variants[name].locked_bytes for name in self._held)

    def spilled_bytes(self, slot: Slot) -> int:
        """Bytes of spilled values that are on the host alone throughout ``slot``, which is about to begin."""
        moving = {action.value for action in slot.actions if isinstance(action, Restore)}
        return sum(self._values[name] for name in self._spilled - moving)

    def _computes_on_cpu(self, phase: PhaseNumbers) -> bool:
        return bool(phase.uses) and all(self._variants[use.component].device == "cpu" for use in phase.uses)


def _there_before(variant: Variant) -> bool:
    return variant.backing_store == "disk" or not variant.read_seconds


@dataclass(frozen=True, slots=True)
class Moment:
    """What holds when action number ``action`` of slot ``slot`` is done: ``device_bytes`` counts weights, rings, values and carry,
    and with ``run`` the activation. A load lasts from the start of its first block's copy to the end of its last, a fill from its
    first read to its last. The slots of a session's further run are numbered on."""

    slot: int
    action: int
    device_bytes: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class SlotReport:
    """One slot. ``peak_bytes`` is the sum of ``resident_bytes`` (weights present at its start or loaded in it, every block rounded
    up as the device does), ``ring_bytes``, ``activation_bytes`` and ``values_bytes`` (values between stages, and carry).
    ``streamed_bytes`` went through rings, ``loaded_bytes`` came to stay, ``restored_bytes`` are values that came back.
    ``compute_seconds``: on the device or the CPU. ``host_bytes`` are the most in RAM, ``pinned_bytes`` the page-locked ones among
    them; ``disk_bytes_read`` of weights, for backing stores and for copies from backing stores on disk."""

    phase: str
    part: str
    peak_bytes: int
    resident_bytes: int
    ring_bytes: int
    activation_bytes: int
    values_bytes: int
    streamed_bytes: int
    loaded_bytes: int
    seconds: float
    compute_seconds: float
    restored_bytes: int = 0
    host_bytes: int = 0
    pinned_bytes: int = 0
    disk_bytes_read: int = 0

    @property
    def stall_seconds(self) -> float:
        """Time in which the device waits for copies."""
        return max(0.0, self.seconds - self.compute_seconds)


@dataclass(frozen=True, slots=True)
class StageReport:
    """The slots of one stage together: highest bytes of each kind, summed bytes moved, seconds in load slots and in the others."""

    stage: str
    peak_bytes: int
    resident_bytes: int
    ring_bytes: int
    activation_bytes: int
    values_bytes: int
    streamed_bytes: int
    loaded_bytes: int
    load_seconds: float
    run_seconds: float
    compute_seconds: float
    host_bytes: int = 0
    pinned_bytes: int = 0
    disk_bytes_read: int = 0


@dataclass(frozen=True, slots=True)
class Simulation:
    """A cold run, or a session of ``runs`` runs: its first run, and in ``again`` every further one. ``moments`` per action,
    ``slots`` as in the plan, ``events`` per block and call as a `Trace` has them. ``seconds`` and ``moved_bytes`` (to the device)
    are the first run's, ``again_seconds`` and ``again_moved_bytes`` those of one further run; peaks are over all."""

    moments: tuple[Moment, ...]
    slots: tuple[SlotReport, ...]
    events: tuple[Event, ...]
    seconds: float
    moved_bytes: int
    peak_bytes: int
    host_peak_bytes: int = 0
    pinned_peak_bytes: int = 0
    runs: int = 1
    again: tuple[SlotReport, ...] = ()
    again_seconds: float = 0.0
    again_moved_bytes: int = 0

    @property
    def compute_seconds(self) -> float:
        """Time in which the first run computes; the rest of ``seconds`` is exposed transfer."""
        return sum(slot.compute_seconds for slot in self.slots)

    @property
    def total_seconds(self) -> float:
        """The whole session; ``seconds`` where it is one run."""
        return self.seconds + (self.runs - 1) * self.again_seconds

    @property
    def total_moved_bytes(self) -> int:
        """Bytes copied to the device in the whole session."""
        return self.moved_bytes + (self.runs - 1) * self.again_moved_bytes

    def stages(self, problem: Problem) -> tuple[StageReport, ...]:
        """One report per stage of the first run, in its order; the last slot belongs to none. ``problem``: settled or not."""
        phases = (*problem.phases, *(phase for option in problem.options for phase in option.phases))
        stage_of = {phase.name: phase.stage for phase in phases}
        stages = dict.fromkeys(stage_of[slot.phase] for slot in self.slots if slot.phase in stage_of)
        return tuple(_stage(stage, [slot for slot in self.slots if stage_of.get(slot.phase) == stage]) for stage in stages)


def simulate(problem: Problem, plan: Plan) -> Simulation:
    """Bytes and seconds of ``plan``, which should satisfy `check`.

    Raises PlanError where it cannot be followed at all: a needed block is nowhere or does not fit its ring, a name is unknown, or
    a choice is not one of the problem's.
    """
    applied = apply_choices(problem, plan)
    walk = _Walk(applied, Hosted(applied, reorder(problem, plan.order, dict(plan.options))))
    first = tuple(walk.slot(index, slot) for index, slot in enumerate(plan.slots))
    seconds = walk.now
    again = tuple(walk.slot(index, slot) for index, slot in enumerate(plan.again, start=len(plan.slots)))
    return Simulation(
        moments=tuple(walk.moments),
        slots=first,
        events=tuple(walk.events),
        seconds=seconds,
        moved_bytes=_moved(first),
        peak_bytes=max((report.peak_bytes for report in (*first, *again)), default=0),
        host_peak_bytes=max((report.host_bytes for report in (*first, *again)), default=0),
        pinned_peak_bytes=max((report.pinned_bytes for report in (*first, *again)), default=0),
        runs=problem.runs,
        again=again,
        again_seconds=walk.now - seconds,
        again_moved_bytes=_moved(again),
    )


def _moved(reports: Iterable[SlotReport]) -> int:
    return sum(report.streamed_bytes + report.loaded_bytes + report.restored_bytes for report in reports)


class _Walk:
    """The plan, slot after slot: blocks present, time passed."""

    def __init__(self, problem: Problem, hosted: Hosted) -> None:
        self.problem, self.hosted = problem, hosted
        self.components = {component.name: component for component in problem.components}
        self.phases = {phase.name: (index, phase) for index, phase in enumerate(problem.phases)}
        self.values = {value.name: value.nbytes for value in problem.values}
        self.sizes: dict[Key, Size] = {}
        for component in problem.components:
            variant = component.variants[0]
            read = variant.disk_seconds or variant.read_seconds or (0.0,) * len(variant.block_bytes)
            held = variant.read_bytes or variant.block_bytes
            for key in self._keys(component.name, None):
                k = key[1]
                self.sizes[key] = Size(variant.block_bytes[k], variant.load_seconds[k], read[k], held[k])
        self.present: set[Key] = set()
        self.now = 0.0
        self.events: list[Event] = []
        self.moments: list[Moment] = []

    def slot(self, index: int, slot: Slot) -> SlotReport:
        start = self.now
        keys = [self._keys(a.component, a.blocks) if isinstance(a, Load | Evict) else [] for a in slot.actions]
        evicted = [key for action, of in zip(slot.actions, keys, strict=True) if isinstance(action, Evict) for key in of]
        loads = [key for action, of in zip(slot.actions, keys, strict=True) if isinstance(action, Load) for key in of]
        rings = {action.component: action.ring_bytes for action in slot.actions if isinstance(action, Stream)}
        crossings, copies_from = self._crossings(index, slot)
        self.present -= set(evicted)
        works, activation, values = self._works(index, slot, set(loads), rings)
        used = {work.key for work in works}
        disk = self._disk(slot, [*loads, *(work.key for work in works if work.source == "stream")])
        later = (key for key in loads if key not in used)
        line = Timeline(start, works, later, self.sizes, rings, disk, copies_from, self._rooms(slot, used))
        self.now = line.end_seconds
        held = self._held(self.present | set(loads))
        ring = sum(round_up(nbytes, ALLOCATION_BYTES) for nbytes in rings.values())
        host, pinned = self.hosted.slot(slot)
        report = SlotReport(
            phase=slot.phase,
            part=slot.part,
            peak_bytes=held + ring + activation + values,
            resident_bytes=held,
            ring_bytes=ring,
            activation_bytes=activation,
            values_bytes=values,
            streamed_bytes=sum(self.sizes[work.key].nbytes for work in works if work.source == "stream"),
            loaded_bytes=sum(self.sizes[key].nbytes for key in loads),
            seconds=self.now - start,
            compute_seconds=sum(work.seconds for work in works),
            restored_bytes=sum(event.nbytes for event in crossings.values() if event.kind == "restore"),
            host_bytes=host,
            pinned_bytes=pinned,
            disk_bytes_read=sum(self.sizes[key].read_bytes for _, key, _, _ in disk.spans),
        )
        self.events += [self._event(index, Span("evict", key, 0, start, start)) for key in evicted]
        spans = (*(Span(kind, key, 0, begin, end) for kind, key, begin, end in disk.spans), *line.copies, *line.calls.values())
        timed = [*crossings.values(), *(self._event(index, span) for span in spans)]
        self.events += sorted(timed, key=lambda event: event.start_seconds)
        self._note(index, slot, keys, values + self._held((*self.present, *evicted)), activation, timed, start)
        self.present |= set(loads)
        return report

    def _crossings(self, index: int, slot: Slot) -> tuple[dict[int, Event], float]:
        """Spills and restores by number of action, one after the other from the slot's start; and when the last of them ends."""
        found, now, hardware = dict[int, Event](), self.now, self.problem.hardware
        for number, action in enumerate(slot.actions):
            if isinstance(action, Spill | Restore):
                if action.value not in self.values:
                    raise PlanError(f"slot {index}: the problem has no value {action.value!r}")
                nbytes, spill = self.values[action.value], isinstance(action, Spill)
                end = now + nbytes / (hardware.d2h_bytes_per_second if spill else hardware.h2d_bytes_per_second)
                found[number] = Event("spill" if spill else "restore", "", index, action.value, nbytes, now, end)
                now = end
        return found, now

    def _disk(self, slot: Slot, copied: Iterable[Key]) -> Disk:
        """The slot's disk: what it fills, and reads of what it copies from backing stores on disk."""
        filled = [key for action in slot.actions if isinstance(action, Read) for key in self._keys(action.component, None)]
        variants = {name: component.variants[0] for name, component in self.components.items()}
        bounces = {name: variant.host_bytes for name, variant in variants.items() if variant.backing_store == "disk"}
        read = sum(self.sizes[key].nbytes for key in copied if key[0] in bounces)
        return Disk(self.now, filled, self.sizes, bounces, read)

    def _works(self, index: int, slot: Slot, loads: set[Key], rings: dict[str, int]) -> tuple[list[Work], int, int]:
        """Every block's compute in order, the activation, and values with carry."""
        if slot.part == "end":
            return [], 0, 0
        if slot.phase not in self.phases:
            raise PlanError(f"slot {index}: the problem has no phase {slot.phase!r}")
        number, phase = self.phases[slot.phase]
        source_of = dict[Key, Source]()
        for use in phase.uses:
            on_cpu = self._component(use.component).variants[0].device == "cpu"
            for key in self._keys(use.component, None):
                here: Source = "present" if key in self.present else "load" if key in loads else "stream"
                source_of[key] = "host" if on_cpu else here
        works = [Work(key, seconds, turn, source_of[key]) for key, seconds, turn in self._computed(phase, slot)]
        if lost := next((w.key for w in works if w.source == "stream" and w.key[0] not in rings), None):
            raise PlanError(f"slot {index}: {self._path(lost)} of {lost[0]} is needed, and neither present, loaded nor streamed")
        activation = {"first": phase.first_bytes, "steady": phase.steady_bytes}.get(slot.part, 0)
        values = self.problem.value_bytes(number) - self.hosted.spilled_bytes(slot)
        return works, activation, values + phase.live_in_bytes

    def _rooms(self, slot: Slot, keys: Iterable[Key]) -> dict[Key, int]:
        """What of the slot's activation is not there while a block runs."""
        _, phase = self.phases.get(slot.phase, (0, None))
        uses = {use.component: use for use in phase.uses} if phase else {}
        nbytes = {"first": phase.first_bytes, "steady": phase.steady_bytes}.get(slot.part, 0) if phase else 0
        return {key: room_bytes(nbytes, uses[key[0]], key[1]) for key in keys if uses[key[0]].beside_bytes}

    def _computed(self, phase: PhaseNumbers, slot: Slot) -> Iterator[tuple[Key, float, int]]:
        """Components take turns; a class takes part in its first calls."""
        for turn in range(slot.calls):
            for use in phase.uses:
                calls = use.group_calls_in(slot.part)
                for k, i, seconds in use.order or self._in_group_order(use):
                    if turn < calls[k]:
                        yield (use.component, k, i), seconds, turn

    def _in_group_order(self, use: Use) -> list[tuple[int, int, float]]:
        groups = self._component(use.component).groups
        return [(k, i, use.seconds[k]) for k, of in enumerate(groups) for i in range(len(of.blocks))]

    def _note(
        self, index: int, slot: Slot, keys: list[list[Key]], held: int, activation: int, timed: list[Event], start: float
    ) -> None:
        """Adds the slot's moments; ``held`` is what was on the device before its first action."""
        for number, (action, of) in enumerate(zip(slot.actions, keys, strict=True)):
            begin = end = start
            if isinstance(action, Evict):
                held -= self._held(of)
            elif isinstance(action, Run | Stream):
                held += activation if isinstance(action, Run) else round_up(action.ring_bytes, ALLOCATION_BYTES)
                end = self.now
            elif not isinstance(action, Drop):
                held += self._held(of)
                paths = {self._path(key) for key in of}
                if own := [event for event in timed if _does(event, action, paths)]:
                    begin, end = min(event.start_seconds for event in own), max(event.end_seconds for event in own)
            self.moments.append(Moment(index, number, held, begin, end))

    def _component(self, name: str) -> ComponentNumbers:
        if name not in self.components:
            raise PlanError(f"the problem has no component {name!r}")
        return self.components[name]

    def _keys(self, component: str, blocks: Blocks) -> list[Key]:
        groups = self._component(component).groups
        if blocks is None:
            return [(component, k, i) for k, of in enumerate(groups) for i in range(len(of.blocks))]
        index = {of.name: k for k, of in enumerate(groups)}
        for name, indices in blocks:
            if name not in index or any(not 0 <= i < len(groups[index[name]].blocks) for i in indices):
                layers = self._component(component).layers
                cut = layers is not None and name in {of.name for of in layers.groups}
                why = ": the plan is by layer, and belongs to its solution's problem" if cut else ""
                raise PlanError(f"{component} has no blocks {name}{list(indices)}{why}")
        return [(component, index[name], i) for name, indices in blocks for i in indices]

    def _held(self, keys: Iterable[Key]) -> int:
        return sum(round_up(self.sizes[key].nbytes, ALLOCATION_BYTES) for key in keys)

    def _path(self, key: Key) -> str:
        return self.components[key[0]].groups[key[1]].blocks[key[2]]

    def _event(self, slot: int, span: Span) -> Event:
        detail = f"call {span.turn}" if span.kind == "run" else self._path(span.key)
        nbytes = 0 if span.kind == "run" else self.sizes[span.key].nbytes
        return Event(span.kind, span.key[0], slot, detail, nbytes, span.start_seconds, span.end_seconds)


def _does(event: Event, action: Load | Read | Spill | Restore, paths: set[str]) -> bool:
    """Whether ``event`` is part of ``action``, a load being one of ``paths``."""
    if isinstance(action, Spill | Restore):
        return (event.kind, event.detail) == ("spill" if isinstance(action, Spill) else "restore", action.value)
    if event.component != action.component:
        return False
    return event.kind == "read" if isinstance(action, Read) else event.kind == "load" and event.detail in paths


def _stage(stage: str, slots: list[SlotReport]) -> StageReport:
    return StageReport(
        stage=stage,
        peak_bytes=max(slot.peak_bytes for slot in slots),
        resident_bytes=max(slot.resident_bytes for slot in slots),
        ring_bytes=max(slot.ring_bytes for slot in slots),
        activation_bytes=max(slot.activation_bytes for slot in slots),
        values_bytes=max(slot.values_bytes for slot in slots),
        streamed_bytes=sum(slot.streamed_bytes for slot in slots),
        loaded_bytes=sum(slot.loaded_bytes for slot in slots),
        load_seconds=sum(slot.seconds for slot in slots if slot.part == "load"),
        run_seconds=sum(slot.seconds for slot in slots if slot.part != "load"),
        compute_seconds=sum(slot.compute_seconds for slot in slots),
        host_bytes=max(slot.host_bytes for slot in slots),
        pinned_bytes=max(slot.pinned_bytes for slot in slots),
        disk_bytes_read=sum(slot.disk_bytes_read for slot in slots),
    )
