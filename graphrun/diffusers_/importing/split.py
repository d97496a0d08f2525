"""Stages of a pipeline: encode_prompt, denoise and decode where splitting its call changes nothing, else one stage for the call.

    one stage       op `call`: pipe(...)
    three stages    encode_prompt | denoise | decode

Whether splitting changes nothing is tried with fingerprint runs: the stages and the whole call must enter every component with the
same values, for the default settings, without guidance, with a negative prompt and with a batch of two.

Decides the stages, the components that each uses, and the inputs. Knows no YAML.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphrun.diffusers_.importing.fingerprint import EntryRecord
from graphrun.diffusers_.importing.layout import PIPELINE_ERRORS, Layout, call_inputs, error_line, options_of, outputs_in
from graphrun.diffusers_.importing.modular_blocks import split_at_blocks
from graphrun.diffusers_.importing.signature import (
    NAMED_SIZES,
    NAMES,
    PARAMETERS,
    InputSpec,
    further_inputs,
    plain_inputs,
    set_inputs,
)
from graphrun.diffusers_.importing.trial import STEPS, TrialPipeline, find_arguments
from graphrun.diffusers_.live import merge_shared
from graphrun.errors import GraphrunError, InputError
from graphrun.graph.graph import PLANNING_TEXT, Graph, Reference, Stage
from graphrun.graph.ops import OPERATIONS

# Arguments of the three ops: argument -> name of the input.
ENCODE = {
    "prompt": "prompt",
    "negative_prompt": "negative_prompt",
    "guidance_scale": "guidance_scale",
    "true_cfg_scale": "true_cfg_scale",
    "num_images": "batch",
    "max_sequence_length": "max_sequence_length",
}
SIZES = {"height": "height", "width": "width", "num_frames": "frames", "use_resolution_binning": "use_resolution_binning"}
DENOISE = {**SIZES, "steps": "steps", "guidance_scale": "guidance_scale", "true_cfg_scale": "true_cfg_scale", "seed": "seed"}
# Inputs that the op `encode_prompt` gets only where the pipeline's own `encode_prompt` has one of these parameters.
OF_ENCODER = {
    "guidance_scale": ("do_classifier_free_guidance",),
    "batch": ("num_images_per_prompt", "num_videos_per_prompt"),
    "max_sequence_length": ("max_sequence_length",),
}


def lay_out(trial: TrialPipeline, sets: Mapping[str, Any], *, whole: bool = False) -> Layout:
    """The stages of ``trial``'s pipeline. ``sets``: defaults of inputs in place of the pipeline's; ``whole``: one stage.

    Raises ProbeError naming the call that failed, InputError where the pipeline makes components share weights.
    """
    kind, pipeline = trial.spec.kind, trial.pipeline
    if shared := [name.replace("_and_", " and ") for name in merge_shared(trial.meta_modules) if name not in trial.meta_modules]:
        raise InputError(
            f"{trial.spec.pipeline} makes {shared[0]} share weights, and components of a graph cannot: attach to the live "
            "pipeline (graphrun.attach), which places them as one component"
        )
    parameters = trial.parameters
    sets = {PARAMETERS.get(name, name) if name in parameters else name: value for name, value in sets.items()}
    literals = {name: value for name, value in sets.items() if isinstance(value, (list, dict))}
    given = {parameter: sets[name] for parameter in NAMED_SIZES if (name := NAMES.get(parameter, parameter)) in sets}
    plain = set_inputs(kind, parameters, plain_inputs(kind, pipeline, given), sets)
    sizes = _picture_sizes(pipeline, plain, sets)
    find_arguments(trial, plain, sizes, literals)
    plain = set_inputs(kind, parameters, plain_inputs(kind, pipeline, trial.fingerprint.call_locals | given), sets)
    arguments = find_arguments(trial, plain, sizes, literals)
    why = "it was asked for whole" if whole else ""
    if trial.modular:
        return split_at_blocks(trial, call_inputs(trial, plain, arguments, sizes), why)
    why = why or _reason_not_to_split(trial, [*plain, *literals])
    if not why:
        found = _split(trial, plain)
        if isinstance(found, Layout):
            return found
        why = found
    return _one_stage(trial, plain | further_inputs(parameters, plain), arguments, sizes, why)


def _picture_sizes(pipeline: Any, plain: Mapping[str, InputSpec], sets: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of media inputs: those in ``sets``, else the call's, else for pictures the denoiser's ``sample_size`` in pixels."""
    sample = next((s for n in ("unet", "transformer", "prior") if (s := _sample_size(getattr(pipeline, n, None)))), 64)
    own = sample * (getattr(pipeline, "vae_scale_factor", None) or 8)
    usual = {"height": own, "width": own, "frames": 9, "rate": 44100, "seconds": 1.0}
    return {name: sets.get(name, plain[name].default if name in plain else value) for name, value in usual.items()}


def _sample_size(module: Any) -> int | None:
    size = getattr(getattr(module, "config", None), "sample_size", None)
    return size if isinstance(size, int) else None


def _reason_not_to_split(trial: TrialPipeline, plain: Sequence[str]) -> str:
    """The reason why a call with the inputs ``plain`` cannot be split in three, by its signature; empty where it can be tried."""
    parameters = trial.parameters
    if trial.media:
        return f"it takes {', '.join(trial.media)}"
    if not hasattr(trial.spec.kind, "encode_prompt"):
        return "it has no encode_prompt"
    if lacking := [name for name in ("latents", "output_type", "generator") if name not in parameters]:
        return f"its call takes no {lacking[0]}"
    if not any("prompt_embeds" in name for name in parameters):
        return "its call takes no embeddings"
    if strange := [name for name in plain if name not in {*ENCODE.values(), *DENOISE.values()}]:
        return f"the three ops take no {strange[0]}"
    return "" if "prompt" in plain and "steps" in plain else "it takes no prompt or no number of steps"


def _split(trial: TrialPipeline, plain: Mapping[str, InputSpec]) -> Layout | str:
    """Three stages, or the reason against them. An input for which the stages differ from the whole call is left out."""
    inputs = {name: input_spec for name, input_spec in plain.items() if name in {*ENCODE.values(), *DENOISE.values()}}
    encoder = inspect.signature(trial.spec.kind.encode_prompt).parameters
    base = {name: PLANNING_TEXT if name == "prompt" else input_spec.default for name, input_spec in inputs.items()}
    few = {"steps": STEPS}
    if "negative_prompt" in inputs and _differ(trial, inputs, base | few, base | few | {"negative_prompt": None}):
        base["negative_prompt"] = None  # leaving it out is not the same as an empty text
    trials: list[tuple[dict[str, Any], tuple[str, ...]]] = [({}, ())]
    trials += [({"guidance_scale": scale, **few}, ()) for scale in (1.0, 0.0) if "guidance_scale" in inputs]
    trials += [({"batch": 2, **few}, ("batch",))] if "batch" in inputs else []
    if "negative_prompt" in inputs:
        scale = {"true_cfg_scale": 2.0} if "true_cfg_scale" in inputs else {}
        trials += [({"negative_prompt": "blurry", **scale, **few}, ("negative_prompt", "true_cfg_scale"))]
    entered: dict[str, dict[EntryRecord, None]] = {}
    first: dict[str, tuple[EntryRecord, ...]] = {}
    for changes, blamed in trials:
        values = {name: value for name, value in {**base, **changes}.items() if name in inputs}
        graph = _staged(trial.graph, inputs, encoder)
        try:
            found = trial.run_staged(graph, values)
            same = _flat(found) == _whole_entries(trial, inputs, values)
            why = "cut in three it enters its components with other numbers" if not same else ""
        except (GraphrunError, *PIPELINE_ERRORS) as error:
            found, why = {}, f"cut in three its own code fails: {error_line(error)}"
        if why and not blamed:
            return why
        if why:
            inputs = {name: input_spec for name, input_spec in inputs.items() if name not in blamed}
            continue
        first = first or found
        for stage, entries in found.items():
            entered.setdefault(stage, {}).update(dict.fromkeys(entries))
    if any(not entries for entries in first.values()):
        return "cut in three a stage would enter nothing"
    if "negative_prompt" in inputs and base["negative_prompt"] is None:
        entry = {"type": "str", "optional": True}
        inputs["negative_prompt"] = replace(inputs["negative_prompt"], entry=entry)
    uses = {stage: tuple(dict.fromkeys(each.component for each in entries)) for stage, entries in entered.items()}
    return _layout(trial, _staged(trial.graph, inputs, encoder), inputs, uses, first)


def _layout(
    trial: TrialPipeline,
    graph: Graph,
    inputs: Mapping[str, InputSpec],
    uses: Mapping[str, tuple[str, ...]],
    entered: Mapping[str, tuple[EntryRecord, ...]],
) -> Layout:
    used = {name for names in uses.values() for name in names}
    unused = tuple(name for name in trial.meta_modules if name not in used)
    uses = {**uses, "denoise": (*uses["denoise"], *unused)}
    return Layout(
        inputs={name: input_spec.entry for name, input_spec in inputs.items()},
        stages=tuple(replace(s, uses=uses[s.name], options=options_of(trial, s, uses[s.name])) for s in graph.stages),
        outputs={"image": "$decode.image"},
        entered=entered,
        unused=unused,
    )


def _staged(graph: Graph, inputs: Mapping[str, InputSpec], encoder: Mapping[str, Any]) -> Graph:
    """``graph`` with three stages, each of which may use every component."""
    everything = tuple(graph.components)

    def passed(table: Mapping[str, str]) -> dict[str, Any]:
        return {argument: Reference("input", name) for argument, name in table.items() if name in inputs}

    encode = {
        argument: value
        for argument, value in passed(ENCODE).items()
        if not (names := OF_ENCODER.get(value.name)) or any(name in encoder for name in names)
    }
    embeds, latents = Reference("stage", "encode", "embeds"), Reference("stage", "denoise", "latents")
    stages = (
        _stage("encode", "encode_prompt", everything, encode),
        _stage("denoise", "denoise", everything, {"embeds": embeds, **passed(DENOISE)}),
        _stage("decode", "decode", everything, {"latents": latents, "embeds": embeds, **passed(SIZES)}),
    )
    return replace(graph, stages=stages, outputs={"image": Reference("stage", "decode", "image")})


def _stage(name: str, op: str, uses: tuple[str, ...], arguments: dict[str, Any]) -> Stage:
    return Stage(name, op, uses, arguments, outputs=tuple(OPERATIONS[op].outputs))


def _whole_entries(trial: TrialPipeline, inputs: Mapping[str, InputSpec], values: Mapping[str, Any]) -> tuple[EntryRecord, ...]:
    """The component entries of the whole call for the input ``values``."""
    arguments = {inputs[n].parameter: v for n, v in values.items() if v is not None and inputs[n].parameter != "generator"}
    return trial.run_whole(arguments, seed=values.get("seed") or 0)


def _differ(trial: TrialPipeline, inputs: Mapping[str, InputSpec], one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return _whole_entries(trial, inputs, one) != _whole_entries(trial, inputs, other)


def _flat(found: Mapping[str, Iterable[EntryRecord]]) -> tuple[EntryRecord, ...]:
    return tuple(entered for entries in found.values() for entered in entries)


def _one_stage(
    trial: TrialPipeline, plain: Mapping[str, InputSpec], arguments: Mapping[str, Any], sizes: Mapping[str, Any], why: str
) -> Layout:
    """One stage that runs the whole call. ``why``: the reason why it was not split."""
    steps = {"num_inference_steps": plain["steps"].default} if "steps" in plain else {}
    entries = trial.run_whole({**arguments, **steps})
    call = call_inputs(trial, plain, arguments, sizes)
    uses = tuple(dict.fromkeys(entered.component for entered in entries))
    outputs = outputs_in(trial.output)
    unused = tuple(name for name in trial.meta_modules if name not in uses)
    stage = Stage("make", "call", (*uses, *unused), call.passed, outputs=outputs)
    stage = replace(stage, options=options_of(trial, stage, uses))
    return Layout(call.inputs, (stage,), {name: f"$make.{name}" for name in outputs}, {"make": entries}, unused, why)
