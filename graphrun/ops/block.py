"""The op `block`: runs blocks of a modular pipeline one after another, with their own code, on
values that they take by name.

with      blocks: which, in order; default all    seed or generator: starts random numbers, or
continues those of another stage
          anything else that the blocks take: inputs of the call, values that other blocks computed
outputs   image, video, audio; generator: the state of the random number generator; else a value of
the blocks' state, by name
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphrun.graph.graph import Reference
from graphrun.graph.ops import MEDIA_KINDS
from graphrun.graph.values import did_you_mean
from graphrun.ops.call import output_field, refuse
from graphrun.ops.diffusion import StageContext, without_pictures
from graphrun.ops.modular import begun, blocks_in, is_modular_class, quietly

GENERATOR = "generator"


def block(
    context: StageContext, *, blocks: Sequence[str] = (), seed: int | None = None, **arguments: Any
) -> dict[str, Any]:
    """The outputs that the graph reads of this stage, by name.

    Raises GraphError at the stage's line where the pipeline is not modular, for unknown blocks,
    arguments or outputs, and for errors of the pipeline's own code.
    """
    pipeline, wanted = context.pipeline, context.stage.outputs
    if not is_modular_class(type(pipeline)):
        refuse(
            context,
            f"{type(pipeline).__name__} is not a modular pipeline, so it has no blocks: use the op call",
        )
    whole = pipeline._blocks
    blocks = [blocks] if isinstance(blocks, str) else blocks
    for name in blocks:
        if name not in whole.sub_blocks:
            refuse(
                context,
                f"with.blocks: {type(whole).__name__} has no {name!r}{did_you_mean(name, list(whole.sub_blocks))}",
            )
    given = context.stage.arguments.items()
    from_stages = {
        name for name, value in given if isinstance(value, Reference) and value.kind == "stage"
    } - {GENERATOR}
    inputs = {
        name: value
        for name, value in arguments.items()
        if value is not None and name not in from_stages
    }
    inputs |= _generator(context, inputs.get(GENERATOR), seed)
    accepted = _input_names(whole)
    for name in sorted(arguments.keys() - accepted):
        refuse(
            context,
            f"with.{name}: {type(whole).__name__} takes no {name!r}{did_you_mean(name, sorted(accepted))}",
        )
    if "output_type" in accepted and any(name in ("image", "video") for name in wanted):
        inputs.setdefault("output_type", "pil")
    if (
        not context.pictures
        and inputs.get("output_type") == "pil"
        and not arguments.get("padding_mask_crop")
    ):
        without_pictures(pipeline)
    state = begun(pipeline, inputs, {name: arguments[name] for name in from_stages})
    with quietly(), torch.no_grad():
        for inner in [whole.sub_blocks[name] for name in blocks] or [whole]:
            _, state = inner(pipeline, state)
    return {name: _output(context, state, name) for name in wanted}


def _input_names(blocks: Any) -> set[str]:
    """The names of all inputs of ``blocks``, at any depth."""
    return {
        parameter.name
        for inner in blocks_in(blocks)
        for parameter in inner.inputs
        if parameter.name
    }


def _generator(
    context: StageContext, state: torch.Tensor | None, seed: int | None
) -> Mapping[str, Any]:
    """The CPU generator for the blocks, by argument name: in ``state``, which another stage
    returned, else from ``seed``. Empty where they take none.
    """
    whole = context.pipeline._blocks
    if GENERATOR not in _input_names(whole):
        if seed is not None:
            refuse(
                context,
                f"with.seed: {type(whole).__name__} takes no generator, so it has no seed: remove it",
            )
        return {}
    generator = torch.Generator("cpu")
    return {
        GENERATOR: generator.manual_seed(seed or 0)
        if state is None
        else generator.set_state(state.cpu())
    }


def _output(context: StageContext, state: Any, name: str) -> Any:
    """The output ``name`` of the final ``state``. Raises GraphError where the blocks did not
    compute it."""
    if name == GENERATOR:
        return state.values[GENERATOR].get_state()
    if name in MEDIA_KINDS:
        return output_field(context, state.values, name)
    if name not in state.values:
        refuse(
            context, f"its blocks do not compute {name}{did_you_mean(name, sorted(state.values))}"
        )
    return state.values[name]
