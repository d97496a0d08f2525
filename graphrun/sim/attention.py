"""Attention as a card computes it: its mask, and the result's order in memory."""

from __future__ import annotations

from typing import Any, cast

import torch

FLASH_FEATURES = 256  # maximum features per head in FlashAttention 2 and cuDNN


def attention_is_token_major(query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Return whether a card writes the result ``[b h s d]`` as ``[b s h d]``.

    PyTorch's memory-efficient kernel does, which takes masks and wide heads. FlashAttention and
    cuDNN write it in the order of ``query`` (``alloc_with_matching_layout`` in ATen's cuDNN MHA).
    """
    if query.dim() < 4:
        return False
    is_wide = query.shape[-1] > FLASH_FEATURES
    return mask is not None or is_wide or query.stride(-3) < query.stride(-2)


def take_additive_mask(raws: list[Any], options: dict[str, Any]) -> torch.Tensor | None:
    """Replace a boolean mask among an attention's operands by an additive one, and return that.

    None: there is no boolean mask. PyTorch does the same (``convert_boolean_attn_mask`` in ATen's
    attention.cpp).
    """
    holder: Any = raws if len(raws) > 3 else options
    key: Any = 3 if len(raws) > 3 else "attn_mask"
    mask = raws[3] if len(raws) > 3 else options.get("attn_mask")
    if mask is None or mask.dtype != torch.bool:
        return None
    zero = torch.zeros((), dtype=raws[0].dtype)
    holder[key] = torch.where(mask, zero, float("-inf"))
    return cast("torch.Tensor", holder[key])


def as_on_cards(raws: list[Any], options: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
    """Return ``output`` in the memory order that a card gives it."""
    mask = raws[3] if len(raws) > 3 else options.get("attn_mask")
    if attention_is_token_major(raws[0], mask):
        return output.transpose(-3, -2).contiguous().transpose(-3, -2)
    return output.contiguous()
