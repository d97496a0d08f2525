"""Every tiny reference graph of calls under the smallest budget: the output of diffusers' own
pipelines, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from campaign import sampled
from PIL import Image
from whole_pipelines import by_hand, same

import graphrun
from graphrun.graph.graph import Graph
from graphrun.modules.build import build
from graphrun.profile.dry_run import probe
from graphrun.profile.hardware import simulated
from graphrun.profile.problems import ProblemLimits, problem_of
from graphrun.solve.infeasible import smallest_budget

GRAPHS = Path(__file__).parent.parent.parent / "graphs"
AMPLE = 1 << 40
OPS = {
    path.stem: set(re.findall(r"\bop: (\w+)", path.read_text()))
    for path in sorted(GRAPHS.glob("*-tiny.yaml"))
}
CALLS = [name for name, ops in OPS.items() if "call" in ops and ops <= {"call", "depth"}]
# A sound; a picture with a mask. The others are in the sweep.
ALWAYS = ("stable-audio-tiny", "flux-fill-tiny")


def small(graph: Graph) -> dict[str, Any]:
    """Few steps of a small picture, as far as the graph has such inputs."""
    settings = {"steps": 2, "height": 64, "width": 64, "seed": 3}
    return {
        name: value
        for name, value in settings.items()
        if name in graph.inputs and not value % (graph.inputs[name].multiple_of or 1)
    }


def files(graph: Graph) -> dict[str, Any]:
    """A picture, a mask or a video of nine frames for each input that takes one."""
    noise = np.random.default_rng(0).integers(0, 256, (9, 64, 64, 3), dtype=np.uint8)
    half = np.repeat(np.uint8([255, 0]), 32)[:, None].repeat(64, 1)
    frames = [Image.fromarray(frame) for frame in noise]
    media = {"image": frames[0], "mask": Image.fromarray(half), "video": frames}
    return {name: media[entry.type] for name, entry in graph.inputs.items() if entry.type in media}


@pytest.mark.parametrize("name", sampled(CALLS, ALWAYS, "reference"))
def test_the_output_is_the_pipelines_own_in_the_smallest_budget(name: str) -> None:
    graph = graphrun.load(GRAPHS / f"{name}.yaml")
    inputs = small(graph)
    planned_for = graph.for_planning(inputs)
    dry_run = probe(graph, planned_for)
    budget = smallest_budget(
        problem_of(graph, dry_run, simulated(), ProblemLimits(AMPLE, AMPLE), planned_for)
    )
    solution = graphrun.plan(
        problem_of(graph, dry_run, simulated(), ProblemLimits(budget, AMPLE), planned_for)
    )
    inputs |= files(graph)
    trace = graphrun.run(solution, graph, inputs=inputs)
    modules = {key: build(component, graph) for key, component in graph.components.items()}
    expected = by_hand(graph, modules, graph.resolve(inputs))
    assert {
        key: same(value, expected[key]) for key, value in trace.outputs.items()
    } == dict.fromkeys(expected, True)
    assert 0 < trace.peak_bytes <= budget
    assert trace.left_bytes == 0
