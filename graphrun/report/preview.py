"""A preview of the picture while it is denoised, without a VAE or figures of a model.

The three principal components of the latents are shown as red, green and blue. Composition and
edges are visible; the colours are not the picture's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphrun.report.plan_files import write_with

PREVIEWS = 8  # about the largest number of previews in a run
PIXELS = 512  # length of the longer side


class Preview:
    """A journal of loops (`graphrun.ops.steps.StepJournal`) that only saves a preview now and then.

    ``inputs``: of the run; their ``height`` and ``width`` give the shape of latents that are packed
    into a sequence.
    """

    def __init__(self, path: Path, inputs: Mapping[str, Any]) -> None:
        self.path = path
        self._aspect = float(inputs.get("height") or 1) / float(inputs.get("width") or 1)

    def state(self, _: str) -> None:
        """Return None: no loop is resumed."""

    def wants(self, _: str, step: int, steps: int) -> bool:
        """Return whether there is a preview after ``step``."""
        return step % max(1, steps // PREVIEWS) == 0

    def save(self, _: str, state: Any) -> None:
        picture = preview_of(state.latents, self._aspect)
        write_with(self.path, lambda target: picture.save(target, format="PNG"))


def preview_of(latents: Any, aspect: float) -> Any:
    """Return the first latents of a batch as a PIL image.

    Latents are [B, C, H, W], [B, C, F, H, W] (the middle frame is shown) or [B, H * W, C].
    """
    import torch
    from PIL import Image

    latent = latents[0].float()
    if latent.ndim == 4:
        latent = latent[:, latent.shape[1] // 2]
    if latent.ndim == 2:
        height = max(1, round((len(latent) * aspect) ** 0.5))
        width = len(latent) // height
        latent = latent[: height * width].T.reshape(-1, height, width)
    flat = latent.flatten(1) - latent.flatten(1).mean(1, keepdim=True)
    _, axes = torch.linalg.eigh(flat @ flat.T)
    # the sign of an axis is arbitrary: make its sum positive
    axes = axes[:, -3:].flip(1) * axes[:, -3:].flip(1).sum(0).sign()
    components = axes.T @ flat
    components = components / (2 * components.std(1, keepdim=True) + 1e-12)
    pixels = (
        ((components.clamp(-1, 1) + 1) * 127.5)
        .round()
        .to(torch.uint8)
        .reshape(-1, *latent.shape[1:])
    )
    pixels = pixels if len(pixels) == 3 else pixels[:1].expand(3, -1, -1)
    image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    scale = PIXELS / max(image.size)
    return image.resize(
        (round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC
    )
