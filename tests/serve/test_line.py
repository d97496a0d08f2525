"""The queue: predicted starts, who may overtake whom, and that a promise is kept within a tenth."""

from __future__ import annotations

import random

import pytest

from graphrun.serve.line import PATIENCE, Cost, Line, QueueEntry

COST = Cost(first_seconds=5.0, again_seconds=2.0)


def entry(shape: str, runs: int = 1, cost: Cost = COST) -> QueueEntry:
    return QueueEntry(object(), "device", shape, cost, runs)


def joined(line: Line, *shapes: str, clock: float = 0.0) -> list[float]:
    starts = []
    for shape in shapes:
        request = entry(shape)
        line.add(request, clock, clock)
        starts.append(request.start)
    return starts


def shapes(line: Line) -> str:
    return "".join(str(request.shape) for request in line.entries)


def test_a_run_after_one_of_its_shape_takes_less_and_one_after_another_takes_more() -> None:
    line = Line()
    assert joined(line, "A", "A", "B") == [0.0, 5.0, 7.0]
    assert line.end(0.0) == 12.0
    line.pop()
    assert line.end(0.0) == 7.0, "what the first leaves on the device is found by the second"
    line = Line()
    line.add(entry("A", runs=3), 0.0, 0.0)
    assert line.end(0.0) == 9.0


def test_a_request_joins_its_shape_where_nobody_waits_much_longer() -> None:
    line = Line()
    joined(line, *"AAAAAAAAAAAB")
    assert joined(line, "A") == [25.0]
    assert shapes(line) == "A" * 12 + "B", "B was promised 25 s and waits 27"
    joined(line, "A")
    assert shapes(line) == "A" * 12 + "BA", "29 s would be more than a tenth above 25"


def test_nobody_is_overtaken_who_begins_soon() -> None:
    line = Line()
    joined(line, *"ABA")
    assert shapes(line) == "ABA", "B would wait 7 s in place of 5"


def test_what_leaves_the_line_is_not_waited_for() -> None:
    line = Line()
    joined(line, *"ABC")
    line.remove(line.entries[1].item)
    assert shapes(line) == "AC"
    assert line.end(0.0) == 10.0


@pytest.mark.parametrize("seed", range(20))
def test_every_request_begins_within_a_tenth_of_its_promise(seed: int) -> None:
    """An event simulation that shares no code with `Line.times`: random arrivals of three shapes on
    a clock."""
    choose, line, clock, free, warm = random.Random(seed), Line(), 0.0, 0.0, None
    costs = {shape: Cost(choose.uniform(2, 9), choose.uniform(0.5, 2)) for shape in "ABC"}
    arrivals = sorted(choose.uniform(0, 300) for _ in range(120))
    admitted: dict[int, tuple[float, float]] = {}
    while arrivals or line.entries:
        if line.entries and (not arrivals or free <= arrivals[0]):
            clock = max(clock, free)
            (request,) = line.pop()
            promised, admitted_at = admitted[id(request)]
            assert clock <= promised + PATIENCE * (promised - admitted_at) + 1e-9
            cost = costs[str(request.shape)]
            free, warm = (
                clock + (cost.again_seconds if warm == request.shape else cost.first_seconds),
                request.shape,
            )
        else:
            clock = arrivals.pop(0)
            shape = choose.choice("ABC")
            request = entry(shape, cost=costs[shape])
            line.add(request, clock, max(clock, free))
            admitted[id(request)] = request.start, clock


APART = Cost(first_seconds=5.0, again_seconds=4.0)
TOGETHER = Cost(first_seconds=5.0, again_seconds=4.0, segments=((2.0, 0.5), (3.0, 1.5)))


def test_runs_go_together_where_that_takes_less() -> None:
    assert TOGETHER.end_seconds(3) == [6.0, 7.5, 9.0]
    line = Line()
    line.add(entry("A", runs=3, cost=TOGETHER), 0.0, 0.0)
    assert line.end(0.0) == 9.0, "in place of 5 + 4 + 4"
    line.add(follower := entry("A", cost=TOGETHER), 0.0, 0.0)
    assert (follower.start, follower.end) == (9.0, 14.0), (
        "to go with the others would delay these; the device is empty then"
    )
    assert [request.runs for request in line.pop()] == [3]
    assert not line.warm_shapes, "runs that go together leave an empty device"
    line = Line()
    line.add(entry("A", runs=3, cost=APART), 0.0, 0.0)
    assert line.end(0.0) == 13.0, "one after another where nothing else was planned"


def test_the_longer_the_queue_the_more_requests_go_together() -> None:
    line = Line()
    line.add(entry("B", cost=Cost(100.0, 100.0)), 0.0, 0.0)
    for number in range(30):
        line.add(entry("A", cost=TOGETHER), 0.0, 0.0)
        assert line.entries[-1].end <= 105 + 4 * number, "nobody ends later than one after another"
    assert len(line.pop()) == 1
    assert len(line.pop()) > 4


def test_requests_that_came_before_it_was_planned_keep_their_promises() -> None:
    line = Line()
    for _ in range(4):
        line.add(entry("A", cost=APART), 0.0, 0.0)
    for request in line.entries:
        request.cost = TOGETHER
    assert [len(line.pop()) for _ in range(4)] == [1] * 4


@pytest.mark.parametrize("seed", range(20))
def test_requests_that_go_together_end_within_a_tenth_of_the_promised_wait(seed: int) -> None:
    """As above: what is taken from the queue runs as its costs say."""
    choose, line, clock, free, warm, max_runs = random.Random(seed), Line(), 0.0, 0.0, None, 0
    costs = {}
    for shape in "ABC":
        parts = tuple((choose.uniform(1, 4), choose.uniform(0.2, 1)) for _ in range(2))
        costs[shape] = Cost(
            sum(first for first, _ in parts),
            choose.uniform(1.2, 1.8) * sum(repeat_seconds for _, repeat_seconds in parts),
            parts,
        )
    arrivals = sorted(choose.uniform(0, 100) for _ in range(150))
    admission_times: dict[QueueEntry, float] = {}
    while arrivals or line.entries:
        if line.entries and (not arrivals or free <= arrivals[0]):
            clock = max(clock, free)
            batch = line.pop()
            cost, runs = batch[0].cost, len(batch)
            if runs > 1:
                prefix = cost.segments[0][0] + (runs - 1) * cost.segments[0][1]
                ends = [
                    clock + prefix + cost.segments[1][0] + number * cost.segments[1][1]
                    for number in range(runs)
                ]
                warm = None
            else:
                ends = [
                    clock + (cost.again_seconds if warm == batch[0].shape else cost.first_seconds)
                ]
                warm = batch[0].shape
            for request, end in zip(batch, ends, strict=True):
                assert (
                    end
                    <= request.end
                    + PATIENCE * max(0.0, request.start - admission_times[request])
                    + 1e-9
                )
            free, max_runs = ends[-1], max(max_runs, runs)
        else:
            clock = arrivals.pop(0)
            shape = choose.choice("ABC")
            request = entry(shape, cost=costs[shape])
            line.add(request, clock, max(clock, free))
            admission_times[request] = clock
    assert max_runs > 1


CLUSTER = Cost(
    first_seconds=6.0,
    again_seconds=4.0,
    concurrent_end_seconds=((6.0, 8.0, 10.0, 12.0), (4.0, 6.0, 8.0, 10.0)),
)


def test_on_a_cluster_runs_go_together_as_a_stream_and_leave_weights_there() -> None:
    line = Line()
    for number in range(4):
        line.add(request := entry("A", cost=CLUSTER), 0.0, 0.0)
        assert (request.start, request.end) == (
            2.0 + 2.0 * number if number else 0.0,
            6.0 + 2.0 * number,
        )
    assert len(line.pop()) == 4
    assert line.warm_shapes == {"device": "A"}
    line.add(request := entry("A", runs=2, cost=CLUSTER), 0.0, 0.0)
    assert request.end == 6.0
