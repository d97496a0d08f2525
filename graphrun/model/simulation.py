"""Bytes and seconds of a simulated plan, per action, slot and stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from graphrun.model.problem import Problem
from graphrun.trace import Event


class TimeSpan(NamedTuple):
    """Time of one ``kind`` of work.

    ``load``, ``stream``: copy of block ``key``; ``read``, ``fetch``: its read from disk; ``evict``:
    its eviction. ``run``: the call ``call``, whose first block is ``key``. ``key``: component,
    block group, and block within the group.
    """

    kind: str
    key: tuple[str, int, int]
    call: int
    start_seconds: float
    end_seconds: float


class RepeatedSpans(NamedTuple):
    """``spans``, which come again ``times`` times, each time ``seconds`` later than the last."""

    spans: tuple[TimeSpan, ...]
    times: int
    seconds: float

    def all_spans(self) -> Iterator[TimeSpan]:
        """Yield the spans of every repetition, without the first ones."""
        for number in range(1, self.times + 1):
            shift = number * self.seconds
            for span in self.spans:
                yield span._replace(
                    start_seconds=span.start_seconds + shift, end_seconds=span.end_seconds + shift
                )


@dataclass(frozen=True, slots=True)
class SlotReport:
    """Bytes and seconds of one slot.

    ``peak_bytes``: sum of ``resident_bytes`` (blocks resident at its start or loaded in it, each
    rounded up to an allocation), ``ring_buffer_bytes``, ``activation_bytes``, ``values_bytes``
    (values between stages, and inputs) and ``pages_bytes`` (reserved by the allocator beyond
    tensors). ``streamed_bytes``: copied through ring buffers. ``loaded_bytes``: copied by load
    actions, also to secondary devices. ``restored_bytes``: of restored values. ``compute_seconds``:
    on the device or the CPU. ``host_bytes``: peak in RAM; ``pinned_bytes`` of it page-locked.
    ``disk_bytes_read``: weights read into backing stores or for copies. ``secondary_peaks``,
    ``secondary_pages``: as ``peak_bytes`` and ``pages_bytes`` of each secondary device.
    ``first_touch_seconds``: at its start, to write memory that no earlier slot had.
    """

    phase: str
    part: str
    peak_bytes: int
    resident_bytes: int
    ring_buffer_bytes: int
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
    pages_bytes: int = 0
    secondary_peaks: tuple[int, ...] = ()
    secondary_pages: tuple[int, ...] = ()
    first_touch_seconds: float = 0.0

    @property
    def working_bytes(self) -> int:
        return self.activation_bytes + self.pages_bytes

    @property
    def stall_seconds(self) -> float:
        """Time in which nothing computes: waiting for copies and reads."""
        return max(0.0, self.seconds - self.compute_seconds)


@dataclass(frozen=True, slots=True)
class StageReport:
    """Totals of the slots of one stage: peak bytes of each kind, sums of bytes moved, seconds."""

    stage: str
    peak_bytes: int
    resident_bytes: int
    ring_buffer_bytes: int
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


@dataclass(frozen=True)
class Simulation:
    """One cold run, or a session of several runs.

    ``problem``: with the plan's choices applied. ``slots``, ``seconds``: of the first run;
    ``further_slots``, ``further_seconds``: of one further run, all of which are equal. ``spans``:
    of each slot, in no order; spills and restores as events. Slots of a session's further run are
    numbered after those of the first run.
    """

    problem: Problem
    slots: tuple[SlotReport, ...]
    spans: tuple[tuple[TimeSpan | RepeatedSpans | Event, ...], ...]
    seconds: float
    further_slots: tuple[SlotReport, ...] = ()
    further_seconds: float = 0.0

    @property
    def all_slots(self) -> tuple[SlotReport, ...]:
        """The slots of the first run, then those of a further run."""
        return (*self.slots, *self.further_slots)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Evictions, copies and reads of blocks, and calls, as in a `Trace`: by slot and start."""
        components = {component.name: component for component in self.problem.components}

        def event(slot: int, span: TimeSpan | Event) -> Event:
            if isinstance(span, Event):
                return span
            (name, k, i), component = span.key, components[span.key[0]]
            is_run = span.kind == "run"
            return Event(
                span.kind,
                name,
                slot,
                f"call {span.call}" if is_run else component.groups[k].blocks[i],
                0 if is_run else component.variants[0].block_bytes[k],
                span.start_seconds,
                span.end_seconds,
            )

        return tuple(
            event(number, span)
            for number, spans in enumerate(self.spans)
            for span in sorted(_single_spans(spans), key=attrgetter("start_seconds"))
        )

    def disk_seconds(self, slot: int) -> float:
        """Return the seconds in which the disk is busy in the slot with the number ``slot``."""
        reads = (
            span
            for span in self.spans[slot]
            if (span.spans[0] if isinstance(span, RepeatedSpans) else span).kind in DISK_KINDS
        )
        return sum(span.end_seconds - span.start_seconds for span in _single_spans(reads))

    @property
    def moved_bytes(self) -> int:
        """Bytes copied to the device in the first run."""
        return _moved(self.slots)

    @property
    def further_moved_bytes(self) -> int:
        return _moved(self.further_slots)

    @property
    def peak_bytes(self) -> int:
        """Highest peak of any slot of any run."""
        return max((report.peak_bytes for report in self.all_slots), default=0)

    @property
    def host_peak_bytes(self) -> int:
        return max((report.host_bytes for report in self.all_slots), default=0)

    @property
    def pinned_peak_bytes(self) -> int:
        return max((report.pinned_bytes for report in self.all_slots), default=0)

    @property
    def compute_seconds(self) -> float:
        """Compute time of the first run. The rest of ``seconds`` is waiting for transfers."""
        return sum(slot.compute_seconds for slot in self.slots)

    @property
    def total_seconds(self) -> float:
        return self.seconds + (self.problem.runs - 1) * self.further_seconds

    @property
    def total_moved_bytes(self) -> int:
        return self.moved_bytes + (self.problem.runs - 1) * self.further_moved_bytes

    def in_pages(self, reserved_bytes: Sequence[int], *on_secondaries: Sequence[int]) -> Simulation:
        """Return the simulation with peaks as the allocator reserves them (`verify.pages`).

        ``reserved_bytes``: in the order of slots; ``on_secondaries``: likewise, for each secondary
        device.
        """
        slots = [
            replace(
                slot,
                peak_bytes=max(nbytes, slot.peak_bytes),
                pages_bytes=max(0, nbytes - slot.peak_bytes),
                secondary_peaks=tuple(map(max, slot.secondary_peaks, reserved_secondary)),
                secondary_pages=tuple(
                    max(0, nbytes - peak)
                    for nbytes, peak in zip(reserved_secondary, slot.secondary_peaks, strict=True)
                ),
            )
            for slot, nbytes, *reserved_secondary in zip(
                self.all_slots, reserved_bytes, *on_secondaries, strict=True
            )
        ]
        return replace(
            self,
            slots=tuple(slots[: len(self.slots)]),
            further_slots=tuple(slots[len(self.slots) :]),
        )

    def stages(self) -> tuple[StageReport, ...]:
        """Return one report per stage of the first run, in the order of execution."""
        stage_of = {phase.name: phase.stage for phase in self.problem.phases}
        stages = dict.fromkeys(
            stage_of[slot.phase] for slot in self.slots if slot.phase in stage_of
        )
        return tuple(
            _stage(stage, [slot for slot in self.slots if stage_of.get(slot.phase) == stage])
            for stage in stages
        )


DISK_KINDS = ("read", "fetch")  # of spans


def _single_spans(spans: Iterable[TimeSpan | RepeatedSpans | Event]) -> Iterator[TimeSpan | Event]:
    for span in spans:
        if isinstance(span, RepeatedSpans):
            yield from span.all_spans()
        else:
            yield span


PEAKS = (
    "peak_bytes",
    "resident_bytes",
    "ring_buffer_bytes",
    "activation_bytes",
    "values_bytes",
    "host_bytes",
    "pinned_bytes",
)
SUMS = ("streamed_bytes", "loaded_bytes", "compute_seconds", "disk_bytes_read")


def _stage(stage: str, slots: list[SlotReport]) -> StageReport:
    load_seconds = sum(slot.seconds for slot in slots if slot.part == "load")
    run_seconds = sum(slot.seconds for slot in slots if slot.part != "load")
    rows = [asdict(slot) for slot in slots]
    totals = {name: max(slot[name] for slot in rows) for name in PEAKS} | {
        name: sum(slot[name] for slot in rows) for name in SUMS
    }
    return StageReport(stage=stage, load_seconds=load_seconds, run_seconds=run_seconds, **totals)


def _moved(reports: Iterable[SlotReport]) -> int:
    return sum(
        report.streamed_bytes + report.loaded_bytes + report.restored_bytes for report in reports
    )
