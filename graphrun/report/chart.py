"""A run over time as an SVG drawing: disk reads, copies, compute, and device memory.

    disk      |== t5 ==|=== transformer ===|
    copies      |= t5 =| |==|==|==|==|==|==|
    compute   ////  |t5|/|================|   //// nothing computes
    memory    __|--------|____|------------|__   .... budget; by component
              +---------------------------------> seconds

Each component has a colour, the CSS class ``c0``, ``c1`` and so on, which the page defines for its
dark and light themes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import count

from graphrun.report.memory import MemoryPart
from graphrun.report.svg import block, element, round_ticks, tick_seconds
from graphrun.report.table import Units
from graphrun.trace import Event, SlotTrace
from graphrun.units import show_seconds, show_size

WIDTH, LABEL, RIGHT, ROW, GAP, MEMORY = 1000, 90, 24, 22, 6, 120
# the kinds of events on each track
TRACKS: Mapping[str, tuple[str, ...]] = {
    "disk": ("read", "fetch"),
    "copies": ("load", "stream", "spill", "restore"),
    "compute": ("run",),
}


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """The horizontal axis: ``seconds`` from ``start`` on."""

    start: float
    seconds: float

    def x(self, moment: float) -> float:
        """Return the coordinate of ``moment``."""
        return LABEL + (WIDTH - LABEL - RIGHT) * (moment - self.start) / self.seconds

    def ticks(self, y: float) -> Iterator[str]:
        """Yield the labels at ``y``."""
        for second in round_ticks(self.seconds):
            x = self.x(self.start + second)
            yield element(
                "text", tick_seconds(second), class_="tick", x=x, y=y, text_anchor="middle"
            )


@dataclass(frozen=True, slots=True)
class _MemoryAxis:
    """The vertical axis: ``maximum_bytes`` from the coordinate ``bottom`` upwards."""

    bottom: int
    maximum_bytes: int

    def y(self, nbytes: float) -> float:
        return self.bottom - MEMORY * nbytes / self.maximum_bytes

    def ticks(self) -> Iterator[str]:
        units = Units(self.maximum_bytes)
        for tick in round_ticks(self.maximum_bytes / units.size_bytes, 4)[1:]:
            y = self.y(tick * units.size_bytes) + 4
            text = f"{tick:g} {units.size}"
            yield element("text", text, class_="tick", x=LABEL - 6, y=y, text_anchor="end")


def timeline_svg(
    events: Sequence[Event],
    slots: Sequence[SlotTrace],
    slot_plans: Mapping[str, tuple[float, Sequence[MemoryPart]]],
    budget_bytes: int,
    colours: Mapping[str, int],
    title: str,
) -> str:
    """Return the drawing as SVG text.

    ``slots``: in order of time. ``colours``: the number of each component's CSS class.
    ``slot_plans``: by slot name, the planned seconds of compute and the parts of the peak.

    The height of a call is the share of its time in which it computes. Time without compute is
    hatched.
    """
    tracks = {
        track: track_events
        for track, kinds in TRACKS.items()
        if (track_events := [event for event in events if event.kind in kinds])
    }
    start = min((slot.start_seconds for slot in slots), default=0.0)
    seconds = max((slot.end_seconds for slot in slots), default=1.0) - start or 1.0
    time = TimeAxis(start, seconds)
    bottom = 3 * GAP + len(tracks) * (ROW + GAP) + MEMORY
    memory = _MemoryAxis(bottom, max([budget_bytes, *(slot.peak_bytes for slot in slots)]) or 1)
    shares = _shares(tracks.get("compute", ()), slots, slot_plans)
    hatching = element("path", d="M0 6L6 0M-1 1L1 -1M5 7L7 5", class_="hatching")
    pattern = element(
        "pattern", hatching, id="waits", width=6, height=6, patternUnits="userSpaceOnUse"
    )
    parts = [element("defs", pattern)]
    for top, (track, track_events) in zip(count(GAP, ROW + GAP), tracks.items()):
        parts.append(lane(track, top, " waits" * (track == "compute")))
        parts += _track(track_events, top, time, shares, colours)
    parts.append(element("text", "memory", x=0, y=bottom - 2))
    for slot in slots:
        _, memory_parts = slot_plans.get(slot.name, (0.0, ()))
        parts += _stack(slot, memory_parts, time, memory, colours)
    budget = element("title", f"budget: {show_size(budget_bytes)}")
    line = f"M{LABEL} {memory.y(budget_bytes):.1f}H{WIDTH - RIGHT}"
    parts += [*memory.ticks(), element("path", budget, class_="budget", d=line)]
    return chart([*parts, *time.ticks(bottom + 20)], bottom + 24, title)


def lane(name: str, top: int, kind: str = "") -> str:
    """Return the empty row ``name`` at ``top``. ``kind``: further CSS classes."""
    return element("text", escape(name), x=0, y=top + ROW - 7) + element(
        "rect", class_=f"lane{kind}", x=LABEL, y=top, width=WIDTH - LABEL - RIGHT, height=ROW
    )


def chart(elements: Iterable[str], height: int, title: str) -> str:
    """Return the SVG text of a drawing of `WIDTH`."""
    return element(
        "svg", "".join(elements), viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=title
    )


def _track(
    events: Iterable[Event],
    top: int,
    time: TimeAxis,
    shares: Mapping[int, float],
    colours: Mapping[str, int],
) -> Iterator[str]:
    """Yield a block for each event of a track. ``shares``: of the time of a slot's calls in which
    they compute."""
    for event in merged(events, time.seconds / (WIDTH - LABEL - RIGHT)):
        seconds_text = show_seconds(event.end_seconds - event.start_seconds)
        label = f"{event.kind} {event.component or event.detail}: {seconds_text}"
        label += f", {show_size(event.nbytes)}" if event.nbytes else ""
        share = shares.get(event.slot, 1.0) if event.kind == "run" else 1.0
        label += f", {share:.0%} of it computes" if share < 0.995 else ""
        kind = f"c{colours.get(event.component, 0)} {event.kind}"
        x_start, x_end = time.x(event.start_seconds), time.x(event.end_seconds)
        yield block(x_start, x_end, top + ROW * (1 - share), ROW * share, kind, label)


def _stack(
    slot: SlotTrace,
    parts: Iterable[MemoryPart],
    time: TimeAxis,
    memory: _MemoryAxis,
    colours: Mapping[str, int],
) -> Iterator[str]:
    """Yield a block for each part of a slot's peak, and one for the rest of the peak."""
    x_start, x_end, y = time.x(slot.start_seconds), time.x(slot.end_seconds), memory.y
    stacked_bytes, peak = 0, show_size(slot.peak_bytes)
    for part in parts:
        top_bytes = min(stacked_bytes + part.nbytes, slot.peak_bytes)
        kind = f"c{colours[part.component]} {part.kind}" if part.component else part.kind
        label = f"{slot.name}: {part.component} {part.kind} {show_size(part.nbytes)} of {peak}"
        height = y(stacked_bytes) - y(top_bytes)
        yield block(x_start, x_end, y(top_bytes), height, kind, label)
        stacked_bytes = top_bytes
    height = y(stacked_bytes) - y(slot.peak_bytes)
    yield block(x_start, x_end, y(slot.peak_bytes), height, "other", f"{slot.name}: {peak}")


def _shares(
    runs: Iterable[Event],
    slots: Sequence[SlotTrace],
    slot_plans: Mapping[str, tuple[float, Sequence[MemoryPart]]],
) -> dict[int, float]:
    """Return, for each slot, the share of its calls' time that is planned compute."""
    calls = dict[int, float]()
    for event in runs:
        calls[event.slot] = calls.get(event.slot, 0.0) + event.end_seconds - event.start_seconds
    computes = {
        number: slot_plans[slot.name][0]
        for number, slot in enumerate(slots)
        if slot.name in slot_plans
    }
    return {
        number: min(1.0, computes[number] / seconds)
        for number, seconds in calls.items()
        if seconds and number in computes
    }


def merged(events: Iterable[Event], pixel_seconds: float) -> list[Event]:
    """Merge consecutive events of one kind, component and slot, across gaps shorter than a pixel.
    Their bytes are added."""
    merged_events: list[Event] = []
    for event in sorted(events, key=lambda entry: entry.start_seconds):
        if merged_events:
            last = merged_events[-1]
            is_same_operation = (last.kind, last.component, last.slot) == (
                event.kind,
                event.component,
                event.slot,
            )
            if is_same_operation and event.start_seconds - last.end_seconds <= pixel_seconds:
                end = max(last.end_seconds, event.end_seconds)
                merged_events[-1] = replace(
                    last, end_seconds=end, nbytes=last.nbytes + event.nbytes
                )
                continue
        merged_events.append(event)
    return merged_events
