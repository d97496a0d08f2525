"""Random weights for a module whose parameters are on meta: the same for the same name and seed, whatever is built before.

Decides the values alone. They keep activations near 1 in any depth, so that images are finite and not flat in 16 bits.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn

# A tensor with more elements repeats a tile of this many: 12 billion parameters are filled at the speed of memory, not of the
# generator (one thread, about 10**8 numbers a second). Odd, so that rows of usual lengths differ.
TILE = 2**20 - 3


def fill(module: nn.Module, seed: str) -> None:
    """Gives every parameter of ``module`` memory on the CPU and values; shapes, dtypes and ties stay."""
    made: dict[int, nn.Parameter] = {}
    for prefix, child in module.named_modules():
        for key, parameter in child._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                values = values_of(child, key, parameter, f"{seed}/{prefix}.{key}")
                made[id(parameter)] = nn.Parameter(values, requires_grad=False)
            child._parameters[key] = made[id(parameter)]


def values_of(owner: nn.Module, key: str, like: torch.Tensor, seed: str) -> torch.Tensor:
    """The values of ``owner``'s parameter ``key``, which looks like ``like``, from ``seed``: a tensor on the CPU."""
    if like.dim() == 1 and "Norm" in type(owner).__name__:
        return torch.full(like.shape, 0.0 if key == "bias" else 1.0, dtype=like.dtype, device="cpu")
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "big"))
    tile = torch.randn(min(like.numel(), TILE), generator=generator, device="cpu").mul_(scale(owner, key, like)).to(like.dtype)
    values = torch.empty(like.shape, dtype=like.dtype, device="cpu")
    for piece in torch.split(values.view(-1), TILE):
        piece.copy_(tile[: piece.numel()])
    return values


def scale(owner: nn.Module, key: str, like: torch.Tensor) -> float:
    """1 for embeddings, 1/sqrt(fan in) for what multiplies (LeCun et al. 1998, Efficient BackProp, 4.6), 0.02 for biases."""
    if isinstance(owner, nn.Embedding):
        return 1.0
    if key == "bias" or like.dim() == 0:
        return 0.02
    return 1 / math.sqrt(like.numel() / like.shape[0] if like.dim() > 1 else like.numel())
