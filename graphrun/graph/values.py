"""Inputs of a graph, checks and conversions of their values, and hints at what was meant."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from graphrun.graph import media
from graphrun.limits import require
from graphrun.reading import refuse_surrogates

InputType = Literal["str", "int", "float", "bool", "image", "mask", "video", "audio", "tensor"]
_WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
FLOAT32_MAX = (2 - 2**-23) * 2.0**127  # pipelines put numbers into tensors of float32 or less


@dataclass(frozen=True, slots=True)
class Input:
    """An input of a graph. Its value is None if it is omitted and has no default.

    ``minimum`` and ``maximum`` are inclusive. ``accepts_list``: a list of such values is accepted
    too. ``sizes``: the size of an image, mask, video, audio or tensor for plans without the file:
    numbers, names of inputs that contain them, or a ``shape``.
    """

    name: str
    type: InputType
    default: Any = None
    required: bool = False
    multiple_of: int | None = None
    minimum: float | None = None
    maximum: float | None = None
    accepts_list: bool = False
    sizes: Mapping[str, float | str | tuple[int, ...]] = field(default_factory=dict)

    @property
    def item(self) -> Input:
        """The input for one item of a list of such values, or for one frame of a video."""
        if self.type != "video":
            return replace(self, accepts_list=False)
        return replace(
            self,
            type="image",
            sizes={name: size for name, size in self.sizes.items() if name != "frames"},
        )

    def items(self, value: Any) -> list[Any]:
        """Return the items of a list, the frames of a video, or ``value`` as the only item."""
        value = media.opened(value) if self.type == "video" else value
        return list(value) if self.type == "video" or isinstance(value, list) else [value]


def strings(value: str | Iterable[str]) -> tuple[str, ...]:
    """Return the strings in ``value``; a string counts as one item."""
    return (value,) if isinstance(value, str) else tuple(value)


def listed_names(texts: str | Iterable[str]) -> list[str]:
    """Return the names in ``texts``, each of which may be several names with commas between."""
    return [name.strip() for text in strings(texts) for name in text.split(",")]


def as_path(value: str | Path | None) -> Path | None:
    """Return the path that ``value`` is or names."""
    return None if value is None else Path(value)


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return a hint at the name that was probably meant, to append to a message.

    ``"; did you mean 'height'?"`` if one of ``candidates`` is similar to ``name``; else ``"; known
    are 'a', 'b'"`` for at most 12 candidates; else "".
    """
    names = sorted(candidates)
    if close := difflib.get_close_matches(name, names, n=1):
        return f"; did you mean {close[0]!r}?"
    if not names:
        return "; there are none"
    return f"; known are {', '.join(map(repr, names))}" if len(names) <= 12 else ""


def outside(package: str, packages: Iterable[str]) -> str:
    """Return the message for a class of a ``package`` outside the trusted ``packages``."""
    return f"outside the trusted packages ({', '.join(packages)}); {to_trust(package)}"


def to_trust(package: str) -> str:
    """Return the text that tells a caller how to trust ``package``; a file cannot do this
    itself."""
    return (
        f"if you trust {package}, plan and run the graph with --trust-package {package} (in "
        f"Python trust=[{package!r}])"
    )


def of_type(kind: str, value: Any) -> Any:
    """Return ``value`` as ``kind`` (str, int, float or bool); an int is accepted as a float. Raises
    ValueError for anything else."""
    if kind == "str" and isinstance(value, str):
        refuse_surrogates(value)
        require("characters", len(value), f"a text of {len(value):,} characters")
        return value
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "int" and isinstance(value, int) and not isinstance(value, bool):
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"{value} does not fit 64 bits")
        return value
    if kind == "float" and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not abs(value) <= sys.float_info.max:  # nan fails too
            raise ValueError(f"{value!r} is not a finite number")
        if abs(value) > FLOAT32_MAX:
            raise ValueError(f"{value!r} is more than a float32 can be, {FLOAT32_MAX:.4g}")
        return float(value)
    raise ValueError(f"{value!r} is not {'an' if kind == 'int' else 'a'} {kind}")


def fit(definition: Input, value: Any, *, text: bool = False) -> Any:
    """Return ``value`` converted to the input's type and checked against its bounds.

    ``text``: strings are parsed. The path of an image, mask, video, audio or tensor becomes a
    `media.File`. An input with ``accepts_list`` accepts a list too. Raises ValueError saying which
    values are accepted.
    """
    if definition.accepts_list:
        value = media.parse_list(value) if text and isinstance(value, str) else value
        if isinstance(value, (list, tuple)):
            if not value:
                raise ValueError("an empty list")
            return [_one(definition, item, text) for item in value]
    return _one(definition, value, text)


def _one(definition: Input, value: Any, text: bool) -> Any:
    if definition.type in media.AN:
        rate = definition.sizes.get("rate")
        return media.accept(definition.type, value, rate if isinstance(rate, int) else None)
    if text and isinstance(value, str) and definition.type != "str":
        value = _read(definition.type, value)
    value = of_type(definition.type, value)
    step, low, high = definition.multiple_of, definition.minimum, definition.maximum
    if step is not None and value % step:
        multiple = value - value % step
        choices = [
            str(n)
            for n in (multiple, multiple + step)
            if (low is None or n >= low) and (high is None or n <= high)
        ]
        raise ValueError(f"{value} is not a multiple of {step}; use {' or '.join(choices) or step}")
    if low is not None and value < low:
        raise ValueError(f"{value} is less than the minimum, {low:g}")
    if high is not None and value > high:
        raise ValueError(f"{value} is more than the maximum, {high:g}")
    return value


def _read(kind: str, text: str) -> Any:
    try:
        return (
            _WORDS[text.strip().lower()]
            if kind == "bool"
            else {"int": int, "float": float}[kind](text)
        )
    except (KeyError, ValueError):
        raise ValueError(f"{text!r} is not {'an' if kind == 'int' else 'a'} {kind}") from None
