"""Replace tensors whose values are no longer read by their shape and dtype, to free their memory.

    after denoise                     for decode
    embeds [b s d] bf16  ->  outline  ->  zeros [b 1 d] bf16
    masks [b s] int64    ->  outline  ->  ones [b 1] int64

The end of a pipeline reads only batch size, dtype and width of the embeddings, but copies them.
Full-length embeddings and their copies would add to the memory peak of the VAE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphrun.modules.trees import walk


@dataclass(frozen=True, slots=True)
class Outline:
    """Shape and dtype of a tensor, with the sequence dimension, if any, reduced to 1."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def outline_tensors(value: Any) -> Any:
    """Return ``value`` with an `Outline` in place of every tensor in mappings, lists and tuples."""
    return walk(value, lambda tensor: Outline(_outline_shape(tensor), tensor.dtype))


def materialize_outlines(value: Any, device: torch.device) -> Any:
    """Return ``value`` with a tensor on ``device`` for every `Outline`. Floating-point tensors are
    zeros; others may be masks and are ones."""

    def tensor_of(outline: Outline) -> torch.Tensor:
        fill = torch.zeros if outline.dtype.is_floating_point else torch.ones
        return fill(outline.shape, dtype=outline.dtype, device=device)

    return walk(value, tensor_of, Outline)


def _outline_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of ``tensor`` with a sequence length of 1. Embeddings are [... s d], masks
    [b s]. Pooled embeddings [b d] keep their width."""
    shape = list(tensor.shape)
    dim = len(shape) - 2 if tensor.dtype.is_floating_point else len(shape) - 1
    if dim > 0:
        shape[dim] = min(shape[dim], 1)
    return tuple(shape)
