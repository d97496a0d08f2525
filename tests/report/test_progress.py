"""The remaining time of a run is predicted by its plan, at the pace so far; lines where there is no
terminal."""

from __future__ import annotations

from types import SimpleNamespace

from graphrun.model.plan import Plan, Slot
from graphrun.report.progress import (
    BatchProgress,
    DownloadProgress,
    Progress,
    Shown,
    seconds_before,
)


def test_the_remaining_time_is_predicted_at_the_pace_so_far() -> None:
    clock = [10.0]
    progress = Shown(8.0, None, lambda: clock[0])
    assert progress.remaining_time == "0:08 left"
    clock[0], progress.done_seconds = 14.0, 2.0
    assert progress.remaining_time == "0:12 left", "two predicted seconds took four"


def test_the_seconds_before_a_call() -> None:
    assert seconds_before([1.0, 2.0, 8.0], 2, 0, 4) == 3.0
    assert seconds_before([1.0, 2.0, 8.0], 2, 3, 4) == 7.0
    assert seconds_before([1.0, 2.0], 1, 0, 0) == 1.0


def run_of(steps: str, calls: int, lines: list[str], clock: list[float]) -> Progress:
    """Progress of a loop of ``calls`` calls, 2 s of loading and 4 s each as predicted, and of 8 s
    after it."""
    parts = (
        ("a/0:x", "load", 0),
        ("a/0:x", "first", 1),
        ("a/0:x", "steady", calls - 1),
        ("b/0:y", "first", 1),
        ("", "end", 0),
    )
    plan = Plan("p", tuple(Slot(phase, part, calls, ()) for phase, part, calls in parts))
    seconds = [2.0, 4.0, 4.0 * (calls - 1), 8.0, 0.0]
    problem = SimpleNamespace(
        settings=(("height", "64"), ("steps", steps)), hardware=SimpleNamespace(device="cuda")
    )
    simulation = SimpleNamespace(
        slots=[SimpleNamespace(seconds=slot_seconds) for slot_seconds in seconds], problem=problem
    )
    return Progress(plan, simulation, lines.append, lambda: clock[0])  # type: ignore[arg-type]


def test_a_run_says_its_steps_their_seconds_and_the_time_left() -> None:
    clock, lines = [0.0], list[str]()
    with run_of("40", 40, lines, clock) as progress:
        clock[0] = 100.0  # weights were built before the first slot
        progress(0, 0, 0)
        clock[0] = 104.0
        progress(1, 0, 1)
        progress(1, 1, 1)
        clock[0] = 112.0  # the first step waited for weights
        progress(2, 0, 39)
        for call in range(1, 40):
            progress(2, call, 39)
            clock[0] += 2.0
        progress(3, 0, 1)
        progress(3, 1, 1)
        progress(4, 0, 0)
    assert lines[0] == "  a/0:x, 2:50 left"
    assert lines[1] == "  step 2/40, 5:28 left"
    assert lines[2] == "  step 7/40, 2.0 s/it, 1:15 left", (
        "34 steps of 2 s, and 8 predicted seconds at the pace so far"
    )
    assert [line.split(",")[0] for line in lines[2:]] == [
        *(f"  step {n}/40" for n in range(7, 41, 5)),
        "  step 40/40",
        "  b/0:y",
    ]
    assert "2.0 s/it" in lines[-2]


def test_a_step_may_be_two_calls() -> None:
    clock, lines = [0.0], list[str]()
    with run_of("2", 4, lines, clock) as progress:
        for slot, call, calls in (
            (0, 0, 0),
            (1, 0, 1),
            (1, 1, 1),
            (2, 0, 3),
            (2, 1, 3),
            (2, 2, 3),
            (2, 3, 3),
        ):
            progress(slot, call, calls)
            clock[0] += 20.0
    assert [line.split(",")[0].strip() for line in lines] == ["a/0:x", "step 1/2", "step 2/2"]


def test_a_batch_says_a_line_for_each_run_with_its_rate_and_the_remaining_time() -> None:
    clock, lines = [0.0], list[str]()
    slot = SimpleNamespace(seconds=2.0, phase="a/0:x")
    solution = SimpleNamespace(simulation=SimpleNamespace(slots=[slot], further_slots=[slot]))
    segment = SimpleNamespace(stages=("a",), solution=solution)
    request = SimpleNamespace(number=1, location="p.jsonl:3", error="is not JSON")
    with BatchProgress(2, lines.append, lambda: clock[0]) as progress:
        progress.left_out(request)
        progress.restarts("denoise", "its pipeline has 2 loops")
        progress.schedule(SimpleNamespace(seconds=4.0, requests=2, name="request by request"), {})
        progress.segment(segment, 2)
        progress.run(segment, request)(0, 1, 1)
        clock[0] = 3.0
        progress.done_seconds = 2.0
        progress.run(segment, request)
        progress.done(request, [SimpleNamespace(__str__=str)])  # type: ignore[list-item]
    assert lines[:5] == [
        "graphrun: p.jsonl:3: is not JSON",
        "  denoise restarts at its first step after an interruption: its pipeline has 2 loops",
        "  2 of 2 requests, request by request: predicted 4.0 s",
        "  a 1/2, 0:04 left",
        "  a 2/2, 3.0 s each, 0:03 left",
    ]
    assert lines[5].startswith("  done 1/2: ")


def test_a_download_says_bytes_rate_and_the_time_left() -> None:
    """In a pipe at most every ten seconds; checking starts the clock again."""
    clock, lines = [0.0], list[str]()
    with DownloadProgress("org/name", lines.append, lambda: clock[0]) as progress:
        for mebibytes in range(0, 101, 5):
            progress("downloading", mebibytes << 20, 100 << 20)
            clock[0] += 2.5
        clock[0] += 10.0
        progress("checking", 0, 100 << 20)
        clock[0] += 10.0
        progress("checking", 50 << 20, 100 << 20)
    assert lines[0] == "  downloading org/name: 20.00 MiB of 100.00 MiB, 2.00 MiB/s, 0:40 left"
    assert lines[-2] == "  checking org/name: 0 B of 100.00 MiB"
    assert lines[-1] == "  checking org/name: 50.00 MiB of 100.00 MiB, 5.00 MiB/s, 0:10 left"
    assert len(lines) == 7
