"""The remaining time of a run is predicted by its plan, at the pace so far; lines where there is no terminal."""

from __future__ import annotations

from types import SimpleNamespace

from graphrun.model.plan import Plan, Slot
from graphrun.report.progress import BatchProgress, Progress, Shown, seconds_before


def test_the_remaining_time_is_predicted_at_the_pace_so_far() -> None:
    now = [10.0]
    shown = Shown(8.0, None, lambda: now[0])
    assert shown.left == "about 8.0 s left"
    now[0], shown.done_seconds = 14.0, 2.0
    assert shown.left == "about 12.0 s left", "two predicted seconds took four"


def test_the_seconds_before_a_call() -> None:
    assert seconds_before([1.0, 2.0, 8.0], 2, 0, 4) == 3.0
    assert seconds_before([1.0, 2.0, 8.0], 2, 3, 4) == 7.0
    assert seconds_before([1.0, 2.0], 1, 0, 0) == 1.0


def test_a_run_says_a_line_for_each_slot() -> None:
    now, lines = [0.0], list[str]()
    plan = Plan("p", (Slot("a/0:x", "load", 0, ()), Slot("a/0:x", "steady", 4, ())))
    simulation = SimpleNamespace(slots=[SimpleNamespace(seconds=1.0), SimpleNamespace(seconds=4.0)])
    with Progress(plan, simulation, lines.append, lambda: now[0]) as progress:  # type: ignore[arg-type]
        now[0] = 100.0  # weights were built before the first slot
        progress(0, 0, 0)
        now[0] = 102.0
        for call in range(5):
            progress(1, call, 4)
    assert lines == ["  slot 1/2 a/0:x load, about 5.0 s left", "  slot 2/2 a/0:x steady, about 8.0 s left"]


def test_a_batch_says_a_line_for_each_run_with_its_rate_and_the_remaining_time() -> None:
    now, lines = [0.0], list[str]()
    slot = SimpleNamespace(seconds=2.0, phase="a/0:x")
    solution = SimpleNamespace(simulation=SimpleNamespace(slots=[slot], again=[slot]))
    segment = SimpleNamespace(stages=("a",), solution=solution)
    request = SimpleNamespace(number=1, where="p.jsonl:3", error="is not JSON")
    with BatchProgress(2, lines.append, lambda: now[0]) as progress:
        progress.left_out(request)
        progress.restarts("denoise", "its pipeline has 2 loops")
        progress.schedule(SimpleNamespace(seconds=4.0, requests=2, name="request by request"), {})
        progress.segment(segment, 2)
        progress.run(segment, request)(0, 1, 1)
        now[0] = 3.0
        progress.done_seconds = 2.0
        progress.run(segment, request)
        progress.done(request, [SimpleNamespace(__str__=str)])  # type: ignore[list-item]
    assert lines[:5] == [
        "graphrun: p.jsonl:3: is not JSON",
        "  denoise restarts at its first step after an interruption: its pipeline has 2 loops",
        "  2 of 2 requests, request by request: predicted 4.0 s",
        "  a 1/2, about 4.0 s left",
        "  a 2/2, 3.0 s each, about 3.0 s left",
    ]
    assert lines[5].startswith("  done 1/2: ")
