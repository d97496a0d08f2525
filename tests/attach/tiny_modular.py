"""Tiny modular pipelines with random weights, built from blocks and the components of the plain pipelines."""

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
    """The modular pipeline with the components of the plain one called ``name``. ``blocks``: used in place of its own."""
    torch.manual_seed(0)
    parts = listed()[name][2]()
    pipe = (blocks or BLOCKS[name]()).init_pipeline()
    pipe.update_components(**{key: part for key, part in parts.items() if key in pipe.component_names})
    for module in pipe.components.values():
        if isinstance(module, torch.nn.Module):
            module.eval().requires_grad_(False)
    return pipe
