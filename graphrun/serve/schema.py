"""The OpenAPI schema of the bodies, which the handlers read themselves. Further fields are inputs
of the graph."""

from __future__ import annotations

from typing import Any

_FIELDS: dict[str, Any] = {
    "model": {"type": "string", "description": "The name of a graph; without it the first one."},
    "prompt": {"type": "string"},
    "n": {
        "type": "integer",
        "default": 1,
        "minimum": 1,
        "description": "Pictures; each has the seed of the one before plus 1.",
    },
    "size": {
        "type": "string",
        "default": "auto",
        "pattern": r"^(auto|\d+x\d+)$",
        "description": "Width x height in pixels.",
    },
    "seed": {"type": "integer", "description": "Without it one is drawn; the answer has it."},
    "response_format": {"type": "string", "enum": ["b64_json", "url"], "default": "b64_json"},
    "stream": {
        "type": "boolean",
        "default": False,
        "description": "Answer with server-sent events, as OpenAI's API does.",
    },
    "partial_images": {
        "type": "integer",
        "default": 0,
        "minimum": 0,
        "maximum": 3,
        "description": "With stream: previews before the end, at most so many.",
    },
    "output_format": {"type": "string", "enum": ["png", "jpeg", "webp"], "default": "png"},
}
_FILES: dict[str, Any] = {
    "image": {"type": "string", "format": "binary"},
    "mask": {"type": "string", "format": "binary"},
}


def _body(content: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": True,
    }
    return {"requestBody": {"required": True, "content": {content: {"schema": schema}}}}


GENERATION = _body("application/json", _FIELDS, ["prompt"])
EDIT = _body("multipart/form-data", {**_FIELDS, **_FILES}, ["image"])
