"""The bodies of requests: a pydantic model for each graph, and the runs that a body asks for.

{"prompt": ..., "size": "1024x768", "n": 2, "seed": 7, "steps": 20}
-> two runs: height, width, seeds 7 and 8, steps
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from graphrun.errors import InputError
from graphrun.graph.graph import Graph
from graphrun.graph.loras import LoraFile, LoraUse
from graphrun.graph.ops import MEDIA_KINDS
from graphrun.graph.parts import Reference
from graphrun.graph.settings import seeds_of, settings_of
from graphrun.graph.values import Input, did_you_mean, fit
from graphrun.reading import parse_json, shortened
from graphrun.report.verdicts import COUNTS
from graphrun.serve.errors import Refused
from graphrun.serve.settings import Bounds

# fields of the OpenAI API without a meaning here, unless the graph has an input of that name
IGNORED = (
    "background",
    "input_fidelity",
    "moderation",
    "output_compression",
    "quality",
    "safety_identifier",
    "style",
    "user",
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
LORAS = "loras"  # the field with the LoRAs of a request
MOST_LORAS = 4  # of a request
MOST_SCALE = 4  # of a LoRA, in either direction
MOST_PARTIAL = 3  # pictures before the end, as in the OpenAI API
SEEDS = 2**31  # upper bound of random seeds
DRAWN = "Without it one is drawn; the answer has it."
INPUT = "value_"  # prefix of fields for inputs, whose names pydantic may not take
JSON_TYPES: Mapping[str, Any] = {"str": str, "int": int, "float": float, "bool": bool}
SIZE = "{input} is no size; use auto, or width and height in pixels such as 1024x768"
# what is wrong, by pydantic's type of error
FAULTS = {
    "bool_type": "{input} is neither true nor false",
    "float_parsing": "{input} is not a number",
    "float_type": "{input} is not a number",
    "greater_than": "{input} is not above {gt:g}",
    "greater_than_equal": "{input} is less than {ge}",
    "int_parsing": "{input} is not an integer",
    "int_type": "{input} is not an integer",
    "less_than": "{input} is not below {lt:g}",
    "less_than_equal": "{input} is more than {le}",
    "literal_error": "{input} is not {expected}",
    "missing": "it is missing",
    "string_pattern_mismatch": SIZE,
    "string_type": "{input} is not a text",
    "value_error": "{error}",
}
OVER_LIMIT = "over_limit"


class RequestShape(NamedTuple):
    """What the plan of a request depends on, and the weights that it uses. ``graph``: its name;
    ``edition``: as of a `graphrun.serve.catalog.GraphVariant`. ``settings``: the inputs that sizes
    and times depend on (`graphrun.graph.settings`)."""

    graph: str
    settings: tuple[tuple[str, str], ...]
    edition: int = 0
    loras: tuple[LoraUse, ...] = ()


@dataclass(frozen=True, slots=True)
class PictureRequest:
    """A request. ``definition``: the graph, without the LoRAs of ``shape``; None for a stored
    request that has ended. ``runs``: the complete inputs of each output. ``suffix``: of its file;
    `VIDEO` for videos. ``as_url``: answer with URLs. ``webhook``: the address to call when the
    request has ended."""

    graph: str
    shape: RequestShape
    runs: tuple[Mapping[str, Any], ...]
    suffix: str
    as_url: bool
    streams: bool = False
    partial_images: int = 0
    webhook: str = ""
    definition: Graph | None = field(kw_only=True, compare=False)


def shape_of(
    graph: Graph, inputs: Mapping[str, Any], edition: int = 0, loras: tuple[LoraUse, ...] = ()
) -> RequestShape:
    """Return the shape of requests to ``graph`` with ``inputs``."""
    return RequestShape(graph.name, settings_of(graph, inputs), edition, loras)


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


def _literal(value: Any) -> Any:
    """Return the JSON value of a text: all fields of forms are texts."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return parse_json(value)
    return value


Whole = Annotated[int, Field(strict=True), BeforeValidator(_literal)]
Truth = Annotated[bool, Field(strict=True), BeforeValidator(_literal)]


class Body(BaseModel):
    """The body of a request for pictures. `body_model` adds the inputs of a graph."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    graph: ClassVar[Graph]
    bounds: ClassVar[Bounds]
    edition: ClassVar[int]
    available_loras: ClassVar[Mapping[str, LoraFile]]

    model: str = ""
    n: Whole = 1
    size: str = Field(
        "auto", pattern=r"^(auto|\d{1,6}x\d{1,6})$", description="Width x height in pixels."
    )
    response_format: Literal["b64_json", "url"] = "b64_json"
    output_format: Literal["png", "jpeg", "webp"] = "png"
    stream: Truth = Field(False, description="Answer with server-sent events, as OpenAI does.")
    partial_images: Whole = Field(
        0, ge=0, le=MOST_PARTIAL, description="With stream: most previews before the end."
    )

    webhook: str = Field(
        "", description="For jobs and videos: an address to POST to when they have ended."
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if value is not None}

    @field_validator("partial_images")
    @classmethod
    def _streams(cls, count: int, info: ValidationInfo) -> int:
        if count and not info.data.get("stream"):
            raise ValueError(f"{count} previews need stream=true")
        return count

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> PictureRequest:
        """Return the request with ``fields``; files are paths. Raises Refused (422)."""
        try:
            return cls.model_validate(fields).request()
        except ValidationError as error:
            raise cls._refusal(error.errors(include_url=False)[0]) from None

    @classmethod
    def _refusal(cls, details: ErrorDetails) -> Refused:
        kind, name, graph = details["type"], str(details["loc"][-1]), cls.graph
        if kind == "missing" and graph.inputs[name].type in MEDIA_KINDS:
            text = f"{graph.name} takes a picture: {_address_of_files(graph)}"
            return Refused(422, text, "picture_needed", param=name)
        if kind != "extra_forbidden":
            return refusal_of(details)
        if (target := ALIASES.get(name)) in graph.inputs:
            return bad(
                name, f"this is another name of {target}, which has a value too: leave one out"
            )
        name = name[:100]
        names = [spec.name for spec in graph.inputs.values() if spec.type not in MEDIA_KINDS]
        text = (
            f"takes no file {name!r}"
            if isinstance(details["input"], Path)
            else f"has no input {name!r}{did_you_mean(name, names)}"
        )
        return Refused(422, f"{graph.name} {text}", "unknown_parameter", param=name)

    def request(self) -> PictureRequest:
        """Return the request. Raises Refused (422)."""
        graph, seeds = self.graph, seeds_of(self.graph)
        inputs = {
            name.removeprefix(INPUT): value
            for name, value in self
            if name.startswith(INPUT) and name in self.model_fields_set
        }
        inputs |= self.derived_inputs(inputs)
        first = next((inputs[name] for name in ("seed", *seeds) if name in inputs), None)
        if "seed" not in graph.inputs:
            inputs.pop("seed", None)
        seed = secrets.randbelow(SEEDS) if first is None else first
        runs = [{**inputs, **dict.fromkeys(seeds, seed + number)} for number in range(self.n)]
        try:
            resolved = [graph.resolve(values) for values in runs]
        except InputError as error:
            raise Refused(422, str(error), "invalid_value") from None
        for name, amount, limit in _amounts(graph, resolved[0], self.bounds):
            if amount > limit:
                text = f"{amount:,} {name}, and this server accepts {limit:,}"
                raise bad(name, text, OVER_LIMIT)
        return PictureRequest(
            graph.name,
            shape_of(graph, resolved[0], self.edition, tuple(getattr(self, LORAS, ()))),
            tuple(resolved),
            VIDEO if makes_videos(graph) else f".{self.output_format}",
            self.response_format == "url",
            self.stream,
            self.partial_images,
            self.webhook,
            definition=graph,
        )

    def derived_inputs(self, inputs: Mapping[str, Any]) -> dict[str, int]:
        """Return the inputs that ``size`` stands for. Raises Refused (422)."""
        if self.size == "auto":
            return {}
        if not {"height", "width"} <= self.graph.inputs.keys():
            raise bad("size", f"{self.graph.name} makes pictures of one size: leave it out")
        width, height = map(int, self.size.split("x"))
        return {"width": width, "height": height}


class VideoBody(Body):
    """The body of a request for a video."""

    seconds: float | None = Field(
        None, gt=0, lt=SEEDS, description="Rounded to the next length that the model can make."
    )

    def derived_inputs(self, inputs: Mapping[str, Any]) -> dict[str, int]:
        """Return also the frames that ``seconds`` stands for.

        Models take one frame more than a multiple of 4 or 8, as the default of the graph shows.
        """
        graph, name, sizes = self.graph, frames_input(self.graph), super().derived_inputs(inputs)
        if self.seconds is None:
            return sizes
        if not name or graph.fps is None:
            raise bad("seconds", f"{graph.name} has one length or no known rate: leave it out")
        if name in inputs:
            raise bad("seconds", f"{name} has the length too: leave one out")
        default = graph.inputs[name].default
        step = next(
            (step for step in (8, 4) if isinstance(default, int) and default % step == 1), 1
        )
        count = round((self.seconds * graph.fps - 1) / step)
        return {**sizes, name: max(0, count) * step + 1}


def body_model(
    graph: Graph, bounds: Bounds, loras: Mapping[str, LoraFile] | None = None, edition: int = 0
) -> type[Body]:
    """Return the model of bodies for ``graph`` on a server with ``bounds``. ``loras``: by name,
    those for other models too."""
    base, pictures = VideoBody if makes_videos(graph) else Body, picture_inputs(graph)
    masks = [spec.name for spec in graph.inputs.values() if spec.type == "mask"]
    first_files = {"image": pictures, "mask": masks}
    if base is VideoBody:
        first_files["input_reference"] = pictures
    aliases = ALIASES | {alias: names[0] for alias, names in first_files.items() if names}
    fields: dict[str, Any] = {
        name: (Any, Field(None, description="Ignored."))
        for name in IGNORED
        if name not in graph.inputs
    }
    text = "The graph. Without it the first one that makes the output."
    fields["model"] = str, Field(graph.name, description=text)
    text = "Pictures; each has the seed of the one before plus 1."
    max_pictures = (
        1 if base is VideoBody else bounds.pictures
    )  # /v1/videos has one file for each id
    fields["n"] = Whole, Field(1, ge=1, le=max_pictures, description=text)
    fields[f"{INPUT}seed"] = Whole | None, Field(None, alias="seed", description=DRAWN)
    for name, spec in graph.inputs.items():
        names = [alias for alias, target in aliases.items() if target == name]
        names = [name, *(alias for alias in names if alias not in graph.inputs)]
        if name not in base.model_fields:
            fields[INPUT + name] = _input_field(graph, spec, bounds, names)
    available = {name: file for name, file in (loras or {}).items() if file.components_in(graph)}
    if loras and LORAS not in graph.inputs:
        fields[LORAS] = _loras_field(graph, available)
    model: type[Body] = create_model(graph.name, __base__=base, **fields)
    model.graph, model.bounds, model.edition = graph, bounds, edition
    model.available_loras = available
    return model


def _loras_field(graph: Graph, available: Mapping[str, LoraFile]) -> Any:
    """Return the type and the options of the field with the LoRAs of a request."""
    validator = PlainValidator(
        partial(lora_uses, graph, available),
        json_schema_input_type=list[
            Annotated[str, Field(json_schema_extra={"enum": [*available]})] | LoraItem
        ],
    )
    text = "LoRAs by name, each with its scale (1)."
    return Annotated[Any, validator], Field((), description=text)


class LoraItem(BaseModel):
    """A LoRA of a request, and the factor of its weight difference."""

    model_config = ConfigDict(extra="forbid")
    name: str
    scale: float = Field(1.0, ge=-MOST_SCALE, le=MOST_SCALE)


def lora_uses(graph: Graph, available: Mapping[str, LoraFile], value: Any) -> tuple[LoraUse, ...]:
    """Return the LoRAs that the field ``value`` of a request names: a name, or a list of names and
    of objects with ``name`` and ``scale``. Raises ValueError."""
    is_json = isinstance(value, str) and value.lstrip().startswith(("[", "{"))
    items = _literal(value) if is_json else value
    items = items if isinstance(items, list) else [items]
    if len(items) > MOST_LORAS:
        raise ValueError(f"{len(items)} LoRAs, and a request may have {MOST_LORAS}")
    uses = []
    for item in items:
        try:
            lora = LoraItem.model_validate({"name": item} if isinstance(item, str) else item)
        except ValidationError:
            text = "a file" if isinstance(item, Path) else shortened(repr(item), 100)
            limit = f"scale from -{MOST_SCALE} to {MOST_SCALE}"
            raise ValueError(
                f'{text} is neither a name nor {{"name": ..., "scale": ...}} with a {limit}'
            ) from None
        if (file := available.get(lora.name)) is None:
            names = ", ".join(available) or "none"
            raise PydanticCustomError(
                "lora_not_found",
                "{text}",
                {"text": f"{graph.name} has no LoRA {lora.name[:100]!r}; it has {names}"},
            )
        place = str(file.path), file.stamp, file.components_in(graph)
        uses.append(LoraUse(lora.name, lora.scale, *place))
    if len({use.name for use in uses}) < len(uses):
        raise ValueError("a LoRA is named twice")
    return tuple(uses)


def _input_field(graph: Graph, spec: Input, bounds: Bounds, names: Sequence[str]) -> Any:
    """Return the type and the options of the field for ``spec``, which clients call ``names``."""
    kind: Any = JSON_TYPES.get(spec.type, bytes)
    is_seed = spec.name in seeds_of(graph)
    limits = {"minimum": spec.minimum, "maximum": spec.maximum, "multipleOf": spec.multiple_of}
    validator = PlainValidator(
        partial(_input_value, graph, spec, bounds),
        json_schema_input_type=kind | list[kind] if spec.accepts_list else kind,
    )
    options = Field(
        None if is_seed else ... if spec.required else spec.default,
        validation_alias=AliasChoices(*names),
        description=DRAWN if is_seed else None,
        json_schema_extra={name: limit for name, limit in limits.items() if limit is not None},
    )
    return Annotated[Any, validator], options


def body_schema(models: Sequence[type[Body]], *content_types: str) -> dict[str, Any]:
    """Return the OpenAPI entries of a route whose body is of one of ``models``."""
    schema = {"anyOf": [model.model_json_schema() for model in models or [Body]]}
    content = {content_type: {"schema": schema} for content_type in content_types}
    return {"requestBody": {"required": True, "content": content}}


def refusal_of(details: ErrorDetails) -> Refused:
    """Return the refusal for an error that pydantic found."""
    kind, values = details["type"], {**details, **details.get("ctx", {})}
    value = details["input"]
    values["input"] = "a file" if isinstance(value, Path) else shortened(repr(value), 100)
    is_limit = kind in (OVER_LIMIT, "greater_than_equal", "less_than_equal")
    text = FAULTS.get(kind, "{msg}").format_map(values)
    return bad(str(details["loc"][-1]), text, OVER_LIMIT if is_limit else "invalid_value")


def bad(param: str, fault: str, code: str = "invalid_value") -> Refused:
    """Return the refusal of the field ``param``."""
    return Refused(422, f"{param}: {fault}", code, param=param)


def _address_of_files(graph: Graph) -> str:
    return (
        "send it to /v1/videos, as input_reference in a form"
        if makes_videos(graph)
        else "send it to /v1/images/edits or /v1/jobs, as image in a form"
    )


def _input_value(graph: Graph, spec: Input, bounds: Bounds, value: Any) -> Any:
    """Return ``value`` as the input ``spec``; files are paths. Raises ValueError."""
    is_file = isinstance(value, Path)
    if spec.type not in MEDIA_KINDS:
        _refuse_long(value, bounds)
    elif not is_file or spec.type not in ("image", "mask"):
        raise ValueError(f"it is one file: {_address_of_files(graph)}")
    try:
        return fit(spec, value, text=True)
    except (InputError, ValueError) as error:  # the path is the server's
        text = str(error).replace(str(value), "the file") if is_file else str(error)
        raise ValueError(text) from None


def _refuse_long(value: Any, bounds: Bounds) -> None:
    texts = value if isinstance(value, list) else [value]
    longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
    for text, amount, limit in (
        (f"a list of {len(texts):,}", len(texts), bounds.pictures),
        (f"{longest:,} characters", longest, bounds.characters),
    ):
        if amount > limit:
            raise PydanticCustomError(OVER_LIMIT, f"{text}, and this server accepts {limit:,}")


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
