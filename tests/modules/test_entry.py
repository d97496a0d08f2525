"""The boundary of a component: the outermost entry counts, once, and nothing is left behind."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from graphrun.errors import BrokenPlan
from graphrun.modules.interceptor import CallInterceptor
from graphrun.sim import Machine, device

HERE = torch.device("cpu")


class Codec(nn.Module):
    """Entry points that call one another, as autoencoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    @property
    def device(self) -> torch.device:
        return self.inner.weight.device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        return self.inner(x)


@pytest.fixture
def seen() -> list[tuple[str, ...]]:
    return []


def bounded(codec: Codec, seen: list[tuple[str, ...]], device: torch.device = HERE) -> CallInterceptor:
    return CallInterceptor(
        {"codec": codec}, device, lambda *at: seen.append(("enter", *at)), lambda *at: seen.append(("exit", *at))
    )


def test_only_the_outermost_entry_counts(seen: list[tuple[str, ...]]) -> None:
    codec, x = Codec(), torch.ones(1, 2)
    with bounded(codec, seen):
        codec(x)
        codec.decode(codec.encode(x))
    names = ["forward", "encode", "decode"]
    assert seen == [(what, "codec", name) for name in names for what in ("enter", "exit")]


def test_results_classes_and_signatures_are_the_components_own(seen: list[tuple[str, ...]]) -> None:
    codec, x = Codec(), torch.ones(1, 2)
    want, signature = codec(x), inspect.signature(codec.encode)
    with bounded(codec, seen):
        assert isinstance(codec, Codec)
        assert type(codec).__name__ == "Codec"
        assert inspect.signature(codec.encode) == signature
        assert torch.equal(codec(x), want)
    assert type(codec) is Codec


def test_the_device_is_the_boundarys_whatever_the_parameters_say(seen: list[tuple[str, ...]]) -> None:
    codec = Codec()
    with bounded(codec, seen, torch.device("meta")) as interceptor:
        assert codec.device.type == "meta"
        interceptor.device = HERE
        assert codec.device.type == "cpu"
    assert codec.device.type == "cpu"


def test_putting_a_component_away_is_the_plans_and_no_other_move_is_allowed(seen: list[tuple[str, ...]]) -> None:
    codec = Codec().to(torch.float32)
    with bounded(codec, seen, torch.device("meta")):
        assert codec.to("meta").to("cpu") is codec
        with pytest.raises(BrokenPlan, match="moves or casts codec to cuda"):
            codec.to("cuda")


def test_an_error_inside_ends_the_entry_and_the_boundary_goes_in_any_case(seen: list[tuple[str, ...]]) -> None:
    codec = Codec()
    with pytest.raises(ValueError, match="not a number"), bounded(codec, seen):
        codec(torch.full((1, 2), torch.nan))
    assert type(codec) is Codec
    assert seen == [("enter", "codec", "forward")]
    with bounded(codec, seen):
        codec(torch.ones(1, 2))
    assert seen[1:] == [("enter", "codec", "forward"), ("exit", "codec", "forward")]


def test_around_answers_in_the_components_place() -> None:
    codec = Codec()

    def around(component: str, entry: str, proceed: Any, args: Any, kwargs: Any) -> Any:
        return component, entry, proceed(*args, **kwargs).shape

    with CallInterceptor({"codec": codec}, HERE, around=around):
        assert codec.encode(torch.ones(3, 2)) == ("codec", "encode", (3, 2))


def test_a_class_is_made_once_and_boundaries_inside_one_another_each_hear_their_entries(seen: list[tuple[str, ...]]) -> None:
    codec, kinds = Codec(), []
    for _ in range(2):
        with bounded(codec, seen):
            kinds.append(type(codec))
            with bounded(codec, seen):
                assert type(codec) is not kinds[0]
                codec.encode(torch.ones(1, 2))
            assert type(codec) is kinds[0]
        assert type(codec) is Codec
        assert not [name for name in vars(codec) if "boundary" in name]
    assert kinds[0] is kinds[1]
    assert seen == [(what, "codec", "encode") for what in ("enter", "enter", "exit", "exit")] * 2


def test_a_slice_of_a_list_made_inside_is_no_part_of_it(seen: list[tuple[str, ...]]) -> None:
    """diffusers' blocks take ``self.resnets[1:]``, which makes a ModuleList of the same class."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts[1:]:
                x = part(x)
            return x

    chain = Chain()
    with CallInterceptor({"chain": chain}, HERE, lambda *at: seen.append(("enter", *at))):
        rest = chain.parts[1:]
        chain(torch.ones(1, 2))
    assert seen == [("enter", "chain", "forward")]
    assert type(rest[0]) is nn.Linear


class Positions(nn.Module):
    """Makes its tables on the host, as CogView4's rotary embedding does; and a size, for the host."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        angles = torch.arange(x.shape[0], dtype=torch.float32)
        return angles.cos(), angles.sin(), torch.tensor([x.shape[0]])


class Turned(nn.Module):
    """``device`` of each of its positions' results is noted in ``locations``."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.norm, self.locations = Positions(), nn.LayerNorm(4, elementwise_affine=False), list[str]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin, size = self.positions(x)
        self.locations += [made.device.type for made in (cos, sin, size)]
        return self.norm(x) * cos.to(x.device)[:, None] + sin.to(x.device)[:, None] * size.item()


def test_tables_that_a_part_without_weights_makes_on_the_host_go_where_its_inputs_are() -> None:
    turned, x = Turned(), torch.rand(3, 4)
    want = turned(x)
    with Machine() as machine, CallInterceptor({"turned": turned}, device, lambda *_: None):
        there, copies = x.to(device), machine.copies_in
        assert torch.equal(turned(there).cpu(), want)
        assert turned.locations[3:] == ["sim", "sim", "cpu"]
        assert machine.copies_in == copies + 2
        assert torch.equal(turned(x), want)
        assert turned.locations[6:] == ["cpu"] * 3
        assert [made.device.type for made in turned.positions(there)] == ["cpu"] * 3  # an entry, which the pipeline's code made


def test_what_holds_weights_hands_on_what_it_made() -> None:
    turned = Turned()
    turned.positions.register_buffer("scale", torch.ones(1))
    with Machine(), CallInterceptor({"turned": turned}, device, lambda *_: None):
        turned(torch.rand(3, 4).to(device))
    assert turned.locations == ["cpu"] * 3
