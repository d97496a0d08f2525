"""Assembly of a diffusers pipeline for one stage: its components, and meta modules for the others.

A meta module has the class and config of the real component but no weights. The pipeline's own code
reads sizes from it: with ``None``, diffusers would assume a VAE scale factor of 8 and compute wrong
shapes. Calling a meta module is an error.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from graphrun.errors import GraphError
from graphrun.graph.graph import Graph
from graphrun.graph.parts import Pipeline, Reference
from graphrun.modules.classes import pipeline_class
from graphrun.ops.modular import assemble_blocks, fix_device, is_modular_class, recreate


def assemble(
    graph: Graph,
    modules: Mapping[str, Any],
    parts: Mapping[str, Any],
    device: torch.device,
    pipeline_description: Pipeline | None = None,
    *,
    partial: bool = False,
) -> Any:
    """Return the pipeline of ``graph``, or the ``pipeline_description`` in it.

    Its device is ``device``, wherever the parameters are. Schedulers and guiders are created again
    from their configs, so that no state passes between stages. Raises GraphError if a member that
    the pipeline's class needs is missing, unless ``partial``: encoding a prompt needs no VAE or
    transformer.
    """
    from diffusers import DiffusionPipeline

    description = pipeline_description or graph.pipeline_called("")
    kind = pipeline_class(description, graph.trust)
    members, modules, parts = (
        (modules, parts),
        description.by_pipeline_name(modules),
        description.by_pipeline_name(parts),
    )
    if description.program:
        inner_pipelines = {
            name: graph.pipelines[text[1:]]
            for name, text in description.config.items()
            if str(text).startswith("$")
        }
        inner_programs = {
            name: assemble(graph, *members, device, inner)
            for name, inner in inner_pipelines.items()
        }
        return _program(
            kind,
            {
                **modules,
                **{name: recreate(part) for name, part in parts.items()},
                **description.config,
                **inner_programs,
            },
            device,
        )
    if is_modular_class(kind):
        return assemble_blocks(graph, description, kind, modules, parts, device)
    arguments: dict[str, Any] = {
        name: [modules[item[1:]] if str(item).startswith("$") else item for item in value]
        if isinstance(value, list)
        else value
        for name, value in description.config.items()
    }
    missing_names = []
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if (
            name == "self"
            or name in arguments
            or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ):
            continue
        if name in modules:
            arguments[name] = modules[name]
        elif name in parts:
            arguments[name] = recreate(parts[name])
        elif parameter.default is parameter.empty:
            arguments[name] = None
            if name not in getattr(kind, "_optional_components", ()):
                missing_names.append(name)
    if missing_names and not partial:
        raise GraphError(
            f"{description.class_path} needs {', '.join(missing_names)}: add them under "
            "components: or parts:",
            str(graph.path or ""),
        )
    pipeline = kind(**arguments)
    # inner pipelines, such as a prior and a decoder
    inner_owners = (
        value for value in vars(pipeline).values() if isinstance(value, DiffusionPipeline)
    )
    for owner in (pipeline, *inner_owners):
        owner.set_progress_bar_config(disable=True)
        fix_device(owner, device)
    return pipeline


def _program(kind: type[Any], attributes: Mapping[str, Any], device: torch.device) -> Any:
    """Return an object of ``kind``, no diffusers pipeline, with these ``attributes``. Its
    ``__init__``, which would load files, does not run."""
    program: Any = object.__new__(kind)
    if isinstance(program, nn.Module):
        nn.Module.__init__(program)
        program.eval()
    for name, value in attributes.items():
        setattr(program, name, value)
    fix_device(program, device)
    return program


def known_arguments(function: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``arguments`` that are not None and that ``function`` has a parameter for."""
    parameters = inspect.signature(function).parameters
    return {
        name: value for name, value in arguments.items() if name in parameters and value is not None
    }


def without_steps(scheduler: Any) -> Any:
    """Return a copy of ``scheduler`` without steps, with which a pipeline only decodes.

    Zero inference steps would not work: SDXL divides by their number. ``init_noise_sigma`` is 1, so
    latents stay unchanged.
    """
    kind = type(scheduler)

    @functools.wraps(kind.set_timesteps)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.set_timesteps(self, *args, **kwargs)
        self.timesteps = self.timesteps[:0]

    return derive_scheduler(scheduler, set_timesteps=set_timesteps, init_noise_sigma=1.0)


def derive_scheduler(scheduler: Any, **members: Any) -> Any:
    """Return a new scheduler with the configuration of ``scheduler``, overriding ``members``."""
    kind = type(scheduler)
    derived_class: Any = type(kind.__name__, (kind,), {"__module__": kind.__module__, **members})
    return derived_class.from_config(scheduler.config)


def frames_per_second(graph: Graph, inputs: Mapping[str, Any]) -> float | None:
    """Return the frame rate of ``graph``'s videos, or None. It is the graph's ``fps``, the value
    that a stage passes to its pipeline, or the pipeline's default."""
    if graph.fps is not None:
        return graph.fps
    names = ("fps", "frame_rate")
    for value in (
        stage.arguments[name] for stage in graph.stages for name in names if name in stage.arguments
    ):
        rate = (
            inputs.get(value.name, graph.inputs[value.name].default)
            if isinstance(value, Reference)
            else value
        )
        return float(rate) if rate else None
    description = graph.pipeline_called("")
    parameters = (
        {}
        if description.program
        else inspect.signature(pipeline_class(description, graph.trust).__call__).parameters
    )
    defaults = (parameters[name].default for name in names if name in parameters)
    return next(
        (
            float(default)
            for default in defaults
            if isinstance(default, (int, float)) and default > 0
        ),
        None,
    )
