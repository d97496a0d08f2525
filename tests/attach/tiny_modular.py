"""Modular pipelines built small with random weights, of the same parts as the plain ones, from blocks with components handed in."""

from __future__ import annotations

from typing import Any

import diffusers as d
import torch
from tiny_cases import listed

BLOCKS: dict[str, Any] = {
    "FluxPipeline": d.FluxAutoBlocks,
    "QwenImagePipeline": d.QwenImageAutoBlocks,
    "StableDiffusionXLPipeline": d.StableDiffusionXLAutoBlocks,
    "WanImageToVideoPipeline": d.WanImage2VideoAutoBlocks,
    "WanPipeline-two-experts": d.Wan22Blocks,
}


def modular(name: str, blocks: Any = None) -> Any:
    """The modular pipeline of the same parts as the plain one called ``name``, of ``blocks`` in place of its own."""
    torch.manual_seed(0)
    parts = listed()[name][2]()
    pipe = (blocks or BLOCKS[name]()).init_pipeline()
    pipe.update_components(**{key: part for key, part in parts.items() if key in pipe.component_names})
    for module in pipe.components.values():
        if isinstance(module, torch.nn.Module):
            module.eval().requires_grad_(False)
    return pipe
