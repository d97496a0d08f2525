"""What a plan does: bytes and seconds, per slot, per block. The only source of a plan's peak and time; chooses nothing.

Two timelines, one for compute and one for copies to the device, joined by a barrier at the end of every slot:

    copy     |d3 |s8 |s9 |   |s1 |f |s2 |f |s8 |            s  streamed: waits for room in the ring
    compute  |   d3  |  s8   |  s9  |   s1   |  s2  |  s8   |            d  loaded and kept by the slot that computes with it
             ^ barrier: slot begins                         ^ barrier    f  prefetch: fills time in which the ring is full

A block's compute waits for its own copy. Streamed blocks, and blocks that the slot loads for itself, are copied in call order, across
calls; a prefetch (a load of something that the slot does not compute with) goes in only while the next of them has no room yet, and
evenly over the slot, because a copy under way is not interrupted; what is left of it follows the last of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from graphrun.errors import PlanError
from graphrun.planner.plan import Blocks, Evict, Load, Plan, Run, Slot, Stream
from graphrun.planner.problem import ALLOCATION_BYTES, ComponentNumbers, PhaseNumbers, Problem
from graphrun.planner.ring import Ring
from graphrun.trace import Event
from graphrun.units import round_up

Key = tuple[str, int, int]  # component, class, block within the class


@dataclass(frozen=True, slots=True)
class Moment:
    """What holds when action number ``action`` of slot ``slot`` has been carried out: ``device_bytes`` counts weights, rings, values
    and carry, and with ``run`` the activation. A load lasts from its first block's copy to its last block's."""

    slot: int
    action: int
    device_bytes: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class SlotReport:
    """One slot. ``peak_bytes`` is the sum of ``resident_bytes`` (weights present at its start or loaded in it, each block rounded up as
    the device does), ``ring_bytes``, ``activation_bytes`` and ``values_bytes`` (values between stages, and carry). ``streamed_bytes``
    went through rings, ``loaded_bytes`` came to stay. ``stall_seconds`` is what is not compute."""

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


@dataclass(frozen=True, slots=True)
class Simulation:
    """A whole run: ``moments`` per action, ``slots`` as in the plan, ``events`` per block copied and per call (as a `Trace` has them)."""

    moments: tuple[Moment, ...]
    slots: tuple[SlotReport, ...]
    events: tuple[Event, ...]
    seconds: float
    moved_bytes: int
    peak_bytes: int

    @property
    def compute_seconds(self) -> float:
        """Time in which the device computes; the rest of ``seconds`` is exposed transfer."""
        return sum(slot.compute_seconds for slot in self.slots)

    def stages(self, problem: Problem) -> tuple[StageReport, ...]:
        """One report per stage of ``problem``, in order; the last slot belongs to none."""
        stage_of = {phase.name: phase.stage for phase in problem.phases}
        return tuple(
            _stage(stage, [slot for slot in self.slots if stage_of.get(slot.phase) == stage])
            for stage in dict.fromkeys(phase.stage for phase in problem.phases)
        )


def simulate(problem: Problem, plan: Plan) -> Simulation:
    """Bytes and seconds of ``plan``. It should satisfy `check`; PlanError where it cannot be followed at all (a block that is needed is
    nowhere, a name is unknown, a block does not fit its ring)."""
    state = _State(problem)
    reports = tuple(state.slot(index, slot) for index, slot in enumerate(plan.slots))
    return Simulation(
        moments=tuple(state.moments),
        slots=reports,
        events=tuple(state.events),
        seconds=state.now,
        moved_bytes=sum(report.streamed_bytes + report.loaded_bytes for report in reports),
        peak_bytes=max((report.peak_bytes for report in reports), default=0),
    )


@dataclass(slots=True)
class _Copies:
    """The copy timeline of one slot."""

    free: float  # when the copy stream is done with what it has
    loads: dict[Key, int]  # loaded by the slot -> number of the action
    prefetch: list[Key]  # those that the slot does not compute with, in order
    demanded_seconds: float  # total copy time of all that the slot computes with
    prefetch_seconds: float
    demanded_done: float = 0.0
    prefetch_done: float = 0.0
    arrived: dict[Key, float] = field(default_factory=dict)
    rings: dict[str, Ring] = field(default_factory=dict)
    ends: dict[str, list[float]] = field(default_factory=dict)  # per component: end of compute, by placement in its ring


class _State:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.numbers = {component.name: component for component in problem.components}
        self.phases = {phase.name: (index, phase) for index, phase in enumerate(problem.phases)}
        self.present: set[Key] = set()
        self.now = 0.0
        self.events: list[Event] = []
        self.moments: list[Moment] = []

    def slot(self, index: int, slot: Slot) -> SlotReport:
        start = self.now
        loads: dict[Key, int] = {}
        for number, action in enumerate(slot.actions):
            if isinstance(action, Evict):
                for key in self._keys(action.component, action.blocks):
                    self.present.discard(key)
                    self._event("evict", key, index, start, start)
            elif isinstance(action, Load):
                loads |= {key: number for key in self._keys(action.component, action.blocks)}
        resident = sum(self._held(key) for key in self.present | loads.keys())
        streams = {action.component: action for action in slot.actions if isinstance(action, Stream)}
        ring = sum(round_up(stream.ring_bytes, ALLOCATION_BYTES) for stream in streams.values())
        activation, values, units = 0, 0, list[tuple[Key, float, int]]()
        if slot.part != "end":
            if slot.phase not in self.phases:
                raise PlanError(f"slot {index}: the problem has no phase {slot.phase!r}")
            number, phase = self.phases[slot.phase]
            values = self.problem.value_bytes(number) + phase.carry_bytes
            activation = {"first": phase.first_bytes, "rest": phase.rest_bytes}.get(slot.part, 0)
            units = list(self._units(phase, slot))
        streamed = self._run(index, units, loads, streams)
        self.present |= loads.keys()
        report = SlotReport(
            phase=slot.phase,
            part=slot.part,
            peak_bytes=resident + ring + activation + values,
            resident_bytes=resident,
            ring_bytes=ring,
            activation_bytes=activation,
            values_bytes=values,
            streamed_bytes=streamed,
            loaded_bytes=sum(self._copy(key)[0] for key in loads),
            seconds=self.now - start,
            compute_seconds=sum(seconds for _, seconds, _ in units),
        )
        self._note(index, slot, report, start, loads)
        return report

    def _units(self, phase: PhaseNumbers, slot: Slot) -> Iterator[tuple[Key, float, int]]:
        """Every block's compute in order: block, seconds, round. Components take turns; a class runs in its first calls."""
        for turn in range(slot.calls):
            for use in phase.uses:
                calls = use.class_calls_in(slot.part)
                for k, blocks in enumerate(self._component(use.component).classes):
                    if turn < calls[k]:
                        for i in range(len(blocks.blocks)):
                            yield (use.component, k, i), use.seconds[k], turn

    def _run(self, index: int, units: list[tuple[Key, float, int]], loads: dict[Key, int], streams: dict[str, Stream]) -> int:
        """Carries out one slot from ``self.now`` to its barrier. Returns the bytes that went through rings."""
        demanded = [key for key, _, _ in units if key not in self.present and key not in loads]
        own = dict.fromkeys(key for key, _, _ in units if key in loads)
        prefetch = [key for key in loads if key not in own]
        copies = _Copies(
            free=self.now,
            loads=loads,
            prefetch=prefetch,
            demanded_seconds=sum(self._copy(key)[1] for key in (*demanded, *own)),
            prefetch_seconds=sum(self._copy(key)[1] for key in prefetch),
            rings={name: Ring(stream.ring_bytes) for name, stream in streams.items()},
            ends={name: [] for name in streams},
        )
        prefetch.reverse()
        compute = self.now
        calls: dict[tuple[str, int], float] = {}
        for key, seconds, turn in units:
            through_ring = key not in self.present and key not in loads
            arrived = self.now
            if through_ring or (key in loads and key not in copies.arrived):
                arrived = self._demand(index, key, copies, through_ring)
            began = max(compute, copies.arrived.get(key, arrived), arrived)
            compute = began + seconds
            if through_ring:
                copies.ends[key[0]].append(compute)
            calls[key[0], turn] = self._call(index, key[0], turn, calls.get((key[0], turn)), began, compute)
        while copies.prefetch:
            self._prefetch(index, copies)
        self.now = max(compute, copies.free)
        return sum(self._copy(key)[0] for key in demanded)

    def _call(self, index: int, component: str, turn: int, known: float | None, began: float, ended: float) -> float:
        """Extends the call's event to ``ended``; returns where the event is."""
        if known is None:
            self.events.append(Event("run", component, index, f"call {turn}", 0, began, ended))
            return len(self.events) - 1
        event = self.events[int(known)]
        self.events[int(known)] = Event("run", component, index, event.detail, 0, event.start_seconds, ended)
        return known

    def _demand(self, index: int, key: Key, copies: _Copies, through_ring: bool) -> float:
        """Copies a block that the slot computes with; returns when it is there."""
        nbytes, seconds = self._copy(key)
        ready = self.now
        if through_ring:
            if key[0] not in copies.rings:
                raise PlanError(f"slot {index}: {self._path(key)} of {key[0]} is needed, and neither present, loaded nor streamed")
            try:
                released = copies.rings[key[0]].place(nbytes).released
            except ValueError as error:
                raise PlanError(f"slot {index}: stream {key[0]}: {error}") from error
            ready = copies.ends[key[0]][released[-1]] if released else ready
        while copies.prefetch and copies.free < ready:
            if copies.prefetch_done * copies.demanded_seconds > copies.demanded_done * copies.prefetch_seconds:
                break
            self._prefetch(index, copies)
        start = max(copies.free, ready)
        copies.free = start + seconds
        copies.demanded_done += seconds
        if not through_ring:
            copies.arrived[key] = copies.free
        self._event("stream" if through_ring else "load", key, index, start, copies.free)
        return copies.free

    def _prefetch(self, index: int, copies: _Copies) -> None:
        key = copies.prefetch.pop()
        start, seconds = copies.free, self._copy(key)[1]
        copies.free += seconds
        copies.prefetch_done += seconds
        copies.arrived[key] = copies.free
        self._event("load", key, index, start, copies.free)

    def _note(self, index: int, slot: Slot, report: SlotReport, start: float, loads: dict[Key, int]) -> None:
        """Moments of the slot just carried out. Evictions come first in a slot, so that bytes only rise after them."""
        gone = [self._keys(a.component, a.blocks) if isinstance(a, Evict) else [] for a in slot.actions]
        held = report.resident_bytes + report.values_bytes - sum(map(self._held, loads)) + sum(map(self._held, sum(gone, [])))
        copied: dict[int, list[Event]] = {}
        numbers = {(key[0], self._path(key)): number for key, number in loads.items()}
        for event in reversed(self.events):
            if event.slot != index:
                break
            if event.kind == "load":
                copied.setdefault(numbers[event.component, event.detail], []).append(event)
        for number, action in enumerate(slot.actions):
            begin, end = start, start if isinstance(action, Evict) else self.now
            if isinstance(action, Evict):
                held -= sum(map(self._held, gone[number]))
            elif isinstance(action, Load):
                held += sum(self._held(key) for key, of in loads.items() if of == number)
                done = copied.get(number, [])
                begin = min((event.start_seconds for event in done), default=start)
                end = max((event.end_seconds for event in done), default=start)
            elif isinstance(action, Stream):
                held += round_up(action.ring_bytes, ALLOCATION_BYTES)
            elif isinstance(action, Run):
                held += report.activation_bytes
            self.moments.append(Moment(index, number, held, begin, end))

    def _component(self, name: str) -> ComponentNumbers:
        if name not in self.numbers:
            raise PlanError(f"the problem has no component {name!r}")
        return self.numbers[name]

    def _keys(self, component: str, blocks: Blocks) -> list[Key]:
        classes = self._component(component).classes
        if blocks is None:
            return [(component, k, i) for k, of in enumerate(classes) for i in range(len(of.blocks))]
        index = {of.name: k for k, of in enumerate(classes)}
        for name, indices in blocks:
            if name not in index or any(i >= len(classes[index[name]].blocks) for i in indices):
                raise PlanError(f"component {component} has no blocks {name}{list(indices)}")
        return [(component, index[name], i) for name, indices in blocks for i in indices]

    def _copy(self, key: Key) -> tuple[int, float]:
        variant = self.numbers[key[0]].variants[0]
        return variant.block_bytes[key[1]], variant.load_seconds[key[1]]

    def _held(self, key: Key) -> int:
        return round_up(self._copy(key)[0], ALLOCATION_BYTES)

    def _path(self, key: Key) -> str:
        return self.numbers[key[0]].classes[key[1]].blocks[key[2]]

    def _event(self, kind: str, key: Key, slot: int, start: float, end: float) -> None:
        self.events.append(Event(kind, key[0], slot, self._path(key), 0 if kind == "evict" else self._copy(key)[0], start, end))


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
    )
