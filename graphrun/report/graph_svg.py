"""A graph as one self-contained SVG picture for dark and light themes.

    +--------+  +--------------+
    | prompt |  | text_encoder |      layer 0
    +---+----+  +------+-------+
        |   ...........:
    +---v--:-+
    | encode |                       layer 1
    +---+----+
        v

Data flow is on the left; a chain is a straight line. Components are on the right, one layer above
the first stage that uses them.

Layers are the topological generations of the graph. An edge that spans several layers bends in
each. Of the orders within layers that barycentre sweeps make (Sugiyama, Tagawa and Toda, 1981), the
one with the fewest crossings is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import combinations, pairwise
from typing import Any

import networkx

from graphrun.report.graph_text import lines
from graphrun.report.svg import element, picture

# in pixels. GAP: between boxes of a layer; BETWEEN: between layers
LINE, PADDING, GAP, BETWEEN, MARGIN = (
    17,
    9.0,
    18,
    46,
    20,
)
# width of a character at 12 px, estimated a little too wide; width of the smallest box
CHARACTER, SMALLEST = (
    7.3,
    76.0,
)
SWEEPS = 12

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1a1a1a; --soft: #5c5c5c;
  --stage: #0072b2; --component: #b87900; --value: #00805d; --end: #777 }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181c; --ink: #e8e8e8; --soft: #a6a6a6;
    --stage: #56b4e9; --component: #e69f00; --value: #2fc79a; --end: #999 }
}
.paper { fill: var(--paper) }
text { fill: var(--soft); font: 12px system-ui, sans-serif; text-anchor: middle }
.name { fill: var(--ink); font-weight: 600 }
.title, .note, .key { text-anchor: start }
.box { stroke-width: 1.5; fill-opacity: .13 }
.stage { fill: var(--stage); stroke: var(--stage) }
.component { fill: var(--component); stroke: var(--component) }
.value { fill: var(--value); stroke: var(--value) }
.input, .output { fill: var(--end); stroke: var(--end) }
.edge { fill: none; stroke: var(--soft); stroke-width: 1.3 }
.uses { stroke: var(--component); stroke-dasharray: 5 4 }
.arrow { fill: var(--soft) }
"""
_ROUND = {"stage": 8, "component": 2, "value": 22, "input": 0, "output": 0}
_KEY = {
    "stage": "stage",
    "value": "value",
    "component": "component, its weights",
    "input": "input or output",
}


@dataclass(slots=True, eq=False)
class _Box:
    """A node, or a bend of an edge, with the coordinates of its centre.

    A bend has no text and no size. ``side``: the box is right of the data flow, as components and
    the bends of their edges are. ``top``, ``bottom``: the bounds of its layer.
    """

    side: bool
    node: str = ""
    lines: Sequence[str] = ()
    width: float = 0.0
    height: float = 0.0
    x: float = 0.0
    y: float = 0.0
    top: float = 0.0
    bottom: float = 0.0


def _box(node: str, attributes: dict[str, Any]) -> _Box:
    name, *details = lines(attributes)
    text = max(
        SMALLEST, 1.1 * (CHARACTER * len(name)), *(CHARACTER * len(line) for line in details)
    )
    width = text + 2 * PADDING + (PADDING if attributes["kind"] == "value" else 0)
    return _Box(
        attributes["kind"] == "component",
        node,
        [name, *details],
        width,
        LINE * (1 + len(details)) + 2 * PADDING - 4,
    )


Layers = list[list[_Box]]
# the neighbours of each box in the layer above, or in the layer below
Joined = Mapping[_Box, Mapping[_Box, object]]


def graph_svg(graph: networkx.DiGraph, note: str = "") -> str:
    """Return the picture of ``graph`` with ``note`` below its title.

    ``graph``: from `graphrun.report.graph_text.drawing_graph`. Each node is a ``<g
    data-node="stage:encode">``; its exact bytes, if known, are in ``data-bytes``.
    """
    layers, paths = _layered(graph)
    boxes = [box for layer in layers for box in layer]
    box_graph = networkx.DiGraph(pair for path in paths.values() for pair in pairwise(path))
    box_graph.add_nodes_from(boxes)
    _order(layers, box_graph)
    _place(layers, box_graph)
    top, left_edge = MARGIN + 2 * LINE + 10.0, min(box.x - box.width / 2 for box in boxes) - MARGIN
    for layer in layers:
        height = max((box.height for box in layer), default=0.0)
        for box in layer:
            box.x, box.y, box.top, box.bottom = (
                box.x - left_edge,
                top + height / 2,
                top,
                top + height,
            )
        top += height + BETWEEN
    right = max(box.x + box.width / 2 for box in boxes)
    size = {
        "width": f"{max(right, CHARACTER * len(note), 480.0) + MARGIN:.0f}",
        "height": f"{top + MARGIN:.0f}",
    }
    name, boxes_by_node = escape(graph.graph["name"]), {box.node: box for box in boxes}
    parts = [
        f'<title id="title">{name}</title><desc '
        f'id="desc">{escape(_described(graph))}</desc><style>{_STYLE}</style>',
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto">'
        '<path class="arrow" d="M0 0L8 4L0 8z"/></marker></defs>',
        element("rect", class_="paper", **size),
        element("text", name, class_="name title", x=MARGIN, y=MARGIN + 10),
        element("text", escape(note), class_="note", x=MARGIN, y=MARGIN + 10 + LINE),
        *(
            _edge(path, box_graph, tail, graph.edges[tail, head]["relation"], head)
            for (tail, head), path in paths.items()
        ),
        *(_drawn(boxes_by_node[node], attributes) for node, attributes in graph.nodes(data=True)),
        *_key(top),
    ]
    return picture(
        parts,
        f"0 0 {size['width']} {size['height']}",
        **size,
        role="img",
        aria_labelledby="title desc",
    )


def _layered(graph: networkx.DiGraph) -> tuple[Layers, dict[tuple[str, str], list[_Box]]]:
    """Return the boxes and bends of each layer, and the boxes along each edge."""
    number = {
        node: layer
        for layer, nodes in enumerate(networkx.topological_generations(graph))
        for node in nodes
    }
    for node in graph:
        if not graph.pred[node] and graph.succ[node]:  # one layer above its first reader
            number[node] = min(number[head] for head in graph.succ[node]) - 1
    boxes = {node: _box(node, attributes) for node, attributes in graph.nodes(data=True)}
    layers: Layers = [[] for _ in range(max(number.values(), default=0) + 1)]
    for node, box in boxes.items():
        layers[number[node]].append(box)
    paths = {}
    for tail, head, relation in graph.edges(data="relation"):
        paths[tail, head] = path = [boxes[tail]]
        for layer in layers[number[tail] + 1 : number[head]]:
            path.append(_Box(side=relation == "uses"))
            layer.append(path[-1])
        path.append(boxes[head])
    return layers, paths


def _sweeps(layers: Layers, box_graph: networkx.DiGraph) -> Iterator[tuple[Layers, Joined]]:
    """Yield layers and neighbours for each sweep: downwards with edges above, then upwards."""
    for sweep in range(SWEEPS):
        yield (layers[::-1], box_graph.succ) if sweep % 2 else (layers, box_graph.pred)


def _order(layers: Layers, box_graph: networkx.DiGraph) -> None:
    """Sort each layer so that few edges cross; data flow comes before components."""
    place, orders = dict[_Box, int](), []
    for sweep_layers, neighbours in ((layers, {}), *_sweeps(layers, box_graph)):
        for layer in sweep_layers:
            means = {
                box: _mean([place[other] for other in neighbours.get(box, ())], place.get(box, 0))
                for box in layer
            }
            layer.sort(key=lambda box, means=means: (box.side, means[box]))  # type: ignore[misc]
            place |= {box: number for number, box in enumerate(layer)}
        edge_places = (
            [(place[box], place[other]) for box in layer for other in box_graph.succ[box]]
            for layer in layers
        )
        transfers = sum(
            (a - c) * (b - d) < 0
            for layer_ends in edge_places
            for (a, b), (c, d) in combinations(layer_ends, 2)
        )
        orders.append((transfers, [list(layer) for layer in layers]))
    layers[:] = min(orders, key=lambda order: order[0])[1]


def _place(layers: Layers, box_graph: networkx.DiGraph) -> None:
    """Set ``x`` of each box: data flow close to its neighbours in other layers, components right of
    it."""
    for sweep_layers, neighbours in _sweeps(layers, box_graph):
        for layer in sweep_layers:
            flow = [box for box in layer if not box.side]
            targets = [
                _mean([other.x for other in neighbours[box] if not other.side], box.x)
                for box in flow
            ]
            for box, x in zip(flow, _apart(flow, targets), strict=True):
                box.x = x
    for layer in reversed(layers):
        right = max(
            (box.x + box.width / 2 + GAP for box in layer if not box.side), default=float("-inf")
        )
        for box in layer:
            if box.side:
                box.x = max(
                    _mean([other.x for other in box_graph.succ[box]], box.x), right + box.width / 2
                )
                right = box.x + box.width / 2 + GAP


def _apart(boxes: Sequence[_Box], targets: Sequence[float]) -> list[float]:
    """Return coordinates near ``targets``, in the order of ``boxes``, at least `GAP` apart: the
    mean of pushing boxes to the right and to the left."""
    right_pass, left_pass = (
        _pushed(boxes, targets),
        _pushed(boxes[::-1], [-x for x in targets[::-1]]),
    )
    return [
        (right_x - left_x) / 2 for right_x, left_x in zip(right_pass, left_pass[::-1], strict=True)
    ]


def _pushed(boxes: Sequence[_Box], targets: Sequence[float]) -> list[float]:
    positions = list(targets[:1])
    for (box, next_box), x in zip(pairwise(boxes), targets[1:], strict=True):
        positions.append(max(x, positions[-1] + (box.width + next_box.width) / 2 + GAP))
    return positions


def _edge(
    path: Sequence[_Box], box_graph: networkx.DiGraph, tail: str, relation: str, head: str
) -> str:
    """Return the edge along ``path``: vertical within a layer, curved between layers."""
    drawing = ""
    for upper, lower in pairwise(path):
        x, to_x = (
            _port(upper, lower, box_graph.succ[upper]),
            _port(lower, upper, box_graph.pred[lower]),
        )
        middle = (upper.bottom + lower.top) / 2
        drawing = drawing or f"M{x:.1f} {upper.y + upper.height / 2:.1f}"
        drawing += (
            f"V{upper.bottom:.1f}C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} "
            f"{lower.top:.1f}"
        )
    if (end := lower.y - lower.height / 2) > lower.top:
        drawing += f"V{end:.1f}"
    arrow = {} if relation == "uses" else {"marker_end": "url(#arrow)"}
    tooltip = element("title", escape(f"{tail} {relation} {head}"))
    return element("path", tooltip, class_=f"edge {relation}", d=drawing, **arrow)


def _port(box: _Box, target: _Box, neighbours: Mapping[_Box, object]) -> float:
    """Return the ``x`` at which the edge to ``target`` meets a side of ``box``.

    ``neighbours``: the boxes connected to that side. Data flow meets it around the middle, the
    components of a stage on the right.
    """
    same_side = sorted(
        (neighbour for neighbour in neighbours if neighbour.side == target.side),
        key=lambda neighbour: neighbour.x,
    )
    low, high = (0.16, 0.46) if target.side and not box.side else (-0.25, 0.25)
    return box.x + box.width * (
        low + (high - low) * (same_side.index(target) + 0.5) / len(same_side)
    )


def _key(top: float) -> Iterator[str]:
    x = float(MARGIN)
    for kind, meaning in _KEY.items():
        yield element(
            "rect",
            class_=f"box {kind}",
            x=x,
            y=top - 14,
            width=14,
            height=12,
            rx=f"{_ROUND[kind] / 4:g}",
        )
        yield element("text", meaning, class_="key", x=x + 20, y=top - 4)
        x += 20 + CHARACTER * len(meaning) + GAP


def _drawn(box: _Box, attributes: Mapping[str, Any]) -> str:
    top, nbytes = (
        box.y - box.height / 2,
        {"data_bytes": str(attributes["bytes"])} if "bytes" in attributes else {},
    )
    tooltip = ", ".join(
        f"{name} {value}"
        for name, value in attributes.items()
        if name not in ("kind", "name", "also_read_by", "only")
    )
    place = {"x": box.x - box.width / 2, "y": top, "width": box.width, "height": box.height}
    parts = [
        element("title", escape(tooltip)),
        element("rect", class_=f"box {attributes['kind']}", **place, rx=_ROUND[attributes["kind"]]),
    ]
    for number, line in enumerate(box.lines):
        name = {} if number else {"class_": "name"}
        parts.append(
            element("text", escape(line), **name, x=box.x, y=top + PADDING + 9 + number * LINE)
        )
    return element("g", "".join(parts), data_node=box.node, **nbytes)


def _described(graph: networkx.DiGraph) -> str:
    """Describe the picture in words: what each stage reads, uses and makes."""
    sentences, names = [], graph.nodes(data="name")
    for node, kind in graph.nodes(data="kind"):
        if kind == "stage":
            words: dict[str, list[str]] = {
                "reads": [],
                "uses": [],
                "makes": [names[head] for head in graph.successors(node)],
            }
            for tail, _, relation in graph.in_edges(node, data="relation"):
                words[relation].append(names[tail])
            clauses = "; ".join(
                f"{verb} {', '.join(objects)}" for verb, objects in words.items() if objects
            )
            sentences.append(f"Stage {names[node]} {clauses}.")
    return " ".join(sentences)


def _mean(numbers: Sequence[float], otherwise: float) -> float:
    return sum(numbers) / len(numbers) if numbers else otherwise
