"""What pydantic finds wrong with a graph file's shape, said in the words of the file: places, known keys, what was meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from graphrun.graph.document import Problems
from graphrun.graph.spec import ComponentSpec, DirectivesSpec, GraphSpec, InputSpec, PartSpec, Spec, StageSpec
from graphrun.graph.values import did_you_mean

_SECTIONS: dict[str, type[Spec]] = {
    "inputs": InputSpec,
    "components": ComponentSpec,
    "parts": PartSpec,
    "stages": StageSpec,
    "directives": DirectivesSpec,
}
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


def note_shape(error: ValidationError, data: Any, problems: Problems) -> None:
    """Adds to ``problems`` what ``error`` says about ``data``; the branches of a union become one problem."""
    expected: dict[tuple[str | int, ...], list[str]] = {}
    for details in error.errors(include_url=False):
        location = tuple(_existing(details["loc"], data))
        key, above = (location[-1], location[:-1]) if location else ("", ())
        if details["type"] in _EXPECTED:
            expected.setdefault(location, []).append(_EXPECTED[details["type"]])
        elif details["type"] == "extra_forbidden":
            problems.add(above, f"unknown key {key!r}{did_you_mean(str(key), _known_keys(above))}", line_of=location)
        elif details["type"] == "missing":
            problems.add(location, f"{details['loc'][-1]!r} is missing")
        else:
            problems.add(location, _sentence(details, str(key)))
    for location, kinds in expected.items():
        names = [kind for kind in dict.fromkeys(kinds) if not (kind == "an int" and "a number" in kinds)]
        problems.add(location, f"expected {' or '.join(names)}, got {_shown(_at(location, data))}")


def _existing(location: tuple[str | int, ...], data: Any) -> Iterator[str | int]:
    """``location`` without the steps that pydantic adds for a union's branch or a missing key."""
    for step in location:
        if (isinstance(data, dict) and step in data) or (isinstance(data, list) and step in range(len(data))):
            yield step
            data = _at((step,), data)


def _at(location: tuple[str | int, ...], data: Any) -> Any:
    for step in location:
        data = data[step]
    return data


def _known_keys(location: tuple[str | int, ...]) -> list[str]:
    model = GraphSpec if not location else _SECTIONS[str(location[0])]
    return [field.alias or name for name, field in model.model_fields.items()]


def _sentence(details: ErrorDetails, key: str) -> str:
    context, value = details.get("ctx", {}), details["input"]
    match details["type"]:
        case "literal_error":
            if key == "graphrun":
                return f"this graphrun reads files of version 1, not {value!r}"
            choices = [choice.strip("'") for choice in context["expected"].replace(" or ", ", ").split(", ")]
            return f"unknown {key if not key.isdigit() else 'value'} {value!r}{did_you_mean(str(value), choices)}"
        case "string_pattern_mismatch" if key in ("class", "pipeline"):
            return f"{value!r} is not a class path such as diffusers.AutoencoderKL"
        case "string_pattern_mismatch" if "._-" in context["pattern"]:
            what = "letters, digits, dots, dashes and underscores, at most 64, no dot or dash first"
            return f"{value!r} cannot be a graph's name, which is that of the files of its outputs: {what}"
        case "string_pattern_mismatch" if "A-Z" in context["pattern"]:
            return f"{value!r} is not a name: letters, digits and underscores, at most 64, no digit first"
        case "string_pattern_mismatch":
            return f"{value!r} holds control characters"
        case "too_short" | "string_too_short":
            return "must not be empty"
        case "invalid_key":
            return f"{value!r} is not a name: write it as text"
        case "greater_than" | "greater_than_equal":
            return f"{value} is too small; {details['msg'].lower().removeprefix('input ')}"
    return details["msg"]


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    return repr(value) if isinstance(value, (str, bool, int, float)) else f"a {type(value).__name__}"
