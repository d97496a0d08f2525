"""Collects the events of a run for its trace."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphrun.runtime.devices.device import Device, Mark
from graphrun.trace import Event


@dataclass(slots=True)
class EventRecorder:
    """Collects the events of a run. Their times are marks of the device; `resolve_marks` turns
    these into seconds after a barrier.

    ``origin``: start of the run, behind ``offset_seconds`` of slots that were performed before.
    ``slot``: index of the open slot; ``moved_bytes``: weights copied to the device in it.
    ``events``: those with known seconds.
    """

    device: Device
    origin: Mark = None
    offset_seconds: float = 0.0
    slot: int = -1
    moved_bytes: int = 0
    events: list[Event] = field(default_factory=list)
    _unresolved: list[tuple[tuple[str, str, int, str, int], tuple[Mark, Mark], Device]] = field(
        default_factory=list
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
        """Records an `Event` with its start and end marks, which are those of ``device``, by
        default the first one. The bytes of ``load`` and ``stream`` events count as moved."""
        if kind in {"load", "stream"}:
            self.moved_bytes += nbytes
        self._unresolved.append(
            ((kind, component, self.slot, detail, nbytes), marks, device or self.device)
        )

    def seconds(self, mark: Mark, device: Device | None = None) -> float:
        """Seconds from the start of the run to ``mark``. Call after a barrier."""
        return (
            self.offset_seconds
            + (device or self.device).seconds_at(mark)
            - self.device.seconds_at(self.origin)
        )

    def resolve_marks(self) -> None:
        """Turns the marks of new events into seconds. Call after a barrier."""
        self.events += [
            Event(*what, *(self.seconds(mark, of) for mark in marks))
            for what, marks, of in self._unresolved
        ]
        self._unresolved.clear()
