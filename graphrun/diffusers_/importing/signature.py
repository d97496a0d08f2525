"""Inputs of an imported graph, from the signature of the pipeline's call and the checks in its
code.

Decides names, types, defaults and bounds. A default that the signature leaves to the code
(``height=None``) is the value that a local variable of that name had in a dry run. A size's divisor
and a length's maximum are read from the checks in the class's source.
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

# Input name by parameter of a call. Other inputs have the parameter's own name.
NAMES = {
    "num_inference_steps": "steps",
    "num_frames": "frames",
    "num_images_per_prompt": "batch",
    "num_videos_per_prompt": "batch",
}
PARAMETERS = {"num_waveforms_per_prompt": "batch"} | NAMES
NAMED_SIZES = ("height", "width", "num_frames")
BOUNDED = ("max_sequence_length",)
# Parameters that take pictures, videos and sound, by patterns for their names.
MEDIA = {
    "mask": r"(^|_)masks?(_|$)",
    "video": r"(^|_)video(_|$)|^conditioning_frames$",
    "audio": r"(^|_)audio$",
    "image": r"(^|_)images?$",
}
NOT_MEDIA = re.compile(
    r"embeds|latents|attention|ip_adapter|per_prompt|_in_s$|_length|guidance|scale|processing|noise|fps"
)
# Parameters of which the annotation says that they take tensors: embeddings that another pipeline
# makes.
TENSOR = re.compile(r"\bTensor\b")
# Sizes of media inputs. They may be set whether or not the call has parameters of these names.
MEDIA_SIZES = ("height", "width", "frames", "rate", "seconds")


@dataclass(frozen=True, slots=True)
class InputSpec:
    """An input: the parameter that it is passed as (``generator`` for a seed), and its entry in the
    graph file."""

    parameter: str
    entry: Mapping[str, Any]

    @property
    def default(self) -> Any:
        """The entry's default; None where a run has to set the input."""
        return self.entry.get("default")


def call_parameters(pipeline: Any, workflow: str = "") -> Mapping[str, inspect.Parameter]:
    """The parameters of ``pipeline``'s call by name.

    Those of a modular pipeline are the inputs of its blocks. There, a parameter has no default if
    ``workflow`` is keyed by it, or if it is a prompt or media that the blocks require.
    """
    if not is_modular_class(type(pipeline)):
        return inspect.signature(type(pipeline).__call__).parameters
    about = (pipeline._blocks._workflow_map or {}).get(workflow, ())
    found: dict[str, inspect.Parameter] = {}
    for declared in pipeline._blocks.inputs:
        if declared.name:
            needed = declared.name in about or (
                declared.required and (declared.name == "prompt" or media_kind(declared.name))
            )
            default = inspect.Parameter.empty if needed else declared.default
            found[declared.name] = inspect.Parameter(
                declared.name, inspect.Parameter.KEYWORD_ONLY, default=default
            )
    return found


def media_kind(name: str) -> str | None:
    """The kind of media that a parameter called ``name`` takes: image, mask, video or audio; None
    for anything else."""
    if NOT_MEDIA.search(name):
        return None
    return next((kind for kind, pattern in MEDIA.items() if re.search(pattern, name)), None)


def tensor_shapes(
    parameters: Mapping[str, inspect.Parameter], sets: Mapping[str, Any]
) -> dict[str, list[int]]:
    """The shapes in ``sets`` of the tensors that ``parameters`` take, by name."""
    return {
        name: value
        for name, value in sets.items()
        if name in parameters
        and TENSOR.search(str(parameters[name].annotation))
        and media_kind(name) is None
        if isinstance(value, list)
        and value
        and all(isinstance(size, int) and size > 0 for size in value)
    }


def plain_inputs(kind: type[Any], pipeline: Any, seen: Mapping[str, Any]) -> dict[str, InputSpec]:
    """The plain inputs of ``pipeline``'s call by name: texts, sizes, counts, scales.

    ``seen``: the values that the call's code used in a dry run for sizes without a default. A size
    without either is left out.
    """
    parameters = call_parameters(pipeline)
    found: dict[str, InputSpec] = {}
    for parameter in INPUT_ORDER:
        if parameter not in parameters:
            continue
        default = parameters[parameter].default
        if default in (None, inspect.Parameter.empty):
            default = seen.get(parameter) if parameter in NAMED_SIZES else None
        entry = _entry(kind, pipeline, parameter, default)
        name = PARAMETERS.get(parameter, "seed" if parameter == "generator" else parameter)
        if entry is not None and name not in found:
            found[name] = InputSpec(parameter, entry)
    return found


INPUT_ORDER = (
    "prompt",
    "negative_prompt",
    "height",
    "width",
    "num_frames",
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


# Further parameters that become inputs where the call is run in one stage. Each has the pipeline's
# own default.
FURTHER_INPUTS = re.compile(
    r"num_inference_steps$|guidance_scale(_\d)?$|num_frames$|conditioning_scale$|^noise_level$|^fps$"
)


def further_inputs(
    parameters: Mapping[str, inspect.Parameter], taken: Mapping[str, InputSpec]
) -> dict[str, InputSpec]:
    """Numeric inputs of a call run in one stage besides `plain_inputs`: a prior's steps, a second
    guidance scale."""
    known = {input_spec.parameter for input_spec in taken.values()}
    found: dict[str, InputSpec] = {}
    for name, parameter in parameters.items():
        default = parameter.default
        if (
            name not in known
            and FURTHER_INPUTS.search(name)
            and isinstance(default, (int, float))
            and not isinstance(default, bool)
        ):
            found[name] = InputSpec(name, {"type": type(default).__name__, "default": default})
    return found


def set_inputs(
    kind: type[Any],
    parameters: Mapping[str, inspect.Parameter],
    plain: Mapping[str, InputSpec],
    sets: Mapping[str, Any],
) -> dict[str, InputSpec]:
    """``plain`` with the defaults in ``sets``. Other ``parameters`` of the call that are set there
    become inputs too.

    Raises InputError for a name that is not a parameter of the call.
    """
    found = dict(plain)
    for name in plain.keys() & sets.keys():
        entry = {key: value for key, value in plain[name].entry.items() if key != "optional"}
        found[name] = replace(plain[name], entry=entry | {"default": sets[name]})
    taken = {input_spec.parameter for input_spec in plain.values()} | {"self"}
    for name, value in sets.items():
        if name in plain or name in MEDIA_SIZES:
            continue
        parameter = next(
            (key for key, own in PARAMETERS.items() if own == name and key in parameters), name
        )
        if parameter not in parameters or parameter in taken:
            raise InputError(
                f"--set {name}: {kind.__name__} takes no such argument{did_you_mean(name, [*plain, *parameters])}"
            )
        if isinstance(value, (bool, int, float, str)):
            found[name] = InputSpec(parameter, {"type": type(value).__name__, "default": value})
    return found


def _entry(kind: type[Any], pipeline: Any, parameter: str, default: Any) -> dict[str, Any] | None:
    if parameter == "prompt":
        return {"type": "str"}
    if parameter == "negative_prompt":
        # pipelines have texts of their own, or none, where it is left out
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
        # the code has another size than its checks ask for: it resizes
        step = 1 if default % step else step
        return {
            "type": "int",
            "default": default,
            **({"multiple_of": step} if step > 1 else {"minimum": 1}),
        }
    entry: dict[str, Any] = {"type": "int", "default": default, "minimum": 1}
    if parameter in BOUNDED and (most := maximum(kind, pipeline, parameter)) is not None:
        entry["maximum"] = most
    return entry


def divisor(kind: type[Any], pipeline: Any, name: str) -> int:
    """The number that the argument ``name`` must be a multiple of: the largest divisor in the
    class's checks.

    Without such a check it is the VAE's scale factor, or 1.
    """
    usual = (
        getattr(pipeline, "vae_scale_factor", 0)
        or getattr(pipeline, "vae_scale_factor_spatial", 0)
        or 1
    )
    found = _numbers(kind, pipeline, name, (ast.Mod, ast.FloorDiv)) or [usual]
    return max(number for number in (1, *found) if number > 0)


def maximum(kind: type[Any], pipeline: Any, name: str) -> int | None:
    """The largest value of ``name`` that the class's checks accept; None where there is no
    check."""
    return min(_numbers(kind, pipeline, name, (ast.Gt,)), default=None)


def _numbers(
    kind: type[Any], pipeline: Any, name: str, operators: tuple[type[Any], ...]
) -> list[int]:
    """``N`` of every ``name OPERATOR N`` in the class's checks and call. ``name`` may be an
    attribute (a value in a block's state).

    ``N`` consists of numbers, products, floor divisions, attributes of the pipeline, and variables
    assigned from these.
    """
    kinds = (
        [kind]
        if not is_modular_class(kind)
        else list(dict.fromkeys(map(type, blocks_in(pipeline._blocks))))
    )
    methods = [
        getattr(owner, method, None) for owner in kinds for method in ("check_inputs", "__call__")
    ]
    sources = (
        textwrap.dedent(inspect.getsource(inspect.unwrap(method)))
        for method in methods
        if method is not None
    )
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    assigned = {
        node.targets[0].id: node.value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    found: list[Any] = []
    for node in nodes:
        match node:
            case (
                ast.BinOp(left=left, op=operator, right=number)
                | ast.Compare(left=left, ops=[operator, *_], comparators=[number, *_])
            ) if isinstance(operator, operators) and name in (
                getattr(left, "id", ""),
                getattr(left, "attr", ""),
            ):
                with suppress(AttributeError, TypeError, KeyError, ValueError):
                    found.append(
                        _value(
                            assigned.get(number.id, number)
                            if isinstance(number, ast.Name)
                            else number,
                            pipeline,
                        )
                    )
    return [number for number in found if isinstance(number, int)]


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
        left, right = _value(node.left, pipeline), _value(node.right, pipeline)
        return left * right if isinstance(node.op, ast.Mult) else left // right
    raise ValueError(ast.dump(node))
