"""Tiny versions of whole pipelines: graph, plans, host memory, and the output of diffusers' own
pipeline."""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.pipelines import DepthEstimationPipeline

from graphrun.graph.graph import Graph
from graphrun.graph.loading import load
from graphrun.graph.parts import Reference
from graphrun.model.hardware import Hardware
from graphrun.model.plan import Stream
from graphrun.model.problem import Problem
from graphrun.modules.build import build, build_part, resolve_class
from graphrun.ops.call import FIELDS
from graphrun.profile.dry_run import probe
from graphrun.profile.hardware import simulated
from graphrun.profile.problems import ProblemLimits, problem_of
from graphrun.runtime.devices.open import open_device
from graphrun.runtime.executor import follow, stages_for
from graphrun.runtime.host import Host
from graphrun.sim import Machine
from graphrun.solve.infeasible import smallest_budget
from graphrun.solve.solve import solve
from graphrun.trace import Trace
from graphrun.verify.solution import solution_of

GRAPHS = Path(__file__).parent.parent.parent / "graphs"
AMPLE = 1 << 40


class TinyPipeline:
    """The graph ``name``, estimated once for ``inputs``, with a device and host memory that all its
    runs share. ``hardware``: the simulated accelerator if left out. ``image``: of diffusers' own
    pipeline on the CPU, or on ``plain_device``."""

    def __init__(
        self,
        name: str,
        inputs: Mapping[str, Any],
        hardware: Hardware | None = None,
        plain_device: str = "cpu",
        absent: Sequence[str] = (),
    ) -> None:
        self._hardware = hardware or simulated()
        self.graph: Graph = load(GRAPHS / f"{name}.yaml", absent=absent)
        self.inputs = self.graph.resolve({"seed": 3, **inputs})
        self.modules: dict[str, nn.Module] = {
            n: build(c, self.graph) for n, c in self.graph.components.items()
        }
        self.kinds = {n: type(module) for n, module in self.modules.items()}
        self.image = pixels(plain_image(self.graph, self.modules, self.inputs, plain_device))
        if plain_device != "cpu":
            gc.collect()  # of the plain pipeline on the device
        self._dry_run = probe(self.graph, self.inputs)
        self.problem = self.within(AMPLE)
        self.device: Any = open_device(self.problem)
        self.host = Host.of_graph(self.graph, self.problem, self.device, self.modules)

    def within(self, budget_bytes: int, *, by_layer: bool = False) -> Problem:
        """Its problem; only with ``by_layer`` may components be split into layers."""
        problem = problem_of(
            self.graph,
            self._dry_run,
            self._hardware,
            ProblemLimits(budget_bytes, AMPLE),
            self.inputs,
        )
        return (
            problem
            if by_layer
            else replace(
                problem, components=tuple(replace(c, layers=None) for c in problem.components)
            )
        )

    def smallest(self) -> Problem:
        """The problem with the smallest budget for which a plan exists."""
        return self.within(smallest_budget(self.problem))

    def run(
        self, problem: Problem, plan: Any, graph: Graph | None = None, **stages_arguments: Any
    ) -> Trace:
        stages = stages_for(
            plan, graph or self.graph, self.inputs, self.device, self.host, **stages_arguments
        )
        return follow(solution_of(problem, plan), self.host, self.device, stages)

    def largest_with_activation(self) -> int:
        """Bytes of the largest component and of the activation while it runs: what a run without
        streaming needs."""
        largest = max(self.problem.components, key=lambda c: c.weight_bytes())
        phases = [
            p for p in self.problem.phases if any(u.component == largest.name for u in p.uses)
        ]
        return largest.weight_bytes() + max(max(p.first_bytes, p.steady_bytes) for p in phases)


def streamed(plan: Any) -> set[str]:
    return {
        action.component
        for slot in plan.slots
        for action in slot.actions
        if isinstance(action, Stream)
    }


def planned(problem: Problem) -> Any:
    return solve(problem).plan


def plain_image(
    graph: Graph, modules: Mapping[str, nn.Module], inputs: Mapping[str, Any], device: str = "cpu"
) -> Any:
    """What diffusers' own pipeline makes on ``device``, called as its users call it."""
    kind = resolve_class(graph.pipeline, graph.trust)
    if device != "cpu":
        modules = copy.deepcopy(dict(modules))  # tied weights do not stay tied
    parts = {name: build_part(part, graph) for name, part in graph.parts.items()}
    absent = dict.fromkeys(getattr(kind, "_optional_components", ()))
    parameters = inspect.signature(kind.__init__).parameters
    things = {
        k: v
        for k, v in {**absent, **graph.pipeline_config, **modules, **parts}.items()
        if k in parameters
    }
    pipeline = kind(**things)
    pipeline.set_progress_bar_config(disable=True)
    call_parameters = inspect.signature(kind.__call__).parameters
    batch = (
        "num_videos_per_prompt"
        if "num_videos_per_prompt" in call_parameters
        else "num_images_per_prompt"
    )
    names = {"steps": "num_inference_steps", "frames": "num_frames", "batch": batch}
    inputs = {
        **inputs,
        **{
            k: v
            for stage in graph.stages
            for k, v in stage.arguments.items()
            if not isinstance(v, Reference)
        },
    }
    arguments = {names.get(k, k): v for k, v in inputs.items() if k != "seed" and v is not None}
    arguments = {k: v for k, v in arguments.items() if k in call_parameters}
    generator = torch.Generator("cpu").manual_seed(inputs["seed"])
    pipeline.to(device)
    results = pipeline(generator=generator, output_type="pil", return_dict=False, **arguments)[0]
    return results[0] if len(results) == 1 else results


def by_hand(
    graph: Graph, modules: Mapping[str, nn.Module], inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """The outputs of a graph of calls, made by the libraries' own pipelines on the CPU, one after
    the other."""
    values = {f"${name}": value for name, value in inputs.items()}
    for stage in graph.stages:
        if stage.op == "depth":
            processor = build_part(graph.parts["depth_processor"], graph)
            estimate = DepthEstimationPipeline(
                model=modules["depth_estimator"], image_processor=processor
            )
            values[f"${stage.name}.image"] = estimate(values[str(stage.arguments["image"])])[
                "depth"
            ].convert("RGB")
            continue
        called_pipeline = graph.pipeline_called(stage.pipeline)
        kind = resolve_class(called_pipeline.class_path, graph.trust)
        parts = {name: build_part(part, graph) for name, part in graph.parts.items()}
        components = {
            **dict.fromkeys(kind._optional_components),
            **called_pipeline.by_pipeline_name(modules),
            **called_pipeline.by_pipeline_name(parts),
        }
        pipeline = kind(
            **{
                k: v
                for k, v in components.items()
                if k in inspect.signature(kind.__init__).parameters
            },
            **called_pipeline.config,
        )
        pipeline.set_progress_bar_config(disable=True)
        arguments = {
            name: values[str(argument)] if isinstance(argument, Reference) else argument
            for name, argument in stage.arguments.items()
        }
        generator = torch.Generator().manual_seed(arguments.pop("seed"))
        if arguments.pop("tiling", False):
            pipeline.vae.enable_tiling()
        arguments = {name: value for name, value in arguments.items() if value is not None}
        if kind_of := {"image": "pil", "video": "pil", "latents": "latent"}.get(stage.outputs[0]):
            arguments["output_type"] = kind_of
        result = pipeline(generator=generator, **arguments)
        for name in stage.outputs:
            value = next(
                getattr(result, field)
                for field in (*FIELDS.get(name, (name,)), "images")
                if hasattr(result, field)
            )
            values[f"${stage.name}.{name}"] = (
                value[0] if name in FIELDS and len(value) == 1 else value
            )
    return {name: values[str(reference)] for name, reference in graph.outputs.items()}


def same(actual: Any, expected: Any) -> bool:
    """Whether an output of a run and one of a pipeline are bit for bit the same pictures or
    sound."""
    if hasattr(actual, "samples"):
        sound = getattr(expected, "samples", expected)
        sound = sound.float().numpy() if isinstance(sound, torch.Tensor) else sound
        return np.array_equal(actual.samples, np.atleast_2d(sound))  # a mono sound has no channels
    return np.array_equal(pixels(actual), pixels(expected))


def pixels(image: Any) -> np.ndarray[Any, Any]:
    return (
        np.stack([np.asarray(frame) for frame in image])
        if isinstance(image, list)
        else np.asarray(image)
    )


def ranges_of(
    machine: Machine, modules: Mapping[str, nn.Module], run: Callable[[], object]
) -> dict[str, range]:
    """The numbers (from 1) of the allocations that happen inside each of ``modules`` in its first
    call during ``run``."""
    start, ranges, hooks, starts = machine.allocations, dict[str, range](), [], dict[str, int]()
    for name, module in modules.items():

        def before(*_: Any, name: str = name) -> None:
            starts.setdefault(name, machine.allocations - start)

        def after(*_: Any, name: str = name) -> None:
            ranges.setdefault(name, range(starts[name] + 1, machine.allocations - start + 1))

        hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return ranges
