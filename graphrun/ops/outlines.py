"""Replaces tensors that are no longer read by their shape and dtype, so that their memory can be freed.

    denoise                  decode
    embeds [b s d] bf16  ->  outline  ->  zeros [b 1 d] bf16         masks [b s] int64  ->  ones [b 1]

The tail of a pipeline reads batch size, dtype and width of the embeddings, and copies them before it decodes. Embeddings of full
length, and these copies, would add to the memory peak of the VAE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Outline:
    """Shape and dtype of a tensor, with its sequence dimension, if any, reduced to 1."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def outlined(value: Any) -> Any:
    """``value`` with an `Outline` in place of every tensor in it, through mappings, lists and tuples."""
    return _each(value, lambda item: Outline(_short(item), item.dtype) if isinstance(item, torch.Tensor) else item)


def materialized(value: Any, device: torch.device) -> Any:
    """``value`` with a tensor on ``device`` for every `Outline` in it: zeros for floating point, ones where it may be a mask."""

    def tensor_of(item: Any) -> Any:
        if not isinstance(item, Outline):
            return item
        make = torch.zeros if item.dtype.is_floating_point else torch.ones
        return make(item.shape, dtype=item.dtype, device=device)

    return _each(value, tensor_of)


def _short(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of ``tensor`` with a sequence of 1: embeddings are [... s d], masks [b s]; pooled embeddings [b d] keep their
    width.
    """
    shape = list(tensor.shape)
    dim = len(shape) - 2 if tensor.dtype.is_floating_point else len(shape) - 1
    if dim > 0:
        shape[dim] = min(shape[dim], 1)
    return tuple(shape)


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Applies ``change`` to every leaf of ``value``."""
    if isinstance(value, dict):
        return {key: _each(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_each(item, change) for item in value)
    return change(value)
