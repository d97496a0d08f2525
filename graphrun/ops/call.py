"""The op `call`: runs a pipeline's `__call__`, or the stage's method, and names its outputs.

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

# for each output, its names in diffusers' output classes, the most common first
FIELDS: Mapping[str, tuple[str, ...]] = {
    "image": ("images", "image"),
    "video": ("frames", "videos", "video"),
    "audio": ("audios", "audio"),
}
# names of the sample rate in diffusers' models and pipelines, in samples per second
RATES = ("sampling_rate", "output_sampling_rate", "sample_rate")
# arguments of `__call__` that a stage cannot pass: graphrun sets or renames them
RESERVED = frozenset(
    {"self", "generator", "return_dict", "callback", "callback_steps", "callback_on_step_end"}
)


@dataclass(frozen=True, slots=True)
class Sound:
    """Sound: ``samples`` [channels samples] in float32, at ``rate`` samples per second."""

    samples: Any
    rate: int


def call(
    context: StageContext, *, seed: int | None = None, tiling: bool | None = None, **arguments: Any
) -> dict[str, Any]:
    """Return by name the outputs of this stage that the graph reads.

    Random numbers come from a CPU generator seeded with ``seed``, default 0. For a method other
    than `__call__`, torch's global generator is seeded, and the method's result is the one output
    unless it is a mapping. ``tiling``: whether the VAE decodes tile by tile; None keeps its
    setting.

    Raises GraphError at the stage's line for an unknown argument, an output that the method does
    not return, and errors of the pipeline's own code; InputError if mask and image differ in size.
    """
    pipeline, output_names = context.pipeline, context.stage.outputs
    function = getattr(type(pipeline), context.stage.method, None)
    if not callable(function):
        refuse(context, f"method: {_class_of(context)} has no method {context.stage.method}")
    parameters = inspect.signature(function).parameters
    _refuse_unknown(context, parameters, arguments, seed)
    _refuse_mask_size(context, arguments)
    if tiling is not None and not hasattr(getattr(pipeline, "vae", None), "enable_tiling"):
        refuse(
            context,
            f"with.tiling: {_class_of(context)} has no VAE that decodes in tiles: remove it",
        )
    set_tiling(getattr(pipeline, "vae", None), tiling)
    # optional inputs that are not set
    unset_names = {
        name
        for name, value in arguments.items()
        if value is None and context.stage.arguments.get(name) is not None
    }
    inputs = {name: value for name, value in arguments.items() if name not in unset_names}
    if "generator" in parameters:
        inputs["generator"] = torch.Generator("cpu").manual_seed(seed or 0)
    if (
        "output_type" in parameters
        and "output_type" not in inputs
        and (kind := _output_type(context, output_names)) is not None
    ):
        inputs["output_type"] = kind
    if (
        not context.pictures
        and inputs.get("output_type") == "pil"
        and "padding_mask_crop" not in inputs
    ):
        without_pictures(pipeline)
    is_own_method = context.stage.method != "__call__"
    with torch.no_grad(), _seed_torch(seed or 0) if is_own_method else nullcontext():
        result = function(pipeline, **inputs)
    fields = result if isinstance(result, Mapping) else getattr(result, "__dict__", {})
    if is_own_method and not isinstance(result, Mapping):
        fields = {output_names[0]: result}
    return {name: output_field(context, fields, name) for name in output_names}


@contextmanager
def _seed_torch(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _refuse_unknown(
    context: StageContext,
    parameters: Mapping[str, inspect.Parameter],
    arguments: Mapping[str, Any],
    seed: int | None,
) -> None:
    """Raise GraphError for unknown or missing arguments, or a seed without a generator."""
    argument_names = {
        name for name, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    } - RESERVED
    label = f"{_class_of(context)}.{context.stage.method}"
    for name in arguments:
        if name == "generator":
            refuse(context, f"with.{name}: use seed: instead")
        if name not in argument_names:
            refuse(
                context,
                f"with.{name}: {label} has no argument "
                f"{name!r}{did_you_mean(name, argument_names)}",
            )
    if seed is not None and "generator" not in parameters and context.stage.method == "__call__":
        refuse(context, f"with.seed: {label} takes no generator, so it has no seed: remove it")
    missing_names = [
        name
        for name in argument_names
        if parameters[name].default is inspect.Parameter.empty and name not in arguments
    ]
    if missing_names:
        refuse(context, f"{label} needs {', '.join(sorted(missing_names))}: add it to with:")


def _refuse_mask_size(context: StageContext, arguments: Mapping[str, Any]) -> None:
    """Raise InputError if the mask has the size of no picture among the arguments. Any picture will
    do: an upscaler masks ``original_image``, not ``image``."""
    image, mask = (size_of(arguments.get(name)) for name in ("image", "mask_image"))
    pictures = {size_of(value) for name, value in arguments.items() if name != "mask_image"}
    if image is not None and mask is not None and mask not in pictures:
        names = "x".join(map(str, mask)), "x".join(map(str, image))
        raise InputError(
            f"stages.{context.stage.name}: the mask is {names[0]} and the image {names[1]}: make "
            "them the same size"
        )


def _output_type(context: StageContext, output_names: tuple[str, ...]) -> str | None:
    """Return the argument ``output_type`` for ``output_names``; None for the pipeline's default.
    Raises GraphError for latents together with other media."""
    if "latents" in output_names:
        if media_names := [name for name in output_names if name in MEDIA_KINDS]:
            refuse(
                context, f"a call returns either latents or {media_names[0]}: read only one of them"
            )
        return "latent"
    return "pil" if "image" in output_names or "video" in output_names else None


def output_field(context: StageContext, fields: Mapping[str, Any], name: str) -> Any:
    """Return the output ``name`` in ``fields``, unpacked from a list of one. Raises GraphError."""
    if name == "latents" and name not in fields and fields:
        return next(iter(fields.values()))
    field = next(
        (field_name for field_name in FIELDS.get(name, (name,)) if field_name in fields), None
    )
    if field is None:
        output_of = {key: output for output, names in FIELDS.items() for key in names}
        output_names = {output_of.get(key, key) for key in fields}
        refuse(context, f"{_class_of(context)} returns no {name}{did_you_mean(name, output_names)}")
    value = fields[field]
    if name == "audio":
        sounds = [Sound(samples, _rate(context)) for samples in _samples(value)]
        return sounds[0] if len(sounds) == 1 else sounds
    return value[0] if name in FIELDS and isinstance(value, list) and len(value) == 1 else value


def _samples(value: Any) -> Iterator[np.ndarray[Any, Any]]:
    """Yield each sound of the batch ``value``: [channels samples] in float32 on the host."""
    for sound in value:
        samples = (
            sound.detach().float().cpu().numpy()
            if isinstance(sound, torch.Tensor)
            else np.asarray(sound, dtype=np.float32)
        )
        yield samples if samples.ndim == 2 else samples.reshape(1, -1)


def _rate(context: StageContext) -> int:
    """Return the samples per second of the pipeline's vocoder, VAE or the pipeline. Raises
    GraphError."""
    components = (getattr(context.pipeline, name, None) for name in ("vocoder", "vae", "audio_vae"))
    owners = [
        owner
        for component in components
        for owner in (component, getattr(component, "config", None))
    ]
    for owner in (*owners, context.pipeline):
        rates = (getattr(owner, name, None) for name in RATES)
        if (rate := next((rate for rate in rates if isinstance(rate, int)), None)) is not None:
            return rate
    refuse(
        context,
        f"the components of {_class_of(context)} have no sampling_rate, which its audio output "
        "needs",
    )


def _class_of(context: StageContext) -> str:
    return type(context.pipeline).__name__


def refuse(context: StageContext, text: str) -> NoReturn:
    """Raise GraphError at the stage's line."""
    raise GraphError(f"stages.{context.stage.name}: {text}", context.stage.file_line)
