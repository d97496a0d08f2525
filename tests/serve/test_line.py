"""The queue: predicted starts, who may overtake whom, and that a promise is kept within a tenth."""

from __future__ import annotations

import random

import pytest

from graphrun.serve.line import PATIENCE, Cost, Entry, Line

COST = Cost(first_seconds=5.0, again_seconds=2.0)


def entry(shape: str, runs: int = 1, cost: Cost = COST) -> Entry:
    return Entry(object(), "device", shape, cost, runs)


def joined(line: Line, *shapes: str, now: float = 0.0) -> list[float]:
    starts = []
    for shape in shapes:
        each = entry(shape)
        line.add(each, now, now)
        starts.append(each.start)
    return starts


def shapes(line: Line) -> str:
    return "".join(str(each.shape) for each in line.entries)


def test_a_run_after_one_of_its_shape_takes_less_and_one_after_another_takes_more() -> None:
    line = Line()
    assert joined(line, "A", "A", "B") == [0.0, 5.0, 7.0]
    assert line.end(0.0) == 12.0
    line.pop()
    assert line.end(0.0) == 7.0, "what the first leaves on the device is found by the second"
    assert line.seconds(entry("A", runs=3), {}) == 9.0


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
    choose, line, now, free, warm = random.Random(seed), Line(), 0.0, 0.0, None
    costs = {shape: Cost(choose.uniform(2, 9), choose.uniform(0.5, 2)) for shape in "ABC"}
    arrivals = sorted(choose.uniform(0, 300) for _ in range(120))
    admitted: dict[int, tuple[float, float]] = {}
    while arrivals or line.entries:
        if line.entries and (not arrivals or free <= arrivals[0]):
            now = max(now, free)
            (each,) = line.pop()
            promised, at = admitted[id(each)]
            assert now <= promised + PATIENCE * (promised - at) + 1e-9
            cost = costs[str(each.shape)]
            free, warm = (
                now + (cost.again_seconds if warm == each.shape else cost.first_seconds),
                each.shape,
            )
        else:
            now = arrivals.pop(0)
            shape = choose.choice("ABC")
            each = entry(shape, cost=costs[shape])
            line.add(each, now, max(now, free))
            admitted[id(each)] = each.start, now


APART = Cost(first_seconds=5.0, again_seconds=4.0)
TOGETHER = Cost(first_seconds=5.0, again_seconds=4.0, segments=((2.0, 0.5), (3.0, 1.5)))


def test_runs_go_together_where_that_takes_less() -> None:
    assert TOGETHER.together(3) == [6.0, 7.5, 9.0]
    line = Line()
    line.add(entry("A", runs=3, cost=TOGETHER), 0.0, 0.0)
    assert line.end(0.0) == 9.0, "in place of 5 + 4 + 4"
    line.add(after := entry("A", cost=TOGETHER), 0.0, 0.0)
    assert (after.start, after.end) == (9.0, 14.0), (
        "to go with the others would delay these; the device is empty then"
    )
    assert [each.runs for each in line.pop()] == [3]
    assert not line.warm, "runs that go together leave an empty device"
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
    for each in line.entries:
        each.cost = TOGETHER
    assert [len(line.pop()) for _ in range(4)] == [1] * 4


@pytest.mark.parametrize("seed", range(20))
def test_requests_that_go_together_end_within_a_tenth_of_the_promised_wait(seed: int) -> None:
    """As above: what is taken from the queue runs as its costs say."""
    choose, line, now, free, warm, most = random.Random(seed), Line(), 0.0, 0.0, None, 0
    costs = {}
    for shape in "ABC":
        parts = tuple((choose.uniform(1, 4), choose.uniform(0.2, 1)) for _ in range(2))
        costs[shape] = Cost(
            sum(first for first, _ in parts),
            choose.uniform(1.2, 1.8) * sum(again for _, again in parts),
            parts,
        )
    arrivals = sorted(choose.uniform(0, 100) for _ in range(150))
    asked: dict[Entry, float] = {}
    while arrivals or line.entries:
        if line.entries and (not arrivals or free <= arrivals[0]):
            now = max(now, free)
            taken = line.pop()
            cost, runs = taken[0].cost, len(taken)
            if runs > 1:
                prefix = cost.segments[0][0] + (runs - 1) * cost.segments[0][1]
                ends = [
                    now + prefix + cost.segments[1][0] + number * cost.segments[1][1]
                    for number in range(runs)
                ]
                warm = None
            else:
                ends = [
                    now + (cost.again_seconds if warm == taken[0].shape else cost.first_seconds)
                ]
                warm = taken[0].shape
            for each, end in zip(taken, ends, strict=True):
                assert end <= each.end + PATIENCE * max(0.0, each.start - asked[each]) + 1e-9
            free, most = ends[-1], max(most, runs)
        else:
            now = arrivals.pop(0)
            shape = choose.choice("ABC")
            each = entry(shape, cost=costs[shape])
            line.add(each, now, max(now, free))
            asked[each] = now
    assert most > 1


CLUSTER = Cost(
    first_seconds=6.0, again_seconds=4.0, stream=((6.0, 8.0, 10.0, 12.0), (4.0, 6.0, 8.0, 10.0))
)


def test_on_a_cluster_runs_go_together_as_a_stream_and_leave_weights_there() -> None:
    line = Line()
    for number in range(4):
        line.add(each := entry("A", cost=CLUSTER), 0.0, 0.0)
        assert (each.start, each.end) == (2.0 + 2.0 * number if number else 0.0, 6.0 + 2.0 * number)
    assert len(line.pop()) == 4
    assert line.warm == {"device": "A"}
    line.add(each := entry("A", runs=2, cost=CLUSTER), 0.0, 0.0)
    assert each.end == 6.0
