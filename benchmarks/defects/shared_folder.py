"""python benchmarks/defects/shared_folder.py: wrong output, silently, where group offloading shares
a folder.

The files' names come from the groups' names within a component, and a file that exists is not
written again. Components with equal submodule names therefore read each other's weights;
``pipeline.enable_group_offload`` hands one folder to all of them.
"""

from __future__ import annotations

import tempfile
from typing import Any

from show import show


def reproduce() -> dict[str, Any]:
    """Two CLIP encoders that pipeline.enable_group_offload put into one folder both encode with the
    weights of the first"""
    import torch
    from peers_cell import Subject

    def encoded(folder: str | None) -> list[torch.Tensor]:
        pipeline = Subject("hidream", "sim", 1).pipeline()
        if folder is not None:
            cpu = torch.device("cpu")
            pipeline.enable_group_offload(
                onload_device=cpu, offload_type="leaf_level", offload_to_disk_path=folder
            )
        ids = torch.arange(5, 15)[None]
        with torch.no_grad():
            return [
                encoder(ids).text_embeds
                for encoder in (pipeline.text_encoder, pipeline.text_encoder_2)
            ]

    plain = encoded(None)
    with tempfile.TemporaryDirectory() as folder:
        shared = encoded(folder)
    right = [torch.equal(a, b) for a, b in zip(plain, shared, strict=True)]
    return {
        "shown": not all(right),
        "outputs_right": right,
        "both_encoders_agree_now": torch.equal(*shared),
    }


if __name__ == "__main__":
    show(reproduce)
