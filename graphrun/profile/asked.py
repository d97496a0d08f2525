"""The precisions and the number of pictures that a command line asks of a graph, as another graph
and as an input's value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from graphrun.errors import InputError
from graphrun.graph.graph import Graph, Reference
from graphrun.graph.values import did_you_mean, strings
from graphrun.modules.precisions import QUANTIZED

DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    **{name: name for name in ("bfloat16", "float16", "float32")},
}
# Weight-only formats of other libraries, which `graphrun.survey` estimates and graphrun does not
# run: bytes per output feature, for scales, beside one byte per weight. torchao's int8_weight_only
# (16-bit scale, 64-bit zero point), float8_weight_only and float8_dynamic_activation (fp32 scale),
# quanto's qint8 and qfloat8 (16-bit scale).
FORMATS = {"int8wo": 10, "fp8wo": 4, "fp8dq": 4, "quanto": 2}

# Arguments with the number of pictures, by op.
COUNTS = {"encode_prompt": "num_images", "call": "num_images_per_prompt"}


def in_precision(graph: Graph, texts: Iterable[str]) -> tuple[Graph, dict[str, str]]:
    """``graph`` with its components in the precisions that ``texts`` ask for, ``PRECISION`` or
    ``COMPONENT=PRECISION`` each, and the formats of other libraries (`FORMATS`) by component, which
    graphrun does not run.

    Without a component, a 16-bit dtype is that of all components that the graph holds in 16 bits,
    fp32 that of all, and a quantized precision or a format that of all for which the graph lists a
    quantized precision. Raises InputError for anything else.
    """
    components, formats = dict(graph.components), dict[str, str]()
    for text in strings(texts):
        named, _, asked = text.rpartition("=")
        precision = DTYPES.get(asked, asked)
        known = [*DTYPES, *QUANTIZED, *FORMATS]
        if asked not in known:
            raise InputError(
                f"precision {asked!r} is not known{did_you_mean(asked, known)}: it is one of {', '.join(known)}"
            )
        if named and named not in components:
            raise InputError(
                f"precision {text}: no such component{did_you_mean(named, components)}"
            )
        for name in (
            [named] if named else [name for name in components if _meant(graph, name, precision)]
        ):
            if precision in FORMATS:
                formats[name] = precision
            elif precision in QUANTIZED:
                components[name] = replace(components[name], precision=(precision,))
            else:
                components[name] = replace(
                    components[name], dtype=precision, precision=(precision,)
                )
    return replace(graph, components=components), formats


def _meant(graph: Graph, name: str, precision: str) -> bool:
    """Whether a precision without a component means the component ``name``."""
    component = graph.components[name]
    if precision in QUANTIZED or precision in FORMATS:
        return any(listed in QUANTIZED for listed in component.precision)
    return precision == "float32" or component.dtype != "float32"


def pictures_input(graph: Graph) -> str:
    """The name of the input with the number of pictures. Raises InputError where the graph has
    none."""
    for stage in graph.stages:
        value = stage.arguments.get(COUNTS.get(stage.op, ""))
        if isinstance(value, Reference) and value.kind == "input":
            return value.name
    raise InputError(
        f"{graph.name} has no input for the number of pictures: add one, such as batch, "
        "and num_images: $batch to its encode_prompt stage"
    )


def options_by_stage(graph: Graph, texts: Iterable[str]) -> dict[str, str]:
    """The stage options in ``texts``, ``STAGE=OPTION`` each, by stage. Raises InputError for an
    unknown stage or option."""
    found = {}
    stages = {stage.name: stage for stage in graph.stages}
    for text in strings(texts):
        name, _, option = text.partition("=")
        if name not in stages:
            raise InputError(
                f"option {text}: no such stage{did_you_mean(name, stages)}; write STAGE=OPTION"
            )
        known = stages[name].operation.options
        if option not in known:
            raise InputError(
                f"option {text}: {stages[name].op} has {', '.join(known) or 'no options'}"
            )
        found[name] = option
    return found
