"""Assembles a diffusers pipeline for one stage: the components that the stage uses, and meta
modules of the others.

A meta module has the class and config of the real component and no weights. The pipeline's own code
reads sizes from it; with ``None`` in its place diffusers assumes a VAE scale factor of 8 and
computes wrong shapes. Calling a meta module is an error.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from graphrun.errors import GraphError
from graphrun.graph.graph import Graph, Pipeline, Reference
from graphrun.modules.classes import pipeline_class
from graphrun.ops.modular import assemble_blocks, fix_device, fresh, is_modular_class


def assemble(
    graph: Graph,
    modules: Mapping[str, Any],
    parts: Mapping[str, Any],
    device: torch.device,
    called: Pipeline | None = None,
    *,
    partial: bool = False,
) -> Any:
    """The pipeline of ``graph`` (or ``called``, a further one) over ``modules`` and ``parts``,
    computing on ``device`` wherever its modules' parameters are.

    Schedulers and guiders are created again from their configs, so that no state passes between
    stages. Raises GraphError when the pipeline's class needs something that the graph does not
    have, unless ``partial``: encoding a prompt needs no VAE or transformer, nor their sizes.
    """
    from diffusers import DiffusionPipeline

    own = called or graph.pipeline_called("")
    kind = pipeline_class(own, graph.trust)
    things, modules, parts = (modules, parts), own.named(modules), own.named(parts)
    if own.program:
        held = {
            name: graph.pipelines[text[1:]]
            for name, text in own.config.items()
            if str(text).startswith("$")
        }
        made = {name: assemble(graph, *things, device, of) for name, of in held.items()}
        return _program(
            kind,
            {
                **modules,
                **{name: fresh(part) for name, part in parts.items()},
                **own.config,
                **made,
            },
            device,
        )
    if is_modular_class(kind):
        return assemble_blocks(graph, own, kind, modules, parts, device)
    arguments: dict[str, Any] = {
        name: [modules[item[1:]] if str(item).startswith("$") else item for item in value]
        if isinstance(value, list)
        else value
        for name, value in own.config.items()
    }
    missing = []
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
            arguments[name] = fresh(parts[name])
        elif parameter.default is parameter.empty:
            arguments[name] = None
            if name not in getattr(kind, "_optional_components", ()):
                missing.append(name)
    if missing and not partial:
        raise GraphError(
            f"{own.class_path} needs {', '.join(missing)}: add them under components: or parts:",
            str(graph.path or ""),
        )
    pipeline = kind(**arguments)
    # such as a prior and a decoder
    inner = (value for value in vars(pipeline).values() if isinstance(value, DiffusionPipeline))
    for owner in (pipeline, *inner):
        owner.set_progress_bar_config(disable=True)
        fix_device(owner, device)
    return pipeline


def _program(kind: type[Any], attributes: Mapping[str, Any], device: torch.device) -> Any:
    """An object of ``kind``, no pipeline of diffusers, with these ``attributes``. Its ``__init__``,
    which would load files, is not run."""
    program: Any = object.__new__(kind)
    if isinstance(program, nn.Module):
        nn.Module.__init__(program)
        program.eval()
    for name, value in attributes.items():
        setattr(program, name, value)
    fix_device(program, device)
    return program


def known_arguments(function: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``arguments`` that ``function`` has a parameter for and that are not None."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in known and value is not None}


def without_steps(scheduler: Any) -> Any:
    """A scheduler like ``scheduler`` without steps: a pipeline that runs it goes straight to its
    tail, the decoding.

    Zero inference steps would not work: SDXL divides by their number. ``init_noise_sigma`` is 1, so
    latents are used as they are.
    """
    kind = type(scheduler)

    @functools.wraps(kind.set_timesteps)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.set_timesteps(self, *args, **kwargs)
        self.timesteps = self.timesteps[:0]

    return changed_scheduler(scheduler, set_timesteps=set_timesteps, init_noise_sigma=1.0)


def changed_scheduler(scheduler: Any, **members: Any) -> Any:
    """A new scheduler with the configuration of ``scheduler``, and with ``members`` in place of
    those of its class."""
    kind = type(scheduler)
    made: Any = type(kind.__name__, (kind,), {"__module__": kind.__module__, **members})
    return made.from_config(scheduler.config)


def frames_per_second(graph: Graph, inputs: Mapping[str, Any]) -> float | None:
    """The frame rate of ``graph``'s videos: its own ``fps``, else the value a stage passes to its
    pipeline, else the pipeline's default. None without any.
    """
    if graph.fps is not None:
        return graph.fps
    names = ("fps", "frame_rate")
    for value in (
        stage.arguments[name] for stage in graph.stages for name in names if name in stage.arguments
    ):
        found = (
            inputs.get(value.name, graph.inputs[value.name].default)
            if isinstance(value, Reference)
            else value
        )
        return float(found) if found else None
    own = graph.pipeline_called("")
    known = (
        {}
        if own.program
        else inspect.signature(pipeline_class(own, graph.trust).__call__).parameters
    )
    defaults = (known[name].default for name in names if name in known)
    return next(
        (
            float(default)
            for default in defaults
            if isinstance(default, (int, float)) and default > 0
        ),
        None,
    )
