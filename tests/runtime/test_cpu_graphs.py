"""Every tiny reference graph on the CPU, with room for all weights and under the smallest budget:
the bits of the library's own pipeline, planned bytes, nothing left behind."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign import sampled
from read_ordering import ReadOrdering
from stage_runs import stages_of
from stored_component import nothing_left
from test_reference_calls import OPS, files, small
from test_reference_graphs import TEXTS
from torch import nn
from whole_pipelines import by_hand, plain_image, same

import graphrun
from graphrun.graph.graph import Graph
from graphrun.model.problem import Problem
from graphrun.modules.build import build
from graphrun.modules.trees import tensors_in
from graphrun.profile.dry_run import probe
from graphrun.profile.problems import ProblemLimits, problem_of
from graphrun.profile.processor import cpu_estimate
from graphrun.runtime.devices.cpu import CpuDevice
from graphrun.runtime.executor import follow, stages_for
from graphrun.runtime.host import Host
from graphrun.solve.infeasible import smallest_budget
from graphrun.trace import Trace
from graphrun.units import GIB

GRAPHS = Path(__file__).parent.parent.parent / "graphs"
AMPLE = 32 * GIB
# Files of weights; random weights and a sound.
SAMPLE = ("shapes", "stable-audio-tiny")


def resident(
    graph: Graph, modules: Mapping[str, nn.Module], inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """The outputs of the library's own pipeline, with all weights in memory."""
    if "call" in {stage.op for stage in graph.stages}:
        return by_hand(graph, modules, inputs)
    if "denoise" in {stage.op for stage in graph.stages}:
        return {name: plain_image(graph, modules, inputs) for name in graph.outputs}
    with torch.no_grad():
        return stages_of(graph, modules, inputs).run()


def equal(actual: Any, expected: Any) -> bool:
    """Whether both are the same pictures, sounds or trees of tensors, bit for bit."""
    if isinstance(actual, (dict, tuple)):
        pairs = zip(tensors_in(actual), tensors_in(expected), strict=True)
        return all(torch.equal(*pair) for pair in pairs)
    return same(actual, expected)


def run(problem: Problem, graph: Graph, inputs: Mapping[str, Any]) -> Trace:
    """Run ``graph`` on the CPU, in the planned bytes of weights and ring buffers."""
    solution = graphrun.plan(problem)
    device = CpuDevice(problem.hardware)
    host = Host.of_graph(graph, solution.chosen, device)
    try:
        stages = stages_for(solution.plan, graph, inputs, device, host)
        trace = follow(solution, host, device, stages)
    finally:
        host.close()
    assert trace.left_bytes == device.allocated_bytes == 0
    assert not trace.overruns
    return trace


@pytest.fixture(autouse=True)
def garbage_is_collected() -> Iterator[None]:
    """At the usual rate: what a test leaves would count as memory of the run."""
    thresholds = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*thresholds)


@pytest.mark.long
@pytest.mark.parametrize("name", sampled(["shapes", *OPS], SAMPLE, "cpu"))
def test_the_output_is_the_pipelines_own_within_the_budget(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # torch compiles flex attention, and refuses to while somebody observes operators
    observable = name != "wan-animate-2-tiny"
    ordering = ReadOrdering(monkeypatch, operators=observable)
    graph = graphrun.load(GRAPHS / f"{name}.yaml")
    inputs = small(graph) | TEXTS.get(name, {})
    planned_for = graph.for_planning(inputs)
    values = graph.resolve(inputs | files(graph))
    modules = {key: build(component, graph) for key, component in graph.components.items()}
    expected = resident(graph, modules, values)
    del modules
    dry_run = probe(graph, planned_for)
    gc.collect()
    context_bytes = CpuDevice(cpu_estimate()).measured_context(to_plan=True)
    hardware = replace(cpu_estimate(), context_bytes=context_bytes)

    def within(budget_bytes: int) -> Problem:
        limits = ProblemLimits(budget_bytes, budget_bytes)
        return problem_of(graph, dry_run, hardware, limits, planned_for)

    smallest_bytes = smallest_budget(within(AMPLE))
    with nothing_left():
        for budget_bytes in (AMPLE, smallest_bytes):
            problem = within(budget_bytes)
            trace = run(problem, graph, values)
            assert {
                key: equal(value, expected[key]) for key, value in trace.outputs.items()
            } == dict.fromkeys(graph.outputs, True)
            assert trace.peak_bytes <= problem.effective_bytes
    assert not ordering.reports
    assert bool(ordering.uses) == observable
    # compiled kernels of flex attention
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")]
