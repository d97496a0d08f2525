"""Assembles diffusers' modular pipelines for one stage, and the state that their blocks pass on.

FluxAutoBlocks   text_encoder | vae_encoder | denoise | decode          top-level blocks: a graph is
split between them state            prompt ... prompt_embeds, image_latents ... latents, images
values by name, some of them in a group
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from graphrun.errors import GraphError
from graphrun.graph.graph import Graph, Pipeline
from graphrun.graph.values import did_you_mean
from graphrun.modules.classes import resolve_class

# Key of a modular pipeline's `pipeline_config`: the class of its blocks, where it is not the
# pipeline's default.
BLOCKS = "blocks"
# Loggers that print tracebacks of errors which are raised as well, and a message for each new
# guider.
_NOISY_LOGGERS = ("diffusers.modular_pipelines.modular_pipeline", "diffusers.guiders.guider_utils")


def is_modular_class(kind: type[Any]) -> bool:
    """Whether ``kind`` is one of diffusers' modular pipelines, which do not inherit from
    `DiffusionPipeline`."""
    from diffusers import ModularPipeline

    return issubclass(kind, ModularPipeline)


def blocks_in(block: Any) -> Iterator[Any]:
    """``block`` and the blocks in it, at any depth."""
    yield block
    for inner in block.sub_blocks.values():
        yield from blocks_in(inner)


def assemble_blocks(
    graph: Graph,
    own: Pipeline,
    kind: type[Any],
    modules: Mapping[str, Any],
    parts: Mapping[str, Any],
    device: torch.device,
) -> Any:
    """The modular pipeline ``own`` of ``graph`` over ``modules`` and ``parts``, computing on
    ``device``.

    Parts with state (schedulers, guiders) are created again from their configuration. Components
    that the blocks expect and the graph does not have are None, or the blocks' defaults. Raises
    GraphError for components, parts and settings that the blocks do not know.
    """
    where = str(graph.path or "")
    settings = dict(own.config)
    blocks = settings.pop(BLOCKS, None)
    with quietly():
        pipeline = kind(
            blocks=resolve_class(str(blocks), graph.trust, own.where, "blocks")()
            if blocks is not None
            else None
        )
    expected = list(pipeline._component_specs)
    if unknown := sorted((modules.keys() | parts.keys()) - set(expected)):
        raise GraphError(
            f"{type(pipeline._blocks).__name__} do not take {unknown[0]}{did_you_mean(unknown[0], expected)}",
            where,
        )
    if unknown := sorted(settings.keys() - pipeline._config_specs.keys()):
        known = [BLOCKS, *pipeline._config_specs]
        raise GraphError(
            f"pipeline_config: {kind.__name__} has no {unknown[0]}{did_you_mean(unknown[0], known)}",
            where,
        )
    pipeline.update_components(**settings)
    with quietly():
        for name, value in {**parts, **modules}.items():
            setattr(pipeline, name, value if name in modules else fresh(value))
    for block in blocks_in(pipeline._blocks):
        if hasattr(block, "set_progress_bar_config"):
            block.set_progress_bar_config(disable=True)
    fix_device(pipeline, device)
    return pipeline


def fix_device(pipeline: Any, device: torch.device) -> None:
    """Gives ``pipeline`` a subclass of its class that computes on ``device``, wherever its modules'
    parameters are."""
    kind, fixed = type(pipeline), property(lambda _: device)
    pipeline.__class__ = type(
        kind.__name__,
        (kind,),
        {"__module__": kind.__module__, "_execution_device": fixed, "device": fixed},
    )


def fresh(part: Any) -> Any:
    """A new part with the configuration of ``part``, without the state of other stages; ``part``
    itself for tokenizers."""
    return (
        type(part).from_config(part.config)
        if hasattr(part, "from_config") and hasattr(part, "config")
        else part
    )


def begun(pipeline: Any, inputs: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """The initial `PipelineState` for blocks of ``pipeline``.

    It has the inputs of the call as its own `__call__` sets them, with ``inputs`` instead of
    defaults, and the ``values`` that earlier blocks computed, in the groups (`kwargs_type`) that
    these blocks put them in.
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
def quietly() -> Iterator[None]:
    """Silences the log messages of diffusers' modular pipelines that repeat what their exceptions
    say."""
    loggers = [logging.getLogger(name) for name in _NOISY_LOGGERS]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
