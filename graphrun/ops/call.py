"""The op `call`: runs a pipeline's own `__call__`, or the method that the stage names, and returns
its outputs by name.

image    the pictures                 one, or a list of several
video    the frames                   a list of pictures, or a list of videos
audio    the sound                    `Sound`, or a list of several
latents  instead of any of these      what output_type="latent" returns
others   named as in the pipeline's output class: image_embeds, prediction, ...
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch

from graphrun.errors import GraphError, InputError
from graphrun.graph.media import size_of
from graphrun.graph.ops import MEDIA_KINDS
from graphrun.graph.values import did_you_mean
from graphrun.ops.diffusion import StageContext, set_tiling, without_pictures

# Names of the fields in diffusers' output classes for each output, the most common first.
FIELDS: Mapping[str, tuple[str, ...]] = {
    "image": ("images", "image"),
    "video": ("frames", "videos", "video"),
    "audio": ("audios", "audio"),
}
# Names in diffusers' models and pipelines for the samples per second of what they make.
RATES = ("sampling_rate", "output_sampling_rate", "sample_rate")
# Arguments of `__call__` that a stage does not pass through: graphrun sets them itself or has
# another word for them.
RESERVED = frozenset(
    {"self", "generator", "return_dict", "callback", "callback_steps", "callback_on_step_end"}
)


@dataclass(frozen=True, slots=True)
class Sound:
    """``samples`` [channels samples] in float32, at ``rate`` samples per second."""

    samples: Any
    rate: int


def call(
    context: StageContext, *, seed: int | None = None, tiling: bool | None = None, **arguments: Any
) -> dict[str, Any]:
    """The outputs that the graph reads of this stage, by name.

    Random numbers come from a CPU generator seeded with ``seed``, default 0. For a class that is no
    pipeline of diffusers torch's own is seeded likewise, and the one output is what the method
    returns. ``tiling``: whether the VAE decodes tile by tile; None keeps its setting. Raises
    GraphError at the stage's line for an argument that the method does not have, an output that it
    does not return, and for errors of the pipeline's own code. Raises InputError for a mask whose
    size differs from the image's.
    """
    pipeline, wanted = context.pipeline, context.stage.outputs
    function = getattr(type(pipeline), context.stage.method, None)
    if not callable(function):
        refuse(context, f"method: {_class_of(context)} has no method {context.stage.method}")
    known = inspect.signature(function).parameters
    _refuse_unknown(context, known, arguments, seed)
    _refuse_mask_size(context, arguments)
    if tiling is not None and not hasattr(getattr(pipeline, "vae", None), "enable_tiling"):
        refuse(
            context,
            f"with.tiling: {_class_of(context)} has no VAE that decodes in tiles: remove it",
        )
    set_tiling(getattr(pipeline, "vae", None), tiling)
    # Optional inputs that are not set.
    unset = {
        name
        for name, value in arguments.items()
        if value is None and context.stage.arguments.get(name) is not None
    }
    inputs = {name: value for name, value in arguments.items() if name not in unset}
    if "generator" in known:
        inputs["generator"] = torch.Generator("cpu").manual_seed(seed or 0)
    if (
        "output_type" in known
        and "output_type" not in inputs
        and (kind := _output_type(context, wanted)) is not None
    ):
        inputs["output_type"] = kind
    if (
        not context.pictures
        and inputs.get("output_type") == "pil"
        and "padding_mask_crop" not in inputs
    ):
        without_pictures(pipeline)
    own = context.stage.method != "__call__"
    with torch.no_grad(), _seeded(seed or 0) if own else nullcontext():
        made = function(pipeline, **inputs)
    fields = made if isinstance(made, Mapping) else getattr(made, "__dict__", {})
    if own and not isinstance(made, Mapping):
        fields = {wanted[0]: made}
    return {name: output_field(context, fields, name) for name in wanted}


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Within the context torch's own generator (CPU) is seeded with ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _refuse_unknown(
    context: StageContext,
    known: Mapping[str, inspect.Parameter],
    arguments: Mapping[str, Any],
    seed: int | None,
) -> None:
    """Raises GraphError for unknown and missing arguments of `__call__`, and for a seed where it
    takes no generator."""
    takes = {
        name for name, p in known.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    } - RESERVED
    what = f"{_class_of(context)}.{context.stage.method}"
    for name in arguments:
        if name == "generator":
            refuse(context, f"with.{name}: use seed: instead")
        if name not in takes:
            refuse(
                context, f"with.{name}: {what} has no argument {name!r}{did_you_mean(name, takes)}"
            )
    if seed is not None and "generator" not in known and context.stage.method == "__call__":
        refuse(context, f"with.seed: {what} takes no generator, so it has no seed: remove it")
    missing = [
        name
        for name in takes
        if known[name].default is inspect.Parameter.empty and name not in arguments
    ]
    if missing:
        refuse(context, f"{what} needs {', '.join(sorted(missing))}: add it to with:")


def _refuse_mask_size(context: StageContext, arguments: Mapping[str, Any]) -> None:
    """Raises InputError where image and mask are both pictures, and the mask has the size of no
    picture among the arguments: an upscaler takes the small picture as ``image`` and the masked one
    as ``original_image``."""
    image, mask = (size_of(arguments.get(name)) for name in ("image", "mask_image"))
    pictures = {size_of(value) for name, value in arguments.items() if name != "mask_image"}
    if image is not None and mask is not None and mask not in pictures:
        names = "x".join(map(str, mask)), "x".join(map(str, image))
        raise InputError(
            f"stages.{context.stage.name}: the mask is {names[0]} and the image {names[1]}: make them the same size"
        )


def _output_type(context: StageContext, wanted: tuple[str, ...]) -> str | None:
    """The argument ``output_type`` for the outputs ``wanted``, None for the pipeline's default.
    Raises GraphError for latents with others.
    """
    if "latents" in wanted:
        if others := [name for name in wanted if name in MEDIA_KINDS]:
            refuse(context, f"a call returns either latents or {others[0]}: read only one of them")
        return "latent"
    return "pil" if "image" in wanted or "video" in wanted else None


def output_field(context: StageContext, fields: Mapping[str, Any], name: str) -> Any:
    """The output ``name`` in ``fields``; a list of one picture, video or sound as that one. Raises
    GraphError where it is missing.
    """
    if name == "latents" and name not in fields and fields:
        return next(iter(fields.values()))
    field = next((each for each in FIELDS.get(name, (name,)) if each in fields), None)
    if field is None:
        output_of = {each: output for output, names in FIELDS.items() for each in names}
        known = {output_of.get(each, each) for each in fields}
        refuse(context, f"{_class_of(context)} returns no {name}{did_you_mean(name, known)}")
    value = fields[field]
    if name == "audio":
        sounds = [Sound(samples, _rate(context)) for samples in _samples(value)]
        return sounds[0] if len(sounds) == 1 else sounds
    return value[0] if name in FIELDS and isinstance(value, list) and len(value) == 1 else value


def _samples(value: Any) -> Iterator[np.ndarray[Any, Any]]:
    """Each sound of the batch ``value``: [channels samples] in float32 on the host."""
    for sound in value:
        samples = (
            sound.detach().float().cpu().numpy()
            if isinstance(sound, torch.Tensor)
            else np.asarray(sound, dtype=np.float32)
        )
        yield samples if samples.ndim == 2 else samples.reshape(1, -1)


def _rate(context: StageContext) -> int:
    """Samples per second: of the pipeline's vocoder or VAE, or its own. Raises GraphError where
    none has it."""
    components = (getattr(context.pipeline, name, None) for name in ("vocoder", "vae", "audio_vae"))
    owners = [owner for each in components for owner in (each, getattr(each, "config", None))]
    for owner in (*owners, context.pipeline):
        rates = (getattr(owner, name, None) for name in RATES)
        if (rate := next((rate for rate in rates if isinstance(rate, int)), None)) is not None:
            return rate
    refuse(
        context,
        f"the components of {_class_of(context)} have no sampling_rate, which its audio output needs",
    )


def _class_of(context: StageContext) -> str:
    return type(context.pipeline).__name__


def refuse(context: StageContext, text: str) -> NoReturn:
    """Raises GraphError at the stage's line."""
    raise GraphError(f"stages.{context.stage.name}: {text}", context.stage.where)
