"""A graph as one self-contained SVG picture, readable in dark and light: no script, no font,
nothing from outside.

    +--------+  +--------------+
    | prompt |  | text_encoder |      layer 0   data flow is on the left, in a straight line where
    it is a chain; +---+----+  +------+-------+                components are on the right, one
    layer above their first stage
        |   ...........:
    +---v--:-+
    | encode |                       layer 1
    +---+----+
        v

Layers are the topological generations of the graph. An edge that spans several layers gets a bend
in each. The order within layers comes from barycentre sweeps (Sugiyama, Tagawa and Toda, 1981); the
one with the fewest transfers is kept.
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

# GAP: between boxes of a layer; BETWEEN: between layers
LINE, PADDING, GAP, BETWEEN, MARGIN = (
    17,
    9.0,
    18,
    46,
    20,
)
# width of a character at 12 px, rather too wide than too narrow; width of the smallest box
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
    """A node, or a bend of an edge (no text, no size), with the coordinates of its centre.

    ``side``: on the right, beside the data flow: a component or a bend of its edge. ``top``,
    ``bottom``: those of its layer.
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


def _box(node: str, of: dict[str, Any]) -> _Box:
    name, *others = lines(of)
    text = max(SMALLEST, 1.1 * (CHARACTER * len(name)), *(CHARACTER * len(line) for line in others))
    width = text + 2 * PADDING + (PADDING if of["kind"] == "value" else 0)
    return _Box(
        of["kind"] == "component",
        node,
        [name, *others],
        width,
        LINE * (1 + len(others)) + 2 * PADDING - 4,
    )


Layers = list[list[_Box]]
# the neighbours of each box in the layer above, or in the layer below
Joined = Mapping[_Box, Mapping[_Box, object]]


def graph_svg(graph: networkx.DiGraph, note: str = "") -> str:
    """The picture of ``graph``, as `graphrun.report.graph_text.drawn` makes it, with ``note`` as a
    line below its title.

    Each node is a ``<g data-node="stage:encode">``, with its exact bytes as ``data-bytes`` where
    they are known.
    """
    layers, paths = _layered(graph)
    boxes = [box for layer in layers for box in layer]
    joined = networkx.DiGraph(pair for path in paths.values() for pair in pairwise(path))
    joined.add_nodes_from(boxes)
    _order(layers, joined)
    _place(layers, joined)
    top, left = MARGIN + 2 * LINE + 10.0, min(box.x - box.width / 2 for box in boxes) - MARGIN
    for layer in layers:
        height = max((box.height for box in layer), default=0.0)
        for box in layer:
            box.x, box.y, box.top, box.bottom = box.x - left, top + height / 2, top, top + height
        top += height + BETWEEN
    right = max(box.x + box.width / 2 for box in boxes)
    size = {
        "width": f"{max(right, CHARACTER * len(note), 480.0) + MARGIN:.0f}",
        "height": f"{top + MARGIN:.0f}",
    }
    name, named = escape(graph.graph["name"]), {box.node: box for box in boxes}
    parts = [
        f'<title id="title">{name}</title><desc id="desc">{escape(_described(graph))}</desc><style>{_STYLE}</style>',
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="arrow" d="M0 0L8 4L0 8z"/></marker></defs>',
        element("rect", class_="paper", **size),
        element("text", name, class_="name title", x=MARGIN, y=MARGIN + 10),
        element("text", escape(note), class_="note", x=MARGIN, y=MARGIN + 10 + LINE),
        *(
            _edge(path, joined, tail, graph.edges[tail, head]["relation"], head)
            for (tail, head), path in paths.items()
        ),
        *(_drawn(named[node], of) for node, of in graph.nodes(data=True)),
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
    """The boxes and bends of each layer, and those along each edge."""
    number = {
        node: layer
        for layer, nodes in enumerate(networkx.topological_generations(graph))
        for node in nodes
    }
    for node in graph:
        if not graph.pred[node] and graph.succ[node]:  # one layer above its first reader
            number[node] = min(number[head] for head in graph.succ[node]) - 1
    boxes = {node: _box(node, of) for node, of in graph.nodes(data=True)}
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


def _sweeps(layers: Layers, joined: networkx.DiGraph) -> Iterator[tuple[Layers, Joined]]:
    """Layers downwards with the edges above each box, then upwards with those below it, and so
    on."""
    for sweep in range(SWEEPS):
        yield (layers[::-1], joined.succ) if sweep % 2 else (layers, joined.pred)


def _order(layers: Layers, joined: networkx.DiGraph) -> None:
    """Sorts each layer so that few edges cross: data flow first, then components."""
    place, found = dict[_Box, int](), []
    for swept, neighbours in ((layers, {}), *_sweeps(layers, joined)):
        for layer in swept:
            means = {
                box: _mean([place[other] for other in neighbours.get(box, ())], place.get(box, 0))
                for box in layer
            }
            layer.sort(key=lambda box, means=means: (box.side, means[box]))  # type: ignore[misc]
            place |= {box: number for number, box in enumerate(layer)}
        ends = (
            [(place[box], place[other]) for box in layer for other in joined.succ[box]]
            for layer in layers
        )
        transfers = sum(
            (a - c) * (b - d) < 0 for own in ends for (a, b), (c, d) in combinations(own, 2)
        )
        found.append((transfers, [list(layer) for layer in layers]))
    layers[:] = min(found, key=lambda each: each[0])[1]


def _place(layers: Layers, joined: networkx.DiGraph) -> None:
    """Sets ``x`` of each box: data flow close to its neighbours in other layers, components to the
    right of it."""
    for swept, neighbours in _sweeps(layers, joined):
        for layer in swept:
            flow = [box for box in layer if not box.side]
            wanted = [
                _mean([other.x for other in neighbours[box] if not other.side], box.x)
                for box in flow
            ]
            for box, x in zip(flow, _apart(flow, wanted), strict=True):
                box.x = x
    for layer in reversed(layers):
        right = max(
            (box.x + box.width / 2 + GAP for box in layer if not box.side), default=float("-inf")
        )
        for box in layer:
            if box.side:
                box.x = max(
                    _mean([other.x for other in joined.succ[box]], box.x), right + box.width / 2
                )
                right = box.x + box.width / 2 + GAP


def _apart(boxes: Sequence[_Box], wanted: Sequence[float]) -> list[float]:
    """Coordinates near ``wanted``, in the order of ``boxes``, at least `GAP` apart: the mean of
    pushing right and pushing left."""
    right, left = _pushed(boxes, wanted), _pushed(boxes[::-1], [-x for x in wanted[::-1]])
    return [(one - other) / 2 for one, other in zip(right, left[::-1], strict=True)]


def _pushed(boxes: Sequence[_Box], wanted: Sequence[float]) -> list[float]:
    found = list(wanted[:1])
    for (one, other), x in zip(pairwise(boxes), wanted[1:], strict=True):
        found.append(max(x, found[-1] + (one.width + other.width) / 2 + GAP))
    return found


def _edge(
    path: Sequence[_Box], joined: networkx.DiGraph, tail: str, relation: str, head: str
) -> str:
    """The edge along ``path``: vertical within a layer, curved between layers."""
    drawing = ""
    for upper, lower in pairwise(path):
        x, to_x = _port(upper, lower, joined.succ[upper]), _port(lower, upper, joined.pred[lower])
        middle = (upper.bottom + lower.top) / 2
        drawing = drawing or f"M{x:.1f} {upper.y + upper.height / 2:.1f}"
        drawing += f"V{upper.bottom:.1f}C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {lower.top:.1f}"
    if (end := lower.y - lower.height / 2) > lower.top:
        drawing += f"V{end:.1f}"
    arrow = {} if relation == "uses" else {"marker_end": "url(#arrow)"}
    told = element("title", escape(f"{tail} {relation} {head}"))
    return element("path", told, class_=f"edge {relation}", d=drawing, **arrow)


def _port(box: _Box, other: _Box, joined: Mapping[_Box, object]) -> float:
    """The ``x`` at which the edge to ``other``, one of the ``joined`` neighbours on a side of
    ``box``, meets that side.

    Data flow meets it around the middle, the components of a stage on the right.
    """
    alike = sorted((each for each in joined if each.side == other.side), key=lambda each: each.x)
    low, high = (0.16, 0.46) if other.side and not box.side else (-0.25, 0.25)
    return box.x + box.width * (low + (high - low) * (alike.index(other) + 0.5) / len(alike))


def _key(top: float) -> Iterator[str]:
    """The legend: one line at the bottom."""
    left = float(MARGIN)
    for kind, meaning in _KEY.items():
        yield element(
            "rect",
            class_=f"box {kind}",
            x=left,
            y=top - 14,
            width=14,
            height=12,
            rx=f"{_ROUND[kind] / 4:g}",
        )
        yield element("text", meaning, class_="key", x=left + 20, y=top - 4)
        left += 20 + CHARACTER * len(meaning) + GAP


def _drawn(box: _Box, of: Mapping[str, Any]) -> str:
    top, nbytes = box.y - box.height / 2, {"data_bytes": str(of["bytes"])} if "bytes" in of else {}
    told = ", ".join(
        f"{name} {value}"
        for name, value in of.items()
        if name not in ("kind", "name", "also_read_by", "only")
    )
    place = {"x": box.x - box.width / 2, "y": top, "width": box.width, "height": box.height}
    parts = [
        element("title", escape(told)),
        element("rect", class_=f"box {of['kind']}", **place, rx=_ROUND[of["kind"]]),
    ]
    for number, line in enumerate(box.lines):
        name = {} if number else {"class_": "name"}
        parts.append(
            element("text", escape(line), **name, x=box.x, y=top + PADDING + 9 + number * LINE)
        )
    return element("g", "".join(parts), data_node=box.node, **nbytes)


def _described(graph: networkx.DiGraph) -> str:
    """The picture in words: each stage with what it reads, uses and makes."""
    found, names = [], graph.nodes(data="name")
    for node, kind in graph.nodes(data="kind"):
        if kind == "stage":
            words: dict[str, list[str]] = {
                "reads": [],
                "uses": [],
                "makes": [names[head] for head in graph.successors(node)],
            }
            for tail, _, relation in graph.in_edges(node, data="relation"):
                words[relation].append(names[tail])
            told = "; ".join(f"{verb} {', '.join(of)}" for verb, of in words.items() if of)
            found.append(f"Stage {names[node]} {told}.")
    return " ".join(found)


def _mean(numbers: Sequence[float], otherwise: float) -> float:
    return sum(numbers) / len(numbers) if numbers else otherwise
