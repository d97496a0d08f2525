"""A graph as a `networkx.DiGraph`, and the questions about it that networkx answers. Pure: no
torch, no I/O.

    input:prompt --reads--> stage:encode --produces--> value:encode.embeds --reads--> stage:denoise
    ... component:vae --uses--> stage:decode --produces--> value:decode.image  --reads-->
    output:image

A node is called ``kind:name``; a value has the name of its stage and output. Every edge points from
what is needed to what needs it, so the graph is acyclic, and the ancestors of a node are all that
it needs.

node        attributes beside ``kind`` and ``name``
input       type, required
component   class_path, dtype; bytes (of its weights in this dtype) and parameters from an estimate
stage       op; seconds (compute) from an estimate
value       type (embeds, latents, image, ...), precomputed; bytes (on the device) from an estimate
output      type

edge        attribute ``relation`` reads       from an input or a value to the stage that takes it
as an argument; from a value to the output that returns it produces    from a stage to its value
uses        from a component to the stage that runs it

Import this module inside functions only: a plan that comes from the cache must not import networkx.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import networkx


def to_networkx(graph: Any, estimate: Mapping[str, Any] | None = None) -> networkx.DiGraph:
    """Inputs, components, stages, values and outputs of ``graph`` (a `Graph`, which imports this
    module) as nodes, in the order of the file; ``name`` is its name.

    ``estimate``, as `graphrun.survey` returns it, adds ``bytes``, ``parameters`` and ``seconds`` to
    the nodes that it knows.
    """
    made = networkx.DiGraph(name=graph.name)
    for declared in graph.inputs.values():
        made.add_node(
            f"input:{declared.name}",
            kind="input",
            name=declared.name,
            type=declared.type,
            required=declared.required,
        )
    for component in graph.components.values():
        node = f"component:{component.name}"
        made.add_node(
            node,
            kind="component",
            name=component.name,
            class_path=component.class_path,
            dtype=component.dtype,
        )
    for reference in graph.precomputed:
        made.add_node(
            _source(reference), kind="value", name=_name(reference), type="any", precomputed=True
        )
    for stage in graph.stages:
        node = f"stage:{stage.name}"
        made.add_node(node, kind="stage", name=stage.name, op=stage.op)
        made.add_edges_from(
            ((_source(reference), node) for reference in stage.references), relation="reads"
        )
        made.add_edges_from(
            ((f"component:{component}", node) for component in stage.uses), relation="uses"
        )
        for output in stage.outputs:
            name, kind = f"{stage.name}.{output}", stage.operation.output(output) or "any"
            made.add_node(f"value:{name}", kind="value", name=name, type=kind, precomputed=False)
            made.add_edge(node, f"value:{name}", relation="produces")
    for name, reference in graph.outputs.items():
        made.add_node(
            f"output:{name}", kind="output", name=name, type=made.nodes[_source(reference)]["type"]
        )
        made.add_edge(_source(reference), f"output:{name}", relation="reads")
    if estimate is not None:
        _add_estimate(made, estimate)
    return made


def without_implied(graph: networkx.DiGraph) -> networkx.DiGraph:
    """A copy of ``graph``, as `to_networkx` makes it, without the edges that its longer paths imply
    (its transitive reduction).

    All edges of components stay: no path implies that a later stage uses a component too. The
    attribute ``also_read_by`` of a node names the stages to which an edge was left out.
    """
    flow = networkx.DiGraph(
        (tail, head) for tail, head, relation in graph.edges(data="relation") if relation != "uses"
    )
    implied = set(flow.edges) - set(networkx.transitive_reduction(flow).edges)
    made = graph.copy()
    made.remove_edges_from(implied)
    for node in made:
        if heads := [
            graph.nodes[head]["name"] for head in graph.successors(node) if (node, head) in implied
        ]:
            made.nodes[node]["also_read_by"] = tuple(heads)
    return made


def only_for(graph: networkx.DiGraph, output: str) -> tuple[str, ...]:
    """Nodes of the stages and components that the output called ``output`` needs and no other
    output does, in the graph's order.

    ``graph`` is as `to_networkx` makes it. Raises `networkx.NetworkXError` where it has no such
    output.
    """
    needed: set[str] = networkx.ancestors(graph, f"output:{output}")
    for node, kind in graph.nodes(data="kind"):
        if kind == "output" and node != f"output:{output}":
            needed -= networkx.ancestors(graph, node)
    return tuple(
        node
        for node, kind in graph.nodes(data="kind")
        if node in needed and kind in ("stage", "component")
    )


def _source(reference: Any) -> str:
    """The node of the input or the value that ``reference`` names."""
    return f"input:{reference.name}" if reference.kind == "input" else f"value:{_name(reference)}"


def _name(reference: Any) -> str:
    return str(reference).removeprefix("$")


def _add_estimate(graph: networkx.DiGraph, estimate: Mapping[str, Any]) -> None:
    found = {f"value:{row['name']}": {"bytes": row["bytes"]} for row in estimate["values"]}
    for row in estimate["components"]:
        weights = row["weights"][row["dtype"]]["bytes"]
        found[f"component:{row['name']}"] = {"bytes": weights, "parameters": row["parameters"]}
    for row in estimate["phases"]:
        times = found.setdefault(f"stage:{row['stage']}", {"seconds": 0})
        times["seconds"] += row["seconds"]
    networkx.set_node_attributes(graph, found)
