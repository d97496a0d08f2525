"""Which layers can be blocks, by what a dry run recorded of their reads, order and memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from graphrun import sim
from graphrun.modules.blocks import lay_out
from graphrun.profile.block_groups import group_layers
from graphrun.profile.dry_run import Prober


class Model(nn.Module):
    """Every way of reading a layer's tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 64)
        self.head = nn.Linear(64, 32, bias=False)
        self.head.weight = self.table.weight  # tied, and both are called
        self.first = nn.Linear(64, 64)
        self.inner = nn.ModuleDict(
            {"twice": nn.Linear(64, 64), "apart": nn.Linear(64, 64), "never": nn.Linear(64, 64)}
        )
        self.idle = nn.ModuleList([nn.Linear(64, 64)])
        self.shift = nn.Parameter(torch.zeros(64))

    def forward(self, ids: torch.Tensor) -> Any:
        hidden = self.first(self.table(ids)) + self.shift
        hidden = self.inner["twice"](torch.cat([hidden] * 8))[: len(ids)]
        hidden = nn.functional.linear(hidden, self.inner["apart"].weight)
        return self.head(self.inner["twice"](hidden))


def traced() -> tuple[Model, Prober]:
    with torch.device("meta"):
        model = Model()
    prober = Prober({"model": model})
    with sim.DryMachine(), prober.interceptor:
        model(torch.zeros(4, dtype=torch.long, device=sim.PLANNED))
    return model, prober


def test_a_layer_is_a_block_if_only_its_own_calls_read_it() -> None:
    model, prober = traced()
    groups = group_layers(model, [call for call, _ in prober._traces.values()])
    blocks = {path for group in groups for path in group.blocks}
    assert blocks == {"", "first", "inner.twice", "idle.0"}
    assert {name.split(".weight")[0] for name in _names(model, "", blocks)} >= {
        "shift",
        "table",
        "inner.apart",
        "inner.never",
    }


def test_layers_with_different_call_counts_are_in_different_groups() -> None:
    model, prober = traced()
    (call,) = (call for call, _ in prober._traces.values())
    assert [span.path for span in call.spans].count("inner.twice") == 2
    group_names = {
        path: group.name for group in group_layers(model, [call]) for path in group.blocks
    }
    assert len({group_names["first"], group_names["inner.twice"], group_names["idle.0"]}) == 3


def test_routed_layers_are_not_blocks() -> None:
    model, prober = traced()
    calls = [call for call, _ in prober._traces.values()]
    assert "inner.twice" not in {
        path for group in group_layers(model, calls, {"inner"}) for path in group.blocks
    }


def test_a_tensor_tied_between_a_block_and_another_layer_belongs_to_the_block() -> None:
    model = Model()
    assert lay_out(model, ["table"])["table"].nbytes == 0
    assert lay_out(model, ["table"], split_layers=True)["table"].nbytes == 32 * 64 * 4
    assert lay_out(model, ["table", "head"], split_layers=True)["table"].nbytes == 0


def test_spans_index_events_of_replayed_calls_too() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))  # noqa: E731
            self.blocks = nn.ModuleList([block(), block(), block()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    with torch.device("meta"):
        model = Two()
    prober = Prober({"model": model})
    with sim.DryMachine(), prober.interceptor:
        model(torch.zeros(4, 64, device=sim.PLANNED))
    ((call, _),) = prober._traces.values()
    assert [span.path for span in call.spans] == [
        f"blocks.{n}.{m}" for n in range(3) for m in (0, 2)
    ]
    sizes = [
        [event.nbytes for event in call.events[span.begin : span.end] if event.nbytes]
        for span in call.spans
    ]
    assert sizes == [[1024]] * 6


def test_an_empty_unblocked_is_in_no_call_even_if_it_has_a_name_of_a_tied_tensor(
    make_problem: Any,
) -> None:
    """T5's table has two names: `shared`, and `encoder.embed_tokens`, the layer that reads it."""
    problem = make_problem("flux-tiny", 1 << 30)
    layers = problem.component("text_encoder_2").layers
    (use,) = (
        use.layers
        for phase in problem.phases
        for use in phase.uses
        if use.component == "text_encoder_2"
    )
    assert layers.variants[0].block_bytes[0] == 0
    assert use.group_calls[0] == 0
    assert 0 not in [number for number, _, _ in use.order]
    assert min(use.group_calls[1:]) == 1


def _names(model: nn.Module, path: str, blocks: set[str]) -> set[str]:
    return {
        name
        for entry in lay_out(model, sorted(blocks), split_layers=True)[path].entries
        for name in entry.names
    }


def test_a_layer_that_is_called_and_not_read_is_one_block() -> None:
    class Rope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", torch.ones(64), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.frequencies = torch.arange(64, device=x.device, dtype=torch.float32)
            return x * self.frequencies

    with torch.device("meta"):
        model = nn.ModuleDict({"rope": Rope(), "linear": nn.Linear(64, 64)})
        model.forward = lambda x: model["linear"](model["rope"](x))  # type: ignore[method-assign]
    prober = Prober({"model": model})
    with sim.DryMachine(), prober.interceptor:
        model(torch.zeros(4, 64, device=sim.PLANNED))
    groups = group_layers(model, [call for call, _ in prober._traces.values()])
    assert [path for group in groups for path in group.blocks].count("rope") == 1
