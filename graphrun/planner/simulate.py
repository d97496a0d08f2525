"""What a plan does: bytes and seconds, per slot, per block. The only source of a plan's peak and time; chooses nothing.

bytes    weights present + loaded by the slot | rings | activation | values + carry      highest sum per slot: its peak
seconds  copies and compute of each slot on a `Timeline`; a barrier joins the two at its end
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from graphrun.errors import PlanError
from graphrun.planner.plan import Blocks, Evict, Load, Plan, Run, Slot, Stream
from graphrun.planner.problem import ALLOCATION_BYTES, ComponentNumbers, PhaseNumbers, Problem, Use
from graphrun.planner.timeline import Key, Size, Span, Timeline, Work
from graphrun.trace import Event
from graphrun.units import round_up


@dataclass(frozen=True, slots=True)
class Moment:
    """What holds when action number ``action`` of slot ``slot`` is done: ``device_bytes`` counts weights, rings, values and carry,
    and with ``run`` the activation. A load lasts from the start of its first block's copy to the end of its last."""

    slot: int
    action: int
    device_bytes: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class SlotReport:
    """One slot. ``peak_bytes`` is the sum of ``resident_bytes`` (weights present at its start or loaded in it, every block rounded
    up as the device does), ``ring_bytes``, ``activation_bytes`` and ``values_bytes`` (values between stages, and carry).
    ``streamed_bytes`` went through rings, ``loaded_bytes`` came to stay."""

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
    """A whole run: ``moments`` per action, ``slots`` as in the plan, ``events`` per block and call as a `Trace` has them."""

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
    """Bytes and seconds of ``plan``, which should satisfy `check`.

    Raises PlanError where it cannot be followed at all: a needed block is nowhere or does not fit its ring, or a name is unknown.
    """
    walk = _Walk(problem)
    reports = tuple(walk.slot(index, slot) for index, slot in enumerate(plan.slots))
    return Simulation(
        moments=tuple(walk.moments),
        slots=reports,
        events=tuple(walk.events),
        seconds=walk.now,
        moved_bytes=sum(report.streamed_bytes + report.loaded_bytes for report in reports),
        peak_bytes=max((report.peak_bytes for report in reports), default=0),
    )


class _Walk:
    """The plan, slot after slot: blocks present, time passed."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.components = {component.name: component for component in problem.components}
        self.phases = {phase.name: (index, phase) for index, phase in enumerate(problem.phases)}
        self.sizes: dict[Key, Size] = {}
        for component in problem.components:
            variant = component.variants[0]
            for key in self._keys(component.name, None):
                self.sizes[key] = Size(variant.block_bytes[key[1]], variant.load_seconds[key[1]])
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
        self.present -= set(evicted)
        works, activation, values = self._works(index, slot, set(loads), rings)
        used = {work.key for work in works}
        line = Timeline(start, works, (key for key in loads if key not in used), self.sizes, rings)
        self.now = line.end_seconds
        held = self._held(self.present | set(loads))
        ring = sum(round_up(nbytes, ALLOCATION_BYTES) for nbytes in rings.values())
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
        )
        self.events += [self._event(index, Span("evict", key, 0, start, start)) for key in evicted]
        self.events += sorted(
            (self._event(index, span) for span in (*line.copies, *line.calls.values())), key=lambda event: event.start_seconds
        )
        self._note(index, slot, keys, values + self._held((*self.present, *evicted)), activation, line, start)
        self.present |= set(loads)
        return report

    def _works(self, index: int, slot: Slot, loads: set[Key], rings: dict[str, int]) -> tuple[list[Work], int, int]:
        """Every block's compute in order, the activation, and values with carry."""
        if slot.part == "end":
            return [], 0, 0
        if slot.phase not in self.phases:
            raise PlanError(f"slot {index}: the problem has no phase {slot.phase!r}")
        number, phase = self.phases[slot.phase]
        works = []
        for key, seconds, turn in self._computed(phase, slot):
            source: Literal["present", "load", "stream"] = (
                "present" if key in self.present else "load" if key in loads else "stream"
            )
            if source == "stream" and key[0] not in rings:
                raise PlanError(f"slot {index}: {self._path(key)} of {key[0]} is needed, and neither present, loaded nor streamed")
            works.append(Work(key, seconds, turn, source))
        activation = {"first": phase.first_bytes, "rest": phase.rest_bytes}.get(slot.part, 0)
        return works, activation, self.problem.value_bytes(number) + phase.carry_bytes

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
        self, index: int, slot: Slot, keys: list[list[Key]], held: int, activation: int, line: Timeline, start: float
    ) -> None:
        """Adds the slot's moments; ``held`` is what was on the device before its first action."""
        copied = {span.key: span for span in line.copies if span.kind == "load"}
        for number, (action, of) in enumerate(zip(slot.actions, keys, strict=True)):
            begin, end = start, self.now
            if isinstance(action, Evict):
                held, end = held - self._held(of), start
            elif isinstance(action, Load):
                held += self._held(of)
                begin = min((copied[key].start_seconds for key in of if key in copied), default=start)
                end = max((copied[key].end_seconds for key in of if key in copied), default=start)
            elif isinstance(action, Stream):
                held += round_up(action.ring_bytes, ALLOCATION_BYTES)
            elif isinstance(action, Run):
                held += activation
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
                raise PlanError(f"{component} has no blocks {name}{list(indices)}")
        return [(component, index[name], i) for name, indices in blocks for i in indices]

    def _held(self, keys: Iterable[Key]) -> int:
        return sum(round_up(self.sizes[key].nbytes, ALLOCATION_BYTES) for key in keys)

    def _path(self, key: Key) -> str:
        return self.components[key[0]].classes[key[1]].blocks[key[2]]

    def _event(self, slot: int, span: Span) -> Event:
        detail = f"call {span.turn}" if span.kind == "run" else self._path(span.key)
        nbytes = 0 if span.kind == "run" else self.sizes[span.key].nbytes
        return Event(span.kind, span.key[0], slot, detail, nbytes, span.start_seconds, span.end_seconds)


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
