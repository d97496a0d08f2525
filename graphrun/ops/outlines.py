"""Replaces tensors that are no longer read by their shape and dtype, so that their memory can be
freed.

    denoise                  decode embeds [b s d] bf16  ->  outline  ->  zeros [b 1 d] bf16
    masks [b s] int64  ->  ones [b 1]

The tail of a pipeline reads batch size, dtype and width of the embeddings, and copies them before
it decodes. Embeddings of full length, and these copies, would add to the memory peak of the VAE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphrun.modules.trees import walk


@dataclass(frozen=True, slots=True)
class Outline:
    """Shape and dtype of a tensor, with its sequence dimension, if any, reduced to 1."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def outlined(value: Any) -> Any:
    """``value`` with an `Outline` in place of every tensor in it, through mappings, lists and
    tuples."""
    return walk(value, lambda tensor: Outline(_short(tensor), tensor.dtype))


def materialized(value: Any, device: torch.device) -> Any:
    """``value`` with a tensor on ``device`` for every `Outline` in it: zeros for floating point,
    ones where it may be a mask."""

    def tensor_of(outline: Outline) -> torch.Tensor:
        make = torch.zeros if outline.dtype.is_floating_point else torch.ones
        return make(outline.shape, dtype=outline.dtype, device=device)

    return walk(value, tensor_of, Outline)


def _short(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of ``tensor`` with a sequence of 1: embeddings are [... s d], masks [b s]; pooled
    embeddings [b d] keep their width.
    """
    shape = list(tensor.shape)
    dim = len(shape) - 2 if tensor.dtype.is_floating_point else len(shape) - 1
    if dim > 0:
        shape[dim] = min(shape[dim], 1)
    return tuple(shape)
