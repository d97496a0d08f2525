"""A placement on screen and as JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from graphrun.cluster.place import PlacedGraph
from graphrun.cluster.placement import Assignment, Placement
from graphrun.cluster.stream import idle_devices
from graphrun.report.screen import Look, subject
from graphrun.report.summary import figures
from graphrun.report.table import table
from graphrun.units import roughly, show_seconds, show_size


def summary(result: PlacedGraph, plan_seconds: float) -> dict[str, Any]:
    """Return the JSON of ``--json``."""
    placement, replicas = result.placement, result.replicas
    return {
        "graph": result.problem.graph,
        "settings": dict(result.problem.settings),
        **figures(
            placement, "objective", "items", "items_per_second", "latency_seconds", "seconds"
        ),
        "bottleneck": list(placement.bottleneck),
        "idle": idle_devices(placement) if placement.items > 1 else [],
        "devices": [
            {
                "device": assignment.name,
                "hardware": assignment.device.hardware.name,
                "vram_bytes": assignment.device.vram_bytes,
                "secondaries": [
                    {"hardware": device.hardware.name, "vram_bytes": device.vram_bytes}
                    for device in assignment.secondaries
                ],
                "stages": list(assignment.stages),
                **figures(
                    assignment.column,
                    "ahead_seconds",
                    "cold_seconds",
                    "steady_seconds",
                    "ram_bytes",
                    "pinned_bytes",
                ),
            }
            for assignment in placement.assignments
        ],
        "transfers": [
            {
                "value": transfer.value,
                "to": list(transfer.reader_stages),
                "nbytes": transfer.nbytes,
                "seconds": transfer.seconds,
            }
            for transfer in placement.transfers()
        ],
        "replicas": figures(replicas, "items_per_second", "latency_seconds", "seconds")
        if replicas is not None
        else None,
        "gains": [
            {
                "hardware": gain.device.hardware.name,
                "host": gain.device.host,
                **figures(gain, "items_per_second", "latency_seconds"),
            }
            for gain in result.gains
        ],
        "priced": result.priced,
        "plan_seconds": plan_seconds,
    }


def placement_screen(result: PlacedGraph, look: Look) -> str:
    """Return the screen of ``graphrun plan --cluster``."""
    placement, replicas = result.placement, result.replicas
    active_devices, device_count = (
        sum(len(assignment.devices) for assignment in placement.assignments),
        len(placement.cluster.devices),
    )
    items = (
        f"{placement.items} items take {roughly(placement.seconds)}"
        if placement.items > 1
        else "nothing loaded at the start"
    )
    verdict = (
        f"fits: yes. {_figure(placement)} ({active_devices} of {device_count} devices); {items}"
    )
    limit = " ".join(placement.bottleneck)
    assigned_stages = (
        (assignment, placement.stages[slice(*span)])
        for assignment in placement.assignments
        for span in placement.spans(assignment)
    )
    names = ", ".join(
        assignment.name for assignment, stages in assigned_stages if stages == placement.bottleneck
    )
    idle_names = idle_devices(placement) if placement.items > 1 else []
    lines = [
        *(
            [
                look.folded(
                    f"{_cut(', '.join(idle_names))}: no item of {placement.items}, since the other "
                    "devices finish all of them earlier"
                )
            ]
            if idle_names
            else []
        ),
        look.folded(
            f"bottleneck: {limit} on {_cut(names)}" if limit else "bottleneck: a link between hosts"
        ),
    ]
    if replicas is not None:
        lines.append(look.folded(f"with all stages on each device: {_figure(replicas)}"))
    else:
        lines.append("no device can run all stages")
    parts = [
        look.first(verdict),
        look.folded(f"plan {subject(result.problem)} for {placement.objective}"),
        _devices(placement, look),
    ]
    return "\n\n".join(
        part
        for part in (*parts, "\n".join(lines), _transfers(placement, look), _gains(result, look))
        if part
    )


def _figure(placement: Placement) -> str:
    if placement.objective == "latency":
        return f"an item alone takes {roughly(placement.latency_seconds)}"
    rate, seconds = _rate(placement.items_per_second), roughly(placement.latency_seconds)
    return f"{rate}, an item alone takes {seconds}"


def _rate(items_per_second: float) -> str:
    if items_per_second >= 1:
        return f"{items_per_second:.3g} items a second"
    return (
        f"{60 * items_per_second:.3g} items a minute"
        if items_per_second >= 1 / 60
        else f"{3600 * items_per_second:.3g} items an hour"
    )


def _cut(names: str, width: int = 60) -> str:
    return names if len(names) <= width else f"{names[: width - 1]}…"


def _devices(placement: Placement, look: Look) -> str:
    """Return a table with one row for all devices with equal plans."""
    rows = [["devices", "", "hardware", "VRAM", "stages", "from s", "first s", "then s", "RAM"]]
    equal: dict[tuple[Any, ...], list[Assignment]] = defaultdict(list)
    for assignment in placement.assignments:
        cards = tuple((device.hardware.name, device.vram_bytes) for device in assignment.devices)
        equal[cards, assignment.column].append(assignment)
    for (cards, column), assignments in equal.items():
        seconds = (column.ahead_seconds, column.cold_seconds, column.steady_seconds)
        names = _cut(" ".join(assignment.name for assignment in assignments), 16)
        count = f"x{len(assignments)}" if len(assignments) > 1 else ""
        kinds, budgets = (
            _each(name for name, _ in cards),
            _each(show_size(nbytes) for _, nbytes in cards),
        )
        cells = [
            names,
            count,
            kinds,
            budgets,
            " ".join(assignments[0].stages),
            *(f"{figure:.3g}" for figure in seconds),
        ]
        rows.append([*cells, show_size(column.ram_bytes)])
    notes = (
        " from: weights of the first phase are loaded; first, then: seconds of the first item and "
        "of each further one; RAM: of each device"
    )
    return f"{table(rows, left_columns=(0, 1, 2, 4), width=look.width)}\n{look.folded(notes)}"


def _each(texts: Iterable[str]) -> str:
    """Join texts, such as ``24.00 GiB+12.00 GiB``; equal texts become ``2 x 24.00 GiB``."""
    parts = list(texts)
    return (
        "+".join(parts) if len(set(parts)) > 1 or len(parts) == 1 else f"{len(parts)} x {parts[0]}"
    )


def _transfers(placement: Placement, look: Look) -> str:
    rows = [
        [
            transfer.value,
            " ".join(transfer.reader_stages),
            show_size(transfer.nbytes),
            show_seconds(transfer.seconds),
        ]
        for transfer in placement.transfers()
    ]
    return (
        table(
            [["sent", "to", "size", "on the slowest link"], *rows],
            left_columns=(0, 1),
            width=look.width,
        )
        if rows
        else ""
    )


def _gains(result: PlacedGraph, look: Look) -> str:
    current: Placement = result.placement
    rows = [["one more", "in host", "items", "gain, at least", "item alone"]]
    for option in result.gains:
        gain = option.items_per_second / current.items_per_second - 1
        seconds = show_seconds(option.latency_seconds)
        rows.append(
            [
                option.device.hardware.name,
                option.device.host,
                _rate(option.items_per_second),
                f"{100 * gain:+.1f} %",
                seconds,
            ]
        )
    return table(rows, left_columns=(0, 1), width=look.width) if len(rows) > 1 else ""
