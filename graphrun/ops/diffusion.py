"""The ops of a diffusion pipeline: `encode_prompt`, `denoise`, `decode`.

All three run the pipeline's own code. Stages pass embeddings as a mapping from the name of the
`__call__` argument to the tensor.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from graphrun.errors import GraphError
from graphrun.graph.parts import Stage
from graphrun.ops.pipeline import known_arguments, without_steps
from graphrun.ops.steps import Steps, journal_steps


@dataclass(frozen=True, slots=True)
class StageContext:
    """The context of an op: its stage, the pipeline assembled for it, the device, and loop states.

    ``steps``: the states of denoising loops; None in a dry run. ``pictures``: the op must compute
    pictures; in a dry run only if a later stage reads them.
    """

    stage: Stage
    pipeline: Any
    device: torch.device
    steps: Steps | None
    pictures: bool = True


def encode_prompt(
    context: StageContext,
    *,
    prompt: str,
    negative_prompt: str | None = None,
    guidance_scale: float | None = None,
    true_cfg_scale: float | None = None,
    num_images: int = 1,
    **settings: Any,
) -> dict[str, Any]:
    """Return ``embeds``: the embeddings of ``prompt`` by name, from the pipeline's own code.

    Classifier-free guidance is on if the pipeline supports it and ``guidance_scale`` is above 1, as
    in diffusers. A negative prompt that needs a second call (FLUX, Qwen-Image, HunyuanVideo) is
    encoded if ``true_cfg_scale`` is above 1. ``num_images`` counts videos too. Other arguments
    default as in `__call__`, not as in ``encode_prompt``: Wan encodes 512 tokens with the former,
    226 with the latter.
    """
    pipeline = context.pipeline
    call_parameters, encode_parameters = (
        inspect.signature(type(pipeline).__call__).parameters,
        inspect.signature(pipeline.encode_prompt).parameters,
    )
    arguments = {
        **{
            name: call_parameters[name].default
            for name in encode_parameters
            if name in call_parameters
            and call_parameters[name].default is not call_parameters[name].empty
        },
        "prompt": prompt,
        "negative_prompt": negative_prompt,
        "device": context.device,
        "num_images_per_prompt": num_images,
        "num_videos_per_prompt": num_images,
        "do_classifier_free_guidance": None if guidance_scale is None else guidance_scale > 1,
        **settings,
    }
    embeds = _encode(pipeline, encode_parameters, arguments)
    scale = true_cfg_scale
    if scale is None:
        scale = (
            call_parameters["true_cfg_scale"].default
            if "true_cfg_scale" in call_parameters
            else 1.0
        )
    if "negative_prompt" not in encode_parameters and negative_prompt is not None and scale > 1:
        negative = _encode(pipeline, encode_parameters, {**arguments, "prompt": negative_prompt})
        embeds |= {f"negative_{name}": value for name, value in negative.items()}
    return {
        "embeds": {
            name: value
            for name, value in embeds.items()
            if name in call_parameters and value is not None
        }
    }


def _encode(
    pipeline: Any, parameters: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the results of ``pipeline.encode_prompt`` by name. It is called once per text encoder
    if ``parameters``, its own, contain ``text_encoder_index``."""
    required = {
        name: None
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and name != "kwargs"
    }
    suffixes = ("", "_2") if "text_encoder_index" in parameters else ("",)
    embeds: dict[str, Any] = {}
    for index, suffix in enumerate(suffixes):
        encode_arguments = known_arguments(
            pipeline.encode_prompt, {**arguments, "text_encoder_index": index}
        )
        with torch.no_grad():
            results = pipeline.encode_prompt(**{**required, **encode_arguments})
        results = results if isinstance(results, tuple) else (results,)
        names = returned_names(inspect.unwrap(type(pipeline).encode_prompt), len(results))
        embeds |= {f"{name}{suffix}": value for name, value in zip(names, results, strict=True)}
    return embeds


def denoise(
    context: StageContext,
    *,
    embeds: Mapping[str, torch.Tensor],
    steps: int | None = None,
    seed: int = 0,
    num_images: int | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Return ``latents`` after ``steps`` steps, packed as the pipeline packs them.

    The noise comes from a CPU generator seeded with ``seed``, so it is the same on every device.
    ``embeds`` already has one row for each of ``num_images``. The loop starts at the state in
    ``context.steps`` and reports every step to it.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    arguments = {
        **embeds,
        "num_inference_steps": steps,
        "generator": generator,
        "output_type": "latent",
        "return_dict": False,
        **settings,
    }
    with journal_steps(
        context.pipeline, context.stage.name, generator, context.steps
    ) as loop_arguments:
        return {"latents": _call(context.pipeline, {**arguments, **loop_arguments})}


def decode(
    context: StageContext,
    *,
    latents: torch.Tensor,
    embeds: Mapping[str, torch.Tensor],
    output_type: str = "pil",
    tiling: bool | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Return ``image``: the pictures of ``latents``, one or a list; a video is a list of frames.

    ``tiling``: as for `set_tiling`. diffusers has no function for decoding alone, so this calls
    `__call__` with latents and a scheduler without steps. Latents are first cast to the VAE's
    dtype, as SDXL's pipeline does if its VAE computes in fp32.
    """
    pipeline = context.pipeline
    pipeline.scheduler = without_steps(pipeline.scheduler)
    if (vae := getattr(pipeline, "vae", None)) is not None:
        latents = latents.to(vae.dtype)
        set_tiling(vae, tiling)
    if not context.pictures:
        without_pictures(pipeline)
    # without steps there is no guidance: avoid encoding and copying for it
    guidance_off = {"guidance_scale": 1.0, "true_cfg_scale": 1.0}
    arguments = {
        **guidance_off,
        **embeds,
        **settings,
        "latents": latents,
        "output_type": output_type,
        "return_dict": False,
    }
    images = _call(pipeline, arguments)
    return {"image": images[0] if isinstance(images, list) and len(images) == 1 else images}


def set_tiling(vae: Any, tiling: bool | None) -> None:
    """Turn tiling of ``vae`` on or off, which changes pictures slightly; None keeps its setting."""
    if tiling is not None:
        (vae.enable_tiling if tiling else vae.disable_tiling)()


def without_pictures(pipeline: Any) -> None:
    """Make ``pipeline`` skip the copy of its pictures to the host, for dry runs."""
    for name in ("image_processor", "video_processor"):
        processor: Any = getattr(pipeline, name, None)
        if hasattr(processor, "pt_to_numpy"):  # other kinds of processors have the same name
            processor.pt_to_numpy = _one_pixel


def _one_pixel(pictures: torch.Tensor) -> Any:
    """Return pictures of one pixel, in place of a processor's copy to the host. For a video of 129
    frames that copy takes gigabytes and seconds."""
    return np.zeros((len(pictures), 1, 1, 3), dtype=np.float32)


def _call(pipeline: Any, arguments: dict[str, Any]) -> Any:
    parameters = inspect.signature(type(pipeline).__call__).parameters
    # explicit, since PixArt's negative prompt defaults to ""
    texts = {name: None for name in ("prompt", "negative_prompt") if name in parameters}
    return pipeline(**{**texts, **known_arguments(type(pipeline).__call__, arguments)})[0]


@functools.cache
def returned_names(function: Any, count: int | None = None) -> tuple[str, ...]:
    """Return the names in the last ``return a, b, c`` of ``function``'s source.

    Pipelines name embeddings there as in `__call__`. ``count``: the number of values; None: any.
    Raises GraphError if the source has no such return.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    for node in reversed([node for node in ast.walk(tree) if isinstance(node, ast.Return)]):
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        names = tuple(value.id for value in values if isinstance(value, ast.Name))
        if len(names) == len(values) and count in (None, len(names)):
            return names
    raise GraphError(
        f"{function.__qualname__} returns {count or 'some'} values whose names cannot be found "
        "in its source"
    )
