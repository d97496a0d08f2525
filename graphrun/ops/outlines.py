"""What is left of a value when nothing reads its numbers any more: how many rows, and of which kind, but not how long.

    denoise                  decode
    embeds [b s d] bf16  ->  outline  ->  zeros [b 1 d] bf16         masks [b s] int64  ->  ones [b 1]

A pipeline's tail wants embeddings for their batch, dtype and width, and copies them before it decodes. At full length they, and
these copies, would lie beside the VAE's largest activation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Outline:
    """Of a tensor: ``shape`` with a sequence of one, where it has a sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def outlined(value: Any) -> Any:
    """``value`` with an `Outline` for every tensor in it, through mappings, lists and tuples."""
    return _each(value, lambda item: Outline(_short(item), item.dtype) if isinstance(item, torch.Tensor) else item)


def filled(value: Any, device: torch.device) -> Any:
    """``value`` with a tensor on ``device`` for every `Outline` in it: zeros, and ones where it may be a mask."""

    def fill(item: Any) -> Any:
        if not isinstance(item, Outline):
            return item
        make = torch.zeros if item.dtype.is_floating_point else torch.ones
        return make(item.shape, dtype=item.dtype, device=device)

    return _each(value, fill)


def _short(tensor: torch.Tensor) -> tuple[int, ...]:
    """Embeddings are [... s d], masks [b s]; what is pooled is [b d], and a width stays as it is."""
    shape = list(tensor.shape)
    place = len(shape) - 2 if tensor.dtype.is_floating_point else len(shape) - 1
    if place > 0:
        shape[place] = min(shape[place], 1)
    return tuple(shape)


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _each(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_each(item, change) for item in value)
    return change(value)
