"""Arguments of a pipeline call: their signature, the key of a plan, and their copy for a dry run.

The signature omits texts and seeds, since pipelines pad most texts to a fixed length. A dry run on
the copy does not change the caller's generators, tensors and callbacks.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn

from graphrun.modules.trees import walk
from graphrun.sim.generators import generator_on


def signature_of(value: Any, texts: bool = False) -> Any:
    """Return a hashable signature of ``value``: shapes, sizes, types, counts and plain numbers.
    ``texts``: include the content of strings. Arguments with equal signatures share a plan."""
    if isinstance(value, torch.Tensor):
        return "tensor", tuple(value.shape), str(value.dtype), value.device.type
    if isinstance(value, str):
        return ("text", value) if texts else "text"
    if isinstance(value, Mapping):
        return tuple((str(key), signature_of(item, texts)) for key, item in value.items())
    if isinstance(value, (list, tuple, deque)):
        return type(value).__name__, tuple(signature_of(item, texts) for item in value)
    if isinstance(value, (bool, int, float, type(None))):
        return value
    kind = type(value).__name__
    if isinstance(value, torch.Generator):
        return kind, value.device.type
    if hasattr(value, "shape"):
        return kind, tuple(value.shape), str(getattr(value, "dtype", ""))
    if hasattr(value, "size") and hasattr(value, "mode"):  # a PIL image
        return kind, value.size, value.mode
    if is_dataclass(value) and not isinstance(value, type):
        return kind, signature_of(vars(value), texts)
    return kind


def copy_for_dry_run(
    value: Any,
    device: torch.device,
    meta_modules_by_id: Mapping[int, Any],
    *,
    unified: bool = False,
) -> Any:
    """Return a copy of ``value`` for a dry run on ``device``.

    Tensors on an accelerator go to ``device``; if the planned device is the CPU (``unified``),
    tensors on the CPU too. CPU generators are copied with their state, others without. A module is
    replaced by its meta module (``meta_modules_by_id``: by the id of the live module), a callback
    by `no_op_callback`.
    """

    def copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu" and not unified:
            return tensor.clone()
        return tensor.cpu().to(device)

    def copy(value: Any) -> Any:
        match value:
            case torch.Generator():
                if value.device.type != "cpu":
                    return generator_on(device)
                twin = torch.Generator("cpu")
                twin.set_state(value.get_state())
                return twin
            case nn.Module():
                return meta_modules_by_id.get(id(value), value)
            case types.FunctionType() | types.MethodType():
                return no_op_callback
            case tuple():
                items = map(copy, value)
                return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
            case list():
                return [copy(item) for item in value]
            case dict() if type(value) is dict:
                return {key: copy(item) for key, item in value.items()}
        return walk(value, copy_tensor)

    return copy(value)


def no_op_callback(*args: Any, **kwargs: Any) -> Any:
    """Return the dict of tensors in ``args``, as a step-end callback that changes nothing."""
    return next((value for value in reversed(args) if isinstance(value, dict)), {})


def describe_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the arguments of a call as text for error messages: tensors as dtype and shape, other
    objects as type names."""
    texts = [_argument_text(value) for value in args] + [
        f"{name}={_argument_text(value)}" for name, value in kwargs.items()
    ]
    return ", ".join(texts)


def _argument_text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    return type(value).__name__
