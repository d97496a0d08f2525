"""What a plan does: bytes and seconds, per slot, per block. The only source of a plan's peak and time; chooses nothing.

device   weights present + loaded by the slot | rings | activation | values + carry      highest sum per slot: its peak
host     homes, what is being filled, spilled values (`Hosted`)
seconds  reads, copies and compute of each slot on a `Disk` and a `Timeline`; a barrier joins them at its end

Everything is of the settled problem: the variants, options and order of stages that the plan chose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from graphrun.errors import PlanError
from graphrun.planner.disk import Disk, Key, Size
from graphrun.planner.hosted import Hosted
from graphrun.planner.needs import room_bytes
from graphrun.planner.plan import Blocks, Evict, Fill, Free, Load, Plan, Restore, Run, Slot, Spill, Stream
from graphrun.planner.problem import ALLOCATION_BYTES, ComponentNumbers, PhaseNumbers, Problem, Use
from graphrun.planner.settle import arrange, settle
from graphrun.planner.timeline import Source, Span, Timeline, Work
from graphrun.trace import Event
from graphrun.units import round_up


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
    them; ``disk_bytes_read`` of weights, for homes and for copies from homes on disk."""

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
    settled = settle(problem, plan)
    walk = _Walk(settled, Hosted(settled, arrange(problem, plan.order, dict(plan.options))))
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
            read = variant.disk_seconds or variant.fill_seconds or (0.0,) * len(variant.block_bytes)
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
        """The slot's disk: what it fills, and reads of what it copies from homes on disk."""
        filled = [key for action in slot.actions if isinstance(action, Fill) for key in self._keys(action.component, None)]
        variants = {name: component.variants[0] for name, component in self.components.items()}
        bounces = {name: variant.host_bytes for name, variant in variants.items() if variant.home == "disk"}
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
        activation = {"first": phase.first_bytes, "rest": phase.rest_bytes}.get(slot.part, 0)
        values = self.problem.value_bytes(number) - self.hosted.spilled_bytes(slot)
        return works, activation, values + phase.carry_bytes

    def _rooms(self, slot: Slot, keys: Iterable[Key]) -> dict[Key, int]:
        """What of the slot's activation is not there while a block runs."""
        _, phase = self.phases.get(slot.phase, (0, None))
        uses = {use.component: use for use in phase.uses} if phase else {}
        nbytes = {"first": phase.first_bytes, "rest": phase.rest_bytes}.get(slot.part, 0) if phase else 0
        return {key: room_bytes(nbytes, uses[key[0]], key[1]) for key in keys if uses[key[0]].beside_bytes}

    def _computed(self, phase: PhaseNumbers, slot: Slot) -> Iterator[tuple[Key, float, int]]:
        """Components take turns; a class takes part in its first calls."""
        for turn in range(slot.calls):
            for use in phase.uses:
                calls = use.class_calls_in(slot.part)
                for k, i, seconds in use.order or self._in_class_order(use):
                    if turn < calls[k]:
                        yield (use.component, k, i), seconds, turn

    def _in_class_order(self, use: Use) -> list[tuple[int, int, float]]:
        classes = self._component(use.component).classes
        return [(k, i, use.seconds[k]) for k, of in enumerate(classes) for i in range(len(of.blocks))]

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
            elif not isinstance(action, Free):
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
        classes = self._component(component).classes
        if blocks is None:
            return [(component, k, i) for k, of in enumerate(classes) for i in range(len(of.blocks))]
        index = {of.name: k for k, of in enumerate(classes)}
        for name, indices in blocks:
            if name not in index or any(not 0 <= i < len(classes[index[name]].blocks) for i in indices):
                layers = self._component(component).layers
                cut = layers is not None and name in {of.name for of in layers.classes}
                why = ": the plan is by layer, and belongs to its solution's problem" if cut else ""
                raise PlanError(f"{component} has no blocks {name}{list(indices)}{why}")
        return [(component, index[name], i) for name, indices in blocks for i in indices]

    def _held(self, keys: Iterable[Key]) -> int:
        return sum(round_up(self.sizes[key].nbytes, ALLOCATION_BYTES) for key in keys)

    def _path(self, key: Key) -> str:
        return self.components[key[0]].classes[key[1]].blocks[key[2]]

    def _event(self, slot: int, span: Span) -> Event:
        detail = f"call {span.turn}" if span.kind == "run" else self._path(span.key)
        nbytes = 0 if span.kind == "run" else self.sizes[span.key].nbytes
        return Event(span.kind, span.key[0], slot, detail, nbytes, span.start_seconds, span.end_seconds)


def _does(event: Event, action: Load | Fill | Spill | Restore, paths: set[str]) -> bool:
    """Whether ``event`` is part of ``action``, a load being one of ``paths``."""
    if isinstance(action, Spill | Restore):
        return (event.kind, event.detail) == ("spill" if isinstance(action, Spill) else "restore", action.value)
    if event.component != action.component:
        return False
    return event.kind == "fill" if isinstance(action, Fill) else event.kind == "load" and event.detail in paths


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
