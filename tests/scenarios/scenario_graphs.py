"""Small graphs of the scenarios, and the same pipelines under diffusers' own offloading on the
simulated accelerator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peers_machine import Sim
from peers_tools import TOOLS, Cell
from torch import nn

from graphrun import sim
from graphrun.graph.graph import Graph
from graphrun.graph.loading import load
from graphrun.model.allocator import Caching
from graphrun.model.problem import Problem
from graphrun.modules.build import build, build_part
from graphrun.ops.pipeline import assemble
from graphrun.profile.dry_run import probe
from graphrun.profile.hardware import simulated
from graphrun.profile.problems import ProblemLimits, problem_of
from graphrun.runtime.devices.open import open_device
from graphrun.runtime.host import Host
from graphrun.runtime.recovery import execute
from graphrun.solve.infeasible import smallest_budget
from graphrun.trace import Trace
from graphrun.verify.solution import solution_of

GRAPHS = Path(__file__).parents[2] / "graphs"
AMPLE = 1 << 40

GLM_ENCODE = """
graphrun: 1
name: glm-encode
pipeline: diffusers.CogView4Pipeline
inputs:
  prompt: {type: str, default: a lighthouse at dusk}
  guidance_scale: {type: float, default: 5.0}
components:
  text_encoder: {class: transformers.GlmModel, config: configs/tiny-glm.json, dtype: bfloat16}
parts:
  tokenizer:
    class: transformers.PreTrainedTokenizerFast
    file: tokenizers/bytes.json
    config: {model_max_length: 256, pad_token: <pad>, bos_token: <s>, eos_token: </s>}
  scheduler: {class: diffusers.FlowMatchEulerDiscreteScheduler,
              config: configs/plain-flow-scheduler.json}
stages:
  encode: {op: encode_prompt, uses: [text_encoder],
           with: {prompt: $prompt, guidance_scale: $guidance_scale}}
outputs: {embeds: $encode.embeds}
"""


def graph_of(text: str, folder: Path) -> Graph:
    """The graph in ``text``, with the configs and tokenizers of the reference graphs next to it."""
    for name in ("configs", "tokenizers"):
        (folder / name).symlink_to(GRAPHS / name)
    (folder / "graph.yaml").write_text(text)
    return load(folder / "graph.yaml")


class Encoding:
    """A graph that only encodes: estimated once; its runs share host memory and a device."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.inputs = graph.resolve({})
        self._dry_run = probe(graph, self.inputs)
        self.modules: dict[str, nn.Module] = {
            n: build(c, graph) for n, c in graph.components.items()
        }
        self.ample = self.within(AMPLE)
        self.device: Any = open_device(self.ample)
        self.plain = encode(self.pipeline(torch.device("cpu")), self.inputs)
        self.host = Host.of_graph(graph, self.ample, self.device, self.modules)

    def within(self, budget_bytes: int, *, by_layer: bool = False) -> Problem:
        problem = problem_of(
            self.graph, self._dry_run, simulated(), ProblemLimits(budget_bytes, AMPLE), self.inputs
        )
        return (
            problem
            if by_layer
            else replace(
                problem, components=tuple(replace(c, layers=None) for c in problem.components)
            )
        )

    def smallest(self) -> Problem:
        return self.within(smallest_budget(self.ample))

    def run(self, problem: Problem, plan: Any) -> Trace:
        return execute(
            solution_of(problem, plan), self.graph, self.inputs, self.device, host=self.host
        )

    def pipeline(self, device: torch.device) -> Any:
        """diffusers' pipeline over modules of its own."""
        parts = {name: build_part(part, self.graph) for name, part in self.graph.parts.items()}
        modules = {
            name: build(component, self.graph) for name, component in self.graph.components.items()
        }
        return assemble(self.graph, modules, parts, device, partial=True)


def encode(pipeline: Any, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    """What the pipeline's own ``encode_prompt`` returns, with classifier-free guidance, on the
    host."""
    with torch.no_grad():
        outputs = pipeline.encode_prompt(
            inputs["prompt"], do_classifier_free_guidance=True, **_length(inputs)
        )
    return [tensor.cpu() for tensor in outputs]


def _length(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: inputs[name] for name in ("max_sequence_length",) if name in inputs}


def equal(embeds: Mapping[str, torch.Tensor], other: list[torch.Tensor]) -> bool:
    """The same tensors, bit for bit."""
    return len(embeds) == len(other) and all(
        torch.equal(a, b) for a, b in zip(embeds.values(), other, strict=True)
    )


@contextmanager
def offloaded(pipeline: Any, tool: str = "model offload") -> Iterator[sim.Machine]:
    """``pipeline`` under diffusers' own ``enable_model_cpu_offload``, or another mode of its, on
    the simulated accelerator."""
    plain = type(pipeline).__mro__[1]
    pipeline.__class__ = plain  # without the device override of `assemble`
    device = Sim(None)
    with device.open(), torch.no_grad():
        TOOLS[f"diffusers {tool}"].put(pipeline, Cell(device.device, None, None, 0))
        yield device.machine
        pipeline.remove_all_hooks()


class Pages:
    """What PyTorch's allocator would have reserved for what lives on ``machine``. ``trims``: bytes
    before, after, and allocated."""

    def __init__(self, machine: sim.Machine) -> None:
        self.allocator, self.trims = Caching(), list[tuple[int, int, int]]()
        self._machine = machine
        machine.listener = self

    def allocated(self, key: int, nbytes: int) -> None:
        self.allocator.allocate(key, nbytes)

    def freed(self, key: int) -> None:
        self.allocator.release(key)

    def trim(self, *_: Any) -> None:
        used_bytes = self.allocator.used_bytes
        self.allocator.trim()
        self.trims.append((used_bytes, self.allocator.used_bytes, self._machine.allocated_bytes))


def nbytes(*modules: nn.Module) -> int:
    return sum(
        tensor.nbytes for module in modules for tensor in (*module.parameters(), *module.buffers())
    )
