"""What a form is: what a cast leads to, what comes back, and whose values it has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphrun.errors import BrokenPlan
from graphrun.modules.dtype_variants import DtypeVariants
from graphrun.modules.interceptor import CallInterceptor

HALF, WHOLE = torch.float16, torch.float32


def part(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval().requires_grad_(False)
    return made.to(dtype)


def cast(dtype_variants: DtypeVariants, module: nn.Module, dtype: torch.dtype) -> str:
    return dtype_variants.cast("c", lambda: module.to(dtype)).name


def test_widened_and_back_is_the_first_form_with_the_very_tensors_that_were_left() -> None:
    module = part(HALF)
    before = list(module.state_dict(keep_vars=True).values())
    dtype_variants = DtypeVariants({"c": module})
    assert cast(dtype_variants, module, WHOLE) == "c@float32"
    assert module[0].weight.dtype == WHOLE
    assert torch.equal(module[0].weight, before[0].float())
    assert cast(dtype_variants, module, HALF) == "c"
    assert all(one is other for one, other in zip(module.state_dict(keep_vars=True).values(), before, strict=True))


def test_what_was_rounded_stays_rounded_and_has_a_name_of_its_own() -> None:
    module, twin = part(WHOLE), part(WHOLE)
    dtype_variants = DtypeVariants({"c": module})
    names = [cast(dtype_variants, module, dtype) for dtype in (HALF, WHOLE, HALF, WHOLE)]
    assert torch.equal(module[0].weight, twin.to(HALF).to(WHOLE)[0].weight)
    assert names[0] == names[2]
    assert names[1] == names[3]
    assert len({"c", *names}) == 3
    assert names[0].startswith("c@float16-")


def test_a_part_may_be_cast_alone_and_integers_stay() -> None:
    module = part(HALF)
    dtype_variants = DtypeVariants({"c": module})
    name = dtype_variants.cast("c", lambda: module[0].float()).name
    assert name.startswith("c@float16+float32-")
    assert module[0].weight.dtype == WHOLE
    assert module[1].weight.dtype == HALF
    assert module[1].num_batches_tracked.dtype == torch.int64


def test_values_follow_from_those_of_the_first_form_anew_each_time_that_it_begins() -> None:
    module = part(HALF)
    dtype_variants = DtypeVariants({"c": module})
    cast(dtype_variants, module, WHOLE)
    wide = module[0].weight
    dtype_variants.begin()
    module[0].weight.fill_(2.0)
    cast(dtype_variants, module, WHOLE)
    assert module[0].weight is wide
    assert wide.unique().tolist() == [2.0]


def test_who_holds_the_tensors_is_told_before_they_leave_and_when_others_are_there() -> None:
    module, told = part(HALF), []
    dtype_variants = DtypeVariants(
        {"c": module},
        lambda name: told.append(("leave", name, module[0].weight.dtype)),
        lambda name: told.append(("join", name, module[0].weight.dtype)),
    )
    cast(dtype_variants, module, HALF)
    with dtype_variants.within(dtype_variants.now("c").cast((WHOLE,) * 6 + (torch.int64,))):
        pass
    assert told == [
        ("leave", "c", HALF),
        ("join", "c@float32", WHOLE),
        ("leave", "c@float32", WHOLE),
        ("join", "c", HALF),
    ]


def test_a_boundary_hands_on_casts_from_outside_and_names_the_form_that_is_entered() -> None:
    module, entered = part(HALF), []
    dtype_variants = DtypeVariants({"c": module})
    with CallInterceptor({"c": module}, torch.device("cpu"), lambda name, _: entered.append(name), casts=dtype_variants):
        module(torch.zeros(1, 3, dtype=HALF))
        module.to("cpu", WHOLE)
        module(torch.zeros(1, 3))
        module.half()
        module(torch.zeros(1, 3, dtype=HALF))
        with pytest.raises(BrokenPlan, match="something moves or casts c"):
            module.to("meta")
        with pytest.raises(BrokenPlan, match="something moves or casts c"):
            module.cpu()
    assert entered == ["c", "c@float32", "c"]
