"""Stages of a pipeline: encode_prompt, denoise and decode where splitting its call changes nothing,
else one stage for the call.

    one stage       op `call`: pipe(...)
    three stages    encode_prompt | denoise | decode

Whether splitting changes nothing is tried with fingerprint runs: the stages and the whole call must
enter every component with the same values, for the default settings, without guidance, with a
negative prompt and with a batch of two.

Decides the stages, the components that each uses, and the inputs. Knows no YAML.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from graphrun.diffusers_.dry_call import ProbeError
from graphrun.diffusers_.importing.fingerprint import EntryRecord
from graphrun.diffusers_.importing.layout import (
    CallInputs,
    Layout,
    NotSplit,
    call_inputs,
    laid_out,
    outputs_in,
    tried,
)
from graphrun.diffusers_.importing.modular_blocks import split_at_blocks
from graphrun.diffusers_.importing.signature import (
    NAMED_SIZES,
    NAMES,
    PARAMETERS,
    InputSpec,
    further_inputs,
    plain_inputs,
    set_inputs,
    tensor_shapes,
)
from graphrun.diffusers_.importing.trial import STEPS, TrialPipeline, find_arguments
from graphrun.diffusers_.live import merge_shared
from graphrun.errors import InputError
from graphrun.graph.graph import PLANNING_TEXT, Reference, Stage
from graphrun.graph.ops import OPERATIONS
from graphrun.ops.diffusion import set_tiling

# Arguments of the three ops: argument -> name of the input.
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
# Inputs that the op `encode_prompt` gets only where the pipeline's own `encode_prompt` has one of
# these parameters.
OF_ENCODER = {
    "guidance_scale": ("do_classifier_free_guidance",),
    "batch": ("num_images_per_prompt", "num_videos_per_prompt"),
    "max_sequence_length": ("max_sequence_length",),
}


def lay_out(trial: TrialPipeline, sets: Mapping[str, Any], *, whole: bool = False) -> Layout:
    """The stages of ``trial``'s pipeline. ``sets``: defaults of inputs in place of the pipeline's;
    ``whole``: one stage.

    Raises ProbeError naming the call that failed, InputError where the pipeline makes components
    share weights.
    """
    kind, pipeline = trial.found.kind, trial.pipeline
    if shared := [
        name.replace("_and_", " and ")
        for name in merge_shared(trial.meta_modules)
        if name not in trial.meta_modules
    ]:
        raise InputError(
            f"{trial.found.pipeline} makes {shared[0]} share weights, and components of a graph cannot: attach to the live "
            "pipeline (graphrun.attach), which places them as one component"
        )
    parameters = trial.parameters
    sets = {
        PARAMETERS.get(name, name) if name in parameters else name: value
        for name, value in sets.items()
    }
    trial.tensors = tensor_shapes(parameters, sets)
    literals = {
        name: value
        for name, value in sets.items()
        if isinstance(value, (list, dict)) and name not in trial.tensors
    }
    given = {
        parameter: sets[name]
        for parameter in NAMED_SIZES
        if (name := NAMES.get(parameter, parameter)) in sets
    }
    plain = set_inputs(kind, parameters, plain_inputs(kind, pipeline, given), sets)
    sizes = _picture_sizes(pipeline, plain, sets)
    try:
        find_arguments(trial, plain, sizes, literals)
    except ProbeError as error:
        if not hasattr(vae := trial.meta_modules.get("vae"), "enable_tiling"):
            raise
        try:
            set_tiling(vae, True)
            trial.tiled = True
            find_arguments(trial, plain, sizes, literals)
        except (ProbeError, NotImplementedError):  # the latter of a VAE that has the method alone
            raise error from None
    plain = set_inputs(
        kind, parameters, plain_inputs(kind, pipeline, trial.fingerprint.call_locals | given), sets
    )
    arguments = find_arguments(trial, plain, sizes, literals)
    call = call_inputs(
        trial,
        plain if trial.modular else plain | further_inputs(parameters, plain),
        arguments,
        sizes,
    )
    try:
        if whole:
            raise NotSplit("it was asked for whole")
        return split_at_blocks(trial, call) if trial.modular else _split(trial, plain, literals)
    except NotSplit as error:
        return _one_stage(trial, call, plain, str(error))


def _picture_sizes(
    pipeline: Any, plain: Mapping[str, InputSpec], sets: Mapping[str, Any]
) -> dict[str, Any]:
    """Sizes of media inputs: those in ``sets``, else the call's, else for pictures the denoiser's
    ``sample_size`` in pixels."""
    sample = next(
        (
            s
            for n in ("unet", "transformer", "prior")
            if (s := _sample_size(getattr(pipeline, n, None)))
        ),
        64,
    )
    own = sample * (getattr(pipeline, "vae_scale_factor", None) or 8)
    usual = {"height": own, "width": own, "frames": 9, "rate": 44100, "seconds": 1.0}
    return {
        name: sets.get(name, plain[name].default if name in plain else value)
        for name, value in usual.items()
    }


def _sample_size(module: Any) -> int | None:
    size = getattr(getattr(module, "config", None), "sample_size", None)
    return size if isinstance(size, int) else None


def _split(trial: TrialPipeline, plain: Mapping[str, InputSpec], literals: Iterable[str]) -> Layout:
    """Three stages. An input for which they differ from the whole call is left out. Raises NotSplit
    with a reason against them."""
    parameters, kind = trial.parameters, trial.found.kind
    if media := (*trial.media, *trial.offered, *trial.tensors):
        raise NotSplit(f"it takes {', '.join(media)}")
    if not hasattr(kind, "encode_prompt"):
        raise NotSplit("it has no encode_prompt")
    if lacking := [
        name for name in ("latents", "output_type", "generator") if name not in parameters
    ]:
        raise NotSplit(f"its call takes no {lacking[0]}")
    if not any("prompt_embeds" in name for name in parameters):
        raise NotSplit("its call takes no embeddings")
    if strange := [
        name for name in (*plain, *literals) if name not in {*ENCODE.values(), *DENOISE.values()}
    ]:
        raise NotSplit(f"the three ops take no {strange[0]}")
    if "prompt" not in plain or "steps" not in plain:
        raise NotSplit("it takes no prompt or no number of steps")
    few = {"steps": STEPS}
    base = {name: input_spec.default for name, input_spec in plain.items()}
    base["prompt"] = plain["prompt"].default or PLANNING_TEXT
    entries = {name: input_spec.entry for name, input_spec in plain.items()}
    call = CallInputs(
        entries, {}, {}, {name: input_spec.parameter for name, input_spec in plain.items()}
    )
    empty, unset = {"negative_prompt": ""}, entries.get("negative_prompt", {}).get("optional")
    if unset and _whole(trial, call, base | few) == _whole(trial, call, base | few | empty):
        base |= empty  # the same as leaving it out
        entries["negative_prompt"] = {"type": "str", "default": ""}
    trials: list[tuple[dict[str, Any], tuple[str, ...]]] = [({}, ())]
    trials += [
        ({"guidance_scale": scale, **few}, ()) for scale in (1.0, 0.0) if "guidance_scale" in plain
    ]
    trials += [({"batch": 2, **few}, ("batch",))] if "batch" in plain else []
    if "negative_prompt" in plain:
        scale = {"true_cfg_scale": 2.0} if "true_cfg_scale" in plain else {}
        trials += [
            ({"negative_prompt": "blurry", **scale, **few}, ("negative_prompt", "true_cfg_scale"))
        ]
    values = [(base | changes, blamed) for changes, blamed in trials]
    layout = tried(
        trial,
        call,
        _three(kind, plain),
        ("image",),
        values,
        ("cut in three", "numbers"),
        lambda _: "denoise",
    )
    if not all(layout.entered.values()):
        raise NotSplit("cut in three a stage would enter nothing")
    return layout


def _three(kind: type[Any], inputs: Collection[str]) -> list[Stage]:
    encoder = inspect.signature(kind.encode_prompt).parameters
    embeds, latents = (
        Reference("stage", "encode", "embeds"),
        Reference("stage", "denoise", "latents"),
    )

    def stage(
        name: str, op: str, given: Mapping[str, Reference], table: Mapping[str, str]
    ) -> Stage:
        passed = {
            argument: Reference("input", of) for argument, of in table.items() if of in inputs
        }
        return Stage(name, op, (), {**given, **passed}, outputs=tuple(OPERATIONS[op].outputs))

    untaken = {of for of, names in OF_ENCODER.items() if not any(name in encoder for name in names)}
    taken = {argument: of for argument, of in ENCODE.items() if of not in untaken}
    return [
        stage("encode", "encode_prompt", {}, taken),
        stage("denoise", "denoise", {"embeds": embeds}, DENOISE),
        stage("decode", "decode", {"latents": latents, "embeds": embeds}, SIZES),
    ]


def _whole(
    trial: TrialPipeline, call: CallInputs, values: Mapping[str, Any]
) -> tuple[EntryRecord, ...]:
    """The component entries of the whole call for the input ``values``."""
    arguments = {
        call.parameters[name]: value for name, value in values.items() if value is not None
    }
    return trial.run_whole(arguments, arguments.pop("generator", 0))


def _one_stage(
    trial: TrialPipeline, call: CallInputs, plain: Mapping[str, InputSpec], why: str
) -> Layout:
    """One stage that runs the whole call. ``why``: the reason why it was not split."""
    if trial.modular:
        entries, blocks = trial.run_whole(call.arguments), trial.pipeline._blocks
        read = {"seed", *(parameter.name for parameter in blocks.inputs)}
        passed = {name: value for name, value in call.passed.items() if name in read}
        made = {
            name: trial.output[name]
            for name in blocks.intermediate_output_names
            if name in trial.output
        }
    else:
        steps = {"num_inference_steps": plain["steps"].default} if "steps" in plain else {}
        entries, passed = trial.run_whole(call.arguments | steps), call.passed
        made = trial.output
    outputs = outputs_in(made)
    stage = Stage("make", "block" if trial.modular else "call", (), passed, outputs=outputs)
    return laid_out(
        trial, call, [stage], outputs, {"make": entries}, {"make": entries}, lambda _: "make", why
    )
