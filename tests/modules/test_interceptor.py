"""Call interception: the outermost call counts, once, and nothing is left behind."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from graphrun.errors import BrokenPlan
from graphrun.modules.interceptor import CallHandler, CallInterceptor
from graphrun.sim import Machine, device

CPU = torch.device("cpu")


class Codec(nn.Module):
    """Entry points that call each other, as autoencoders do."""

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
def events() -> list[tuple[str, ...]]:
    return []


def intercepted(
    codec: Codec, events: list[tuple[str, ...]], device: torch.device = CPU
) -> CallInterceptor:
    return CallInterceptor({"codec": codec}, device, noting(events))


def noting(events: list[tuple[str, ...]]) -> CallHandler:
    """Runs the component's own code and notes when it begins and has returned."""

    def around(component: str, entry: str, proceed: Any, args: Any, kwargs: Any) -> Any:
        events.append(("enter", component, entry))
        result = proceed(*args, **kwargs)
        events.append(("exit", component, entry))
        return result

    return around


def test_only_the_outermost_entry_counts(events: list[tuple[str, ...]]) -> None:
    codec, x = Codec(), torch.ones(1, 2)
    with intercepted(codec, events):
        codec(x)
        codec.decode(codec.encode(x))
    names = ["forward", "encode", "decode"]
    assert events == [(event, "codec", name) for name in names for event in ("enter", "exit")]


def test_results_classes_and_signatures_are_unchanged(events: list[tuple[str, ...]]) -> None:
    codec, x = Codec(), torch.ones(1, 2)
    want, signature = codec(x), inspect.signature(codec.encode)
    with intercepted(codec, events):
        assert isinstance(codec, Codec)
        assert type(codec).__name__ == "Codec"
        assert inspect.signature(codec.encode) == signature
        assert "forward" not in vars(codec)
        assert "forward" not in vars(codec.inner)
        assert torch.equal(codec(x), want)
    assert type(codec) is Codec


def test_the_device_attribute_is_the_interceptors(events: list[tuple[str, ...]]) -> None:
    codec = Codec()
    with intercepted(codec, events, torch.device("meta")) as interceptor:
        assert codec.device.type == "meta"
        interceptor.device = CPU
        assert codec.device.type == "cpu"
    assert codec.device.type == "cpu"


def test_weights_that_code_outside_lists_report_the_interceptors_device(
    events: list[tuple[str, ...]],
) -> None:
    class Listing(Codec):
        def forward(self, x: torch.Tensor) -> Any:
            return next(self.parameters()).device.type, self.inner(x)

    codec = Listing()
    codec.register_buffer("table", torch.ones(1))
    weights = list(codec.parameters())
    with intercepted(codec, events, torch.device("meta")):
        parameters = list(codec.parameters())
        assert {
            tensor.device.type
            for tensor in (*parameters, *codec.inner.parameters(), *codec.buffers())
        } == {"meta"}
        assert [tensor.data_ptr() for tensor in parameters] == [
            tensor.data_ptr() for tensor in weights
        ]
        assert [(t.dtype, t.shape, t.requires_grad) for t in parameters] == [
            (t.dtype, t.shape, t.requires_grad) for t in weights
        ]
        assert type(parameters[0] + 1) is torch.Tensor
        assert codec(torch.ones(1, 2))[0] == "cpu", "its own code sees where they are"
    assert all(
        parameter is other for parameter, other in zip(codec.parameters(), weights, strict=True)
    )


def test_offloading_to_the_cpu_does_nothing_and_other_moves_are_refused(
    events: list[tuple[str, ...]],
) -> None:
    codec = Codec().to(torch.float32)
    with intercepted(codec, events, torch.device("meta")):
        assert codec.to("meta").to("cpu") is codec
        with pytest.raises(BrokenPlan, match="moves or casts codec to cuda"):
            codec.to("cuda")


def test_an_error_ends_the_call_and_the_interceptor_is_removed_in_any_case(
    events: list[tuple[str, ...]],
) -> None:
    codec = Codec()
    with pytest.raises(ValueError, match="not a number"), intercepted(codec, events):
        codec(torch.full((1, 2), torch.nan))
    assert type(codec) is Codec
    assert events == [("enter", "codec", "forward")]
    with intercepted(codec, events):
        codec(torch.ones(1, 2))
    assert events[1:] == [("enter", "codec", "forward"), ("exit", "codec", "forward")]


def test_around_may_replace_the_result() -> None:
    codec = Codec()

    def around(component: str, entry: str, proceed: Any, args: Any, kwargs: Any) -> Any:
        return component, entry, proceed(*args, **kwargs).shape

    with CallInterceptor({"codec": codec}, CPU, handle_call=around):
        assert codec.encode(torch.ones(3, 2)) == ("codec", "encode", (3, 2))


def test_classes_are_cached_and_nested_interceptors_each_see_their_calls(
    events: list[tuple[str, ...]],
) -> None:
    codec, kinds = Codec(), []
    for _ in range(2):
        with intercepted(codec, events):
            kinds.append(type(codec))
            with intercepted(codec, events):
                assert type(codec) is not kinds[0]
                codec.encode(torch.ones(1, 2))
            assert type(codec) is kinds[0]
        assert type(codec) is Codec
        assert not [name for name in vars(codec) if "interceptor" in name]
    assert kinds[0] is kinds[1]
    assert (
        events == [(event, "codec", "encode") for event in ("enter", "enter", "exit", "exit")] * 2
    )


def test_a_slice_of_an_intercepted_module_list_is_not_intercepted(
    events: list[tuple[str, ...]],
) -> None:
    """diffusers' blocks use ``self.resnets[1:]``, which creates a ModuleList of the same class."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts[1:]:
                x = part(x)
            return x

    chain = Chain()
    with CallInterceptor({"chain": chain}, CPU, noting(events)):
        part = chain.parts[1:]
        chain(torch.ones(1, 2))
    assert events == [("enter", "chain", "forward"), ("exit", "chain", "forward")]
    assert type(part[0]) is nn.Linear


class Positions(nn.Module):
    """Computes its tables on the host, as CogView4's rotary embedding does, and an integer size."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        angles = torch.arange(x.shape[0], dtype=torch.float32)
        return angles.cos(), angles.sin(), torch.tensor([x.shape[0]])


class Rotary(nn.Module):
    """Records the device of each result of its positions in ``locations``."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.norm, self.locations = (
            Positions(),
            nn.LayerNorm(4, elementwise_affine=False),
            list[str](),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin, size = self.positions(x)
        self.locations += [tensor.device.type for tensor in (cos, sin, size)]
        return self.norm(x) * cos.to(x.device)[:, None] + sin.to(x.device)[:, None] * size.item()


def test_tables_that_a_module_without_weights_computes_on_the_cpu_move_to_its_inputs_device() -> (
    None
):
    rotary, x = Rotary(), torch.rand(3, 4)
    want = rotary(x)
    with Machine() as machine, CallInterceptor({"rotary": rotary}, device, noting([])):
        moved_x, copies = x.to(device), machine.copies_in
        assert torch.equal(rotary(moved_x).cpu(), want)
        assert rotary.locations[3:] == ["sim", "sim", "cpu"]
        assert machine.copies_in == copies + 2
        assert torch.equal(rotary(x), want)
        assert rotary.locations[6:] == ["cpu"] * 3
        assert [tensor.device.type for tensor in rotary.positions(moved_x)] == [
            "cpu"
        ] * 3  # called from outside, so it is an entry


def test_tables_of_a_module_with_weights_stay() -> None:
    rotary = Rotary()
    rotary.positions.register_buffer("scale", torch.ones(1))
    with Machine(), CallInterceptor({"rotary": rotary}, device, noting([])):
        rotary(torch.rand(3, 4).to(device))
    assert rotary.locations == ["cpu"] * 3
