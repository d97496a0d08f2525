"""What a recorder notes of the tensors of an operator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from graphrun.profile.corrections import Convolution
from graphrun.profile.recording import ConvolutionShape


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of ``dtype``, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def touched_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of device memory that a kernel reads or writes for ``tensor``.

    An expanded tensor is smaller in memory.
    """
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def convolution_of(
    source: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, stride: Sequence[int]
) -> Convolution:
    """Return the bytes and channels that decide the scratch of a convolution."""
    sizes = source.nbytes, result.nbytes, weight.nbytes, result.itemsize
    taps = weight.numel() // (weight.shape[0] * weight.shape[1])
    return Convolution(*sizes, source.shape[1], result.shape[1], taps, max(stride) > 1)


def is_transposing(args: Any, result: torch.Tensor) -> bool:
    """Return whether a copy's source has its last dimension elsewhere in memory than its result."""
    sources = [tensor for tensor in tensors_of(args) if tensor.shape == result.shape]
    return any(
        size > 1 and (source.stride(dim) == 1) != (result.stride(dim) == 1)
        for source in sources
        for dim, size in enumerate(result.shape)
    )


def convolution_shape(
    source: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, groups: int
) -> ConvolutionShape:
    """Return the sizes that decide the rate of a convolution."""
    pixels = math.prod(source.shape[2:])
    return ConvolutionShape(
        batch=source.shape[0],
        inputs=source.shape[1],
        outputs=result.shape[1],
        taps=math.prod(weight.shape[2:]),
        groups=groups,
        input_rows=pixels // source.shape[-1],
        input_pixels=pixels,
        output_pixels=math.prod(result.shape[2:]),
        channels_last=int(source.shape[1] > 1 == source.stride(1) and pixels > 1),
        dimensions=source.dim() - 2,
    )


def tensors_of(items: Any) -> Iterable[torch.Tensor]:
    """Yield the tensors in ``items``, and in lists and tuples inside it."""
    for item in items:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from tensors_of(item)
