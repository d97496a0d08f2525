"""What PyTorch's caching allocator did in one run, beside graphrun's model of it.

The card's record (`torch.cuda.memory._record_memory_history`) names every allocation, release, and
page that was mapped or unmapped. The allocations and releases are replayed through
`graphrun.model.allocator.Caching`; what it reserves is compared, event by event, with the pages
that were mapped.
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
"""Actions of the record that change what is allocated or reserved; others only announce or
report."""


@dataclass
class Events:
    """(kind, key, bytes) in order, and the bytes that were reserved before the first one."""

    reserved_before: int = 0
    events: list[tuple[str, int, int]] = field(default_factory=list)

    def allocated(self, key: int, nbytes: int) -> None:
        """A storage of the simulated machine."""
        self.events.append(("alloc", key, nbytes))

    def freed(self, key: int) -> None:
        """It is gone."""
        self.events.append(("free", key, 0))

    @classmethod
    def read(cls, path: Path) -> Events:
        """Those that `write` wrote."""
        with gzip.open(path, "rt") as file:
            return cls(**json.load(file))

    def write(self, path: Path) -> None:
        """All of them, compressed."""
        with gzip.open(path, "wt") as file:
            json.dump({"reserved_before": self.reserved_before, "events": self.events}, file)


@contextmanager
def recorded(device: Any) -> Iterator[Events]:
    """What happens on ``device`` (graphrun's) in the context."""
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
    """Reserved bytes by the card and by the model: both peaks, and where they differ most. Without
    pages (on the simulated accelerator) only the model's figures."""
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
    """(event, reserved, allocated) at about ``points`` moments, for a plot."""
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
