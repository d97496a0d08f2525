"""Import first in benchmarks that build diffusers' pipelines: no hub, and the tests' folders."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
os.environ.update(
    TRANSFORMERS_VERBOSITY="error",
    DIFFUSERS_VERBOSITY="error",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)
sys.path[:0] = [
    str(ROOT),
    *(str(ROOT / "tests" / part) for part in ("attach", "importing", "sweep")),
]


def torchvision_operators() -> Any:
    """Declare operators that a torchvision made for CUDA expects, if there is no CUDA.

    Keep what is returned: they exist as long as it does. Call it before importing torchvision.
    """
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for operator in () if torch.cuda.is_available() else ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
