"""Stages for a pipeline: three where cutting its call changes nothing, which is tried, else one that runs the call whole.

    op call        pipe(...)                            everything
    three stages   encode_prompt | denoise | decode     where both ways enter every component with the same numbers, for several
                                                        settings: as they are, without guidance, with a negative prompt, a batch

Decides stages, which components each uses, and which inputs are left. Must not know YAML.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphrun.diffusers_.importing.blocks import cut_at_blocks
from graphrun.diffusers_.importing.fingerprint import Entered
from graphrun.diffusers_.importing.layout import OWN, Layout, first_words, handed_in, options_of, outputs_in
from graphrun.diffusers_.importing.signature import NAMED_SIZES, NAMES, PARAMETERS, Wanted, further_inputs, plain_inputs, set_inputs
from graphrun.diffusers_.importing.trial import STEPS, Rehearsed, called
from graphrun.diffusers_.live import joined
from graphrun.errors import GraphrunError, InputError
from graphrun.graph.graph import PLANNING_TEXT, Graph, Reference, Stage
from graphrun.graph.ops import OPERATIONS

# Inputs that the three ops take, by the argument they are passed as.
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
# What the op `encode_prompt` takes only where the pipeline's own `encode_prompt` does, and under which names.
OF_ENCODER = {
    "guidance_scale": ("do_classifier_free_guidance",),
    "batch": ("num_images_per_prompt", "num_videos_per_prompt"),
    "max_sequence_length": ("max_sequence_length",),
}


def lay_out(rehearsed: Rehearsed, sets: Mapping[str, Any], *, whole: bool = False) -> Layout:
    """The stages of a recipe that is on meta. ``sets``: defaults of inputs in place of the pipeline's; ``whole``: do not cut.

    Raises ProbeError naming the call that failed, InputError where components come to share weights.
    """
    kind, pipeline = rehearsed.spec.kind, rehearsed.pipeline
    if shared := [name.replace("_and_", " and ") for name in joined(rehearsed.meta_modules) if name not in rehearsed.meta_modules]:
        raise InputError(
            f"{rehearsed.spec.pipeline} gives {shared[0]} weights in common, and the components of a graph have none: attach "
            "to the live pipeline (graphrun.attach), where they are one"
        )
    parameters = rehearsed.parameters
    sets = {PARAMETERS.get(name, name) if name in parameters else name: value for name, value in sets.items()}
    literals = {name: value for name, value in sets.items() if isinstance(value, (list, dict))}
    given = {parameter: sets[name] for parameter in NAMED_SIZES if (name := NAMES.get(parameter, parameter)) in sets}
    plain = set_inputs(kind, parameters, plain_inputs(kind, pipeline, given), sets)
    sizes = _picture_sizes(pipeline, plain, sets)
    called(rehearsed, plain, sizes, literals)
    plain = set_inputs(kind, parameters, plain_inputs(kind, pipeline, rehearsed.fingerprint.seen | given), sets)
    arguments = called(rehearsed, plain, sizes, literals)
    why = "it was asked for whole" if whole else ""
    if rehearsed.modular:
        return cut_at_blocks(rehearsed, handed_in(rehearsed, plain, arguments, sizes), why)
    why = why or _against(rehearsed, [*plain, *literals])
    if not why:
        found = _cut(rehearsed, plain)
        if isinstance(found, Layout):
            return found
        why = found
    return _uncut(rehearsed, plain | further_inputs(parameters, plain), arguments, sizes, why)


def _picture_sizes(pipeline: Any, plain: Mapping[str, Wanted], sets: Mapping[str, Any]) -> dict[str, Any]:
    """Height and width of a picture that nobody gives: the call's, else those that the denoiser was made for."""
    sample = next((s for n in ("unet", "transformer", "prior") if (s := _sample(getattr(pipeline, n, None)))), 64)
    own = sample * (getattr(pipeline, "vae_scale_factor", None) or 8)
    usual = {"height": own, "width": own, "frames": 9, "rate": 44100, "seconds": 1.0}
    return {name: sets.get(name, plain[name].default if name in plain else value) for name, value in usual.items()}


def _sample(module: Any) -> int | None:
    size = getattr(getattr(module, "config", None), "sample_size", None)
    return size if isinstance(size, int) else None


def _against(rehearsed: Rehearsed, plain: Sequence[str]) -> str:
    """Why the call with the inputs ``plain`` cannot be cut in three, by the looks of it; empty where it may be tried."""
    parameters = rehearsed.parameters
    if rehearsed.media:
        return f"it takes {', '.join(rehearsed.media)}"
    if not hasattr(rehearsed.spec.kind, "encode_prompt"):
        return "it has no encode_prompt"
    if lacking := [name for name in ("latents", "output_type", "generator") if name not in parameters]:
        return f"its call takes no {lacking[0]}"
    if not any("prompt_embeds" in name for name in parameters):
        return "its call takes no embeddings"
    if strange := [name for name in plain if name not in {*ENCODE.values(), *DENOISE.values()}]:
        return f"the three ops take no {strange[0]}"
    return "" if "prompt" in plain and "steps" in plain else "it takes no prompt or no number of steps"


def _cut(rehearsed: Rehearsed, plain: Mapping[str, Wanted]) -> Layout | str:
    """Three stages, or what speaks against them. An input whose values lead two ways is left out."""
    kept = {name: wanted for name, wanted in plain.items() if name in {*ENCODE.values(), *DENOISE.values()}}
    encoder = inspect.signature(rehearsed.spec.kind.encode_prompt).parameters
    base = {name: PLANNING_TEXT if name == "prompt" else wanted.default for name, wanted in kept.items()}
    few = {"steps": STEPS}
    if "negative_prompt" in kept and _differ(rehearsed, kept, base | few, base | few | {"negative_prompt": None}):
        base["negative_prompt"] = None  # its absence means something else than an empty text
    trials: list[tuple[dict[str, Any], tuple[str, ...]]] = [({}, ())]
    trials += [({"guidance_scale": scale, **few}, ()) for scale in (1.0, 0.0) if "guidance_scale" in kept]
    trials += [({"batch": 2, **few}, ("batch",))] if "batch" in kept else []
    if "negative_prompt" in kept:
        scale = {"true_cfg_scale": 2.0} if "true_cfg_scale" in kept else {}
        trials += [({"negative_prompt": "blurry", **scale, **few}, ("negative_prompt", "true_cfg_scale"))]
    entered: dict[str, dict[Entered, None]] = {}
    first: dict[str, tuple[Entered, ...]] = {}
    for changes, blamed in trials:
        values = {name: value for name, value in {**base, **changes}.items() if name in kept}
        graph = _staged(rehearsed.graph, kept, encoder)
        try:
            found = rehearsed.staged(graph, values)
            same = _flat(found) == _plain_call(rehearsed, kept, values)
            why = "cut in three it enters its components with other numbers" if not same else ""
        except (GraphrunError, *OWN) as error:
            found, why = {}, f"cut in three its own code fails: {first_words(error)}"
        if why and not blamed:
            return why
        if why:
            kept = {name: wanted for name, wanted in kept.items() if name not in blamed}
            continue
        first = first or found
        for stage, entries in found.items():
            entered.setdefault(stage, {}).update(dict.fromkeys(entries))
    if any(not entries for entries in first.values()):
        return "cut in three a stage would enter nothing"
    if "negative_prompt" in kept and base["negative_prompt"] is None:
        entry = {"type": "str", "optional": True}
        kept["negative_prompt"] = replace(kept["negative_prompt"], entry=entry)
    uses = {stage: tuple(dict.fromkeys(each.component for each in entries)) for stage, entries in entered.items()}
    return _layout(rehearsed, _staged(rehearsed.graph, kept, encoder), kept, uses, first)


def _layout(
    rehearsed: Rehearsed,
    graph: Graph,
    kept: Mapping[str, Wanted],
    uses: Mapping[str, tuple[str, ...]],
    entered: Mapping[str, tuple[Entered, ...]],
) -> Layout:
    used = {name for names in uses.values() for name in names}
    unused = tuple(name for name in rehearsed.meta_modules if name not in used)
    uses = {**uses, "denoise": (*uses["denoise"], *unused)}
    return Layout(
        inputs={name: wanted.entry for name, wanted in kept.items()},
        stages=tuple(replace(s, uses=uses[s.name], options=options_of(rehearsed, s, uses[s.name])) for s in graph.stages),
        outputs={"image": "$decode.image"},
        entered=entered,
        unused=unused,
    )


def _staged(graph: Graph, kept: Mapping[str, Wanted], encoder: Mapping[str, Any]) -> Graph:
    """``graph`` in three stages that all may use everything."""
    everything = tuple(graph.components)

    def passed(table: Mapping[str, str]) -> dict[str, Any]:
        return {argument: Reference("input", name) for argument, name in table.items() if name in kept}

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


def _plain_call(rehearsed: Rehearsed, kept: Mapping[str, Wanted], values: Mapping[str, Any]) -> tuple[Entered, ...]:
    """What the uncut call enters for the inputs ``values``."""
    arguments = {kept[n].parameter: v for n, v in values.items() if v is not None and kept[n].parameter != "generator"}
    return rehearsed.whole(arguments, seed=values.get("seed") or 0)


def _differ(rehearsed: Rehearsed, kept: Mapping[str, Wanted], one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return _plain_call(rehearsed, kept, one) != _plain_call(rehearsed, kept, other)


def _flat(found: Mapping[str, Iterable[Entered]]) -> tuple[Entered, ...]:
    return tuple(entered for entries in found.values() for entered in entries)


def _uncut(
    rehearsed: Rehearsed, plain: Mapping[str, Wanted], arguments: Mapping[str, Any], sizes: Mapping[str, Any], why: str
) -> Layout:
    """One stage that runs the call whole."""
    steps = {"num_inference_steps": plain["steps"].default} if "steps" in plain else {}
    entries = rehearsed.whole({**arguments, **steps})
    handed = handed_in(rehearsed, plain, arguments, sizes)
    uses = tuple(dict.fromkeys(entered.component for entered in entries))
    outputs = outputs_in(rehearsed.made)
    unused = tuple(name for name in rehearsed.meta_modules if name not in uses)
    stage = Stage("make", "call", (*uses, *unused), handed.passed, outputs=outputs)
    stage = replace(stage, options=options_of(rehearsed, stage, uses))
    return Layout(handed.inputs, (stage,), {name: f"$make.{name}" for name in outputs}, {"make": entries}, unused, why)
