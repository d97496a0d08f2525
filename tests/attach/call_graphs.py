"""Graph files with one `call` stage for a tiny pipeline, and the pipeline's own output for the same
arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from tiny_pipelines import BYTES, Case, cases

from graphrun.graph.graph import Graph
from graphrun.graph.loading import load
from graphrun.model.problem import Problem
from graphrun.ops.call import Sound
from graphrun.profile.dry_run import probe
from graphrun.profile.hardware import simulated
from graphrun.profile.problems import ProblemLimits, problem_of
from graphrun.runtime.devices.simulated import SimulatedDevice
from graphrun.runtime.executor import follow, stages_for
from graphrun.runtime.host import Host
from graphrun.sim import Machine
from graphrun.solve.infeasible import smallest_budget
from graphrun.solve.solve import solve
from graphrun.trace import Trace
from graphrun.verify.simulate import simulate
from graphrun.verify.solution import solution_of

AMPLE = 1 << 40


@dataclass(frozen=True)
class Called:
    """A case as a graph, with its inputs, its modules, its pipeline's own output, and a device."""

    graph: Graph
    inputs: Mapping[str, Any]
    modules: Mapping[str, Any]
    expected: Any
    device: SimulatedDevice

    def problem(self, budget_bytes: int = AMPLE) -> Problem:
        inputs = self.graph.for_planning({})
        return problem_of(
            self.graph,
            probe(self.graph, inputs),
            simulated(),
            ProblemLimits(budget_bytes, AMPLE),
            inputs,
        )

    def run(self, problem: Problem) -> Trace:
        """The trace of a run under the least budget. Asserts that every slot is within its plan and
        that nothing is left."""
        solution = solve(self.problem(smallest_budget(problem)))
        problem, plan = solution.problem, solution.plan
        host = Host.of_graph(self.graph, problem, self.device, self.modules)
        stages = stages_for(plan, self.graph, self.graph.resolve(self.inputs), self.device, host)
        trace = follow(solution_of(problem, plan), host, self.device, stages)
        slots = simulate(problem, plan).slots
        assert all(
            trace_slot.peak_bytes <= slot.peak_bytes
            for trace_slot, slot in zip(trace.slots, slots, strict=True)
        )
        assert trace.left_bytes == self.device.allocated_bytes == 0
        return trace


def called(name: str, folder: Path, output: str = "image") -> Called:
    """The case ``name`` written as a graph file to ``folder``."""
    case: Case = cases()[name]
    pipe, arguments = (
        case.build(),
        {k: v for k, v in case.arguments().items() if k != "output_type"},
    )
    media = {
        k: v
        for k, v in arguments.items()
        if hasattr(v, "mode") or (isinstance(v, list) and hasattr(v[0], "mode"))
    }
    graph = load(written(pipe, case, arguments, media, folder, output))
    arguments |= {"num_inference_steps": case.steps} if case.steps else {}
    torch.manual_seed(1)
    generator = {"generator": torch.Generator().manual_seed(3)} if case.steps else {}
    output_type = {"output_type": "pil"} if output in ("image", "video") else {}
    result = pipe(**arguments, **generator, **output_type)
    value = next(iter(vars(result).values())) if hasattr(result, "__dict__") else result[0]
    modules = {n: m for n, m in modules_of(pipe).items() if n in graph.components}
    return Called(graph, media, modules, value, SimulatedDevice(Machine()))


def modules_of(pipe: Any) -> dict[str, Any]:
    modules = {n: part for n, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    nets = getattr(modules.get("controlnet"), "nets", None)
    if nets is not None:
        del modules["controlnet"]
        modules |= {f"controlnet_{number}": net for number, net in enumerate(nets)}
    return modules


def written(
    pipe: Any,
    case: Case,
    arguments: Mapping[str, Any],
    media: Mapping[str, Any],
    folder: Path,
    output: str,
) -> Path:
    modules, nets = modules_of(pipe), [n for n in modules_of(pipe) if n.startswith("controlnet_")]
    plain = {
        k: v
        for k, v in pipe.config.items()
        if isinstance(v, (bool, int, float, str)) and not k.startswith("_")
    }
    inputs = {name: declared(name, value) for name, value in media.items()}
    references = {name: f"${name}" if name in media else value for name, value in arguments.items()}
    if case.steps:
        references |= {"num_inference_steps": case.steps, "seed": 3}
    content = {
        "graphrun": 1,
        "name": "called",
        "pipeline": path_of(case.kind),
        "pipeline_config": {**plain, **({"controlnet": [f"${n}" for n in nets]} if nets else {})},
        "inputs": inputs,
        "components": {
            n: {"class": path_of(type(m)), "config": config_of(m), "dtype": "float32"}
            for n, m in modules.items()
        },
        "parts": {
            n: part_of(p)
            for n, p in pipe.components.items()
            if p is not None and not isinstance(p, (torch.nn.Module, list))
        },
        "stages": {"make": {"op": "call", "uses": list(modules), "with": references}},
        "outputs": {output: f"$make.{output}"},
    }
    path = folder / "called.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(content, default=list)), sort_keys=False))
    return path


def declared(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {
            "type": "video",
            "frames": len(value),
            "height": value[0].height,
            "width": value[0].width,
        }
    return {
        "type": "mask" if "mask" in name else "image",
        "height": value.height,
        "width": value.width,
    }


def path_of(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def config_of(part: Any) -> dict[str, Any]:
    if hasattr(part.config, "to_dict"):
        return {k: v for k, v in part.config.to_dict().items() if k not in ("dtype", "torch_dtype")}
    return {k: v for k, v in part.config.items() if not k.startswith("_")}


def part_of(part: Any) -> dict[str, Any]:
    if hasattr(part, "model_max_length"):
        marks = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
        return {
            "class": "transformers.PreTrainedTokenizerFast",
            "file": str(BYTES),
            "config": {"model_max_length": part.model_max_length, **marks},
        }
    config = config_of(part) if hasattr(part, "set_timesteps") else part.to_dict()
    return {"class": path_of(type(part)), "config": config}


def pixels(value: Any) -> np.ndarray[Any, Any]:
    """Whatever a pipeline returns as one array."""
    if isinstance(value, Sound):
        return value.samples
    if isinstance(value, Image.Image):
        return np.asarray(value)
    return (
        np.stack([pixels(item) for item in value]) if isinstance(value, list) else np.asarray(value)
    )
