"""A graph as one self-contained SVG picture, readable in dark and light: no script, no font, nothing from outside.

    +--------+  +--------------+
    | prompt |  | text_encoder |      layer 0   data flow is on the left, in a straight line where it is a chain;
    +---+----+  +------+-------+                components are on the right, one layer above their first stage
        |   ...........:
    +---v--:-+
    | encode |                       layer 1
    +---+----+
        v

Layers are the topological generations of the graph. An edge that spans several layers gets a bend in each. The order within
layers comes from barycentre sweeps (Sugiyama, Tagawa and Toda, 1981); the one with the fewest crossings is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from html import escape

import networkx

from graphrun.report.graph_text import lines

LINE, PADDING, GAP, BETWEEN, MARGIN = 17, 9, 18, 46, 20  # GAP: between boxes of a layer; BETWEEN: between layers
CHARACTER, SMALLEST = 7.3, 76  # width of a character at 12 px, rather too wide than too narrow; width of the smallest box
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
_KEY = {"stage": "stage", "value": "value", "component": "component, its weights", "input": "input or output"}


@dataclass(slots=True)
class _Box:
    """A node, or a bend of an edge (no text, no size), with the coordinates of its centre."""

    node: str
    kind: str
    layer: int
    lines: list[str] = field(default_factory=list)
    x: float = 0.0
    y: float = 0.0
    top: float = 0.0  # of its layer
    bottom: float = 0.0

    @property
    def side(self) -> bool:
        """Whether it is on the right, beside the data flow: a component or a bend of its edge."""
        return self.kind == "component"

    @property
    def width(self) -> float:
        if not self.lines:
            return 0.0
        name, *others = (CHARACTER * len(line) for line in self.lines)
        return max(SMALLEST, 1.1 * name, *others) + 2 * PADDING + (PADDING if self.kind == "value" else 0)

    @property
    def height(self) -> float:
        return LINE * len(self.lines) + 2 * PADDING - 4 if self.lines else 0.0


def graph_svg(graph: networkx.DiGraph, note: str = "") -> str:
    """The picture of ``graph``, as `graphrun.report.graph_text.drawn` makes it, with ``note`` as a line below its title.

    Each node is a ``<g data-node="stage:encode">``, with its exact bytes as ``data-bytes`` where they are known.
    """
    boxes, layers, paths = _layered(graph)
    _order(layers, paths)
    _place(layers, paths, graph)
    top = MARGIN + 2 * LINE + 10.0
    for layer in layers:
        height = max((box.height for box in layer), default=0.0)
        for box in layer:
            box.y, box.top, box.bottom = top + height / 2, top, top + height
        top += height + BETWEEN
    left = min(box.x - box.width / 2 for layer in layers for box in layer) - MARGIN
    for layer in layers:
        for box in layer:
            box.x -= left
    right = max(box.x + box.width / 2 for layer in layers for box in layer)
    width, height = max(right, CHARACTER * len(note), 480.0) + MARGIN, top + MARGIN
    name = escape(graph.graph["name"])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
        ' role="img" aria-labelledby="title desc">',
        f'<title id="title">{name}</title><desc id="desc">{escape(_described(graph))}</desc><style>{_STYLE}</style>',
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="arrow" d="M0 0L8 4L0 8z"/></marker></defs>',
        f'<rect class="paper" width="{width:.0f}" height="{height:.0f}"/>',
        f'<text class="name title" x="{MARGIN}" y="{MARGIN + 10}">{name}</text>',
        f'<text class="note" x="{MARGIN}" y="{MARGIN + 10 + LINE}">{escape(note)}</text>',
        *_edges(graph, paths),
        *(_drawn(box, graph) for box in boxes.values()),
        *_key(top),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _layered(graph: networkx.DiGraph) -> tuple[dict[str, _Box], list[list[_Box]], dict[tuple[str, str], list[_Box]]]:
    """The box of each node, the boxes and bends of each layer, and the boxes and bends along each edge."""
    number = {node: layer for layer, nodes in enumerate(networkx.topological_generations(graph)) for node in nodes}
    for node in graph:
        if not graph.pred[node] and graph.succ[node]:  # one layer above its first reader
            number[node] = min(number[head] for head in graph.succ[node]) - 1
    boxes = {node: _Box(node, of["kind"], number[node], lines(of)) for node, of in graph.nodes(data=True)}
    layers: list[list[_Box]] = [[] for _ in range(max(number.values(), default=0) + 1)]
    for box in boxes.values():
        layers[box.layer].append(box)
    paths = {}
    for tail, head, relation in graph.edges(data="relation"):
        kind = "component" if relation == "uses" else "value"
        bends = [_Box("", kind, layer) for layer in range(number[tail] + 1, number[head])]
        for bend in bends:
            layers[bend.layer].append(bend)
        paths[tail, head] = [boxes[tail], *bends, boxes[head]]
    return boxes, layers, paths


def _neighbours(paths: dict[tuple[str, str], list[_Box]]) -> tuple[dict[int, list[_Box]], dict[int, list[_Box]]]:
    """The neighbours of each box in the layer above it, and in the layer below it, by the `id` of the box."""
    above: dict[int, list[_Box]] = {}
    below: dict[int, list[_Box]] = {}
    for path in paths.values():
        for upper, lower in zip(path, path[1:], strict=False):
            above.setdefault(id(lower), []).append(upper)
            below.setdefault(id(upper), []).append(lower)
    return above, below


def _order(layers: list[list[_Box]], paths: dict[tuple[str, str], list[_Box]]) -> None:
    """Sorts each layer so that few edges cross: data flow first, then components."""
    above, below = _neighbours(paths)
    place: dict[int, int] = {}

    def sort(layer: list[_Box], key: Callable[[_Box], float]) -> None:
        layer.sort(key=lambda box: (box.side, key(box)))
        place.update((id(box), number) for number, box in enumerate(layer))

    def mean_of(joined: dict[int, list[_Box]]) -> Callable[[_Box], float]:
        return lambda box: _mean((place[id(other)] for other in joined.get(id(box), ())), place[id(box)])

    for layer in layers:
        sort(layer, lambda box: 0)
    best, fewest = [list(layer) for layer in layers], _crossings(layers, below, place)
    for sweep in range(SWEEPS):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            sort(layer, mean_of(above if sweep % 2 == 0 else below))
        if (crossings := _crossings(layers, below, place)) < fewest:
            best, fewest = [list(layer) for layer in layers], crossings
    layers[:] = best


def _crossings(layers: list[list[_Box]], below: dict[int, list[_Box]], place: dict[int, int]) -> int:
    """How many pairs of edges between neighbouring layers cross."""
    found = 0
    for layer in layers:
        ends = [(place[id(box)], place[id(other)]) for box in layer for other in below.get(id(box), ())]
        found += sum((a - c) * (b - d) < 0 for number, (a, b) in enumerate(ends) for c, d in ends[:number])
    return found


def _place(layers: list[list[_Box]], paths: dict[tuple[str, str], list[_Box]], graph: networkx.DiGraph) -> None:
    """Sets ``x`` of each box: data flow close to its neighbours in other layers, components to the right of it."""
    flowing = {edge: path for edge, path in paths.items() if graph.edges[edge]["relation"] != "uses"}
    for sweep in range(SWEEPS):
        joined = _neighbours(flowing)[sweep % 2]
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            flow = [box for box in layer if not box.side]
            wanted = [_mean((other.x for other in joined.get(id(box), ())), box.x) for box in flow]
            for box, x in zip(flow, _apart(flow, wanted), strict=True):
                box.x = x
    below = _neighbours(paths)[1]
    for layer in reversed(layers):
        right = max((box.x + box.width / 2 + GAP for box in layer if not box.side), default=None)
        for box in (box for box in layer if box.side):
            wanted_x = _mean((other.x for other in below.get(id(box), ())), box.x)
            box.x = wanted_x if right is None else max(wanted_x, right + box.width / 2)
            right = box.x + box.width / 2 + GAP


def _apart(boxes: list[_Box], wanted: list[float]) -> list[float]:
    """Coordinates near ``wanted``, in the order of ``boxes``, at least `GAP` apart: the mean of pushing right and pushing left."""

    def pushed(boxes: list[_Box], wanted: list[float]) -> list[float]:
        found: list[float] = []
        for number, (box, x) in enumerate(zip(boxes, wanted, strict=True)):
            if number:
                x = max(x, found[-1] + (boxes[number - 1].width + box.width) / 2 + GAP)
            found.append(x)
        return found

    right = pushed(boxes, wanted)
    left = [-x for x in reversed(pushed(boxes[::-1], [-x for x in reversed(wanted)]))]
    return [(one + other) / 2 for one, other in zip(right, left, strict=True)]


def _edges(graph: networkx.DiGraph, paths: dict[tuple[str, str], list[_Box]]) -> Iterable[str]:
    """The edges as paths: vertical within a layer, curved between layers."""
    above, below = _neighbours(paths)
    for (tail, head), path in paths.items():
        relation, drawing = graph.edges[tail, head]["relation"], ""
        for upper, lower in zip(path, path[1:], strict=False):
            x, to_x = _port(upper, lower, below[id(upper)]), _port(lower, upper, above[id(lower)])
            middle = (upper.bottom + lower.top) / 2
            drawing += f"M{x:.1f} {upper.y + upper.height / 2:.1f}" if not drawing else ""
            drawing += f"V{upper.bottom:.1f}C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {lower.top:.1f}"
        if (end := lower.y - lower.height / 2) > lower.top:
            drawing += f"V{end:.1f}"
        arrow = "" if relation == "uses" else ' marker-end="url(#arrow)"'
        yield f'<path class="edge {relation}" d="{drawing}"{arrow}><title>{escape(f"{tail} {relation} {head}")}</title></path>'


def _port(box: _Box, other: _Box, joined: list[_Box]) -> float:
    """The ``x`` at which the edge to ``other``, one of the ``joined`` neighbours on a side of ``box``, meets that side.

    Data flow meets it around the middle, the components of a stage on the right.
    """
    alike = sorted((each for each in joined if each.side == other.side), key=lambda each: each.x)
    share = (next(n for n, each in enumerate(alike) if each is other) + 0.5) / len(alike)
    low, high = (0.16, 0.46) if other.side and not box.side else (-0.25, 0.25)
    return box.x + box.width * (low + (high - low) * share)


def _key(top: float) -> Iterable[str]:
    """The legend: one line at the bottom."""
    left = float(MARGIN)
    for kind, meaning in _KEY.items():
        yield f'<rect class="box {kind}" x="{left:.1f}" y="{top - 14:.1f}" width="14" height="12" rx="{_ROUND[kind] / 4:g}"/>'
        yield f'<text class="key" x="{left + 20:.1f}" y="{top - 4:.1f}">{meaning}</text>'
        left += 20 + CHARACTER * len(meaning) + GAP


def _drawn(box: _Box, graph: networkx.DiGraph) -> str:
    of, top = graph.nodes[box.node], box.y - box.height / 2
    nbytes = f' data-bytes="{of["bytes"]}"' if "bytes" in of else ""
    text = ""
    for number, line in enumerate(box.lines):
        at = f'x="{box.x:.1f}" y="{top + PADDING + 9 + number * LINE:.1f}"'
        text += f"<text {at}>{escape(line)}</text>" if number else f'<text class="name" {at}>{escape(line)}</text>'
    return (
        f'<g data-node="{escape(box.node)}"{nbytes}><title>{escape(_told(of))}</title>'
        f'<rect class="box {box.kind}" x="{box.x - box.width / 2:.1f}" y="{top:.1f}" width="{box.width:.1f}"'
        f' height="{box.height:.1f}" rx="{_ROUND[box.kind]}"/>{text}</g>'
    )


def _told(of: dict[str, object]) -> str:
    """The attributes of a node as one line."""
    return ", ".join(f"{name} {value}" for name, value in of.items() if name not in ("kind", "name", "also_read_by", "only"))


def _described(graph: networkx.DiGraph) -> str:
    """The picture in words: each stage with what it reads, uses and makes."""
    found = []
    for node, of in graph.nodes(data=True):
        if of["kind"] == "stage":
            words = {"reads": list[str](), "uses": list[str]()}
            for tail in graph.predecessors(node):
                words[graph.edges[tail, node]["relation"]].append(graph.nodes[tail]["name"])
            made = [graph.nodes[head]["name"] for head in graph.successors(node)]
            text = [f"{verb} {', '.join(names)}" for verb, names in (*words.items(), ("makes", made)) if names]
            found.append(f"Stage {of['name']} {'; '.join(text)}.")
    return " ".join(found)


def _mean(numbers: Iterable[float], otherwise: float) -> float:
    found = list(numbers)
    return sum(found) / len(found) if found else otherwise
