"""The runs of a batch on the devices of a cluster, on one clock: for trace viewers, as JSON, and as
a page with a lane for each.

a/0   |encode 1|encode 2|encode 3|
a/1            |==== denoise 1 ====|==== denoise 2 ====|==== ...
b/0                                |decode 1|          |decode 2|
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from graphrun.report.chart import GAP, LABEL, RIGHT, ROW, WIDTH
from graphrun.report.page import PAGE
from graphrun.report.perfetto import SUFFIX, perfetto
from graphrun.report.svg import block, element, round_ticks, tick_seconds
from graphrun.trace import Lane
from graphrun.units import show_seconds


def lanes_json(name: str, lanes: Sequence[Lane]) -> dict[str, Any]:
    """The content of the trace file ``name``: for a viewer if it ends in ``.perfetto.json``, else
    every run with its trace."""
    return (
        _perfetto(lanes) if name.endswith(SUFFIX) else {"lanes": [lane.to_json() for lane in lanes]}
    )


def _perfetto(lanes: Sequence[Lane]) -> dict[str, Any]:
    """The Trace Event Format (`graphrun.report.perfetto`): a process for each device, with the
    tracks of one run after another."""
    devices = {
        name: number for number, name in enumerate(dict.fromkeys(lane.device for lane in lanes))
    }
    events = list[dict[str, Any]]()
    for lane in lanes:
        own = devices[lane.device] + 1
        for event in perfetto(lane.trace)["traceEvents"] if lane.trace is not None else ():
            moved = {"ts": event["ts"] + 1e6 * lane.start_seconds} if "ts" in event else {}
            if event["name"] == "process_name":
                moved["args"] = {"name": f"graphrun on {lane.device}"}
            if event["ph"] == "X":
                moved["args"] = {**event["args"], "request": lane.request}
            events.append({**event, "pid": own, **moved})
    return {
        "traceEvents": sorted(events, key=lambda event: float(event.get("ts", -1))),
        "displayTimeUnit": "ms",
    }


def lanes_page(lanes: Sequence[Lane]) -> str:
    """A self-contained HTML page: a lane for each device."""
    devices = {
        name: number for number, name in enumerate(dict.fromkeys(lane.device for lane in lanes))
    }
    stages = {
        names: number for number, names in enumerate(dict.fromkeys(lane.stages for lane in lanes))
    }
    end = max((lane.end_seconds for lane in lanes), default=1.0)

    def x(seconds: float) -> float:
        return LABEL + (WIDTH - LABEL - RIGHT) * seconds / end

    def y(device: str) -> int:
        return GAP + devices[device] * (ROW + GAP)

    drawn = [
        element("text", escape(device), x=0, y=y(device) + ROW - 7)
        + element(
            "rect", class_="lane", x=LABEL, y=y(device), width=WIDTH - LABEL - RIGHT, height=ROW
        )
        for device in devices
    ]
    for lane in lanes:
        took = show_seconds(lane.end_seconds - lane.start_seconds)
        what = f"request {lane.request}: {' '.join(lane.stages)}, {took}"
        kind = f"c{stages[lane.stages] % 8} run"
        drawn.append(
            block(x(lane.start_seconds), x(lane.end_seconds), y(lane.device), ROW, kind, what)
        )
    height = GAP + len(devices) * (ROW + GAP) + 24
    for second in round_ticks(end):
        drawn.append(
            element(
                "text",
                tick_seconds(second),
                class_="tick",
                x=x(second),
                y=height - 4,
                text_anchor="middle",
            )
        )
    title = f"{len(lanes)} runs on {len(devices)} devices in {show_seconds(end)}"
    picture = element(
        "svg", "".join(drawn), viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=title
    )
    style = files("graphrun.report").joinpath("page.css").read_text(encoding="utf-8")
    return PAGE.format(title=title, style=style, body=f'<div class="wide">{picture}</div>')


def lanes_in(data: Mapping[str, Any]) -> list[Lane]:
    """The runs in the content of a trace file, without what they did. Raises KeyError or TypeError
    for anything else."""
    return [
        Lane(
            of["device"],
            of["request"],
            tuple(of["stages"]),
            float(of["start_seconds"]),
            float(of["end_seconds"]),
        )
        for of in data["lanes"]
    ]
