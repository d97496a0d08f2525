"""``torch.autocast("sim")``: which operators run in the lower precision, in fp32, or in the widest.

The lists are CUDA's (``AT_FORALL_*`` in aten/src/ATen/autocast_mode.h of 2.13), since PyTorch has
such rules for its own devices only. "Widest" means the widest dtype of the arguments. The kernels
here cast tensors on ``sim``; in dry runs `graphrun.sim.casts` does. Weights are cast again in each
call: a cache of casts would take memory that no plan includes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

LOWER = """
_convolution addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc
conv_transpose1d conv_transpose2d conv_transpose3d convolution gru_cell linalg_multi_dot
linalg_vecdot linear lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh_cell
scaled_dot_product_attention
"""
FP32 = """
acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity
cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss kl_div l1_loss layer_norm
linalg_matrix_norm linalg_vector_norm log log10 log1p log2 log_softmax margin_ranking_loss mse_loss
multilabel_margin_loss native_layer_norm nll_loss norm nuclear_norm pdist poisson_nll_loss pow prod
reciprocal renorm rsqrt sinh smooth_l1_loss soft_margin_loss softmax softplus sum tan
triplet_margin_loss
"""
WIDEST = (
    "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot"
)

_KEY: Any = torch._C._parse_dispatch_key("AutocastPrivateUse1")
_SIM = "sim"


def register() -> tuple[Any, ...]:
    """Register the kernels, once, and return their libraries; freeing these unregisters the
    kernels."""
    everything: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    everything.fallback(torch.library.fallthrough_kernel, _KEY.name)
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for names, dtypes in ((LOWER, _lower), (FP32, _fp32), (WIDEST, _widest)):
        for name in names.split():
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                func = getattr(packet, overload)
                if not func._schema.is_mutable:
                    library.impl(
                        func.name().removeprefix("aten::"), _kernel(func, dtypes), _KEY.name
                    )
    return everything, library


def _kernel(func: Any, dtype_of: Callable[[list[torch.Tensor]], torch.dtype]) -> Any:
    takes_dtype = any(argument.name == "dtype" for argument in func._schema.arguments)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # as PyTorch turns autocast off
        torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, True)
        try:
            tensors: list[torch.Tensor] = []
            tree_map_only(
                torch.Tensor,
                lambda tensor: tensors.append(tensor) if _is_eligible(tensor) else None,
                (args, kwargs),
            )
            if not tensors:
                return func(*args, **kwargs)
            dtype = dtype_of(tensors)
            # a sum is accumulated in fp32 without casting its inputs
            if takes_dtype and dtype_of is _fp32:
                return func(*args, **{**kwargs, "dtype": kwargs.get("dtype") or dtype})

            def cast(tensor: torch.Tensor) -> torch.Tensor:
                return (
                    tensor.to(dtype) if _is_eligible(tensor) and tensor.dtype != dtype else tensor
                )

            args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
            return func(*args, **kwargs)
        finally:
            torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, False)

    return kernel


def _is_eligible(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == _SIM and tensor.is_floating_point() and tensor.dtype != torch.float64
    )


def _lower(_: list[torch.Tensor]) -> torch.dtype:
    return torch.get_autocast_dtype(_SIM)


def _fp32(_: list[torch.Tensor]) -> torch.dtype:
    return torch.float32


def _widest(tensors: list[torch.Tensor]) -> torch.dtype:
    return (
        torch.float32
        if any(tensor.dtype == torch.float32 for tensor in tensors)
        else torch.get_autocast_dtype(_SIM)
    )
