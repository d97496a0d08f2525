"""Events of a run for its trace."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphrun.runtime.devices.device import Device, Mark
from graphrun.trace import Event


@dataclass(slots=True)
class EventRecorder:
    """Events of a run. After a barrier, `resolve_marks` turns their marks into seconds.

    ``origin``: mark at the start of the run, or where the run continues after `PlanRun.load_ahead`.
    ``offset_seconds``: seconds of the slots before ``origin``. ``slot``: index of the open slot.
    ``moved_bytes``: weights copied to the device in this slot. ``events``: with known seconds.
    """

    device: Device
    origin: Mark = None
    offset_seconds: float = 0.0
    slot: int = -1
    moved_bytes: int = 0
    events: list[Event] = field(default_factory=list)
    _unresolved: list[tuple[tuple[str, str, int, str, int], tuple[Mark, Mark], Device | None]] = (
        field(default_factory=list)
    )

    def note(
        self,
        kind: str,
        component: str,
        detail: str,
        nbytes: int,
        marks: tuple[Mark, Mark],
        device: Device | None = None,
    ) -> None:
        """Record an `Event` on ``device`` (None: main); ``load`` and ``stream`` count as moved."""
        if kind in {"load", "stream"}:
            self.moved_bytes += nbytes
        self._unresolved.append(((kind, component, self.slot, detail, nbytes), marks, device))

    def seconds(self, mark: Mark, device: Device | None = None) -> float:
        """Return the seconds from the start of the run to ``mark``. Call after a barrier."""
        return (
            self.offset_seconds
            + (device or self.device).seconds_at(mark)
            - self.device.seconds_at(self.origin)
        )

    def resolve_marks(self) -> None:
        """Turn the marks of new events into seconds. Call after a barrier."""
        self.events += [
            Event(*fields, *(self.seconds(mark, device) for mark in marks))
            for fields, marks, device in self._unresolved
        ]
        self._unresolved.clear()
