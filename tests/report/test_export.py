"""A trace for a viewer: spans on a track do not overlap, counters end at the baseline."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from graphrun.report import plan_files
from graphrun.report.perfetto import perfetto, trace_json
from graphrun.trace import Event, SlotTrace, Tier, Trace

TRACE = Trace(
    plan_digest="abc",
    device="sim",
    slots=(
        SlotTrace("s/0:a", "load", 0, 100, 60, 0.0, 1.0),
        SlotTrace("s/0:a", "first", 1, 200, 40, 1.0, 3.0),
        SlotTrace("", "end", 0, 60, 0, 3.0, 3.0),
    ),
    events=(
        Event("load", "a", 0, "", 60, 0.0, 1.0),
        Event("stream", "a", 1, "blocks.0", 20, 1.0, 1.5),
        Event("stream", "a", 1, "blocks.1", 20, 1.5, 2.5),
        Event("run", "a", 1, "forward", 0, 1.0, 3.0),
        Event("evict", "a", 2, "", 60, 3.0, 3.0),
    ),
    baseline_bytes=0,
    left_bytes=0,
    tiers=(Tier("device", 0, 0), Tier("pinned", 100, 100)),
)


def named(events: list[dict[str, Any]], track: str) -> list[dict[str, Any]]:
    number = next(
        e["tid"] for e in events if e["name"] == "thread_name" and e["args"]["name"] == track
    )
    return [e for e in events if e.get("tid") == number and e["ph"] == "X"]


def counter(events: list[dict[str, Any]], name: str) -> list[tuple[float, int]]:
    return [(e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C" and e["name"] == name]


def test_every_event_is_on_its_track_at_its_time() -> None:
    events = perfetto(TRACE)["traceEvents"]
    assert [(e["name"], e["ts"], e["dur"]) for e in named(events, "compute")] == [
        ("a.forward", 1e6, 2e6)
    ]
    assert [
        (e["name"], e["ts"], e["dur"], e["args"]["bytes"]) for e in named(events, "copies")
    ] == [
        ("load a unblocked", 0, 1e6, 60),
        ("stream a blocks.0", 1e6, 0.5e6, 20),
        ("stream a blocks.1", 1.5e6, 1e6, 20),
    ]
    assert [e["name"] for e in named(events, "slots")] == ["s/0:a load", "s/0:a first", "end"]
    assert [(e["name"], e["ts"]) for e in events if e["ph"] == "i"] == [("evict a unblocked", 3e6)]


def test_memory_of_each_tier_is_a_counter() -> None:
    events = perfetto(TRACE)["traceEvents"]
    assert counter(events, "device weights") == [(0, 60), (3e6, 0)]
    assert counter(events, "device peak of the slot") == [(0, 100), (1e6, 200), (3e6, 60), (3e6, 0)]
    assert counter(events, "pinned") == [(0, 100), (3e6, 100)]


def test_the_files_name_says_which_form_it_takes() -> None:
    assert "traceEvents" in trace_json("run.perfetto.json", TRACE, {}, {})
    assert trace_json("run.json", TRACE, {"graph": "g"}, {"date": "d"}) == {
        **TRACE.to_json(),
        "plan": {"graph": "g"},
        "made": {"date": "d"},
    }
    assert TRACE.to_json()["tiers"][1] == {
        "name": "pinned",
        "before_bytes": 100,
        "after_bytes": 100,
        "left_bytes": 0,
    }


@pytest.fixture(scope="module")
def real() -> Trace:
    """A run of the small FLUX, streamed on the simulated accelerator."""
    import graphrun

    graph = graphrun.load(Path(__file__).parents[2] / "graphs/flux-tiny.yaml")
    inputs = {"steps": 2}
    solution = graphrun.plan(graphrun.estimate(graph, vram="6M", hardware="sim", inputs=inputs))
    return graphrun.run(solution, graph, inputs)


@pytest.mark.sweep("more")
def test_a_real_run_gives_tracks_on_which_nothing_overlaps(real: Trace) -> None:
    events = json.loads(json.dumps(perfetto(real)))["traceEvents"]
    for track in ("slots", "compute", "copies"):
        spans = named(events, track)
        assert len(spans) >= 5
        assert all(
            span["ts"] + span["dur"] <= next_span["ts"] + 1e-3
            for span, next_span in pairwise(spans)
        )
    timestamps = [event["ts"] for event in events if event["ph"] != "M"]
    assert timestamps == sorted(timestamps)
    assert sum(e["args"]["bytes"] for e in named(events, "copies")) == real.moved_bytes
    assert counter(events, "device weights")[-1][1] == 0


def test_a_real_run_leaves_no_tier_with_more_than_before(real: Trace) -> None:
    tiers = {tier.name: tier for tier in real.tiers}
    assert set(tiers) == {"device", "arenas", "pinned"}
    assert all(tier.before_bytes == tier.after_bytes for tier in tiers.values())
    assert tiers["pinned"].after_bytes == tiers["arenas"].after_bytes > 4 << 20


def test_a_list_of_numbers_takes_a_line_of_a_json_file(tmp_path: Path) -> None:
    """A plan of a video has half a million numbers."""
    text = "a list [\\n1, 2]"
    data = {"numbers": [1, -2.5, 1e-9], "lists": [[0, 1], ["a", 1], []], "text": text}
    path = tmp_path / "plan.json"
    plan_files.write_json(path, data)
    lines = path.read_text().splitlines()
    assert json.loads(path.read_text()) == data
    assert ' "numbers": [1,-2.5,1e-09],' in lines
    assert "  [0,1]," in lines
