"""Pipelines streamed at layer granularity under the smallest budget: the plain pipeline's bits,
planned bytes and time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from campaign import sampled
from whole_pipelines import AMPLE, GRAPHS, TinyPipeline, pixels, streamed

from graphrun.graph.loading import load
from graphrun.model.choices import apply_choices
from graphrun.model.directives import directed
from graphrun.model.problem import Directive
from graphrun.modules.build import build
from graphrun.profile.dry_run import probe
from graphrun.profile.hardware import simulated
from graphrun.profile.problems import ProblemLimits, problem_of
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.runtime.executor import follow, stages_for
from graphrun.runtime.host import Host
from graphrun.sim import Machine
from graphrun.solve.granularity import split_into_layers, splittable
from graphrun.solve.infeasible import smallest_budget
from graphrun.solve.solve import solve
from graphrun.verify.simulate import simulate

# CogView4 pads no further than a text goes, and a plan is for the longest
LONG = "a lighthouse at dusk, " * 64
CASES = {
    "flux-tiny": {},  # bfloat16
    "sdxl-tiny": {"height": 32, "width": 32},  # float32
    "cogview4-tiny": {"prompt": LONG, "negative_prompt": LONG},  # a GLM language model
    "hidream-tiny": {},  # four encoders, tied embeddings
    "wan-tiny": {},  # a video: its frames pass the layers of the decoder one by one
}


@pytest.mark.parametrize("name", sampled(CASES, ["flux-tiny"], "layers"))
def test_the_output_is_the_plain_pipelines_in_the_planned_bytes_and_time(name: str) -> None:
    whole = TinyPipeline(name, {"steps": 2, **CASES[name]})
    minimum_bytes = smallest_budget(whole.within(1 << 40, by_layer=True))
    assert minimum_bytes < smallest_budget(whole.problem), "blocks need no more"
    solution = solve(whole.within(minimum_bytes, by_layer=True))
    problem, plan = solution.problem, solution.plan
    by_layer = {
        component.name for component in problem.components if component.granularity == "layers"
    }
    assert by_layer & streamed(plan)
    trace = whole.run(problem, plan)
    assert np.array_equal(pixels(trace.outputs["image"]), whole.image)
    simulation = simulate(problem, plan)
    assert all(
        actual.peak_bytes <= slot.peak_bytes
        for actual, slot in zip(trace.slots, simulation.slots, strict=True)
    )
    assert trace.peak_bytes == simulation.peak_bytes <= minimum_bytes
    assert trace.moved_bytes <= simulation.moved_bytes
    assert trace.seconds <= 1.05 * simulation.seconds, "layers wait for more than was planned"
    assert trace.left_bytes == whole.device.allocated_bytes == 0


@pytest.mark.sweep("more")
def test_a_second_run_and_one_at_block_granularity_after_it_are_the_same() -> None:
    whole = TinyPipeline("flux-tiny", {"steps": 1})
    solution = solve(
        whole.within(smallest_budget(whole.within(1 << 40, by_layer=True)), by_layer=True)
    )
    first, second = (whole.run(solution.problem, solution.plan) for _ in range(2))
    assert [slot.peak_bytes for slot in first.slots] == [slot.peak_bytes for slot in second.slots]
    by_block = solve(whole.smallest())
    third = whole.run(by_block.problem, by_block.plan)
    assert all(
        np.array_equal(pixels(trace.outputs["image"]), whole.image)
        for trace in (first, second, third)
    )


@pytest.mark.parametrize("precision", sampled(["float16", "bfloat16", "int8"], ["int8"], "layers"))
def test_layers_in_every_precision_give_the_bits_of_the_resident_ones(precision: str) -> None:
    flux = load(GRAPHS / "flux-tiny.yaml")
    inputs, flux_components = flux.resolve({"steps": 1}), flux.components
    components = {
        name: replace(component, precision=("int8",))
        if precision == "int8"
        else replace(component, dtype=precision, precision=(precision,))
        for name, component in flux_components.items()
        if name == "transformer" or precision != "int8"
    }
    graph = replace(flux, components={**flux_components, **components})
    dry_run = probe(graph, inputs)

    def image(budget_bytes: int, finer: bool) -> tuple[Any, set[str], int]:
        layered_problem = problem_of(
            graph, dry_run, simulated(), ProblemLimits(budget_bytes, AMPLE), inputs
        )
        kept_problem = directed(
            layered_problem,
            [Directive("keep", component.name) for component in layered_problem.components],
        )
        solution = solve(
            split_into_layers(layered_problem, splittable(layered_problem))
            if finer
            else kept_problem
        )
        problem, plan, device = (
            apply_choices(solution.problem, solution.plan),
            solution.plan,
            SimulatedDevice(Machine()),
        )
        arguments = (
            {}
            if precision == "int8"
            else {name: build(component, graph) for name, component in graph.components.items()}
        )
        host = Host.of_graph(graph, problem, device, arguments)
        trace = follow(solution, host, device, stages_for(plan, graph, inputs, device, host))
        assert trace.left_bytes == device.allocated_bytes == 0
        finer_ones = {
            component.name for component in problem.components if component.granularity == "layers"
        }
        return pixels(trace.outputs["image"]), finer_ones & streamed(plan), trace.peak_bytes

    minimum_bytes = smallest_budget(
        problem_of(graph, dry_run, simulated(), ProblemLimits(AMPLE, AMPLE), inputs)
    )
    resident, by_layer = image(AMPLE, False), image(minimum_bytes, True)
    assert np.array_equal(resident[0], by_layer[0])
    assert not resident[1]
    assert "transformer" in by_layer[1]
    assert by_layer[2] <= minimum_bytes
