"""Options of a command line as graphs, inputs and rates: precisions, number of pictures, stage
options, kernels of attention."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from graphrun.errors import InputError
from graphrun.graph.graph import Graph
from graphrun.graph.parts import Reference
from graphrun.graph.precisions import QUANTIZED, is_published_only
from graphrun.graph.values import did_you_mean, strings
from graphrun.model.hardware import Hardware, KernelRates

DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    **{name: name for name in ("bfloat16", "float16", "float32")},
}
# Weight-only formats of other libraries, which `graphrun.survey` estimates and graphrun does not
# run: bytes of scales per output feature, next to one byte per weight. torchao's int8_weight_only
# (16-bit scale, 64-bit zero point), float8_weight_only and float8_dynamic_activation (fp32 scale),
# quanto's qint8 and qfloat8 (16-bit scale). They convert every linear layer, as `quantize_` does.
# LAYERWISE is diffusers' `enable_layerwise_casting` in fp8.
LAYERWISE = "layerwise"
FORMATS = {"int8wo": 10, "fp8wo": 4, "fp8dq": 4, "quanto": 2, LAYERWISE: 0}

SAGE_FACTOR, FA3_FLOPS_PER_SECOND = 2.1, 740e12
# kernel of attention in place of PyTorch's -> its rate, with the source
ATTENTION = {
    "sage": f"{SAGE_FACTOR} times PyTorch's rate (arXiv 2410.02367: FlashAttention 2's on an RTX "
    "4090)",
    "fa3": f"{FA3_FLOPS_PER_SECOND / 1e12:g} TFLOP/s (arXiv 2407.08608, H100)",
}

# op -> argument with the number of pictures
COUNTS = {"encode_prompt": "num_images", "call": "num_images_per_prompt"}


def with_precisions(graph: Graph, texts: Iterable[str]) -> tuple[Graph, dict[str, str]]:
    """Return ``graph`` in the precisions of ``texts``, and formats by component.

    Each text is ``PRECISION`` or ``COMPONENT=PRECISION``. The formats of other libraries
    (`FORMATS`) are returned separately. Without a component, a 16-bit dtype applies to all
    components that the graph has in 16 bits, fp32 to all components, and a quantized precision or a
    format to all components for which the graph lists a quantized precision. Raises InputError for
    anything else.
    """
    components, formats = dict(graph.components), dict[str, str]()
    for text in strings(texts):
        component_name, _, precision_name = text.rpartition("=")
        precision = DTYPES.get(precision_name, precision_name)
        formats_of_files = [name for name in QUANTIZED if not is_published_only(name)]
        choices = list(dict.fromkeys((*DTYPES, *formats_of_files, *FORMATS)))
        if precision_name not in choices:
            raise InputError(
                f"precision {precision_name!r} is not known: it is one of {', '.join(choices)}"
                f"{did_you_mean(precision_name, choices)}"
            )
        if component_name and component_name not in components:
            raise InputError(
                f"precision {text}: no such component{did_you_mean(component_name, components)}"
            )
        for name in (
            [component_name]
            if component_name
            else [name for name in components if _applies_to(graph, name, precision)]
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


def _applies_to(graph: Graph, name: str, precision: str) -> bool:
    """Return whether a precision without a component applies to the component ``name``."""
    component = graph.components[name]
    if precision in QUANTIZED or precision in FORMATS:
        return any(candidate in QUANTIZED for candidate in component.precision)
    return precision == "float32" or component.dtype != "float32"


def with_attention(hardware: Hardware, name: str) -> Hardware:
    """Return ``hardware`` with the rate of the attention kernel ``name`` of `ATTENTION`.

    The rates are of whole kernels, exponentials included. Masks and memory stay as PyTorch's.
    Raises InputError for another name, and for hardware without the kernel.
    """
    rates = hardware.kernels
    if name not in ATTENTION:
        raise InputError(f"attention {name!r} is not known{did_you_mean(name, ATTENTION)}")
    if not isinstance(rates, KernelRates) or (name == "fa3" and not hardware.is_hopper):
        cards = "H100 and H200" if name == "fa3" else "NVIDIA's cards"
        raise InputError(f"attention {name}: the kernel is for {cards}, not for {hardware.name}")
    flops, exponentials = FA3_FLOPS_PER_SECOND, math.inf
    if name == "sage":
        flops = SAGE_FACTOR * rates.attention_flops_per_second
        exponentials = SAGE_FACTOR * rates.exponentials_per_second
    kernels = replace(rates, attention_flops_per_second=flops, exponentials_per_second=exponentials)
    return replace(hardware, kernels=kernels)


def pictures_input(graph: Graph) -> str:
    """Return the name of the input with the number of pictures. Raises InputError."""
    for stage in graph.stages:
        value = stage.arguments.get(COUNTS.get(stage.op, ""))
        if isinstance(value, Reference) and value.kind == "input":
            return value.name
    raise InputError(
        f"{graph.name} has no input for the number of pictures: add one, such as batch, "
        "and num_images: $batch to its encode_prompt stage"
    )


def options_by_stage(graph: Graph, texts: Iterable[str]) -> dict[str, str]:
    """Return the stage options in ``texts`` (``STAGE=OPTION``). Raises InputError."""
    options = {}
    stages = {stage.name: stage for stage in graph.stages}
    for text in strings(texts):
        name, _, option = text.partition("=")
        if name not in stages:
            raise InputError(
                f"option {text}: no such stage{did_you_mean(name, stages)}; write STAGE=OPTION"
            )
        choices = stages[name].operation.options
        if option not in choices:
            raise InputError(
                f"option {text}: {stages[name].op} has {', '.join(choices) or 'no options'}"
            )
        options[name] = option
    return options
