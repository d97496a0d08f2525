"""The ops of a diffusion pipeline: `encode_prompt`, `denoise`, `decode`. All three run the
pipeline's own code.

Embeddings are passed between stages as a mapping: the name of the `__call__` argument -> tensor.
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
from graphrun.graph.graph import Stage
from graphrun.ops.pipeline import known_arguments, without_steps
from graphrun.ops.steps import Steps, journaled


@dataclass(frozen=True, slots=True)
class StageContext:
    """What an op works with: its stage in the graph, the pipeline assembled for it, the device, and
    the states of denoising loops.

    ``steps`` is None in a dry run, in which pictures are not needed either unless a later stage
    reads them (``pictures``).
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
    """``embeds``: the embeddings of ``prompt`` by name, as the pipeline's own ``encode_prompt``
    returns them.

    Classifier-free guidance is on where the pipeline supports it and ``guidance_scale`` is above 1,
    as in the pipelines themselves. A negative prompt that needs a second call (FLUX, Qwen-Image,
    HunyuanVideo) is encoded if ``true_cfg_scale`` is above 1. ``num_images`` counts videos too.
    Other arguments default to those of `__call__`, which passes them on, not to those of
    ``encode_prompt``: Wan encodes 512 tokens in the former and 226 in the latter.
    """
    pipeline = context.pipeline
    call, own = (
        inspect.signature(type(pipeline).__call__).parameters,
        inspect.signature(pipeline.encode_prompt).parameters,
    )
    arguments = {
        **{
            name: call[name].default
            for name in own
            if name in call and call[name].default is not call[name].empty
        },
        "prompt": prompt,
        "negative_prompt": negative_prompt,
        "device": context.device,
        "num_images_per_prompt": num_images,
        "num_videos_per_prompt": num_images,
        "do_classifier_free_guidance": None if guidance_scale is None else guidance_scale > 1,
        **settings,
    }
    embeds = _encode(pipeline, own, arguments)
    scale = true_cfg_scale
    if scale is None:
        scale = call["true_cfg_scale"].default if "true_cfg_scale" in call else 1.0
    if "negative_prompt" not in own and negative_prompt is not None and scale > 1:
        negative = _encode(pipeline, own, {**arguments, "prompt": negative_prompt})
        embeds |= {f"negative_{name}": value for name, value in negative.items()}
    return {
        "embeds": {
            name: value for name, value in embeds.items() if name in call and value is not None
        }
    }


def _encode(
    pipeline: Any, own: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """The results of ``pipeline.encode_prompt`` by name; called once per text encoder where it has
    a ``text_encoder_index``.

    ``own``: the parameters of ``encode_prompt``.
    """
    required = {
        name: None
        for name, parameter in own.items()
        if parameter.default is parameter.empty and name != "kwargs"
    }
    suffixes = ("", "_2") if "text_encoder_index" in own else ("",)
    embeds: dict[str, Any] = {}
    for index, suffix in enumerate(suffixes):
        known = known_arguments(pipeline.encode_prompt, {**arguments, "text_encoder_index": index})
        with torch.no_grad():
            found = pipeline.encode_prompt(**{**required, **known})
        found = found if isinstance(found, tuple) else (found,)
        names = returned_names(inspect.unwrap(type(pipeline).encode_prompt), len(found))
        embeds |= {f"{name}{suffix}": value for name, value in zip(names, found, strict=True)}
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
    """``latents``: what the pipeline's `__call__` returns as latents after ``steps`` steps, packed
    as that pipeline packs them.

    The noise comes from a CPU generator seeded with ``seed``, so it is the same on every device.
    The embeddings already hold one row for each of ``num_images``. The loop starts at the state
    that ``context.steps`` has, and reports every step to it.
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
    with journaled(context.pipeline, context.stage.name, generator, context.steps) as more:
        return {"latents": _call(context.pipeline, {**arguments, **more})}


def decode(
    context: StageContext,
    *,
    latents: torch.Tensor,
    embeds: Mapping[str, torch.Tensor],
    output_type: str = "pil",
    tiling: bool | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """``image``: the picture (or list of several) decoded from ``latents``; a video is a list of
    frames.

    ``tiling``: whether the VAE decodes tile by tile, which changes the picture slightly; None keeps
    the VAE's setting.

    diffusers has no function for this. The tail of `__call__` is reached by calling it with latents
    and a scheduler without steps. Latents are cast to the VAE's dtype first, as SDXL's pipeline
    does where its VAE computes in fp32.
    """
    pipeline = context.pipeline
    pipeline.scheduler = without_steps(pipeline.scheduler)
    if (vae := getattr(pipeline, "vae", None)) is not None:
        latents = latents.to(vae.dtype)
        set_tiling(vae, tiling)
    if not context.pictures:
        without_pictures(pipeline)
    # Without steps there is no guidance, so nothing should be encoded or copied for it.
    unguided = {"guidance_scale": 1.0, "true_cfg_scale": 1.0}
    arguments = {
        **unguided,
        **embeds,
        **settings,
        "latents": latents,
        "output_type": output_type,
        "return_dict": False,
    }
    images = _call(pipeline, arguments)
    return {"image": images[0] if isinstance(images, list) and len(images) == 1 else images}


def set_tiling(vae: Any, tiling: bool | None) -> None:
    """Whether ``vae`` works tile by tile, which changes pictures slightly; None keeps its
    setting."""
    if tiling is not None:
        (vae.enable_tiling if tiling else vae.disable_tiling)()


def without_pictures(pipeline: Any) -> None:
    """Stops ``pipeline`` from copying its pictures to the host, for dry runs."""
    for name in ("image_processor", "video_processor"):
        processor: Any = getattr(pipeline, name, None)
        if hasattr(processor, "pt_to_numpy"):  # other kinds of processors have the same name
            processor.pt_to_numpy = _one_pixel


def _one_pixel(pictures: torch.Tensor) -> Any:
    """Replaces a processor's copy to the host, which takes gigabytes and seconds for a video of 129
    frames."""
    return np.zeros((len(pictures), 1, 1, 3), dtype=np.float32)


def _call(pipeline: Any, arguments: dict[str, Any]) -> Any:
    known = inspect.signature(type(pipeline).__call__).parameters
    # PixArt's negative prompt defaults to ""
    texts = {name: None for name in ("prompt", "negative_prompt") if name in known}
    return pipeline(**{**texts, **known_arguments(type(pipeline).__call__, arguments)})[0]


@functools.cache
def returned_names(function: Any, count: int | None = None) -> tuple[str, ...]:
    """The names in the last ``return a, b, c`` of ``function``'s source, where pipelines name
    embeddings as `__call__` does.

    ``count``: the number of values, None for any. Raises GraphError where the source has no such
    return.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    for node in reversed([node for node in ast.walk(tree) if isinstance(node, ast.Return)]):
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        names = tuple(value.id for value in values if isinstance(value, ast.Name))
        if len(names) == len(values) and count in (None, len(names)):
            return names
    raise GraphError(
        f"{function.__qualname__} returns {count or 'some'} values whose names cannot be found in its source"
    )
