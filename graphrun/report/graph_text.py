"""A graph as text for other programs: Mermaid (shown by GitHub) and DOT (Graphviz).

`drawing_graph` selects what any drawing shows: stages, their components, the values between stages,
outputs, and inputs without a default. Edges that longer paths imply are omitted.
"""

from __future__ import annotations

import re
from typing import Any

import networkx

from graphrun.graph.nx import only_for, without_implied
from graphrun.units import show_seconds, show_size

# Mermaid's brackets around a label, and DOT's shape: a box, a cylinder, a stadium or ellipse, two
# parallelograms
_SHAPES = {
    "stage": ("[", "]", "box"),
    "component": ("[(", ")]", "cylinder"),
    "value": ("([", "])", "ellipse"),
    "input": ("[/", "/]", "parallelogram"),
    "output": ("[\\", "\\]", "parallelogram"),
}


def drawing_graph(graph: networkx.DiGraph) -> networkx.DiGraph:
    """Return the nodes and edges of ``graph`` that a drawing shows.

    ``graph``: from `graphrun.graph.nx.to_networkx`. If there are several outputs, the attribute
    ``only`` of each names the nodes that no other output needs.
    """
    subgraph = graph.copy()
    subgraph.remove_nodes_from(
        [
            node
            for node, attributes in graph.nodes(data=True)
            if attributes["kind"] == "input" and not attributes["required"]
        ]
    )
    drawing = without_implied(subgraph)
    outputs = [
        attributes for _, attributes in drawing.nodes(data=True) if attributes["kind"] == "output"
    ]
    for output in outputs if len(outputs) > 1 else ():
        output["only"] = tuple(
            drawing.nodes[node]["name"] for node in only_for(drawing, output["name"])
        )
    return drawing


def lines(attributes: dict[str, Any]) -> list[str]:
    """Return the lines of text in a node with ``attributes``, its name first."""
    text_lines = [attributes["name"]]
    match attributes["kind"]:
        case "stage":
            text_lines += [attributes["op"]] if attributes["op"] != attributes["name"] else []
            text_lines += (
                [f"compute {show_seconds(attributes['seconds'])}"]
                if "seconds" in attributes
                else []
            )
        case "component":
            text_lines += [
                attributes["class_path"].rpartition(".")[2],
                _sized(attributes["dtype"], attributes),
            ]
        case "value":
            text_lines.append(
                _sized(
                    "precomputed" if attributes["precomputed"] else attributes["type"], attributes
                )
            )
        case _:
            text_lines.append(f"{attributes['kind']}, {attributes['type']}")
    if "also_read_by" in attributes:
        text_lines.append(f"also read by {', '.join(attributes['also_read_by'])}")
    if attributes.get("only"):
        text_lines.append(f"needed by it alone: {', '.join(attributes['only'])}")
    return text_lines


def mermaid(graph: networkx.DiGraph) -> str:
    """Return ``graph``, from `drawing_graph`, as a Mermaid flowchart: ``-->`` is data, ``-.->`` the
    use of a component."""
    numbers = {
        node: f"{attributes['kind']}{number}"
        for number, (node, attributes) in enumerate(graph.nodes(data=True))
    }
    rows = ["flowchart TD", f"    accTitle: {_entities(graph.graph['name'])}"]
    for node, attributes in graph.nodes(data=True):
        opening, closing, _ = _SHAPES[attributes["kind"]]
        rows.append(
            f'    {numbers[node]}{opening}"{"<br/>".join(map(_entities, lines(attributes)))}'
            f'"{closing}'
        )
    for tail, head, relation in graph.edges(data="relation"):
        rows.append(
            f"    {numbers[tail]} {'-.->' if relation == 'uses' else '-->'} {numbers[head]}"
        )
    return "\n".join(rows) + "\n"


def dot(graph: networkx.DiGraph) -> str:
    """Return ``graph``, from `drawing_graph`, in Graphviz's language. The attribute ``bytes`` of a
    node is exact; it is missing if unknown."""
    rows = [f"digraph {_quoted(graph.graph['name'])} {{", '  node [fontname="sans-serif"];']
    for node, attributes in graph.nodes(data=True):
        size_text = f" bytes={attributes['bytes']}" if "bytes" in attributes else ""
        label = "\\n".join(_quoted(line)[1:-1] for line in lines(attributes))
        rows.append(
            f"  {_quoted(node)} [shape={_SHAPES[attributes['kind']][2]} "
            f'label="{label}"{size_text}];'
        )
    for tail, head, relation in graph.edges(data="relation"):
        rows.append(
            f"  {_quoted(tail)} -> "
            f"{_quoted(head)}{' [style=dashed]' if relation == 'uses' else ''};"
        )
    return "\n".join([*rows, "}"]) + "\n"


def _sized(text: str, attributes: dict[str, Any]) -> str:
    return f"{text}, {show_size(attributes['bytes'])}" if "bytes" in attributes else text


def _entities(text: str) -> str:
    """Return ``text`` with characters that could be Mermaid syntax as code points: ``#34;``."""
    return re.sub(r"[^A-Za-z0-9_ .,:+-]", lambda character: f"#{ord(character[0])};", text)


def _quoted(text: str) -> str:
    """Return ``text`` as a quoted string of DOT: backslashes and quotation marks escaped, line
    breaks as spaces."""
    return '"' + re.sub(r"[\x00-\x1f]", " ", text).replace("\\", "\\\\").replace('"', '\\"') + '"'
