"""python benchmarks/defects/tied_weights.py: wrong output, silently, where group offloading to disk
meets tied weights.

Leaf-level groups are put on disk one after another. Modules that share a parameter are in two
groups: the first writes it and empties it, the second writes the emptied one. PyTorch fills new
memory here (`torch.use_deterministic_algorithms`), so that what is left in it does not decide.
"""

from __future__ import annotations

import tempfile
from typing import Any

from show import show


def reproduce() -> dict[str, Any]:
    """A T5 encoder, whose embedding is tied, offloaded by leaf to a folder of its own encodes
    something else"""
    import torch
    from diffusers.hooks import apply_group_offloading
    from peers_cell import Subject

    def encoded(folder: str | None) -> torch.Tensor:
        encoder = Subject("flux", "sim", 1).modules["text_encoder_2"]
        if folder is not None:
            cpu = torch.device("cpu")
            apply_group_offloading(
                encoder, onload_device=cpu, offload_type="leaf_level", offload_to_disk_path=folder
            )
        with torch.no_grad():
            return encoder(torch.arange(5, 15)[None])[0]

    plain = encoded(None)
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            offloaded = encoded(folder)
    finally:
        torch.use_deterministic_algorithms(deterministic)
    return {
        "shown": not torch.equal(plain, offloaded),
        "largest_difference": float((plain - offloaded).abs().max()),
    }


if __name__ == "__main__":
    show(reproduce)
