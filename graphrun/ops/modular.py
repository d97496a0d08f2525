"""Assembly of diffusers' modular pipelines for one stage, and the state of their blocks.

FluxAutoBlocks   text_encoder | vae_encoder | denoise | decode    top-level blocks: stages are
                                                                  split between them
state            prompt, prompt_embeds, image_latents, latents,   values by name, some in groups
                 images
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from graphrun.errors import GraphError
from graphrun.graph.graph import Graph
from graphrun.graph.parts import Pipeline
from graphrun.graph.values import did_you_mean
from graphrun.modules.classes import resolve_class

# key of a modular pipeline's `pipeline_config`: the class of its blocks, if not the default
BLOCKS = "blocks"
# loggers that repeat raised errors as tracebacks, and print a message for each new guider
_NOISY_LOGGERS = ("diffusers.modular_pipelines.modular_pipeline", "diffusers.guiders.guider_utils")


def is_modular_class(kind: type[Any]) -> bool:
    """Return whether ``kind`` is a modular pipeline class (not a `DiffusionPipeline`)."""
    from diffusers import ModularPipeline

    return issubclass(kind, ModularPipeline)


def blocks_in(block: Any) -> Iterator[Any]:
    """Yield ``block`` and the blocks in it, at any depth."""
    yield block
    for inner in block.sub_blocks.values():
        yield from blocks_in(inner)


def assemble_blocks(
    graph: Graph,
    description: Pipeline,
    kind: type[Any],
    modules: Mapping[str, Any],
    parts: Mapping[str, Any],
    device: torch.device,
) -> Any:
    """Return the modular pipeline ``description`` of ``graph``, with ``device`` as its device.

    Parts with state (schedulers, guiders) are created again from their configuration. Components
    that are missing in the graph are None or the blocks' defaults. Raises GraphError for
    components, parts and settings that the blocks do not have.
    """
    graph_path = str(graph.path or "")
    settings = dict(description.config)
    blocks = settings.pop(BLOCKS, None)
    with silence_diffusers():
        pipeline = kind(
            blocks=resolve_class(str(blocks), graph.trust, description.file_line, "blocks")()
            if blocks is not None
            else None
        )
    expected = list(pipeline._component_specs)
    if unknown := sorted((modules.keys() | parts.keys()) - set(expected)):
        raise GraphError(
            f"{type(pipeline._blocks).__name__} do not take "
            f"{unknown[0]}{did_you_mean(unknown[0], expected)}",
            graph_path,
        )
    if unknown := sorted(settings.keys() - pipeline._config_specs.keys()):
        setting_names = [BLOCKS, *pipeline._config_specs]
        raise GraphError(
            f"pipeline_config: {kind.__name__} has no "
            f"{unknown[0]}{did_you_mean(unknown[0], setting_names)}",
            graph_path,
        )
    pipeline.update_components(**settings)
    with silence_diffusers():
        for name, value in {**parts, **modules}.items():
            setattr(pipeline, name, value if name in modules else recreate(value))
    for block in blocks_in(pipeline._blocks):
        if hasattr(block, "set_progress_bar_config"):
            block.set_progress_bar_config(disable=True)
    fix_device(pipeline, device)
    return pipeline


def fix_device(pipeline: Any, device: torch.device) -> None:
    """Give ``pipeline`` a subclass whose device is ``device``, wherever its parameters are."""
    kind, device_property = type(pipeline), property(lambda _: device)
    pipeline.__class__ = type(
        kind.__name__,
        (kind,),
        {
            "__module__": kind.__module__,
            "_execution_device": device_property,
            "device": device_property,
        },
    )


def recreate(part: Any) -> Any:
    """Return a new, stateless part with the configuration of ``part``; without one, ``part``
    itself."""
    return (
        type(part).from_config(part.config)
        if hasattr(part, "from_config") and hasattr(part, "config")
        else part
    )


def initial_state(pipeline: Any, inputs: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """Return the initial `PipelineState` for blocks of ``pipeline``.

    It has the inputs as its `__call__` sets them, with ``inputs`` in place of defaults, and
    ``values`` that earlier blocks computed, in the groups (`kwargs_type`) of those blocks.
    """
    from diffusers.modular_pipelines import PipelineState

    state = PipelineState()
    for parameter in pipeline._blocks.inputs:
        if parameter.name in inputs:
            state.set(parameter.name, inputs[parameter.name], parameter.kwargs_type)
        elif parameter.name is not None and parameter.name not in state.values:
            state.set(parameter.name, parameter.default, parameter.kwargs_type)
    groups: dict[str, dict[str, None]] = {}
    for block in blocks_in(pipeline._blocks):
        for parameter in (*block.inputs, *block.intermediate_outputs):
            if parameter.name and parameter.kwargs_type:
                groups.setdefault(parameter.name, {})[parameter.kwargs_type] = None
    for name, value in values.items():
        state.set(name, value)
        for group in groups.get(name, ()):
            if name not in state.kwargs_mapping.get(group, ()):
                state.set(name, value, group)
    return state


@contextmanager
def silence_diffusers() -> Iterator[None]:
    """Silence log messages of diffusers' modular pipelines that repeat their exceptions."""
    loggers = [logging.getLogger(name) for name in _NOISY_LOGGERS]
    disabled_flags = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, disabled_flags, strict=True):
            logger.disabled = disabled
