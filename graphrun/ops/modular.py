"""diffusers' modular pipelines put together for one stage, and the state that their blocks hand on.

Decides what a pipeline of blocks is made of, and what its state holds when a stage begins. Which blocks run is the op's affair.

    FluxAutoBlocks   text_encoder | vae_encoder | denoise | decode          top-level blocks: what a graph is cut at
    state            prompt ... prompt_embeds, image_latents ... latents, images      values by name, some of them of a group
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from graphrun.errors import GraphError
from graphrun.graph.graph import Graph
from graphrun.graph.values import did_you_mean
from graphrun.modules.classes import resolve_class

# Of a modular pipeline's `pipeline_config`: the class of its blocks, where it is not the pipeline's own.
BLOCKS = "blocks"
# What prints tracebacks of errors that are raised as well, and a remark whenever a guider is made.
_TALKING = ("diffusers.modular_pipelines.modular_pipeline", "diffusers.guiders.guider_utils")


def is_modular_class(kind: type[Any]) -> bool:
    """Whether ``kind`` is one of diffusers' modular pipelines, which share no class with the others."""
    from diffusers import ModularPipeline

    return issubclass(kind, ModularPipeline)


def blocks_in(block: Any) -> Iterator[Any]:
    """``block`` and the blocks in it, at any depth."""
    yield block
    for inner in block.sub_blocks.values():
        yield from blocks_in(inner)


def assemble_blocks(
    graph: Graph, kind: type[Any], modules: Mapping[str, Any], parts: Mapping[str, Any], device: torch.device
) -> Any:
    """The graph's modular pipeline over ``modules`` and ``parts``, computing on ``device``.

    What keeps state (schedulers, guiders) is made anew from its configuration. What the blocks expect and the graph does not have
    is None, or what they make themselves. Raises GraphError for what the blocks do not know.
    """
    where = str(graph.path or "")
    settings = dict(graph.pipeline_config)
    own = settings.pop(BLOCKS, None)
    with quietly():
        pipeline = kind(blocks=resolve_class(str(own), graph.trust, graph.where, "blocks")() if own is not None else None)
    expected = list(pipeline._component_specs)
    if unknown := sorted((modules.keys() | parts.keys()) - set(expected)):
        raise GraphError(f"{type(pipeline._blocks).__name__} take no {unknown[0]}{did_you_mean(unknown[0], expected)}", where)
    if unknown := sorted(settings.keys() - pipeline._config_specs.keys()):
        known = [BLOCKS, *pipeline._config_specs]
        raise GraphError(f"pipeline_config: {kind.__name__} has no {unknown[0]}{did_you_mean(unknown[0], known)}", where)
    pipeline.update_components(**settings)
    with quietly():
        for name, thing in {**parts, **modules}.items():
            setattr(pipeline, name, thing if name in modules else _fresh(thing))
    for block in blocks_in(pipeline._blocks):
        if hasattr(block, "set_progress_bar_config"):
            block.set_progress_bar_config(disable=True)
    here = property(lambda _: device)
    pipeline.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, "_execution_device": here, "device": here})
    return pipeline


def _fresh(part: Any) -> Any:
    """A part like ``part`` that no other stage has changed; tokenizers keep nothing."""
    return type(part).from_config(part.config) if hasattr(part, "from_config") and hasattr(part, "config") else part


def begun(pipeline: Any, given: Mapping[str, Any], made: Mapping[str, Any]) -> Any:
    """The state with which blocks of ``pipeline`` begin: inputs of the call as its own `__call__` puts them there, ``given`` ones
    in place of defaults, and what earlier blocks have ``made``, in the groups (`kwargs_type`) that these put it in."""
    from diffusers.modular_pipelines import PipelineState

    state = PipelineState()
    for parameter in pipeline._blocks.inputs:
        if parameter.name in given:
            state.set(parameter.name, given[parameter.name], parameter.kwargs_type)
        elif parameter.name is not None and parameter.name not in state.values:
            state.set(parameter.name, parameter.default, parameter.kwargs_type)
    groups: dict[str, dict[str, None]] = {}
    for block in blocks_in(pipeline._blocks):
        for parameter in (*block.inputs, *block.intermediate_outputs):
            if parameter.name and parameter.kwargs_type:
                groups.setdefault(parameter.name, {})[parameter.kwargs_type] = None
    for name, value in made.items():
        state.set(name, value)
        for group in groups.get(name, ()):
            if name not in state.kwargs_mapping.get(group, ()):
                state.set(name, value, group)
    return state


@contextmanager
def quietly() -> Iterator[None]:
    """A context in which diffusers' modular pipelines do not talk beside their errors."""
    loggers = [logging.getLogger(name) for name in _TALKING]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
