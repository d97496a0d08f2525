"""A run over time as an SVG drawing: disk reads, copies, compute, and device memory against its budget.

    disk      |== t5 ==|=== transformer ===|
    copies      |= t5 =| |==|==|==|==|==|==|
    compute         |t5| |================|
    memory    __|--------|____|------------|__   .... budget
              +---------------------------------> seconds

Colours are CSS classes ``c0`` ``c1`` ..., one per component; the page defines them for its dark and light themes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from graphrun.report.svg import block, element
from graphrun.trace import Event, SlotTrace
from graphrun.units import show_seconds, show_size

WIDTH, LABEL, ROW, GAP, MEMORY = 1000, 90, 22, 6, 120
# The kinds of events on each track.
TRACKS: Mapping[str, tuple[str, ...]] = {
    "disk": ("read", "fetch"),
    "copies": ("load", "stream", "spill", "restore"),
    "compute": ("run",),
}


def timeline_svg(
    events: Sequence[Event], slots: Sequence[SlotTrace], budget_bytes: int, colours: Mapping[str, int], title: str
) -> str:
    """The drawing as SVG text. ``slots`` in order of time; ``colours``: the number of each component's CSS class."""
    tracks = {track: own for track, kinds in TRACKS.items() if (own := [event for event in events if event.kind in kinds])}
    start = min((slot.start_seconds for slot in slots), default=0.0)
    seconds = max((slot.end_seconds for slot in slots), default=1.0) - start or 1.0
    most = max([budget_bytes, *(slot.peak_bytes for slot in slots)]) or 1
    memory = GAP + len(tracks) * (ROW + GAP)
    height = memory + MEMORY + 24

    def x(moment: float) -> float:
        return LABEL + (WIDTH - LABEL) * (moment - start) / seconds

    def y(nbytes: int) -> float:
        return memory + MEMORY - MEMORY * nbytes / most

    def elements() -> Iterator[str]:
        for top, (track, own) in zip(range(GAP, memory, ROW + GAP), tracks.items(), strict=True):
            yield element("text", track, x=0, y=top + ROW - 7)
            yield element("rect", class_="lane", x=LABEL, y=top, width=WIDTH - LABEL, height=ROW)
            for event in merged(own, seconds / (WIDTH - LABEL)):
                what = f"{event.kind} {event.component or event.detail}: {show_seconds(event.end_seconds - event.start_seconds)}"
                what += f", {show_size(event.nbytes)}" if event.nbytes else ""
                kind = f"c{colours.get(event.component, 0)} {event.kind}"
                yield block(x(event.start_seconds), x(event.end_seconds), top, ROW, kind, what)
        yield element("text", "memory", x=0, y=memory + 18)
        yield element("text", show_size(most), class_="tick", x=0, y=memory + 38)
        for slot in slots:
            high, what = y(slot.peak_bytes), f"{slot.name}: {show_size(slot.peak_bytes)}"
            yield block(x(slot.start_seconds), x(slot.end_seconds), high, memory + MEMORY - high, "level", what)
        budget = element("title", f"budget: {show_size(budget_bytes)}")
        yield element("path", budget, class_="budget", d=f"M{LABEL} {y(budget_bytes):.1f}H{WIDTH}")
        for share, anchor in ((0.0, "start"), (0.25, "middle"), (0.5, "middle"), (0.75, "middle"), (1.0, "end")):
            tick = start + seconds * share
            yield element("text", show_seconds(tick - start), class_="tick", x=x(tick), y=height - 4, text_anchor=anchor)

    return element("svg", "".join(elements()), viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=title)


def merged(events: Iterable[Event], pixel_seconds: float) -> list[Event]:
    """Merges consecutive events of one kind and component with gaps below a pixel, and adds their bytes."""
    found: list[Event] = []
    for event in sorted(events, key=lambda each: each.start_seconds):
        if found:
            last = found[-1]
            alike = (last.kind, last.component) == (event.kind, event.component)
            if alike and event.start_seconds - last.end_seconds <= pixel_seconds:
                end = max(last.end_seconds, event.end_seconds)
                found[-1] = replace(last, end_seconds=end, nbytes=last.nbytes + event.nbytes)
                continue
        found.append(event)
    return found
