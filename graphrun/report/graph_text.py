"""A graph as text that other programs draw: Mermaid (what GitHub shows in Markdown) and DOT
(Graphviz).

`drawn` decides what a drawing of a graph shows, in `graphrun.report.graph_svg` too: stages, the
components that they use, the values between them, outputs, and the inputs that have no default;
without edges that longer paths imply.
"""

from __future__ import annotations

import re
from typing import Any

import networkx

from graphrun.graph.nx import only_for, without_implied
from graphrun.units import show_seconds, show_size

# Mermaid's brackets around a label, and DOT's shape: a box, a cylinder, a stadium or ellipse, two
# parallelograms.
_SHAPES = {
    "stage": ("[", "]", "box"),
    "component": ("[(", ")]", "cylinder"),
    "value": ("([", "])", "ellipse"),
    "input": ("[/", "/]", "parallelogram"),
    "output": ("[\\", "\\]", "parallelogram"),
}


def drawn(graph: networkx.DiGraph) -> networkx.DiGraph:
    """The nodes and edges of ``graph``, as `graphrun.graph.nx.to_networkx` makes it, that a drawing
    shows.

    Where there are several outputs, each gets the names of what only it needs as the attribute
    ``only``.
    """
    kept = graph.copy()
    kept.remove_nodes_from(
        [
            node
            for node, of in graph.nodes(data=True)
            if of["kind"] == "input" and not of["required"]
        ]
    )
    made = without_implied(kept)
    outputs = [of for _, of in made.nodes(data=True) if of["kind"] == "output"]
    for output in outputs if len(outputs) > 1 else ():
        output["only"] = tuple(made.nodes[node]["name"] for node in only_for(made, output["name"]))
    return made


def lines(of: dict[str, Any]) -> list[str]:
    """The lines of text in a node with the attributes ``of``, its name first."""
    found = [of["name"]]
    match of["kind"]:
        case "stage":
            found += [of["op"]] if of["op"] != of["name"] else []
            found += [f"compute {show_seconds(of['seconds'])}"] if "seconds" in of else []
        case "component":
            found += [of["class_path"].rpartition(".")[2], _sized(of["dtype"], of)]
        case "value":
            found.append(_sized("precomputed" if of["precomputed"] else of["type"], of))
        case _:
            found.append(f"{of['kind']}, {of['type']}")
    if "also_read_by" in of:
        found.append(f"also read by {', '.join(of['also_read_by'])}")
    if of.get("only"):
        found.append(f"needed by it alone: {', '.join(of['only'])}")
    return found


def mermaid(graph: networkx.DiGraph) -> str:
    """``graph``, as `drawn` makes it, as a Mermaid flowchart: ``-->`` is data, ``-.->`` a component
    in use."""
    numbers = {
        node: f"{of['kind']}{number}" for number, (node, of) in enumerate(graph.nodes(data=True))
    }
    rows = ["flowchart TD", f"    accTitle: {_entities(graph.graph['name'])}"]
    for node, of in graph.nodes(data=True):
        left, right, _ = _SHAPES[of["kind"]]
        rows.append(f'    {numbers[node]}{left}"{"<br/>".join(map(_entities, lines(of)))}"{right}')
    for tail, head, relation in graph.edges(data="relation"):
        rows.append(
            f"    {numbers[tail]} {'-.->' if relation == 'uses' else '-->'} {numbers[head]}"
        )
    return "\n".join(rows) + "\n"


def dot(graph: networkx.DiGraph) -> str:
    """``graph``, as `drawn` makes it, in Graphviz's language; a node's attribute ``bytes`` is
    exact, where it is known."""
    rows = [f"digraph {_quoted(graph.graph['name'])} {{", '  node [fontname="sans-serif"];']
    for node, of in graph.nodes(data=True):
        more = f" bytes={of['bytes']}" if "bytes" in of else ""
        label = "\\n".join(_quoted(line)[1:-1] for line in lines(of))
        rows.append(f'  {_quoted(node)} [shape={_SHAPES[of["kind"]][2]} label="{label}"{more}];')
    for tail, head, relation in graph.edges(data="relation"):
        rows.append(
            f"  {_quoted(tail)} -> {_quoted(head)}{' [style=dashed]' if relation == 'uses' else ''};"
        )
    return "\n".join([*rows, "}"]) + "\n"


def _sized(text: str, of: dict[str, Any]) -> str:
    return f"{text}, {show_size(of['bytes'])}" if "bytes" in of else text


def _entities(text: str) -> str:
    """``text`` with everything that Mermaid could read as syntax as its code point: ``#34;``."""
    return re.sub(r"[^A-Za-z0-9_ .,:+-]", lambda found: f"#{ord(found[0])};", text)


def _quoted(text: str) -> str:
    """``text`` as a quoted string of DOT, in which a backslash and a quotation mark are escaped,
    and a line ends nowhere."""
    return '"' + re.sub(r"[\x00-\x1f]", " ", text).replace("\\", "\\\\").replace('"', '\\"') + '"'
