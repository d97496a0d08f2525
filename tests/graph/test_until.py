"""A graph that ends with one of its stages: the stages that remain, and its outputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from graphrun.errors import InputError
from graphrun.graph.loading import load
from graphrun.graph.parts import Directives, Reference

GRAPH = load(Path(__file__).parents[2] / "graphs" / "flux-tiny.yaml")


def test_only_what_the_stage_needs_is_left() -> None:
    encoding = GRAPH.until("encode")
    assert [stage.name for stage in encoding.stages] == ["encode"]
    assert set(encoding.inputs) == {"prompt", "max_sequence_length"}
    assert encoding.outputs == {"embeds": Reference("stage", "encode", "embeds")}
    assert encoding.components == GRAPH.components, (
        "pipelines read sizes from components that they do not enter"
    )
    assert encoding.digest != GRAPH.digest
    assert [stage.name for stage in GRAPH.until("denoise").stages] == ["encode", "denoise"]
    with pytest.raises(InputError, match="unknown input 'height'"):
        encoding.resolve({"height": 128})


def test_until_the_last_stage_is_the_whole_graph_and_until_twice_is_until_once() -> None:
    assert GRAPH.until("decode") == GRAPH
    assert GRAPH.until("encode").until("encode") == GRAPH.until("encode")


def test_a_branch_that_the_stage_does_not_need_goes() -> None:
    encode, denoise, decode = GRAPH.stages
    other = replace(encode, name="other")
    graph = replace(GRAPH, stages=(encode, other, denoise, decode))
    assert [stage.name for stage in graph.until("denoise").stages] == ["encode", "denoise"]


def test_directives_stay_for_what_is_used() -> None:
    directed = replace(GRAPH, directives=Directives(("vae", "text_encoder"), ("transformer",), 5))
    assert directed.until("encode").directives == Directives(("text_encoder",), (), 5)


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(InputError, match="did you mean 'encode'"):
        GRAPH.until("encod")
