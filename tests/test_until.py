"""Plans that end with the embeddings: nothing else is planned or built, and the device ends at its
baseline."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import graphrun
from graphrun.modules.build import build, build_part, resolve_class
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.runtime.host import Host
from graphrun.runtime.recovery import execute
from graphrun.sim import Machine

GRAPHS = Path(__file__).parent.parent / "graphs"


def plain_embeddings(graph: Any) -> tuple[torch.Tensor, ...]:
    """What diffusers' own ``encode_prompt`` returns on the CPU, from a pipeline with everything in
    it."""
    kind = resolve_class(graph.pipeline, graph.trust)
    parameters = inspect.signature(kind.__init__).parameters
    members = {name: build(component, graph) for name, component in graph.components.items()}
    members |= {name: build_part(part, graph) for name, part in graph.parts.items()}
    extra = {
        name: None
        for name, parameter in parameters.items()
        if name not in members and name != "self" and parameter.default is parameter.empty
    }
    pipeline = kind(**members, **extra, **graph.pipeline_config)
    values = graph.until("encode").resolve({})
    arguments = inspect.signature(pipeline.encode_prompt).parameters
    with torch.no_grad():
        embeds = pipeline.encode_prompt(**{k: v for k, v in values.items() if k in arguments})
    return tuple(embeds)


@pytest.mark.sweep("more")
@pytest.mark.parametrize(("name", "count"), [("flux-tiny", 2), ("sdxl-tiny", 4)])
def test_encoding_alone_ends_at_the_baseline_with_valid_embeddings(name: str, count: int) -> None:
    graph = graphrun.load(GRAPHS / f"{name}.yaml")
    problem = graphrun.estimate(graph, vram="64M", ram="8G", hardware="sim", until="encode")
    assert {component.name for component in problem.components} == {
        "text_encoder",
        "text_encoder_2",
    }
    solution = graphrun.plan(problem)
    problem, encoding = solution.problem, graph.until("encode")
    device = SimulatedDevice(Machine())
    host = Host.of_graph(encoding, problem, device)
    assert all(tensor.is_meta for tensor in host.modules["vae"].parameters()), (
        "nothing else is built"
    )
    first, second = (
        execute(solution, encoding, encoding.resolve({}), device, host=host) for _ in range(2)
    )
    assert first.left_bytes == second.left_bytes == device.allocated_bytes == 0
    assert first.peak_bytes == second.peak_bytes <= problem.effective_bytes, (
        "a second encoding peaks where the first did"
    )
    embeds = list(first.outputs["embeds"].values())
    assert all(tensor.device.type == "cpu" for tensor in embeds)
    # FLUX's third is text_ids, which its pipeline makes again
    expected = plain_embeddings(graph)[:count]
    assert len(embeds) == count
    for actual, plain in zip(embeds, expected, strict=True):
        assert torch.equal(actual, plain)


@pytest.mark.sweep("more")
def test_run_accepts_the_whole_graph_for_a_plan_until_a_stage() -> None:
    graph = graphrun.load(GRAPHS / "flux-tiny.yaml")
    whole = graphrun.estimate(graph, vram="6M", ram="8G", hardware="sim", inputs={"steps": 1})
    problem = graphrun.estimate(
        graph, vram="6M", ram="8G", hardware="sim", inputs={"steps": 1}, until="denoise"
    )
    assert problem.digest != whole.digest
    trace = graphrun.run(graphrun.plan(problem), graph)
    assert list(trace.outputs) == ["latents"]
    assert trace.left_bytes == 0
