"""Ops of trusted packages: runs a function that `graphrun.op` declares, with values, components and
parts by its parameters' names.

with: {image: $decode.image, amount: 0.5}, uses: [vae]      sharpen(image, vae, amount=0.5) ->
{"image": ...}
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from graphrun.errors import GraphError
from graphrun.graph.graph import Stage
from graphrun.graph.ops import DECLARED
from graphrun.graph.values import did_you_mean
from graphrun.modules.trees import tensors_in, walk
from graphrun.ops.modular import fresh


def call_function(
    run: Callable[..., Mapping[str, Any]],
    stage: Stage,
    arguments: Mapping[str, Any],
    components: Mapping[str, Any],
    parts: Mapping[str, Any],
    device: torch.device,
) -> dict[str, Any]:
    """The outputs of ``run`` that the graph reads of ``stage``, by name. Schedulers among ``parts``
    are new ones.

    Raises GraphError at the stage's line for arguments that are missing, unknown, or not of the
    annotated class, for outputs that it does not return, and for tensors that it changes in place
    without declaring it.
    """
    known, hints = inspect.signature(run).parameters, typing.get_type_hints(run)
    given: dict[str, Any] = {**components, **arguments}
    for name in given:
        if name not in known:
            key = f"with.{name}" if name in arguments else f"uses {name}"
            _refuse(
                stage, f"{key}: {stage.op} has no parameter {name!r}{did_you_mean(name, known)}"
            )
    changes: frozenset[str] = getattr(run, DECLARED)
    given |= {
        name: walk(given[name], torch.Tensor.clone) for name in sorted(changes & given.keys())
    }
    given |= {name: fresh(part) for name, part in parts.items() if name in known}
    given |= {"device": device} if "device" in known else {}
    if missing := [
        name for name, of in known.items() if name not in given and of.default is of.empty
    ]:
        _refuse(
            stage,
            f"{stage.op} needs {', '.join(missing)}: values belong to with:, components to uses:",
        )
    for name, value in given.items():
        if not _is(value, hints.get(name, Any)):
            _refuse(
                stage, f"{name}: {stage.op} takes {hints[name]}, and it is a {type(value).__name__}"
            )
    before = [
        (name, tensor, tensor._version)
        for name in arguments
        if name not in changes
        for tensor in tensors_in(given[name])
    ]
    made = run(**given)
    for name, tensor, version in before:
        if tensor._version != version:
            what = f"declare it with @graphrun.op(changes=[{name!r}]), which gives it a copy"
            _refuse(
                stage, f"{stage.op} changes {name} in place, which other stages may read: {what}"
            )
    if not isinstance(made, Mapping):
        _refuse(
            stage,
            f"{stage.op} returns a {type(made).__name__}: return its outputs by name, such as {{'image': image}}",
        )
    for name in stage.outputs:
        if name not in made:
            _refuse(stage, f"{stage.op} returns no {name}{did_you_mean(name, made)}")
    return {name: made[name] for name in stage.outputs}


def _is(value: Any, hint: Any) -> bool:
    """Whether ``value`` is an instance of what ``hint`` annotates; True where that is no class. An
    int is a float too."""
    if hint is Any:  # a class that refuses isinstance
        return True
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_is(value, each) for each in typing.get_args(hint))
    kind = typing.get_origin(hint) or hint
    return (
        not isinstance(kind, type)
        or isinstance(value, kind)
        or (kind is float and isinstance(value, int))
    )


def _refuse(stage: Stage, text: str) -> NoReturn:
    raise GraphError(f"stages.{stage.name}: {text}", stage.where)
