"""The op `block`: run blocks of a modular pipeline in order, with their own code.

with      blocks: names of the blocks, in order; default all
          seed: starts random numbers; generator: continues random numbers of another stage
          all other inputs of the blocks: inputs of the call, values that other blocks computed
outputs   image, video, audio; generator: the state of the random number generator; any other value
          of the blocks' state, by name
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphrun.graph.ops import MEDIA_KINDS
from graphrun.graph.parts import Reference
from graphrun.graph.values import did_you_mean
from graphrun.ops.call import output_field, refuse
from graphrun.ops.diffusion import StageContext, without_pictures
from graphrun.ops.modular import blocks_in, initial_state, is_modular_class, silence_diffusers

GENERATOR = "generator"


def block(
    context: StageContext, *, blocks: Sequence[str] = (), seed: int | None = None, **arguments: Any
) -> dict[str, Any]:
    """Return by name the outputs of this stage that the graph reads.

    Raises GraphError at the stage's line if the pipeline is not modular, for unknown blocks,
    arguments or outputs, and for errors of the pipeline's own code.
    """
    pipeline, output_names = context.pipeline, context.stage.outputs
    if not is_modular_class(type(pipeline)):
        refuse(
            context,
            f"{type(pipeline).__name__} is not a modular pipeline, so it has no blocks: use the "
            "op call",
        )
    root = pipeline._blocks
    blocks = [blocks] if isinstance(blocks, str) else blocks
    for name in blocks:
        if name not in root.sub_blocks:
            refuse(
                context,
                f"with.blocks: {type(root).__name__} has no "
                f"{name!r}{did_you_mean(name, list(root.sub_blocks))}",
            )
    argument_values = context.stage.arguments.items()
    from_stages = {
        name
        for name, value in argument_values
        if isinstance(value, Reference) and value.kind == "stage"
    } - {GENERATOR}
    inputs = {
        name: value
        for name, value in arguments.items()
        if value is not None and name not in from_stages
    }
    inputs |= _generator(context, inputs.get(GENERATOR), seed)
    input_names = _input_names(root)
    for name in sorted(arguments.keys() - input_names):
        refuse(
            context,
            f"with.{name}: {type(root).__name__} takes no "
            f"{name!r}{did_you_mean(name, sorted(input_names))}",
        )
    if "output_type" in input_names and any(name in ("image", "video") for name in output_names):
        inputs.setdefault("output_type", "pil")
    if (
        not context.pictures
        and inputs.get("output_type") == "pil"
        and not arguments.get("padding_mask_crop")
    ):
        without_pictures(pipeline)
    state = initial_state(pipeline, inputs, {name: arguments[name] for name in from_stages})
    with silence_diffusers(), torch.no_grad():
        for inner in [root.sub_blocks[name] for name in blocks] or [root]:
            _, state = inner(pipeline, state)
    return {name: _output(context, state, name) for name in output_names}


def _input_names(blocks: Any) -> set[str]:
    """Return the names that ``blocks`` read: those of inputs, and of values that some block writes
    to a group (`kwargs_type`) which another one reads."""
    inputs = [parameter for inner in blocks_in(blocks) for parameter in inner.inputs]
    groups = {parameter.kwargs_type for parameter in inputs if not parameter.name}
    outputs = [output for inner in blocks_in(blocks) for output in inner.intermediate_outputs]
    grouped = [output for output in outputs if output.kwargs_type in groups]
    return {parameter.name for parameter in (*inputs, *grouped) if parameter.name}


def _generator(
    context: StageContext, state: torch.Tensor | None, seed: int | None
) -> Mapping[str, Any]:
    """Return the CPU generator for the blocks, by argument name; empty if they take none.
    ``state``: the generator state from another stage; None: seed with ``seed``."""
    whole = context.pipeline._blocks
    if GENERATOR not in _input_names(whole):
        if seed is not None:
            refuse(
                context,
                f"with.seed: {type(whole).__name__} takes no generator, so it has no seed: "
                "remove it",
            )
        return {}
    generator = torch.Generator("cpu")
    return {
        GENERATOR: generator.manual_seed(seed or 0)
        if state is None
        else generator.set_state(state.cpu())
    }


def _output(context: StageContext, state: Any, name: str) -> Any:
    """Return the output ``name`` in the final ``state``. Raises GraphError if it is missing."""
    if name == GENERATOR:
        return state.values[GENERATOR].get_state()
    if name in MEDIA_KINDS:
        return output_field(context, state.values, name)
    if name not in state.values:
        refuse(
            context, f"its blocks do not compute {name}{did_you_mean(name, sorted(state.values))}"
        )
    return state.values[name]
