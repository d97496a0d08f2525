"""Values of ComfyUI as values of graphrun, and back.

An IMAGE is a float tensor [pictures, height, width, channels] in [0, 1]. A MASK is [pictures,
height, width], 1 where it selects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graphrun.errors import InputError


def images_of(pictures: Sequence[Any]) -> Any:
    """Return PIL ``pictures`` of one size as an IMAGE. Raises InputError without any."""
    import numpy as np
    import torch

    if not pictures:
        raise InputError("the graph makes no picture or video: choose one that does")
    arrays = [np.asarray(picture.convert("RGB"), dtype=np.float32) / 255 for picture in pictures]
    return torch.from_numpy(np.stack(arrays))


def picture_of(images: Any, name: str) -> Any:
    """Return the only picture of an IMAGE as a PIL picture, RGB.

    ``name``: of the node's input. Raises InputError for several pictures.
    """
    return _picture(images, name, 4).convert("RGB")


def mask_of(masks: Any, name: str) -> Any:
    """Return the only picture of a MASK as a PIL picture, L: white where it selects."""
    return _picture(masks, name, 3).convert("L")


def _picture(tensor: Any, name: str, dimensions: int) -> Any:
    from PIL import Image

    batch = tensor if tensor.ndim == dimensions else tensor[None]
    if len(batch) != 1:
        raise InputError(
            f"{name} has {len(batch)} pictures, and a run takes one: choose one with the node "
            '"Get Image from Batch"'
        )
    pixels = (batch[0].detach().cpu().float().clamp(0, 1) * 255).round().byte().numpy()
    return Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)


def pictures_in(value: Any) -> Iterator[Any]:
    """Yield the PIL pictures in ``value``, an output of a graph: one, a list, a list of lists."""
    if hasattr(value, "save") and hasattr(value, "convert"):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from pictures_in(item)


def further_inputs(text: str) -> dict[str, str]:
    """Return the inputs in ``text``, which has ``NAME=VALUE`` on each line.

    Raises InputError that names the line.
    """
    values: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        name, equals, value = line.partition("=")
        if not line.strip():
            continue
        if not equals or not name.strip():
            raise InputError(
                f"inputs, line {number}: {line.strip()[:100]!r} is not NAME=VALUE; type "
                "guidance_scale=3.5, for example"
            )
        values[name.strip()] = value.strip()
    return values


def joined(fields: Mapping[str, Any], extra_inputs: Mapping[str, str]) -> dict[str, Any]:
    """Return the inputs of the node and further ones. Raises InputError for a name in both."""
    if duplicates := fields.keys() & extra_inputs.keys():
        name = min(duplicates)
        raise InputError(f"inputs: {name} has a value in the node already; take it out of inputs")
    return {**fields, **extra_inputs}
