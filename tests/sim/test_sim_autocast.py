"""``torch.autocast("sim")`` gives the dtypes that PyTorch documents for CUDA."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from graphrun.sim import Machine


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_in_the_lower_precision_and_sums_of_exponentials_in_fp32(
    dtype: torch.dtype,
) -> None:
    with Machine():
        x, w = torch.randn(4, 8).to("sim"), torch.nn.Parameter(torch.randn(8, 8).to("sim"))
        low = x.to(dtype)
        with torch.autocast("sim", dtype), torch.no_grad():
            assert functional.linear(x, w).dtype == dtype
            assert (x @ x.T).dtype == dtype
            assert functional.scaled_dot_product_attention(x[None], x[None], x[None]).dtype == dtype
            assert functional.conv1d(x[None], torch.ones(4, 4, 3, device="sim")).dtype == dtype
            assert low.softmax(-1).dtype == torch.float32
            assert functional.layer_norm(low, (8,)).dtype == torch.float32
            assert low.sum().dtype == torch.float32
            assert torch.addcmul(x, low, low).dtype == torch.float32
            assert (low + low).dtype == dtype
            assert (x.double() @ x.double().T).dtype == torch.float64
            with torch.autocast("sim", enabled=False):
                assert functional.linear(x, w).dtype == torch.float32
            assert torch.equal(
                functional.linear(x, w).cpu(),
                functional.linear(x.cpu().to(dtype), w.detach().cpu().to(dtype)),
            )
        assert functional.linear(x, w).dtype == torch.float32
