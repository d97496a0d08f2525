"""A trace as a file for trace viewers (ui.perfetto.dev, chrome://tracing). Pure: no torch, no I/O.

    slots     | encode/0:text_encoder load | first | ...            the plan's slots
    compute   |        text_encoder.forward        | ...            calls into components, stalls included
    copies    | transformer_blocks.0 | .1 | .2 | ...                blocks on the copy stream (loaded or streamed); values
    disk      | transformer_blocks.1 | .2 | ...                     blocks read into a backing store, or for their own copy
    counters  device weights; peaks per slot on the device, on the host and in page-locked memory; memory tiers; in bytes

Format: "Trace Event Format" (Google, 2016), complete (X), instant (i), counter (C) and metadata (M) events; times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from graphrun.trace import Event, Trace

SUFFIX = ".perfetto.json"
PROCESS = 1
TRACKS = ("slots", "compute", "copies", "disk")
TRACK_OF = {"load": "copies", "stream": "copies", "spill": "copies", "restore": "copies", "read": "disk", "fetch": "disk"}


def trace_json(name: str, trace: Trace, plan: Mapping[str, Any]) -> dict[str, Any]:
    """The content of the trace file ``name``: for a viewer if it ends in ``.perfetto.json``, else the trace and its ``plan``."""
    return perfetto(trace) if name.endswith(SUFFIX) else {**trace.to_json(), "plan": plan}


def perfetto(trace: Trace) -> dict[str, Any]:
    """``trace`` in the Trace Event Format: four tracks and a counter per memory tier, events in order of time."""
    timed = [*_slots(trace), *_events(trace), *_counters(trace)]
    return {
        "traceEvents": [*_names(trace), *sorted(timed, key=lambda event: float(event["ts"]))],
        "displayTimeUnit": "ms",
        "otherData": {"plan": trace.plan_digest, "device": trace.device, "left_bytes": trace.left_bytes},
    }


def _names(trace: Trace) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": PROCESS, "name": "process_name", "args": {"name": f"graphrun on {trace.device}"}}
    for number, track in enumerate(TRACKS):
        yield {"ph": "M", "pid": PROCESS, "tid": number, "name": "thread_name", "args": {"name": track}}
        yield {"ph": "M", "pid": PROCESS, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}}


def _slots(trace: Trace) -> Iterator[dict[str, Any]]:
    for slot in trace.slots:
        arguments = {"calls": slot.calls, "peak_bytes": slot.peak_bytes, "moved_bytes": slot.moved_bytes}
        yield _span("slots", f"{slot.phase} {slot.part}".strip(), slot.start_seconds, slot.end_seconds, arguments)


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    for event in trace.events:
        arguments = {"component": event.component, "slot": event.slot, "bytes": event.nbytes}
        if event.kind == "run":
            yield _span("compute", f"{event.component}.{event.detail}", event.start_seconds, event.end_seconds, arguments)
        elif event.kind in TRACK_OF:
            name = f"{event.kind} {event.component} {event.detail or 'remainder'}"
            yield _span(TRACK_OF[event.kind], name, event.start_seconds, event.end_seconds, arguments)
        else:
            name = f"{event.kind} {event.component} {event.detail or 'remainder'}"
            yield {"ph": "i", "s": "t", **_at("slots", event.start_seconds), "name": name, "args": arguments}


def _counters(trace: Trace) -> Iterator[dict[str, Any]]:
    present_bytes = 0
    changes: list[Event] = sorted((e for e in trace.events if e.kind in ("load", "evict")), key=lambda event: event.start_seconds)
    for event in changes:
        present_bytes += event.nbytes if event.kind == "load" else -event.nbytes
        yield _counter("device weights", event.start_seconds, present_bytes)
    for slot in trace.slots:
        yield _counter("device peak of the slot", slot.start_seconds, slot.peak_bytes)
        if slot.host_bytes:
            yield _counter("host peak of the slot", slot.start_seconds, slot.host_bytes)
            yield _counter("page-locked peak of the slot", slot.start_seconds, slot.locked_bytes)
    if trace.slots:
        start, end = trace.slots[0].start_seconds, trace.slots[-1].end_seconds
        yield _counter("device peak of the slot", end, trace.left_bytes)
        for tier in trace.tiers:
            yield _counter(tier.name, start, tier.before_bytes)
            yield _counter(tier.name, end, tier.after_bytes)


def _span(track: str, name: str, start: float, end: float, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", **_at(track, start), "dur": max(0.0, end - start) * 1e6, "name": name, "args": arguments}


def _counter(name: str, seconds: float, nbytes: int) -> dict[str, Any]:
    return {"ph": "C", "pid": PROCESS, "ts": seconds * 1e6, "name": name, "args": {"bytes": nbytes}}


def _at(track: str, seconds: float) -> dict[str, Any]:
    return {"pid": PROCESS, "tid": TRACKS.index(track), "ts": seconds * 1e6}
