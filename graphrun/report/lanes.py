"""The runs of a batch on the devices of a cluster, on one clock: for viewers, as JSON, as a page.

a/0   |encode 1|encode 2|encode 3|
a/1            |==== denoise 1 ====|==== denoise 2 ====|==== ...
b/0                                |decode 1|          |decode 2|
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import count
from typing import Any

from graphrun.report.chart import GAP, ROW, TimeAxis, chart
from graphrun.report.chart import lane as empty_lane
from graphrun.report.page import PAGE
from graphrun.report.perfetto import SUFFIX, perfetto
from graphrun.report.svg import block
from graphrun.trace import Lane
from graphrun.units import show_seconds


def lanes_json(name: str, lanes: Sequence[Lane]) -> dict[str, Any]:
    """Return the content of the trace file ``name``: for ``.perfetto.json`` in the format of trace
    viewers, otherwise every run with its trace."""
    return (
        _perfetto(lanes) if name.endswith(SUFFIX) else {"lanes": [lane.to_json() for lane in lanes]}
    )


def _perfetto(lanes: Sequence[Lane]) -> dict[str, Any]:
    """Return the Trace Event Format (`graphrun.report.perfetto`). Each device is a process, with
    the tracks of one run after another."""
    devices = {
        name: number for number, name in enumerate(dict.fromkeys(lane.device for lane in lanes))
    }
    events = list[dict[str, Any]]()
    for lane in lanes:
        process_number = devices[lane.device] + 1
        for event in perfetto(lane.trace)["traceEvents"] if lane.trace is not None else ():
            updates = {"ts": event["ts"] + 1e6 * lane.start_seconds} if "ts" in event else {}
            if event["name"] == "process_name":
                updates["args"] = {"name": f"graphrun on {lane.device}"}
            if event["ph"] == "X":
                updates["args"] = {**event["args"], "request": lane.request}
            events.append({**event, "pid": process_number, **updates})
    return {
        "traceEvents": sorted(events, key=lambda event: float(event.get("ts", -1))),
        "displayTimeUnit": "ms",
    }


def lanes_page(lanes: Sequence[Lane]) -> str:
    """Return a self-contained HTML page with a lane for each device."""
    devices = dict.fromkeys(lane.device for lane in lanes)
    tops = dict(zip(devices, count(GAP, ROW + GAP), strict=False))
    stages = list(dict.fromkeys(lane.stages for lane in lanes))
    time = TimeAxis(0.0, max((lane.end_seconds for lane in lanes), default=1.0))
    shapes = [empty_lane(device, top) for device, top in tops.items()]
    for lane in lanes:
        seconds_text = show_seconds(lane.end_seconds - lane.start_seconds)
        tooltip = f"request {lane.request}: {' '.join(lane.stages)}, {seconds_text}"
        kind = f"c{stages.index(lane.stages) % 8} run"
        x_start, x_end = time.x(lane.start_seconds), time.x(lane.end_seconds)
        shapes.append(block(x_start, x_end, tops[lane.device], ROW, kind, tooltip))
    height = GAP + len(devices) * (ROW + GAP) + 24
    title = f"{len(lanes)} runs on {len(devices)} devices in {show_seconds(time.seconds)}"
    picture = chart([*shapes, *time.ticks(height - 4)], height, title)
    style = files("graphrun.report").joinpath("page.css").read_text(encoding="utf-8")
    return PAGE.format(title=title, style=style, body=f'<div class="wide">{picture}</div>')


def lanes_from_json(data: Mapping[str, Any]) -> list[Lane]:
    """Return the runs in a trace file, without their traces. Raises KeyError or TypeError if
    ``data`` has another form."""
    return [
        Lane(
            lane["device"],
            lane["request"],
            tuple(lane["stages"]),
            float(lane["start_seconds"]),
            float(lane["end_seconds"]),
        )
        for lane in data["lanes"]
    ]
