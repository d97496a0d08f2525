"""A trace as a file for trace viewers (ui.perfetto.dev, chrome://tracing).

    slots     | encode/0:text_encoder load | first | ...    the plan's slots
    compute   | text_encoder.forward | ...                  calls into components, stalls included
    copies    | transformer_blocks.0 | .1 | .2 | ...        blocks loaded or streamed; values
    disk      | transformer_blocks.1 | .2 | ...             blocks read into a backing store,
                                                            or for their own copy
    counters  device weights; peaks per slot on the device, on the host and in page-locked
              memory; memory tiers; in bytes

Format: "Trace Event Format" (Google, 2016), complete (X), instant (i), counter (C) and metadata (M)
events; times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from graphrun.report import chart
from graphrun.report.summary import figures
from graphrun.trace import Event, SlotTrace, Trace

SUFFIX = ".perfetto.json"
TRACKS = ("slots", "compute", "copies", "disk")
TRACK_OF = {kind: track for track, kinds in chart.TRACKS.items() for kind in kinds}


def trace_json(
    name: str, trace: Trace, plan: Mapping[str, Any], product: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of the trace file ``name``.

    A name that ends in ``.perfetto.json`` gets the format of trace viewers. Any other name gets the
    trace, its ``plan``, and ``product``: the output files, their date and their inputs.
    """
    return (
        perfetto(trace)
        if name.endswith(SUFFIX)
        else {**trace.to_json(), "plan": plan, "made": product}
    )


def perfetto(trace: Trace) -> dict[str, Any]:
    """Return ``trace`` in the Trace Event Format, in order of time: four tracks and a counter per
    memory tier."""
    timed_events = [*_slots(trace), *_events(trace), *_counters(trace)]
    return {
        "traceEvents": [
            *_names(trace),
            *sorted(timed_events, key=lambda event: float(event["ts"])),
        ],
        "displayTimeUnit": "ms",
        "otherData": {
            "plan": trace.plan_digest,
            "device": trace.device,
            "left_bytes": trace.left_bytes,
        },
    }


def _names(trace: Trace) -> Iterator[dict[str, Any]]:
    yield _event("M", "process_name", {"name": f"graphrun on {trace.device}"})
    for number, track in enumerate(TRACKS):
        yield _event("M", "thread_name", {"name": track}, tid=number)
        yield _event("M", "thread_sort_index", {"sort_index": number}, tid=number)


def _slots(trace: Trace) -> Iterator[dict[str, Any]]:
    for slot in trace.slots:
        yield _span("slots", slot.name, slot, figures(slot, "calls", "peak_bytes", "moved_bytes"))


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    for event in trace.events:
        arguments = {"component": event.component, "slot": event.slot, "bytes": event.nbytes}
        name = f"{event.kind} {event.component} {event.detail or 'unblocked'}"
        if event.kind == "run":
            name = f"{event.component}.{event.detail}"
        if event.kind in TRACK_OF:
            yield _span(TRACK_OF[event.kind], name, event, arguments)
        else:
            yield {
                "ph": "i",
                "s": "t",
                **_event("i", name, arguments, tid=0, ts=event.start_seconds * 1e6),
            }


def _counters(trace: Trace) -> Iterator[dict[str, Any]]:
    present_bytes = 0
    for event in sorted(trace.events, key=lambda event: event.start_seconds):
        if event.kind in ("load", "evict"):
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


def _span(
    track: str, name: str, interval: Event | SlotTrace, arguments: dict[str, Any]
) -> dict[str, Any]:
    times = {
        "ts": interval.start_seconds * 1e6,
        "dur": max(0.0, interval.end_seconds - interval.start_seconds) * 1e6,
    }
    return _event("X", name, arguments, tid=TRACKS.index(track), **times)


def _counter(name: str, seconds: float, nbytes: int) -> dict[str, Any]:
    return _event("C", name, {"bytes": nbytes}, ts=seconds * 1e6)


def _event(phase: str, name: str, arguments: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return an event of the format with its type, ``phase``. ``fields``: other fields, such as the
    track (``tid``) and microseconds (``ts``, ``dur``)."""
    return {"ph": phase, "pid": 1, **fields, "name": name, "args": arguments}
