"""The op `block`: blocks of a modular pipeline, run one after another by their own code on the values that they take by name.

Decides how a stage's values become the blocks' state, and what of it the stage returns.

    with      blocks: which, in order; else all    seed or generator: random numbers begin, or go on where another stage left them
              anything else that the blocks take: inputs of the call, values that other blocks made
    outputs   image, video, audio; generator: the random numbers' state; else a value of the state, by its name there
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphrun.graph.graph import Reference
from graphrun.graph.media import is_media
from graphrun.graph.values import did_you_mean
from graphrun.ops.call import explained, field_in, refuse
from graphrun.ops.diffusion import StageContext, without_pictures
from graphrun.ops.modular import begun, blocks_in, is_modular_class, quietly

GENERATOR = "generator"


def block(context: StageContext, *, blocks: Sequence[str] = (), seed: int | None = None, **arguments: Any) -> dict[str, Any]:
    """The outputs that the graph reads of this stage, by name.

    Raises GraphError at the stage's line where the pipeline is not modular, for blocks that it has not, for what they do not take
    or make, and for what they refuse.
    """
    pipeline, wanted = context.pipeline, context.declared.outputs if context.declared is not None else ("image",)
    if not is_modular_class(type(pipeline)):
        refuse(context, f"{type(pipeline).__name__} has no blocks, as modular pipelines do: use the op call")
    whole = pipeline._blocks
    blocks = [blocks] if isinstance(blocks, str) else blocks
    for name in blocks:
        if name not in whole.sub_blocks:
            refuse(context, f"with.blocks: {type(whole).__name__} has no {name!r}{did_you_mean(name, list(whole.sub_blocks))}")
    declared = context.declared.arguments if context.declared is not None else {}
    handed_on = {name for name, value in declared.items() if isinstance(value, Reference) and value.kind == "stage"} - {GENERATOR}
    given = {name: value for name, value in arguments.items() if value is not None and name not in handed_on}
    given |= _drawing(context, given.get(GENERATOR), seed)
    taken = _taken(whole)
    for name in sorted(arguments.keys() - taken):
        refuse(context, f"with.{name}: {type(whole).__name__} takes no {name!r}{did_you_mean(name, sorted(taken))}")
    if "output_type" in taken and any(name in ("image", "video") for name in wanted):
        given.setdefault("output_type", "pil")
    if context.planning and given.get("output_type") == "pil" and not arguments.get("padding_mask_crop"):
        without_pictures(pipeline)
    state = begun(pipeline, given, {name: arguments[name] for name in handed_on})
    with explained(context), quietly(), torch.no_grad():
        for inner in [whole.sub_blocks[name] for name in blocks] or [whole]:
            _, state = inner(pipeline, state)
    return {name: _output(context, state, name) for name in wanted}


def _taken(blocks: Any) -> set[str]:
    return {parameter.name for inner in blocks_in(blocks) for parameter in inner.inputs if parameter.name}


def _drawing(context: StageContext, handed: torch.Tensor | None, seed: int | None) -> Mapping[str, Any]:
    """The generator of the blocks, on the CPU: as another stage left it, else from ``seed``."""
    whole = context.pipeline._blocks
    if GENERATOR not in _taken(whole):
        if seed is not None:
            refuse(context, f"with.seed: {type(whole).__name__} takes no generator, so it has no seed: leave it out")
        return {}
    generator = torch.Generator("cpu")
    return {GENERATOR: generator.manual_seed(seed or 0) if handed is None else generator.set_state(handed.cpu())}


def _output(context: StageContext, state: Any, name: str) -> Any:
    if name == GENERATOR:
        return state.values[GENERATOR].get_state()
    if is_media(name):
        return field_in(context, state.values, name)
    if name not in state.values:
        refuse(context, f"its blocks make no {name}{did_you_mean(name, sorted(state.values))}")
    return state.values[name]
