"""Facts about an operator's tensors that a recorder notes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from graphrun.profile.corrections import (
    CHOOSING_CHANNELS,
    CHOOSING_CHANNELS_FP32,
    Convolution,
)
from graphrun.profile.recording import ConvolutionShape


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of ``dtype``, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def touched_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes in memory that a kernel touches: expanded tensors are smaller."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def convolution_of(args: Sequence[Any], result: torch.Tensor) -> Convolution:
    """Return what decides the scratch of a convolution, from ``aten.convolution``'s arguments."""
    source, weight, _, stride, _, _, transposed, _, groups = args
    is_wide = result.itemsize > 2
    return Convolution(
        input_bytes=source.nbytes,
        output_bytes=result.nbytes,
        weight_bytes=weight.nbytes,
        element_bytes=result.itemsize,
        inputs=source.shape[1],
        outputs=result.shape[1],
        taps=weight.numel() // (weight.shape[0] * weight.shape[1]),
        strided=max(stride) > 1,
        groups=groups,
        pixels=math.prod(result.shape[2:]),
        channels_last=_is_channels_last(source),
        sparse=not _is_dense(source),
        transposed=transposed,
        chooses=source.shape[1] >= (CHOOSING_CHANNELS_FP32 if is_wide else CHOOSING_CHANNELS)
        and not (result.dtype == torch.bfloat16 and source.dim() == 4),
    )


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _is_channels_last(tensor: torch.Tensor) -> bool:
    """Return whether the strides are in the order of channels last, as PyTorch's convolutions ask.

    They go up from channels over pixels to the batch; there may be gaps
    (``is_channels_last_strides_2d`` in PyTorch's c10/core/MemoryFormat.h).
    """
    if tensor.dim() not in CHANNELS_LAST or tensor.stride(1) == 0:
        return False
    extent = 0
    for dim in (1, *range(tensor.dim() - 1, 1, -1), 0):
        size, step = tensor.shape[dim], tensor.stride(dim)
        if size == 0 or step < extent or (dim == 0 and extent == tensor.stride(1)):
            return False
        extent = step * size if size > 1 else step
    return True


def _is_dense(tensor: torch.Tensor) -> bool:
    if _is_channels_last(tensor):
        return tensor.is_contiguous(memory_format=CHANNELS_LAST[tensor.dim()])
    return tensor.is_contiguous()


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
