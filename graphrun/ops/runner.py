"""Runs the stages of a graph in order, each on a pipeline of its own. Knows nothing of memory: whoever needs to act when a
component is entered has put a `Boundary` around the modules before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from graphrun.components.build import build_part, ghost
from graphrun.components.entry import Boundary
from graphrun.errors import GraphError
from graphrun.graph.graph import Graph, Reference, Stage
from graphrun.ops.diffusion import StageContext, decode, denoise, encode_prompt
from graphrun.ops.options import applied
from graphrun.ops.pipeline import assemble
from graphrun.ops.steps import Journal

OPS: Mapping[str, Callable[..., dict[str, Any]]] = {"encode_prompt": encode_prompt, "denoise": denoise, "decode": decode}

Observer = Callable[[str, Mapping[str, Any]], None]


def run_stages(
    graph: Graph,
    modules: Mapping[str, nn.Module],
    device: torch.device,
    inputs: Mapping[str, Any],
    *,
    after_stage: Observer | None = None,
    parts: Mapping[str, Any] | None = None,
    ghosts: Mapping[str, nn.Module] | None = None,
    options: Mapping[str, str] | None = None,
    order: Sequence[str] = (),
    given: Mapping[str, Any] | None = None,
    journal: Journal | None = None,
) -> dict[str, Any]:
    """The graph's outputs, on the host. ``inputs`` are resolved already; ``modules`` holds every component that a stage uses.

    ``parts`` and ``ghosts`` of all components are made if they are not given. ``options``: stage -> the way to run it, where not
    the plain one; ``order``: of the stages, if not the graph's. ``given``: values of stages that are not run, by name as in
    ``encode.embeds``; they lie on the device from the start. ``journal`` keeps the state of denoising loops. A value is dropped after its last consumer;
    ``after_stage(stage, outputs)`` sees each stage's values as they are on the device. Raises GraphError when a stage enters a
    component that it does not list under ``uses``.
    """
    parts = parts if parts is not None else {part.name: build_part(part, graph) for part in graph.parts.values()}
    ghosts = ghosts if ghosts is not None else {name: ghost(component, graph.allow) for name, component in graph.components.items()}
    partial = all(stage.op == "encode_prompt" for stage in graph.stages)
    values: dict[Reference, Any] = {Reference("input", name, ""): value for name, value in inputs.items()}
    values |= {Reference("stage", *name.split(".", 1)): to_place(value, device) for name, value in (given or {}).items()}
    outputs: dict[str, Any] = {name: to_host(values[wanted]) for name, wanted in graph.outputs.items() if wanted in values}
    stages = tuple(graph.stage(name) for name in order) or graph.stages
    for number, stage in enumerate(stages):
        present = {name: modules[name] if name in stage.uses else ghosts[name] for name in graph.components}
        absent = {name: module for name, module in present.items() if name not in stage.uses}
        pipeline = assemble(graph, present, parts, device, partial=partial)
        option = (options or {}).get(stage.name)
        used = {name: module for name, module in present.items() if name in stage.uses}
        way = applied(option, pipeline, used, device) if option else nullcontext()
        with Boundary(absent, device, on_enter=_refuse(stage)), torch.no_grad(), way:
            made = OPS[stage.op](
                StageContext(stage.name, pipeline, device, journal),
                **{name: values[value] if isinstance(value, Reference) else value for name, value in stage.arguments.items()},
            )
        if after_stage is not None:
            after_stage(stage.name, made)
        values.update({Reference("stage", stage.name, output): value for output, value in made.items()})
        outputs.update({name: to_host(values[wanted]) for name, wanted in graph.outputs.items() if wanted.name == stage.name})
        needed = {value for later in stages[number + 1 :] for value in later.arguments.values() if isinstance(value, Reference)}
        values = {key: value for key, value in values.items() if key in needed}
        del made
    return outputs


def to_host(value: Any) -> Any:
    """``value`` with every tensor in it copied to the host."""
    return to_place(value, torch.device("cpu"))


def to_place(value: Any, place: torch.device) -> Any:
    """``value`` with every tensor in it copied to ``place``; one that is there twice stays one."""
    moved: dict[int, torch.Tensor] = {}

    def move(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return moved[id(item)] if id(item) in moved else moved.setdefault(id(item), item.to(place))
        if isinstance(item, Mapping):
            return {key: move(each) for key, each in item.items()}
        if isinstance(item, (list, tuple)):
            return type(item)(move(each) for each in item)
        return item

    return move(value)


def _refuse(stage: Stage) -> Callable[[str, str], None]:
    def refuse(component: str, entry: str) -> None:
        raise GraphError(
            f"stage {stage.name} enters {component}.{entry}, which it does not list: add {component} to stages.{stage.name}.uses"
        )

    return refuse
