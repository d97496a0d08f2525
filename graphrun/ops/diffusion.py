"""The ops of a diffusion pipeline: `encode_prompt`, `denoise`, `decode`. All three run the pipeline's own code.

Embeddings travel as a mapping from the names under which the pipeline's `__call__` takes them to tensors.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphrun.errors import GraphError
from graphrun.ops.pipeline import accepted, finished
from graphrun.ops.steps import Journal, journaled


@dataclass(frozen=True, slots=True)
class StageContext:
    """What an op works with: the pipeline put together for its stage, the device it computes on, who keeps states of loops."""

    stage: str
    pipeline: Any
    device: torch.device
    journal: Journal | None = None


def encode_prompt(
    context: StageContext,
    *,
    prompt: str,
    negative_prompt: str | None = None,
    guidance_scale: float | None = None,
    num_images: int = 1,
    **settings: Any,
) -> dict[str, Any]:
    """``embeds``: the embeddings of ``prompt`` by name, as the pipeline's own ``encode_prompt`` returns them.

    Classifier-free guidance is on where the pipeline has it and ``guidance_scale`` is above 1, as in the pipelines themselves.
    """
    pipeline = context.pipeline
    guided = None if guidance_scale is None else guidance_scale > 1
    arguments = {
        "prompt": prompt,
        "negative_prompt": negative_prompt,
        "device": context.device,
        "num_images_per_prompt": num_images,
        "do_classifier_free_guidance": guided,
        **settings,
    }
    with torch.no_grad():
        found = pipeline.encode_prompt(**accepted(pipeline.encode_prompt, arguments))
    found = found if isinstance(found, tuple) else (found,)
    names = _returned_names(type(pipeline).encode_prompt, len(found))
    wanted = inspect.signature(type(pipeline).__call__).parameters
    return {"embeds": {name: value for name, value in zip(names, found, strict=True) if name in wanted and value is not None}}


def denoise(
    context: StageContext,
    *,
    embeds: Mapping[str, torch.Tensor],
    steps: int | None = None,
    seed: int = 0,
    num_images: int | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """``latents``: what the pipeline's `__call__` returns as latents after ``steps`` steps, packed as that pipeline packs them.

    The noise comes from a CPU generator seeded with ``seed``, so that it is the same on every device. The embeddings already hold
    one row for each of ``num_images``. The loop begins where the context's journal says, which hears of each step.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    arguments = {
        **embeds,
        "num_inference_steps": steps,
        "generator": generator,
        "output_type": "latent",
        "return_dict": False,
        **settings,
        **journaled(context.pipeline, context.stage, generator, context.journal),
    }
    return {"latents": _call(context.pipeline, arguments)}


def decode(
    context: StageContext, *, latents: torch.Tensor, embeds: Mapping[str, torch.Tensor], output_type: str = "pil", **settings: Any
) -> dict[str, Any]:
    """``image``: the first picture (or the list of them, if more than one) decoded from ``latents``.

    diffusers has no function for this: it is the tail of `__call__`, reached by calling it with latents and a scheduler that has
    no steps left. Latents are cast to the VAE's precision first, as SDXL's pipeline does where its VAE computes in fp32.
    """
    pipeline = context.pipeline
    pipeline.scheduler = finished(pipeline.scheduler)
    if (vae := getattr(pipeline, "vae", None)) is not None:
        latents = latents.to(vae.dtype)
    images = _call(pipeline, {**embeds, "latents": latents, "output_type": output_type, "return_dict": False, **settings})
    return {"image": images[0] if isinstance(images, list) and len(images) == 1 else images}


def _call(pipeline: Any, arguments: dict[str, Any]) -> Any:
    return pipeline(**accepted(type(pipeline).__call__, arguments))[0]


def _returned_names(function: Any, count: int) -> tuple[str, ...]:
    """The names in the last ``return a, b, c`` of ``function``'s source: there pipelines name embeddings as `__call__` does."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    for node in reversed([node for node in ast.walk(tree) if isinstance(node, ast.Return)]):
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        names = tuple(value.id for value in values if isinstance(value, ast.Name))
        if len(names) == count == len(values):
            return names
    raise GraphError(f"{function.__qualname__} returns {count} values whose names cannot be read from its source")
