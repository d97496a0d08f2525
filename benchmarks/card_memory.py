"""Compare PyTorch's caching allocator in one run with graphrun's model of it.

The card's record (`torch.cuda.memory._record_memory_history`) names every allocation, release, and
mapped or unmapped page. The allocations and releases are replayed through
`graphrun.model.allocator.Caching`, whose reserved bytes are compared with the mapped pages, event
by event.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from graphrun.model.allocator import Caching

RECORDED = {
    "alloc": "alloc",
    "free_completed": "free",
    "segment_alloc": "map",
    "segment_map": "map",
    "segment_free": "unmap",
    "segment_unmap": "unmap",
}
"""Actions of the record that change the allocated or reserved bytes; others are only notices."""


@dataclass
class Events:
    """(kind, key, bytes) in order, and the bytes that were reserved before the first event."""

    reserved_before: int = 0
    events: list[tuple[str, int, int]] = field(default_factory=list)

    def allocated(self, key: int, nbytes: int) -> None:
        self.events.append(("alloc", key, nbytes))

    def freed(self, key: int) -> None:
        self.events.append(("free", key, 0))

    @classmethod
    def read(cls, path: Path) -> Events:
        """Read the events that `write` wrote."""
        with gzip.open(path, "rt") as file:
            return cls(**json.load(file))

    def write(self, path: Path) -> None:
        with gzip.open(path, "wt") as file:
            json.dump({"reserved_before": self.reserved_before, "events": self.events}, file)


@contextmanager
def recorded(device: Any) -> Iterator[Events]:
    """Record the events on ``device`` (graphrun's) in the context."""
    events = Events()
    if device.torch_device.type == "sim":
        device.machine.listener = events
        try:
            yield events
        finally:
            device.machine.listener = None
        return
    torch.cuda.empty_cache()
    events.reserved_before = torch.cuda.memory_reserved()
    torch.cuda.memory._record_memory_history(
        "all", context=None, stacks="python", max_entries=4_000_000
    )
    try:
        yield events
    finally:
        trace = torch.cuda.memory._snapshot()["device_traces"][device.torch_device.index or 0]
        torch.cuda.memory._record_memory_history(enabled=None)
        events.events += [
            (RECORDED[e["action"]], e["addr"], e["size"]) for e in trace if e["action"] in RECORDED
        ]


def compared(events: Events) -> dict[str, Any]:
    """Return the bytes that the card and the model reserve: both peaks, and the largest difference.
    Without pages (on the simulated accelerator) only the model's figures."""
    model = Caching()
    mapped_bytes = allocated = 0
    sizes: dict[int, int] = {}
    pages = any(kind == "map" for kind, _, _ in events.events)
    peaks = {"reserved": 0, "model": 0, "allocated": 0}
    most_over = most_under = 0
    trimming = False
    for kind, key, nbytes in events.events:
        if kind == "alloc":
            model.allocate(key, nbytes)
            sizes[key] = nbytes
            allocated += nbytes
        elif kind == "free" and key in sizes:
            model.release(key)
            allocated -= sizes.pop(key)
        elif kind == "map":
            mapped_bytes += nbytes
        elif kind == "unmap":
            mapped_bytes -= nbytes
            if not trimming:
                model.trim()
        trimming = kind == "unmap"
        peaks = {
            "reserved": max(peaks["reserved"], mapped_bytes),
            "model": max(peaks["model"], model.used_bytes),
            "allocated": max(peaks["allocated"], allocated),
        }
        if pages and kind == "alloc":  # pages of an allocation are mapped before it is recorded
            most_over, most_under = (
                max(most_over, model.used_bytes - mapped_bytes),
                max(most_under, mapped_bytes - model.used_bytes),
            )
    return {
        "events": len(events.events),
        "reserved_before_bytes": events.reserved_before,
        "peak_reserved_bytes": peaks["reserved"] if pages else None,
        "model_peak_reserved_bytes": peaks["model"],
        "peak_allocated_bytes": peaks["allocated"],
        "model_over_at_most_bytes": most_over,
        "model_under_at_most_bytes": most_under,
    }


def growth(events: Events, points: int = 200) -> list[Sequence[int]]:
    """Return (event, reserved, allocated) at about ``points`` moments, for a plot."""
    mapped_bytes = allocated = 0
    sizes: dict[int, int] = {}
    interval, series = max(1, len(events.events) // points), list[Sequence[int]]()
    for number, (kind, key, nbytes) in enumerate(events.events):
        if kind == "alloc":
            sizes[key] = nbytes
            allocated += nbytes
        elif kind == "free":
            allocated -= sizes.pop(key, 0)
        else:
            mapped_bytes += nbytes if kind == "map" else -nbytes
        if number % interval == 0:
            series.append((number, mapped_bytes, allocated))
    return series
