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
from dataclasses import replace
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
    maximum_bytes = max([budget_bytes, *(slot.peak_bytes for slot in slots)]) or 1
    memory = 3 * GAP + len(tracks) * (ROW + GAP)
    height = memory + MEMORY + 24
    busy = _shares(tracks.get("compute", ()), slots, slot_plans)

    def x(moment: float) -> float:
        return LABEL + (WIDTH - LABEL - RIGHT) * (moment - start) / seconds

    def y(nbytes: float) -> float:
        return memory + MEMORY - MEMORY * nbytes / maximum_bytes

    def elements() -> Iterator[str]:
        lines = element("path", d="M0 6L6 0M-1 1L1 -1M5 7L7 5", class_="hatching")
        yield element(
            "defs",
            element("pattern", lines, id="waits", width=6, height=6, patternUnits="userSpaceOnUse"),
        )
        for top, (track, lane_events) in zip(count(GAP, ROW + GAP), tracks.items()):
            yield element("text", track, x=0, y=top + ROW - 7)
            lane = f"lane{' waits' if track == 'compute' else ''}"
            yield element(
                "rect", class_=lane, x=LABEL, y=top, width=WIDTH - LABEL - RIGHT, height=ROW
            )
            for event in merged(lane_events, seconds / (WIDTH - LABEL - RIGHT)):
                label = (
                    f"{event.kind} {event.component or event.detail}: "
                    f"{show_seconds(event.end_seconds - event.start_seconds)}"
                )
                label += f", {show_size(event.nbytes)}" if event.nbytes else ""
                share = busy.get(event.slot, 1.0) if event.kind == "run" else 1.0
                label += f", {share:.0%} of it computes" if share < 0.995 else ""
                kind = f"c{colours.get(event.component, 0)} {event.kind}"
                yield block(
                    x(event.start_seconds),
                    x(event.end_seconds),
                    top + ROW * (1 - share),
                    ROW * share,
                    kind,
                    label,
                )
        yield element("text", "memory", x=0, y=memory + MEMORY - 2)
        for slot in slots:
            x_start, x_end, stacked_bytes = x(slot.start_seconds), x(slot.end_seconds), 0
            for part in slot_plans.get(slot.name, (0.0, ()))[1]:
                nbytes = min(part.nbytes, slot.peak_bytes - stacked_bytes)
                kind = f"c{colours[part.component]} {part.kind}" if part.component else part.kind
                label = (
                    f"{slot.name}: {part.component} {part.kind} {show_size(part.nbytes)} of "
                    f"{show_size(slot.peak_bytes)}"
                )
                yield block(
                    x_start,
                    x_end,
                    y(stacked_bytes + nbytes),
                    y(stacked_bytes) - y(stacked_bytes + nbytes),
                    kind,
                    label,
                )
                stacked_bytes += nbytes
            label = f"{slot.name}: {show_size(slot.peak_bytes)}"
            yield block(
                x_start,
                x_end,
                y(slot.peak_bytes),
                y(stacked_bytes) - y(slot.peak_bytes),
                "other",
                label,
            )
        units = Units(maximum_bytes)
        for tick in round_ticks(maximum_bytes / units.size_bytes, 4)[1:]:
            text_y = y(tick * units.size_bytes) + 4
            yield element(
                "text",
                f"{tick:g} {units.size}",
                class_="tick",
                x=LABEL - 6,
                y=text_y,
                text_anchor="end",
            )
        budget = element("title", f"budget: {show_size(budget_bytes)}")
        yield element(
            "path", budget, class_="budget", d=f"M{LABEL} {y(budget_bytes):.1f}H{WIDTH - RIGHT}"
        )
        for second in round_ticks(seconds):
            yield element(
                "text",
                tick_seconds(second),
                class_="tick",
                x=x(start + second),
                y=height - 4,
                text_anchor="middle",
            )

    return element(
        "svg", "".join(elements()), viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=title
    )


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
