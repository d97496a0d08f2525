"""Trace of a run: bytes, and seconds of the device's clock (virtual on ``sim``)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import zip_longest
from typing import Any

from graphrun.device_kinds import kind_called
from graphrun.units import MIB, html_table, show_seconds, show_size

# Share of the plan's peak by which a slot of a run on unified memory may exceed its own. There the
# kernel counts the whole process, and Python, heaps and threads take a little more or less from run
# to run. On other devices each byte is an allocation that the plan counts.
PROCESS_TOLERANCE = 0.03

# Page of the allocator's pool for small tensors. A slot may exceed its own peak by
# `DeviceKind.first_run_pages` of them, if it stays within the largest peak of the plan. On an H100,
# slots that load had reserved up to two more in the first run of a process, with the same tensors,
# and none in later runs (benchmarks/results/card-flux.json).
SMALL_PAGE_BYTES = 2 * MIB


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a run, with its start and end in seconds from the start of the run.

    ``kind`` is one of

        load       copy of one block to the device, where it stays
        stream     copy of one block into the ring buffer
        block      compute of one streamed block, without waiting for its copy
        run        one call into a component
        read       one block read from disk into its backing store; nbytes: bytes read from files
        fetch      one block read from disk for its own copy to the device; nbytes as for read
        drop       a backing store released
        evict      the device copy of one block released
        spill      a value copied to the host
        restore    a spilled value copied back
        size       measured device bytes of a quantized component after its first call
    """

    kind: str
    component: str  # empty for spill and restore
    slot: int
    detail: str  # block path, entry point (run), or name of a value (spill, restore)
    nbytes: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class SlotTrace:
    """Measurements of one slot of the plan.

    ``peak_bytes``: peak on the device. ``moved_bytes``: weights copied to all devices.
    ``host_bytes``: peak of backing stores and spilled values in RAM; ``locked_bytes``: of the
    page-locked part. ``calls``: the maximum number of calls into one component.
    ``secondary_peaks``: peak on each secondary device. ``planned_peaks``: planned peak on each
    device by the plan that opened the slot, plus the bytes there that do not belong to the plan.
    """

    phase: str
    part: str
    calls: int
    peak_bytes: int
    moved_bytes: int
    start_seconds: float
    end_seconds: float
    host_bytes: int = 0
    locked_bytes: int = 0
    secondary_peaks: tuple[int, ...] = ()
    planned_peaks: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """As in the plan's text; ``end`` for the slot after the last phase."""
        return f"{self.phase} {self.part}".strip()


@dataclass(frozen=True, slots=True)
class Overrun:
    """A slot whose measured peak exceeds its plan; ``device``: 0, or a secondary's number."""

    slot: str
    device: int
    planned_bytes: int
    peak_bytes: int

    def __str__(self) -> str:
        peak_text, plan_text = show_size(self.peak_bytes), show_size(self.planned_bytes)
        if peak_text == plan_text:
            peak_text, plan_text = f"{self.peak_bytes:,} B", f"{self.planned_bytes:,} B"
        suffix = f" on device{self.device}" if self.device else ""
        return f"{peak_text} instead of {plan_text} in {self.slot}{suffix}"


def verdict(overruns: Sequence[Overrun], replans: int = 0) -> str:
    """Return whether a run stayed within the memory of its plan, as text.

    If not, the text has planned and measured bytes of the largest overrun. ``replans``: how often
    the remaining stages were planned again.
    """
    prefix = f"planned again {'once' if replans == 1 else f'{replans} times'}; " if replans else ""
    if not overruns:
        return f"{prefix}the run stayed within the planned memory"
    largest = max(overruns, key=lambda overrun: overrun.peak_bytes - overrun.planned_bytes)
    suffix = f", and in {len(overruns) - 1} more" if len(overruns) > 1 else ""
    return f"{prefix}the run took more memory than planned: {largest}{suffix}"


def warn_of(overruns: Sequence[Overrun], stacklevel: int = 1) -> None:
    """Issue a RuntimeWarning of ``overruns``; ``stacklevel`` 1 names the caller's line."""
    if overruns:
        suggestion = "plan again from a new estimate, or leave more room with reserve="
        warnings.warn(
            f"{verdict(overruns)}; {suggestion}", RuntimeWarning, stacklevel=stacklevel + 1
        )


@dataclass(frozen=True, slots=True)
class Tier:
    """Bytes of a memory tier before and after a run.

    Tiers are ``device``, ``arenas`` (host memory for weights) and ``pinned`` (part of it).
    """

    name: str
    before_bytes: int
    after_bytes: int

    @property
    def left_bytes(self) -> int:
        return max(0, self.after_bytes - self.before_bytes)


@dataclass(frozen=True, slots=True, repr=False)
class Trace:
    """One run. ``outputs`` are the graph's outputs.

    ``left_bytes``: bytes still on the device beyond the ``baseline_bytes`` before the run.
    ``process_bytes``: on unified memory, the planned bytes of the process itself, which are not in
    the peaks of the slots; else 0.
    """

    plan_digest: str
    device: str
    slots: tuple[SlotTrace, ...]
    events: tuple[Event, ...]
    baseline_bytes: int
    left_bytes: int
    outputs: dict[str, Any] = field(default_factory=dict, compare=False)
    tiers: tuple[Tier, ...] = ()
    # one line for each time that the remaining stages were planned again
    notes: tuple[str, ...] = ()
    # where weights were read from: component, source, commit, files
    sources: tuple[dict[str, Any], ...] = ()
    process_bytes: int = 0

    def __repr__(self) -> str:
        traffic, peak = show_size(self.moved_bytes), show_size(self.peak_bytes)
        return (
            f"<Trace on {self.device}: {show_seconds(self.seconds)}, peak {peak}, moved "
            f"{traffic}, {len(self.slots)} slots>"
        )

    def _repr_html_(self) -> str:
        rows = [
            (
                slot.name,
                show_size(slot.peak_bytes),
                show_size(slot.moved_bytes),
                show_seconds(slot.end_seconds - slot.start_seconds),
            )
            for slot in self.slots
        ]
        return html_table(repr(self), [("slot", "peak", "moved", "took"), *rows])

    def pairs_with(self, plan_slots: Sequence[Any]) -> list[tuple[Any, SlotTrace]]:
        """Return planned and measured slots of equal phase and part, without slots not run."""
        slot_traces = {(slot.phase, slot.part): slot for slot in self.slots}
        return [
            (slot, slot_traces[slot.phase, slot.part])
            for slot in plan_slots
            if (slot.phase, slot.part) in slot_traces
        ]

    @property
    def peak_bytes(self) -> int:
        """Peak bytes on the device."""
        return max((slot.peak_bytes for slot in self.slots), default=0)

    @property
    def unified(self) -> bool:
        """Whether device and host share memory."""
        return kind_called(self.device).is_host or self.process_bytes > 0

    @property
    def overruns(self) -> tuple[Overrun, ...]:
        """The slots that took more memory than planned.

        Beyond `PROCESS_TOLERANCE` on unified memory, where their bytes are of the whole process,
        and `DeviceKind.first_run_pages`.
        """
        planned_slots = [slot.planned_peaks for slot in self.slots if slot.planned_peaks]
        largest_peaks = [max(peaks) for peaks in zip_longest(*planned_slots, fillvalue=0)]
        process_bytes = self.process_bytes
        first_run_bytes = SMALL_PAGE_BYTES * kind_called(self.device).first_run_pages

        def allowed_bytes(device: int, plan_peak: int) -> int:
            if process_bytes:
                return plan_peak + int(PROCESS_TOLERANCE * (process_bytes + largest_peaks[0]))
            return max(plan_peak, min(plan_peak + first_run_bytes, largest_peaks[device]))

        return tuple(
            Overrun(slot.name, device, process_bytes + plan_peak, process_bytes + peak)
            for slot in self.slots
            for device, (plan_peak, peak) in enumerate(
                zip(slot.planned_peaks, (slot.peak_bytes, *slot.secondary_peaks), strict=False)
            )
            if peak > allowed_bytes(device, plan_peak)
        )

    @property
    def verdict(self) -> str:
        """Whether the run stayed within the planned memory (`verdict`)."""
        return verdict(self.overruns, len(self.notes))

    @property
    def host_bytes(self) -> int:
        """Peak bytes of backing stores and spilled values in RAM."""
        return max((slot.host_bytes for slot in self.slots), default=0)

    @property
    def moved_bytes(self) -> int:
        """Bytes of weights copied to the device."""
        return sum(slot.moved_bytes for slot in self.slots)

    @property
    def disk_bytes_read(self) -> int:
        """Bytes of weights read from files, before quantizing or casting."""
        return sum(event.nbytes for event in self.events if event.kind in ("read", "fetch"))

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first slot to the end of the last."""
        return self.slots[-1].end_seconds - self.slots[0].start_seconds if self.slots else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary, without the outputs."""
        return {
            "plan_digest": self.plan_digest,
            "device": self.device,
            "baseline_bytes": self.baseline_bytes,
            "left_bytes": self.left_bytes,
            **({"process_bytes": self.process_bytes} if self.process_bytes else {}),
            "notes": list(self.notes),
            "sources": list(self.sources),
            "tiers": [{**asdict(tier), "left_bytes": tier.left_bytes} for tier in self.tiers],
            "slots": [
                {key: value for key, value in asdict(slot).items() if value != ()}
                for slot in self.slots
            ],
            "events": [asdict(event) for event in self.events],
        }


@dataclass(frozen=True, slots=True)
class Lane:
    """A run on a ``device`` of a cluster; seconds are of one clock, from the batch's start."""

    device: str
    request: int
    stages: tuple[str, ...]
    start_seconds: float
    end_seconds: float
    trace: Trace | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary. Times in ``trace`` are from the start of this run."""
        return {
            **{lane_field.name: getattr(self, lane_field.name) for lane_field in fields(self)},
            "trace": self.trace and self.trace.to_json(),
        }
