"""A diffusers pipeline put together for one stage: the components the stage uses, and meta modules of the others.

A meta module has the class and config of the real component and no weights, so the pipeline's own code reads the right sizes from it
(with ``None`` in its place diffusers falls back to a VAE scale factor of 8 and computes wrong shapes); entering it is an error.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from graphrun.errors import GraphError
from graphrun.graph.graph import Graph, Reference
from graphrun.modules.build import resolve_class
from graphrun.ops.modular import assemble_blocks, is_modular_class


def assemble(
    graph: Graph, modules: Mapping[str, Any], parts: Mapping[str, Any], device: torch.device, *, partial: bool = False
) -> Any:
    """The graph's pipeline over ``modules`` and ``parts``, computing on ``device`` whatever its modules' parameters say.

    Schedulers are made anew from their configs, so that their state belongs to the stage and goes with it.
    Raises GraphError when the pipeline's class needs something that the graph does not have, unless it is ``partial``: encoding a
    prompt needs no VAE and no transformer, and nothing of its sizes is read from them.
    """
    kind = resolve_class(graph.pipeline, graph.trust, graph.where, "pipeline")
    if is_modular_class(kind):
        return assemble_blocks(graph, kind, modules, parts, device)
    arguments: dict[str, Any] = {
        name: [modules[of[1:]] if str(of).startswith("$") else of for of in value] if isinstance(value, list) else value
        for name, value in graph.pipeline_config.items()
    }
    missing = []
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if name == "self" or name in arguments or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in modules:
            arguments[name] = modules[name]
        elif name in parts:
            arguments[name] = _fresh(parts[name])
        elif parameter.default is parameter.empty:
            arguments[name] = None
            if name not in getattr(kind, "_optional_components", ()):
                missing.append(name)
    if missing and not partial:
        raise GraphError(
            f"{graph.pipeline} needs {', '.join(missing)}: add them under components: or parts:", str(graph.path or "")
        )
    pipeline = kind(**arguments)
    for owner in _with_inner(pipeline):
        owner.set_progress_bar_config(disable=True)
        own, here = type(owner), property(lambda _: device)
        owner.__class__ = type(own.__name__, (own,), {"__module__": own.__module__, "_execution_device": here, "device": here})
    return pipeline


def _with_inner(pipeline: Any) -> list[Any]:
    """``pipeline`` and those that it is combined of: a prior and a decoder."""
    from diffusers import DiffusionPipeline

    return [pipeline, *(value for value in vars(pipeline).values() if isinstance(value, DiffusionPipeline))]


def accepted(function: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``arguments`` that ``function`` has a parameter for and that are not None."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in known and value is not None}


def finished(scheduler: Any) -> Any:
    """A scheduler like ``scheduler`` with no steps left: a pipeline that runs it goes straight to its tail, the decoding.

    Zero inference steps would not do: SDXL divides by their number. Latents are handed in as they are (``init_noise_sigma`` is 1).
    """
    kind = type(scheduler)

    @functools.wraps(kind.set_timesteps)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.set_timesteps(self, *args, **kwargs)
        self.timesteps = self.timesteps[:0]

    members = {"__module__": kind.__module__, "set_timesteps": set_timesteps, "init_noise_sigma": 1.0}
    ended: Any = type(kind.__name__, (kind,), members)
    return ended.from_config(scheduler.config)


def frames_per_second(graph: Graph, inputs: Mapping[str, Any]) -> float | None:
    """How fast videos of ``graph`` are: as it says itself, else as a stage passes it to its pipeline, else that one's default."""
    if graph.fps is not None:
        return graph.fps
    names = ("fps", "frame_rate")
    for value in (stage.arguments[name] for stage in graph.stages for name in names if name in stage.arguments):
        found = inputs.get(value.name, graph.inputs[value.name].default) if isinstance(value, Reference) else value
        return float(found) if found else None
    known = inspect.signature(resolve_class(graph.pipeline, graph.trust, graph.where, "pipeline").__call__).parameters
    defaults = (known[name].default for name in names if name in known)
    return next((float(default) for default in defaults if isinstance(default, (int, float)) and default > 0), None)


def _fresh(part: Any) -> Any:
    return type(part).from_config(part.config) if hasattr(part, "set_timesteps") else part
