"""Runs of a graph with its transformer streamed and resident, which draw the same picture."""

from __future__ import annotations

import graphrun
from graphrun.graph.graph import Graph
from graphrun.model.problem import Problem
from graphrun.verify.simulate import simulate


def problems_with_the_same_picture(graph: Graph) -> list[Problem]:
    """The two problems, after their runs took at most the planned bytes and left none."""
    pictures, streamed, problems = set(), set(), list[Problem]()
    for exclude in ((), ("transformer",)):
        problem = graphrun.estimate(
            graph, vram="64M", ram="1G", hardware="sim", inputs={"steps": 2}, exclude=exclude
        )
        problems.append(problem)
        solution = graphrun.plan(problem)
        trace = graphrun.run(solution, graph, {"steps": 2})
        streamed.add("stream transformer" in str(solution.plan))
        pictures.add(trace.outputs["image"].tobytes())
        assert trace.left_bytes == 0
        for slot, slot_trace in trace.pairs_with(simulate(solution.problem, solution.plan).slots):
            assert slot_trace.peak_bytes <= slot.peak_bytes, slot.phase
    assert len(pictures) == 1
    assert streamed == {True, False}
    return problems
