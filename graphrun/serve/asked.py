"""Turn the body of a request into inputs of a graph, and check all bounds before planning.

{"prompt": ..., "size": "1024x768", "n": 2, "seed": 7, "steps": 20}
-> two runs: height, width, seeds 7 and 8, steps
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from graphrun.errors import InputError
from graphrun.graph.graph import Graph
from graphrun.graph.ops import MEDIA_KINDS
from graphrun.graph.parts import Reference
from graphrun.graph.settings import seeds_of, settings_of
from graphrun.graph.values import did_you_mean
from graphrun.report.verdicts import COUNTS
from graphrun.serve.errors import Refused
from graphrun.serve.settings import Bounds

# fields of the OpenAI API that are ignored, unless the graph has an input of that name
IGNORED = frozenset(
    [
        "background",
        "input_fidelity",
        "moderation",
        "output_compression",
        "quality",
        "safety_identifier",
        "style",
        "user",
    ]
)
OWN = frozenset(
    [
        "model",
        "n",
        "size",
        "response_format",
        "output_format",
        "seed",
        "stream",
        "partial_images",
    ]
)
# other names of inputs, where the graph has the second and not the first
ALIASES = {
    "num_inference_steps": "steps",
    "cfg_scale": "guidance_scale",
    "guidance": "guidance_scale",
    "num_frames": "frames",
}
VIDEO = ".mp4"
FRAMES = ("frames", "num_frames")  # names of the input with the length of a video
MOST_PARTIAL = 3  # pictures before the end, as in the OpenAI API
FORMATS = ("png", "jpeg", "webp")
SEEDS = 2**31  # upper bound of random seeds

RequestShape = tuple[str, tuple[tuple[str, str], ...]]
"""Name of a graph, and the inputs that sizes and times depend on (`graphrun.graph.settings`)."""


@dataclass(frozen=True, slots=True)
class PictureRequest:
    """A request. ``runs``: the complete inputs of each output. ``suffix``: of its file; `VIDEO` for
    videos. ``as_url``: answer with URLs."""

    graph: str
    shape: RequestShape
    runs: tuple[Mapping[str, Any], ...]
    suffix: str
    as_url: bool
    streams: bool = False
    partial_images: int = 0


def picture_inputs(graph: Graph) -> list[str]:
    """Return the names of the picture inputs, the required ones first."""
    pictures = [spec for spec in graph.inputs.values() if spec.type == "image"]
    return [spec.name for spec in sorted(pictures, key=lambda spec: not spec.required)]


def frames_input(graph: Graph) -> str:
    """Return the name of the input with the number of frames, "" without one."""
    return next((name for name in FRAMES if name in graph.inputs), "")


def makes_videos(graph: Graph) -> bool:
    """Whether the outputs of ``graph`` are videos."""
    return bool(graph.fps or frames_input(graph) or "video" in graph.kinds().values())


def seconds_as_frames(body: Mapping[str, Any], graph: Graph) -> dict[str, Any]:
    """Return ``body`` with frames in place of ``seconds``.

    Models take one frame more than a multiple of 4 or 8, as the default of the graph shows; the
    number is rounded to the next such one. Raises Refused (422).
    """
    fields, name = dict(body), frames_input(graph)
    if (seconds := fields.pop("seconds", None)) is None:
        return fields
    if not name or graph.fps is None:
        raise _bad("seconds", f"{graph.name} has one length or no known rate: leave it out")
    if name in fields:
        raise _bad("seconds", f"{name} says how long the video is already")
    try:
        count = float(seconds) * graph.fps
    except (TypeError, ValueError):
        raise _bad("seconds", "it is a number") from None
    if not 0 < count < SEEDS:
        raise _bad("seconds", "it is above 0")
    default = graph.inputs[name].default
    step = next((step for step in (8, 4) if isinstance(default, int) and default % step == 1), 1)
    return {**fields, name: max(0, round((count - 1) / step)) * step + 1}


def graph_of(body: Mapping[str, Any], graphs: Mapping[str, Graph], *, video: bool = False) -> Graph:
    """Return the graph named by ``model``, by default the first one that makes pictures, or a
    ``video``. Raises Refused (404)."""
    name = body.get("model")
    if name is None:
        alike = (graph for graph in graphs.values() if makes_videos(graph) == video)
        return next(alike, next(iter(graphs.values())))
    if not isinstance(name, str) or name not in graphs:
        label = str(name)[:100]
        raise Refused(
            404,
            f"there is no model {label!r}; models are {', '.join(graphs)}",
            "model_not_found",
            param="model",
        )
    return graphs[name]


def asked_of(
    body: Mapping[str, Any],
    graph: Graph,
    bounds: Bounds,
    files: Mapping[str, Any],
    *,
    video: bool = False,
) -> PictureRequest:
    """Return the request in ``body`` to ``graph``. ``files``: values of picture inputs. ``video``:
    for a video. Raises Refused (422; 404 for a graph that makes something else)."""
    if makes_videos(graph) != video:
        address = "/v1/images/generations" if video else "/v1/videos"
        text = f"{graph.name} makes {'pictures' if video else 'videos'}: send it to {address}"
        raise Refused(404, text, "model_not_found", param="model")
    if video:
        body = seconds_as_frames(body, graph)
    entries = _without_aliases(
        {name: value for name, value in body.items() if value is not None}, graph
    )
    fields = {
        name: value for name, value in entries.items() if name in graph.inputs and name not in OWN
    }
    unknown = [name for name in entries if name not in {*fields, *OWN, *IGNORED}]
    if unknown:
        input_names = [name for name in graph.inputs if name not in files]
        message = (
            f"{graph.name} has no input {unknown[0][:100]!r}{did_you_mean(unknown[0], input_names)}"
        )
        raise Refused(422, message, "unknown_parameter", param=unknown[0][:100])
    for name, value in fields.items():
        if graph.inputs[name].type in MEDIA_KINDS:
            raise _bad(name, "it is a file: send it to /v1/images/edits as a part of a form")
        _refuse_long(name, value, bounds)
    seeds, count = seeds_of(graph), _count(entries.get("n", 1), bounds)
    first = entries.get("seed", next((entries[name] for name in seeds if name in entries), None))
    seed = secrets.randbelow(SEEDS) if first is None else _whole("seed", first)
    fields |= _size(entries.get("size", "auto"), graph)
    runs = [{**fields, **files, **dict.fromkeys(seeds, seed + number)} for number in range(count)]
    try:
        resolved = [graph.resolve(values) for values in runs]
    except InputError as error:
        raise Refused(422, str(error), "invalid_value") from None
    for name, amount, limit in _amounts(graph, resolved[0], bounds):
        if amount > limit:
            raise _bad(name, f"{amount:,} {name}, and this server accepts {limit:,}", "over_limit")
    output, answer = entries.get("output_format", "png"), entries.get("response_format", "b64_json")
    if output not in FORMATS:
        raise _bad("output_format", f"it is one of {', '.join(FORMATS)}")
    if answer not in ("b64_json", "url"):
        raise _bad("response_format", "it is b64_json or url")
    streams = _is_true("stream", entries.get("stream", False))
    partial_images = _whole("partial_images", entries.get("partial_images", 0))
    if not 0 <= partial_images <= MOST_PARTIAL * streams:
        raise _bad("partial_images", f"it is 0 to {MOST_PARTIAL}, and needs stream=true")
    return PictureRequest(
        graph.name,
        (graph.name, settings_of(graph, resolved[0])),
        tuple(resolved),
        VIDEO if video else f".{output}",
        answer == "url",
        streams,
        partial_images,
    )


def _without_aliases(entries: Mapping[str, Any], graph: Graph) -> dict[str, Any]:
    """Return ``entries`` by the names of the graph's inputs. Raises Refused for a name twice."""
    renamed: dict[str, Any] = {}
    for name, value in entries.items():
        target = ALIASES.get(name, name)
        input_name = target if target in graph.inputs and name not in graph.inputs else name
        if input_name in renamed:
            raise _bad(name, f"it is another name of {input_name}, which has a value already")
        renamed[input_name] = value
    return renamed


def _bad(param: str, fault: str, code: str = "invalid_value") -> Refused:
    return Refused(422, f"{param}: {fault}", code, param=param)


def _refuse_long(name: str, value: Any, bounds: Bounds) -> None:
    texts = value if isinstance(value, list) else [value]
    if len(texts) > bounds.pictures:
        raise _bad(
            name,
            f"a list of {len(texts):,}, and this server accepts {bounds.pictures}",
            "over_limit",
        )
    for text in texts:
        if isinstance(text, str) and len(text) > bounds.characters:
            raise _bad(
                name,
                f"{len(text):,} characters, and this server accepts {bounds.characters:,}",
                "over_limit",
            )


def _whole(name: str, value: Any) -> int:
    """Return ``value`` as an integer. Form fields are texts."""
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,19}", value):
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**62:
        raise _bad(name, "it is an integer")
    return value


def _is_true(name: str, value: Any) -> bool:
    """Return ``value`` as a truth value. Form fields are texts."""
    values = {"true": True, "false": False}
    if value not in (True, False) and value not in values:
        raise _bad(name, "it is true or false")
    return bool(values.get(value, value))


def _count(value: Any, bounds: Bounds) -> int:
    count = _whole("n", value)
    if not 1 <= count <= bounds.pictures:
        raise _bad(
            "n",
            f"{count}, and this server makes 1 to {bounds.pictures} pictures at once",
            "over_limit",
        )
    return count


def _size(value: Any, graph: Graph) -> dict[str, int]:
    if value == "auto":
        return {}
    if not isinstance(value, str) or not (match := re.fullmatch(r"(\d{1,6})x(\d{1,6})", value)):
        raise _bad("size", "it is auto, or width and height in pixels such as 1024x768")
    if not {"height", "width"} <= graph.inputs.keys():
        raise _bad("size", f"{graph.name} makes pictures of one size: leave it out")
    return {"width": int(match[1]), "height": int(match[2])}


def _amounts(
    graph: Graph, values: Mapping[str, Any], bounds: Bounds
) -> Iterator[tuple[str, int, int]]:
    """Yield (name, amount, limit) for steps, pixels and pictures, from the stages' arguments."""
    for stage in graph.stages:
        arguments = {name: _value(argument, values) for name, argument in stage.arguments.items()}
        for name, value in arguments.items():
            if name.endswith("steps") and isinstance(value, int):
                yield "steps", value, bounds.steps
        count = _product(arguments.get(name) for name in COUNTS)
        yield "pictures", count, bounds.pictures
        yield "pixels", _product(arguments.get(name) for name in ("height", "width")), bounds.pixels


def _value(argument: Any, values: Mapping[str, Any]) -> Any:
    return (
        values[argument.name]
        if isinstance(argument, Reference) and argument.kind == "input"
        else argument
    )


def _product(values: Iterable[Any]) -> int:
    return math.prod(value for value in values if isinstance(value, int))
