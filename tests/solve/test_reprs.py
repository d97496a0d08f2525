"""What a notebook shows of plans, traces and frontiers: one line, and a table or text as HTML."""

from __future__ import annotations

from dataclasses import replace

from planner_problems import component, hardware, problem

from graphrun.model.problem import PhaseNumbers, Use
from graphrun.solve.frontier import frontier
from graphrun.solve.solve import solve
from graphrun.trace import SlotTrace, Trace

OF = replace(
    problem(
        1 << 20,
        (component("te", ("unblocked", 1, 2048, False)),),
        (PhaseNumbers("encode", 0, (Use("te", 1, (1,), (1.0,)),), 0, 512, 0),),
        card=hardware(),
    ),
    graph="a<b",
    runs=3,
)


def test_a_solution_and_its_plan() -> None:
    solution = solve(OF)
    assert repr(solution).startswith("<Solution a<b: ")
    assert "every further run 1.0 s, peak 2.50 KiB of 1.00 MiB, moves 2.00 KiB" in repr(solution)
    assert "a&lt;b" in solution._repr_html_()
    assert solution._repr_html_().count("<tr>") == 1 + len(solution.plan.slots)
    assert (
        repr(solution.plan)
        == f"<Plan {solution.plan.digest}: 3 slots, 3 in every further run; str() is its text>"
    )
    assert "slot encode/0:te first" in solution.plan._repr_html_()


def test_a_trace() -> None:
    trace = Trace(
        "p", "sim", (SlotTrace("encode/0:te", "first", 1, 2048, 512, 0.0, 2.0),), (), 0, 0
    )
    assert repr(trace) == "<Trace on sim: 2.0 s, peak 2.00 KiB, moved 512 B, 1 slots>"
    assert (
        "<td>encode/0:te first</td><td>2.00 KiB</td><td>512 B</td><td>2.0 s</td>"
        in trace._repr_html_()
    )


def test_a_frontier() -> None:
    points = frontier(replace(OF, runs=1), [1024, 1 << 20])
    assert repr(points[0]).startswith("<Point 1.00 KiB, nothing fits below 2.50 KiB")
    assert points._repr_html_().count("<tr>") == 3
