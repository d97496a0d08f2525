"""The op `call`: a pipeline's own `__call__`, whole, with the arguments that the stage passes, and what it returns by name.

Decides how an output is asked for and found. Where the components are entered is the pipeline's affair, and the probe's to see.

    image    its pictures                 one, or a list of several
    video    its frames                   a list of pictures, or a list of videos
    audio    its sound                    `Sound`, or a list of several
    latents  in place of any of these     what output_type="latent" returns
    others   as the pipeline's output class has them: image_embeds, prediction, ...
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from graphrun.errors import GraphError, GraphrunError, InputError
from graphrun.graph.media import is_media, size_of
from graphrun.graph.values import did_you_mean
from graphrun.ops.diffusion import StageContext, without_pictures

# Fields of diffusers' output classes by what they hold, the usual one first.
FIELDS: Mapping[str, tuple[str, ...]] = {
    "image": ("images", "image"),
    "video": ("frames", "videos", "video"),
    "audio": ("audios", "audio"),
}
# Which a stage says in other words, or has for itself.
OURS = frozenset({"self", "generator", "return_dict", "callback", "callback_steps", "callback_on_step_end"})


@dataclass(frozen=True, slots=True)
class Sound:
    """``samples`` [channels samples] in float32, so many of them to a second."""

    samples: Any
    rate: int


def call(context: StageContext, *, seed: int | None = None, **arguments: Any) -> dict[str, Any]:
    """The outputs that the graph reads of this stage, by name.

    Random numbers come from a CPU generator seeded with ``seed``, else 0. Raises GraphError at the stage's line for an argument
    that the pipeline's `__call__` has not, for an output that it does not return, and for what it refuses.
    """
    pipeline, wanted = context.pipeline, context.declared.outputs if context.declared is not None else ("image",)
    known = inspect.signature(type(pipeline).__call__).parameters
    _refuse_unknown(context, known, arguments, seed)
    _refuse_masks(context, arguments)
    asked = context.declared.arguments if context.declared is not None else {}
    left_out = {name for name, value in arguments.items() if value is None and asked.get(name) is not None}  # an optional input
    given = {name: _sound_as_tensor(value) for name, value in arguments.items() if name not in left_out}
    if "generator" in known:
        given["generator"] = torch.Generator("cpu").manual_seed(seed or 0)
    if "output_type" in known and "output_type" not in given and (kind := _output_type(context, wanted)) is not None:
        given["output_type"] = kind
    if context.planning and given.get("output_type") == "pil" and "padding_mask_crop" not in given:
        without_pictures(pipeline)
    with explained(context), torch.no_grad():
        made = pipeline(**given)
    fields = dict(made) if isinstance(made, Mapping) else {} if not hasattr(made, "__dict__") else dict(vars(made))
    return {name: field_in(context, fields, name) for name in wanted}


def _refuse_unknown(
    context: StageContext, known: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any], seed: int | None
) -> None:
    takes = {name for name, p in known.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)} - OURS
    what = f"{_class_of(context)}.__call__"
    for name in arguments:
        if name == "generator":
            refuse(context, f"with.{name}: give a seed: instead")
        if name not in takes:
            refuse(context, f"with.{name}: {what} has no argument {name!r}{did_you_mean(name, takes)}")
    if seed is not None and "generator" not in known:
        refuse(context, f"with.seed: {what} takes no generator, so it has no seed: leave it out")
    missing = [name for name in takes if known[name].default is inspect.Parameter.empty and name not in arguments]
    if missing:
        refuse(context, f"{what} needs {', '.join(sorted(missing))}: add it to with:")


def _refuse_masks(context: StageContext, arguments: Mapping[str, Any]) -> None:
    """A mask is for its image: of one size, where both are pictures."""
    image, mask = (size_of(arguments.get(name)) for name in ("image", "mask_image"))
    if image is not None and mask is not None and image != mask:
        names = "x".join(map(str, mask)), "x".join(map(str, image))
        raise InputError(f"stages.{context.stage}: the mask is {names[0]}, and the image {names[1]}: make them the same size")


def _sound_as_tensor(value: Any) -> Any:
    """Samples [channels samples] as pipelines take them: a tensor [1 channels samples]; everything else as it is."""
    return (
        torch.from_numpy(value)[None] if isinstance(value, np.ndarray) and value.ndim == 2 and value.dtype == np.float32 else value
    )


def _output_type(context: StageContext, wanted: tuple[str, ...]) -> str | None:
    if "latents" in wanted:
        if others := [name for name in wanted if is_media(name)]:
            refuse(context, f"one call returns latents or {others[0]}: read one of them")
        return "latent"
    return "pil" if "image" in wanted or "video" in wanted else None


def field_in(context: StageContext, fields: Mapping[str, Any], name: str) -> Any:
    """The output ``name`` in ``fields``; of one picture, video or sound, itself. Raises GraphError where it is not there."""
    if name == "latents" and name not in fields and fields:
        return next(iter(fields.values()))
    field = next((each for each in FIELDS.get(name, (name,)) if each in fields), None)
    if field is None:
        usual = {each: ours for ours, names in FIELDS.items() for each in names}
        there = {usual.get(each, each) for each in fields}
        refuse(context, f"{_class_of(context)} returns no {name}{did_you_mean(name, there)}")
        return None
    value = fields[field]
    if name == "audio":
        sounds = [Sound(samples, _rate(context)) for samples in _samples(value)]
        return sounds[0] if len(sounds) == 1 else sounds
    return value[0] if name in FIELDS and isinstance(value, list) and len(value) == 1 else value


def _samples(value: Any) -> Iterator[np.ndarray[Any, Any]]:
    """Of each sound in ``value``, a batch: [channels samples] in float32 on the host."""
    for sound in value:
        samples = sound.detach().float().cpu().numpy() if isinstance(sound, torch.Tensor) else np.asarray(sound, dtype=np.float32)
        yield samples if samples.ndim == 2 else samples.reshape(1, -1)


def _rate(context: StageContext) -> int:
    """Samples per second, as the pipeline's VAE or vocoder says."""
    for name in ("vocoder", "vae", "audio_vae"):
        part = getattr(context.pipeline, name, None)
        for owner in (part, getattr(part, "config", None)):
            if isinstance(rate := getattr(owner, "sampling_rate", None), int):
                return rate
    refuse(context, f"{_class_of(context)} does not say how many samples a second its sound has")
    return 0


@contextmanager
def explained(context: StageContext) -> Iterator[None]:
    """What the pipeline's own code refuses is an error at the stage; while planning, whatever it raises."""
    kinds = (Exception,) if context.planning else (ValueError, TypeError, AttributeError, KeyError, IndexError, NotImplementedError)
    try:
        yield
    except GraphrunError:
        raise
    except kinds as error:
        text = " ".join(str(error).split())
        what = f"{_class_of(context)} fails: {type(error).__name__}: {text[:600]}"
        raise GraphError(f"stages.{context.stage}: {what}", _where(context)) from error


def _class_of(context: StageContext) -> str:
    return type(context.pipeline).__name__


def _where(context: StageContext) -> str:
    return context.declared.where if context.declared is not None else ""


def refuse(context: StageContext, text: str) -> None:
    """Raises GraphError at the stage's line."""
    raise GraphError(f"stages.{context.stage}: {text}", _where(context))
