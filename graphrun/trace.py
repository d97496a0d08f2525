"""What happened in a run: per slot and per event, in seconds on the device's clock (virtual on sim) and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that was done: ``load``, ``evict``, ``stream`` (one block's copy), ``block`` (a streamed block's compute, without
    what it waited), ``run`` (one call), ``fill`` (one block of a backing store) and ``read`` (one block, for its copy), both with the bytes
    that files gave for it, ``free`` (a backing store),
    ``spill`` and ``restore`` (a value), ``size`` (what a quantized component holds on the device behind its first call)."""

    kind: str
    component: str  # empty for values
    slot: int
    detail: str  # block path for load, evict, stream, block, fill, read; entry point for run; name of a value
    nbytes: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class SlotTrace:
    """What was measured in one slot of the plan. ``host_bytes``: the most that backing stores and spilled values took in RAM, of which
    ``locked_bytes`` had locked pages."""

    phase: str
    part: str
    calls: int
    peak_bytes: int
    moved_bytes: int
    start_seconds: float
    end_seconds: float
    host_bytes: int = 0
    locked_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Tier:
    """One place where bytes lie (``device``, ``pinned``, ``arenas``: all host memory for weights), before a run and after it."""

    name: str
    before_bytes: int
    after_bytes: int

    @property
    def left_bytes(self) -> int:
        """What the run left behind."""
        return max(0, self.after_bytes - self.before_bytes)


@dataclass(frozen=True, slots=True)
class Trace:
    """A run. ``outputs`` are the graph's; ``left_bytes`` is what remained on the device beyond the ``baseline_bytes`` before."""

    plan_digest: str
    device: str
    slots: tuple[SlotTrace, ...]
    events: tuple[Event, ...]
    baseline_bytes: int
    left_bytes: int
    outputs: dict[str, Any] = field(default_factory=dict, compare=False)
    tiers: tuple[Tier, ...] = ()
    notes: tuple[str, ...] = ()  # one line for each time that the rest was planned again
    sources: tuple[dict[str, Any], ...] = ()  # what weights were read from: component, source, commit, files

    def beside(self, planned: Sequence[Any]) -> list[tuple[Any, SlotTrace]]:
        """Planned slots, each with the measured one of its phase and part; where the rest was planned again, those there are."""
        measured = {(slot.phase, slot.part): slot for slot in self.slots}
        return [(slot, measured[slot.phase, slot.part]) for slot in planned if (slot.phase, slot.part) in measured]

    @property
    def peak_bytes(self) -> int:
        """The most that was on the device at any time."""
        return max((slot.peak_bytes for slot in self.slots), default=0)

    @property
    def host_bytes(self) -> int:
        """The most that backing stores and spilled values took in RAM at any time."""
        return max((slot.host_bytes for slot in self.slots), default=0)

    @property
    def moved_bytes(self) -> int:
        """Bytes copied to the device as weights."""
        return sum(slot.moved_bytes for slot in self.slots)

    @property
    def disk_bytes_read(self) -> int:
        """Bytes that files gave for weights: those of the files' precision, whatever became of them."""
        return sum(event.nbytes for event in self.events if event.kind in ("read", "fetch"))

    @property
    def seconds(self) -> float:
        """From the first slot's start to the last slot's end."""
        return self.slots[-1].end_seconds - self.slots[0].start_seconds if self.slots else 0.0

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary, without the outputs."""
        return {
            "plan_digest": self.plan_digest,
            "device": self.device,
            "baseline_bytes": self.baseline_bytes,
            "left_bytes": self.left_bytes,
            "notes": list(self.notes),
            "sources": list(self.sources),
            "tiers": [{**asdict(tier), "left_bytes": tier.left_bytes} for tier in self.tiers],
            "slots": [asdict(slot) for slot in self.slots],
            "events": [asdict(event) for event in self.events],
        }
