"""A graph as networkx has it: against `Graph`'s own order and reach, for the reference graphs and
for graphs made at random."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_graph, random_stages

from graphrun.graph.loading import load
from graphrun.graph.nx import only_for, without_implied
from graphrun.graph.order import order_stages
from graphrun.graph.parts import Reference

GRAPHS = Path(__file__).parents[2] / "graphs"
FILES = sorted(GRAPHS.glob("*.yaml"))
TINY = load(GRAPHS / "flux-tiny.yaml")
SEEDS = st.integers(0, 10**6)
QUICK = settings(max_examples=50)


def expected_order(reads: dict[str, set[str]]) -> list[str]:
    """By networkx: each stage behind those that it reads of, ties in the order of the file."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(reads)
    graph.add_edges_from(
        (producer, name) for name, producers in reads.items() for producer in producers
    )
    return list(networkx.lexicographical_topological_sort(graph, key=list(reads).index))


def edges(graph: networkx.DiGraph, relation: str) -> set[tuple[str, str]]:
    return {(tail, head) for tail, head, label in graph.edges(data="relation") if label == relation}


@pytest.mark.sweep("more", sample=2)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_order_of_a_reference_graph_is_networkx_s(path: Path) -> None:
    graph, file_stages = (
        load(path, trust=["pyramid_dit", "video_vae", "diffusion_schedulers"]),
        yaml.safe_load(path.read_text())["stages"],
    )
    reads = {
        name: {
            text[1:].split(".")[0]
            for text in _texts(file_stages[name])
            if text[:1] == "$" and "." in text
        }
        for name in file_stages
    }
    assert [stage.name for stage in graph.stages] == expected_order(reads)
    digraph = graph.to_networkx()
    assert networkx.is_directed_acyclic_graph(digraph)
    assert {node for node, kind in digraph.nodes(data="kind") if kind == "component"} == {
        f"component:{text}" for text in graph.components
    }


def _texts(value: Any) -> list[str]:
    """Every text in a part of a YAML file."""
    if isinstance(value, (dict, list)):
        return [
            text
            for item in (value.values() if isinstance(value, dict) else value)
            for text in _texts(item)
        ]
    return [value] if isinstance(value, str) else []


@QUICK
@given(SEEDS)
def test_the_order_of_any_stages_is_networkx_s(seed: int) -> None:
    stages = random_stages(seed)
    reads = {
        name: {reference.name for reference in stage.references if reference.kind == "stage"}
        for name, stage in stages.items()
    }
    assert [stage.name for stage in order_stages(stages)] == expected_order(reads)


def test_nodes_and_edges_have_what_the_file_says() -> None:
    digraph = TINY.to_networkx()
    assert digraph.graph["name"] == "flux-tiny"
    assert list(digraph)[:2] == ["input:prompt", "input:height"]
    assert digraph.nodes["input:height"] == {
        "kind": "input",
        "name": "height",
        "type": "int",
        "required": False,
    }
    assert load(GRAPHS / "flux-dev.yaml").to_networkx().nodes["input:prompt"]["required"]
    encoder = {
        "kind": "component",
        "name": "text_encoder",
        "class_path": "transformers.CLIPTextModel",
        "dtype": "bfloat16",
    }
    assert digraph.nodes["component:text_encoder"] == encoder
    assert digraph.nodes["stage:encode"] == {
        "kind": "stage",
        "name": "encode",
        "op": "encode_prompt",
    }
    assert digraph.nodes["value:encode.embeds"] == {
        "kind": "value",
        "name": "encode.embeds",
        "type": "embeds",
        "precomputed": False,
    }
    assert digraph.nodes["output:image"] == {"kind": "output", "name": "image", "type": "image"}
    assert ("input:prompt", "stage:encode") in edges(digraph, "reads")
    assert ("value:encode.embeds", "stage:decode") in edges(digraph, "reads")
    assert ("value:decode.image", "output:image") in edges(digraph, "reads")
    assert edges(digraph, "produces") == {
        ("stage:encode", "value:encode.embeds"),
        ("stage:denoise", "value:denoise.latents"),
        ("stage:decode", "value:decode.image"),
    }
    assert edges(digraph, "uses") == {
        (f"component:{component}", f"stage:{stage.name}")
        for stage in TINY.stages
        for component in stage.uses
    }


def test_values_made_before_have_no_stage() -> None:
    digraph = TINY.with_precomputed(["encode"]).to_networkx()
    assert "stage:encode" not in digraph
    assert digraph.nodes["value:encode.embeds"]["precomputed"]
    assert not list(digraph.predecessors("value:encode.embeds"))
    assert set(digraph.successors("value:encode.embeds")) == {"stage:denoise", "stage:decode"}
    variant = replace(
        TINY, outputs={**TINY.outputs, "embeds": Reference("stage", "encode", "embeds")}
    )
    assert (
        variant.with_precomputed(["encode"]).to_networkx().nodes["output:embeds"]["type"] == "any"
    )


def test_an_estimate_adds_bytes_and_seconds() -> None:
    estimate = {
        "components": [
            {
                "name": "vae",
                "dtype": "bfloat16",
                "parameters": 7,
                "weights": {"bfloat16": {"bytes": 14}},
            }
        ],
        "values": [{"name": "denoise.latents", "bytes": 5}, {"name": "of.another", "bytes": 1}],
        "phases": [{"stage": "encode", "seconds": 1.0}, {"stage": "encode", "seconds": 2.0}],
    }
    digraph = TINY.to_networkx(estimate)
    assert (
        digraph.nodes["component:vae"]["bytes"],
        digraph.nodes["component:vae"]["parameters"],
    ) == (
        14,
        7,
    )
    assert digraph.nodes["value:denoise.latents"]["bytes"] == 5
    assert digraph.nodes["stage:encode"]["seconds"] == 3.0
    assert "value:of.another" not in digraph
    assert "bytes" not in digraph.nodes["value:encode.embeds"]


def test_an_edge_that_a_longer_path_implies_goes_and_is_named() -> None:
    digraph = without_implied(TINY.to_networkx())
    assert not digraph.has_edge("value:encode.embeds", "stage:decode")
    assert digraph.nodes["value:encode.embeds"]["also_read_by"] == ("decode",)
    assert "also_read_by" not in digraph.nodes["value:denoise.latents"]


@settings(max_examples=25)
@given(SEEDS)
def test_the_reduction_keeps_what_reaches_what_and_no_edge_too_many(seed: int) -> None:
    full = random_graph(seed).to_networkx()
    reduction = without_implied(full)
    assert set(reduction) == set(full)
    assert edges(reduction, "uses") == edges(full, "uses")
    flow = networkx.DiGraph(edges(reduction, "reads") | edges(reduction, "produces"))
    whole_flow = networkx.DiGraph(edges(full, "reads") | edges(full, "produces"))
    assert {(a, b) for a in whole_flow for b in networkx.descendants(whole_flow, a)} == {
        (a, b) for a in flow for b in networkx.descendants(flow, a)
    }
    for tail, head in list(flow.edges):
        flow.remove_edge(tail, head)
        assert not networkx.has_path(flow, tail, head), "without it the order is another"
        flow.add_edge(tail, head)
    implied = {
        (node, f"stage:{name}")
        for node, names in reduction.nodes(data="also_read_by", default=())
        for name in names
    }
    assert implied == set(full.edges) - set(reduction.edges)


@QUICK
@given(SEEDS)
def test_what_only_an_output_needs_is_what_the_graph_without_it_does_without(seed: int) -> None:
    graph = random_graph(seed)

    def needed(outputs: dict[str, Reference]) -> set[str]:
        """As `Graph` walks from readers to producers."""
        names = {reference.name for reference in outputs.values()}
        for stage in reversed(graph.stages):
            names |= set(graph.producers(stage.name)) if stage.name in names else set()
        component_names = {
            reference for stage in graph.stages if stage.name in names for reference in stage.uses
        }
        return {f"stage:{name}" for name in names} | {
            f"component:{name}" for name in component_names
        }

    digraph = graph.to_networkx()
    for output in graph.outputs:
        other_outputs = {
            name: reference for name, reference in graph.outputs.items() if name != output
        }
        assert set(only_for(digraph, output)) == needed(dict(graph.outputs)) - needed(other_outputs)
