"""Runs the stages of a graph in order, each on a pipeline of its own.

Knows nothing of memory: to act when a component is called, enter a `CallInterceptor` around the modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import nn

from graphrun.errors import GraphError
from graphrun.graph.graph import Graph, Reference, Stage
from graphrun.graph.media import opened
from graphrun.graph.order import read_by
from graphrun.modules.build import build_part, meta_module
from graphrun.modules.interceptor import CallInterceptor
from graphrun.modules.trees import walk
from graphrun.ops.block import block
from graphrun.ops.call import call
from graphrun.ops.diffusion import StageContext, decode, denoise, encode_prompt
from graphrun.ops.outlines import materialized, outlined
from graphrun.ops.pipeline import assemble
from graphrun.ops.stage_options import apply_option
from graphrun.ops.steps import Journal, Steps

OPS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "encode_prompt": encode_prompt,
    "denoise": denoise,
    "decode": decode,
    "call": call,
    "block": block,
}

Observer = Callable[[str, Mapping[str, Any]], None]
Before = Callable[[str], None]


class Stages:
    """The stages of a graph in execution: `run` continues with the first that is not done.

    ``inputs``: resolved input values. ``modules``: every component that a stage uses. ``parts`` and ``meta_modules`` (of all
    components) are built if they are not passed. ``order``: stage names, instead of the graph's order. ``options``: stage -> run
    option (`graphrun.ops.stage_options`). ``before_stage(stage)`` is called before a stage's arguments are looked up,
    ``after_stage(stage, outputs)`` with its outputs on the device. ``precomputed``: values of stages that are not run, by name such
    as ``encode.embeds``, on the device from the start. ``journal`` saves the states of denoising loops; ``steps`` has the latest.
    ``planning``: work that costs host time only is skipped.

    A value is dropped after its last consumer, and replaced by an outline (`graphrun.ops.outlines`) after the last consumer that
    reads its numbers.
    """

    def __init__(
        self,
        graph: Graph,
        modules: Mapping[str, nn.Module],
        device: torch.device,
        inputs: Mapping[str, Any],
        *,
        after_stage: Observer | None = None,
        before_stage: Before | None = None,
        parts: Mapping[str, Any] | None = None,
        meta_modules: Mapping[str, nn.Module] | None = None,
        order: Sequence[str] = (),
        options: Mapping[str, str] | None = None,
        planning: bool = False,
        precomputed: Mapping[str, Any] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.graph, self.modules, self.device = graph, modules, device
        self.after_stage, self.before_stage = after_stage, before_stage
        self._parts = parts if parts is not None else {part.name: build_part(part, graph) for part in graph.parts.values()}
        self._meta_modules = (
            meta_modules
            if meta_modules is not None
            else {name: meta_module(c, graph.trust) for name, c in graph.components.items()}
        )
        self._inputs, self._planning, self.steps = dict(inputs), planning, Steps(journal)
        # Stage outputs that later stages need, by name such as ``encode.embeds``.
        self.named: dict[str, Any] = dict(precomputed or {})
        self._outputs = {name: self.named[str(of)[1:]] for name, of in graph.outputs.items() if str(of)[1:] in self.named}
        self.options = dict(options or {})
        self.todo = [graph.stage(name) for name in order] if order else list(graph.stages)
        self._drop()

    def run(self) -> dict[str, Any]:
        """The graph's outputs, on the host. Raises GraphError when a stage enters a component that it does not list."""
        self.enter()
        idle = {name: module for name, module in self._meta_modules.items() if self.modules.get(name) is not module}
        with CallInterceptor(idle, self.device, self._refuse):
            while self.todo:
                self._stage(self.todo[0])
        return self._outputs

    def leave(self) -> None:
        """Moves the values that later stages need, and the last state of a loop, to the host. If a value cannot be copied any more,
        all are lost.
        """
        self.steps.leave()
        for name in list(self.named):
            try:
                self.named[name] = to_host(self.named[name])
            except RuntimeError:
                self.named.clear()
                return

    @property
    def lost(self) -> list[str]:
        """Values that the remaining stages need, and that are neither stored nor computed by one of them."""
        made = {f"{stage.name}." for stage in self.todo}
        needed = {str(value)[1:] for stage in self.todo for value in stage.references if value.kind == "stage"}
        return sorted(name for name in needed - self.named.keys() if not name.startswith(tuple(made)))

    def enter(self) -> None:
        """Moves the values back to the device; a tensor that occurs twice is copied once."""
        moved: dict[int, torch.Tensor] = {}

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in moved:
                moved[id(tensor)] = tensor.to(self.device)
            return moved[id(tensor)]

        before = dict(self.named)  # keeps the tensors alive, so that their ids stay unique
        for name, value in before.items():
            self.named[name] = walk(value, move)

    def _stage(self, stage: Stage) -> None:
        """Runs ``stage`` and stores its outputs."""
        graph, device = self.graph, self.device
        if self.before_stage is not None:
            self.before_stage(stage.name)
        present = {name: self.modules[name] if name in stage.uses else self._meta_modules[name] for name in graph.components}
        absent = {name: module for name, module in present.items() if name not in stage.uses and self.modules.get(name) is module}
        partial = all(stage.op == "encode_prompt" for stage in graph.stages)
        with CallInterceptor(absent, device, self._refuse), torch.no_grad():
            pipeline = assemble(graph, present, self._parts, device, partial=partial)
            option = self.options.get(stage.name)
            used = {name: module for name, module in present.items() if name in stage.uses}
            with apply_option(option, pipeline, used, device) if option else nullcontext():
                arguments = {key: self._value(value) for key, value in stage.arguments.items()}
                steps = None if self._planning else self.steps
                made = OPS[stage.op](StageContext(stage.name, pipeline, device, self._planning, steps, stage), **arguments)
                del arguments
        self.steps.forget(stage.name)
        if self.after_stage is not None:
            self.after_stage(stage.name, made)
        self.named.update({f"{stage.name}.{output}": value for output, value in made.items()})
        self._outputs.update({n: to_host(self._value(of)) for n, of in graph.outputs.items() if of.name == stage.name})
        self.todo.remove(stage)
        self._drop()

    def _drop(self) -> None:
        """Drops values that no later stage needs, and replaces those by outlines whose numbers no later stage reads."""
        needed = {str(value)[1:] for later in self.todo for value in later.references}
        read = {str(value)[1:] for later in self.todo for value in read_by(later)}
        self.named = {key: value if key in read else outlined(value) for key, value in self.named.items() if key in needed}

    def _refuse(self, component: str, entry: str, *_: object) -> NoReturn:
        """Raises GraphError for a call of a component that the current stage does not list."""
        stage = self.todo[0].name
        raise GraphError(f"stage {stage} calls {component}.{entry} but does not list {component}: add it to stages.{stage}.uses")

    def _value(self, value: Any) -> Any:
        """The value of a stage argument: references resolved, outlines materialized."""
        if isinstance(value, list):
            return [self._value(item) for item in value]
        if not isinstance(value, Reference):
            return value
        if value.kind == "input":
            return opened(self._inputs[value.name])
        return materialized(self.named[f"{value.name}.{value.output}"], self.device)


def run_stages(
    graph: Graph, modules: Mapping[str, nn.Module], device: torch.device, inputs: Mapping[str, Any], **options: Any
) -> dict[str, Any]:
    """The graph's outputs, on the host. Arguments and errors as for `Stages`."""
    return Stages(graph, modules, device, inputs, **options).run()


def to_host(value: Any) -> Any:
    """``value`` with every tensor in it copied to the host."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, Mapping):
        return {key: to_host(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_host(item) for item in value)
    return value
