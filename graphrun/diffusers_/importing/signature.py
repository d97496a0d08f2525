"""Inputs of an imported graph, from the signature and the checks of the pipeline's call.

If the signature leaves a default to the code (``height=None``), the default is the value of the
local variable of that name in a dry run. A size's divisor and a length's maximum come from the
checks in the class's source.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from graphrun.errors import InputError
from graphrun.graph.values import did_you_mean
from graphrun.ops.modular import blocks_in, is_modular_class

# input name by parameter of a call; other inputs have the name of their parameter
NAMES = {
    "num_inference_steps": "steps",
    "num_frames": "frames",
    "num_images_per_prompt": "batch",
    "num_videos_per_prompt": "batch",
}
PARAMETERS = {"num_waveforms_per_prompt": "batch"} | NAMES
NAMED_SIZES = ("height", "width", "num_frames")
BOUNDED = ("max_sequence_length",)
# parameters that take pictures, videos and sound, by patterns for their names
MEDIA = {
    "mask": r"(^|_)masks?(_|$)",
    "video": r"(^|_)video(_|$)|^conditioning_frames$",
    "audio": r"(^|_)audio$",
    "image": r"(^|_)images?$",
}
NOT_MEDIA = re.compile(
    r"embeds|latents|attention|ip_adapter|per_prompt|_in_s$|_length|guidance|scale|processing|noise|fps"
)
# annotations of parameters that take tensors, such as embeddings from another pipeline
TENSOR = re.compile(r"\bTensor\b")
# sizes of media inputs, which users may set if the call has no such parameters
MEDIA_SIZES = ("height", "width", "frames", "rate", "seconds")


@dataclass(frozen=True, slots=True)
class InputParameter:
    """An input: its parameter (``generator`` for a seed), and its entry in the graph file."""

    parameter: str
    entry: Mapping[str, Any]

    @property
    def default(self) -> Any:
        """The default of the input; None if a run must set it."""
        return self.entry.get("default")


def call_parameters(pipeline: Any, workflow: str = "") -> Mapping[str, inspect.Parameter]:
    """Return the parameters of ``pipeline``'s call by name; if modular, the inputs of its blocks.

    A block's input has no default if it selects ``workflow``, or if it is a prompt or media that
    the blocks require.
    """
    if not is_modular_class(type(pipeline)):
        return inspect.signature(type(pipeline).__call__).parameters
    key_parameters = (pipeline._blocks._workflow_map or {}).get(workflow, ())
    if isinstance(key_parameters, tuple):  # other inputs may select the same blocks
        key_parameters = next(iter(key_parameters), ())
    parameters: dict[str, inspect.Parameter] = {}
    for block_input in pipeline._blocks.inputs:
        if block_input.name:
            is_required = block_input.name in key_parameters or (
                block_input.required
                and (block_input.name == "prompt" or media_kind(block_input.name))
            )
            default = inspect.Parameter.empty if is_required else block_input.default
            parameters[block_input.name] = inspect.Parameter(
                block_input.name, inspect.Parameter.KEYWORD_ONLY, default=default
            )
    return parameters


def media_kind(name: str) -> str | None:
    """Return the kind of media of a parameter: image, mask, video or audio; else None."""
    if NOT_MEDIA.search(name):
        return None
    return next((kind for kind, pattern in MEDIA.items() if re.search(pattern, name)), None)


def tensor_shapes(
    parameters: Mapping[str, inspect.Parameter], input_defaults: Mapping[str, Any]
) -> dict[str, list[int]]:
    """Return the shapes in ``input_defaults`` of tensors that ``parameters`` take, by name."""
    return {
        name: value
        for name, value in input_defaults.items()
        if name in parameters
        and TENSOR.search(str(parameters[name].annotation))
        and media_kind(name) is None
        if isinstance(value, list)
        and value
        and all(isinstance(size, int) and size > 0 for size in value)
    }


def plain_inputs(
    kind: type[Any], pipeline: Any, local_values: Mapping[str, Any]
) -> dict[str, InputParameter]:
    """Return the plain inputs of ``pipeline``'s call by name: texts, sizes, counts, scales.

    ``local_values``: of the call's local variables in a dry run, for sizes without a default. Sizes
    that are in neither are omitted.
    """
    parameters = call_parameters(pipeline)
    inputs: dict[str, InputParameter] = {}
    for parameter in INPUT_ORDER:
        if parameter not in parameters:
            continue
        default = parameters[parameter].default
        if default in (None, inspect.Parameter.empty):
            default = local_values.get(parameter) if parameter in NAMED_SIZES else None
        entry = _entry(kind, pipeline, parameter, default)
        name = PARAMETERS.get(parameter, "seed" if parameter == "generator" else parameter)
        if entry is not None and name not in inputs:
            inputs[name] = InputParameter(parameter, entry)
    return inputs


INPUT_ORDER = (
    "prompt",
    "negative_prompt",
    "height",
    "width",
    "num_frames",
    "frames",
    "num_images_per_prompt",
    "num_videos_per_prompt",
    "num_waveforms_per_prompt",
    "num_inference_steps",
    "guidance_scale",
    "true_cfg_scale",
    "strength",
    "generator",
    "max_sequence_length",
)


# more parameters that become inputs if the call runs in one stage, with the pipeline's defaults
FURTHER_INPUTS = re.compile(
    r"num_inference_steps$|guidance_scale(_\d)?$|num_frames$|conditioning_scale$|^noise_level$|^fps$"
)


def further_inputs(
    parameters: Mapping[str, inspect.Parameter], inputs: Mapping[str, InputParameter]
) -> dict[str, InputParameter]:
    """Return numeric inputs of a call in one stage, besides `plain_inputs`: the steps of a prior, a
    second guidance scale."""
    parameter_names = {input_spec.parameter for input_spec in inputs.values()}
    extra_inputs: dict[str, InputParameter] = {}
    for name, parameter in parameters.items():
        default = parameter.default
        if (
            name not in parameter_names
            and FURTHER_INPUTS.search(name)
            and isinstance(default, (int, float))
            and not isinstance(default, bool)
        ):
            extra_inputs[name] = InputParameter(
                name, {"type": type(default).__name__, "default": default}
            )
    return extra_inputs


def set_inputs(
    kind: type[Any],
    parameters: Mapping[str, inspect.Parameter],
    inputs: Mapping[str, InputParameter],
    input_defaults: Mapping[str, Any],
) -> dict[str, InputParameter]:
    """Return ``inputs`` with the defaults in ``input_defaults``.

    Other ``parameters`` of the call with a default there become inputs too. Raises InputError for a
    name that is not a parameter of the call.
    """
    result = dict(inputs)
    for name in inputs.keys() & input_defaults.keys():
        entry = {key: value for key, value in inputs[name].entry.items() if key != "optional"}
        result[name] = replace(inputs[name], entry=entry | {"default": input_defaults[name]})
    parameter_names = {input_spec.parameter for input_spec in inputs.values()} | {"self"}
    for name, value in input_defaults.items():
        if name in inputs or (name in MEDIA_SIZES and name not in parameters):
            continue
        parameter = next(
            (
                key
                for key, input_name in PARAMETERS.items()
                if input_name == name and key in parameters
            ),
            name,
        )
        if parameter not in parameters or parameter in parameter_names:
            raise InputError(
                f"--set {name}: {kind.__name__} takes no such "
                f"argument{did_you_mean(name, [*inputs, *parameters])}"
            )
        if isinstance(value, (bool, int, float, str)):
            result[name] = InputParameter(
                parameter, {"type": type(value).__name__, "default": value}
            )
    return result


def _entry(kind: type[Any], pipeline: Any, parameter: str, default: Any) -> dict[str, Any] | None:
    if parameter == "prompt":
        return {"type": "str"}
    if parameter == "negative_prompt":
        # without it, pipelines use their own negative text or none
        return {
            "type": "str",
            "optional": True,
        }
    if parameter == "generator":
        return {"type": "int", "default": 0, "minimum": 0}
    if isinstance(default, bool) or not isinstance(default, (int, float)):
        return None
    if parameter in ("guidance_scale", "true_cfg_scale", "strength"):
        return {"type": "float", "default": float(default), "minimum": 0}
    if parameter in ("height", "width"):
        step = divisor(kind, pipeline, parameter)
        # a default that fails the check means that the code resizes
        step = 1 if default % step else step
        return {
            "type": "int",
            "default": default,
            **({"multiple_of": step} if step > 1 else {"minimum": 1}),
        }
    entry: dict[str, Any] = {"type": "int", "default": default, "minimum": 1}
    if parameter in BOUNDED and (bound := maximum(kind, pipeline, parameter)) is not None:
        entry["maximum"] = bound
    return entry


def divisor(kind: type[Any], pipeline: Any, name: str) -> int:
    """Return the number of which argument ``name`` must be a multiple: the largest divisor in the
    class's checks, else the VAE's scale factor, else 1."""
    scale_factor = (
        getattr(pipeline, "vae_scale_factor", 0)
        or getattr(pipeline, "vae_scale_factor_spatial", 0)
        or 1
    )
    divisors = _numbers(kind, pipeline, name, (ast.Mod, ast.FloorDiv)) or [scale_factor]
    return max(number for number in (1, *divisors) if number > 0)


def maximum(kind: type[Any], pipeline: Any, name: str) -> int | None:
    """Return the largest value of ``name`` that the class's checks accept; None without a check."""
    return min(_numbers(kind, pipeline, name, (ast.Gt,)), default=None)


def _numbers(
    kind: type[Any], pipeline: Any, name: str, operators: tuple[type[Any], ...]
) -> list[int]:
    """Return ``N`` of every ``name OPERATOR N`` in the class's checks and call.

    ``name`` may be an attribute (a value in a block's state). ``N`` may be a number, a product, a
    floor division, an attribute of the pipeline, or a variable assigned from these.
    """
    classes = (
        [kind]
        if not is_modular_class(kind)
        else list(dict.fromkeys(map(type, blocks_in(pipeline._blocks))))
    )
    methods = [
        getattr(owner, method, None) for owner in classes for method in ("check_inputs", "__call__")
    ]
    sources = (
        textwrap.dedent(inspect.getsource(inspect.unwrap(method)))
        for method in methods
        if method is not None
    )
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    assignments = {
        node.targets[0].id: node.value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    values: list[Any] = []
    for node in nodes:
        match node:
            case (
                ast.BinOp(left=operand, op=operator, right=number)
                | ast.Compare(left=operand, ops=[operator, *_], comparators=[number, *_])
            ) if isinstance(operator, operators) and name in (
                getattr(operand, "id", ""),
                getattr(operand, "attr", ""),
            ):
                with suppress(AttributeError, TypeError, KeyError, ValueError):
                    values.append(
                        _value(
                            assignments.get(number.id, number)
                            if isinstance(number, ast.Name)
                            else number,
                            pipeline,
                        )
                    )
    return [number for number in values if isinstance(number, int)]


def _value(node: ast.AST, pipeline: Any) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in ("self", "components"):
        return pipeline
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, pipeline), node.attr)
    if isinstance(node, ast.Subscript):
        return _value(node.value, pipeline)[_value(node.slice, pipeline)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.FloorDiv)):
        operand, right = _value(node.left, pipeline), _value(node.right, pipeline)
        return operand * right if isinstance(node.op, ast.Mult) else operand // right
    raise ValueError(ast.dump(node))
