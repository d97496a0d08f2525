"""The screen and the JSON form of a placement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from graphrun.cluster.place import Placed
from graphrun.cluster.placement import Assignment, Placement
from graphrun.report.screen import Look, subject
from graphrun.report.summary import figures
from graphrun.report.table import table
from graphrun.units import roughly, show_seconds, show_size


def summary(placed: Placed, plan_seconds: float) -> dict[str, Any]:
    """What ``--json`` prints."""
    placement, replicas = placed.placement, placed.replicas
    return {
        "graph": placed.problem.graph,
        "settings": dict(placed.problem.settings),
        **figures(
            placement, "objective", "items", "items_per_second", "latency_seconds", "seconds"
        ),
        "bottleneck": list(placement.bottleneck),
        "devices": [
            {
                "device": of.name,
                "hardware": of.device.hardware.name,
                "vram_bytes": of.device.vram_bytes,
                "secondaries": [
                    {"hardware": each.hardware.name, "vram_bytes": each.vram_bytes}
                    for each in of.secondaries
                ],
                "stages": list(of.stages),
                **figures(
                    of.column,
                    "ahead_seconds",
                    "cold_seconds",
                    "steady_seconds",
                    "ram_bytes",
                    "pinned_bytes",
                ),
            }
            for of in placement.assignments
        ],
        "transfers": [
            {"value": of.value, "to": list(of.to), "nbytes": of.nbytes, "seconds": of.seconds}
            for of in placement.transfers()
        ],
        "replicas": figures(replicas, "items_per_second", "latency_seconds", "seconds")
        if replicas is not None
        else None,
        "gains": [
            {
                "hardware": of.device.hardware.name,
                "host": of.device.host,
                **figures(of, "items_per_second", "latency_seconds"),
            }
            for of in placed.gains
        ],
        "priced": placed.priced,
        "plan_seconds": plan_seconds,
    }


def placement_screen(placed: Placed, look: Look) -> str:
    """What ``graphrun plan --cluster`` shows: rates, who holds what and from when, what limits it,
    what crosses, what more would bring."""
    placement, replicas = placed.placement, placed.replicas
    used, every = (
        sum(len(of.devices) for of in placement.assignments),
        len(placement.cluster.devices),
    )
    many = (
        f"{placement.items} items take {roughly(placement.seconds)}"
        if placement.items > 1
        else "its first item"
    )
    verdict = f"Fits: {_figure(placement)} on {used} of {every} devices; {many}"
    limit = " ".join(placement.bottleneck)
    held = (
        (of, placement.stages[slice(*span)])
        for of in placement.assignments
        for span in placement.spans(of)
    )
    by = ", ".join(of.name for of, stages in held if stages == placement.bottleneck)
    lines = [
        look.folded(
            f"bottleneck: {limit} on {_cut(by)}" if limit else "bottleneck: a link between hosts"
        )
    ]
    if replicas is not None:
        lines.append(look.folded(f"with all stages on each device: {_figure(replicas)}"))
    else:
        lines.append("no device can run all stages")
    parts = [
        look.first(verdict),
        look.folded(f"plan {subject(placed.problem)} for {placement.objective}"),
        _devices(placement, look),
    ]
    return "\n\n".join(
        part
        for part in (*parts, "\n".join(lines), _transfers(placement, look), _gains(placed, look))
        if part
    )


def _figure(placement: Placement) -> str:
    if placement.objective == "latency":
        return f"an item alone takes {roughly(placement.latency_seconds)}"
    return f"{_rate(placement.items_per_second)}, an item alone takes {roughly(placement.latency_seconds)}"


def _rate(items_per_second: float) -> str:
    if items_per_second >= 1:
        return f"{items_per_second:.3g} items a second"
    return (
        f"{60 * items_per_second:.3g} items a minute"
        if items_per_second >= 1 / 60
        else f"{3600 * items_per_second:.3g} items an hour"
    )


def _cut(names: str, most: int = 60) -> str:
    return names if len(names) <= most else f"{names[: most - 1]}…"


def _devices(placement: Placement, look: Look) -> str:
    """A row for the devices with equal plans."""
    rows = [["devices", "", "hardware", "VRAM", "stages", "from s", "first s", "then s", "RAM"]]
    equal: dict[tuple[Any, ...], list[Assignment]] = defaultdict(list)
    for of in placement.assignments:
        cards = tuple((each.hardware.name, each.vram_bytes) for each in of.devices)
        equal[cards, of.column].append(of)
    for (cards, column), own in equal.items():
        seconds = (column.ahead_seconds, column.cold_seconds, column.steady_seconds)
        names = _cut(" ".join(of.name for of in own), 16)
        count = f"x{len(own)}" if len(own) > 1 else ""
        kinds, budgets = (
            _each(name for name, _ in cards),
            _each(show_size(nbytes) for _, nbytes in cards),
        )
        cells = [
            names,
            count,
            kinds,
            budgets,
            " ".join(own[0].stages),
            *(f"{of:.3g}" for of in seconds),
        ]
        rows.append([*cells, show_size(column.ram_bytes)])
    notes = " from: weights of the first phase are there; first, then: the first item and each further one; RAM: of each device"
    return f"{table(rows, left=(0, 1, 2, 4), width=look.width)}\n{look.folded(notes)}"


def _each(texts: Iterable[str]) -> str:
    """``24.00 GiB+12.00 GiB``; equal ones once, with their number."""
    every = list(texts)
    return (
        "+".join(every) if len(set(every)) > 1 or len(every) == 1 else f"{len(every)} x {every[0]}"
    )


def _transfers(placement: Placement, look: Look) -> str:
    rows = [
        [of.value, " ".join(of.to), show_size(of.nbytes), show_seconds(of.seconds)]
        for of in placement.transfers()
    ]
    return (
        table(
            [["crosses", "to", "size", "on the slowest link"], *rows], left=(0, 1), width=look.width
        )
        if rows
        else ""
    )


def _gains(placed: Placed, look: Look) -> str:
    before: Placement = placed.placement
    rows = [["one more", "in host", "items", "gain", "item alone"]]
    for of in placed.gains:
        gain = of.items_per_second / before.items_per_second - 1
        seconds = show_seconds(of.latency_seconds)
        rows.append(
            [
                of.device.hardware.name,
                of.device.host,
                _rate(of.items_per_second),
                f"{100 * gain:+.1f} %",
                seconds,
            ]
        )
    return table(rows, left=(0, 1), width=look.width) if len(rows) > 1 else ""
