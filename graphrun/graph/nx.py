"""A graph as a `networkx.DiGraph`, and the questions about it that networkx answers.

This module imports no torch and does no I/O.

    input:prompt --reads--> stage:encode --produces--> value:encode.embeds --reads--> stage:denoise
    component:vae --uses--> stage:decode --produces--> value:decode.image  --reads--> output:image

A node is called ``kind:name``; a value has the name of its stage and output. Edges point from
producer to consumer, so the graph is acyclic, and the ancestors of a node are everything it needs.

    node        attributes besides ``kind`` and ``name``
    input       type, required
    component   class_path, dtype; from an estimate bytes (weights in this dtype), parameters
    stage       op; from an estimate seconds (compute)
    value       type (embeds, latents, image, ...), precomputed; from an estimate device bytes
    output      type

    edge        attribute ``relation``
    reads       from an input or value to a stage that takes it; from a value to an output
    produces    from a stage to its value
    uses        from a component to a stage that runs it

Import this module inside functions only: a plan from the cache must not import networkx.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import networkx


def to_networkx(graph: Any, estimate: Mapping[str, Any] | None = None) -> networkx.DiGraph:
    """Return ``graph``, a `Graph`, as a directed graph with nodes in the order of the file.

    ``estimate``, as `graphrun.survey` returns it, adds ``bytes``, ``parameters`` and ``seconds`` to
    the nodes that it describes.
    """
    digraph = networkx.DiGraph(name=graph.name)
    for definition in graph.inputs.values():
        digraph.add_node(
            f"input:{definition.name}",
            kind="input",
            name=definition.name,
            type=definition.type,
            required=definition.required,
        )
    for component in graph.components.values():
        node = f"component:{component.name}"
        digraph.add_node(
            node,
            kind="component",
            name=component.name,
            class_path=component.class_path,
            dtype=component.dtype,
        )
    for reference in graph.precomputed:
        digraph.add_node(
            _source(reference), kind="value", name=_name(reference), type="any", precomputed=True
        )
    for stage in graph.stages:
        node = f"stage:{stage.name}"
        digraph.add_node(node, kind="stage", name=stage.name, op=stage.op)
        digraph.add_edges_from(
            ((_source(reference), node) for reference in stage.references), relation="reads"
        )
        digraph.add_edges_from(
            ((f"component:{component}", node) for component in stage.uses), relation="uses"
        )
        for output in stage.outputs:
            name, kind = f"{stage.name}.{output}", stage.operation.output(output) or "any"
            digraph.add_node(f"value:{name}", kind="value", name=name, type=kind, precomputed=False)
            digraph.add_edge(node, f"value:{name}", relation="produces")
    for name, reference in graph.outputs.items():
        digraph.add_node(
            f"output:{name}",
            kind="output",
            name=name,
            type=digraph.nodes[_source(reference)]["type"],
        )
        digraph.add_edge(_source(reference), f"output:{name}", relation="reads")
    if estimate is not None:
        _add_estimate(digraph, estimate)
    return digraph


def without_implied(graph: networkx.DiGraph) -> networkx.DiGraph:
    """Return a copy of ``graph`` without edges that longer paths imply (its transitive reduction).

    ``graph``: from `to_networkx`. All edges of components stay: no path implies that a later stage
    uses a component too. A node's attribute ``also_read_by`` names the stages to which an edge was
    removed.
    """
    flow = networkx.DiGraph(
        (tail, head) for tail, head, relation in graph.edges(data="relation") if relation != "uses"
    )
    implied = set(flow.edges) - set(networkx.transitive_reduction(flow).edges)
    reduction = graph.copy()
    reduction.remove_edges_from(implied)
    for node in reduction:
        if heads := [
            graph.nodes[head]["name"] for head in graph.successors(node) if (node, head) in implied
        ]:
            reduction.nodes[node]["also_read_by"] = tuple(heads)
    return reduction


def only_for(graph: networkx.DiGraph, output: str) -> tuple[str, ...]:
    """Return the nodes of stages and components that only ``output`` needs, in the graph's order.
    ``graph``: from `to_networkx`. Raises `networkx.NetworkXError` if there is no such output."""
    ancestors: set[str] = networkx.ancestors(graph, f"output:{output}")
    for node, kind in graph.nodes(data="kind"):
        if kind == "output" and node != f"output:{output}":
            ancestors -= networkx.ancestors(graph, node)
    return tuple(
        node
        for node, kind in graph.nodes(data="kind")
        if node in ancestors and kind in ("stage", "component")
    )


def _source(reference: Any) -> str:
    """Return the node of the input or value that ``reference`` names."""
    return f"input:{reference.name}" if reference.kind == "input" else f"value:{_name(reference)}"


def _name(reference: Any) -> str:
    return str(reference).removeprefix("$")


def _add_estimate(graph: networkx.DiGraph, estimate: Mapping[str, Any]) -> None:
    attributes = {f"value:{row['name']}": {"bytes": row["bytes"]} for row in estimate["values"]}
    for row in estimate["components"]:
        weights = row["weights"][row["dtype"]]["bytes"]
        attributes[f"component:{row['name']}"] = {"bytes": weights, "parameters": row["parameters"]}
    for row in estimate["phases"]:
        times = attributes.setdefault(f"stage:{row['stage']}", {"seconds": 0})
        times["seconds"] += row["seconds"]
    networkx.set_node_attributes(graph, attributes)
