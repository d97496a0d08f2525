"""Runs the stages of a graph in order, each on a pipeline of its own.

Knows nothing of memory: to act when a component is called, enter a `CallInterceptor` around the
modules.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, InitVar, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from graphrun.errors import GraphError, GraphrunError, StageError
from graphrun.graph.graph import Graph, Reference, Stage
from graphrun.graph.media import opened
from graphrun.graph.order import read_by
from graphrun.modules.classes import resolve_function
from graphrun.modules.interceptor import CallInterceptor
from graphrun.modules.trees import walk
from graphrun.ops.block import block
from graphrun.ops.call import call
from graphrun.ops.depth import depth
from graphrun.ops.diffusion import StageContext, decode, denoise, encode_prompt
from graphrun.ops.function import call_function
from graphrun.ops.outlines import materialized, outlined
from graphrun.ops.pipeline import assemble
from graphrun.ops.stage_options import apply_option
from graphrun.ops.steps import Journal, Steps
from graphrun.reading import panics_as_errors

OPS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "encode_prompt": encode_prompt,
    "denoise": denoise,
    "decode": decode,
    "call": call,
    "block": block,
}
# These need no pipeline and run as functions of trusted packages do, with components and parts by
# name.
FUNCTIONS: Mapping[str, Callable[..., Mapping[str, Any]]] = {"depth": depth}

Observer = Callable[[str, Mapping[str, Any]], None]
Before = Callable[[str], None]


@dataclass
class Stages:
    """The stages of a graph in execution: `run` continues with the first that is not done.

    ``inputs``: resolved input values. ``modules``: every component that a stage uses.
    ``meta_modules``: of all components. ``order``: stage names, instead of the graph's order.
    ``options``: stage -> run option (`graphrun.ops.stage_options`). ``before_stage(stage)`` is
    called before a stage's arguments are looked up, ``after_stage(stage, outputs)`` with its
    outputs on the device. ``precomputed``: values of stages that are not run, by name such as
    ``encode.embeds``, on the device from the start. ``inputs_of``: by stage, in place of
    ``inputs``; with it only these stages run, and the others of the graph are ``left_out``.
    ``outlines_of``: by stage, outlines of values that it reads in place of what another stage of
    the graph makes now. ``journal`` saves the states of denoising loops; ``steps`` has the latest.
    ``planning``: work that costs host time only is skipped.

    A value is dropped after its last consumer, and replaced by an outline (`graphrun.ops.outlines`)
    after the last consumer that reads its numbers.
    """

    graph: Graph
    modules: Mapping[str, nn.Module]
    device: torch.device
    inputs: Mapping[str, Any]
    parts: Mapping[str, Any]
    meta_modules: Mapping[str, nn.Module]
    _: KW_ONLY
    order: InitVar[Sequence[str]] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    inputs_of: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    outlines_of: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    precomputed: InitVar[Mapping[str, Any] | None] = None
    journal: InitVar[Journal | None] = None
    planning: bool = False
    before_stage: Before | None = None
    after_stage: Observer | None = None

    def __post_init__(
        self, order: Sequence[str], precomputed: Mapping[str, Any] | None, journal: Journal | None
    ) -> None:
        self.steps = Steps(journal)
        # Stage outputs that later stages need, by name such as ``encode.embeds``.
        self.named: dict[str, Any] = dict(precomputed or {})
        self._outputs = {
            name: self.named[str(of)[1:]]
            for name, of in self.graph.outputs.items()
            if str(of)[1:] in self.named
        }
        every = order or [stage.name for stage in self.graph.stages]
        self.left_out = frozenset(
            name for name in every if self.inputs_of and name not in self.inputs_of
        )
        self.todo = [self.graph.stage(name) for name in every if name not in self.left_out]
        self._drop()

    def run(self) -> dict[str, Any]:
        """The graph's outputs, on the host. Raises GraphError when a stage enters a component that
        it does not list."""
        self.enter()
        while self.todo:
            self._stage(self.todo[0])
        return self._outputs

    def leave(self) -> None:
        """Moves the values that later stages need, and the last state of a loop, to the host. If a
        value cannot be copied any more, all are lost.
        """
        self.steps.leave()
        try:
            self.named = walk(self.named, torch.Tensor.cpu)
        except RuntimeError:
            self.named.clear()

    @property
    def lost(self) -> list[str]:
        """Values that the remaining stages need, and that are neither stored nor computed by one of
        them."""
        made = {f"{stage.name}." for stage in self.todo}
        needed = {
            str(value)[1:]
            for stage in self.todo
            for value in stage.references
            if value.kind == "stage"
        }
        needed -= {name for found in self.outlines_of.values() for name in found}
        return sorted(
            name for name in needed - self.named.keys() if not name.startswith(tuple(made))
        )

    def enter(self) -> None:
        """Moves the values back to the device; a tensor that occurs twice is copied once."""
        moved: dict[int, torch.Tensor] = {}

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in moved:
                moved[id(tensor)] = tensor.to(self.device)
            return moved[id(tensor)]

        before = self.named  # keeps the tensors alive, so that their ids stay unique
        self.named = walk(before, move)

    def _stage(self, stage: Stage) -> None:
        """Runs ``stage`` and stores its outputs."""
        graph, device = self.graph, self.device
        if self.before_stage is not None:
            self.before_stage(stage.name)
        used = {name: self.modules[name] for name in graph.components if name in stage.uses}
        absent = {name: module for name, module in self.meta_modules.items() if name not in used}
        partial = all(stage.op == "encode_prompt" for stage in graph.stages)
        arguments = {key: self._value(value) for key, value in stage.arguments.items()}
        own = (
            resolve_function(stage.op, graph.trust, stage.where)
            if stage.operation.own
            else FUNCTIONS.get(stage.op)
        )
        called = graph.pipeline_called(stage.pipeline)
        failing = _typed_errors(
            stage, stage.op if own else called.class_path.rpartition(".")[2], _plain(arguments), own
        )
        with failing, CallInterceptor(absent, device, self._refuse), torch.no_grad():
            if own is not None:
                made = call_function(own, stage, arguments, used, self.parts, device)
            else:
                pipeline = assemble(
                    graph, {**absent, **used}, self.parts, device, called, partial=partial
                )
                option = self.options.get(stage.name)
                with apply_option(option, pipeline, used, device) if option else nullcontext():
                    pictures = not self.planning or any(
                        stage.name == of.name for later in self.todo for of in later.references
                    )
                    context = StageContext(
                        stage, pipeline, device, None if self.planning else self.steps, pictures
                    )
                    made = OPS[stage.op](context, **arguments)
        del arguments
        self.steps.forget(stage.name)
        if self.after_stage is not None:
            self.after_stage(stage.name, made)
        self.named.update({f"{stage.name}.{output}": value for output, value in made.items()})
        outputs = {
            name: self._value(of) for name, of in graph.outputs.items() if of.name == stage.name
        }
        self._outputs |= walk(outputs, torch.Tensor.cpu)
        self.todo.remove(stage)
        self._drop()

    def _drop(self) -> None:
        """Drops values that no later stage needs, and replaces those by outlines whose numbers no
        later stage reads."""
        needed = {str(value)[1:] for later in self.todo for value in later.references}
        read = {str(value)[1:] for later in self.todo for value in read_by(later)}
        self.named = {
            key: value if key in read else outlined(value)
            for key, value in self.named.items()
            if key in needed
        }

    def _refuse(self, component: str, entry: str, *_: object) -> NoReturn:
        """Raises GraphError for a call of a component that the current stage does not list."""
        stage = self.todo[0].name
        raise GraphError(
            f"stage {stage} calls {component}.{entry} but does not list {component}: add it to stages.{stage}.uses"
        )

    def _value(self, value: Any) -> Any:
        """The value of a stage argument: references resolved, outlines materialized."""
        if isinstance(value, list):
            return [self._value(item) for item in value]
        if not isinstance(value, Reference):
            return value
        if value.kind == "input":
            given = opened(self.inputs_of.get(self.todo[0].name, self.inputs)[value.name])
            declared = self.graph.inputs.get(value.name)  # a trial of an import declares none
            if declared is not None and declared.type == "tensor" and isinstance(given, np.ndarray):
                return torch.from_numpy(given)
            return (
                _sound_as_tensor(given) if declared is None or declared.type == "audio" else given
            )
        found = {**self.named, **self.outlines_of.get(self.todo[0].name, {})}
        return materialized(found[f"{value.name}.{value.output}"], self.device)


def _sound_as_tensor(value: Any) -> Any:
    """Samples [channels samples] as the tensor [1 channels samples] that pipelines take; any other
    value unchanged."""
    is_sound = isinstance(value, np.ndarray) and value.ndim == 2 and value.dtype == np.float32
    return torch.from_numpy(value)[None] if is_sound else value


def _plain(arguments: Mapping[str, Any]) -> str:
    """The numbers and texts among ``arguments``, for an error message."""
    return ", ".join(
        f"{name}={str(value)[:60]}"
        for name, value in arguments.items()
        if isinstance(value, str | int | float)
    )


@contextmanager
def _typed_errors(
    stage: Stage, runs: str, inputs: str, own: Callable[..., Any] | None
) -> Iterator[None]:
    """Turns every error of what the stage ``runs`` into a StageError at the stage, with its
    ``inputs`` and where it was raised: in the file of the function ``own``, where there is one.
    """
    try:
        with panics_as_errors():
            yield
    except GraphrunError:
        raise
    except Exception as error:
        frames, text = traceback.extract_tb(error.__traceback__), " ".join(str(error).split())
        file = inspect.getsourcefile(own) if own is not None else None
        last = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
        what = f"{runs} fails: {type(error).__name__}: {text[:600]} ({Path(last.filename).name}:{last.lineno})"
        raise StageError(
            f"stages.{stage.name}: {what}; its inputs are {inputs or 'tensors'}", stage.where
        ) from error
