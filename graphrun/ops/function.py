"""Ops of trusted packages: functions that `graphrun.op` registers.

Values, components and parts are passed by the names of the function's parameters.

    with: {image: $decode.image, amount: 0.5}, uses: [vae]
    -> sharpen(image, vae, amount=0.5) -> {"image": ...}
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from graphrun.errors import GraphError
from graphrun.graph.ops import DECLARED
from graphrun.graph.parts import Stage
from graphrun.graph.values import did_you_mean
from graphrun.modules.trees import tensors_in, walk
from graphrun.ops.modular import recreate


def call_function(
    run: Callable[..., Mapping[str, Any]],
    stage: Stage,
    arguments: Mapping[str, Any],
    components: Mapping[str, Any],
    parts: Mapping[str, Any],
    device: torch.device,
) -> dict[str, Any]:
    """Return by name the outputs of ``run`` that the graph reads from ``stage``.

    ``run`` gets new schedulers, made from those in ``parts``. Raises GraphError at the stage's line
    for arguments that are missing, unknown, or not of the annotated class, for missing outputs, and
    for tensors that ``run`` changes in place without declaring it.
    """
    parameters, hints = inspect.signature(run).parameters, typing.get_type_hints(run)
    values: dict[str, Any] = {**components, **arguments}
    for name in values:
        if name not in parameters:
            key = f"with.{name}" if name in arguments else f"uses {name}"
            _refuse(
                stage,
                f"{key}: {stage.op} has no parameter {name!r}{did_you_mean(name, parameters)}",
            )
    changes: frozenset[str] = getattr(run, DECLARED)
    values |= {
        name: walk(values[name], torch.Tensor.clone) for name in sorted(changes & values.keys())
    }
    values |= {name: recreate(part) for name, part in parts.items() if name in parameters}
    values |= {"device": device} if "device" in parameters else {}
    if missing_names := [
        name
        for name, parameter in parameters.items()
        if name not in values and parameter.default is parameter.empty
    ]:
        _refuse(
            stage,
            f"{stage.op} needs {', '.join(missing_names)}: values belong to with:, components to "
            "uses:",
        )
    for name, value in values.items():
        if not _is_instance(value, hints.get(name, Any)):
            _refuse(
                stage, f"{name}: {stage.op} takes {hints[name]}, and it is a {type(value).__name__}"
            )
    versions = [
        (name, tensor, tensor._version)
        for name in arguments
        if name not in changes
        for tensor in tensors_in(values[name])
    ]
    outputs = run(**values)
    for name, tensor, version in versions:
        if tensor._version != version:
            suggestion = f"declare it with @graphrun.op(changes=[{name!r}]), which gives it a copy"
            _refuse(
                stage,
                f"{stage.op} changes {name} in place, which other stages may read: {suggestion}",
            )
    if not isinstance(outputs, Mapping):
        _refuse(
            stage,
            f"{stage.op} returns a {type(outputs).__name__}: return its outputs by name, such as "
            f"{{'image': image}}",
        )
    for name in stage.outputs:
        if name not in outputs:
            _refuse(stage, f"{stage.op} returns no {name}{did_you_mean(name, outputs)}")
    return {name: outputs[name] for name in stage.outputs}


def _is_instance(value: Any, hint: Any) -> bool:
    """Return whether ``value`` matches the annotation ``hint``, if that has a class. Ints are
    floats."""
    if hint is Any:  # a class that refuses isinstance
        return True
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_is_instance(value, member) for member in typing.get_args(hint))
    kind = typing.get_origin(hint) or hint
    return (
        not isinstance(kind, type)
        or isinstance(value, kind)
        or (kind is float and isinstance(value, int))
    )


def _refuse(stage: Stage, text: str) -> NoReturn:
    raise GraphError(f"stages.{stage.name}: {text}", stage.file_line)
