"""Validate a YAML file with a pydantic model, and report pydantic's errors by entry and line."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from graphrun.graph.document import Document, Location
from graphrun.graph.schema import (
    PATTERNS,
    ComponentSpec,
    GraphSpec,
    InputSpec,
    PartSpec,
    PipelineSpec,
    Spec,
    StageSpec,
)
from graphrun.graph.values import did_you_mean

_Spec = TypeVar("_Spec", bound=Spec)
_EXPECTED = {
    "string_type": "a text",
    "int_type": "an int",
    "int_from_float": "an int",
    "float_type": "a number",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "list_type": "a list",
}
_CLASS: dict[str, Any] = {"class": "diffusers.DiffusionPipeline"}
# stand-ins for entries of a wrong shape, so that references to them are valid
_STAND_INS: dict[str, Any] = {
    "inputs": InputSpec.model_construct(type="any"),
    "components": ComponentSpec.model_construct(**_CLASS, config={}, dtype="bfloat16"),
    "parts": PartSpec.model_construct(**_CLASS, config={}),
    "pipelines": PipelineSpec.model_construct(**_CLASS),
    "stages": StageSpec.model_construct(op="diffusers.module:function"),
}
_ROUNDS = 4  # enough to drop a key, and then its item, which needs the key
# entries on which no other entry depends, with valid values
_ALONE = {
    "name": "graph",
    "pipeline": _CLASS["class"],
    "license": "-",
    "fps": 1.0,
    "code": "-",
    "directives": dict[str, Any](),
    "pipeline_config": dict[str, Any](),
}


def spec_of(model: type[_Spec], document: Document) -> _Spec:
    """Return ``document`` as a ``model``. Raises GraphError with one line per problem: ``file:line:
    entry: what is wrong``."""
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        _note(error, model, document)
        document.raise_if_any()
        raise  # pydantic reported a problem that `_note` did not add: a bug


def graph_spec_of(document: Document) -> GraphSpec:
    """Return ``document`` as a graph file. Entries of a wrong shape are dropped or replaced.

    Their problems are added to ``document``, their locations to `Document.wrong`. Raises
    GraphError, as `spec_of`, if the other entries cannot be checked because a section is wrong.
    """
    data = document.data
    for _ in range(_ROUNDS):
        try:
            spec = GraphSpec.model_validate(data)
        except ValidationError as error:
            if data is document.data:
                _note(error, GraphSpec, document)
                data = copy.deepcopy(data)
            places = [details["loc"] for details in error.errors(include_url=False)]
            locations = [tuple(_existing(place, data)) or place[:1] for place in places]
            left_out = [_leave_out(location, data) for location in locations]
            if () in left_out:
                break
            document.wrong.update(left_out)
        else:
            for section, name in (location for location in document.wrong if len(location) == 2):
                if stand_in := _STAND_INS.get(str(section)):
                    getattr(spec, str(section))[name] = stand_in
            return spec
    return spec_of(GraphSpec, document)


def _leave_out(location: Location, data: Any) -> Location:
    """Remove the entry at ``location``, or its list, from the graph file ``data``. Return the
    removed location, or () if other entries depend on it."""
    if len(location) < 2:
        if not location or location[0] not in _ALONE:
            return ()
        data[location[0]] = _ALONE[str(location[0])]
        return location
    entries = data
    for depth, step in enumerate(location, 1):
        if step not in entries:  # dropped with another error
            return location
        if depth == len(location) or isinstance(entries[step], list):
            break
        entries = entries[step]
    if depth < 2:
        return ()
    del entries[step]
    if location[0] == "outputs":
        entries[step] = "$"
    return location[:depth]


def _note(error: ValidationError, model: type[Spec], document: Document) -> None:
    """Add the problems in ``error`` to ``document``; the branches of a union become one problem."""
    expected: dict[tuple[str | int, ...], list[str]] = {}
    for details in error.errors(include_url=False):
        location = tuple(_existing(details["loc"], document.data))
        if kind := _EXPECTED.get(details["type"]):
            expected.setdefault(location, []).append(kind)
        elif details["type"] == "extra_forbidden":
            keys = _keys(model.model_json_schema(), location[:-1])
            document.add(
                location[:-1],
                f"unknown key {location[-1]!r}{did_you_mean(str(location[-1]), keys)}",
                line_of=location,
            )
        else:
            document.add(location, _sentence(details, str(location[-1]) if location else ""))
    for location, kinds in expected.items():
        names = [
            kind for kind in dict.fromkeys(kinds) if not (kind == "an int" and "a number" in kinds)
        ]
        value: Any = document.data
        for step in location:
            value = value[step]
        document.add(location, f"expected {' or '.join(names)}, got {_shown(value)}")


def _keys(schema: dict[str, Any], location: Iterable[str | int]) -> list[str]:
    """Return the keys of the mapping at ``location`` according to the JSON Schema ``schema``."""

    def resolve(node: dict[str, Any]) -> dict[str, Any]:
        node = next(
            (branch for branch in node.get("anyOf", ()) if branch.get("type") != "null"), node
        )
        return schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node

    node = schema
    for step in location:
        item_schema: Any = (
            node.get("items")
            or node.get("additionalProperties")
            or next(iter(node.get("patternProperties", {}).values()), {})
        )
        node = resolve(node.get("properties", {}).get(step) or item_schema)
    return list(node.get("properties", ()))


def _existing(location: Iterable[Any], data: Any) -> Iterator[Any]:
    """Yield ``location`` without pydantic's steps for union branches and missing keys."""
    for step in location:
        if (isinstance(data, dict) and step in data) or (
            isinstance(data, list) and step in range(len(data))
        ):
            yield step
            data = data[step]


def _sentence(details: ErrorDetails, key: str) -> str:
    context, value = details.get("ctx", {}), details["input"]
    match details["type"]:
        case "missing":
            return f"{details['loc'][-1]!r} is missing"
        case "literal_error" if key == "graphrun":
            return f"this graphrun reads files of version 1, not {value!r}"
        case "literal_error" if key == "compile":
            return (
                f"{value!r} is not known; use blocks, each compiled by itself, since weights "
                "are placed block by block"
            )
        case "literal_error":
            choices = [
                choice.strip("'")
                for choice in context["expected"].replace(" or ", ", ").split(", ")
            ]
            return (
                f"unknown {key if not key.isdigit() else 'value'} "
                f"{value!r}{did_you_mean(str(value), choices)}"
            )
        case "string_pattern_mismatch":
            return f"{value!r} {PATTERNS[context['pattern']]}"
        case "too_short" | "string_too_short":
            return "must not be empty"
        case "invalid_key":
            return f"{value!r} is not a name: write it as text"
        case "greater_than" | "greater_than_equal" | "less_than_equal" as kind:
            size = "large" if kind == "less_than_equal" else "small"
            return f"{value} is too {size}; {details['msg'].lower().removeprefix('input ')}"
    return details["msg"]


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    return (
        repr(value) if isinstance(value, (str, bool, int, float)) else f"a {type(value).__name__}"
    )
