"""Dtype variants of a component: their names, their values, and what casts lead to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphrun.errors import BrokenPlan
from graphrun.modules.dtype_variants import DtypeVariants
from graphrun.modules.interceptor import CallInterceptor

HALF, FULL = torch.float16, torch.float32


def small_module(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval().requires_grad_(False)
    return module.to(dtype)


def cast(dtype_variants: DtypeVariants, module: nn.Module, dtype: torch.dtype) -> str:
    return dtype_variants.cast("c", lambda: module.to(dtype)).name


def test_widening_and_casting_back_restores_the_original_tensors() -> None:
    module = small_module(HALF)
    originals = list(module.state_dict(keep_vars=True).values())
    dtype_variants = DtypeVariants({"c": module})
    assert cast(dtype_variants, module, FULL) == "c@float32"
    assert module[0].weight.dtype == FULL
    assert torch.equal(module[0].weight, originals[0].float())
    assert cast(dtype_variants, module, HALF) == "c"
    assert all(
        tensor is other
        for tensor, other in zip(module.state_dict(keep_vars=True).values(), originals, strict=True)
    )


def test_rounded_values_stay_rounded_and_the_variant_has_its_own_name() -> None:
    module, twin = small_module(FULL), small_module(FULL)
    dtype_variants = DtypeVariants({"c": module})
    names = [cast(dtype_variants, module, dtype) for dtype in (HALF, FULL, HALF, FULL)]
    assert torch.equal(module[0].weight, twin.to(HALF).to(FULL)[0].weight)
    assert names[0] == names[2]
    assert names[1] == names[3]
    assert len({"c", *names}) == 3
    assert names[0].startswith("c@float16-")


def test_a_submodule_may_be_cast_alone_and_integers_stay() -> None:
    module = small_module(HALF)
    dtype_variants = DtypeVariants({"c": module})
    name = dtype_variants.cast("c", lambda: module[0].float()).name
    assert name.startswith("c@float16+float32-")
    assert module[0].weight.dtype == FULL
    assert module[1].weight.dtype == HALF
    assert module[1].num_batches_tracked.dtype == torch.int64


def test_begin_recomputes_values_from_the_original_variant() -> None:
    module = small_module(HALF)
    dtype_variants = DtypeVariants({"c": module})
    cast(dtype_variants, module, FULL)
    wide = module[0].weight
    dtype_variants.begin()
    module[0].weight.fill_(2.0)
    cast(dtype_variants, module, FULL)
    assert module[0].weight is wide
    assert wide.unique().tolist() == [2.0]


def test_callbacks_run_before_tensors_leave_and_after_others_join() -> None:
    module, events = small_module(HALF), []
    dtype_variants = DtypeVariants(
        {"c": module},
        lambda name: events.append(("leave", name, module[0].weight.dtype)),
        lambda name: events.append(("join", name, module[0].weight.dtype)),
    )
    cast(dtype_variants, module, HALF)
    with dtype_variants.using(dtype_variants.current("c").cast((FULL,) * 6 + (torch.int64,))):
        pass
    assert events == [
        ("leave", "c", HALF),
        ("join", "c@float32", FULL),
        ("leave", "c@float32", FULL),
        ("join", "c", HALF),
    ]


def test_an_interceptor_carries_out_casts_from_outside_and_passes_the_variant_name() -> None:
    module, events = small_module(HALF), []
    dtype_variants = DtypeVariants({"c": module})
    with CallInterceptor(
        {"c": module},
        torch.device("cpu"),
        lambda name, *_: events.append(name),
        casts=dtype_variants,
    ):
        module(torch.zeros(1, 3, dtype=HALF))
        module.to("cpu", FULL)
        module(torch.zeros(1, 3))
        module.half()
        module(torch.zeros(1, 3, dtype=HALF))
        with pytest.raises(BrokenPlan, match="something moves or casts c"):
            module.to("meta")
        with pytest.raises(BrokenPlan, match="something moves or casts c"):
            module.cpu()
    assert events == ["c", "c@float32", "c"]
