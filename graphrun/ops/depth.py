"""The op `depth`: the picture of a picture's depth, such as a ControlNet follows."""

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
    """``image``: the depth of ``image`` in its size, from black (far) to white (near), as
    transformers' `DepthEstimationPipeline` makes it, in RGB. All black where every pixel is equally
    far.

    ``depth_estimator``: a model of transformers for depth estimation. ``depth_processor``: its
    image processor.
    """
    pixels = depth_processor(images=image, return_tensors="pt").pixel_values
    found = depth_estimator(pixel_values=pixels.to(device, depth_estimator.dtype))
    made = depth_processor.post_process_depth_estimation(found, [(image.height, image.width)])[0][
        "predicted_depth"
    ]
    far = made.float().cpu().numpy()
    far = far - far.min()
    return {
        "image": Image.fromarray((far / (far.max() or 1) * 255).astype(np.uint8)).convert("RGB")
    }
