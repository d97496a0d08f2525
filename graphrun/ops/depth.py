"""The op `depth`: a depth picture of a picture, for a ControlNet."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from graphrun.graph.ops import op


@op()
def depth(
    image: Image.Image, depth_estimator: nn.Module, depth_processor: Any, device: torch.device
) -> dict[str, Image.Image]:
    """Return ``image``: the depth of ``image`` in its size, in RGB, black (far) to white (near).

    Equals transformers' `DepthEstimationPipeline`; all black if every pixel has the same depth.
    ``depth_estimator``: a depth estimation model of transformers; ``depth_processor``: its image
    processor.
    """
    pixels = depth_processor(images=image, return_tensors="pt").pixel_values
    prediction = depth_estimator(pixel_values=pixels.to(device, depth_estimator.dtype))
    depth_map = depth_processor.post_process_depth_estimation(
        prediction, [(image.height, image.width)]
    )[0]["predicted_depth"]
    pixels_far = depth_map.float().cpu().numpy()
    pixels_far = pixels_far - pixels_far.min()
    return {
        "image": Image.fromarray(
            (pixels_far / (pixels_far.max() or 1) * 255).astype(np.uint8)
        ).convert("RGB")
    }
