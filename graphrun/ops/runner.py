"""Run the stages of a graph in order, each on its own pipeline. Memory is managed elsewhere. To act
on calls into components, enter a `CallInterceptor` around the modules."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, InitVar, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from graphrun.errors import GraphError, GraphrunError, StageError
from graphrun.graph.graph import Graph
from graphrun.graph.media import opened
from graphrun.graph.order import read_by
from graphrun.graph.parts import Reference, Stage
from graphrun.modules.classes import resolve_function
from graphrun.modules.interceptor import CallInterceptor, ReadHandler
from graphrun.modules.trees import walk
from graphrun.ops.block import block
from graphrun.ops.call import call
from graphrun.ops.depth import depth
from graphrun.ops.diffusion import StageContext, decode, denoise, encode_prompt
from graphrun.ops.function import call_function
from graphrun.ops.outlines import materialize_outlines, outline_tensors
from graphrun.ops.pipeline import assemble
from graphrun.ops.stage_options import apply_option
from graphrun.ops.steps import StepJournal, Steps
from graphrun.reading import panics_as_errors

OPS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "encode_prompt": encode_prompt,
    "denoise": denoise,
    "decode": decode,
    "call": call,
    "block": block,
}
# ops without a pipeline; they run like functions of trusted packages
FUNCTIONS: Mapping[str, Callable[..., Mapping[str, Any]]] = {"depth": depth}

Observer = Callable[[str, Mapping[str, Any]], None]
Before = Callable[[str], None]


def in_order(graph: Graph, names: Sequence[str], order: Iterable[str]) -> list[str]:
    """Return ``names`` of stages, which are in the graph's order, in ``order``. Stages that it
    leaves out, since they call no component, run where they are first needed, or last."""
    stages = frozenset(names)
    ordered: dict[str, None] = {}
    pending = [*reversed(names), *reversed([*order])]  # the next one is last
    while pending:
        producers = [
            producer
            for producer in graph.producers(pending[-1])
            if producer in stages and producer not in ordered
        ]
        if producers:
            pending.extend(reversed(producers))
        else:
            ordered[pending.pop()] = None
    return list(ordered)


@dataclass
class Stages:
    """The stages of a graph in execution: `run` continues with the first remaining stage.

    ``inputs``: resolved values. ``modules``: all components that stages use. ``meta_modules``: of
    all components. ``order``: stage names, in place of the graph's order. ``options``: by stage,
    the run option (`graphrun.ops.stage_options`). ``before_stage(stage)`` is called before a
    stage's arguments are looked up, ``after_stage(stage, outputs)`` with its outputs on the device.

    ``precomputed``: values of stages that do not run, on the device from the start, by name such as
    ``encode.embeds``. ``inputs_of``: by stage, replaces ``inputs``; then only these stages run, and
    the others are ``excluded_stages``. ``outlines_of``: by stage, outlines that replace values of
    other stages. ``journal``: saves the states of denoising loops; ``steps`` has the latest one.
    ``planning``: skip work that only costs host time. ``reads``: returns the values of weights of
    components that the current stage does not list, for code that reads them.

    A value is dropped after its last consumer. After the last consumer that reads its numbers, it
    is replaced by an outline (`graphrun.ops.outlines`).
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
    journal: InitVar[StepJournal | None] = None
    planning: bool = False
    reads: ReadHandler | None = None
    before_stage: Before | None = None
    after_stage: Observer | None = None

    def __post_init__(
        self,
        order: Sequence[str],
        precomputed: Mapping[str, Any] | None,
        journal: StepJournal | None,
    ) -> None:
        self.steps = Steps(journal)
        # stage outputs that later stages need, by name such as ``encode.embeds``
        self.values: dict[str, Any] = dict(precomputed or {})
        self._outputs = {
            name: self.values[str(reference)[1:]]
            for name, reference in self.graph.outputs.items()
            if str(reference)[1:] in self.values
        }
        stage_names = in_order(self.graph, [stage.name for stage in self.graph.stages], order)
        self.excluded_stages = frozenset(
            name for name in stage_names if self.inputs_of and name not in self.inputs_of
        )
        self.remaining_stages = [
            self.graph.stage(name) for name in stage_names if name not in self.excluded_stages
        ]
        self._drop()

    def run(self) -> dict[str, Any]:
        """Run the remaining stages, and return the graph's outputs on the host. Raises GraphError
        if a stage calls a component that it does not list."""
        self.enter()
        while self.remaining_stages:
            self._stage(self.remaining_stages[0])
        return self._outputs

    def move_to_host(self) -> None:
        """Move the values that later stages need, and the last state of a loop, to the host. If a
        value can no longer be copied, all values are lost."""
        self.steps.move_to_host()
        try:
            self.values = walk(self.values, torch.Tensor.cpu)
        except RuntimeError:
            self.values.clear()

    @property
    def lost_values(self) -> list[str]:
        """Values that the remaining stages need but nobody has or will compute."""
        output_prefixes = {f"{stage.name}." for stage in self.remaining_stages}
        value_names = {
            str(value)[1:]
            for stage in self.remaining_stages
            for value in stage.references
            if value.kind == "stage"
        }
        value_names -= {name for outlines in self.outlines_of.values() for name in outlines}
        return sorted(
            name
            for name in value_names - self.values.keys()
            if not name.startswith(tuple(output_prefixes))
        )

    def enter(self) -> None:
        """Move the values back to the device; a tensor that occurs twice is copied once."""
        device_copies: dict[int, torch.Tensor] = {}

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in device_copies:
                device_copies[id(tensor)] = tensor.to(self.device)
            return device_copies[id(tensor)]

        host_values = self.values  # keeps the tensors alive, so that their ids stay unique
        self.values = walk(host_values, move)

    def _stage(self, stage: Stage) -> None:
        graph, device = self.graph, self.device
        if self.before_stage is not None:
            self.before_stage(stage.name)
        components = {name: self.modules[name] for name in graph.components if name in stage.uses}
        absent_modules = {
            name: module for name, module in self.meta_modules.items() if name not in components
        }
        partial = all(stage.op == "encode_prompt" for stage in graph.stages)
        arguments = {key: self._value(value) for key, value in stage.arguments.items()}
        function = (
            resolve_function(stage.op, graph.trust, stage.file_line)
            if stage.operation.is_function
            else FUNCTIONS.get(stage.op)
        )
        pipeline_description = graph.pipeline_called(stage.pipeline)
        error_context = _typed_errors(
            stage,
            stage.op if function else pipeline_description.class_path.rpartition(".")[2],
            _plain(arguments),
            function,
        )
        interceptor = CallInterceptor(absent_modules, device, self._refuse, reads=self.reads)
        with error_context, interceptor, torch.no_grad():
            if function is not None:
                stage_outputs = call_function(
                    function, stage, arguments, components, self.parts, device
                )
            else:
                pipeline = assemble(
                    graph,
                    {**absent_modules, **components},
                    self.parts,
                    device,
                    pipeline_description,
                    partial=partial,
                )
                option = self.options.get(stage.name)
                with (
                    apply_option(option, pipeline, components, device) if option else nullcontext()
                ):
                    pictures = not self.planning or any(
                        stage.name == reference.name
                        for later_stage in self.remaining_stages
                        for reference in later_stage.references
                    )
                    context = StageContext(
                        stage, pipeline, device, None if self.planning else self.steps, pictures
                    )
                    stage_outputs = OPS[stage.op](context, **arguments)
        del arguments
        self.steps.forget(stage.name)
        if self.after_stage is not None:
            self.after_stage(stage.name, stage_outputs)
        self.values.update(
            {f"{stage.name}.{output}": value for output, value in stage_outputs.items()}
        )
        outputs = {
            name: self._value(reference)
            for name, reference in graph.outputs.items()
            if reference.name == stage.name
        }
        self._outputs |= walk(outputs, torch.Tensor.cpu)
        self.remaining_stages.remove(stage)
        self._drop()

    def _drop(self) -> None:
        """Drop values that no later stage needs; outline values whose numbers none reads."""
        value_names = {
            str(value)[1:] for stage in self.remaining_stages for value in stage.references
        }
        read_names = {str(value)[1:] for stage in self.remaining_stages for value in read_by(stage)}
        self.values = {
            key: value if key in read_names else outline_tensors(value)
            for key, value in self.values.items()
            if key in value_names
        }

    def _refuse(self, component: str, method: str, *_: object) -> NoReturn:
        """Raise GraphError for a call of a component that the current stage does not list."""
        stage = self.remaining_stages[0].name
        raise GraphError(
            f"stage {stage} calls {component}.{method} but does not list {component}: add it to "
            f"stages.{stage}.uses"
        )

    def _value(self, value: Any) -> Any:
        """Return a stage argument with references resolved and outlines materialized."""
        if isinstance(value, list):
            return [self._value(item) for item in value]
        if not isinstance(value, Reference):
            return value
        if value.kind == "input":
            input_value = opened(
                self.inputs_of.get(self.remaining_stages[0].name, self.inputs)[value.name]
            )
            graph_input = self.graph.inputs.get(value.name)  # None in a trial of an import
            if (
                graph_input is not None
                and graph_input.type == "tensor"
                and isinstance(input_value, np.ndarray)
            ):
                return torch.from_numpy(input_value)
            return (
                _sound_as_tensor(input_value)
                if graph_input is None or graph_input.type == "audio"
                else input_value
            )
        stage_values = {**self.values, **self.outlines_of.get(self.remaining_stages[0].name, {})}
        return materialize_outlines(stage_values[f"{value.name}.{value.output}"], self.device)


def _sound_as_tensor(value: Any) -> Any:
    """Return sound [channels samples] as a tensor [1 channels samples], other values as is."""
    is_sound = isinstance(value, np.ndarray) and value.ndim == 2 and value.dtype == np.float32
    return torch.from_numpy(value)[None] if is_sound else value


def _plain(arguments: Mapping[str, Any]) -> str:
    """Return the numbers and texts among ``arguments``, for an error message."""
    return ", ".join(
        f"{name}={str(value)[:60]}"
        for name, value in arguments.items()
        if isinstance(value, str | int | float)
    )


@contextmanager
def _typed_errors(
    stage: Stage, label: str, inputs: str, function: Callable[..., Any] | None
) -> Iterator[None]:
    """Turn every error within the context into a StageError at the stage.

    ``label``: what the stage runs. ``inputs``: as text. The message names the line that raised the
    error, in the file of ``function`` if there is one.
    """
    try:
        with panics_as_errors():
            yield
    except GraphrunError:
        raise
    except Exception as error:
        frames, text = traceback.extract_tb(error.__traceback__), " ".join(str(error).split())
        file = inspect.getsourcefile(function) if function is not None else None
        last = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
        failure = (
            f"{label} fails: {type(error).__name__}: {text[:600]} "
            f"({Path(last.filename).name}:{last.lineno})"
        )
        raise StageError(
            f"stages.{stage.name}: {failure}; its inputs are {inputs or 'tensors'}", stage.file_line
        ) from error
