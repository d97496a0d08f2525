"""A preview of the picture while it is denoised: the three principal components of the latents as
red, green and blue.

It needs no VAE and no figures of a model: composition and edges are visible, the colours are not
the picture's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphrun.report.plan_files import write_with

PREVIEWS = 8  # at most about so many in a run
PIXELS = 512  # of the longer side


class Preview:
    """A journal of loops (`graphrun.ops.steps.Journal`) that saves nothing but a picture of the
    latents every few steps.

    ``inputs``: those of the run; ``height`` and ``width`` among them tell the shape of latents that
    are packed into a sequence.
    """

    def __init__(self, path: Path, inputs: Mapping[str, Any]) -> None:
        self.path = path
        self._aspect = float(inputs.get("height") or 1) / float(inputs.get("width") or 1)

    def state(self, _: str) -> None:
        """No loop is resumed."""

    def wants(self, _: str, done: int, steps: int) -> bool:
        """Whether there is a preview after step ``done``."""
        return done % max(1, steps // PREVIEWS) == 0

    def save(self, _: str, state: Any) -> None:
        """Writes the preview of a state after a step."""
        picture = preview_of(state.latents, self._aspect)
        write_with(self.path, lambda to: picture.save(to, format="PNG"))


def preview_of(latents: Any, aspect: float) -> Any:
    """The first latents of a batch as a PIL image: [B, C, H, W], [B, C, F, H, W] (the middle frame)
    or [B, H * W, C]."""
    import torch
    from PIL import Image

    one = latents[0].float()
    if one.ndim == 4:
        one = one[:, one.shape[1] // 2]
    if one.ndim == 2:
        height = max(1, round((len(one) * aspect) ** 0.5))
        width = len(one) // height
        one = one[: height * width].T.reshape(-1, height, width)
    flat = one.flatten(1) - one.flatten(1).mean(1, keepdim=True)
    _, axes = torch.linalg.eigh(flat @ flat.T)
    # else the sign of an axis is arbitrary
    axes = axes[:, -3:].flip(1) * axes[:, -3:].flip(1).sum(0).sign()
    shown = axes.T @ flat
    shown = shown / (2 * shown.std(1, keepdim=True) + 1e-12)
    pixels = ((shown.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).reshape(-1, *one.shape[1:])
    pixels = pixels if len(pixels) == 3 else pixels[:1].expand(3, -1, -1)
    image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    scale = PIXELS / max(image.size)
    return image.resize(
        (round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC
    )
