"""Drawings of graphs: each node and edge is there, with the bytes of ``graphrun estimate``; and
they are well-formed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_graph

from graphrun.graph.graph import Graph
from graphrun.graph.loading import load
from graphrun.graph.parts import Component, Reference
from graphrun.report.graph_text import dot, drawing_graph, lines, mermaid
from graphrun.units import show_size

GRAPHS = Path(__file__).parents[2] / "graphs"
TINY = GRAPHS / "flux-tiny.yaml"
Cli = Callable[..., tuple[int, str, str]]

_LABEL = r'"((?:[A-Za-z0-9_ .,:+-]|#\d+;|<br/>)+)"'
_MERMAID_NODE = re.compile(
    rf" {{4}}(\w+)(?:\[{_LABEL}\]|\[\({_LABEL}\)\]|\(\[{_LABEL}\]\)"
    rf"|\[/{_LABEL}/\]|\[\\{_LABEL}\\\])"
)
_MERMAID_EDGE = re.compile(r" {4}(\w+) (-->|-\.->) (\w+)")
_TEXT = r'"((?:[^"\\\n]|\\.)*)"'
_DOT_NODE = re.compile(rf"  {_TEXT} \[shape=\w+ label={_TEXT}( bytes=\d+)?\];")
_DOT_EDGE = re.compile(rf"  {_TEXT} -> {_TEXT}( \[style=dashed\])?;")


def of_mermaid(text: str) -> tuple[dict[str, list[str]], set[tuple[str, str]]]:
    """Lines of text by name of the node, and edges between names of nodes. Fails where a line is no
    Mermaid."""
    head, title, *rows = text.splitlines()
    assert head == "flowchart TD"
    assert title.startswith("    accTitle: ")
    nodes: dict[str, list[str]] = {}
    edges = set()
    for row in rows:
        if edge := _MERMAID_EDGE.fullmatch(row):
            edges.add((edge[1], edge[3]))
        else:
            match = _MERMAID_NODE.fullmatch(row)
            assert match, row
            assert match[1] not in nodes
            label = next(filter(None, match.groups()[1:]))
            nodes[match[1]] = [
                re.sub(r"#(\d+);", lambda code: chr(int(code[1])), line)
                for line in label.split("<br/>")
            ]
    assert {end for edge in edges for end in edge} <= set(nodes)
    return nodes, edges


def of_dot(text: str) -> tuple[dict[str, list[str]], set[tuple[str, str]], dict[str, int]]:
    """Lines of text by node, edges, and bytes by node. Fails where a line is no DOT."""
    head, _, *rows, end = text.splitlines()
    assert re.fullmatch(rf"digraph {_TEXT} {{", head)
    assert end == "}"
    plain = re.compile(r"\\(.)")
    nodes, edges, nbytes = {}, set(), {}
    for row in rows:
        if edge := _DOT_EDGE.fullmatch(row):
            edges.add((plain.sub(r"\1", edge[1]), plain.sub(r"\1", edge[2])))
        else:
            match = _DOT_NODE.fullmatch(row)
            assert match, row
            name = plain.sub(r"\1", match[1])
            nodes[name] = [plain.sub(r"\1", line) for line in re.split(r"(?<!\\)\\n", match[2])]
            if match[3]:
                nbytes[name] = int(match[3].removeprefix(" bytes="))
    return nodes, edges, nbytes


def assert_drawn_alike(drawing: networkx.DiGraph) -> None:
    """Both drawings of ``drawing`` name its nodes, with their lines of text, and its edges."""
    expected = {node: lines(node_data) for node, node_data in drawing.nodes(data=True)}
    nodes, edges, nbytes = of_dot(dot(drawing))
    assert (nodes, edges) == (expected, set(drawing.edges))
    assert nbytes == {
        node: node_data for node, node_data in drawing.nodes(data="bytes") if node_data is not None
    }
    mermaid_nodes, join_nodes = of_mermaid(mermaid(drawing))
    numbers = dict(zip(mermaid_nodes, expected, strict=True))
    assert {numbers[node]: text for node, text in mermaid_nodes.items()} == expected
    assert {(numbers[tail], numbers[head]) for tail, head in join_nodes} == set(drawing.edges)


@pytest.mark.parametrize("path", sorted(GRAPHS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_stage_component_value_and_output_of_a_reference_graph_is_drawn(path: Path) -> None:
    graph = load(path, trust=["pyramid_dit", "video_vae", "diffusion_schedulers"])
    drawing = drawing_graph(graph.to_networkx())
    assert_drawn_alike(drawing)
    assert {node for node in drawing if not node.startswith("input:")} == {
        *(f"stage:{stage.name}" for stage in graph.stages),
        *(f"component:{name}" for name in graph.components),
        *(f"value:{stage.name}.{output}" for stage in graph.stages for output in stage.outputs),
        *(f"output:{name}" for name in graph.outputs),
    }
    assert {node for node in drawing if node.startswith("input:")} == {
        f"input:{definition.name}" for definition in graph.inputs.values() if definition.required
    }


def test_nodes_are_drawn_in_the_order_of_the_file() -> None:
    """Even where most of the inputs are left out, and whatever the seed of Python's hashes is."""
    for path in GRAPHS.glob("*-tiny.yaml"):
        whole = load(path, trust=["pyramid_dit", "video_vae", "diffusion_schedulers"]).to_networkx()
        drawing = drawing_graph(whole)
        assert list(drawing) == [node for node in whole if node in drawing]


@settings(max_examples=40)
@given(st.integers(0, 10**6))
def test_any_graph_is_drawn(seed: int) -> None:
    assert_drawn_alike(drawing_graph(random_graph(seed).to_networkx()))


def test_texts_that_are_syntax_elsewhere_are_escaped() -> None:
    nasty = '<b>&"];\\n`#{}--> %%'
    graph: Graph = load(TINY)
    component = replace(graph.components["vae"], name=nasty, dtype=nasty, class_path=f"x.{nasty}")
    stages = (
        *graph.stages[:2],
        replace(graph.stages[2], name=nasty, op=graph.stages[2].op, uses=(nasty,)),
    )
    parts: dict[str, Component] = {
        **{k: v for k, v in graph.components.items() if k != "vae"},
        nasty: component,
    }
    graph = replace(
        graph,
        name=nasty,
        components=parts,
        stages=stages,
        outputs={nasty: Reference("stage", nasty, "image")},
    )
    assert_drawn_alike(drawing_graph(graph.to_networkx()))


def test_what_only_one_of_several_outputs_needs_is_said() -> None:
    graph = load(TINY)
    drawing = drawing_graph(
        replace(
            graph, outputs={**graph.outputs, "made": Reference("stage", "denoise", "latents")}
        ).to_networkx()
    )
    assert lines(drawing.nodes["output:image"])[-1] == "needed by it alone: vae, decode"
    assert lines(drawing.nodes["output:made"]) == ["made", "output, latents"]
    assert lines(drawing_graph(graph.to_networkx()).nodes["output:image"]) == [
        "image",
        "output, image",
    ]


@pytest.fixture
def estimated(graphrun: Cli) -> dict[str, Any]:
    code, output, _ = graphrun(
        "estimate", str(TINY), "--device", "sim", "--set", "height=128", "--json"
    )
    assert code == 0
    return json.loads(output)  # type: ignore[no-any-return]


@pytest.mark.sweep("more")
@pytest.mark.long
def test_bytes_in_drawings_are_those_of_estimate(
    graphrun: Cli, estimated: dict[str, Any], tmp_path: Path
) -> None:
    expected = {
        f"component:{row['name']}": row["weights"][row["dtype"]]["bytes"]
        for row in estimated["components"]
    }
    expected |= {f"value:{row['name']}": row["bytes"] for row in estimated["values"]}
    assert len(expected) == 6
    options = ("graph", str(TINY), "--device", "sim", "--set", "height=128")
    code, dot, err = graphrun(*options, "--as", "dot")
    assert (code, err) == (0, "")
    assert of_dot(dot)[2] == expected
    nodes, _ = of_mermaid(graphrun(*options, "--as", "mermaid")[1])
    shown_labels = {text[0]: text for text in nodes.values()}
    for node, nbytes in expected.items():
        assert show_size(nbytes) in " ".join(shown_labels[node.partition(":")[2]])
    assert graphrun(*options, "--as", "dot", "-o", "new/tiny.dot")[:2] == (
        0,
        "wrote new/tiny.dot\n",
    )
    assert (tmp_path / "new" / "tiny.dot").read_text() == dot


@pytest.mark.long
def test_a_graph_without_a_dry_run_is_drawn_without_bytes(graphrun: Cli, edit_graph: Any) -> None:
    path = edit_graph("flux-tiny", ("transformers.T5EncoderModel", "transformers.NoSuchModel")).path
    code, output, err = graphrun("graph", str(path), "--as", "dot", "--set", "height=128")
    assert code == 0
    assert of_dot(output)[2] == {}
    assert "component:text_encoder_2" in of_dot(output)[0]
    assert err.startswith("graphrun: drawn without bytes, since there is no dry run: ")
    assert "NoSuchModel" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((str(TINY), "--as", "png"), "--as 'png' is not known; use mermaid or dot"),
        (
            ("plan.json", "--as", "dot"),
            "plan.json is JSON, and this command takes a graph",
        ),
        (("none.yaml", "--as", "dot"), "none.yaml: no such file"),
        (
            (str(TINY), "--as", "dot", "--set", "hight=128"),
            "unknown input 'hight'; did you mean 'height'?",
        ),
        ((str(TINY), "--as", "dot", "-o", "plan.json/a.dot"), "plan.json/a.dot: cannot be written"),
        ((str(TINY), "--as", "dot", "--hardware", "rtx"), "rtx"),
    ],
)
def test_bad_arguments_are_one_line(
    graphrun: Cli, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "plan.json").write_text('{"graphrun": 1}')
    code, output, err = graphrun("graph", *arguments)
    assert (code, output, err.count("\n")) == (2, "", 1)
    assert words in err
