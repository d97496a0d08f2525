"""Stages of a pipeline: three if splitting its call does not change the results, else one.

    one stage       op `call`: pipe(...)
    three stages    encode_prompt | denoise | decode

Fingerprint runs test the split: the stages and the whole call must call every component with the
same values. The tests cover the default settings, no guidance, a negative prompt, and a batch of
two.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from graphrun.diffusers_.dry_call import ProbeError
from graphrun.diffusers_.importing.fingerprint import ComponentCall
from graphrun.diffusers_.importing.layout import (
    CallInputs,
    GraphLayout,
    NotSplit,
    call_inputs,
    checked_layout,
    layout_of,
    outputs_in,
)
from graphrun.diffusers_.importing.modular_blocks import split_at_blocks
from graphrun.diffusers_.importing.signature import (
    NAMED_SIZES,
    NAMES,
    PARAMETERS,
    InputParameter,
    further_inputs,
    plain_inputs,
    set_inputs,
    tensor_shapes,
)
from graphrun.diffusers_.importing.trial import STEPS, TrialPipeline, find_arguments
from graphrun.diffusers_.live import merge_shared
from graphrun.errors import InputError
from graphrun.graph.graph import PLANNING_TEXT
from graphrun.graph.ops import OPERATIONS
from graphrun.graph.parts import Reference, Stage
from graphrun.ops.diffusion import set_tiling

# arguments of the three ops: argument -> name of the input
ENCODE = {
    "prompt": "prompt",
    "negative_prompt": "negative_prompt",
    "guidance_scale": "guidance_scale",
    "true_cfg_scale": "true_cfg_scale",
    "num_images": "batch",
    "max_sequence_length": "max_sequence_length",
}
SIZES = {
    "height": "height",
    "width": "width",
    "num_frames": "frames",
    "use_resolution_binning": "use_resolution_binning",
}
DENOISE = {
    **SIZES,
    "steps": "steps",
    "guidance_scale": "guidance_scale",
    "true_cfg_scale": "true_cfg_scale",
    "seed": "seed",
}
# inputs that the op `encode_prompt` gets only if the pipeline's own `encode_prompt` has one of
# these parameters
OF_ENCODER = {
    "guidance_scale": ("do_classifier_free_guidance",),
    "batch": ("num_images_per_prompt", "num_videos_per_prompt"),
    "max_sequence_length": ("max_sequence_length",),
}


def lay_out(
    trial: TrialPipeline, input_defaults: Mapping[str, Any], *, whole: bool = False
) -> GraphLayout:
    """Return the stages of ``trial``'s pipeline.

    ``input_defaults``: replace the pipeline's. ``whole``: one stage. Raises ProbeError naming the
    call that failed, InputError if components share weights.
    """
    kind, pipeline = trial.description.kind, trial.pipeline
    if merged_names := [
        name.replace("_and_", " and ")
        for name in merge_shared(trial.meta_modules)
        if name not in trial.meta_modules
    ]:
        raise InputError(
            f"{trial.description.pipeline} makes {merged_names[0]} share weights, and components "
            "of a graph cannot: attach to the live "
            "pipeline (graphrun.attach), which places them as one component"
        )
    parameters = trial.parameters
    input_defaults = {
        PARAMETERS.get(name, name) if name in parameters else name: value
        for name, value in input_defaults.items()
    }
    trial.tensors = tensor_shapes(parameters, input_defaults)
    literal_values = {
        name: value
        for name, value in input_defaults.items()
        if isinstance(value, (list, dict)) and name not in trial.tensors
    }
    size_values = {
        parameter: input_defaults[name]
        for parameter in NAMED_SIZES
        if (name := NAMES.get(parameter, parameter)) in input_defaults
    }
    inputs = set_inputs(kind, parameters, plain_inputs(kind, pipeline, size_values), input_defaults)
    sizes = _picture_sizes(pipeline, inputs, input_defaults)
    try:
        find_arguments(trial, inputs, sizes, literal_values)
    except ProbeError as error:
        if not hasattr(vae := trial.meta_modules.get("vae"), "enable_tiling"):
            raise
        try:
            set_tiling(vae, True)
            trial.is_tiled = True
            find_arguments(trial, inputs, sizes, literal_values)
        # NotImplementedError: a VAE with a stub of the method
        except (ProbeError, NotImplementedError):
            raise error from None
    inputs = set_inputs(
        kind,
        parameters,
        plain_inputs(kind, pipeline, trial.fingerprint.call_locals | size_values),
        input_defaults,
    )
    arguments = find_arguments(trial, inputs, sizes, literal_values)
    call = call_inputs(
        trial,
        inputs if trial.is_modular else inputs | further_inputs(parameters, inputs),
        arguments,
        sizes,
    )
    try:
        if whole:
            raise NotSplit("it was asked for whole")
        return (
            split_at_blocks(trial, call)
            if trial.is_modular
            else _split(trial, inputs, literal_values)
        )
    except NotSplit as error:
        return _one_stage(trial, call, inputs, str(error))


def _picture_sizes(
    pipeline: Any, inputs: Mapping[str, InputParameter], input_defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the sizes of media inputs: from ``input_defaults``, else from the call's inputs.
    Pictures otherwise get the denoiser's ``sample_size`` in pixels."""
    sample_size = next(
        (
            size
            for n in ("unet", "transformer", "prior")
            if (size := _sample_size(getattr(pipeline, n, None)))
        ),
        64,
    )
    pixels = sample_size * (getattr(pipeline, "vae_scale_factor", None) or 8)
    sizes = {"height": pixels, "width": pixels, "frames": 9, "rate": 44100, "seconds": 1.0}
    return {
        name: input_defaults.get(name, inputs[name].default if name in inputs else value)
        for name, value in sizes.items()
    }


def _sample_size(module: Any) -> int | None:
    size = getattr(getattr(module, "config", None), "sample_size", None)
    return size if isinstance(size, int) else None


def _split(
    trial: TrialPipeline, inputs: Mapping[str, InputParameter], literals: Iterable[str]
) -> GraphLayout:
    """Return three stages, without inputs for which they differ from the whole call. Raises
    NotSplit with the reason if the call cannot be split."""
    parameters, kind = trial.parameters, trial.description.kind
    if media := (*trial.media, *trial.optional_media, *trial.tensors):
        raise NotSplit(f"it takes {', '.join(media)}")
    if not hasattr(kind, "encode_prompt"):
        raise NotSplit("it has no encode_prompt")
    if absent_names := [
        name for name in ("latents", "output_type", "generator") if name not in parameters
    ]:
        raise NotSplit(f"its call takes no {absent_names[0]}")
    if not any("prompt_embeds" in name for name in parameters):
        raise NotSplit("its call takes no embeddings")
    if unsupported := [
        name for name in (*inputs, *literals) if name not in {*ENCODE.values(), *DENOISE.values()}
    ]:
        raise NotSplit(f"the three ops take no {unsupported[0]}")
    if "prompt" not in inputs or "steps" not in inputs:
        raise NotSplit("it takes no prompt or no number of steps")
    few_steps = {"steps": trial.fixed_steps or STEPS}
    base = {name: input_spec.default for name, input_spec in inputs.items()}
    base["prompt"] = inputs["prompt"].default or PLANNING_TEXT
    entry_table = {name: input_spec.entry for name, input_spec in inputs.items()}
    call = CallInputs(
        entry_table, {}, {}, {name: input_spec.parameter for name, input_spec in inputs.items()}
    )
    empty, unset = {"negative_prompt": ""}, entry_table.get("negative_prompt", {}).get("optional")
    if unset and _run_whole(trial, call, base | few_steps) == _run_whole(
        trial, call, base | few_steps | empty
    ):
        base |= empty  # equal to no negative prompt
        entry_table["negative_prompt"] = {"type": "str", "default": ""}
    trials: list[tuple[dict[str, Any], tuple[str, ...]]] = [({}, ())]
    trials += [
        ({"guidance_scale": scale, **few_steps}, ())
        for scale in (1.0, 0.0)
        if "guidance_scale" in inputs
    ]
    trials += [({"batch": 2, **few_steps}, ("batch",))] if "batch" in inputs else []
    if "negative_prompt" in inputs:
        scale = {"true_cfg_scale": 2.0} if "true_cfg_scale" in inputs else {}
        trials += [
            (
                {"negative_prompt": "blurry", **scale, **few_steps},
                ("negative_prompt", "true_cfg_scale"),
            )
        ]
    values = [(base | changes, suspect_names) for changes, suspect_names in trials]
    layout = checked_layout(
        trial,
        call,
        _three_stages(kind, inputs),
        ("image",),
        values,
        ("split in three", "values"),
        lambda _: "denoise",
    )
    if not all(layout.component_calls.values()):
        raise NotSplit("split in three, a stage would call no component")
    return layout


def _three_stages(kind: type[Any], inputs: Collection[str]) -> list[Stage]:
    encoder = inspect.signature(kind.encode_prompt).parameters
    embeds, latents = (
        Reference("stage", "encode", "embeds"),
        Reference("stage", "denoise", "latents"),
    )

    def stage(
        name: str, op: str, links: Mapping[str, Reference], table: Mapping[str, str]
    ) -> Stage:
        references = {
            argument: Reference("input", input_name)
            for argument, input_name in table.items()
            if input_name in inputs
        }
        return Stage(name, op, (), {**links, **references}, outputs=tuple(OPERATIONS[op].outputs))

    unsupported = {
        key for key, names in OF_ENCODER.items() if not any(name in encoder for name in names)
    }
    encode_arguments = {argument: key for argument, key in ENCODE.items() if key not in unsupported}
    return [
        stage("encode", "encode_prompt", {}, encode_arguments),
        stage("denoise", "denoise", {"embeds": embeds}, DENOISE),
        stage("decode", "decode", {"latents": latents, "embeds": embeds}, SIZES),
    ]


def _run_whole(
    trial: TrialPipeline, call: CallInputs, values: Mapping[str, Any]
) -> tuple[ComponentCall, ...]:
    """Return the calls into components of the whole call for the input ``values``."""
    arguments = {
        call.parameters[name]: value for name, value in values.items() if value is not None
    }
    return trial.run_whole(arguments, arguments.pop("generator", 0))


def _one_stage(
    trial: TrialPipeline, call: CallInputs, inputs: Mapping[str, InputParameter], reason: str
) -> GraphLayout:
    """Return one stage that runs the whole call. ``reason``: why the call is not split."""
    if trial.is_modular:
        component_calls, blocks = trial.run_whole(call.arguments), trial.pipeline._blocks
        input_names = {"seed", *(parameter.name for parameter in blocks.inputs)}
        references = {name: value for name, value in call.references.items() if name in input_names}
        result = {
            name: trial.output[name]
            for name in blocks.intermediate_output_names
            if name in trial.output
        }
    else:
        steps = {"num_inference_steps": inputs["steps"].default} if "steps" in inputs else {}
        component_calls, references = trial.run_whole(call.arguments | steps), call.references
        result = trial.output
    outputs = outputs_in(result)
    stage = Stage("make", "block" if trial.is_modular else "call", (), references, outputs=outputs)
    return layout_of(
        trial,
        call,
        [stage],
        outputs,
        {"make": component_calls},
        {"make": component_calls},
        lambda _: "make",
        reason,
    )
