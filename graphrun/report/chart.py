"""A run over time as an SVG drawing: disk reads, copies, compute, and device memory against its budget.

    disk      |== t5 ==|=== transformer ===|
    copies      |= t5 =| |==|==|==|==|==|==|
    compute         |t5| |================|
    memory    __|--------|____|------------|__   .... budget
              +---------------------------------> seconds

Colours are CSS classes ``c0`` ``c1`` ..., one per component; the page defines them for its dark and light themes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from graphrun.trace import Event
from graphrun.units import show_seconds, show_size

WIDTH, LABEL, ROW, GAP, MEMORY = 1000, 90, 22, 6, 120
TRACKS: Mapping[str, tuple[str, ...]] = {
    "disk": ("read", "fetch"),
    "copies": ("load", "stream", "spill", "restore"),
    "compute": ("run",),
}


@dataclass(frozen=True, slots=True)
class Level:
    """The peak on the device in one slot, with the slot's start and end. ``name``: as in the plan's text."""

    name: str
    start_seconds: float
    end_seconds: float
    nbytes: int


def timeline_svg(
    events: Sequence[Event], levels: Sequence[Level], budget_bytes: int, colours: Mapping[str, int], title: str
) -> str:
    """The drawing as SVG text. ``levels`` in order of time; ``colours``: the number of each component's CSS class."""
    start = min((level.start_seconds for level in levels), default=0.0)
    seconds = max((level.end_seconds for level in levels), default=1.0) - start or 1.0

    def x(moment: float) -> float:
        return LABEL + (WIDTH - LABEL) * (moment - start) / seconds

    parts, top = list[str](), GAP
    for track, kinds in TRACKS.items():
        own = [event for event in events if event.kind in kinds]
        if not own:
            continue
        parts.append(f'<text x="0" y="{top + ROW - 7}">{track}</text>')
        parts.append(f'<rect class="lane" x="{LABEL}" y="{top}" width="{WIDTH - LABEL}" height="{ROW}"/>')
        parts += [_bar(bar, x, top, colours) for bar in merged(own, seconds / (WIDTH - LABEL))]
        top += ROW + GAP
    parts += _memory(levels, budget_bytes, x, top)
    height = top + MEMORY + 24
    ticks = [start + seconds * share for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    parts += [
        f'<text class="tick" x="{x(tick):.1f}" y="{height - 4}" text-anchor="{_anchor(number)}">{show_seconds(tick - start)}</text>'
        for number, tick in enumerate(ticks)
    ]
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def merged(events: Iterable[Event], pixel_seconds: float) -> list[tuple[Event, float, int]]:
    """Merges consecutive events of one kind and component with gaps below a pixel. Returns (first event, end of last, bytes)."""
    found: list[tuple[Event, float, int]] = []
    for event in sorted(events, key=lambda each: each.start_seconds):
        if found:
            first, end, nbytes = found[-1]
            if (first.kind, first.component) == (event.kind, event.component) and event.start_seconds - end <= pixel_seconds:
                found[-1] = first, max(end, event.end_seconds), nbytes + event.nbytes
                continue
        found.append((event, event.end_seconds, event.nbytes))
    return found


def _bar(bar: tuple[Event, float, int], x: object, top: int, colours: Mapping[str, int]) -> str:
    event, end, nbytes = bar
    left, right = x(event.start_seconds), x(end)  # type: ignore[operator]
    what = f"{event.kind} {event.component or event.detail}: {show_seconds(end - event.start_seconds)}"
    what += f", {show_size(nbytes)}" if nbytes else ""
    colour = f"c{colours.get(event.component, 0)}"
    return (
        f'<rect class="{colour} {event.kind}" x="{left:.1f}" y="{top}" width="{max(0.6, right - left):.1f}" height="{ROW}">'
        f"<title>{escape(what)}</title></rect>"
    )


def _memory(levels: Sequence[Level], budget_bytes: int, x: object, top: int) -> list[str]:
    most = max([budget_bytes, *(level.nbytes for level in levels)], default=1) or 1

    def y(nbytes: int) -> float:
        return top + MEMORY - MEMORY * nbytes / most

    parts = [f'<text x="0" y="{top + 18}">memory</text>', f'<text class="tick" x="0" y="{top + 38}">{show_size(most)}</text>']
    for level in levels:
        left, right = x(level.start_seconds), x(level.end_seconds)  # type: ignore[operator]
        parts.append(
            f'<rect class="level" x="{left:.1f}" y="{y(level.nbytes):.1f}" width="{max(0.6, right - left):.1f}"'
            f' height="{top + MEMORY - y(level.nbytes):.1f}"><title>{escape(level.name)}: {show_size(level.nbytes)}</title></rect>'
        )
    parts.append(
        f'<path class="budget" d="M{LABEL} {y(budget_bytes):.1f}H{WIDTH}"><title>budget: {show_size(budget_bytes)}</title></path>'
    )
    return parts


def _anchor(number: int) -> str:
    return "start" if number == 0 else "end" if number == 4 else "middle"
