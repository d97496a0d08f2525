"""Attention and RMS norm in a dry run, as fused kernels compute them on a GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from graphrun.profile.corrections import attention_scratch
from graphrun.profile.costs import output_tiles
from graphrun.profile.moves import Moves
from graphrun.profile.operands import dtype_name, touched_bytes
from graphrun.profile.recorder import Recorder
from graphrun.profile.recording import KEY_MASKED, MASKED, RMS_NORM, Kernel, KernelClass
from graphrun.sim.attention import FLASH_FEATURES, attention_is_token_major
from graphrun.sim.casts import AUTOCAST_DEVICE_TYPE, dtype_on
from graphrun.sim.special import CONTIGUOUS

_CONTIGUOUS = frozenset(itertools.chain(*CONTIGUOUS.values()))


class FusedKernels(Moves):
    """Record `scaled_dot_product_attention` and `rms_norm` as a GPU allocates them.

    Also gives ``torch.tensor([...])`` a constant value.

    Recorded for b batches, h heads, s_q queries, s_k keys, and features d_k of keys and d_v of
    values:

        output     ``[b h s_q d_v]``, in memory in the order of the query; with a mask or more than
                   256 features ``[b s_q h d_v]``, so that heads are joined without a copy
        mask       a boolean one in the query's dtype, until the kernel ends
        scratch    the fp32 logsumexp ``[b h s_q]``, and the output in fp32 where 16 bits have more
                   than 256 features
        FLOPs      of two matrix products, 2 b h s_q s_k (d_k + d_v)

    ``fused=False``: the scratch of the math backend, with its scores ``[b h s_q s_k]``.
    """

    def __init__(self, recorder: Recorder, *, fused: bool = True) -> None:
        super().__init__(recorder)
        self.fused = fused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor:
            return self.recorder.constants.from_literal(func(*args, **kwargs), args, kwargs)
        if func in (torch.rms_norm, torch.nn.functional.rms_norm):
            return self._rms_norm(*args, **kwargs)
        if func in _CONTIGUOUS and args and not args[0].is_contiguous():
            args = (args[0].contiguous(), *args[1:])
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return super().__torch_function__(func, types, args, kwargs)
        query, key, value = (
            *args,
            *(kwargs[name] for name in ("query", "key", "value")[len(args) :]),
        )[:3]
        if (autocast_dtype := dtype_on(AUTOCAST_DEVICE_TYPE)) is not None:
            query, key, value = (tensor.to(autocast_dtype) for tensor in (query, key, value))
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        if mask is not None:  # raises the RuntimeError that the kernel raises
            torch.broadcast_shapes(mask.shape, (*query.shape[:-1], key.shape[-2]))  # type: ignore[no-untyped-call]
        is_boolean = mask is not None and mask.dtype == torch.bool
        additive_mask = query.new_empty(mask.shape) if is_boolean else mask
        self.recorder.note_reads((query, key, value))
        shape = (*query.shape[:-1], value.shape[-1])
        rows = query.numel() // query.shape[-1]  # b h s_q
        width, keys = query.shape[-1], key.shape[-2]  # d_k, s_k
        if attention_is_token_major(query, mask):
            token_major = query.new_empty(*shape[:-3], shape[-2], shape[-3], shape[-1])
            result = token_major.transpose(-3, -2)
        else:
            result = query.new_empty(shape)
        nbytes = sum(map(touched_bytes, (query, key, value, result)))
        tile_count = rows // query.shape[-2] * output_tiles(query.shape[-2], 1)
        kind: KernelClass = "attention" if width <= FLASH_FEATURES else "wide attention"
        flops = 2.0 * rows * keys * (width + value.shape[-1])
        features = width if query.dim() == 4 and width == value.shape[-1] else 0
        kernel = Kernel(
            kind,
            dtype_name(result.dtype),
            flops,
            nbytes,
            tile_count,
            rows * keys,
            operator="" if mask is None else KEY_MASKED if mask.shape[-2] == 1 else MASKED,
            shape=(rows // query.shape[-2], query.shape[-2], keys, features),
        )
        scratch = attention_scratch(
            rows,
            keys,
            value.shape[-1],
            query.element_size(),
            fused=self.fused,
            wide=kind == "wide attention",
        )
        self.recorder.scratch(kernel, scratch, scratch - 4 * rows if self.fused else scratch)
        self.recorder.count(kernel)
        del additive_mask
        return result

    def _rms_norm(
        self,
        input: torch.Tensor,  # noqa: A002 - the name of torch's parameter
        normalized_shape: Sequence[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        """Record `torch.rms_norm` as a GPU computes it, with one kernel.

        It allocates a contiguous copy of an input that is not, the result, and one fp32 figure per
        row. With a weight of another dtype, and under autocast, it consists of its operators.
        """
        casts = dtype_on(AUTOCAST_DEVICE_TYPE) is not None
        if casts or (weight is not None and weight.dtype != input.dtype):
            return torch.rms_norm(input, normalized_shape, weight, eps)
        if weight is not None:
            self.recorder.note_reads((weight,))
        source = input.contiguous()
        result = torch.empty_like(source)
        elements, rows = source.numel(), source.numel() // (math.prod(normalized_shape) or 1)
        row_scales = source.new_empty(rows, dtype=torch.float32)
        nbytes = 2 * source.nbytes + row_scales.nbytes + (0 if weight is None else weight.nbytes)
        shape = (rows, elements, source.element_size(), int(weight is not None))
        kernel = Kernel("elementwise", "float32", 0.0, nbytes, operator=RMS_NORM, shape=shape)
        self.recorder.scratch(kernel, 0)
        self.recorder.count(kernel)
        return result
