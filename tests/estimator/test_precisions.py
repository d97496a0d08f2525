"""What a component is in another precision: the bytes of its blocks are those of the module that the executor drafts and places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import graphrun
from graphrun.components.blocks import lay_out
from graphrun.components.build import draft, ghost
from graphrun.estimator.events import Call
from graphrun.estimator.precisions import held_in
from graphrun.planner.problem import BlockClass
from graphrun.units import round_up

GRAPHS = Path(__file__).parents[2] / "graphs"


def classes(graph: Any, name: str) -> tuple[BlockClass, ...]:
    return graphrun.estimate(graph, vram="1G", ram="1G", hardware="sim").component(name).classes


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16", "int8", "nf4"])
@pytest.mark.parametrize("name", ["text_encoder", "text_encoder_2", "transformer"])
def test_blocks_have_the_bytes_that_the_executor_places(name: str, precision: str) -> None:
    graph = graphrun.load(GRAPHS / "flux-tiny.yaml")
    component, own = graph.component(name), torch.bfloat16
    module, of = ghost(component, graph.allow), classes(graph, name)
    held = held_in(precision, module, own, of, [], lambda dtype: draft(component, graph, dtype)[0])
    placed = lay_out(draft(component, graph, precision)[0], [path for k in of for path in k.blocks])
    assert held.block_bytes == tuple(max(round_up(placed[path].nbytes, 512) for path in k.blocks) for k in of)


def test_t5_keeps_its_wo_in_fp32_where_the_dtype_is_fp16() -> None:
    graph = graphrun.load(GRAPHS / "flux-tiny.yaml")
    component = graph.component("text_encoder_2")
    module, of = ghost(component, graph.allow), classes(graph, "text_encoder_2")
    sizes = {
        dtype: held_in(dtype, module, torch.bfloat16, of, [], lambda dtype: draft(component, graph, dtype)[0]).block_bytes[-1]
        for dtype in ("float16", "bfloat16")
    }
    wo = component.config["d_model"] * component.config["d_ff"]
    assert sizes["float16"] - sizes["bfloat16"] == 2 * wo


@pytest.fixture
def two_layers() -> torch.nn.Module:
    """256 -> 1024 -> 256 features, no biases."""
    layers = (torch.nn.Linear(256, 1024, bias=False), torch.nn.Linear(1024, 256, bias=False))
    return torch.nn.Sequential(*layers).to(torch.bfloat16)


WHOLE = (BlockClass("rest", ("",), False),)


def test_nf4_widens_its_weights_layer_by_layer_in_each_call(two_layers: torch.nn.Module) -> None:
    held = held_in("nf4", two_layers, torch.bfloat16, WHOLE, [], lambda dtype: two_layers)
    assert held.widened_bytes == (2 * 2 * 256 * 1024,)
    assert held.scratch_bytes == 2 * 256 * 1024  # the larger layer, in 16 bits
    assert held.transient_bytes == 6 * 256 * 1024  # as read, and in fp32


def test_int8_takes_its_rows_in_int8_and_its_products_in_int32(two_layers: torch.nn.Module) -> None:
    rows = 8
    call = Call("c", "forward", (), 0, 0, frozenset(), (("", 2.0 * rows * 2 * 256 * 1024),))
    held = held_in("int8", two_layers, torch.bfloat16, WHOLE, [call], lambda dtype: two_layers)
    assert held.widened_bytes == (0,)
    assert held.scratch_bytes == round_up(rows * (256 + 4) + 4 * rows * 1024, 512)
